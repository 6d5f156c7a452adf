"""No derivative of the force operators is lost silently. In every case where one might be lost,
the result is right, or the call raises an error."""

import itertools

import numpy
import pytest
import reference
import torch
from reference import (
    SMALL,
    assert_equal_lists,
    differentiable_pairs,
    neighbor_force,
    pairs,
    scalar_of,
)
from torch.autograd import forward_ad, gradcheck

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


def gradients_of(function, list_neigh, leaves):
    return torch.autograd.grad(scalar_of(function, list_neigh)(*leaves), leaves)


@pytest.fixture
def small(device):
    """Return a small list, its values, and the expected gradients of scalar_of."""
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    return list_neigh, leaves, gradients_of(reference.force_virial, list_neigh, leaves)


CLOSE = dict(rtol=1e-10, atol=1e-10)


# ---- errors --------------------------------------------------------------------------------------


def unsupported(list_neigh, dE, Ri_d):
    jagged = torch.nested.nested_tensor([*dE], layout=torch.jagged)
    return {
        "half": (list_neigh, dE.half(), Ri_d.half(), 1),
        "bfloat16": (list_neigh, dE.bfloat16(), Ri_d.bfloat16(), 1),
        "complex": (list_neigh, dE.to(torch.complex128), Ri_d.to(torch.complex128), 1),
        "mixed": (list_neigh, dE, Ri_d.float(), 1),
        "integer": (list_neigh, dE.long(), Ri_d, 1),
        "sparse": (list_neigh, dE.to_sparse(), Ri_d, 1),
        "mkldnn": (list_neigh, dE.float().to_mkldnn(), Ri_d.float(), 1),
        "nested": (list_neigh, jagged, Ri_d, 1),
        "numpy": (list_neigh, numpy.ones(dE.shape), Ri_d, 1),
        "fractional nghost": (list_neigh, dE, Ri_d, 1.0),
    }


@pytest.mark.filterwarnings("ignore")  # some of these are experimental in PyTorch
def test_unsupported_arguments_raise():
    list_neigh, dE, Ri_d, _ = pairs(**SMALL)
    for kind, arguments in unsupported(list_neigh, dE, Ri_d.requires_grad_()).items():
        with pytest.raises((RuntimeError, TypeError)):
            force(*arguments)
            pytest.fail(f"{kind} was taken")


def test_the_operators_have_no_out_argument(small):
    """A tensor that `out` wrote to would have no autograd history."""
    list_neigh, (dE, Ri_d, _), _ = small
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'out'"):
        force(list_neigh, dE, Ri_d, 1, out=torch.empty(3, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_none_for_a_tensor_is_an_error(device, needs_grad):
    make_inputs = differentiable_pairs if needs_grad else pairs
    list_neigh, *leaves = make_inputs(**SMALL, device=device)
    W = torch.ones(3, 3, 3, dtype=torch.float64, device=device)
    for op, inputs, upstream in (
        (force, [list_neigh, *leaves[:2]], []),
        (neighbor_force, [list_neigh, *leaves[:2]], []),
        (force_virial, [list_neigh, *leaves], []),
        (backward, [list_neigh, *leaves], [None, W, None]),
    ):
        rest = [1, True, [True] * 3] if op is backward else [1]
        for i, name in enumerate(("list_neigh", "dE", "Ri_d", "Rij")[: len(inputs)]):
            without_one = [None if k == i else x for k, x in enumerate(inputs)]
            with pytest.raises(RuntimeError, match=f"expected `{name}` "):
                op(*upstream, *without_one, *rest)


@pytest.mark.parametrize("argument", range(4))
def test_inputs_changed_in_place_before_backward_are_an_error(device, argument):
    list_neigh, *leaves = differentiable_pairs(device=device)
    values = [list_neigh, *(x.clone() for x in leaves)]
    result = scalar_of(lambda *x: force_virial(*x[:-1], 2), values[0])(*values[1:])
    values[argument].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("argument", range(3))
def test_upstreams_changed_in_place_before_the_second_backward_are_an_error(device, argument):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    outputs = force_virial(list_neigh, *leaves, 1)
    upstream = [torch.ones_like(x).requires_grad_() * 2 for x in outputs]
    gradient = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
    upstream[argument].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(x.sum() for x in gradient).backward()


# ---- derivatives ---------------------------------------------------------------------------------


def lazily_negative(x):
    """Return `x` as a tensor whose memory holds -x, with PyTorch's negative bit."""
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    assert torch.equal(negative, x)
    return negative


def test_lazily_negated_tensors_and_efficient_zero_tensors_have_their_values(device):
    list_neigh, *values = pairs(**SMALL, device=device)
    expected = force_virial(list_neigh, *values, 1)
    results = force_virial(list_neigh, *map(lazily_negative, values), 1)
    assert_equal_lists(results, expected, rtol=0, atol=0)
    zero = torch._efficientzerotensor(values[0].shape, dtype=torch.float64, device=device)
    assert all(x.count_nonzero() == 0 for x in force_virial(list_neigh, zero, *values[1:], 1))

    leaves = [x.requires_grad_() for x in values]
    outputs = force_virial(list_neigh, *leaves, 1)
    upstream = [torch.randn_like(x) for x in outputs]
    expected = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    upstream = [lazily_negative(x) for x in upstream]
    gradients = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    assert_equal_lists(gradients, expected, rtol=0, atol=0)

    dE, Ri_d, Rij = (x.detach() for x in values)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(dE, lazily_negative(dE.cos())),
            forward_ad.make_dual(Ri_d, zero.new_zeros(Ri_d.shape)),
            forward_ad.make_dual(
                Rij, torch._efficientzerotensor(Rij.shape, dtype=torch.float64, device=device)
            ),
        ]
        tangents = [forward_ad.unpack_dual(x).tangent for x in force_virial(list_neigh, *duals, 1)]
    expected = force_virial(list_neigh, dE.cos(), Ri_d, Rij, 1)
    assert_equal_lists(tangents, expected, rtol=0, atol=0)


MASKS = [list(mask) for mask in itertools.product([True, False], repeat=3)][:-1]


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("flags", MASKS, ids=str)
def test_derivatives_of_the_backward_operator_are_right_for_any_upstreams_and_output_mask(
    device, flags, center
):
    size = dict(frames=1, natoms=2, nghost=1, neighbors=2)
    list_neigh, *leaves = differentiable_pairs(**size, device=device)
    upstream = [torch.randn_like(x).requires_grad_() for x in force_virial(list_neigh, *leaves, 1)]
    for mask in MASKS:

        def function(*inputs, mask=mask):
            rest = iter(inputs)
            upstreams = [next(rest) if flag else None for flag in flags]
            results = backward(*upstreams, list_neigh, *rest, 1, center, mask)
            return [result for result, flag in zip(results, mask) if flag]

        assert gradcheck(function, [x for x, flag in zip(upstream, flags) if flag] + leaves)


def assert_backward_towards(flags, small):
    """Check that backward(inputs=...) sets the right gradients for the chosen inputs alone."""
    list_neigh, leaves, expected = small
    for x in leaves:
        x.grad = None
    chosen = [x for x, flag in zip(leaves, flags) if flag]
    scalar_of(force_virial, list_neigh)(*leaves).backward(inputs=chosen)
    for x, flag, value in zip(leaves, flags, expected):
        assert (x.grad is not None) == flag
        if flag:
            torch.testing.assert_close(x.grad, value, **CLOSE)


def test_compiled_autograd_compiles_anew_for_another_set_of_inputs(small):
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        for flags in ([True, False, False], [False, True, True], [True, False, False]):
            assert_backward_towards(flags, small)


def test_gradients_are_right_after_outputs_were_changed_in_place(small):
    list_neigh, leaves, _ = small

    def scalar(function):
        results = function(list_neigh, *leaves, 1)
        if function is reference.force_virial:  # expected values: changes of copies
            results = [x.clone() for x in results]
        F, W, atom_W = results
        F[0].mul_(2)
        W.transpose_(1, 2)
        atom_W[:, 1].add_(F[..., None].sum())
        return (F**2).sum() + (W**3).sum() + (atom_W**2).sum()

    gradients = torch.autograd.grad(scalar(force_virial), leaves)
    expected = torch.autograd.grad(scalar(reference.force_virial), leaves)
    assert_equal_lists(gradients, expected, **CLOSE)


def test_forward_mode_is_right_under_reverse_mode_and_under_no_grad(small):
    list_neigh, leaves, _ = small

    def tangents(function):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.detach().cos()) for x in leaves]
            tangents = [forward_ad.unpack_dual(x).tangent for x in function(list_neigh, *duals, 1)]
            return *tangents, *torch.autograd.grad(sum((x**3).sum() for x in tangents), leaves)

    assert_equal_lists(tangents(force_virial), tangents(reference.force_virial), **CLOSE)
    with torch.no_grad(), forward_ad.dual_level():  # no_grad turns off reverse mode only
        dual = forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0]))
        result = forward_ad.unpack_dual(force(list_neigh, dual, leaves[1], 1))
        assert result.tangent.count_nonzero() > 0


def test_results_require_grad_unless_all_inputs_are_detached_or_grad_is_off(small):
    list_neigh, (dE, Ri_d, Rij), _ = small
    results = force_virial(list_neigh, dE.detach(), Ri_d.detach(), Rij, 1)
    assert all(x.requires_grad for x in results)
    assert force(list_neigh, dE.detach(), Ri_d, 1).requires_grad
    assert not force(list_neigh, dE.detach(), Ri_d.detach(), 1).requires_grad
    with torch.no_grad():
        assert not force(list_neigh, dE, Ri_d, 1).requires_grad
