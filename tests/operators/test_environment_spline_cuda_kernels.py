"""The CUDA kernels of environment_spline on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

A block has one atom and takes 32 slots at a time. Each of its 128 threads has a B-spline. In the
backward kernel a thread has a slot.
"""

import pytest
import torch
from kernels import alternating, same_bits
from reference import assert_equal_lists
from test_environment_spline import inputs

ops = torch.ops.calcops_models
# Atoms, slots and functions of each of three kinds.
SIZES = [(0, 3, 6), (3, 0, 6), (1, 1, 6), (2, 31, 16), (1, 32, 42), (3, 33, 43), (1, 65, 90)]


def assert_close(results, expected):
    exact = expected[0].dtype == torch.float64
    tolerance = dict(rtol=1e-10, atol=1e-8) if exact else dict(rtol=1e-5, atol=1e-2)
    assert_equal_lists(results, expected, **tolerance)


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES), ids=str)
@pytest.mark.parametrize("spline", ["quintic", "cubic"])
def test_sums_and_gradients_are_those_of_the_cpu(kernels, size, spline, dtype, index):
    n, K, functions = size
    arguments = inputs(n, K, functions, spline, dtype, index)
    results = kernels(ops.environment_spline, *arguments)
    assert_close(results, [ops.environment_spline(*arguments)])
    same_bits(kernels(ops.environment_spline, *arguments), results)
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(n, 4, 3, functions, generator=generator).to(dtype)
    for count in (None, 1, 2, 3):
        directions = None
        if count:
            directions = torch.randn(n, K, count, 3, generator=generator).to(dtype)
            along = ops._environment_spline_along
            result = kernels(along, *arguments, directions)
            assert_close(result, [along(*arguments, directions)])
        if count == 3:  # its gradient would be a fourth derivative
            continue
        backward = ops._environment_spline_backward
        gradient = kernels(backward, upstream, *arguments, directions)
        assert_close(gradient, [backward(upstream, *arguments, directions)])


def test_a_wrong_kind_makes_its_atom_nan(kernels):
    arguments = inputs()
    expected = ops.environment_spline(*arguments)
    kind = arguments[1]
    kind[2, 4] = 7
    (P,) = kernels(ops.environment_spline, *arguments)
    assert P[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.allclose(P[others].cpu(), expected[others])
    (grad,) = kernels(ops._environment_spline_backward, torch.ones_like(expected), *arguments)
    assert grad[2, 4].isnan().all()
    assert grad.isnan().sum() == 3
