"""calcops::warp_perspective onto a given destination, of which pixels without a source keep their
value."""

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
    image, destination = (
        random_image(3, 37, 29, dtype=dtype),
        random_image(3, 61, 150, dtype=dtype, seed=1),
    )
    for warp in (TILTED, SHRUNK, TURNED):
        given = destination.to(device)
        result = onto(given, image.to(device), warp.to(device), interpolation).cpu().double()
        assert torch.equal(given.cpu(), destination)  # it is not written to
        expected = reference(
            image, warp, (61, 150), interpolation, "transparent", destination=destination
        )
        kept = expected == destination.double()
        assert (
            torch.equal(result[kept], destination.double()[kept]) and 0 < kept.double().mean() < 1
        )
        if not dtype.is_floating_point:
            expected = expected.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        tolerance = {
            torch.float16: 1e-3,
            torch.bfloat16: 8e-3,
            torch.float32: 1e-6,
            torch.float64: 1e-12,
        }
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance.get(dtype, 0))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_an_identity_writes_all_of_the_image_and_nothing_else(interpolation, device):
    image, destination = random_image(2, 5, 6).to(device), random_image(2, 8, 9, seed=1).to(device)
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
        assert torch.equal(
            onto(destination, image, warp.to(device), inverse_map=inverse_map), destination
        )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_derivatives_are_right_and_reach_the_destination(interpolation, device):
    image, destination = random_image(2, 5, 4).to(device), random_image(2, 6, 7, seed=1).to(device)
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
    assert (
        torch.equal(gradient == 1, warped(*inputs) == destination)
        and 0 < gradient.sum() < gradient.numel()
    )


def test_batches_strides_and_vmap(device):
    images, warps = random_image(2, 3, 9, 11).to(device), torch.stack([TILTED, SHRUNK]).to(device)
    one = random_image(3, 12, 13, seed=1).to(device)
    expected = torch.stack(
        [onto(one, image, warp) for image, warp in zip(images, warps, strict=True)]
    )
    assert torch.equal(onto(one.expand(2, 3, 12, 13), images, warps), expected)
    last = one.expand(2, 3, 12, 13).to(memory_format=torch.channels_last)
    result = onto(last, images, warps)
    assert torch.equal(result, expected) and result.is_contiguous()
    assert torch.equal(vmap(onto, (None, 0, 0))(one, images, warps), expected)
    assert torch.equal(vmap(onto)(one.expand(2, 3, 12, 13), images, warps), expected)
    with pytest.raises(RuntimeError, match="expected `destination` of the result's shape"):
        vmap(
            lambda i, w: warp_perspective(i, w, (4, 4), border_mode="transparent", destination=one)
        )(images, warps)


def test_opcheck_and_torchscript_take_a_destination(device):
    image, destination = random_image(2, 7, 6).to(device), random_image(2, 4, 5, seed=1).to(device)
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


def test_a_destination_that_changes_afterwards_leaves_the_gradients_as_they_are(device):
    image, destination = random_image(2, 5, 4).to(device), random_image(2, 6, 7, seed=1).to(device)
    warp = TILTED.to(device, copy=True).requires_grad_()
    image.requires_grad_()
    expected = torch.autograd.grad(onto(destination, image, warp).sum(), (image, warp))
    result = onto(destination, image, warp)
    destination.zero_()
    for ours, theirs in zip(
        torch.autograd.grad(result.sum(), (image, warp)), expected, strict=True
    ):
        assert torch.equal(ours, theirs)
