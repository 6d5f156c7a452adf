"""calcops::density against plain PyTorch: values, gradients, empty slots, pairs at and beyond the
end of the grid, distances below the grid."""

import math

import pytest
import torch

import calcops_jit

density = calcops_jit.density
HARMONICS = 1, 4, 9, 16, 25


def cardinal(t):
    """Return the quintic B-spline of the knots 0, 1 ... 6 at t."""
    total = torch.zeros_like(t)
    for k in range(7):
        total = total + (-1) ** k * math.comb(6, k) * (t - k).clamp(min=0) ** 5
    return torch.where(t < 6, total / 120, 0.0)


def splines(position, rows):
    """Return the B-splines [..., rows] at positions in cells of width 1.

    Below 0 they go on as straight lines.
    """
    inside = position.clamp(min=0).unsqueeze(-1)
    offset = torch.arange(rows, dtype=position.dtype) - 5
    zero = torch.zeros(1, dtype=position.dtype, requires_grad=True)
    at_zero = cardinal(zero - offset)
    slopes = torch.stack([torch.autograd.grad(b, zero, retain_graph=True)[0][0] for b in at_zero])
    below = position.clamp(max=0).unsqueeze(-1)
    return cardinal(inside - offset) + below * slopes.detach()


def spherical_harmonics(u):
    """Return the real spherical harmonics [..., 25] of unit vectors: the table in Wikipedia."""
    x, y, z = u.unbind(-1)
    one = torch.ones_like(x)
    pi, root = math.pi, math.sqrt
    return torch.stack(
        [
            0.5 * root(1 / pi) * one,
            root(3 / (4 * pi)) * y,
            root(3 / (4 * pi)) * z,
            root(3 / (4 * pi)) * x,
            0.5 * root(15 / pi) * x * y,
            0.5 * root(15 / pi) * y * z,
            0.25 * root(5 / pi) * (3 * z**2 - 1),
            0.5 * root(15 / pi) * x * z,
            0.25 * root(15 / pi) * (x**2 - y**2),
            0.25 * root(35 / (2 * pi)) * y * (3 * x**2 - y**2),
            0.5 * root(105 / pi) * x * y * z,
            0.25 * root(21 / (2 * pi)) * y * (5 * z**2 - 1),
            0.25 * root(7 / pi) * (5 * z**3 - 3 * z),
            0.25 * root(21 / (2 * pi)) * x * (5 * z**2 - 1),
            0.25 * root(105 / pi) * (x**2 - y**2) * z,
            0.25 * root(35 / (2 * pi)) * x * (x**2 - 3 * y**2),
            0.75 * root(35 / pi) * x * y * (x**2 - y**2),
            0.75 * root(35 / (2 * pi)) * y * (3 * x**2 - y**2) * z,
            0.75 * root(5 / pi) * x * y * (7 * z**2 - 1),
            0.75 * root(5 / (2 * pi)) * y * (7 * z**3 - 3 * z),
            3 / 16 * root(1 / pi) * (35 * z**4 - 30 * z**2 + 3),
            0.75 * root(5 / (2 * pi)) * x * (7 * z**3 - 3 * z),
            3 / 8 * root(5 / pi) * (x**2 - y**2) * (7 * z**2 - 1),
            0.75 * root(35 / (2 * pi)) * x * (x**2 - 3 * y**2) * z,
            3 / 16 * root(35 / pi) * (x**2 * (x**2 - 3 * y**2) - y**2 * (3 * x**2 - y**2)),
        ],
        -1,
    )


def reference(d, kind, table, grid, harmonics):
    grid = grid.to(d)
    live = (kind >= 0) & ~(d.detach().square().sum(-1) >= grid[kind.clamp(min=0), 1] ** 2)
    d = torch.where(live.unsqueeze(-1), d, 1.0)
    kind = kind.clamp(min=0).long()
    r = torch.linalg.vector_norm(d, dim=-1)
    begin, end = grid[kind].unbind(-1)
    rows = table.shape[1]
    B = splines((r - begin) * (rows - 5) / (end - begin), rows) * live.unsqueeze(-1)
    Y = spherical_harmonics(d / r.unsqueeze(-1))[..., :harmonics]
    kinds = torch.nn.functional.one_hot(kind, len(table)).to(d)
    sums = torch.einsum("isk,isb,isq->iqkb", kinds, B, Y)
    return torch.einsum("iqkb,kbf->qif", sums, table)


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
    cosine, weights = (torch.tensor(a) for a in _gauss_legendre(5))
    phi = torch.arange(10, dtype=torch.float64) * 2 * math.pi / 10
    sine = (1 - cosine**2).sqrt()
    u = torch.stack(
        [sine[:, None] * phi.cos(), sine[:, None] * phi.sin(), cosine[:, None].expand(-1, 10)], -1
    )
    Y = spherical_harmonics(u)
    overlap = torch.einsum("ijp,ijq,i->pq", Y, Y, weights) * 2 * math.pi / 10
    torch.testing.assert_close(overlap, torch.eye(25, dtype=torch.float64))


def _gauss_legendre(count):
    import numpy as np

    return np.polynomial.legendre.leggauss(count)


@pytest.mark.parametrize("harmonics", HARMONICS)
@pytest.mark.parametrize("functions", [1, 2, 4, 5, 8, 9, 11, 20, 33])
def test_sums_and_gradients_are_those_of_plain_pytorch(harmonics, functions):
    arguments = list(inputs(n=19, K=21, functions=functions, harmonics=harmonics))
    arguments[0].requires_grad_()
    arguments[2].requires_grad_()
    A = density(*arguments)
    expected = reference(*arguments)
    assert_close(A, expected)
    upstream = torch.randn(A.shape, dtype=A.dtype)
    leaves = arguments[0], arguments[2]
    gradients = torch.autograd.grad(A, leaves, upstream)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, leaves, upstream)):
        assert_close(gradient, other, 1e-11)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("begin", [0.0, 1.5])
@pytest.mark.parametrize("rows", [6, 7, 133])
def test_one_cell_or_many_and_distances_below_the_grid(rows, begin, index):
    arguments = list(inputs(n=4, K=30, rows=rows, begin=begin, index=index))
    r = torch.linalg.vector_norm(arguments[0], dim=-1)
    assert begin == 0 or (r[arguments[1] >= 0] < begin).any()
    arguments[0].requires_grad_()
    A = density(*arguments)
    expected = reference(*arguments)
    assert_close(A, expected)
    upstream = torch.randn(A.shape, dtype=A.dtype)
    (gradient,) = torch.autograd.grad(A, arguments[0], upstream)
    assert_close(gradient, torch.autograd.grad(expected, arguments[0], upstream)[0], 1e-11)


def test_empty_slots_and_pairs_beyond_the_cutoff_add_exactly_nothing():
    d, kind, table, *rest = inputs(K=40)
    r = torch.linalg.vector_norm(d, dim=-1)
    cutoff = rest[0][kind.clamp(min=0), 1]
    is_left_out = (kind < 0) | (r >= cutoff)
    assert (r >= cutoff)[kind >= 0].any()
    A = density(d, torch.where(is_left_out, -1, kind), table, *rest)
    assert torch.equal(density(d, kind, table, *rest), A)

    dirty = d.masked_fill((kind < 0).unsqueeze(-1), math.nan).requires_grad_()
    table.requires_grad_()
    dirty_A = density(dirty, kind, table, *rest)
    assert torch.equal(dirty_A, A)
    grad, of_table = torch.autograd.grad(dirty_A.square().sum(), (dirty, table), create_graph=True)
    assert (grad[is_left_out] == 0).all()
    assert grad.isfinite().all() and of_table.isfinite().all()
    second, of_table = torch.autograd.grad(grad.square().sum(), (dirty, table))
    assert (second[is_left_out] == 0).all()
    assert second.isfinite().all() and of_table.isfinite().all()
    tangent = torch.ones_like(d).masked_fill(is_left_out.unsqueeze(-1), math.nan)
    _, along = torch.func.jvp(lambda d: density(d, kind, table, *rest), (dirty,), (tangent,))
    assert along.isfinite().all()


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
    order = torch.argsort((kind < 0).int(), dim=1, stable=True)
    moved = d.gather(1, order[..., None].expand_as(d)), kind.gather(1, order)
    A = density(d, kind, *rest)
    assert torch.equal(density(*moved, *rest), A)
    assert_close(density(d.flip(1), kind.flip(1), *rest), A, 1e-13)


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


def test_empty_sizes_give_zeros_of_the_right_shape():
    for n, K in ((0, 3), (3, 0)):
        d, kind, table, *rest = inputs(n=n, K=K)
        table.requires_grad_()
        A = density(d.requires_grad_(), kind, table, *rest)
        assert A.shape == (25, n, 5)
        assert not A.any()
        gradients = torch.autograd.grad(A.sum(), (d, table), create_graph=True)
        assert not any(gradient.any() for gradient in gradients)
        assert not torch.autograd.grad(gradients[0].sum(), table)[0].any()
    d, kind, table, grid, harmonics = inputs()
    A = density(d, torch.full_like(kind, -1), table[:0], grid[:0], harmonics)
    assert A.shape == (25, 5, 5) and not A.any()
    assert density(d, kind, table[..., :0], grid, harmonics).shape == (25, 5, 0)


def test_strides_and_threads_change_no_bit():
    d, kind, table, *rest = inputs(n=200)
    table.requires_grad_()

    def results(d, kind):
        A = density(d, kind, table, *rest)
        return A, *torch.autograd.grad(A.square().sum(), table)

    expected = results(d, kind)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (d, kind)]
    assert not strided[0].is_contiguous()
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 5):
            torch.set_num_threads(count)
            for result in zip(results(d, kind), results(*strided), expected):
                assert torch.equal(result[0], result[2])
                assert torch.equal(result[1], result[2])
    finally:
        torch.set_num_threads(threads)
