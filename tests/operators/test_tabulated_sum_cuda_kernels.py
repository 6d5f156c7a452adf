"""The CUDA kernels of tabulated_sum on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

A block sums one atom and takes 32 slots at a time. Each of its 128 threads sums one function. In
the backward kernel a warp computes one slot, and a block computes four.
"""

import torch
from test_tabulated_sum import inputs

ops = torch.ops.calcops_models


def test_sums_of_many_slots_and_functions_are_those_of_the_cpu(kernels):
    """A block takes 32 slots at a time, and each of its 128 threads sums one function."""
    arguments = inputs(n=2, K=65, M=129)
    (T,) = kernels(ops.tabulated_sum, *arguments)
    torch.testing.assert_close(T, ops.tabulated_sum(*arguments), rtol=1e-12, atol=1e-10)


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
