"""Derivatives of the force operators by autograd and torch.func, in every mode, to third order. None
is lost silently."""

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
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward

# Options of gradcheck for first derivatives, and of gradgradcheck for second ones.
MODES = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
SECOND = dict(check_fwd_over_rev=True, check_batched_grad=True)


def test_the_list_of_these_tests_has_an_empty_slot_a_ghost_a_self_image_and_a_repeat():
    list_neigh = pairs(**SMALL)[0]
    empty, ghost = -1, 2
    centre = torch.arange(2)[:, None]
    for entry in (empty, ghost, centre):
        assert (list_neigh == entry).any()
    rows = [row[row >= 0] for row in list_neigh.flatten(0, 1)]
    assert any(len(row) > len(row.unique()) for row in rows)


@pytest.mark.parametrize("nghost", [0, 1])
def test_first_derivatives_are_right_in_every_mode(device, nghost):
    list_neigh, *leaves = differentiable_pairs(**{**SMALL, "nghost": nghost}, device=device)
    assert gradcheck(lambda *x: force_virial(list_neigh, *x, nghost), leaves, **MODES)
    assert gradcheck(lambda *x: force(list_neigh, *x, nghost), leaves[:2], **MODES)


def test_second_derivatives_of_force_are_right(device):
    list_neigh, dE, Ri_d, _ = differentiable_pairs(**SMALL, device=device)
    for op in (force, neighbor_force):
        assert gradgradcheck(lambda *x, op=op: op(list_neigh, *x, 1), (dE, Ri_d), **SECOND)


@pytest.mark.parametrize("center", [True, False])
def test_third_derivatives_are_right(device, center):
    list_neigh, *leaves = differentiable_pairs(
        frames=1, natoms=2, nghost=1, neighbors=2, device=device
    )
    upstream = [torch.randn_like(x).requires_grad_() for x in force_virial(list_neigh, *leaves, 1)]

    def function(*x):
        return backward(*x[:3], list_neigh, *x[3:], 1, center, [True] * 3)

    assert gradcheck(function, (*upstream, *leaves), **MODES)
    assert gradgradcheck(function, (*upstream, *leaves), **SECOND)


@pytest.mark.parametrize("output", ["force", "virial", "atom_virial"])
def test_third_derivatives_of_each_output_equal_the_reference(device, output):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    weights = [
        torch.linspace(-1, 2, x.numel(), dtype=x.dtype, device=device).view_as(x) for x in leaves
    ]

    def derivatives(function):
        result = function(list_neigh, *leaves, 1)[("force", "virial", "atom_virial").index(output)]
        scalar = result.sin().sum()
        orders = []
        for _ in range(3):
            gradient = torch.autograd.grad(
                scalar, leaves, create_graph=True, materialize_grads=True
            )
            orders.append(gradient)
            scalar = sum((g * w).sin().sum() for g, w in zip(gradient, weights))
        return orders

    orders = derivatives(force_virial)
    for gradient, expected in zip(orders, derivatives(reference.force_virial), strict=True):
        assert_equal_lists(gradient, expected, rtol=1e-10, atol=1e-10)
    third = dict(zip(("dE", "Ri_d", "Rij"), orders[2], strict=True))
    if output == "force":
        third.pop("Rij")  # the force does not depend on it
    assert all(x.count_nonzero() > 0 for x in third.values())


@pytest.mark.parametrize("flags", list(itertools.product([True, False], repeat=3))[1:-1], ids=str)
def test_any_subset_of_inputs_may_require_grad(device, flags):
    list_neigh, *leaves = pairs(**SMALL, device=device)
    for leaf, flag in zip(leaves, flags):
        leaf.requires_grad_(flag)

    def function(*x):
        return force_virial(list_neigh, *x, 1)

    assert gradcheck(function, leaves, **MODES)
    assert gradgradcheck(function, leaves, **SECOND)
    for result in function(*leaves):
        assert result.requires_grad


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_derivatives_of_strided_and_expanded_inputs_are_right(device, layout):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    if layout == "expanded":  # all atoms and frames share one row of slots
        leaves = [x[:1, :1].detach().requires_grad_() for x in leaves]

    def laid_out(x, size):
        if layout == "expanded":
            return x.expand(3, 2, *size)
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def function(dE, Ri_d, Rij):
        inputs = laid_out(dE, (3, 4)), laid_out(Ri_d, (12, 3)), laid_out(Rij, (3, 3))
        assert not any(x.is_contiguous() for x in inputs)
        results = force_virial(list_neigh, *inputs, 1)
        # gradcheck's upstream gradients are contiguous: laid_out makes strided ones of them.
        return [laid_out(x, x.shape[2:]) if layout == "strided" else x for x in results]

    assert gradcheck(function, leaves, **MODES)
    assert gradgradcheck(function, leaves, **SECOND)
    upstream = [torch.randn(1, 1, 1, dtype=x.dtype, device=device) for x in leaves]
    expanded = [u.view([1] * x.dim()).expand_as(x) for u, x in zip(upstream, function(*leaves))]
    gradients = torch.autograd.grad(function(*leaves), leaves, expanded)
    expected = torch.autograd.grad(function(*leaves), leaves, [x.contiguous() for x in expanded])
    assert_equal_lists(gradients, expected, rtol=0, atol=0)


def test_a_gradient_has_the_shape_of_its_input_in_every_accepted_view(device):
    list_neigh, dE, Ri_d, _ = pairs(neighbors=6, device=device)
    views = [dE.reshape(3, 5, 1, 24).requires_grad_(), Ri_d.view(3, 5, 6, 4, 3).requires_grad_()]
    F = force(list_neigh.view(3, 5, 2, 3), *views, 2)
    gradients = torch.autograd.grad(F.square().sum(), views)
    assert [x.shape for x in gradients] == [x.shape for x in views]


@pytest.mark.parametrize(
    "transform",
    ["hessian", "jacrev jacrev", "linearize", "functionalize"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("jacrev jacfwd", "jacfwd jacfwd")],
)
def test_torch_func_transforms_equal_the_reference(device, transform):
    list_neigh, *leaves = pairs(**SMALL, device=device)

    def apply(operator):
        function = scalar_of(operator, list_neigh)
        tangents = tuple(x.cos() for x in leaves)
        # linearize cannot trace the reference's one_hot; jvp gives the same.
        if transform == "linearize" and operator is force_virial:
            value, linear = torch.func.linearize(function, *leaves)
            return value, linear(*tangents)
        if transform == "linearize":
            return torch.func.jvp(function, tuple(leaves), tangents)
        if transform == "functionalize":
            return torch.func.functionalize(torch.func.grad(function, argnums=(0, 1, 2)))(*leaves)
        for name in reversed(transform.split()):
            function = getattr(torch.func, name)(function, argnums=(0, 1, 2))
        return torch.utils._pytree.tree_leaves(function(*leaves))

    expected = apply(reference.force_virial)
    assert_equal_lists(apply(force_virial), expected, rtol=1e-10, atol=1e-10)


# ---- no derivative is lost silently: the result is right, or the call raises an error ------------


@pytest.fixture
def small(device):
    """Return a small list and its values."""
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    return list_neigh, leaves


CLOSE = dict(rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # some of these are experimental in PyTorch
def test_unsupported_arguments_raise():
    """fuzz.py calls with other dtypes, test_force.py with other shapes."""
    list_neigh, dE, Ri_d, _ = pairs(**SMALL, dtype=torch.float32)
    jagged = torch.nested.nested_tensor([*dE], layout=torch.jagged)
    for other in (dE.to_sparse(), dE.to_mkldnn(), jagged, numpy.ones(dE.shape)):
        with pytest.raises((RuntimeError, TypeError)):
            force(list_neigh, other, Ri_d.requires_grad_(), 1)
    with pytest.raises((RuntimeError, TypeError)):
        force(list_neigh, dE, Ri_d, 1.0)


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


def test_efficient_zero_tensors_are_zero_as_values_and_as_tangents(device):
    list_neigh, dE, Ri_d, Rij = pairs(**SMALL, device=device)
    zeros = [torch._efficientzerotensor(x.shape, dtype=x.dtype, device=device) for x in (dE, Rij)]
    results = force_virial(list_neigh, zeros[0], Ri_d, Rij, 1)
    assert all(x.count_nonzero() == 0 for x in results)
    with forward_ad.dual_level():
        duals = forward_ad.make_dual(dE, dE.cos()), Ri_d, forward_ad.make_dual(Rij, zeros[1])
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


def test_gradients_are_right_after_outputs_were_changed_in_place(small):
    list_neigh, leaves = small

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
    list_neigh, leaves = small

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
    list_neigh, (dE, Ri_d, Rij) = small
    results = force_virial(list_neigh, dE.detach(), Ri_d.detach(), Rij, 1)
    assert all(x.requires_grad for x in results)
    assert force(list_neigh, dE.detach(), Ri_d, 1).requires_grad
    assert not force(list_neigh, dE.detach(), Ri_d.detach(), 1).requires_grad
    with torch.no_grad():
        assert not force(list_neigh, dE, Ri_d, 1).requires_grad
