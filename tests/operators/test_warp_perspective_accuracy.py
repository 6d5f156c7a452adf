"""calcops::warp_perspective: the promised accuracy, with a search for the worst case."""

import itertools
import random
from fractions import Fraction

import pytest
import torch
from reference_warp_perspective import (
    BORDERS,
    IDENTITY,
    INTERPOLATIONS,
    SHRUNK,
    TILTED,
    TURNED,
    exact_map,
    exact_source,
    random_image,
)

from calcops_jit import warp_perspective


def shift(x, y):
    matrix = IDENTITY.clone()
    matrix[:2, 2] = torch.tensor([x, y], dtype=torch.float64)
    return matrix


def stretched(height, width):
    """Return a tilted inverse map that shows a whole image on 97 x 101 pixels, and that size."""
    warp = torch.tensor(
        [[width / 101, 0.013, 0.31], [0.017, height / 97, 0.23], [1e-5, 2e-5, 1]],
        dtype=torch.float64,
    )
    return warp, (97, 101)


@pytest.mark.parametrize("interpolation, bound", [("linear", 2.4e-7), ("cubic", 1e-6)])
@pytest.mark.parametrize("border_mode", BORDERS)
def test_float32_is_as_near_to_float64_as_promised(border_mode, interpolation, bound):
    image = random_image(2, 61, 83, dtype=torch.float32)
    cases = [(image, warp, (90, 130)) for warp in (TILTED, SHRUNK, TURNED)]
    checks = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(40, 40)[None]  # steep everywhere
    cases += [
        (checks, TILTED, (90, 130)),
        (1 - checks, shift(-0.3, 0.7), (80, 80)),
        (torch.ones_like(checks), TURNED, (99, 99)),
    ]
    for height, width in ((32768, 3), (3, 32768), (700, 900)):
        image = random_image(1, height, width, dtype=torch.float32)
        cases.append((image, *stretched(height, width)))
    for image, warp, dsize in cases:
        exact = warp_perspective(
            image.double(), warp, dsize, interpolation, border_mode, [0.7], True
        )
        result = warp_perspective(image, warp, dsize, interpolation, border_mode, [0.7], True)
        assert (result - exact).abs().max() <= bound


def coordinates(size):
    """Return an image whose channels are x and y."""
    ramp = torch.arange(size, dtype=torch.float64)
    return torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size)])


@pytest.mark.parametrize("inverse_map", [False, True])
def test_sources_near_the_horizon_are_as_accurate_as_promised(inverse_map, device):
    """The border mirrors the image, so that its pixels are a function of distant coordinates."""
    size = 64
    draw = random.Random(0)
    image = coordinates(size).to(device)
    farthest = 0
    for _ in range(20):
        warp = torch.tensor([[draw.uniform(-0.5, 0.5) for _ in range(3)] for _ in range(3)])
        scale = torch.tensor([[1, 1, size], [1, 1, size], [3 / size, 3 / size, 0]])
        warp = IDENTITY + warp.double() * scale
        options = (size, size), "linear", "reflect_101", None, inverse_map
        result = warp_perspective(image, warp.to(device), *options).cpu()
        to_source = exact_map(warp, inverse_map)
        for u, v in itertools.product(range(0, size, 5), range(0, size, 7)):
            x, y, w = exact_source(to_source, u, v)
            if w == 0 or max(abs(x), abs(y)) > 10**4 * abs(w):
                continue
            farthest = max(farthest, abs(x / w))
            for coordinate, value in zip((x / w, y / w), result[:, v, u].tolist(), strict=True):
                rest = coordinate % (2 * size - 2)
                assert abs(min(rest, 2 * size - 2 - rest) - Fraction(value)) <= 1e-8
    assert farthest > 5000


def extreme_matrix(kind, draw):
    """Return a matrix [3, 3] with some entries of 1e-150 to 1e150."""

    def extreme():
        return draw.choice([-1, 1]) * draw.uniform(1, 10) * 10.0 ** draw.randint(-150, 149)

    noise = torch.tensor([[draw.uniform(-0.3, 0.3) for _ in range(3)] for _ in range(3)])
    warp = IDENTITY + noise
    if kind == "translation":
        warp[0, 2] = extreme()
        warp[1, 2] = draw.choice([extreme(), 3.0])
    elif kind == "perspective":
        warp[2, 0] = extreme()
        warp[2, 1] = draw.choice([extreme(), 0.01])
    else:
        warp[0] *= extreme()
        warp[1] *= draw.choice([extreme(), 1.0])
    return warp


@pytest.mark.parametrize("kind", ["translation", "perspective", "scale"])
def test_matrices_with_entries_of_any_magnitude_are_inverted(kind, device):
    """The expected values are computed with fractions.

    Let z = (X, Y, W) be the source of a pixel. Where entry (a, b) of warp changes by 1, z changes
    by -z[b] times column a of the inverse.
    """
    size = 40
    draw = random.Random(kind)
    image = coordinates(size).to(device)
    sources_inside = 0
    for _ in range(100):
        warp = extreme_matrix(kind, draw)
        leaf = warp.to(device).requires_grad_()
        result = warp_perspective(image, leaf, (2, 3), border_mode="replicate")
        inverse = exact_map(warp, False)
        for u, v, k in itertools.product(range(3), range(2), range(2)):
            z = exact_source(inverse, u, v)
            position = z[k] / z[2]
            expected = min(max(position, 0), size - 1)
            assert abs(result[k, v, u].item() - expected) < 1e-9
            if not 0.01 < position < size - 1.01 or abs(position - round(position)) < 0.001:
                continue
            sources_inside += 1
            (gradient,) = torch.autograd.grad(result[k, v, u], leaf, retain_graph=True)
            for a, b in itertools.product(range(3), repeat=2):
                slope = z[b] * (position * inverse[2][a] - inverse[k][a]) / z[2]
                # Relative to the entry, because its own magnitude is arbitrary.
                error = Fraction(gradient[a, b].item()) - slope
                assert abs(error * Fraction(warp[a, b].item())) < 1e-9
    assert sources_inside > 50


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
@pytest.mark.parametrize("border_mode", BORDERS)
def test_every_pixel_of_an_integer_image_is_its_exact_value_rounded(
    border_mode, dtype, interpolation
):
    """Some exact values are halves. Others are so near to a half that float32 cannot hold the
    difference."""
    image = random_image(1, 60, 70, dtype=dtype)
    warps = [TILTED, SHRUNK, TURNED]
    for tiny in (0, 1e-12, -1e-12, 1e-9, -1e-9, 1e-8, -1e-8, 1e-7, -1e-7):
        warps += [
            shift(0.5 + tiny, 0),
            shift(0.25, 0.5 + tiny),
            shift(0.5 + tiny, 0.5),
            shift(0.3, 0.7 + tiny),
        ]
    for warp in warps:
        exact = warp_perspective(
            image.double(), warp, (70, 90), interpolation, border_mode, [7.0], True
        )
        result = warp_perspective(image, warp, (70, 90), interpolation, border_mode, [7.0], True)
        # A cubic overshoots the range of the pixels.
        least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        assert torch.equal(result.double(), exact.round().clamp(least, largest))


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(40, 50), (1, 50), (40, 1)], ids=str)
def test_no_memory_beyond_the_image_is_read_for_sources_within_rounding_of_its_border(
    size, dtype, border_mode
):
    """The image lies in a tensor of NaN, and sources lie on its first and last rows and columns."""
    height, width = size
    image = torch.full((height + 10, width + 10), float("nan"), dtype=dtype)[5:-5, 5:-5]
    image.copy_(random_image(*size, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    for error in (0, 1e-17, 1e-16, 1e-15, 1e-14):
        for base in (
            IDENTITY,
            shift(0, height - 1),
            shift(width - 1, 0),
            shift(-1, -1),
            shift(0.5, 0),
        ):
            warp = base + error * torch.randn(3, 3, generator=generator, dtype=torch.float64)
            warp.requires_grad_()
            for interpolation in INTERPOLATIONS:
                result = warp_perspective(
                    image, warp, (40, 50), interpolation, border_mode, [0.5], True
                )
                (gradient,) = torch.autograd.grad(result.sum(), warp)
                assert result.isfinite().all()
                assert gradient.isfinite().all()


@pytest.mark.parametrize("interpolation, rows", [("linear", [20, 21]), ("cubic", [19, 20, 21, 22])])
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_in_a_gradient_reaches_the_taps_of_its_pixel_only(
    dtype, border_mode, interpolation, rows
):
    image = random_image(40, 50, dtype=dtype).requires_grad_()
    result = warp_perspective(
        image, shift(0, 0.5), (40, 50), interpolation, border_mode, inverse_map=True
    )
    upstream = torch.ones_like(result)
    upstream[20, 25] = float("nan")
    (gradient,) = torch.autograd.grad(result, image, upstream)
    assert gradient.isnan().nonzero().tolist() == [[row, 25] for row in rows]
