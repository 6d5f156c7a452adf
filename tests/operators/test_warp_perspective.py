"""calcops::warp_perspective: values against an exact float64 reference and against OpenCV."""

import numpy as np
import pytest
import torch
from reference_warp_perspective import (
    BORDERS,
    DTYPES,
    IDENTITY,
    INTERPOLATIONS,
    NOWHERE,
    SHRUNK,
    TILTED,
    TURNED,
    outside,
    random_image,
    reference,
)

from calcops_jit import warp_perspective

OPENCV_DTYPES = [dtype for dtype in DTYPES if dtype not in (torch.float16, torch.bfloat16)]
# OpenCV 5 computes coordinates in float32. For linear interpolation of int16 and float64 images, it
# computes them in steps of 1/32 pixel.
LARGEST_COORDINATE = 500  # pixels; the inverse of SHRUNK gives x up to 489
ROUNDINGS = 8  # of 2^-24 each, in a matrix, its product with a pixel and the division
FLOAT32_COORDINATE_ERROR = ROUNDINGS * LARGEST_COORDINATE * 2**-24  # pixels
STEP_COORDINATE_ERROR = 1 / 64  # pixels; half a step


def opencv(image, warp, dsize, interpolation, border_mode, border, inverse_map):
    """Return what OpenCV gives for the arguments of warp_perspective, for at least two channels."""
    cv2 = pytest.importorskip("cv2")
    flags = getattr(cv2, f"INTER_{interpolation.upper()}")
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    result = cv2.warpPerspective(
        pixels,
        warp.numpy(),
        dsize[::-1],
        flags=flags | (cv2.WARP_INVERSE_MAP if inverse_map else 0),
        borderMode=getattr(cv2, f"BORDER_{border_mode.upper()}"),
        borderValue=border,
    )
    return torch.from_numpy(result).permute(2, 0, 1)


@pytest.mark.parametrize("inverse_map", [False, True])
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", OPENCV_DTYPES)
def test_linear_agrees_with_opencv_within_the_error_of_its_coordinates(
    dtype, border_mode, inverse_map
):
    # Neighbouring pixels differ by at most 1 (in integer images by the range), so an interpolated
    # value changes by at most 1 per pixel along each axis.
    axes = 2
    in_steps = dtype in (torch.int16, torch.float64)
    error = axes * (STEP_COORDINATE_ERROR if in_steps else FLOAT32_COORDINATE_ERROR)
    image = random_image(3, 37, 29, dtype=dtype)
    border = [0.25, 0.5, 0.75] if dtype.is_floating_point else [7.0, 200.0, 33.0]
    for warp in (TILTED, SHRUNK, TURNED):
        options = ("linear", border_mode, border, inverse_map)
        result = warp_perspective(image, warp, (61, 150), *options)
        expected = opencv(image, warp, (61, 150), *options)
        difference = (result.double() - expected.double()).abs()
        if dtype == torch.uint8:
            # Only a value within 255 * error of a half rounds to another integer.
            assert difference.max() <= 1
            assert difference.mean() <= 2 * 255 * error
        elif dtype.is_floating_point:
            assert difference.max() <= error
        else:
            assert difference.max() <= 65535 * error + 1  # 1: both results are rounded


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.float32])
def test_cubic_agrees_with_opencv_within_the_error_of_its_coordinates(dtype, border_mode):
    # OpenCV's coordinates are float32 here. For sources farther from the image than its own size,
    # OpenCV takes other pixels than its cv::borderInterpolate names: these are not compared.
    height, width = 37, 29
    image = random_image(3, height, width, dtype=dtype)
    border = [0.25, 0.5, 0.75] if dtype.is_floating_point else [7.0, 200.0, 33.0]
    pixel_range = 1 if dtype.is_floating_point else torch.iinfo(dtype).max - torch.iinfo(dtype).min
    axes = 2
    slope = 3  # bound of a cubic's change per pixel along an axis, in units of the pixels' range
    error = axes * slope * FLOAT32_COORDINATE_ERROR * pixel_range
    if not dtype.is_floating_point:
        error += 1  # both results are rounded
    for warp in (TILTED, SHRUNK, TURNED):
        options = ("cubic", border_mode, border, False)
        difference = warp_perspective(image, warp, (61, 150), *options).double()
        difference -= opencv(image, warp, (61, 150), *options).double()
        v, u = torch.meshgrid(torch.arange(61.0), torch.arange(150.0), indexing="ij")
        x, y, w = torch.einsum(
            "ij,jvu->ivu", torch.linalg.inv(warp), torch.stack([u, v, u * 0 + 1]).double()
        )
        x, y = x / w, y / w
        is_near = (x > -width) & (x < 2 * width - 1) & (y > -height) & (y < 2 * height - 1)
        assert is_near.sum() > 300
        assert difference[:, is_near].abs().max() <= error


@pytest.mark.parametrize("inverse_map", [False, True])
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", OPENCV_DTYPES)
def test_nearest_takes_the_pixels_that_opencv_takes(dtype, border_mode, inverse_map):
    image = random_image(3, 37, 29, dtype=dtype)
    for warp in (TILTED, SHRUNK, TURNED):
        options = ("nearest", border_mode, [7.0, 9.0, 33.0], inverse_map)
        result = warp_perspective(image, warp, (61, 150), *options)
        assert torch.equal(result.double(), opencv(image, warp, (61, 150), *options).double())


def test_nearest_breaks_ties_to_even_as_opencv_does():
    image = torch.arange(12, dtype=torch.float32).expand(1, 5, 12).contiguous()
    for warp in (
        torch.diag(torch.tensor([2.0, 1, 1])),
        torch.tensor([[1, 0, 0.5], [0, 1, 0], [0, 0, 1]]),
    ):
        options = ("nearest", "reflect", [0.0], False)
        expected = opencv(image.repeat(3, 1, 1), warp.double(), (5, 24), *options)[:1]
        assert torch.equal(warp_perspective(image, warp, (5, 24), *options), expected)


@pytest.mark.parametrize(
    "dtype, least, largest",
    [(torch.uint8, 0, 255), (torch.uint16, 0, 65535), (torch.int16, -32768, 32767)],
)
def test_integers_are_rounded_half_to_even_and_border_values_are_saturated(
    dtype, least, largest, device
):
    image = torch.tensor([[0, 1, 2, 3, 4]], dtype=dtype, device=device)
    half = torch.tensor([[1.0, 0, 0.5], [0, 1, 0], [0, 0, 1]], device=device)
    result = warp_perspective(image, half, (1, 4), inverse_map=True)
    assert result.tolist() == [[0, 2, 2, 4]]
    far = torch.tensor([[1.0, 0, 90], [0, 1, 0], [0, 0, 1]], device=device)
    for border_value, expected in (
        (least - 3.0, least),
        (2.5, 2),
        (3.5, 4),
        (largest + 45.0, largest),
        (float("nan"), least),
    ):
        result = warp_perspective(image, far, (1, 1), border_value=[border_value])
        assert result.item() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number_is_read_and_rounded_as_in_pytorch(dtype, device):
    """All 65,536 numbers are warped by the identity, and by a shift that averages neighbours."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
    image = bits.view(dtype).to(device)
    same = warp_perspective(image, IDENTITY.to(device), (256, 256))
    torch.testing.assert_close(same, image, rtol=0, atol=0, equal_nan=True)
    step = torch.tensor([[1, 0, 0.5], [0, 1, 0], [0, 0, 1]], device=device)
    columns = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    for values in (image, image[:, columns]):
        mean = warp_perspective(values, step, (256, 255), inverse_map=True)
        expected = (values[:, :-1].float() * 0.5 + values[:, 1:].float() * 0.5).to(dtype)
        torch.testing.assert_close(mean, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_keeps_every_bit_of_an_image(dtype, interpolation, border_mode, device):
    def check(warp, width):
        image = random_image(2, 9, width, dtype=dtype).to(device)
        for place in ((0, 3, 3), (1, 0, 3), (0, 5, width - 1)):
            image[place] = float("nan")
        for place in ((1, 4, 4), (1, 8, 6)):
            image[place] = float("inf")
        image[0, 0, 0] = -float("inf")
        for size in ((9, width), (8, width - 1)):  # with and without a tap outside the image
            result = warp_perspective(image, warp.to(device), size, interpolation, border_mode)
            expected = image[:, : size[0], : size[1]]
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)

    for scale in (1, 7.3, -1e-200, 1e200):
        check(scale * IDENTITY, 7)
    # The kernel takes the adjugate for the inverse: scale^2 * IDENTITY, up to a power of two. For
    # 7.3, column 11 of a wider image is inexact: 11 * m / m is not 11 for m = 7.3^2. Powers of two
    # keep every column.
    for scale in (1, 8, -(2.0**-600)):
        check(scale * IDENTITY, 19)


def test_a_coordinate_that_rounds_up_to_the_width_wraps_to_the_first_column(device):
    """In float64, -1e-20 + width rounds to width, and no pixel has that index."""
    image = random_image(2, 9, 7).to(device)
    shift = torch.tensor(
        [[1, 0, -1e-20], [0, 1, -1e-20], [0, 0, 1]], dtype=torch.float64, device=device
    )
    result = warp_perspective(image, shift, (9, 7), "linear", "wrap", inverse_map=True)
    torch.testing.assert_close(result, image, rtol=0, atol=0)


def test_a_rotation_by_90_degrees_is_exact_and_dsize_is_height_then_width(device):
    image = random_image(3, 5, 8).to(device)
    turn = torch.tensor([[0.0, -1, 4], [1, 0, 0], [0, 0, 1]], device=device)
    assert torch.equal(warp_perspective(image, turn, (8, 5)), torch.rot90(image, -1, (1, 2)))


def test_arguments_go_by_name_and_one_number_is_the_border_value_of_all_channels(device):
    image = random_image(2, 20, 30).to(device)
    warp = SHRUNK.to(device)
    expected = warp_perspective(image, warp, (8, 9), border_value=[0.5, 0.5])
    assert torch.equal(
        warp_perspective(image=image, warp=warp, dsize=(8, 9), border_value=0.5), expected
    )
    assert not torch.equal(warp_perspective(image, warp, (8, 9)), expected)


@pytest.mark.parametrize("name", NOWHERE)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("border_mode", BORDERS)
def test_pixels_without_a_source_are_border_value_with_zero_gradients(
    border_mode, interpolation, name, device
):
    warp, inverse_map = NOWHERE[name]
    image = random_image(2, 5, 6).to(device).requires_grad_()
    warp = warp.to(device, copy=True).requires_grad_()
    channels_of = {None: [0, 0], (0.25,): [0.25, 0.25], (0.25, 0.75): [0.25, 0.75]}
    for border_value, channels in channels_of.items():
        result = warp_perspective(
            image, warp, (3, 4), interpolation, border_mode, border_value, inverse_map
        )
        expected = torch.tensor(channels, dtype=torch.float64, device=device)[:, None, None]
        assert torch.equal(result, expected.expand(2, 3, 4))
        upstream = torch.full_like(result, float("nan"))  # shows up if any of it is used
        for gradient in torch.autograd.grad(result, (image, warp), upstream):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("border_mode", BORDERS)
def test_only_the_horizon_is_without_a_source(border_mode, device):
    # w = u - 3: column 3 of the result lies on the horizon, the others do not.
    warp = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, -3]], dtype=torch.float64, device=device)
    image = random_image(1, 5, 6).to(device).requires_grad_()
    warp.requires_grad_()
    result = warp_perspective(image, warp, (4, 7), "linear", border_mode, [0.125], True)
    expected = reference(
        image.detach().cpu(), warp.detach().cpu(), (4, 7), "linear", border_mode, 0.125, True
    )
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=1e-12)
    assert (result[..., 3] == 0.125).all()
    upstream = torch.ones_like(result)
    upstream[..., 3] = float("nan")
    for gradient in torch.autograd.grad(result, (image, warp), upstream):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("far", [1e9, 3e18, 1e25, 1e300, -1e19, -1e300])
def test_huge_coordinates_are_folded_exactly(far, interpolation, border_mode, device):
    image = random_image(1, 3, 7)
    warp = torch.tensor([[1.0, 0, far], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    # u + far is an integer, and exact as a Python integer of any size.
    x = np.array([int(u + far) for u in range(2)], dtype=object)
    columns = outside(x, 7, border_mode)
    result = warp_perspective(
        image.to(device), warp.to(device), (3, 2), interpolation, border_mode, [0.5], True
    )
    for u, column in enumerate(columns):
        border = torch.full((3,), 0.5, dtype=torch.float64)
        expected = image[0, :, column] if column >= 0 else border
        assert torch.equal(result[0, :, u].cpu(), expected)
