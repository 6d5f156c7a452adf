"""Times of warp_perspective relative to OpenCV and other libraries, as Markdown tables.

    python bench/bench_warp_perspective.py [peers] [speed] [borders] [gradients] [tangents] [small]

Without words it runs all parts. Each time is the least of many, on one thread. The libraries take
turns, and each call returns a new result. CalcOps gets planar images, and cv2 interleaved ones.
"""

import itertools
import sys
import time
from functools import partial

import cv2
import numpy as np
import torch
from torch.func import jvp

import calcops_jit

try:
    import kornia
except ImportError:  # optional
    kornia = None
try:
    import torchvision
    from torchvision.transforms.v2.functional import perspective
except ImportError:  # optional
    perspective = None
try:
    import skimage
    from skimage.transform import warp as skimage_warp
except ImportError:  # optional
    skimage_warp = None

SIZES = {
    "512 x 512 x 1": (512, 512, 1),
    "1080 x 1920 x 3": (1080, 1920, 3),
    "4096 x 4096 x 1": (4096, 4096, 1),
}
BORDERS = ["constant", "replicate", "reflect", "reflect_101", "wrap"]
CUBIC = "cubic", "constant"


def homographies(height, width):
    corners = np.float32([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]])
    shifts = np.float32([[0.05, 0.03], [-0.04, 0.06], [-0.02, -0.05], [0.07, -0.04]])
    moved = corners + shifts * [width, height]
    cosine, sine = 0.9 * np.cos(np.pi / 6), 0.9 * np.sin(np.pi / 6)
    turn = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0.1 / width, 0.05 / height, 1]])
    to_centre = np.eye(3)
    to_centre[:2, 2] = width / 2, height / 2
    to_corner = np.eye(3)
    to_corner[:2, 2] = -width / 2, -height / 2
    trapezium = np.float32([[0.35, 0.3], [0.65, 0.3], [1, 1], [0, 1]]) * np.float32([width, height])
    return {
        "mild": cv2.getPerspectiveTransform(corners, np.float32(moved)),
        "30 degrees": to_centre @ turn @ to_corner,
        "strong": cv2.getPerspectiveTransform(trapezium, corners),
    }


def best(functions, seconds):
    """Return the least milliseconds of each function, as processor time of the thread."""
    clock = time.thread_time
    least = [float("inf")] * len(functions)
    for function in functions:
        function()
    end = clock() + seconds
    rounds = 0
    while rounds < 3 or clock() < end:
        rounds += 1
        for i, function in enumerate(functions):
            start = clock()
            function()
            least[i] = min(least[i], 1e3 * (clock() - start))
    return least


def random_pixels(height, width, channels, dtype):
    values = np.random.default_rng(0).random((height, width, channels), dtype=np.float32)
    return (values * 255).astype(np.uint8) if dtype == "uint8" else values.astype(dtype)


def pair(pixels, matrix, interpolation="linear", border="constant"):
    """Return a call of cv2, and one of calcops_jit on the same image."""
    height, width, _ = pixels.shape
    image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    warp = torch.from_numpy(matrix)
    flags = getattr(cv2, f"INTER_{interpolation.upper()}")
    mode = getattr(cv2, f"BORDER_{border.upper()}")
    return (
        lambda: cv2.warpPerspective(pixels, matrix, (width, height), flags=flags, borderMode=mode),
        lambda: calcops_jit.warp_perspective(image, warp, (height, width), interpolation, border),
    )


def print_table(head, rows):
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def ratio_of(functions, seconds):
    """Return the time of the second function relative to the first one's."""
    first, second = best(functions, seconds)
    return second / first


def speed(seconds):
    """Print the time relative to OpenCV's, with linear interpolation."""
    rows = []
    for size, shape in SIZES.items():
        for dtype in ("float32", "uint8"):
            pixels = random_pixels(*shape, dtype)
            matrices = homographies(*shape[:2])
            ratios = [ratio_of(pair(pixels, matrix), seconds) for matrix in matrices.values()]
            rows.append([size, dtype, *(f"{ratio:.2f}" for ratio in ratios)])
    print_table(["time / OpenCV's", "type", *homographies(2, 2)], rows)


def borders(seconds):
    """Print the least and the largest time relative to OpenCV's, of three matrices and two sizes."""
    modes = [("linear", border) for border in BORDERS[1:]]
    modes += [("nearest", border) for border in BORDERS]
    modes += [CUBIC]
    rows = []
    for interpolation, border in modes:
        row = [interpolation, border]
        for dtype in ("float32", "uint8"):
            ratios = []
            for shape in list(SIZES.values())[:2]:
                pixels = random_pixels(*shape, dtype)
                for matrix in homographies(*shape[:2]).values():
                    ratios.append(ratio_of(pair(pixels, matrix, interpolation, border), seconds))
            row.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
        rows.append(row)
    print_table(["interpolation", "border", "float32, time / OpenCV's", "uint8"], rows)


def gradients(seconds):
    """Print the time of the forward with the gradients of image and matrix, relative to kornia's."""
    if kornia is None:
        print("kornia is not installed", file=sys.stderr)
        return
    rows = []
    for size, (height, width, channels) in SIZES.items():
        row = [size]
        for matrix in homographies(height, width).values():
            image = torch.rand(1, channels, height, width, requires_grad=True)
            warp = torch.from_numpy(matrix)[None].float().requires_grad_()
            upstream = torch.rand(1, channels, height, width)
            in_kornia = partial(kornia.geometry.warp_perspective, align_corners=True)

            def both(call, inputs=(image, warp), upstream=upstream, size=(height, width)):
                torch.autograd.grad(call(*inputs, size), inputs, upstream)

            calls = [partial(both, in_kornia), partial(both, calcops_jit.warp_perspective)]
            row.append(f"{ratio_of(calls, seconds):.3f}")
        rows.append(row)
    print_table(["forward and gradients, time / kornia's", *homographies(2, 2)], rows)


def tangents(seconds):
    """Print the times of forward mode and of the gradient of the matrix.

    Both are divided by the time of the forward.
    """
    backward = torch.ops.calcops._warp_perspective_backward
    print(f"{'':<52}{'forward ms':>12}{'tangent / forward':>20}{'gradient / forward':>20}")
    for size, (height, width, channels) in SIZES.items():
        for name, matrix in homographies(height, width).items():
            for interpolation in "linear", "cubic":
                image, warp = torch.rand(channels, height, width), torch.from_numpy(matrix)
                options = (interpolation, "constant", None, False)
                target = (height, width)
                upstream = torch.rand(channels, height, width)
                calls = [
                    lambda: calcops_jit.warp_perspective(image, warp, target, *options),  # noqa: B023
                    lambda: jvp(  # noqa: B023
                        lambda w: calcops_jit.warp_perspective(image, w, target, *options),  # noqa: B023
                        (warp,),  # noqa: B023
                        (warp,),  # noqa: B023
                    ),
                    lambda: backward(upstream, image, warp, *options, 0, 0, (False, True)),  # noqa: B023
                ]
                forward, tangent_ms, gradient_ms = best(calls, seconds)
                ratios = f"{tangent_ms / forward:>20.2f}{gradient_ms / forward:>20.2f}"
                case = f"{size}, float32, {name}, {interpolation}"
                print(f"{case:<52}{forward:>12.3f}{ratios}", flush=True)


def small(_):
    """Print the times of a call for 8 x 8 pixels and for none.

    The difference is the time of the kernel.
    """
    image, warp = torch.rand(64, 64), torch.from_numpy(homographies(64, 64)["mild"])

    def calls(size):
        for _ in range(1000):
            calcops_jit.warp_perspective(image, warp, (size, size))

    empty, full = best([lambda: calls(0), lambda: calls(8)], 2)
    print(f"a call for 8 x 8 pixels {full:.2f} us, for 0 x 0 {empty:.2f} us: {full - empty:.2f} us")


def libraries(pixels, matrix):
    """Return {library: function}. A function takes an image and a matrix, and returns planes.

    All three are tensors.
    """
    height, width, _ = pixels.shape
    size = height, width
    # torchvision counts from the corner of the first pixel, and expects the inverse matrix without
    # its last entry, which is 1.
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    inverse = half @ np.linalg.inv(matrix) @ np.linalg.inv(half)
    coefficients = (inverse / inverse[2, 2]).flatten()[:8].tolist()

    def in_kornia(image, warp):
        # kornia accepts float32 and float64, with one dtype for image and matrix.
        return kornia.geometry.warp_perspective(image[None].float(), warp[None].float(), size)[0]

    def in_skimage(image, _):
        planes = image.numpy().astype(np.float32)
        inverse = np.linalg.inv(matrix)
        warped = [skimage_warp(plane, inverse, preserve_range=True) for plane in planes]
        return torch.from_numpy(np.stack(warped))

    calls = {"calcops": lambda image, warp: calcops_jit.warp_perspective(image, warp, size)}
    if kornia:
        calls[f"kornia {kornia.__version__}"] = in_kornia
    if perspective:
        calls[f"torchvision {torchvision.__version__}"] = lambda image, _: perspective(
            image, None, None, coefficients=coefficients
        )
    if skimage_warp:
        calls[f"scikit-image {skimage.__version__}"] = in_skimage
    return calls


def peers(seconds):
    """Print the errors of float32 and uint8 images, and the times relative to OpenCV's.

    The error of a float32 image, with values from 0 to 1, is the largest difference from a float64
    image.
    """
    cells = {}
    for size, dtype in itertools.product(list(SIZES)[:2], ("float32", "uint8")):
        shape = SIZES[size]
        pixels = random_pixels(*shape, dtype)
        matrix = homographies(*shape[:2])["mild"]
        exact = pair(pixels.astype(np.float64), matrix)[1]().numpy()
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        warp = torch.from_numpy(matrix)
        in_cv2 = pair(pixels, matrix)[0]
        calls = {f"OpenCV {cv2.__version__}": in_cv2}
        for name, call in libraries(pixels, matrix).items():
            calls[name] = partial(call, image, warp)
        times = best(list(calls.values()), seconds)
        for (name, call), milliseconds in zip(calls.items(), times):
            planes = call()
            if call is in_cv2:
                planes = np.moveaxis(planes.reshape(shape), 2, 0)
            row = cells.setdefault(name, {})
            planes = np.asarray(planes)
            if dtype == "uint8":
                wrong = np.mean(np.rint(planes) != np.rint(exact))
                row[f"wrong pixels, {size}"] = f"{100 * wrong:.2g} %"
            else:
                row[f"error, {size}"] = f"{np.abs(planes - exact).max():.1e}"
                row[f"time / OpenCV's, {size}"] = f"{milliseconds / times[0]:.2f}"
    columns = cells["calcops"]
    rows = [[name, *(row[column] for column in columns)] for name, row in cells.items()]
    print_table(["library", *columns], rows)


PARTS = {
    "peers": (peers, 1),
    "speed": (speed, 0.5),
    "borders": (borders, 0.1),
    "gradients": (gradients, 1),
    "tangents": (tangents, 1),
    "small": (small, 0),
}


def main():
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    for name in sys.argv[1:] or PARTS:
        part, seconds = PARTS[name]
        part(seconds)


if __name__ == "__main__":
    main()
