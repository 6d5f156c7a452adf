"""torch.vmap over the force operators: from the C++ registrations alone, for any subset of inputs
and dimensions."""

import itertools
import random

import pytest
import reference
import torch
from reference import SMALL, assert_equal_lists, neighbor_force, pairs, scalar_of

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def without_fallback():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def stacked(device, size=4):
    """Inputs and upstreams, each with a leading dimension of `size`."""
    stack = [
        torch.stack(x) for x in zip(*(pairs(**SMALL, device=device, seed=s) for s in range(size)))
    ]
    upstream = [torch.randn(size, 3, *shape, 3).to(stack[1]) for shape in ((3,), (3,), (3, 3))]
    return stack, upstream


def assert_vmap_equals_a_loop(op, inputs, batched, dims):
    """inputs: each with a leading dimension; `batched` says which are mapped, at `dims`; the
    others: the first."""
    given = [x.movedim(0, dim) if flag else x[0] for x, flag, dim in zip(inputs, batched, dims)]
    ours = torch.vmap(op, tuple(dim if flag else None for flag, dim in zip(batched, dims)))(*given)
    loop = [
        op(*(x[v] if flag else x[0] for x, flag in zip(inputs, batched)))
        for v in range(len(inputs[0]))
    ]
    if torch.is_tensor(ours):
        ours, loop = [ours], [[x] for x in loop]
    assert_equal_lists(ours, [torch.stack(x) for x in zip(*loop)], rtol=0, atol=0)


def operators():
    yield "force", 3, lambda *x: force(*x, 1)
    yield "_force_virial", 3, lambda *x: neighbor_force(*x, 1)
    yield "force_virial", 4, lambda *x: force_virial(*x, 1)
    yield "_force_virial_backward", 7, lambda *x: backward(*x[4:], *x[:4], 1, True, [True] * 3)


@pytest.mark.parametrize(
    "name, arity, op", list(operators()), ids=[name for name, *_ in operators()]
)
def test_any_subset_of_inputs_and_any_dimension(device, name, arity, op):
    stack, upstream = stacked(device)
    inputs = [*stack, *upstream][:arity]
    choose = random.Random(0)
    for batched in list(itertools.product([True, False], repeat=arity))[:-1]:
        dims = [choose.choice([0, -1, *range(x.dim())]) for x in inputs]
        assert_vmap_equals_a_loop(op, inputs, batched, dims)


@pytest.mark.parametrize("batched", list(itertools.product([0, None], repeat=3))[:-1], ids=str)
def test_gradients_of_any_subset_equal_the_reference(device, batched):
    (list_neigh, *leaves), _ = stacked(device)
    inputs = [x if dim == 0 else x[0] for x, dim in zip(leaves, batched)]
    ours, theirs = (
        torch.vmap(torch.func.grad(scalar_of(function, list_neigh[0]), argnums=(0, 1, 2)), batched)(
            *inputs
        )
        for function in (force_virial, reference.force_virial)
    )
    assert_equal_lists(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_list_is_mapped_with_the_rest_under_grad(device):
    stack, _ = stacked(device)
    gradient = torch.func.grad(lambda *x: scalar_of(force_virial, x[0])(*x[1:]), argnums=(1, 2, 3))
    expected = [torch.stack(x) for x in zip(*(gradient(*x) for x in zip(*stack)))]
    assert_equal_lists(torch.vmap(gradient)(*stack), expected, rtol=1e-12, atol=1e-12)


def test_vmap_of_vmap_over_other_subsets_and_dimensions(device):
    stack, _ = stacked(device, 6)
    grid = [x.unflatten(0, (2, 3)) for x in stack]
    subsets = list(itertools.product([True, False], repeat=4))[:-1]
    for outer, inner in itertools.product(subsets, repeat=2):
        flags = list(zip(grid, outer, inner))
        given = [x if i else x[:, 0] for x, i in zip(grid, inner)]
        given = [x.movedim(0, -1) if o else x[0] for x, o in zip(given, outer)]
        mapped = torch.vmap(lambda *x: force_virial(*x, 1), tuple(0 if i else None for i in inner))
        ours = torch.vmap(mapped, tuple(-1 if o else None for o in outer))(*given)
        for v, w in itertools.product(range(2), range(3)):
            expected = force_virial(*(x[v if o else 0, w if i else 0] for x, o, i in flags), 1)
            assert_equal_lists([x[v, w] for x in ours], expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 1])
def test_a_mapped_dimension_of_no_or_one_element(device, size):
    stack, upstream = stacked(device)
    results = torch.vmap(lambda *x: force_virial(*x, 1))(*(x[:size] for x in stack))
    assert [tuple(x.shape) for x in results] == [
        (size, 3, 3, 3),
        (size, 3, 3, 3),
        (size, 3, 3, 3, 3),
    ]
    function = lambda *x: backward(*x[4:], *x[:4], 1, True, [True, False, True])  # noqa: E731
    results = torch.vmap(function)(*(x[:size] for x in (*stack, *upstream)))
    assert results[0].shape == (size, *stack[1].shape[1:]) and results[2].shape == (
        size,
        *stack[3].shape[1:],
    )
