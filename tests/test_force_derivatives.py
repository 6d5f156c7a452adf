"""The force operators under autograd and torch.func, to third order, in every mode."""

import itertools

import pytest
import reference
import torch
from reference import assert_equal_lists, differentiable_pairs, pairs
from torch.autograd import gradcheck, gradgradcheck

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward

SMALL = dict(frames=3, natoms=2, nghost=1, neighbors=3)


@pytest.mark.parametrize("nghost", [0, 1])
def test_first_derivatives_in_every_mode(device, nghost):
    list_neigh, *leaves = differentiable_pairs(**{**SMALL, "nghost": nghost}, device=device)
    modes = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradcheck(lambda *x: force_virial(list_neigh, *x, nghost), leaves, **modes)
    assert gradcheck(lambda *x: force(list_neigh, *x, nghost), leaves[:2], **modes)


@pytest.mark.parametrize("output", [0, 1, 2, slice(None)], ids=["force", "virial", "atom_virial", "all"])
def test_second_derivatives_through_each_output(device, output):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    assert gradgradcheck(
        lambda *x: force_virial(list_neigh, *x, 1)[output],
        leaves if output != 0 else leaves[:2] + [leaves[2].detach()],
        check_fwd_over_rev=True,
        check_batched_grad=True,
    )


def test_second_derivatives_of_force(device):
    list_neigh, dE, Ri_d, _ = differentiable_pairs(**SMALL, device=device)
    modes = dict(check_fwd_over_rev=True, check_batched_grad=True)
    assert gradgradcheck(lambda *x: force(list_neigh, *x, 1), (dE, Ri_d), **modes)


def test_third_derivatives(device):
    list_neigh, *leaves = differentiable_pairs(frames=1, natoms=2, nghost=1, neighbors=2, device=device)
    upstream = [torch.randn_like(x).requires_grad_() for x in force_virial(list_neigh, *leaves, 1)]
    function = lambda *x: backward(*x[:3], list_neigh, *x[3:], 1, True, [True] * 3)  # noqa: E731
    assert gradgradcheck(function, (*upstream, *leaves), check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3))[:-1], ids=str)
def test_any_subset_of_inputs_may_require_grad(device, wanted):
    list_neigh, *leaves = pairs(**SMALL, device=device)
    for leaf, flag in zip(leaves, wanted):
        leaf.requires_grad_(flag)
    function = lambda *x: force_virial(list_neigh, *x, 1)  # noqa: E731
    assert gradcheck(function, leaves) and gradgradcheck(function, leaves)


def test_gradients_have_the_shape_of_the_view_that_was_given(device):
    list_neigh, dE, Ri_d, Rij = pairs(neighbors=6, device=device)
    flat = dE.reshape(3, 5, 1, 24).requires_grad_(), Ri_d.view(3, 5, 6, 4, 3).requires_grad_()
    gradient = torch.autograd.grad(force(list_neigh.view(3, 5, 2, 3), *flat, 2).square().sum(), flat)
    assert [x.shape for x in gradient] == [x.shape for x in flat]


def scalar_of(function, list_neigh):
    def scalar(*x):
        F, W, atom_W = function(list_neigh, *x, 1)
        return (F**3).sum() + (W**2).sum() + (F[..., None] * atom_W**2).sum()

    return scalar


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian", "vjp", "jvp"])
def test_torch_func_transforms_equal_the_reference(device, transform):
    list_neigh, *leaves = pairs(**SMALL, device=device)
    ours, theirs = scalar_of(force_virial, list_neigh), scalar_of(reference.force_virial, list_neigh)

    def apply(function):
        if transform == "vjp":
            return torch.func.vjp(function, *leaves)[1](torch.ones_like(function(*leaves)))
        if transform == "jvp":
            return torch.func.jvp(function, tuple(leaves), tuple(x.cos() for x in leaves))
        result = getattr(torch.func, transform)(function, argnums=(0, 1, 2))(*leaves)
        return torch.utils._pytree.tree_leaves(result)

    assert_equal_lists(apply(ours), apply(theirs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batched", list(itertools.product([0, None], repeat=4))[:-1], ids=str)
@pytest.mark.filterwarnings("error")
def test_vmap_over_any_subset_of_inputs(device, batched):
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        stack = [pairs(**SMALL, device=device, seed=seed) for seed in range(4)]
        inputs = [torch.stack(x) if dim == 0 else x[0] for x, dim in zip(zip(*stack), batched)]
        ours = torch.vmap(lambda *x: force_virial(*x, 1), batched)(*inputs)
        one = [[x[v] if dim == 0 else x for x, dim in zip(inputs, batched)] for v in range(4)]
        expected = [torch.stack(x) for x in zip(*(force_virial(*x, 1) for x in one))]
        assert_equal_lists(ours, expected, rtol=0, atol=0)
        gradient = torch.func.grad(scalar_of(force_virial, inputs[0] if batched[0] is None else one[0][0]))
        dims = batched[1:]
        if any(dim == 0 for dim in dims):
            ours = torch.vmap(gradient, dims)(*inputs[1:])
            expected = torch.stack([gradient(*x[1:]) for x in one])
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


def test_vmap_of_vmap_over_other_dimensions(device):
    stack = [pairs(**SMALL, device=device, seed=seed) for seed in range(6)]
    list_neigh, dE, Ri_d, Rij = (torch.stack(x).unflatten(0, (2, 3)) for x in zip(*stack))
    function = torch.vmap(torch.vmap(lambda *x: force_virial(*x, 1), (0, -1, 0, None)), (0, 1, 0, None))
    ours = function(list_neigh, dE.movedim(1, -1).movedim(0, 1), Ri_d, Rij[0, 0])
    for v, w in itertools.product(range(2), range(3)):
        expected = force_virial(list_neigh[v, w], dE[v, w], Ri_d[v, w], Rij[0, 0], 1)
        assert_equal_lists([x[v, w] for x in ours], expected, rtol=0, atol=0)
