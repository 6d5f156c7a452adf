"""matrix_product: a row's bits do not depend on other rows; NaN and infinity."""

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import torch

matrix_product = torch.ops.calcops_models.matrix_product


def inputs(N=20, K=16, M=12, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(K, M, dtype=torch.float64, generator=generator)
    return x.to(dtype), weights.to(dtype)


def test_other_rows_change_no_bit():
    x, weights = inputs(500, 100, 77)
    expected = matrix_product(x, weights)
    for begin, end in ((0, 1), (3, 10), (47, 401)):
        assert torch.equal(matrix_product(x[begin:end], weights), expected[begin:end])


def test_nan_and_infinity_reach_only_their_row_and_column():
    x, weights = inputs()
    x[3, 2] = torch.nan
    weights[1, 5] = torch.inf
    result = matrix_product(x, weights)
    assert torch.equal(result.isfinite(), (x @ weights).isfinite())
