"""tabulated_sum: the order of slots, precision, the ends of the grid, infinite and NaN numbers."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from reference import assert_the_order_of_slots_only_rounds

import calcops_jit

tabulated_sum = torch.ops.calcops_models.tabulated_sum
# Kind 0 has cells of width 0.5 from 0 to 2, and of width 1 from there to 5. Kind 1 has cells of
# width 0.25 from -1 to 0.5 alone.
GRID = torch.tensor([[0.0, 0.5, 2.0, 1.0, 5.0], [-1.0, 0.25, 0.5, 1.0, 0.5]], dtype=torch.float64)
CELLS = [7, 6]


def inputs(n=5, K=9, M=33, dtype=torch.float64, seed=0, index=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(2, max(CELLS), 6, M, dtype=torch.float64)
    for k, cells in enumerate(CELLS):
        table[k, :cells] = torch.randn(cells, 6, M, dtype=torch.float64, generator=generator)
    kind = torch.randint(-1, 2, (n, K), generator=generator).to(index)
    # The values of x reach from below the grids to above them.
    x = 8 * torch.rand(n, K, dtype=torch.float64, generator=generator) - 2
    R = torch.randn(n, K, 4, dtype=torch.float64, generator=generator)
    return x.to(dtype), R.to(dtype), kind, table.to(dtype), GRID


def test_the_order_of_empty_slots_changes_no_bit_and_the_order_of_pairs_only_rounding():
    x, R, kind, *rest = inputs(K=40)
    assert_the_order_of_slots_only_rounds(lambda *x: tabulated_sum(*x, *rest), x, R, kind=kind)


def test_float32_sums_of_many_slots_are_as_accurate_as_in_float64():
    x, R, kind, table, grid = inputs(n=3, K=400, M=20, dtype=torch.float32)
    result = tabulated_sum(x, R, kind, table, grid)
    assert result.dtype == torch.float32
    expected = tabulated_sum(x.double(), R.double(), kind, table.double(), grid)
    assert (result - expected).abs().max() < 2e-6 * expected.abs().max()


def test_nan_stays_nan_and_the_ends_of_the_grid_are_inside():
    x, R, kind, table, grid = inputs(n=1, K=2)
    kind[:] = 0
    x[0] = torch.tensor([math.nan, 1.0])
    assert tabulated_sum(x, R, kind, table, grid).isnan().all()
    for end, cell, t in ((0.0, 0, 0.0), (5.0, 6, 1.0), (2.0, 4, 0.0), (0.5, 1, 0.0)):
        x[0] = end
        powers = t ** torch.arange(6, dtype=torch.float64)
        g = torch.einsum("k,km->m", powers, table[0, cell])
        expected = torch.einsum("a,m->am", R[0].sum(0), g)
        torch.testing.assert_close(tabulated_sum(x, R, kind, table, grid)[0], expected)


def test_an_infinite_x_is_far_on_the_straight_line():
    _, R, kind, table, grid = inputs()
    kind = kind.clamp(0)

    def values(x):
        x = torch.full(kind.shape, x, dtype=R.dtype, requires_grad=True)
        T = tabulated_sum(x, R, kind, table, grid)
        (of_x,) = torch.autograd.grad(T.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(of_x.sum(), x)
        return T, of_x, second

    for sign in (1, -1):
        at_infinity, far = values(sign * torch.inf), values(sign * 1e30)
        for actual, expected in zip(at_infinity, far):
            assert actual.isfinite().all()
            assert torch.equal(actual, expected)
        assert (far[0].abs() > 1e20).any()
        assert (far[2] == 0).all()


def test_a_grid_of_any_value_reads_no_memory_out_of_bounds():
    pytest.importorskip("hypothesis")
    for value in (0.0, math.nan, math.inf, -1e300):
        arguments = dict(zip(("x", "R", "kind", "table", "grid"), inputs()), order=0)
        arguments["grid"] = torch.full_like(GRID, value)
        calcops_jit.check(tabulated_sum, "memory", arguments)
