"""density: the end of the grid, the order of slots, precision, NaN, the fourth derivative, errors."""

import itertools
import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from numpy.polynomial.legendre import leggauss
from reference import assert_a_fourth_derivative_is_an_error, assert_the_order_of_slots_only_rounds
from reference_models import spherical_harmonics

import calcops_jit

density = torch.ops.calcops_models.density
HARMONICS = 1, 4, 9, 16, 25
NAMES = "d", "kind", "table", "grid", "harmonics"


def inputs(
    n=5, K=9, functions=5, harmonics=25, rows=16, begin=0.0, dtype=torch.float64,
    index=torch.int64, seed=0, kinds=3,
):  # fmt: skip
    """Return random arguments. Distances are from 0.4 to beyond the cutoffs."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(n, K, 3, dtype=torch.float64, generator=generator)
    r = 0.4 + 5 * torch.rand(n, K, 1, dtype=torch.float64, generator=generator)
    d = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True) * r
    kind = torch.randint(-1, kinds, (n, K), generator=generator).to(index)
    table = torch.randn(kinds, rows, functions, dtype=torch.float64, generator=generator)
    grid = torch.tensor([[begin, 5.0], [begin, 3.5], [begin, 4.3]], dtype=torch.float64)[:kinds]
    return d.to(dtype), kind, table.to(dtype), grid, harmonics


def assert_close(result, expected, tolerance=1e-12):
    atol = tolerance * max(float(expected.detach().abs().max()), 1e-30)
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def test_spherical_harmonics_of_the_reference_are_orthonormal():
    cosine, weights = map(torch.tensor, leggauss(5))
    phi = torch.arange(10, dtype=torch.float64) * 2 * math.pi / 10
    sine = (1 - cosine**2).sqrt()
    u = torch.stack(
        [sine[:, None] * phi.cos(), sine[:, None] * phi.sin(), cosine[:, None].expand(-1, 10)], -1
    )
    Y = spherical_harmonics(u)
    overlap = torch.einsum("ijp,ijq,i->pq", Y, Y, weights) * 2 * math.pi / 10
    torch.testing.assert_close(overlap, torch.eye(25, dtype=torch.float64))


def test_a_pair_at_exactly_the_end_of_the_grid_adds_nothing():
    d, kind, table, grid, _ = inputs(n=1, K=2)
    kind[:] = 0
    end = float(grid[0, 1])
    d[0] = torch.tensor([[end, 0, 0], [0, end * (1 + 1e-15), 0]]).double()
    assert not density(d, kind, table, grid, 4).any()
    d[0, 0, 0] = end * (1 - 1e-12)
    d.requires_grad_()
    A = density(d, kind, table, grid, 4)
    # The last three coefficients have the weights 1/120, 26/120, 66/120 at the end of a cell ...
    weights = torch.tensor([0.0, 1, 26, 66, 26, 1], dtype=torch.float64) / 120
    assert_close(A[0, 0] * math.sqrt(4 * math.pi), weights @ table[0, -6:], 1e-9)
    (grad,) = torch.autograd.grad(A.sum(), d)
    assert grad[0, 0].all() and not grad[0, 1].any()


def test_the_order_of_empty_slots_changes_no_bit_and_the_order_of_pairs_only_rounding():
    d, kind, *rest = inputs(K=40)
    assert_the_order_of_slots_only_rounds(lambda d, kind: density(d, kind, *rest), d, kind=kind)


def test_float32_is_computed_in_float64():
    d, kind, table, *rest = inputs(n=3, K=300, functions=9)
    upstream = torch.randn(25, 3, 9, dtype=torch.float64).float()
    tangent = torch.randn(3, 300, 3, dtype=torch.float64).float()
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.float().to(dtype).requires_grad_() for x in (d, table)]
        A = density(leaves[0], kind, leaves[1], *rest)
        assert A.dtype == dtype
        gradients = torch.autograd.grad(A, leaves, upstream.to(dtype), create_graph=True)
        second = torch.autograd.grad((gradients[0] * tangent.to(dtype)).sum(), leaves)
        results.append((A, *gradients, *second))
    for single, double in zip(*results):
        assert torch.equal(single, double.float())


@pytest.mark.parametrize("harmonics", HARMONICS)
def test_two_atoms_in_one_place_make_the_sums_of_their_atom_nan(harmonics):
    d, kind, table, grid, _ = inputs(n=2, K=3)
    kind[:] = 1
    d[0, 1] = 0
    d.requires_grad_()
    A = density(d, kind, table, grid, harmonics)
    assert A[:, 0].isnan().all()
    assert A[:, 1].isfinite().all()
    (grad,) = torch.autograd.grad(A.sum(), d)
    assert not grad[0, 1].isfinite().any()
    assert grad[1].isfinite().all()


@pytest.mark.parametrize("harmonics", HARMONICS)
def test_nan_in_a_vector_makes_the_sums_of_its_atom_nan(harmonics):
    d, kind, table, grid, _ = inputs(n=2, K=3)
    kind[:] = 1
    d[0, 1, 2] = math.nan
    table.requires_grad_()
    A = density(d, kind, table, grid, harmonics)
    assert A[:, 0].isnan().all()
    assert A[:, 1].isfinite().all()
    (of_table,) = torch.autograd.grad(A.sum(), table)
    assert of_table[1].isnan().any()
    assert of_table[0].isfinite().all() and of_table[2].isfinite().all()


def test_nan_in_a_function_stays_in_that_function():
    d, kind, table, grid, harmonics = inputs(functions=11)
    table[:, :, 7] = math.nan
    A = density(d, kind, table, grid, harmonics)
    others = [f for f in range(11) if f != 7]
    table[:, :, 7] = 0
    assert torch.equal(A[..., others], density(d, kind, table, grid, harmonics)[..., others])
    assert A[..., 7].isnan().all()


def test_a_fourth_derivative_in_d_is_an_error_and_in_the_table_is_zero():
    d, kind, table, grid, harmonics = inputs(n=2, K=3, functions=2)
    d.requires_grad_()
    table.requires_grad_()
    kinds = torch.zeros_like(kind)
    message = (
        "calcops_models::density: expected `d` in derivatives up to third order, got a higher one"
    )
    assert_a_fourth_derivative_is_an_error(
        lambda d: density(d, kinds, table * d.sum(), grid, harmonics), d, message
    )

    # The square of a linear function has two derivatives.
    x = density(d.detach(), kinds, table, grid, harmonics).square().sum()
    (x,) = torch.autograd.grad(x, table, create_graph=True)
    (x,) = torch.autograd.grad(x.sum(), table, create_graph=True)
    assert x.abs().max() > 0
    assert not x.requires_grad or not torch.autograd.grad(x.sum(), table)[0].any()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"table": torch.zeros(3, 5, 5).double()}, "expected `table` with B >= 6, got [3, 5, 5]"),
        ({"grid": torch.zeros(3, 2)}, "expected `grid` 0 <= first < last, got 0.0"),
        ({"grid": torch.tensor([[0, 1.0]] * 2 + [[-1, 1]])}, "expected `grid` 0 <= first < last"),
        ({"grid": torch.tensor([[0, 1.0]] * 2 + [[0, math.nan]])}, "expected `grid` 0 <= first"),
        ({"harmonics": 5}, "expected `harmonics` 1, 4, 9, 16 or 25, got 5"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(changes, message):
    with pytest.raises(RuntimeError) as error:
        density(**dict(zip(NAMES, inputs())) | changes)
    assert "calcops_models::density: " in str(error.value), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("value", [1.0, math.inf, 1e300, 1e-300])
def test_distances_of_any_size_read_no_memory_out_of_bounds(value):
    pytest.importorskip("hypothesis")
    for functions, begin in itertools.product((1, 3, 7, 9, 15), (0.0, 1.0)):
        d, *rest = inputs(functions=functions, rows=6, begin=begin)
        calcops_jit.check(density, "memory", dict(zip(NAMES, (d * value, *rest))))
