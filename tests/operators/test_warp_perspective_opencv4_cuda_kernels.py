"""warp_perspective's CUDA kernel for arithmetic="opencv4" gives the CPU's bits, on a GPU or in the
emulation (kernels.py)."""

import pytest
import torch
from kernels import same_bits
from test_warp_perspective_opencv4 import tensors

warp_perspective = torch.ops.calcops.warp_perspective


def check(kernels, **arguments):
    arguments["arithmetic"] = "opencv4"
    same_bits(kernels(warp_perspective, **arguments), [warp_perspective(**arguments)])


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_the_kernel_gives_the_bits_of_the_cpu_in_random_calls(kernels, first):
    for seed in range(first, first + 15):
        check(kernels, **tensors(seed))


@pytest.mark.parametrize("channels", [0, 255, 256, 257])
def test_the_kernel_gives_the_bits_of_the_cpu_for_many_channels_images_and_matrices(
    kernels, channels
):
    image = torch.rand(2, channels, 3, 5, generator=torch.Generator().manual_seed(0))
    warps = torch.tensor(
        [[[1, 0.2, -1.3], [0.1, 1, 0.4], [0.01, 0, 1]], [[0, 1, 0], [1, 0, 0], [0, 0, 1]]]
    )
    border = [float(c) for c in range(channels)]
    for some_images, some_warps in ((image, warps), (image[:1], warps), (image, warps[:1])):
        check(kernels, image=some_images, warp=some_warps, dsize=[4, 33], border_value=border)


@pytest.mark.parametrize(
    "size", [(2, 0, 4, 3, 3), (2, 4, 0, 3, 3), (2, 4, 4, 0, 3), (2, 4, 4, 3, 0)], ids=str
)
def test_the_kernel_gives_the_bits_of_the_cpu_for_empty_sizes(kernels, size):
    channels, height, width, *dsize = size
    image = torch.ones(channels, height, width)
    check(kernels, image=image, warp=torch.eye(3), dsize=dsize, border_mode="reflect")
