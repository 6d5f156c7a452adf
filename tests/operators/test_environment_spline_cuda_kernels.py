"""The CUDA kernels of environment_spline at every boundary of theirs, on a GPU or in the emulation
(kernels.py).

A block has an atom and takes 32 slots at a time; its 128 threads have a B-spline each. In the backward
a thread has a slot.
"""

import pytest
import torch
from kernels import same_bits
from reference import assert_equal_lists
from test_environment_spline import inputs

ops = torch.ops.calcops
# Atoms, slots and functions of each of three kinds.
SIZES = [(0, 3, 6), (3, 0, 6), (1, 1, 6), (2, 31, 16), (1, 32, 42), (3, 33, 43), (1, 65, 90)]


def close(ours, theirs):
    exact = theirs[0].dtype == torch.float64
    tolerance = dict(rtol=1e-10, atol=1e-8) if exact else dict(rtol=1e-5, atol=1e-2)
    assert_equal_lists(ours, theirs, **tolerance)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("spline", ["quintic", "cubic"])
@pytest.mark.parametrize(
    ("dtype", "index"), [(torch.float32, torch.int32), (torch.float64, torch.int64)]
)
def test_sums_and_gradients(kernels, size, spline, dtype, index):
    n, K, functions = size
    given = inputs(n, K, functions, spline, dtype, index)
    ours = kernels(ops.environment_spline, *given)
    close(ours, [ops.environment_spline(*given)])
    same_bits(kernels(ops.environment_spline, *given), ours)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(n, 4, 3, functions, generator=generator).to(dtype)
    for count in (None, 1, 2, 3):
        directions = None
        if count:
            directions = torch.randn(n, K, count, 3, generator=generator).to(dtype)
            along = ops._environment_spline_along
            close(kernels(along, *given, directions), [along(*given, directions)])
        backward = ops._environment_spline_backward
        arguments = upstream, *given, directions
        close(kernels(backward, *arguments), [backward(*arguments)])


def test_a_wrong_kind_makes_its_atom_nan(kernels):
    given = inputs()
    right = ops.environment_spline(*given)
    given[1][2, 4] = 7
    (P,) = kernels(ops.environment_spline, *given)
    assert P[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.allclose(P[others].cpu(), right[others])
    (grad,) = kernels(ops._environment_spline_backward, torch.ones_like(right), *given)
    assert grad[2, 4].isnan().all() and grad.isnan().sum() == 3
