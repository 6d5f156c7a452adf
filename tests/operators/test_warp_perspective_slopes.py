"""The slopes of warp_perspective: both modes agree, at pixel centres too."""

import pytest
import torch
from reference_warp_perspective import BORDERS, TILTED, random_image
from torch.func import jacrev, jvp, vjp

from calcops_jit import warp_perspective

QUARTER_TURN = torch.tensor([[0.0, -1, 5], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)


# Dividing by 3 rounds.
THIRDS = torch.tensor([[3.0, 0, 1], [0, 3, 2], [0, 0, 3]], dtype=torch.float64)


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("inverse_map", [False, True])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-1030])
def test_both_modes_have_the_same_slope_at_pixel_centres_and_for_matrices_of_any_size(
    border_mode, inverse_map, interpolation, scale, device
):
    """Left and right of a centre the slopes differ: both modes must see the coordinate on the same
    side."""
    image = random_image(2, 9, 8).to(device)
    upstream, towards = (
        random_image(2, *s, seed=s[0]).to(device) * 2.0**-40 for s in ((7, 6), (9, 8))
    )
    for matrix in (torch.eye(3, dtype=torch.float64), QUARTER_TURN, THIRDS, TILTED):
        warp = (matrix * scale).to(device)
        tangent = (
            torch.linspace(-1, 1, 9, dtype=torch.float64, device=device).view(3, 3)
            * warp.abs().max()
        )

        def warped(image, warp):
            return warp_perspective(
                image, warp, (7, 6), interpolation, border_mode, inverse_map=inverse_map
            )

        _, forward = jvp(warped, (image, warp), (towards, tangent))
        _, vjp = torch.func.vjp(warped, image, warp)
        to_image, to_warp = vjp(upstream)
        # The gradient of a tiny matrix is huge, and larger than float64 without the 2^-40 of the
        # upstream.
        reverse = (to_image * towards).sum() + (
            (to_warp * warp.abs().max()) * (tangent / warp.abs().max())
        ).sum()
        torch.testing.assert_close((forward * upstream).sum(), reverse, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("border_mode", [*BORDERS, "transparent"])
def test_at_pixel_centres_the_slope_is_the_one_from_the_right(
    border_mode, interpolation, axis, size, device
):
    """Pixel u of the result shows the image at u - 3 size; what is compared is exact in binary."""
    image = torch.tensor([3.0, -5, 1, 14, 8, -9], dtype=torch.float64, device=device)[:size]
    image = image.reshape((1, size) if axis == 0 else (size, 1))
    count = 6 * size + 1
    dsize = (1, count) if axis == 0 else (count, 1)
    place = (0, 2) if axis == 0 else (1, 2)
    step = 2.0**-20 if interpolation == "linear" else 2.0**-26

    def line(shift):
        warp = torch.eye(3, dtype=torch.float64, device=device)
        warp[place] = shift - 3 * size
        destination = image.new_zeros(dsize) if border_mode == "transparent" else None
        options = {"border_mode": border_mode, "inverse_map": True, "destination": destination}
        return lambda matrix: warp_perspective(
            image, matrix, dsize, interpolation, **options
        ).flatten(), warp

    warped, warp = line(0)
    at, beside = warped(warp), line(step)[0](line(step)[1])
    expected = (beside - at) / step
    if border_mode == "transparent":  # the image ends with its last pixel
        expected[:] = 0
        inside = slice(3 * size, 4 * size)
        expected[inside] = ((beside - at) / step)[inside]
        expected[4 * size - 1] = (
            ((at - line(-step)[0](line(-step)[1])) / step)[4 * size - 1] if size > 1 else 0
        )
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
    """<v, J u> = <J^T v, u>, to rounding: on pixel centres, beside the horizon and across it, at
    any scale."""
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
    image, towards = normal(4 * n, 2, 7, 6), normal(4 * n, 2, 7, 6)
    tangent = normal(4 * n, 3, 3) * warp.abs().amax((1, 2), keepdim=True)

    def warped(image, warp):
        return warp_perspective(
            image, warp, (5, 8), interpolation, border_mode, inverse_map=inverse_map
        )

    out, forward = jvp(warped, (image, warp), (towards, tangent))
    upstream = normal(*out.shape)
    to_image, to_warp = vjp(warped, image, warp)[1](upstream)
    products = [(upstream * forward), (to_image * towards), (to_warp * tangent)]
    by_forward, by_image, by_warp = (x.flatten(1).sum(1) for x in products)
    magnitude = sum(x.abs().flatten(1).sum(1) for x in products)
    assert torch.isfinite(magnitude).all()
    assert (magnitude > 0.1).double().mean() > 0.8  # the others show nothing of the image
    error = (by_forward - by_image - by_warp).abs()
    assert (error <= 1e-12 * magnitude).all(), warp[(error / magnitude).nan_to_num().argmax()]
