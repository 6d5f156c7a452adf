"""Inputs for calcops::warp_perspective and reference results in NumPy, computed from the formulas of
its header."""

from fractions import Fraction

import numpy as np
import torch

BORDERS = ["constant", "replicate", "reflect", "wrap", "reflect_101"]
INTERPOLATIONS = ["linear", "nearest", "cubic"]
DTYPES = [
    torch.uint8,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
IDENTITY = torch.eye(3, dtype=torch.float64)
# Matrices of float32 numbers. With them, no source lies halfway between two pixels, and no pixel of a result lies on
# the horizon, where w = 0.
TILTED = torch.tensor(
    [[1.0531, 0.1237, -3.117], [-0.0823, 0.9311, 2.339], [7.13e-4, -9.17e-4, 1.0]]
).double()
SHRUNK = torch.tensor(
    [[0.3119, 0.0537, 4.271], [-0.0413, 0.2917, 7.713], [1.17e-4, 2.31e-4, 1.0]]
).double()
TURNED = torch.tensor(
    [[-0.4371, 1.1129, 9.731], [-0.9173, -0.5119, 41.37], [5.17e-4, 6.31e-4, 1.0]]
).double()


def random_image(*shape, dtype=torch.float64, seed=0):
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_floating_point:
        return values.to(dtype)
    least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (values * (largest - least) + least).round().to(dtype)


def outside(index, size, border_mode):
    """Return the index of the pixel that each index stands for, like cv::borderInterpolate.

    -1 stands for border_value. The indices may be inside the image or outside. They may be NumPy's
    or Python's integers of any size.
    """
    if border_mode == "constant":
        return np.where((index >= 0) & (index < size), index, -1)
    if border_mode == "replicate":
        return np.clip(index, 0, size - 1)
    if border_mode == "wrap":
        return np.mod(index, size)
    # reflect repeats the edge pixel, reflect_101 does not. transparent follows reflect_101: a source
    # inside the image may have taps outside.
    edge = 0 if border_mode == "reflect" else 1
    period = max(2 * (size - edge), 1)
    folded = np.mod(index, period)
    return np.where(folded < size, folded, period - 1 + edge - folded)


def tap_weights(t, interpolation):
    """Return (offset, weight) of each tap along one axis, for a source at a distance t from tap 0.

    The distance to tap 1 is 1 - t.
    """
    if interpolation != "cubic":
        return (0, 1 - t), (1, t)
    # Keys' kernel: near(s) for distances s up to 1, far(s) for distances from 1 to 2.
    a = -0.75

    def near(s):
        return ((a + 2) * s - (a + 3)) * s**2 + 1

    def far(s):
        return a * (((s - 5) * s + 8) * s - 4)

    return (-1, far(1 + t)), (0, near(t)), (1, near(1 - t)), (2, far(2 - t))


def reference(
    image,
    warp,
    dsize,
    interpolation="linear",
    border_mode="constant",
    border=0.0,
    inverse_map=False,
    destination=None,
):
    """Return image [C, H, W] warped by a matrix [3, 3], in float64.

    As in OpenCV, the border mode applies to the index of each tap.
    """
    image = image.double().numpy()
    warp = warp.double().numpy()
    channels, height, width = image.shape
    border = np.broadcast_to(np.asarray(border, dtype=np.float64), (channels,))[:, None, None]
    m = warp
    if not inverse_map:
        is_regular = np.isfinite(warp).all() and np.linalg.cond(warp) < 1e14
        m = np.linalg.inv(warp) if is_regular else np.full((3, 3), np.nan)
    if height * width == 0:  # then no pixel of the result has a source
        height = width = 1
        image, m = np.zeros((channels, 1, 1)), np.full((3, 3), np.nan)
    v, u = np.meshgrid(np.arange(dsize[0]), np.arange(dsize[1]), indexing="ij")
    x, y, w = np.einsum("ij,jvu->ivu", m, np.stack([u, v, np.ones_like(u)]))
    with np.errstate(all="ignore"):
        x, y = x / w, y / w
    has_source = np.isfinite(x) & np.isfinite(y)
    x, y = np.where(has_source, x, 0), np.where(has_source, y, 0)
    if interpolation == "nearest":
        x, y = np.rint(x), np.rint(y)
    if border_mode == "transparent":
        has_source &= (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
        border = destination.double().numpy()  # for pixels without a source
    x0, y0 = np.floor(x), np.floor(y)
    result = np.zeros((channels, *dsize))
    for dy, weight_y in tap_weights(y - y0, interpolation):
        for dx, weight_x in tap_weights(x - x0, interpolation):
            row = outside(y0.astype(np.int64) + dy, height, border_mode)
            column = outside(x0.astype(np.int64) + dx, width, border_mode)
            tap = np.where((row >= 0) & (column >= 0), image[:, row, column], border)
            weight = weight_y * weight_x
            result += weight * np.where(weight == 0, 0, tap)
    return torch.from_numpy(np.where(has_source, result, border))


def as_dtype(values, dtype):
    """Return exact results as images of `dtype` hold them: rounded and clamped for integers."""
    if dtype.is_floating_point:
        return values
    return values.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)


def warp_perspective(
    image,
    warp,
    dsize=(),
    interpolation="linear",
    border_mode="constant",
    border_value=None,
    inverse_map=False,
    destination=None,
):
    """Return what the operator gives for these arguments, in float64 for a floating image."""
    of_image, of_warp = image.shape[:-3], warp.shape[:-2]
    leading = of_warp if of_warp and of_image in ((), (1,)) else of_image
    count = leading.numel()
    dsize = tuple(dsize or image.shape[-2:])
    channels = image.shape[-3:-2].numel()
    border = as_dtype(torch.tensor(border_value or 0.0).double(), image.dtype).tolist()

    images = image.reshape(of_image.numel(), channels, *image.shape[-2:])
    warps = warp.reshape(of_warp.numel(), 3, 3)
    results = torch.zeros(count, channels, *dsize, dtype=torch.float64)
    destinations = results if destination is None else destination.reshape(results.shape)
    options = dsize, interpolation, border_mode, border, inverse_map
    for n in range(count):
        one = images[n % len(images)], warps[n % len(warps)]
        results[n] = reference(*one, *options, destinations[n])
    shape = *leading, *image.shape[-3:-2], *dsize
    return as_dtype(results.reshape(shape), image.dtype)


def exact_map(warp, inverse_map):
    """Return the map from destination to source as three rows of fractions."""
    rows = [[Fraction(entry) for entry in row] for row in warp.tolist()]
    if inverse_map:
        return rows

    def cross(a, b):
        return [a[k - 2] * b[k - 1] - a[k - 1] * b[k - 2] for k in range(3)]

    columns = [cross(rows[k - 2], rows[k - 1]) for k in range(3)]
    determinant = sum(a * b for a, b in zip(rows[0], columns[0], strict=True))
    return [[column[k] / determinant for column in columns] for k in range(3)]


def exact_source(map_, u, v):
    """Return the homogeneous coordinates (X, Y, W) of the source of a pixel."""
    return [row[0] * u + row[1] * v + row[2] for row in map_]


# {name: (matrix, inverse_map)}. With these maps, no pixel of a result has a source.
NOWHERE = {
    "zero": (torch.zeros(3, 3), False),
    "zero, not inverted": (torch.zeros(3, 3), True),
    "ones": (torch.ones(3, 3), False),
    "rank 2": (torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]), False),
    "rank 2 but for rounding": (torch.arange(1, 10, dtype=torch.float64).view(3, 3) / 10, False),
    "w = 0 everywhere": (torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]), True),
    "NaN": (torch.full((3, 3), float("nan")), True),
    "one NaN": (torch.tensor([[1.0, 0, 0], [0, float("nan"), 0], [0, 0, 1]]), False),
    "infinity": (torch.tensor([[1.0, 0, float("inf")], [0, 1, 0], [0, 0, 1]]), True),
    "overflow of x": (
        torch.tensor([[1e300, 0, 1e300], [0, 1, 0], [0, 0, 1e-300]], dtype=torch.float64),
        True,
    ),
}
