"""Straighten a photograph taken at a slant, by the perspective transformation of four points.

    python examples/warp_perspective/straighten.py [FOLDER]      # default: build/warp_perspective

README.md beside this file shows the picture.
"""

import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Polygon
from skimage import data

import calcops_jit

# The corners (x, y) of a piece of one line of text, in the photograph and in the straight page.
kSlanted = [(155, 15), (360, 95), (260, 130), (65, 40)]
kUpright = [(40, 110), (640, 110), (640, 210), (40, 210)]


def homography(source, target):
    """Return the matrix [3, 3] that maps the points (x, y) [4, 2] of `source` to `target`.

    It is differentiable in both.
    """
    x, y = source.T
    u, v = target.T
    zero = torch.zeros_like(x)
    one = zero + 1
    rows_u = torch.stack([x, y, one, zero, zero, zero, -u * x, -u * y], 1)
    rows_v = torch.stack([zero, zero, zero, x, y, one, -v * x, -v * y], 1)
    solution = torch.linalg.solve(torch.cat([rows_u, rows_v]), torch.cat([u, v]))
    return torch.cat([solution, one[:1]]).view(3, 3)


def straighten():
    """Return the photograph, uint8 [172, 448], and the page from above, uint8 [344, 680]."""
    photograph = torch.from_numpy(data.text())
    matrix = homography(torch.tensor(kSlanted).double(), torch.tensor(kUpright).double())
    page = calcops_jit.warp_perspective(photograph, matrix, (344, 680), "cubic", border_value=255.0)
    return photograph, page


if __name__ == "__main__":
    folder = Path(*sys.argv[1:] or ["build/warp_perspective"])
    folder.mkdir(parents=True, exist_ok=True)
    images = straighten()
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 2.9), layout="constrained", width_ratios=[448 / 172, 680 / 344]
    )
    for axis, image, corners, title in zip(
        axes, images, (kSlanted, kUpright), ("as photographed", "straightened")
    ):
        axis.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="bicubic")
        axis.add_patch(Polygon(corners, fill=False, edgecolor="tab:red"))
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(folder / "straighten.png", dpi=110)
    print((folder / "straighten.png").resolve())
