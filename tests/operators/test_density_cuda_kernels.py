"""The CUDA kernels of density on a GPU or in the emulation (kernels.py), at the sizes at which they
branch.

In the sums, a block has one atom. It takes 32 slots at a time, fewer with directions, and 16
functions. In the gradient for d, a thread has a slot. In that for the table, a block has a share of
the slots.
"""

import pytest
import torch
from kernels import alternating, same_bits
from reference import assert_equal_lists
from test_density import inputs

ops = torch.ops.calcops_models
# Atoms, slots, functions, harmonics and rows of the table.
SIZES = [
    (0, 3, 5, 25, 6),
    (3, 0, 5, 4, 6),
    (1, 1, 1, 1, 6),
    (2, 31, 16, 9, 7),
    (3, 33, 17, 16, 9),
    (2, 65, 33, 25, 16),
    (5, 33, 3, 1, 16),
]


def assert_close(results, expected):
    exact = expected[0].dtype == torch.float64
    tolerance = dict(rtol=1e-10, atol=1e-8) if exact else dict(rtol=1e-5, atol=1e-2)
    assert_equal_lists(results, expected, **tolerance)


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES), ids=str)
@pytest.mark.parametrize("begin", [0.0, 1.5])
def test_sums_and_gradients_are_those_of_the_cpu(kernels, size, begin, dtype, index):
    n, K, functions, harmonics, rows = size
    arguments = inputs(n, K, functions, harmonics, rows, begin, dtype, index)
    results = kernels(ops.density, *arguments)
    assert_close(results, [ops.density(*arguments)])
    same_bits(kernels(ops.density, *arguments), results)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(harmonics, n, functions, generator=generator).to(dtype)
    for count in (None, 1, 2, 3):
        directions = None
        if count:
            directions = torch.randn(n, K, count, 3, generator=generator).to(dtype)
            along = ops._density_along
            assert_close(kernels(along, *arguments, directions), [along(*arguments, directions)])
        for backward in (ops._density_backward, ops._density_table_backward):
            if count == 3 and backward is ops._density_backward:
                continue
            gradient = kernels(backward, upstream, *arguments, directions)
            assert_close(gradient, [backward(upstream, *arguments, directions)])


def test_a_wrong_kind_makes_its_atom_and_the_gradients_nan(kernels):
    arguments = inputs()
    expected = ops.density(*arguments)
    kind = arguments[1]
    kind[2, 4] = 7
    (A,) = kernels(ops.density, *arguments)
    assert A[:, 2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(A[:, others], expected[:, others])
    (grad,) = kernels(ops._density_backward, torch.ones_like(expected), *arguments)
    assert grad[2, 4].isnan().all()
    assert grad.isnan().sum() == 3
    (of_table,) = kernels(ops._density_table_backward, torch.ones_like(expected), *arguments)
    assert of_table.isnan().any()


def test_a_pair_in_one_place_and_a_grid_that_does_not_rise_give_nan(kernels):
    d, kind, table, grid, harmonics = inputs(n=2, K=3)
    kind[:] = 0
    d[0, 1] = 0
    (A,) = kernels(ops.density, d, kind, table, grid, harmonics)
    assert A[:, 0].isnan().all() and A[:, 1].isfinite().all()
    grid[0, 0] = grid[0, 1] = 6.0
    (A,) = kernels(ops.density, d, kind, table, grid, harmonics)
    assert A.isnan().all()
