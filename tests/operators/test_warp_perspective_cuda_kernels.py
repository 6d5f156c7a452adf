"""warp_perspective's CUDA kernels on a GPU or in the emulation (kernels.py), at the sizes at which
they branch.

A tile has 32 x 8 pixels, and a launch takes 16 channels.
"""

import itertools
import random

import pytest
import torch
from kernels import same_bits
from reference_warp_perspective import BORDERS as OTHER_BORDERS
from reference_warp_perspective import DTYPES

import calcops_jit  # noqa: F401 - registers the operators

ops = torch.ops.calcops
BORDERS = [*OTHER_BORDERS, "transparent"]


def matrices(kind, count):
    """Return `count` matrices of a kind of KINDS. "tilted" and "tiny" ones are random."""
    generator = torch.Generator().manual_seed(count)
    spread = torch.tensor([[1, 1, 30], [1, 1, 30], [0.05, 0.05, 1.0]], dtype=torch.float64)
    tilted = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64) * spread / 10
    identity = torch.eye(3, dtype=torch.float64).repeat(count, 1, 1)
    constant = {
        "shift": [[1, 0, 3], [0, 1, 0], [0, 0, 1]],
        "to a point": [[1e-3, 0, 0], [0, 1e-3, 0], [0, 0, 1]],
        "from a point": [[1e3, 0, 0], [0, 1e3, 0], [0, 0, 1]],
        "far": [[1e90, 0.2, 1e110], [0.1, 1, 2], [1e-20, 0.3, 4]],
        "singular": [[1, 2, 3], [2, 4, 6], [0, 0, 1]],
        "mirrored": [[-1, 0, 7.5], [0, 1, 0.25], [0, 0, 1]],
        "horizon": [[1, 0.2, 0], [0.1, 1, 0], [0.11, -0.07, 1]],
        "zero": [[0, 0, 0]] * 3,
        "nan": [[float("nan"), 0, 0], [0, 1, 0], [0, 0, 1]],
    }
    if kind in constant:
        return torch.tensor(constant[kind], dtype=torch.float64).repeat(count, 1, 1)
    return (identity + tilted) * (1e-200 if kind == "tiny" else 1)


KINDS = [
    "tilted",
    "tilted",  # twice as often as each other kind
    "tiny",
    "shift",
    "to a point",
    "from a point",
    "far",
    "singular",
    "mirrored",
    "horizon",
    "zero",
    "nan",
]


def case(seed):
    """Return random arguments of check()."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    count = draw.choice([1, 1, 2, 3])
    channels = draw.choice([1, 2, 3, 4, 5, 16, 17, 33])
    size = draw.choice([1, 2, 7, 8, 9, 31, 33]), draw.choice([1, 2, 5, 31, 32, 33, 65])
    out = draw.choice([0, 1, 7, 8, 9, 20]), draw.choice([1, 3, 31, 32, 33, 50])
    image = torch.rand(draw.choice([1, count]), channels, *size, generator=generator) * 255
    image = image.to(DTYPES[seed % len(DTYPES)])
    if draw.random() < 0.3:
        image = image.to(memory_format=torch.channels_last)
    elif draw.random() < 0.3:
        image = image.mT.contiguous().mT
    matrix = matrices(KINDS[seed % len(KINDS)], draw.choice([1, count]))
    border = draw.choice([None, [2.5], [float(c) for c in range(channels)]])
    return (
        image,
        matrix,
        out,
        draw.choice(["linear", "cubic", "nearest"]),
        draw.choice(BORDERS),
        border,
        draw.random() < 0.5,
    )


TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-10}


def check_motion(kernels, image, matrix, out, interpolation, border_mode, _, inverse_map):
    """Compare the kernels of the motion and of its gradient with the CPU's. Return the motion."""
    generator = torch.Generator().manual_seed(2)
    magnitude = matrix.abs().amax((1, 2), keepdim=True).nan_to_num()
    left, right = magnitude * torch.randn(2, len(matrix), 3, 3, generator=generator).double()
    size, options = image.shape[2:], (interpolation, border_mode, inverse_map)
    arguments = right, matrix, left, *size, *out, *options
    motion = ops._warp_perspective_motion(*arguments)
    same_bits(kernels(ops._warp_perspective_motion, *arguments), [motion])
    grad = torch.randn(motion.shape, generator=generator, dtype=torch.float64)
    grad[(motion == 0).all(1, keepdim=True).expand(grad.shape)] = float("nan")  # no source
    arguments = grad, matrix, left, *size, *out, *options
    backward = ops._warp_perspective_motion_backward
    expected = backward(*arguments)
    atol = 1e-10 * max(1, expected.abs().max().item()) if expected.numel() else 0
    result = kernels(backward, *arguments)[0]
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)
    return motion


def check(kernels, image, matrix, out, *options):
    """Compare the kernels with the CPU's. Results, motions and slopes are the same bit for bit.

    The gradients are summed in another order.
    """
    destination = None
    if "transparent" in options:
        count = max(len(image), len(matrix))
        destination = torch.full((count, image.shape[1], *out), 77).to(image.dtype)
    expected = ops.warp_perspective(image, matrix, out, *options, destination)
    same_bits(kernels(ops.warp_perspective, image, matrix, out, *options, destination), [expected])
    if not image.dtype.is_floating_point:
        return
    order = 0, 0
    if "nearest" not in options:
        order = len(image) % 3, len(matrix) % 2
        motion = check_motion(kernels, image, matrix, out, *options)
        arguments = image, matrix, motion, *options, *order
        slope = ops._warp_perspective_slope
        same_bits(kernels(slope, *arguments), [slope(*arguments)])
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(expected.shape, generator=generator, dtype=image.dtype)
    backward = ops._warp_perspective_backward
    for mask in ([True, True], [True, False], [False, True]):
        arguments = grad, image, matrix, *options, *order, mask
        results = zip(mask, kernels(backward, *arguments), backward(*arguments), strict=True)
        for is_computed, gradient, expected_gradient in results:
            if is_computed and expected_gradient.numel():
                atol = TOLERANCE[image.dtype] * max(1, expected_gradient.abs().max().item())
                torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("first", range(0, 120, 12))
def test_kernels_agree_with_the_cpu_in_random_calls(kernels, first):
    for seed in range(first, first + 12):
        check(kernels, *case(seed))


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("border", BORDERS)
def test_kernels_agree_with_the_cpu_for_an_image_repeated_many_times(
    kernels, border, interpolation
):
    image = torch.rand(1, 2, 9, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.tensor(
        [[0.3, 0.1, 9.2], [-0.05, 0.4, 7.1], [1e-3, 2e-3, 1]], dtype=torch.float64
    )[None]
    check(kernels, image, matrix, (40, 70), interpolation, border, None, False)


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
def test_a_tap_of_weight_zero_takes_no_part_in_the_gradient(kernels, interpolation):
    """One pixel of an identity map has an infinite upstream gradient. Its neighbours are taps of
    weight zero, and zero times infinity would be NaN."""
    image = torch.rand(1, 1, 6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grad = torch.ones_like(image)
    grad[0, 0, 2, 3] = float("inf")
    identity = torch.eye(3, dtype=torch.float64)[None]
    options = interpolation, "reflect_101", None, False, 0, 0, [True, False]
    gradient = kernels(ops._warp_perspective_backward, grad, image, identity, *options)[0]
    assert torch.equal(gradient, grad)


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("one_matrix", [True, False])
def test_results_are_those_of_the_cpu_for_many_images_of_several_tiles(kernels, one_matrix, mask):
    """One matrix serves all images, or each has its own."""
    count = 20 if kernels.emulated else 4096
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(count, 1, 24, 72, generator=generator, dtype=torch.float64)
    matrix = torch.eye(3, dtype=torch.float64).repeat(1 if one_matrix else count, 1, 1)
    shift = torch.rand(len(matrix), 2, generator=generator, dtype=torch.float64)
    matrix[:, :2, 2] = shift * torch.tensor([8, 0.9])
    arguments = image, matrix, "linear", "constant", None, True
    expected = ops.warp_perspective(image, matrix, (16, 64), *arguments[2:])
    same_bits(kernels(ops.warp_perspective, image, matrix, (16, 64), *arguments[2:]), [expected])
    backward = ops._warp_perspective_backward
    grad = torch.rand(expected.shape, generator=generator, dtype=torch.float64)
    arguments = grad, *arguments, 0, 0, list(mask)
    gradients = kernels(backward, *arguments), backward(*arguments)
    for gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("channels", [0, 1, 255, 256, 257, 513])
def test_kernels_agree_with_the_cpu_for_any_number_of_channels(kernels, channels):
    image = torch.rand(1, channels, 3, 5, generator=torch.Generator().manual_seed(0))
    border = [float(c) for c in range(channels)]
    check(kernels, image, matrices("tilted", 1), (4, 33), "linear", "constant", border, False)


@pytest.mark.parametrize(
    "size",
    [(0, 2, 4, 4, 3, 3), (1, 2, 0, 4, 3, 3), (1, 2, 4, 0, 3, 3), (2, 2, 4, 4, 0, 3)],
    ids=str,
)
def test_kernels_agree_with_the_cpu_for_empty_sizes(kernels, size):
    count, channels, height, width, *out = size
    image = torch.ones(count, channels, height, width)
    check(kernels, image, matrices("shift", max(count, 1)), out, "linear", "reflect", None, False)


@pytest.mark.parametrize(
    "kind", ["tilted", "tiny", "shift", "far", "singular", "horizon", "zero", "nan"]
)
@pytest.mark.parametrize("inverse_map", [False, True])
def test_motions_are_those_of_the_cpu(kernels, kind, inverse_map):
    warp = matrices(kind, 3)
    sizes = [((5, 7), (3, 90)), ((1, 1), (4, 4)), ((0, 4), (2, 2)), ((5, 7), (0, 3))]
    for border, (size, dsize), interpolation in itertools.product(
        BORDERS, sizes, ["linear", "cubic"]
    ):
        image = torch.empty(3, 1, *size)
        check_motion(kernels, image, warp, dsize, interpolation, border, None, inverse_map)


def test_the_image_gradient_sums_numbers_of_all_magnitudes(kernels):
    """A plane's sums are exact down to 2^-80 of its largest gradient, whatever other planes
    receive. Infinity and NaN stay where they belong."""
    inf, nan = float("inf"), float("nan")
    image = torch.zeros(1, 3, 1, 4, dtype=torch.float64)
    grad = torch.tensor(
        [[1e300, 2e283, -1e300, 3e299], [-1e-300, 3e-300, 1e-310, -1e-300], [-inf, inf, nan, -2.5]],
        dtype=torch.float64,
    ).reshape(1, 3, 1, 4)
    sums = torch.tensor([3e299 + 2e283, 1e-300 + 1e-310, nan], dtype=torch.float64)
    in_one_pixel = torch.cat([sums.reshape(1, 3, 1, 1), torch.zeros(1, 3, 1, 3)], 3)
    for scale, expected in (1, grad), (0, in_one_pixel):
        matrix = torch.diag(torch.tensor([scale, 1.0, 1.0], dtype=torch.float64))[None]
        options = "linear", "constant", None, True, 0, 0, [True, False]
        gradient = kernels(ops._warp_perspective_backward, grad, image, matrix, *options)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=0, equal_nan=True)
