"""Slopes of warp_perspective: forward and reverse mode agree, also at pixel centres, where the
slopes to the left and to the right differ."""

import pytest
import torch
from reference_warp_perspective import BORDERS, TILTED, random_image
from torch.func import jacrev, jvp, vjp

from calcops_jit import warp_perspective

QUARTER_TURN = torch.tensor([[0.0, -1, 5], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
# Shifts by 1/3 and 2/3 of a pixel: numbers that arise in the division by w = 3, and are rounded.
THIRDS = torch.tensor([[3.0, 0, 1], [0, 3, 2], [0, 0, 3]], dtype=torch.float64)


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("inverse_map", [False, True])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-1030])
def test_both_modes_have_the_same_slope_at_pixel_centres_and_for_matrices_of_any_size(
    border_mode, inverse_map, interpolation, scale, device
):
    """Both modes must take the slope of the same side, and so must round a coordinate alike."""
    image = random_image(2, 9, 8).to(device)
    # The gradient of a tiny matrix is huge: without 2^-40 it would overflow float64.
    upstream = random_image(2, 7, 6, seed=7).to(device) * 2.0**-40
    image_tangent = random_image(2, 9, 8, seed=9).to(device) * 2.0**-40
    for matrix in (torch.eye(3, dtype=torch.float64), QUARTER_TURN, THIRDS, TILTED):
        warp = (matrix * scale).to(device)
        largest = warp.abs().max()
        direction = torch.linspace(-1, 1, 9, dtype=torch.float64, device=device).view(3, 3)

        def warped(image, warp):
            return warp_perspective(
                image, warp, (7, 6), interpolation, border_mode, inverse_map=inverse_map
            )

        _, forward = jvp(warped, (image, warp), (image_tangent, largest * direction))
        _, pull_back = vjp(warped, image, warp)
        image_gradient, warp_gradient = pull_back(upstream)
        reverse = (image_gradient * image_tangent).sum()
        reverse = reverse + ((warp_gradient * largest) * direction).sum()
        torch.testing.assert_close((forward * upstream).sum(), reverse, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("border_mode", [*BORDERS, "transparent"])
def test_at_pixel_centres_the_slope_is_the_one_from_the_right(
    border_mode, interpolation, axis, size, device
):
    """Pixel u of the result shows the image at u - 3 * size. With "linear", the difference quotient
    has no rounding error."""
    image = torch.tensor([3.0, -5, 1, 14, 8, -9], dtype=torch.float64, device=device)[:size]
    image = image.reshape((1, size) if axis == 0 else (size, 1))
    count = 6 * size + 1
    dsize = (1, count) if axis == 0 else (count, 1)
    place = (0, 2) if axis == 0 else (1, 2)
    step = 2.0**-20 if interpolation == "linear" else 2.0**-26

    def matrix(shift):
        warp = torch.eye(3, dtype=torch.float64, device=device)
        warp[place] = shift - 3 * size
        return warp

    def warped(warp):
        destination = image.new_zeros(dsize) if border_mode == "transparent" else None
        options = {"border_mode": border_mode, "inverse_map": True, "destination": destination}
        return warp_perspective(image, warp, dsize, interpolation, **options).flatten()

    warp = matrix(0)
    slope_to_the_right = (warped(matrix(step)) - warped(warp)) / step
    expected = slope_to_the_right
    if border_mode == "transparent":
        # Only the image's own pixels have a slope. For the last one it is the slope to the left, or
        # zero if the image has one pixel.
        first, last = 3 * size, 4 * size - 1
        slope_to_the_left = (warped(warp) - warped(matrix(-step))) / step
        expected = torch.zeros_like(slope_to_the_right)
        expected[first:last] = slope_to_the_right[first:last]
        expected[last] = slope_to_the_left[last] if size > 1 else 0
    tangent = torch.zeros_like(warp)
    tangent[place] = 1
    _, forward = jvp(warped, (warp,), (tangent,))
    reverse = jacrev(warped)(warp)[:, place[0], place[1]]
    tolerance = 0 if interpolation == "linear" else 1e-5
    torch.testing.assert_close(forward, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(reverse, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("inverse_map", [False, True])
def test_both_modes_agree_on_a_thousand_random_maps(border_mode, inverse_map, interpolation):
    """Up to rounding, <v, J u> = <J^T v, u>. The maps have sources at pixel centres, horizons
    beside and across the result, and matrices of any scale."""
    generator = torch.Generator().manual_seed(BORDERS.index(border_mode))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n = 250
    near = torch.eye(3, dtype=torch.float64) + normal(n, 3, 3) * torch.tensor(
        [[0.3], [0.3], [0.02]]
    )
    shifted = torch.eye(3, dtype=torch.float64).repeat(n, 1, 1)
    shifted[:, :2, 2] = torch.randint(-4, 5, (n, 2), generator=generator).double()
    across = near.clone()
    across[:, 2] = normal(n, 3) * 0.3  # W changes its sign within the picture
    scaled = near * 10.0 ** torch.randint(-300, 300, (n, 1, 1), generator=generator).double()
    warp = torch.cat([near, shifted, across, scaled])
    image = normal(4 * n, 2, 7, 6)
    image_tangent = normal(4 * n, 2, 7, 6)
    tangent = normal(4 * n, 3, 3) * warp.abs().amax((1, 2), keepdim=True)

    def warped(image, warp):
        return warp_perspective(
            image, warp, (5, 8), interpolation, border_mode, inverse_map=inverse_map
        )

    result, forward = jvp(warped, (image, warp), (image_tangent, tangent))
    upstream = normal(*result.shape)
    _, pull_back = vjp(warped, image, warp)
    image_gradient, warp_gradient = pull_back(upstream)
    products = [upstream * forward, image_gradient * image_tangent, warp_gradient * tangent]
    by_forward, by_image, by_warp = (x.flatten(1).sum(1) for x in products)
    magnitude = sum(x.abs().flatten(1).sum(1) for x in products)
    assert torch.isfinite(magnitude).all()
    # Some maps show nothing of the image, but more than 80 % of them do.
    assert (magnitude > 0.1).double().mean() > 0.8
    error = (by_forward - by_image - by_warp).abs()
    assert (error <= 1e-12 * magnitude).all(), warp[(error / magnitude).nan_to_num().argmax()]
