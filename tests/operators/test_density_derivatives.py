"""Derivatives of calcops::density up to the third order, in d and the table, in both modes."""

import pytest
import torch
from test_density import HARMONICS, assert_close, inputs, reference

import calcops_jit

density = calcops_jit.density


def smooth_inputs(harmonics=25, begin=0.0):
    """Return arguments with few pairs and wide cells, so that finite differences are exact."""
    d, kind, table, grid, _ = inputs(n=2, K=3, functions=2, rows=7, begin=begin)
    kind[0] = torch.tensor([0, -1, 1])
    d = (
        d
        / torch.linalg.vector_norm(d, dim=-1, keepdim=True)
        * torch.tensor([[1.3, 2.0, 1.2], [2.9, 1.1, 1.4]], dtype=torch.float64).unsqueeze(-1)
    )
    grid = grid.clone()
    grid[:, 1] = 7.0
    return d.requires_grad_(), kind, table.requires_grad_(), grid, harmonics


@pytest.mark.parametrize("harmonics", HARMONICS)
@pytest.mark.parametrize("begin", [0.0, 1.5])
def test_derivatives_of_first_to_third_order_are_those_of_autograd(harmonics, begin):
    d, kind, table, grid, _ = inputs(n=3, K=20, functions=3, begin=begin)
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(d.shape, dtype=d.dtype, generator=generator) for _ in range(3)]
    table_tangent = torch.randn(table.shape, dtype=table.dtype, generator=generator)
    upstream = torch.randn(harmonics, 3, 3, dtype=d.dtype, generator=generator)

    def derivatives(f):
        """Return all second and third derivatives along the tangents in reverse mode."""
        leaves = [x.clone().requires_grad_() for x in (d, table, upstream)]
        energy = (f(leaves[0], kind, leaves[1], grid, harmonics) * leaves[2]).sum()
        (slope,) = torch.autograd.grad(energy, leaves[0], create_graph=True)
        along = (slope * tangents[0]).sum()
        second = torch.autograd.grad(along, leaves, create_graph=True)
        mixed = (second[0] * tangents[1]).sum() + (second[1] * table_tangent).sum()
        third = torch.autograd.grad(mixed, leaves, create_graph=True)
        return *second, *third

    for result, expected in zip(derivatives(density), derivatives(reference)):
        assert_close(result, expected, 1e-10)


@pytest.mark.parametrize("harmonics", HARMONICS)
def test_gradcheck_and_gradgradcheck_pass_in_both_modes(harmonics):
    d, kind, table, grid, _ = smooth_inputs()

    def sums(d, table):
        return density(d, kind, table, grid, harmonics)

    assert torch.autograd.gradcheck(
        sums, (d, table), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(sums, (d, table), check_fwd_over_rev=True)


def test_gradgradcheck_of_forces_passes():
    d, kind, table, grid, harmonics = smooth_inputs()

    def slope(d, table):
        energy = density(d, kind, table, grid, harmonics).square().sum()
        return torch.autograd.grad(energy, d, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(slope, (d, table), atol=1e-4)


def test_forward_and_reverse_mode_agree_in_every_mixture():
    d, kind, table, grid, harmonics = smooth_inputs()
    d, kind, table = d.detach()[:1, :2], kind[:1, :2], table.detach()
    weights = torch.randn(harmonics, 1, 2, dtype=torch.float64)

    def scalar(d, table):
        return (density(d, kind, table, grid, harmonics) * weights).sum()

    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    for argument in (0, 1):
        expected = rev(rev(rev(scalar), argument))(d, table)
        for outer, middle, inner in (
            (fwd, rev, rev),
            (rev, fwd, rev),
            (rev, rev, fwd),
            (fwd, fwd, fwd),
        ):
            result = outer(middle(inner(scalar), argument))(d, table)
            assert_close(result, expected, 1e-10)


def test_a_fourth_derivative_in_d_is_an_error_and_in_the_table_is_zero():
    d, kind, table, grid, harmonics = smooth_inputs()
    kinds = torch.zeros_like(kind)
    message = "calcops::density: expected derivatives in `d` up to third order, got a higher one"

    def along(order):
        if order == 0:
            return lambda t: density(d + t * d, kinds, table + t * table, grid, harmonics)
        lower = along(order - 1)
        return lambda t: torch.func.jvp(lower, (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=torch.float64)
    assert along(3)(zero).isfinite().all()
    with pytest.raises(RuntimeError, match=message):
        along(4)(zero)

    x = density(d, kinds, table, grid, harmonics).square().sum()
    for _ in range(3):
        x = torch.autograd.grad(x, d, create_graph=True)[0].square().sum()
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(x, d)

    # The square of a linear function has two derivatives.
    x = density(d.detach(), kinds, table, grid, harmonics).square().sum()
    (x,) = torch.autograd.grad(x, table, create_graph=True)
    (x,) = torch.autograd.grad(x.sum(), table, create_graph=True)
    assert x.abs().max() > 0
    assert not x.requires_grad or not torch.autograd.grad(x.sum(), table)[0].any()
