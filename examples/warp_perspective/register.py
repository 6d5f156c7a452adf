"""Register two views of a scene: the homography, coarse to fine, by warp_perspective's derivatives.

    python examples/warp_perspective/register.py [FOLDER]      # default: build/warp_perspective

README.md beside this file shows what the script prints and the picture. Where kornia is installed,
its warp_perspective does the same, and both are timed.
"""

import sys
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from skimage import data
from straighten import homography
from torch.nn.functional import avg_pool2d

import calcops_jit

try:
    import kornia
except ImportError:  # optional
    kornia = None

kSize, kMargin = 352, 80  # pixels: a view, and the photograph around it
kCorners = (kSize - 1) * torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=torch.float64)
# Each corner moves by 40 pixels.
kMoved = torch.tensor([[32, 24], [-36, 17.5], [-20, -34.6], [24, 32]], dtype=torch.float64)


def views(moved=kMoved):
    """Two views [kSize,kSize]; the second is darker, noisy, and its corners are off by `moved`."""
    photograph = torch.from_numpy(data.camera()).double() / 255
    cut = torch.eye(3, dtype=torch.float64)
    cut[:2, 2] = -kMargin
    matrices = torch.stack([cut, homography(kCorners, kCorners + moved) @ cut])
    first, second = calcops_jit.warp_perspective(photograph, matrices, (kSize, kSize))
    return first, 0.8 * second + 0.02 * torch.randn(
        second.shape, generator=torch.Generator().manual_seed(0)
    )


def by_kornia(images, matrix, size):
    return kornia.geometry.warp_perspective(images[None], matrix[None], tuple(size))[0]


def residual(moved, first, second, factor, warp):
    """The second view less the first one warped, each brought to mean 0 and norm 1.

    Only pixels that both have count. Both views are in pixels `factor` times as large. The centres
    of these lie between those of the small ones.
    """
    corners = (kCorners - (factor - 1) / 2) / factor
    matrix = homography(corners, corners + moved / factor)
    warped, covered = warp(torch.stack([first, torch.ones_like(first)]), matrix, first.shape)
    both = (covered > 0.999).double()

    def standard(image):
        image = (image - (image * both).sum() / both.sum()) * both
        return image / image.norm()

    return (standard(warped) - standard(second)).flatten()


def register(first, second, warp=calcops_jit.warp_perspective):
    """Gauss-Newton from no motion -> [(factor, moved [4,2]) of each step], the result last."""
    moved, path = torch.zeros(4, 2, dtype=torch.float64), []
    for factor in (16, 8, 4, 2, 1):
        coarse = [avg_pool2d(view[None], factor)[0] for view in (first, second)]
        for _ in range(10):
            path.append((factor, moved))
            # Eight columns by forward mode: one pass of the operator under vmap.
            slope = torch.func.jacfwd(residual)(moved, *coarse, factor, warp).flatten(1)
            step = torch.linalg.lstsq(
                slope, -residual(moved, *coarse, factor, warp)[:, None]
            ).solution.view(4, 2)
            moved = moved + step
            if step.norm() < 0.01 * factor:
                break
    return [*path, (1, moved)]


def error(moved, true=kMoved):
    """How far the worst corner is off, in pixels."""
    return (moved - true).norm(dim=1).max().item()


if __name__ == "__main__":
    folder = Path(*sys.argv[1:] or ["build/warp_perspective"])
    folder.mkdir(parents=True, exist_ok=True)
    first, second = views()
    path = register(first, second)
    for factor in (16, 8, 4, 2, 1):
        steps = [moved for level, moved in path[:-1] if level == factor]
        print(
            f"at 1/{factor:<2} resolution: "
            f"{len(steps):2} steps from {error(steps[0]):8.4f} pixels off"
        )
    print(f"registered: {error(path[-1][1]):.4f} pixels off")
    ways = {"calcops_jit": calcops_jit.warp_perspective, "kornia": by_kornia}
    for name in ways if kornia else []:
        start = time.perf_counter()
        _, moved = register(first, second, ways[name])[-1]
        print(f"by {name}: {time.perf_counter() - start:.2f} s, {error(moved):.4f} pixels off")

    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for axis, moved, title in zip(axes, (path[0][1], path[-1][1]), ("before", "after")):
        warped = calcops_jit.warp_perspective(
            first, homography(kCorners, kCorners + moved), second.shape
        )
        axis.imshow(torch.stack([0.8 * warped, second, second], -1).clamp(0, 1))
        axis.set(title=f"{title}: first view in red, second in cyan", xticks=[], yticks=[])
    for level in (16, 8, 4, 2, 1):
        steps = [k for k, (factor, _) in enumerate(path) if factor == level]
        resolution = f"1/{level}" if level > 1 else "full"
        axes[2].semilogy(
            steps, [error(path[k][1]) for k in steps], "o-", label=f"at {resolution} resolution"
        )
    axes[2].axhline(0.05, color="gray", linestyle=":", label="0.05 pixels")
    axes[2].set(title="progress", xlabel="step", ylabel="worst corner off by / pixels")
    axes[2].legend()
    figure.savefig(folder / "register.png", dpi=70)
    print((folder / "register.png").resolve())
