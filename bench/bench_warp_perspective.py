"""Times of warp_perspective, of cv2.warpPerspective, and of kornia with its backward.

    make bench

Each time is the least of many. The libraries take turns, and each call returns a new result.
CalcOps gets planar images, and cv2 interleaved ones. The arguments of the script are the names of
the parts to run: peers speed borders gradients tangents small accuracy. `peers` prints the table of
results/warp_perspective.md.
"""

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
    from torchvision.transforms.v2.functional import perspective
except ImportError:  # optional
    perspective = None
try:
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
    """Return the least milliseconds of each function. On one thread it is CPU time, which does not
    include other processes."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
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


def set_threads(count):
    torch.set_num_threads(count)
    cv2.setNumThreads(count)


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


def row(name, peer, calcops):
    print(f"{name:<52}{peer:>10.3f}{calcops:>10.3f}{calcops / peer:>8.2f}", flush=True)


def speed(seconds):
    for threads in (1, 2):
        set_threads(threads)
        for size, shape in SIZES.items():
            for dtype in ("float32", "uint8"):
                pixels = random_pixels(*shape, dtype)
                for name, matrix in homographies(*shape[:2]).items():
                    times = best(pair(pixels, matrix), seconds)
                    row(f"{size}, {dtype}, {name}, {threads} thr.", *times)


def borders(seconds):
    set_threads(1)
    modes = [("linear", border) for border in BORDERS[1:]]
    modes += [("nearest", border) for border in BORDERS]
    modes += [CUBIC]
    for size, shape in list(SIZES.items())[:2]:
        for dtype in ("float32", "uint8"):
            pixels = random_pixels(*shape, dtype)
            for name, matrix in homographies(*shape[:2]).items():
                for interpolation, border in modes:
                    times = best(pair(pixels, matrix, interpolation, border), seconds)
                    row(f"{size}, {dtype}, {name}, {interpolation}, {border}", *times)


def gradients(seconds):
    """Print the times of the forward with the gradients of image and matrix."""
    if kornia is None:
        print("kornia is not installed")
        return
    set_threads(1)
    for size, (height, width, channels) in SIZES.items():
        for name, matrix in homographies(height, width).items():
            image = torch.rand(1, channels, height, width, requires_grad=True)
            warp = torch.from_numpy(matrix)[None].float().requires_grad_()
            upstream = torch.rand(1, channels, height, width)
            calls = [
                lambda i, w, s=(height, width): kornia.geometry.warp_perspective(
                    i, w, s, align_corners=True
                ),
                lambda i, w, s=(height, width): calcops_jit.warp_perspective(i, w, s),
            ]

            def both(call, image=image, warp=warp, upstream=upstream):
                torch.autograd.grad(call(image, warp), (image, warp), upstream)

            times = best([lambda call=call: both(call) for call in calls], seconds)
            row(f"{size}, float32, {name}, forward + backward", *times)


def tangents(seconds):
    """Print the times of forward mode and of the gradient of the matrix.

    Both are divided by the time of the forward.
    """
    set_threads(1)
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
    set_threads(1)
    image, warp = torch.rand(64, 64), torch.from_numpy(homographies(64, 64)["mild"])

    def calls(size):
        for _ in range(1000):
            calcops_jit.warp_perspective(image, warp, (size, size))

    empty, full = best([lambda: calls(0), lambda: calls(8)], 2)
    print(f"a call for 8 x 8 pixels {full:.2f} us, for 0 x 0 {empty:.2f} us: {full - empty:.2f} us")


def accuracy(_):
    """Print the largest errors of float32 images, relative to float64 images with the same values.
    The values are from 0 to 1."""
    for size, shape in list(SIZES.items())[:2]:
        pixels = random_pixels(*shape, "float32")
        for name, matrix in homographies(*shape[:2]).items():
            exact = pair(pixels.astype(np.float64), matrix)[1]()
            of_cv2, of_calcops = (call() for call in pair(pixels, matrix))
            cv2_error = np.abs(np.moveaxis(of_cv2.reshape(shape), 2, 0) - exact.numpy()).max()
            error = (of_calcops - exact).abs().max().item()
            print(f"{size}, {name}: cv2 {cv2_error:.1e}, calcops {error:.1e}", flush=True)


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
        calls["kornia"] = in_kornia
    if perspective:
        calls["torchvision"] = lambda image, _: perspective(
            image, None, None, coefficients=coefficients
        )
    if skimage_warp:
        calls["scikit-image"] = in_skimage
    return calls


def peers(seconds):
    """Print the errors of float32 and uint8 images of 512 x 512 pixels, and the milliseconds on one
    thread."""
    set_threads(1)
    small, large = SIZES["512 x 512 x 1"], SIZES["1080 x 1920 x 3"]
    table = {}
    for shape, dtype in (small, "float32"), (small, "uint8"), (large, "float32"):
        pixels = random_pixels(*shape, dtype)
        matrix = homographies(*shape[:2])["mild"]
        exact = pair(pixels.astype(np.float64), matrix)[1]().numpy()
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        warp = torch.from_numpy(matrix)

        def add(name, milliseconds, planes, shape=shape, dtype=dtype, exact=exact):
            row = table.setdefault(name, {})
            if dtype == "uint8":
                row["wrong"] = f"{100 * np.mean(np.rint(planes) != np.rint(exact)):.2g} %"
            elif shape == small:
                row["error"] = f"{np.abs(planes - exact).max():.1e}"
            if dtype == "float32":
                row[shape] = milliseconds

        in_cv2 = pair(pixels, matrix)[0]
        warped = in_cv2().reshape(pixels.shape)
        add(f"OpenCV {cv2.__version__}", best([in_cv2], seconds)[0], np.moveaxis(warped, 2, 0))
        for name, call in libraries(pixels, matrix).items():
            milliseconds = best([partial(call, image, warp)], seconds)[0]
            add(name, milliseconds, call(image, warp).numpy())
            if name in ("calcops", "kornia") and shape == small and dtype == "float32":
                inputs = image.clone().requires_grad_(), warp.float().requires_grad_()

                def both(call=call, inputs=inputs):
                    torch.autograd.grad(call(*inputs).sum(), inputs)

                table[name]["both"] = best([both], seconds)[0]
    print_peers(table, small, large)


def print_peers(table, small, large):
    print(
        "| | worst error, float32 | wrong pixels, uint8 | 512 x 512 "
        "| 1080 x 1920 x 3 | 512 x 512, both gradients |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in table.items():
        both = f"{row['both']:.1f} ms" if "both" in row else "-"
        print(
            f"| {name} | {row['error']} | {row['wrong']} | {row[small]:.2f} ms "
            f"| {row[large]:.1f} ms | {both} |"
        )


PARTS = {
    "peers": (peers, 1),
    "accuracy": (accuracy, 0),
    "small": (small, 0),
    "speed": (speed, 0.5),
    "borders": (borders, 0.1),
    "gradients": (gradients, 1),
    "tangents": (tangents, 1),
}


def main():
    print(
        f"cv2 {cv2.__version__}, kornia {kornia and kornia.__version__}, torch {torch.__version__}"
    )
    print(f"{'milliseconds':<52}{'theirs':>10}{'calcops':>10}{'ratio':>8}")
    for name in sys.argv[1:] or PARTS:
        part, seconds = PARTS[name]
        part(seconds)


if __name__ == "__main__":
    main()
