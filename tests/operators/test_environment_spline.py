"""environment_spline: the cutoff, the order of slots, precision, NaN, the fourth derivative, errors."""

import itertools
import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from reference import assert_a_fourth_derivative_is_an_error, assert_the_order_of_slots_only_rounds

import calcops_jit

environment_spline = torch.ops.calcops_models.environment_spline
RCUT_SMTH, RCUT = 1.0, 6.0
NAMES = "d", "kind", "davg", "dstd", "grid", "functions", "rcut_smth", "rcut", "spline"


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


def test_a_fourth_derivative_is_an_error_in_both_modes():
    d, kind, *rest = inputs(n=2, K=4)
    kind[:] = 0
    message = "calcops_models::environment_spline: expected `d` in derivatives up to third order, got a hi"
    assert_a_fourth_derivative_is_an_error(
        lambda d: environment_spline(d, kind, *rest), d.requires_grad_(), message
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


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rcut": 1.0}, "expected `rcut` > `rcut_smth` = 1, got 1"),
        ({"rcut": math.nan}, "expected `rcut` > `rcut_smth` = 1, got nan"),
        ({"rcut_smth": -1.0}, "expected `rcut_smth` >= 0, got -1"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(changes, message):
    with pytest.raises(RuntimeError) as error:
        environment_spline(**dict(zip(NAMES, inputs())) | changes)
    assert "calcops_models::environment_spline: " in str(error.value), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("rcut", [1.0, 0.5, math.nan])
def test_a_cutoff_that_is_too_small_is_an_error_without_data_too(rcut):
    arguments = dict(zip(NAMES, inputs())) | {"rcut": rcut}
    message = "expected `rcut` > `rcut_smth` = 1, got"
    on_meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        environment_spline(**on_meta)
    compiled = torch.compile(environment_spline, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=message):
        compiled(**arguments)


def test_constants_of_any_value_read_no_memory_out_of_bounds():
    pytest.importorskip("hypothesis")
    for name, value in itertools.product(
        ("davg", "dstd", "grid"), (0.0, math.nan, math.inf, -1e300)
    ):
        arguments = dict(zip(NAMES, inputs()))
        arguments[name].fill_(value)
        calcops_jit.check(environment_spline, "memory", arguments)
