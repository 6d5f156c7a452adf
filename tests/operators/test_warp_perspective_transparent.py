"""calcops::warp_perspective with border_mode="transparent": pixels without a source have the value
of `destination`."""

import io

import pytest
import torch
from reference_warp_perspective import INTERPOLATIONS, NOWHERE, SHRUNK, TILTED, random_image

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


def test_torchscript_takes_a_destination(device):
    image = random_image(2, 7, 6).to(device)
    destination = random_image(2, 4, 5, seed=1).to(device)
    warp = TILTED.to(device)

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
