"""The CUDA kernel of near_pairs on a GPU or in the emulation (kernels.py), around the width of a
warp."""

import pytest
import reference_models
import torch
from test_near_pairs import inputs, near_pairs


@pytest.mark.parametrize(
    "size", [(0, 4), (3, 0), (1, 1), (3, 31), (5, 32), (4, 33), (9, 70)], ids=str
)
@pytest.mark.parametrize("slots", [0, 5, 33, 70])
def test_cuda_kernel_packs_rows_as_the_reference(kernels, size, slots):
    arguments = *inputs(*size, natoms=size[0] + 2), 2.0, slots
    results = kernels(near_pairs, *arguments)
    for result, expected in zip(results, reference_models.near_pairs(*arguments), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)


def test_cuda_kernel_makes_nearest_nan_for_an_entry_that_does_not_exist(kernels):
    positions, list_neigh, image, offset = inputs(3, 40)
    list_neigh[0, 35] = 3
    image[2, 1] = -1
    list_neigh[2, 1] = 0
    near, _, _, nearest = kernels(near_pairs, positions, list_neigh, image, offset, 5.0, 40)
    assert nearest.isnan().tolist() == [True, False, True]
    assert near.max() < 3
