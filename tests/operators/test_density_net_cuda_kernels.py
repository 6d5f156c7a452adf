"""The CUDA kernel of density_net on a GPU or in the emulation (kernels.py)."""

import pytest
import reference_models
import torch
from test_density_net import density_net, inputs

SIZES = [
    dict(n=0),
    dict(n=1),
    dict(R=0),
    dict(F=1, n=300),
    dict(F=13, H=25),
    dict(M=0),
    dict(P=1, N=1),
    dict(K=1),
    dict(K=129),
    dict(K=0),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_kernel_gives_energies_and_gradients_of_the_reference(kernels, size, dtype):
    arguments = inputs(**size, dtype=dtype)
    results = kernels(density_net, **arguments)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for result, expected in zip(results, reference_models.density_net(**arguments), strict=True):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=10 * tolerance)


def test_cuda_kernel_makes_energies_nan_for_entries_that_do_not_exist(kernels):
    arguments = inputs()
    arguments["net"][:] = torch.tensor([0, 1, 2, -2, 0, 1, -1])
    energy, *_ = kernels(density_net, **arguments)
    assert energy.isnan().tolist() == [False, False, True, True, False, False, False]
    arguments["invariant"][3] = 5
    energy, *_ = kernels(density_net, **arguments)
    assert energy[:2].isnan().all()
    arguments["invariant"][3] = 0
    arguments["factors"][3, 0] = 9
    energy, *_ = kernels(density_net, **arguments)
    assert energy[:2].isnan().all()
