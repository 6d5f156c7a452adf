"""calcops::warp_perspective with border_mode="transparent": pixels without a source have the value
of `destination`."""

import io

import pytest
import torch
from reference import opcheck
from reference_warp_perspective import (
    DTYPES,
    INTERPOLATIONS,
    NOWHERE,
    SHRUNK,
    TILTED,
    TURNED,
    random_image,
    reference,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

from calcops_jit import warp_perspective


def onto(destination, image, warp, interpolation="linear", inverse_map=False):
    dsize = destination.shape[-2:]
    return warp_perspective(
        image,
        warp,
        dsize,
        interpolation,
        "transparent",
        inverse_map=inverse_map,
        destination=destination,
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_with_a_source_are_written_and_the_others_kept(dtype, interpolation, device):
    image = random_image(3, 37, 29, dtype=dtype)
    destination = random_image(3, 61, 150, dtype=dtype, seed=1)
    for warp in (TILTED, SHRUNK, TURNED):
        copied = destination.to(device, copy=True)
        result = onto(copied, image.to(device), warp.to(device), interpolation).cpu().double()
        assert torch.equal(copied.cpu(), destination), "the destination has changed"
        expected = reference(
            image, warp, (61, 150), interpolation, "transparent", destination=destination
        )
        is_kept = expected == destination.double()
        assert is_kept.any()
        assert not is_kept.all()
        assert torch.equal(result[is_kept], destination.double()[is_kept])
        if not dtype.is_floating_point:
            expected = expected.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        # For half precision about half an ulp of 1, as in test_warp_perspective.py.
        tolerance = {
            torch.float16: 1e-3,
            torch.bfloat16: 8e-3,
            torch.float32: 1e-6,
            torch.float64: 1e-12,
        }
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance.get(dtype, 0))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_an_identity_writes_all_of_the_image_and_nothing_else(interpolation, device):
    image = random_image(2, 5, 6).to(device)
    destination = random_image(2, 8, 9, seed=1).to(device)
    result = onto(destination, image, torch.eye(3, device=device), interpolation)
    expected = destination.clone()
    expected[:, :5, :6] = image
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", NOWHERE)
def test_where_no_pixel_has_a_source_the_destination_is_the_result(name, device):
    warp, inverse_map = NOWHERE[name]
    destination = random_image(2, 3, 4, seed=1).to(device)
    for shape in ((2, 5, 6), (2, 0, 6)):
        image = random_image(*shape).to(device)
        result = onto(destination, image, warp.to(device), inverse_map=inverse_map)
        assert torch.equal(result, destination)


@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
def test_sources_inside_the_image_give_the_pixels_of_opencv(interpolation):
    """OpenCV also writes pixels whose sources are outside. So only pixels that change count."""
    cv2 = pytest.importorskip("cv2")
    image = random_image(9, 11, dtype=torch.float32)
    destination = -torch.ones(20, 30)
    for warp in (TILTED, SHRUNK):
        result = onto(destination, image, warp, interpolation)
        expected = cv2.warpPerspective(
            image.numpy(),
            warp.numpy(),
            (30, 20),
            dst=destination.numpy().copy(),
            flags=getattr(cv2, f"INTER_{interpolation.upper()}"),
            borderMode=cv2.BORDER_TRANSPARENT,
        )
        is_written = result != destination
        assert is_written.any()
        difference = (result - torch.from_numpy(expected))[is_written]
        assert difference.abs().max() < 1e-4


def test_cubic_taps_outside_the_image_are_those_of_reflect_101(device):
    image = random_image(2, 9, 11).to(device)
    for warp in (TILTED.to(device), SHRUNK.to(device)):
        destination = torch.full((2, 20, 30), 7.0, dtype=torch.float64, device=device)
        result = onto(destination, image, warp, "cubic")
        expected = warp_perspective(image, warp, (20, 30), "cubic", "reflect_101")
        is_written = result != destination
        assert is_written.any()
        assert torch.equal(result[is_written], expected[is_written])


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_derivatives_are_right_for_image_matrix_and_destination(interpolation, device):
    image = random_image(1, 4, 3).to(device)
    destination = random_image(1, 5, 5, seed=1).to(device)
    warp = torch.tensor(
        [[1.31, 0.041, 1.27], [-0.029, 1.347, 0.913], [0.031, 0.047, 1.0]], dtype=torch.float64
    )
    inputs = [x.requires_grad_() for x in (destination, image, warp.to(device))]

    def warped(destination, image, warp):
        return onto(destination, image, warp, interpolation)

    assert gradcheck(
        warped, inputs, eps=1e-7, atol=1e-5, check_forward_ad=True, check_batched_grad=True
    )
    assert gradgradcheck(warped, inputs, eps=1e-7, atol=1e-4, check_fwd_over_rev=True)
    (gradient,) = torch.autograd.grad(warped(*inputs).sum(), destination)
    assert torch.equal(gradient == 1, warped(*inputs) == destination)
    assert 0 < gradient.sum() < gradient.numel()


def test_batches_strided_destinations_and_vmap_give_the_results_of_a_loop(device):
    images = random_image(2, 3, 9, 11).to(device)
    warps = torch.stack([TILTED, SHRUNK]).to(device)
    one = random_image(3, 12, 13, seed=1).to(device)
    expanded = one.expand(2, 3, 12, 13)
    expected = torch.stack(
        [onto(one, image, warp) for image, warp in zip(images, warps, strict=True)]
    )
    assert torch.equal(onto(expanded, images, warps), expected)
    result = onto(expanded.to(memory_format=torch.channels_last), images, warps)
    assert result.is_contiguous()
    assert torch.equal(result, expected)
    assert torch.equal(vmap(onto, (None, 0, 0))(one, images, warps), expected)
    assert torch.equal(vmap(onto)(expanded, images, warps), expected)

    def onto_another_size(image, warp):
        return warp_perspective(image, warp, (4, 4), border_mode="transparent", destination=one)

    with pytest.raises(RuntimeError, match="expected `destination` of the result's shape"):
        vmap(onto_another_size)(images, warps)


def test_opcheck_and_torchscript_take_a_destination(device):
    image = random_image(2, 7, 6).to(device)
    destination = random_image(2, 4, 5, seed=1).to(device)
    warp = TILTED.to(device, copy=True)
    for tensor in (image, destination, warp):
        tensor.requires_grad_()
    options = {"border_mode": "transparent", "destination": destination}
    opcheck(warp_perspective, (image, warp, (4, 5)), options)
    opcheck(warp_perspective, (image, warp, (4, 5), "cubic"), options)
    warp.requires_grad_(False)

    @torch.jit.script
    def scripted(image: torch.Tensor, warp: torch.Tensor, destination: torch.Tensor):
        size = [4, 5]
        return torch.ops.calcops.warp_perspective(
            image, warp, size, "linear", "transparent", destination=destination
        )

    stored = io.BytesIO()
    torch.jit.save(scripted, stored)
    stored.seek(0)
    assert torch.equal(
        torch.jit.load(stored)(image, warp, destination), onto(destination, image, warp)
    )


def test_gradients_do_not_depend_on_later_changes_of_the_destination(device):
    image = random_image(2, 5, 4).to(device)
    destination = random_image(2, 6, 7, seed=1).to(device)
    warp = TILTED.to(device, copy=True).requires_grad_()
    image.requires_grad_()
    expected = torch.autograd.grad(onto(destination, image, warp).sum(), (image, warp))
    result = onto(destination, image, warp)
    destination.zero_()
    gradients = torch.autograd.grad(result.sum(), (image, warp))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, expected_gradient)
