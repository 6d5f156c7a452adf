"""matrix_product against torch.mm: values, derivatives, sizes around those of the tiles,
transforms, errors."""

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch
from fuzz import DTYPES, check_calls
from reference import (
    assert_compiles_and_exports,
    assert_strides_and_threads_change_no_bit,
    assert_vmap_equals_a_loop,
    opcheck,
)

matrix_product = torch.ops.calcops_models.matrix_product
# Around multiples of the CPU kernel's tile.
ROWS = 0, 1, 5, 6, 7, 47, 48, 49, 100
COLUMNS = 0, 1, 7, 8, 9, 31, 32, 33, 64, 65, 100


def inputs(N=20, K=16, M=12, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(K, M, dtype=torch.float64, generator=generator)
    return x.to(dtype), weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [0, 1, 33])
def test_products_of_every_size_are_those_of_torch(K, dtype):
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for N in ROWS:
        for M in COLUMNS:
            x, weights = inputs(N, K, M, dtype)
            result = matrix_product(x, weights)
            torch.testing.assert_close(result, x @ weights, rtol=tolerance, atol=20 * tolerance)


def test_first_and_second_derivatives_are_right_in_both_modes():
    leaves = [t.requires_grad_() for t in inputs(5, 4, 3)]
    assert torch.autograd.gradcheck(matrix_product, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(matrix_product, leaves, check_fwd_over_rev=True)


def test_other_rows_change_no_bit():
    x, weights = inputs(500, 100, 77)
    expected = matrix_product(x, weights)
    for begin, end in ((0, 1), (3, 10), (47, 401)):
        assert torch.equal(matrix_product(x[begin:end], weights), expected[begin:end])


def test_strides_and_threads_change_no_bit():
    assert_strides_and_threads_change_no_bit(
        lambda *tensors: [matrix_product(*tensors)], *inputs(500, 100, 77)
    )


def test_nan_and_infinity_reach_only_their_row_and_column():
    x, weights = inputs()
    x[3, 2] = torch.nan
    weights[1, 5] = torch.inf
    result = matrix_product(x, weights)
    assert torch.equal(result.isfinite(), (x @ weights).isfinite())


def test_vmap_over_rows_and_over_weights_equals_a_loop():
    x, weights = inputs(12)
    assert_vmap_equals_a_loop(matrix_product, x.view(3, 4, 16), constant=weights)


def test_opcheck_compile_and_export_pass_with_dynamic_sizes():
    leaves = [t.requires_grad_() for t in inputs()]
    opcheck(torch.ops.calcops_models.matrix_product.default, leaves)
    sizes = {0: torch.export.Dim("N")}, None
    assert_compiles_and_exports(matrix_product, leaves, sizes, inputs(31, seed=1))


def test_any_call_gives_the_references_results_or_names_an_argument(one_thread):
    def random_arguments(draw, seed):
        sizes = [draw.choice([0, 1, 5, 33]) for _ in range(3)]
        return dict(zip(("x", "weights"), inputs(*sizes, draw.choice(DTYPES), seed)))

    check_calls(matrix_product, random_arguments, lambda x, weights: x @ weights, range(200))
