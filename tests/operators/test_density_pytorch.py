"""calcops::density under vmap, torch.compile and torch.export, and its errors."""

import math

import pytest
import torch
from reference import assert_equal_lists, opcheck
from test_density import inputs
from test_density_derivatives import smooth_inputs
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit

density = calcops_jit.density
ops = torch.ops.calcops
NAMES = "d", "kind", "table", "grid", "harmonics"


@pytest.mark.parametrize("chunk", [None, 2])
def test_vmap_over_atoms_with_one_table_and_with_a_table_each_equals_a_loop(chunk):
    d, kind, table, *rest = inputs(n=6)
    d = d.view(3, 2, 9, 3)
    kind = kind.view(3, 2, 9)

    def sums(d, kind, table):
        return density(d, kind, table, *rest)

    expected = torch.stack([sums(*item, table) for item in zip(d, kind)])
    result = torch.vmap(sums, (0, 0, None), chunk_size=chunk)(d, kind, table)
    assert torch.equal(result, expected)
    tables = torch.stack([table, 2 * table, 3 * table])
    expected = torch.stack([sums(*item) for item in zip(d, kind, tables)])
    assert torch.equal(torch.vmap(sums)(d, kind, tables), expected)


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


def test_compiled_training_step_and_exported_program_equal_eager_at_other_sizes():
    def step(d, kind, table, grid):
        energy = density(d, kind, table, grid, 25).square().sum()
        (slope,) = torch.autograd.grad(energy, d, create_graph=True)
        return torch.autograd.grad(energy + slope.square().sum(), table)

    d, kind, table, grid, _ = inputs(K=4)
    d.requires_grad_()
    table.requires_grad_()
    forward = torch.compile(density, fullgraph=True, dynamic=True)
    for size in (5, 3):
        other_d = d[:size].detach().requires_grad_()
        A = forward(other_d, kind[:size], table, grid, 25)
        result = torch.autograd.grad(A.square().sum(), (other_d, table))
        A = density(other_d, kind[:size], table, grid, 25)
        expected = torch.autograd.grad(A.square().sum(), (other_d, table))
        assert_equal_lists(result, expected, rtol=1e-12, atol=1e-12)
    traced = make_fx(step, tracing_mode="symbolic")(d, kind, table, grid)
    other = inputs(n=7, K=6, seed=3)[:4]
    leaves = other[0].requires_grad_(), other[1], other[2].requires_grad_(), other[3]
    assert_equal_lists(traced(*leaves), step(*leaves), rtol=1e-12, atol=1e-12)

    class Module(torch.nn.Module):
        def forward(self, d, kind, table, grid):
            return density(d, kind, table, grid, 25)

    n = torch.export.Dim("n")
    K = torch.export.Dim("K")
    sizes = {"d": {0: n, 1: K}, "kind": {0: n, 1: K}, "table": None, "grid": None}
    arguments = d.detach(), kind, table.detach(), grid
    program = torch.export.export(Module(), arguments, dynamic_shapes=sizes)
    other = inputs(n=8, K=3, seed=5)
    assert torch.equal(program.module()(*other[:4]), density(*other))


def arguments_with(**changes):
    return dict(zip(NAMES, inputs())) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"d": torch.zeros(5, 9, 3, dtype=torch.int64)}, "expected `d` float32 or float64"),
        ({"d": torch.zeros(5, 9, 4)}, "expected `d` of shape [n, K, 3]"),
        ({"kind": torch.zeros(5, 8, dtype=torch.int64)}, "expected `kind` of shape [n, K]"),
        ({"kind": torch.zeros(5, 9)}, "expected `kind` int32 or int64, got"),
        ({"kind": torch.full((5, 9), 3)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
        ({"kind": torch.full((5, 9), -2)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
        ({"table": torch.zeros(3, 16, 5)}, "expected `table` of dtype Double like `d`"),
        ({"table": torch.zeros(3, 16).double()}, "expected `table` of shape [kinds, B, F]"),
        ({"table": torch.zeros(3, 5, 5).double()}, "expected `table` with B >= 6, got [3, 5, 5]"),
        ({"grid": torch.zeros(2, 2)}, "expected `grid` of shape [kinds, 2]"),
        ({"grid": torch.zeros(3, 2, dtype=torch.int64)}, "expected `grid` float32 or float64"),
        ({"grid": torch.zeros(3, 2)}, "expected `grid` 0 <= first < last, got 0.0"),
        ({"grid": torch.tensor([[0, 1.0]] * 2 + [[-1, 1]])}, "expected `grid` 0 <= first < last"),
        ({"grid": torch.tensor([[0, 1.0]] * 2 + [[0, math.nan]])}, "expected `grid` 0 <= first"),
        ({"harmonics": 0}, "expected `harmonics`"),
        ({"harmonics": 5}, "expected `harmonics` 1, 4, 9, 16 or 25, got 5"),
        ({"harmonics": 36}, "expected `harmonics`"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(changes, message):
    with pytest.raises(RuntimeError) as error:
        density(**arguments_with(**changes))
    assert "calcops::density: " in str(error.value), error.value
    assert message in str(error.value), error.value


def test_derivatives_for_the_grid_are_errors_in_both_modes():
    arguments = arguments_with()
    grid = arguments.pop("grid")
    A = density(**arguments, grid=grid.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="expected `grid` that requires no gradient"):
        A.sum().backward()
    with pytest.raises(RuntimeError, match="expected `grid` that has no tangent"):
        torch.func.jvp(lambda grid: density(**arguments, grid=grid), (grid,), (grid,))


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
