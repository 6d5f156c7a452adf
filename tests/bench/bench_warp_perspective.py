"""calcops::warp_perspective against cv2.warpPerspective, a 1080p image on 1 and 2 threads. Run: make bench"""

import time

import cv2
import numpy as np
import torch

import calcops_jit

WARP = np.array([[1.02, 0.05, -30], [-0.03, 0.98, 20], [1e-5, -2e-5, 1]])
HEIGHT, WIDTH = 1080, 1920


def milliseconds(function, repeats=15):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def compare(dtype, channels, interpolation, flag):
    pixels = (np.random.default_rng(0).random((HEIGHT, WIDTH, channels)) * 255).astype(dtype)
    image, warp = torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), torch.from_numpy(WARP)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cv2.setNumThreads(threads)
        ours = milliseconds(lambda: calcops_jit.warp_perspective(image, warp, (HEIGHT, WIDTH), interpolation))
        theirs = milliseconds(lambda: cv2.warpPerspective(pixels, WARP, (WIDTH, HEIGHT), flags=flag))
        name = f"{np.dtype(dtype).name} x {channels} {interpolation}"
        print(f"{name:<28}{threads:>8}{ours:>12.2f}{theirs:>9.2f}")


def main():
    print(f"{'image':<28}{'threads':>8}{'calcops ms':>12}{'cv2 ms':>9}")
    for dtype in (np.uint8, np.float32):
        for channels in (1, 3):
            compare(dtype, channels, "linear", cv2.INTER_LINEAR)
            compare(dtype, channels, "nearest", cv2.INTER_NEAREST)
    image = torch.rand(3, HEIGHT, WIDTH, requires_grad=True)
    warp = torch.from_numpy(WARP).requires_grad_()
    result = calcops_jit.warp_perspective(image, warp, (HEIGHT, WIDTH))
    upstream = torch.rand_like(result)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        took = milliseconds(lambda: result.backward(upstream, retain_graph=True), 5)
        print(f"{'float32 x 3 linear, backward':<28}{threads:>8}{took:>12.2f}")


if __name__ == "__main__":
    main()
