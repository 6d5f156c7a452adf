"""torch.vmap over the force operators, over any subset of inputs and any dimension, with the C++
registrations alone."""

import itertools
import random

import pytest
import reference
import torch
from reference import SMALL, assert_equal_lists, neighbor_force, pairs, scalar_of

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("without_vmap_fallback")]


def stacked(device, size=4):
    """Return inputs and upstreams, each with a leading dimension of `size`."""
    inputs = [pairs(**SMALL, device=device, seed=seed) for seed in range(size)]
    stack = [torch.stack(x) for x in zip(*inputs)]
    upstream = [torch.randn(size, 3, *shape, 3).to(stack[1]) for shape in ((3,), (3,), (3, 3))]
    return stack, upstream


def assert_vmap_equals_a_loop(op, inputs, batched, dims):
    """Compare vmap of `op` with a loop.

    Each input has a leading dimension of items. For the inputs flagged in `batched`, this dimension
    is moved to the position in `dims`, and vmap maps over it. Of the other inputs, the first item
    is taken.
    """
    arguments = [x.movedim(0, dim) if flag else x[0] for x, flag, dim in zip(inputs, batched, dims)]
    in_dims = tuple(dim if flag else None for flag, dim in zip(batched, dims))
    results = torch.vmap(op, in_dims)(*arguments)
    loop = []
    for v in range(len(inputs[0])):
        loop.append(op(*(x[v] if flag else x[0] for x, flag in zip(inputs, batched))))
    if torch.is_tensor(results):
        assert torch.equal(results, torch.stack(loop))
    else:
        assert_equal_lists(results, [torch.stack(x) for x in zip(*loop)], rtol=0, atol=0)


def operators():
    """Yield name, number of tensors and function of each operator."""
    yield "force", 3, lambda *x: force(*x, 1)
    yield "_force_virial", 3, lambda *x: neighbor_force(*x, 1)
    yield "force_virial", 4, lambda *x: force_virial(*x, 1)
    yield "_force_virial_backward", 7, lambda *x: backward(*x[4:], *x[:4], 1, True, [True] * 3)


@pytest.mark.parametrize(
    "name, arity, op", list(operators()), ids=[name for name, *_ in operators()]
)
def test_vmap_over_any_inputs_and_dimensions_equals_a_loop(device, name, arity, op):
    stack, upstream = stacked(device)
    inputs = [*stack, *upstream][:arity]
    draw = random.Random(0)
    for batched in list(itertools.product([True, False], repeat=arity))[:-1]:
        dims = [draw.choice([0, -1, *range(x.dim())]) for x in inputs]
        assert_vmap_equals_a_loop(op, inputs, batched, dims)


@pytest.mark.parametrize("batched", list(itertools.product([0, None], repeat=3))[:-1], ids=str)
def test_gradients_of_any_subset_equal_the_reference(device, batched):
    (list_neigh, *leaves), _ = stacked(device)
    inputs = [x if dim == 0 else x[0] for x, dim in zip(leaves, batched)]

    def gradients(function):
        gradient = torch.func.grad(scalar_of(function, list_neigh[0]), argnums=(0, 1, 2))
        return torch.vmap(gradient, batched)(*inputs)

    expected = gradients(reference.force_virial)
    assert_equal_lists(gradients(force_virial), expected, rtol=1e-10, atol=1e-10)


def test_vmap_of_vmap_over_other_subsets_and_dimensions_equals_a_loop(device):
    stack, _ = stacked(device, 6)
    grid = [x.unflatten(0, (2, 3)) for x in stack]
    subsets = list(itertools.product([True, False], repeat=4))[:-1]
    for outer, inner in itertools.product(subsets, repeat=2):
        # The outer vmap maps over the last dimension, the inner one over the first.
        flags = list(zip(grid, outer, inner))
        arguments = []
        for x, in_outer, in_inner in flags:
            x = x if in_inner else x[:, 0]
            arguments.append(x.movedim(0, -1) if in_outer else x[0])
        inner_dims = tuple(0 if flag else None for flag in inner)
        outer_dims = tuple(-1 if flag else None for flag in outer)
        mapped = torch.vmap(lambda *x: force_virial(*x, 1), inner_dims)
        results = torch.vmap(mapped, outer_dims)(*arguments)
        for v, w in itertools.product(range(2), range(3)):
            items = []
            for x, in_outer, in_inner in flags:
                items.append(x[v if in_outer else 0, w if in_inner else 0])
            expected = force_virial(*items, 1)
            assert_equal_lists([x[v, w] for x in results], expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 1])
def test_vmap_over_no_or_one_element_gives_results_of_the_right_shape(device, size):
    stack, upstream = stacked(device)
    F, W, atom_W = torch.vmap(lambda *x: force_virial(*x, 1))(*(x[:size] for x in stack))
    assert F.shape == (size, 3, 3, 3)
    assert W.shape == (size, 3, 3, 3)
    assert atom_W.shape == (size, 3, 3, 3, 3)

    def gradients(*x):
        return backward(*x[4:], *x[:4], 1, True, [True, False, True])

    gradient_dE, _, gradient_Rij = torch.vmap(gradients)(*(x[:size] for x in (*stack, *upstream)))
    assert gradient_dE.shape == (size, *stack[1].shape[1:])
    assert gradient_Rij.shape == (size, *stack[3].shape[1:])
