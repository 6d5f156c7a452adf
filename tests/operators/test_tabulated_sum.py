"""tabulated_sum against plain PyTorch: values, derivatives of every order, empty slots, x
outside the grid, transforms, errors."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from fuzz import DTYPES, INDICES, check_calls
from reference import (
    assert_compiles_and_exports,
    assert_empty_slots_never_matter,
    assert_strides_and_threads_change_no_bit,
    assert_the_order_of_slots_only_rounds,
    assert_vmap_equals_a_loop,
    opcheck,
)

tabulated_sum = torch.ops.calcops_models.tabulated_sum
# Kind 0 has cells of width 0.5 from 0 to 2, and of width 1 from there to 5. Kind 1 has cells of
# width 0.25 from -1 to 0.5 alone.
GRID = torch.tensor([[0.0, 0.5, 2.0, 1.0, 5.0], [-1.0, 0.25, 0.5, 1.0, 0.5]], dtype=torch.float64)
CELLS = [7, 6]
ENDS = [(0.0, 5.0), (-1.0, 0.5)]
# A kernel takes blocks of functions: part of a block, whole blocks, and whole ones with a part.
M_OF_BLOCKS = 1, 7, 8, 9, 16, 33, 100


def begins_of(kind):
    """Return where the cells of a kind begin."""
    lower, width, upper, wide, end = GRID[kind].tolist()
    fine = [lower + i * width for i in range(round((upper - lower) / width))]
    return fine + [upper + i * wide for i in range(round((end - upper) / wide))]


def functions(kind, x, table, order=0):
    """Return the tabulated functions g [..., M] of one kind, or their derivative of an order."""
    begins = torch.tensor(begins_of(kind), dtype=x.dtype)
    lower, upper = ENDS[kind]
    inside = x.clamp(lower, upper)
    cell = (torch.searchsorted(begins, inside.detach().contiguous(), right=True) - 1).clamp(min=0)
    c = table[kind][cell]  # [..., 6, M]
    t = (inside.detach() - begins[cell])[..., None]

    def polynomial(order):
        terms = [math.perm(k, order) * c[..., k, :] * t ** (k - order) for k in range(order, 6)]
        return sum(terms)

    beyond = (x - inside)[..., None]
    is_inside = (x == inside)[..., None]
    if order == 0:
        return polynomial(0) + beyond * polynomial(1)
    if order == 1:
        return polynomial(1) + 0 * beyond
    return polynomial(order) * is_inside if order < 6 else torch.zeros_like(c[..., 0, :])


def reference(x, R, kind, table, order=0):
    g = torch.zeros(*x.shape, table.shape[-1], dtype=x.dtype)
    for k in range(len(CELLS)):
        g = torch.where((kind == k)[..., None], functions(k, x, table, order), g)
    R = torch.where((kind < 0)[..., None], 0, R)
    return torch.einsum("isa,ism->iam", R, g)


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


def smooth_inputs(n=3, K=4, M=5):
    """Return arguments with one kind, whose cells all hold the same polynomial.

    So finite differences may cross from one cell to the next. All x lie inside the grid.
    """
    generator = torch.Generator().manual_seed(1)
    polynomial = torch.randn(6, M, dtype=torch.float64, generator=generator) / 5
    grid = torch.tensor([[-1.0, 0.5, 1.0, 1.0, 3.0]], dtype=torch.float64)
    table = torch.zeros(1, 6, 6, M, dtype=torch.float64)
    for cell, begin in enumerate([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0]):
        for k in range(6):
            for j in range(k, 6):  # (t + begin)^j
                table[0, cell, k] += math.comb(j, k) * begin ** (j - k) * polynomial[j]
    x = 3 * torch.rand(n, K, dtype=torch.float64, generator=generator) - 0.9
    R = torch.randn(n, K, 4, dtype=torch.float64, generator=generator)
    kind = torch.tensor([[0, -1, 0, 0], [0, 0, 0, -1], [-1, 0, 0, 0]])[:n, :K]
    return x.requires_grad_(), R.requires_grad_(), kind, table, grid


@pytest.mark.parametrize("M", M_OF_BLOCKS)
@pytest.mark.parametrize("order", range(8))
def test_values_of_every_order_are_those_of_the_polynomials(M, order):
    x, R, kind, table, grid = inputs(M=M)
    result = tabulated_sum(x, R, kind, table, grid, order)
    expected = reference(x, R, kind, table, order)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("M", M_OF_BLOCKS)
def test_gradients_are_those_of_autograd(M):
    x, R, kind, table, grid = inputs(M=M)
    upstream = torch.randn(5, 4, M, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), R.clone().requires_grad_()]
    of_x, of_R = torch.autograd.grad(tabulated_sum(*leaves, kind, table, grid), leaves, upstream)
    (expected_of_R,) = torch.autograd.grad(
        reference(x, leaves[1], kind, table), leaves[1:], upstream
    )
    slopes = sum((kind == k)[..., None] * functions(k, x, table, 1) for k in range(len(CELLS)))
    expected_of_x = torch.einsum("ism,isa,iam->is", slopes, R, upstream)
    torch.testing.assert_close(of_R, expected_of_R, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(of_x, expected_of_x, rtol=1e-11, atol=1e-10)


def test_derivatives_of_first_to_third_order_are_right():
    x, R, kind, table, grid = smooth_inputs()

    def sums(x, R):
        return tabulated_sum(x, R, kind, table, grid)

    assert torch.autograd.gradcheck(sums, (x, R), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(sums, (x, R), check_fwd_over_rev=True)

    def slope(x, R):
        upstream = torch.linspace(-1, 1, 4 * 5, dtype=torch.float64).view(4, 5)
        value = (sums(x, R) * upstream).sum()
        return torch.autograd.grad(value, (x, R), create_graph=True)

    assert torch.autograd.gradgradcheck(slope, (x, R))


def test_values_in_an_empty_slot_never_matter():
    x, R, kind, table, grid = inputs()
    empty = kind < 0
    assert_empty_slots_never_matter(
        lambda x, R: tabulated_sum(x, R, kind, table, grid), empty, empty, x, R
    )


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


def test_empty_sizes_give_zeros_of_the_right_shape():
    for n, K, M in ((0, 3, 5), (3, 0, 5), (3, 4, 0)):
        x, R, kind, table, grid = inputs(n=n, K=K, M=M)
        leaves = [x.requires_grad_(), R.requires_grad_()]
        T = tabulated_sum(*leaves, kind, table, grid)
        assert T.shape == (n, 4, M)
        assert not T.any()
        assert not any(g.any() for g in torch.autograd.grad(T.sum(), leaves))


def test_strides_and_threads_change_no_bit():
    x, R, kind, table, grid = inputs(n=200)
    assert_strides_and_threads_change_no_bit(
        lambda *tensors: [tabulated_sum(*tensors, table, grid)], x, R, kind
    )


def test_vmap_over_atoms_with_one_table_and_with_a_table_each_equals_a_loop():
    x, R, kind, table, grid = inputs(n=6)
    items = (t.view(3, 2, *t.shape[1:]) for t in (x, R, kind))
    assert_vmap_equals_a_loop(lambda *x: tabulated_sum(*x, grid), *items, constant=table)


def test_vmap_of_vmap_with_a_table_for_each_outer_item_equals_a_loop():
    x, R, kind, table, grid = inputs(n=12)
    x, R, kind = (t.view(2, 3, 2, *t.shape[1:]) for t in (x, R, kind))
    tables = torch.stack([table, 3 * table])
    inner = torch.vmap(tabulated_sum, (0, 0, 0, None, None))
    expected = torch.stack([inner(*item, grid) for item in zip(x, R, kind, tables)])
    outer = torch.vmap(inner, (0, 0, 0, 0, None))
    assert torch.equal(outer(x, R, kind, tables, grid), expected)


def test_jacobians_of_both_modes_agree():
    x, R, kind, table, grid = inputs(n=1, M=6)

    def sums(x):
        return tabulated_sum(x, R, kind, table, grid)

    torch.testing.assert_close(torch.func.jacrev(sums)(x), torch.func.jacfwd(sums)(x))


def test_opcheck_compile_and_export_pass_with_dynamic_sizes():
    x, R, kind, table, grid = inputs(n=11, K=8)
    leaves = x.requires_grad_(), R.requires_grad_()
    opcheck(torch.ops.calcops_models.tabulated_sum.default, (*leaves, kind, table, grid))
    upstream = torch.randn(11, 4, 33, dtype=torch.float64)
    backward = torch.ops.calcops_models._tabulated_sum_backward.default
    opcheck(backward, (upstream, *leaves, kind, table, grid, 0, [True, True]))
    slots = {0: torch.export.Dim("n"), 1: torch.export.Dim("K")}
    sizes = slots, slots, slots, None, None
    other = inputs(n=9, K=10, seed=5)
    assert_compiles_and_exports(tabulated_sum, (*leaves, kind, table, grid), sizes, other)


def random_arguments(draw, seed):
    tensors = inputs(
        n=draw.choice([0, 1, 3]),
        K=draw.choice([0, 1, 6]),
        M=draw.choice([0, 1, 9, 33]),
        dtype=draw.choice(DTYPES),
        seed=seed,
        index=draw.choice(INDICES),
    )
    names = "x", "R", "kind", "table", "grid"
    return dict(zip(names, tensors)) | {"order": draw.choice([0, 1, 3])}


def test_any_call_gives_the_references_results_or_names_an_argument(one_thread):
    def expected(grid, **arguments):
        assert torch.equal(grid, GRID)
        return reference(**arguments)

    check_calls(tabulated_sum, random_arguments, expected, range(200))


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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_table_without_cells_is_an_error(device):
    x, R, kind, table, grid = (t.to(device) for t in inputs())
    message = "calcops_models::tabulated_sum: expected `table` with cells >= 1, got"
    with pytest.raises(RuntimeError, match=message):
        tabulated_sum(x, R, kind, table[:, :0], grid)


def test_a_grid_of_any_value_reads_no_memory_out_of_bounds():
    x, R, kind, table, _ = inputs()
    for value in (0.0, math.nan, math.inf, -1e300):
        grid = torch.full((2, 5), value, dtype=torch.float64)
        leaves = [t.clone().requires_grad_() for t in (x, R)]
        tabulated_sum(*leaves, kind, table, grid).sum().backward()
