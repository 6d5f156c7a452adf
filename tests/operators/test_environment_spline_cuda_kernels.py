"""The CUDA kernels of environment_spline on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

A block has one atom and takes 32 slots at a time. Each of its 128 threads has a B-spline. In the
backward kernel a thread has a slot.
"""

import torch
from test_environment_spline import inputs

ops = torch.ops.calcops_models


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
