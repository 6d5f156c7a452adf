"""The CUDA kernel of matrix_product on a GPU or in the emulation (kernels.py), at sizes around
those of its tiles of 32 x 32."""

import pytest
import torch
from test_matrix_product import inputs

# (N, K, M)
SIZES = [(0, 3, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1), (31, 31, 33), (32, 32, 32), (65, 40, 33)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_torch(kernels, size, dtype):
    x, weights = inputs(*size, dtype)
    (y,) = kernels(torch.ops.calcops_models.matrix_product, x, weights)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(y, x @ weights, rtol=tolerance, atol=20 * tolerance)
