"""environment_spline against plain PyTorch: values, derivatives up to third order, empty
slots, pairs beyond the cutoff, R[0] outside the grid, transforms, errors."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from fuzz import DTYPES, INDICES, check_calls
from reference import (
    assert_a_fourth_derivative_is_an_error,
    assert_compiles_and_exports,
    assert_empty_slots_never_matter,
    assert_modes_agree,
    assert_strides_and_threads_change_no_bit,
    assert_the_order_of_slots_only_rounds,
    assert_vmap_equals_a_loop,
    opcheck,
)

environment_spline = torch.ops.calcops_models.environment_spline
RCUT_SMTH, RCUT = 1.0, 6.0
DEGREES = {"quintic": 5, "cubic": 3}


def cardinal(degree, t):
    """Return the B-spline of knots 0, 1 ... degree + 1 at t, by its recursion."""
    if degree == 0:
        return ((t >= 0) & (t < 1)).to(t)
    left = t * cardinal(degree - 1, t)
    right = (degree + 1 - t) * cardinal(degree - 1, t - 1)
    return (left + right) / degree


def splines(degree, position, functions):
    """Return all B-splines [..., functions] at positions in cells of width 1.

    Outside the cells, a B-spline goes on as a straight line.
    """
    cells = functions - degree
    inside = position.clamp(0, cells)
    offset = torch.arange(functions, dtype=position.dtype) - degree
    # The right end of the cells belongs to the last cell. A B-spline is symmetric about
    # (degree + 1) / 2, so at this end it is computed at the mirrored place, with the slope of
    # opposite sign.
    t = inside.unsqueeze(-1) - offset
    at_end = (inside.detach() >= cells).unsqueeze(-1)
    mirrored_end = degree + 1 - (cells - offset)
    value = torch.where(at_end, cardinal(degree, mirrored_end), cardinal(degree, t))

    def slope(t):
        return cardinal(degree - 1, t) - cardinal(degree - 1, t - 1)

    beyond = (position - inside).unsqueeze(-1)
    slope_at_edge = torch.where(at_end, -slope(mirrored_end), slope(-offset).expand_as(value))
    return torch.where(beyond != 0, value.detach() + beyond * slope_at_edge, value)


def rows(d, davg, dstd, rcut_smth=RCUT_SMTH, rcut=RCUT):
    """Return the normalised rows R [..., 4] of Deep Potential's environment matrix."""
    r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    u = ((r - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)
    w = u**3 * (-6 * u**2 + 15 * u - 10) + 1
    return (torch.cat([w / r, w / r * d / r], -1) - davg) / dstd


def reference(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline="quintic"):
    live = (kind >= 0) & ~(d.detach().square().sum(-1) >= rcut**2)
    d = torch.where(live.unsqueeze(-1), d, 1.0)
    kind = kind.clamp(min=0).long()
    R = rows(d, davg[kind], dstd[kind], rcut_smth, rcut)
    degree = DEGREES[spline]
    begin, end = grid[kind].unbind(-1)
    position = (R[..., 0] - begin) * (functions - degree) / (end - begin)
    B = splines(degree, position, functions)
    kinds = torch.nn.functional.one_hot(kind, len(davg)).to(d) * live.unsqueeze(-1)
    return torch.einsum("isa,isk,isb->iakb", R, kinds, B)


def inputs(
    n=5, K=9, functions=16, spline="quintic", dtype=torch.float64, index=torch.int64, seed=0
):
    """Return random arguments with three kinds.

    Distances are from 0.7 to beyond the cutoff, and R[0] is beyond both ends of the grid.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(n, K, 3, dtype=torch.float64, generator=generator)
    r = 0.7 + 6 * torch.rand(n, K, 1, dtype=torch.float64, generator=generator)
    d = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True) * r
    kind = torch.randint(-1, 3, (n, K), generator=generator).to(index)
    davg = torch.tensor([[0.1, 0, 0, 0], [0.2, 0.01, 0.02, -0.03], [0, 0, 0, 0]])
    dstd = torch.tensor([[0.1, 0.05, 0.05, 0.05], [0.2, 0.1, 0.2, 0.3], [0.15, 0.1, 0.1, 0.1]])
    grid = torch.tensor([[-1.0, 13.0], [-0.5, 3.5], [0.3, 5.0]], dtype=torch.float64)
    constants = davg.double(), dstd.double(), grid
    return d.to(dtype), kind, *constants, functions, RCUT_SMTH, RCUT, spline


def smooth_inputs(spline="quintic"):
    """Return arguments with each R[0] inside a cell, where every derivative exists."""
    d, kind, davg, dstd, _, functions, *rest = inputs(n=2, K=4, spline=spline)
    r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    d = d / r * (1.5 + r / 2)
    kind[0, 0] = 0
    kind[0, 1] = 1
    kind[1, 0] = -1
    cells = functions - DEGREES[spline]
    grid = torch.tensor([[-3.0, 100.0], [-3, 20], [-3, 50]], dtype=torch.float64)
    grid[:, 1] = grid[:, 0] + 8.0 * cells  # cells of width 8
    return d.requires_grad_(), kind, davg, dstd, grid, functions, *rest


@pytest.mark.parametrize("spline", DEGREES)
@pytest.mark.parametrize("functions", [6, 7, 16, 61])
def test_sums_are_those_of_plain_pytorch(spline, functions):
    arguments = inputs(functions=functions, spline=spline)
    torch.testing.assert_close(
        environment_spline(*arguments), reference(*arguments), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("spline", DEGREES)
@pytest.mark.parametrize("functions", [6, 16, 61])
def test_derivatives_of_first_to_third_order_are_those_of_autograd(spline, functions):
    d, *rest = inputs(n=7, K=30, functions=functions, spline=spline)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(7, 4, 3, functions, dtype=d.dtype, generator=generator)
    tangents = torch.randn(2, *d.shape, dtype=d.dtype, generator=generator)

    def derivatives(f):
        leaf = d.clone().requires_grad_()
        weight = upstream.clone().requires_grad_()
        direction = tangents[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf, *rest), leaf, weight, create_graph=True)
        along = (first * direction).sum()
        second = torch.autograd.grad(along, (leaf, weight), create_graph=True)
        along = (second[0] * tangents[1]).sum()
        third = torch.autograd.grad(along, (leaf, weight, direction))
        return first, *second, *third

    for result, expected in zip(derivatives(environment_spline), derivatives(reference)):
        atol = 1e-11 * expected.detach().abs().max().item()
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=atol)


def test_a_fourth_derivative_is_an_error_in_both_modes():
    d, *rest = smooth_inputs()
    message = "calcops_models::environment_spline: expected derivatives in `d` up to third order, got a hi"
    assert_a_fourth_derivative_is_an_error(lambda d: environment_spline(d, *rest), d, message)


@pytest.mark.parametrize("spline", DEGREES)
def test_forward_and_reverse_mode_agree_in_every_mixture(spline):
    d, *rest = smooth_inputs(spline)
    d = d.detach()[:1, :2]
    rest[0] = rest[0][:1, :2]
    weights = torch.randn(1, 4, 3, 16, dtype=torch.float64)

    def scalar(d):
        return (environment_spline(d, *rest) * weights).sum()

    assert_modes_agree(scalar, d, rtol=1e-9, atol=1e-9)


def test_empty_slots_and_pairs_beyond_the_cutoff_add_exactly_nothing():
    d, kind, *rest = inputs(K=40)
    r = torch.linalg.vector_norm(d, dim=-1)
    is_left_out = (kind < 0) | (r >= RCUT)
    assert (r[kind >= 0] >= RCUT).any()
    P = environment_spline(d, torch.where(is_left_out, -1, kind), *rest)
    assert torch.equal(environment_spline(d, kind, *rest), P)
    assert_empty_slots_never_matter(
        lambda d: environment_spline(d, kind, *rest), kind < 0, is_left_out, d
    )


def test_a_pair_at_exactly_the_cutoff_adds_nothing():
    d, kind, *rest = inputs(n=1, K=2)
    kind[:] = 0
    d[0] = torch.tensor([[RCUT, 0, 0], [0, RCUT * (1 + 1e-15), 0]]).double()
    assert not environment_spline(d, kind, *rest).any()
    # At the cutoff R is -davg / dstd, which is not zero, so a pair just inside adds something.
    d[0, 0, 0] = RCUT * (1 - 1e-9)
    assert environment_spline(d, kind, *rest).any()


def test_the_order_of_empty_slots_changes_no_bit_and_the_order_of_pairs_only_rounding():
    d, kind, *rest = inputs(K=40)
    assert_the_order_of_slots_only_rounds(
        lambda d, kind: environment_spline(d, kind, *rest), d, kind=kind
    )


def test_outside_its_grid_a_b_spline_is_a_straight_line():
    davg = torch.zeros(1, 4, dtype=torch.float64)
    dstd = torch.ones(1, 4, dtype=torch.float64)
    grid = torch.tensor([[0.3, 0.5]], dtype=torch.float64)
    coefficients = torch.randn(16, dtype=torch.float64)
    kind = torch.zeros(1, 1, dtype=torch.int64)

    def g(s):
        """Return the spline at s, from the sums of one pair at distance 1/s."""
        d = torch.tensor([[[1 / s, 0.0, 0.0]]], dtype=torch.float64)
        P = environment_spline(d, kind, davg, dstd, grid, 16, 20.0, 30.0)
        return float(P[0, 0, 0] @ coefficients / s)

    for end, outwards in ((0.3, -0.01), (0.5, 0.01)):
        slope_inside = (g(end) - g(end - 1e-5 * outwards)) / (1e-5 * outwards)
        zero, one, two, ten = (g(end + steps * outwards) for steps in (0, 1, 2, 10))
        assert math.isclose(two - one, one - zero, rel_tol=1e-9)
        assert math.isclose(ten - two, 8 * (one - zero), rel_tol=1e-9)
        assert math.isclose((one - zero) / outwards, slope_inside, rel_tol=1e-2)


def test_float32_is_computed_in_float64():
    d, *rest = inputs(n=3, K=300)
    upstream = torch.randn(3, 4, 3, 16, dtype=torch.float64).float()
    results = []
    for leaf in (d.float().requires_grad_(), d.float().double().requires_grad_()):
        P = environment_spline(leaf, *rest)
        assert P.dtype == leaf.dtype
        results.append((P, *torch.autograd.grad(P, leaf, upstream.to(leaf.dtype))))
    for single, double in zip(*results):
        assert torch.equal(single, double.float())


def test_two_atoms_in_one_place_give_values_that_are_not_finite():
    d, kind, *rest = inputs(n=2, K=3)
    kind[:] = 1
    d[0, 1] = 0
    d.requires_grad_()
    P = environment_spline(d, kind, *rest)
    assert not P[0, :, 1].isfinite().all()
    assert P[1].isfinite().all()
    assert not P[:, :, 0].any()
    (grad,) = torch.autograd.grad(P.sum(), d)
    assert not grad[0, 1].isfinite().any()


def test_nan_in_a_vector_makes_the_sums_of_its_atom_and_kind_nan():
    d, kind, *rest = inputs(n=2, K=3)
    kind[:] = 1
    d[0, 1, 2] = math.nan
    P = environment_spline(d, kind, *rest)
    assert P[0, :, 1].isnan().any(-1).all()
    assert P[1].isfinite().all()


def test_empty_sizes_give_zeros_of_the_right_shape():
    for n, K in ((0, 3), (3, 0)):
        d, *rest = inputs(n=n, K=K)
        P = environment_spline(d.requires_grad_(), *rest)
        assert P.shape == (n, 4, 3, 16)
        assert not P.any()
        assert not torch.autograd.grad(P.sum(), d)[0].any()
    d, kind, davg, dstd, grid, *rest = inputs()
    P = environment_spline(d, torch.full_like(kind, -1), davg[:0], dstd[:0], grid[:0], *rest)
    assert P.shape == (5, 4, 0, 16)


def test_strides_and_threads_change_no_bit():
    d, kind, *rest = inputs(n=200)
    assert_strides_and_threads_change_no_bit(
        lambda *tensors: [environment_spline(*tensors, *rest)], d, kind
    )


# ---- vmap, torch.compile and torch.export, errors ------------------------------------------------


NAMES = "d", "kind", "davg", "dstd", "grid", "functions", "rcut_smth", "rcut", "spline"


def test_vmap_over_atoms_with_one_grid_and_with_a_grid_each_equals_a_loop():
    d, kind, davg, dstd, grid, *rest = inputs(n=6)
    items = d.view(3, 2, 9, 3), kind.view(3, 2, 9)

    def sums(d, kind, grid):
        return environment_spline(d, kind, davg, dstd, grid, *rest)

    assert_vmap_equals_a_loop(sums, *items, constant=grid)


def test_hessians_under_vmap_equal_a_loop():
    d, kind, *rest = smooth_inputs()
    d = d.detach()

    def energy(d, kind):
        return environment_spline(d[None], kind[None], *rest).square().sum()

    hessians = torch.vmap(torch.func.hessian(energy))(d, kind)
    expected = torch.stack([torch.func.hessian(energy)(*item) for item in zip(d, kind)])
    torch.testing.assert_close(hessians, expected, rtol=1e-10, atol=1e-10)


def test_opcheck_compile_and_export_pass_with_dynamic_sizes():
    d, kind, *rest = inputs(n=11, K=7)
    d.requires_grad_()
    opcheck(torch.ops.calcops_models.environment_spline.default, (d, kind, *rest))
    directions = torch.randn(11, 7, 2, 3, dtype=torch.float64, requires_grad=True)
    opcheck(
        torch.ops.calcops_models._environment_spline_along.default, (d, kind, *rest, directions)
    )
    upstream = torch.randn(11, 4, 3, 16, dtype=torch.float64, requires_grad=True)
    backward = torch.ops.calcops_models._environment_spline_backward.default
    opcheck(backward, (upstream, d, kind, *rest, None))
    one = directions.detach()[:, :, :1].requires_grad_()  # opcheck differentiates once more
    opcheck(backward, (upstream, d, kind, *rest, one))

    def of_tensors(d, kind, davg, dstd, grid):
        return environment_spline(d, kind, davg, dstd, grid, *rest[3:])

    slots = {0: torch.export.Dim("n"), 1: torch.export.Dim("K")}
    other = inputs(n=8, K=9, seed=5)[:5]
    assert_compiles_and_exports(
        of_tensors, (d, kind, *rest[:3]), (slots, slots, None, None, None), other
    )


def test_more_than_three_directions_are_refused():
    directions = torch.zeros(5, 9, 4, 3, dtype=torch.float64)
    d, kind, *rest = inputs()
    with pytest.raises(RuntimeError, match="D < 4"):
        torch.ops.calcops_models._environment_spline_along(d.double(), kind, *rest, directions)


def arguments_of(**sizes):
    return dict(zip(NAMES, inputs(**sizes)))


def random_arguments(draw, seed):
    return arguments_of(
        n=draw.choice([0, 1, 3]),
        K=draw.choice([0, 1, 6]),
        functions=draw.choice([6, 7, 16]),
        spline=draw.choice([*DEGREES]),
        dtype=draw.choice(DTYPES),
        index=draw.choice(INDICES),
        seed=seed,
    )


def test_any_call_gives_the_references_results_or_names_an_argument(one_thread):
    check_calls(environment_spline, random_arguments, reference, range(200))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"functions": 5}, "expected `functions`"),
        ({"rcut": 1.0}, "expected `rcut` > `rcut_smth` = 1, got 1"),
        ({"rcut": math.nan}, "expected `rcut` > `rcut_smth` = 1, got nan"),
        ({"rcut_smth": -1.0}, "expected `rcut_smth` >= 0, got -1"),
        ({"spline": "linear"}, "expected `spline`"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(changes, message):
    with pytest.raises(RuntimeError) as error:
        environment_spline(**arguments_of() | changes)
    assert "calcops_models::environment_spline: " in str(error.value), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("rcut", [1.0, 0.5, math.nan])
def test_a_cutoff_that_is_too_small_is_an_error_without_data_too(rcut):
    arguments = arguments_of() | {"rcut": rcut}
    message = "expected `rcut` > `rcut_smth` = 1, got"
    on_meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        environment_spline(**on_meta)
    compiled = torch.compile(environment_spline, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=message):
        compiled(**arguments)


def test_constants_of_any_value_read_no_memory_out_of_bounds():
    """AddressSanitizer (make test config=asan) finds such a read, or the process crashes."""
    d, kind, davg, dstd, grid, *rest = inputs()
    for value in (0.0, math.nan, math.inf, -1e300):
        for i in range(3):
            constants = [davg, dstd, grid]
            constants[i] = torch.full_like(constants[i], value)
            leaf = d.clone().requires_grad_()
            environment_spline(leaf, kind, *constants, *rest).sum().backward()
