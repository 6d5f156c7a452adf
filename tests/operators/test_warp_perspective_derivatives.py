"""Derivatives of calcops::warp_perspective: slopes at pixel centres, both modes for maps of any kind,
large images, half precision."""

import pytest
import torch
from reference_warp_perspective import (
    BORDERS,
    INTERPOLATIONS,
    NOWHERE,
    SHRUNK,
    TILTED,
    random_image,
)
from torch.func import jacrev, jvp, vjp, vmap

from calcops_jit import warp_perspective

backward = torch.ops.calcops._warp_perspective_backward


# It maps no pixel to a centre: "linear" has kinks there.
BETWEEN_CENTRES = torch.tensor(
    [[0.93, 0.11, 0.417], [-0.07, 1.04, -0.339], [0.011, -0.007, 1.0]], dtype=torch.float64
)


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
    """Up to rounding, <v, J u> = <J^T v, u>. So both modes round a coordinate alike and take the
    slope of the same side. The maps have sources at pixel centres, horizons beside and across the
    result, and matrices of any scale."""
    generator = torch.Generator().manual_seed(BORDERS.index(border_mode))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n = 250
    near = torch.eye(3, dtype=torch.float64) + normal(n, 3, 3) * torch.tensor(
        [[0.3], [0.3], [0.02]]
    )
    shifted = torch.eye(3, dtype=torch.float64).repeat(n, 1, 1)
    shifted[:, :2, 2] = torch.randint(-4, 5, (n, 2), generator=generator).double()
    # Division by w = 3 gives shifts by thirds of a pixel, which are rounded.
    shifted[::3, [0, 1, 2], [0, 1, 2]] = 3
    shifted[1::3, :2, :2] = torch.tensor([[0.0, -1], [1, 0]], dtype=torch.float64)
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


@pytest.mark.parametrize("name", NOWHERE)
def test_where_no_pixel_has_a_source_second_derivatives_and_tangents_are_zero(name, device):
    warp, inverse_map = NOWHERE[name]
    image = random_image(2, 5, 6).to(device).requires_grad_()
    warp = warp.to(device, copy=True).requires_grad_()

    def warped(image, warp):
        return warp_perspective(image, warp, (3, 4), inverse_map=inverse_map)

    upstream = torch.ones(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    first = torch.autograd.grad(warped(image, warp), (image, warp), upstream, create_graph=True)
    ones = [torch.ones_like(gradient) for gradient in first]
    for gradient in torch.autograd.grad(first, (image, warp, upstream), ones):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    _, tangent = jvp(warped, (image, warp), (torch.ones_like(image), torch.ones_like(warp)))
    assert torch.equal(tangent, torch.zeros_like(tangent))


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
def test_the_gradient_of_a_hessian_for_the_image_does_not_depend_on_the_image(
    interpolation, device
):
    """The result is linear in the image. An image that is flat has slopes of exactly 0."""
    image = random_image(5, 5).to(device)
    warp = BETWEEN_CENTRES.to(device)

    def total(image, warp):
        return warp_perspective(image, warp, (3, 4), interpolation).sum()

    def gradient(image):
        return jacrev(lambda image: jacrev(jacrev(total, 1), 1)(image, warp).sum())(image)

    torch.testing.assert_close(gradient(torch.ones_like(image)), gradient(image))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize(
    "warp", [TILTED, SHRUNK, 0.02 * SHRUNK + torch.diag(torch.tensor([0.0, 0, 0.98]))]
)
def test_the_image_gradient_is_the_adjoint_of_the_map_on_large_images(
    warp, border_mode, interpolation, device
):
    # With the last matrix, hundreds of pixels of the result come from the same pixel of the image.
    # They are in many tiles.
    image = random_image(5, 130, 170).to(device).requires_grad_()
    upstream = random_image(5, 150, 140, seed=1).to(device)
    result = warp_perspective(image, warp.to(device), (150, 140), interpolation, border_mode)
    (gradient,) = torch.autograd.grad(result, image, upstream)
    torch.testing.assert_close(
        (gradient * image).sum(), (result * upstream).sum(), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_those_of_float32_rounded(dtype, interpolation, device):
    image = random_image(2, 20, 30, dtype=dtype).to(device)
    upstream = random_image(2, 25, 33, dtype=dtype).to(device)
    destination = random_image(2, 25, 33, dtype=dtype, seed=1).to(device)

    def gradients(dtype):
        inputs = [image.to(dtype), destination.to(dtype), TILTED.to(device, copy=True)]
        for tensor in inputs:
            tensor.requires_grad_()
        options = {"border_mode": "transparent", "destination": inputs[1]}
        result = warp_perspective(inputs[0], inputs[2], (25, 33), interpolation, **options)
        return torch.autograd.grad(result, inputs, upstream.to(dtype))

    for narrow, wide in zip(gradients(dtype), gradients(torch.float32), strict=True):
        assert torch.equal(narrow, wide.to(narrow.dtype))


def test_a_gradient_outside_the_output_mask_has_no_elements(device):
    image = random_image(2, 7, 6).to(device)
    warp = BETWEEN_CENTRES.to(device)
    grad = torch.ones(2, 4, 4, dtype=torch.float64, device=device)
    options = (grad, image, warp, "linear", "wrap", None, False, 0, 0)
    both = backward(*options, [True, True])
    for mask in ([True, False], [False, True], [False, False]):
        for is_computed, gradient, full in zip(mask, backward(*options, mask), both, strict=True):
            if is_computed:
                assert torch.equal(gradient, full)
            else:
                assert gradient.shape == (0,)


def test_vmap_inside_vmap_is_right():
    images = random_image(2, 6, 7)
    warps = torch.stack([TILTED, SHRUNK, SHRUNK + 0.1])
    inner = vmap(lambda image, warp: warp_perspective(image, warp, (4, 4)), (None, 0))
    result = vmap(inner, (0, None))(images, warps)
    for i in range(2):
        for j in range(3):
            assert torch.equal(result[i, j], warp_perspective(images[i], warps[j], (4, 4)))


def test_vmap_of_a_size_without_two_entries_is_an_error():
    images = random_image(3, 2, 6, 7)
    for size in ((4,), (4, 5, 6)):

        def warped(image, size=size):
            return torch.ops.calcops.warp_perspective(image, TILTED, size)

        with pytest.raises(RuntimeError, match=r"expected `dsize` \(height, width\), both >= 0"):
            vmap(warped)(images)
