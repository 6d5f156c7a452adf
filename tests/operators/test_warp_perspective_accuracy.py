"""calcops::warp_perspective: how exact it promises to be, with a search for the worst case."""

import numpy as np
import pytest
import torch
from reference_warp_perspective import (
    BORDERS,
    IDENTITY,
    INTERPOLATIONS,
    SHRUNK,
    TILTED,
    TURNED,
    random_image,
)

from calcops_jit import warp_perspective


def shift(x, y):
    matrix = IDENTITY.clone()
    matrix[0, 2], matrix[1, 2] = x, y
    return matrix


def stretched(height, width):
    """Maps 97 x 101 pixels to all of an image, tilted."""
    warp = torch.tensor(
        [[width / 101, 0.013, 0.31], [0.017, height / 97, 0.23], [1e-5, 2e-5, 1]],
        dtype=torch.float64,
    )
    return warp, (97, 101)


@pytest.mark.parametrize("interpolation, bound", [("linear", 2.4e-7), ("cubic", 1e-6)])
@pytest.mark.parametrize("border_mode", BORDERS)
def test_float32_is_as_near_to_float64_as_promised(border_mode, interpolation, bound):
    cases = [
        (random_image(2, 61, 83, dtype=torch.float32), m, (90, 130))
        for m in (TILTED, SHRUNK, TURNED)
    ]
    checks = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(40, 40)[None]  # steep everywhere
    cases += [
        (checks, TILTED, (90, 130)),
        (1 - checks, shift(-0.3, 0.7), (80, 80)),
        (checks * 0 + 1, TURNED, (99, 99)),
    ]
    for height, width in ((32768, 3), (3, 32768), (700, 900)):
        cases.append(
            (random_image(1, height, width, dtype=torch.float32), *stretched(height, width))
        )
    for image, warp, dsize in cases:
        exact = warp_perspective(
            image.double(), warp, dsize, interpolation, border_mode, [0.7], True
        )
        result = warp_perspective(image, warp, dsize, interpolation, border_mode, [0.7], True)
        assert (result - exact).abs().max() <= bound


@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
@pytest.mark.parametrize("border_mode", BORDERS)
def test_every_pixel_of_an_integer_image_is_rounded_as_its_exact_value(
    border_mode, dtype, interpolation
):
    """Half-way values and values next to them, which float32 cannot tell from them."""
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
        least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max  # a cubic overshoots
        assert torch.equal(result.double(), exact.round().clamp(least, largest))


def test_the_bound_of_the_float32_sum_of_an_integer_image_holds_where_it_is_worst():
    """As blend_quickly in warp_perspective_cpu.cpp: 5 * 2^-17 by its comment, 6 * 2^-17 by its
    constant."""
    draw = np.random.default_rng(0)

    def fma(a, b, c):  # the product of two float32 is exact in float64
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def error(taps, weights):
        (a, b, c, d), (x, y) = taps.astype(np.float32), weights.astype(np.float32)
        top, bottom = fma(x, b - a, a), fma(x, d - c, c)
        quick = fma(y, bottom - top, top).astype(np.float64)
        (a, b, c, d), (x, y) = taps.astype(np.float64), weights
        return np.abs(quick - ((1 - y) * ((1 - x) * a + x * b) + y * ((1 - x) * c + x * d)))

    count, worst = 200_000, 0
    taps, weights = draw.integers(0, 256, (4, count)), draw.random((2, count))
    for _ in range(12):  # keeps the worst and tries their neighbours
        found = error(taps, weights)
        worst = max(worst, found.max())
        best = np.argsort(found)[-2000:].repeat(count // 2000)
        taps = np.clip(taps[:, best] + draw.integers(-3, 4, (4, count)), 0, 255)
        weights = np.clip(
            weights[:, best] + draw.normal(0, 1e-3, (2, count)), 0, np.nextafter(1, 0)
        )
    assert 2 * 2**-17 < worst < 5 * 2**-17


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(40, 50), (1, 50), (40, 1)], ids=str)
def test_nothing_beyond_the_image_is_read_where_rounding_decides(size, dtype, border_mode):
    """Rows and columns that lie on the border but for a few roundings; NaN is all around the
    image."""
    height, width = size
    image = torch.full((height + 10, width + 10), float("nan"), dtype=dtype)[5:-5, 5:-5]
    image.copy_(random_image(*size, dtype=dtype))
    draw = torch.Generator().manual_seed(0)
    for error in (0, 1e-17, 1e-16, 1e-15, 1e-14):
        for base in (
            IDENTITY,
            shift(0, height - 1),
            shift(width - 1, 0),
            shift(-1, -1),
            shift(0.5, 0),
        ):
            warp = base + error * torch.randn(3, 3, generator=draw, dtype=torch.float64)
            warp.requires_grad_()
            for interpolation in INTERPOLATIONS:
                result = warp_perspective(
                    image, warp, (40, 50), interpolation, border_mode, [0.5], True
                )
                (gradient,) = torch.autograd.grad(result.sum(), warp)
                assert result.isfinite().all() and gradient.isfinite().all()


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
