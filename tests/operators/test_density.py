"""density against plain PyTorch: values, empty slots, pairs at and beyond the end of the
grid, distances below the grid, derivatives, transforms, errors."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from fuzz import DTYPES, INDICES, check_calls
from numpy.polynomial import Legendre, Polynomial
from numpy.polynomial.legendre import leggauss
from reference import (
    assert_a_fourth_derivative_is_an_error,
    assert_compiles_and_exports,
    assert_empty_slots_never_matter,
    assert_equal_lists,
    assert_modes_agree,
    assert_strides_and_threads_change_no_bit,
    assert_the_order_of_slots_only_rounds,
    assert_vmap_equals_a_loop,
    opcheck,
)
from torch.fx.experimental.proxy_tensor import make_fx

density = torch.ops.calcops_models.density
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
    """Return the real spherical harmonics [..., 25] of unit vectors, without the phase (-1)^m."""
    x, y, z = u.unbind(-1)
    cosines = [torch.ones_like(x)]  # real and imaginary part of (x + iy)^m
    sines = [torch.zeros_like(x)]
    for m in range(4):
        cosines.append(x * cosines[m] - y * sines[m])
        sines.append(x * sines[m] + y * cosines[m])
    harmonics = []
    for degree in range(5):
        for m in range(-degree, degree + 1):
            k = abs(m)
            ratio = math.factorial(degree - k) / math.factorial(degree + k)
            factor = math.sqrt((2 - (m == 0)) * (2 * degree + 1) / (4 * math.pi) * ratio)
            legendre = Legendre.basis(degree).deriv(k).convert(kind=Polynomial).coef
            of_z = sum(c * z**n for n, c in enumerate(legendre))
            harmonics.append(factor * of_z * (cosines if m >= 0 else sines)[k])
    return torch.stack(harmonics, -1)


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
    cosine, weights = map(torch.tensor, leggauss(5))
    phi = torch.arange(10, dtype=torch.float64) * 2 * math.pi / 10
    sine = (1 - cosine**2).sqrt()
    u = torch.stack(
        [sine[:, None] * phi.cos(), sine[:, None] * phi.sin(), cosine[:, None].expand(-1, 10)], -1
    )
    Y = spherical_harmonics(u)
    overlap = torch.einsum("ijp,ijq,i->pq", Y, Y, weights) * 2 * math.pi / 10
    torch.testing.assert_close(overlap, torch.eye(25, dtype=torch.float64))


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


@pytest.mark.parametrize("begin", [0.0, 1.5])
@pytest.mark.parametrize("rows", [6, 7, 133])
def test_one_cell_or_many_and_distances_below_the_grid(rows, begin):
    arguments = list(inputs(n=4, K=30, rows=rows, begin=begin))
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
    assert_empty_slots_never_matter(
        lambda d: density(d, kind, table, *rest), kind < 0, is_left_out, d
    )

    dirty = d.masked_fill((kind < 0).unsqueeze(-1), math.nan).requires_grad_()
    table.requires_grad_()
    energy = density(dirty, kind, table, *rest).square().sum()
    grad, of_table = torch.autograd.grad(energy, (dirty, table), create_graph=True)
    assert of_table.isfinite().all()
    assert torch.autograd.grad(grad.square().sum(), table)[0].isfinite().all()


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

    assert_strides_and_threads_change_no_bit(results, d, kind)


# ---- derivatives up to the third order, in d and the table, in both modes ------------------------


def smooth_inputs():
    """Return arguments with few pairs and wide cells, so that finite differences are exact."""
    d, kind, table, grid, _ = inputs(n=2, K=3, functions=2, rows=7)
    kind[0] = torch.tensor([0, -1, 1])
    d = (
        d
        / torch.linalg.vector_norm(d, dim=-1, keepdim=True)
        * torch.tensor([[1.3, 2.0, 1.2], [2.9, 1.1, 1.4]], dtype=torch.float64).unsqueeze(-1)
    )
    grid = grid.clone()
    grid[:, 1] = 7.0
    return d.requires_grad_(), kind, table.requires_grad_(), grid, 25


@pytest.mark.parametrize("harmonics", HARMONICS)
@pytest.mark.parametrize("begin", [0.0, 1.5])
def test_derivatives_of_first_to_third_order_are_those_of_autograd(harmonics, begin):
    d, kind, table, grid, _ = inputs(n=3, K=20, functions=3, begin=begin)
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(d.shape, dtype=d.dtype, generator=generator) for _ in range(2)]
    table_tangent = torch.randn(table.shape, dtype=table.dtype, generator=generator)
    upstream = torch.randn(harmonics, 3, 3, dtype=d.dtype, generator=generator)

    def derivatives(f):
        """Return all second and third derivatives along the tangents in reverse mode."""
        leaves = [x.clone().requires_grad_() for x in (d, table, upstream)]
        direction = tangents[0].clone().requires_grad_()
        energy = (f(leaves[0], kind, leaves[1], grid, harmonics) * leaves[2]).sum()
        (slope,) = torch.autograd.grad(energy, leaves[0], create_graph=True)
        along = (slope * direction).sum()
        second = torch.autograd.grad(along, leaves, create_graph=True)
        mixed = (second[0] * tangents[1]).sum() + (second[1] * table_tangent).sum()
        third = torch.autograd.grad(mixed, (*leaves, direction), create_graph=True)
        return *second, *third

    for result, expected in zip(derivatives(density), derivatives(reference)):
        assert_close(result, expected, 1e-10)


def test_forward_and_reverse_mode_agree_in_every_mixture():
    d, kind, table, grid, harmonics = smooth_inputs()
    d, kind, table = d.detach()[:1, :2], kind[:1, :2], table.detach()
    weights = torch.randn(harmonics, 1, 2, dtype=torch.float64)

    def scalar(d, table):
        return (density(d, kind, table, grid, harmonics) * weights).sum()

    for argument in (0, 1):
        assert_modes_agree(scalar, d, table, argument=argument, rtol=1e-9, atol=1e-9)


def test_a_fourth_derivative_in_d_is_an_error_and_in_the_table_is_zero():
    d, kind, table, grid, harmonics = smooth_inputs()
    kinds = torch.zeros_like(kind)
    message = (
        "calcops_models::density: expected derivatives in `d` up to third order, got a higher one"
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


# ---- vmap, torch.compile and torch.export, errors ------------------------------------------------


ops = torch.ops.calcops_models
NAMES = "d", "kind", "table", "grid", "harmonics"


def test_vmap_over_atoms_with_one_table_and_with_a_table_each_equals_a_loop():
    d, kind, table, *rest = inputs(n=6)
    items = d.view(3, 2, 9, 3), kind.view(3, 2, 9)
    assert_vmap_equals_a_loop(lambda *x: density(*x, *rest), *items, constant=table)


def test_gradients_and_hessians_under_vmap_equal_a_loop():
    d, kind, table, *rest = smooth_inputs()
    d, table = d.detach(), table.detach()

    def energy(d, kind, table):
        return density(d[None], kind[None], table, *rest).square().sum()

    for derivative in (
        torch.func.grad(energy, (0, 2)),
        torch.func.hessian(energy),
        torch.func.hessian(energy, 2),
        torch.func.jacrev(torch.func.grad(energy), 2),
    ):
        result = torch.vmap(derivative, (0, 0, None))(d, kind, table)
        expected = [derivative(*item, table) for item in zip(d, kind)]
        if isinstance(result, tuple):
            expected = [torch.stack(tensors) for tensors in zip(*expected)]
        else:
            result, expected = [result], [torch.stack(expected)]
        for one, other in zip(result, expected):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_opcheck_passes_for_every_operator():
    d, kind, table, *rest = inputs(n=3, K=4)
    d.requires_grad_()
    table.requires_grad_()
    opcheck(ops.density.default, (d, kind, table, *rest))
    upstream = torch.randn(25, 3, 5, dtype=torch.float64, requires_grad=True)
    for count in (None, 1, 2):
        directions = None
        if count:
            directions = torch.randn(3, 4, count, 3, dtype=torch.float64, requires_grad=True)
        opcheck(ops._density_along.default, (d, kind, table, *rest, directions))
        arguments = upstream, d, kind, table, *rest, directions
        opcheck(ops._density_table_backward.default, arguments)
        if count != 2:  # its gradient for d would be a fourth derivative
            opcheck(ops._density_backward.default, arguments)


def test_compiled_traced_and_exported_programs_equal_eager_at_other_sizes():
    def step(d, kind, table, grid):
        energy = density(d, kind, table, grid, 25).square().sum()
        (slope,) = torch.autograd.grad(energy, d, create_graph=True)
        return torch.autograd.grad(energy + slope.square().sum(), table)

    def leaves_of(**sizes):
        d, kind, table, grid, _ = inputs(**sizes)
        return d.requires_grad_(), kind, table.requires_grad_(), grid

    arguments = leaves_of(n=11, K=7)
    traced = make_fx(step, tracing_mode="symbolic")(*arguments)
    other = leaves_of(n=8, K=9, seed=3)
    assert_equal_lists(traced(*other), step(*other), rtol=1e-12, atol=1e-12)

    def of_tensors(*tensors):
        return density(*tensors, 25)

    slots = {0: torch.export.Dim("n"), 1: torch.export.Dim("K")}
    assert_compiles_and_exports(of_tensors, arguments, (slots, slots, None, None), other)


def arguments_of(**sizes):
    return dict(zip(NAMES, inputs(**sizes)))


def random_arguments(draw, seed):
    return arguments_of(
        n=draw.choice([0, 1, 3]),
        K=draw.choice([0, 1, 6]),
        functions=draw.choice([0, 1, 3, 9]),
        harmonics=draw.choice(HARMONICS),
        rows=draw.choice([6, 7, 16]),
        begin=draw.choice([0.0, 1.5]),
        dtype=draw.choice(DTYPES),
        index=draw.choice(INDICES),
        seed=seed,
    )


def test_any_call_gives_the_references_results_or_names_an_argument(one_thread):
    check_calls(density, random_arguments, reference, range(200))


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
        density(**arguments_of() | changes)
    assert "calcops_models::density: " in str(error.value), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("value", [math.inf, 1e300, 1e-300])
def test_distances_of_any_size_read_no_memory_out_of_bounds(value):
    """AddressSanitizer (make test config=asan) finds such a read, or the process crashes."""
    d, kind, table, grid, harmonics = inputs(functions=3)
    for functions in (1, 3, 9):
        table = torch.randn(3, 6, functions, dtype=torch.float64)
        for begin in (0.0, 1.0):
            grid[:, 0] = begin
            leaves = d * value, table.clone()
            for leaf in leaves:
                leaf.requires_grad_()
            A = density(leaves[0], kind, leaves[1], grid, harmonics)
            torch.autograd.grad(A.sum(), leaves)
