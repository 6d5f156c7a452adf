"""Derivatives of the force operators where PyTorch might lose one silently.
test_force_by_contract.py compares the others with finite differences."""

import numpy
import pytest
import reference
import torch
from reference import SMALL, assert_equal_lists, differentiable_pairs, pairs, scalar_of
from torch.autograd import forward_ad

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


@pytest.mark.parametrize("transform", ["hessian", "linearize", "functionalize"])
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
        hessian = torch.func.hessian(function, argnums=(0, 1, 2))
        return torch.utils._pytree.tree_leaves(hessian(*leaves))

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


# ---- vmap over nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.filterwarnings("error")
def test_vmap_over_no_or_one_element_gives_results_of_the_right_shape(
    device, size, without_vmap_fallback
):
    inputs = [x[None][:size] for x in pairs(**SMALL, device=device)]
    results = torch.vmap(lambda *x: force_virial(*x, 1))(*inputs)
    shapes = [(size, 3, 3, 3), (size, 3, 3, 3), (size, 3, 3, 3, 3)]
    assert [x.shape for x in results] == shapes

    def gradients(*x):
        return backward(*x, 1, True, [True, False, True])

    of_dE, _, of_Rij = torch.vmap(gradients)(*results, *inputs)
    assert (of_dE.shape, of_Rij.shape) == (inputs[1].shape, inputs[3].shape)
