"""The CUDA kernel of screened_repulsion on a GPU or in the emulation (kernels.py)."""

import pytest
import reference_models
import torch
from test_screened_repulsion import ROW, pairs_at, screened_repulsion


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (130, 7)], ids=str)
def test_cuda_kernel_gives_the_reference(kernels, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(dtype)
    kind = torch.randint(-1, 2, shape, generator=generator)
    table = torch.tensor([ROW, [0.0, 2.0, *ROW[2:]]], dtype=dtype)
    results = kernels(screened_repulsion, d, kind, table)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    for result, expected in zip(results, reference_models.screened_repulsion(d, kind, table)):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_cuda_kernel_makes_the_energy_nan_for_a_kind_that_does_not_exist(kernels):
    d, kind, table = pairs_at(1.0, 1.1)
    kind[0, 1] = 1
    energy, _ = kernels(screened_repulsion, d, kind, table)
    assert energy.isnan().item()
