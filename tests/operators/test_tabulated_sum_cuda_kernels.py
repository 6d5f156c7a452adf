"""The CUDA kernels of tabulated_sum on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

A block sums one atom and takes 32 slots at a time. Each of its 128 threads sums one function. In
the backward kernel a warp computes one slot, and a block computes four.
"""

import pytest
import torch
from kernels import alternating, same_bits
from reference import assert_equal_lists
from test_tabulated_sum import inputs

ops = torch.ops.calcops_models
# (n, K, M)
SIZES = [
    (0, 3, 5),
    (3, 0, 5),
    (3, 4, 0),
    (1, 1, 1),
    (2, 31, 31),
    (1, 32, 32),
    (3, 33, 127),
    (2, 3, 128),
    (1, 65, 129),
    (5, 5, 260),
]


def assert_close(results, expected):
    is_double = expected[0].dtype == torch.float64
    tolerance = dict(rtol=1e-12, atol=1e-10) if is_double else dict(rtol=1e-4, atol=2e-2)
    assert_equal_lists(results, expected, **tolerance)


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES), ids=str)
@pytest.mark.parametrize("order", [0, 1, 3])
def test_sums_and_gradients_are_those_of_the_cpu(kernels, size, order, dtype, index):
    n, K, M = size
    arguments = *inputs(n, K, M, dtype, index=index), order
    results = kernels(ops.tabulated_sum, *arguments)
    assert_close(results, [ops.tabulated_sum(*arguments)])
    same_bits(kernels(ops.tabulated_sum, *arguments), results)
    upstream = torch.randn(n, 4, M, generator=torch.Generator().manual_seed(0)).to(dtype)
    for mask in ([True, True], [True, False], [False, True]):
        expected = ops._tabulated_sum_backward(upstream, *arguments, mask)
        gradients = kernels(ops._tabulated_sum_backward, upstream, *arguments, mask)
        assert_close(gradients, expected)


def test_a_wrong_kind_makes_its_atom_nan(kernels):
    x, R, kind, table, grid = inputs()
    expected = ops.tabulated_sum(x, R, kind, table, grid)
    kind[2, 4] = 7
    (T,) = kernels(ops.tabulated_sum, x, R, kind, table, grid)
    assert T[2].isnan().all()
    others = [0, 1, 3, 4]
    assert T[others].isfinite().all()
    assert torch.allclose(T[others].cpu(), expected[others])
    arguments = torch.ones_like(expected), x, R, kind, table, grid, 0, [True, True]
    of_x, of_R = kernels(ops._tabulated_sum_backward, *arguments)
    assert of_x[2, 4].isnan()
    assert of_R[2, 4].isnan().all()
    assert of_x.isnan().sum() == 1
