"""calcops::environment_spline under vmap, torch.compile and torch.export, and its errors."""

import math

import pytest
import torch
from reference import assert_equal_lists, opcheck
from test_environment_spline import inputs, smooth_inputs

import calcops_jit

environment_spline = calcops_jit.environment_spline
NAMES = "d", "kind", "davg", "dstd", "grid", "functions", "rcut_smth", "rcut", "spline"


@pytest.mark.parametrize("chunk", [None, 2])
def test_vmap_over_atoms_with_one_grid_and_with_a_grid_each_equals_a_loop(chunk):
    d, kind, davg, dstd, grid, *rest = inputs(n=6)
    d = d.view(3, 2, 9, 3)
    kind = kind.view(3, 2, 9)

    def sums(d, kind, grid):
        return environment_spline(d, kind, davg, dstd, grid, *rest)

    expected = torch.stack([sums(*item, grid) for item in zip(d, kind)])
    result = torch.vmap(sums, (0, 0, None), chunk_size=chunk)(d, kind, grid)
    assert torch.equal(result, expected)
    grids = torch.stack([grid, 2 * grid, 3 * grid])
    expected = torch.stack([sums(*item) for item in zip(d, kind, grids)])
    assert torch.equal(torch.vmap(sums)(d, kind, grids), expected)


def test_hessians_under_vmap_equal_a_loop():
    d, kind, *rest = smooth_inputs()
    d = d.detach()

    def energy(d, kind):
        return environment_spline(d[None], kind[None], *rest).square().sum()

    hessians = torch.vmap(torch.func.hessian(energy))(d, kind)
    expected = torch.stack([torch.func.hessian(energy)(*item) for item in zip(d, kind)])
    torch.testing.assert_close(hessians, expected, rtol=1e-10, atol=1e-10)


def test_opcheck_compile_and_export_pass_with_dynamic_sizes():
    d, kind, *rest = inputs(K=4)
    d.requires_grad_()
    opcheck(torch.ops.calcops.environment_spline.default, (d, kind, *rest))
    directions = torch.randn(5, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    opcheck(torch.ops.calcops._environment_spline_along.default, (d, kind, *rest, directions))
    upstream = torch.randn(5, 4, 3, 16, dtype=torch.float64, requires_grad=True)
    backward = torch.ops.calcops._environment_spline_backward.default
    opcheck(backward, (upstream, d, kind, *rest, None))
    one = directions.detach()[:, :, :1].requires_grad_()  # opcheck differentiates once more
    opcheck(backward, (upstream, d, kind, *rest, one))

    compiled = torch.compile(environment_spline, fullgraph=True, dynamic=True)
    result = torch.autograd.grad(compiled(d, kind, *rest).square().sum(), d)
    expected = torch.autograd.grad(environment_spline(d, kind, *rest).square().sum(), d)
    assert_equal_lists(result, expected)

    class Module(torch.nn.Module):
        def forward(self, d, kind, davg, dstd, grid):
            return environment_spline(d, kind, davg, dstd, grid, *rest[3:])

    n = torch.export.Dim("n")
    K = torch.export.Dim("K")
    sizes = {"d": {0: n, 1: K}, "kind": {0: n, 1: K}, "davg": None, "dstd": None, "grid": None}
    program = torch.export.export(Module(), (d.detach(), kind, *rest[:3]), dynamic_shapes=sizes)
    other = inputs(n=8, K=3, seed=5)
    assert torch.equal(program.module()(*other[:5]), environment_spline(*other))


def test_more_than_three_directions_are_refused():
    directions = torch.zeros(5, 9, 4, 3, dtype=torch.float64)
    d, kind, *rest = inputs()
    with pytest.raises(RuntimeError, match="D < 4"):
        torch.ops.calcops._environment_spline_along(d.double(), kind, *rest, directions)


def arguments_with(**changes):
    return dict(zip(NAMES, inputs())) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"d": torch.zeros(5, 9, 3, dtype=torch.int64)},
            "expected `d` float32 or float64, got Long",
        ),
        ({"d": torch.zeros(5, 9, 4)}, "expected `d` of shape [n, K, 3]"),
        ({"kind": torch.zeros(5, 8, dtype=torch.int64)}, "expected `kind` of shape [n, K]"),
        ({"kind": torch.zeros(5, 9)}, "expected `kind` int32 or int64, got"),
        ({"kind": torch.full((5, 9), 3)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
        ({"kind": torch.full((5, 9), -2)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
        ({"davg": torch.zeros(3, 3)}, "expected `davg` of shape [kinds, 4]"),
        ({"davg": torch.zeros(3, 4, dtype=torch.int64)}, "expected `davg` float32 or float64"),
        ({"dstd": torch.zeros(2, 4)}, "expected `dstd` of shape [kinds, 4]"),
        ({"grid": torch.zeros(3, 5)}, "expected `grid` of shape [kinds, 2]"),
        ({"functions": 5}, "expected `functions`"),
        ({"rcut": 1.0}, "expected `rcut` > `rcut_smth` = 1, got 1"),
        ({"rcut": math.nan}, "expected `rcut` > `rcut_smth` = 1, got nan"),
        ({"rcut_smth": -1.0}, "expected `rcut_smth` >= 0, got -1"),
        ({"spline": "linear"}, "expected `spline`"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(changes, message):
    with pytest.raises(RuntimeError) as error:
        environment_spline(**arguments_with(**changes))
    assert "calcops::environment_spline: " in str(error.value), error.value
    assert message in str(error.value), error.value


@pytest.mark.parametrize("name", ["davg", "dstd", "grid"])
def test_a_gradient_of_a_constant_is_an_error(name):
    arguments = arguments_with()
    arguments[name].requires_grad_()
    P = environment_spline(**arguments)
    with pytest.raises(RuntimeError, match=f"expected `{name}` that requires no gradient"):
        P.sum().backward()


@pytest.mark.parametrize("name", ["davg", "dstd", "grid"])
def test_a_tangent_of_a_constant_is_an_error(name):
    arguments = arguments_with()
    constant = arguments.pop(name)
    with pytest.raises(RuntimeError, match=rf"expected `{name}` that has no tangent, got .* \[3, "):
        torch.func.jvp(
            lambda constant: environment_spline(**arguments, **{name: constant}),
            (constant,),
            (constant,),
        )


@pytest.mark.parametrize("rcut", [1.0, 0.5, math.nan])
def test_a_cutoff_that_is_too_small_is_an_error_without_data_too(rcut):
    arguments = arguments_with(rcut=rcut)
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
