"""Find the homography between two views of a scene, by warp_perspective's derivatives.

    python examples/warp_perspective/register.py [FOLDER]      # default: build/warp_perspective

README.md beside this file shows what the script prints and the picture. If kornia is installed, the
script also registers with its warp_perspective, and times both.
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

kSize = 352  # edge of a view, in pixels
kMargin = 80  # pixels of the photograph around the first view
kResolutions = 16, 8, 4, 2, 1  # pixels of a view in a coarse pixel
kCorners = (kSize - 1) * torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=torch.float64)
# Each corner moves by 40 pixels.
kMoved = torch.tensor([[32, 24], [-36, 17.5], [-20, -34.6], [24, 32]], dtype=torch.float64)


def views(moved=kMoved):
    """Return two views [kSize, kSize]; the second is darker, noisy, and its corners are moved."""
    photograph = torch.from_numpy(data.camera()).double() / 255
    cut = torch.eye(3, dtype=torch.float64)
    cut[:2, 2] = -kMargin
    matrices = torch.stack([cut, homography(kCorners, kCorners + moved) @ cut])
    first, second = calcops_jit.warp_perspective(photograph, matrices, (kSize, kSize))
    noise = torch.randn(second.shape, generator=torch.Generator().manual_seed(0))
    return first, 0.8 * second + 0.02 * noise


def by_kornia(images, matrix, size):
    """Return kornia's result for the arguments of calcops_jit.warp_perspective."""
    return kornia.geometry.warp_perspective(images[None], matrix[None], tuple(size))[0]


def residual(moved, first, second, factor, warp):
    """Return the differences between the warped first view and the second one, flattened.

    Both are scaled to mean 0 and norm 1. Only pixels that both have count.

    Args:
        moved: [4, 2], the moves of the corners, in pixels of the full resolution.
        first: the first view at the coarse resolution.
        second: the second view at the coarse resolution.
        factor: the size of a coarse pixel.
        warp: a function such as calcops_jit.warp_perspective.
    """
    # A coarse pixel's centre is the mean of the centres of its factor^2 pixels.
    corners = (kCorners - (factor - 1) / 2) / factor
    matrix = homography(corners, corners + moved / factor)
    warped, covered = warp(torch.stack([first, torch.ones_like(first)]), matrix, first.shape)
    is_in_both = (covered > 0.999).double()

    def standard(image):
        mean = (image * is_in_both).sum() / is_in_both.sum()
        image = (image - mean) * is_in_both
        return image / image.norm()

    return (standard(warped) - standard(second)).flatten()


def register(first, second, warp=calcops_jit.warp_perspective):
    """Find the moves of the corners by Gauss-Newton steps, from no motion on.

    Returns:
        A list of (factor, moved [4, 2]) before each step, and (1, moved) at the end.
    """
    moved = torch.zeros(4, 2, dtype=torch.float64)
    path = []
    for factor in kResolutions:
        views_and_options = (
            avg_pool2d(first[None], factor)[0],
            avg_pool2d(second[None], factor)[0],
            factor,
            warp,
        )
        for _ in range(10):
            path.append((factor, moved))
            # Eight columns by forward mode: one pass of the operator under vmap.
            slope = torch.func.jacfwd(residual)(moved, *views_and_options).flatten(1)
            difference = residual(moved, *views_and_options)
            step = torch.linalg.lstsq(slope, -difference[:, None]).solution.view(4, 2)
            moved = moved + step
            if step.norm() < 0.01 * factor:
                break
    return [*path, (1, moved)]


def error(moved, true=kMoved):
    """Return the distance of the worst corner from its true place, in pixels."""
    return (moved - true).norm(dim=1).max().item()


if __name__ == "__main__":
    folder = Path(*sys.argv[1:] or ["build/warp_perspective"])
    folder.mkdir(parents=True, exist_ok=True)
    first, second = views()
    path = register(first, second)
    for factor in kResolutions:
        steps = [moved for level, moved in path[:-1] if level == factor]
        print(
            f"at 1/{factor:<2} resolution: "
            f"{len(steps):2} steps from {error(steps[0]):8.4f} pixels off"
        )
    print(f"registered: {error(path[-1][1]):.4f} pixels off")
    warps = {"calcops_jit": calcops_jit.warp_perspective, "kornia": by_kornia}
    for name in warps if kornia else []:
        start = time.perf_counter()
        _, moved = register(first, second, warps[name])[-1]
        print(f"by {name}: {time.perf_counter() - start:.2f} s, {error(moved):.4f} pixels off")

    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for axis, moved, title in zip(axes, (path[0][1], path[-1][1]), ("before", "after")):
        matrix = homography(kCorners, kCorners + moved)
        warped = calcops_jit.warp_perspective(first, matrix, second.shape)
        axis.imshow(torch.stack([0.8 * warped, second, second], -1).clamp(0, 1))
        axis.set(title=f"{title}: first view in red, second in cyan", xticks=[], yticks=[])
    for level in kResolutions:
        steps = [k for k, (factor, _) in enumerate(path) if factor == level]
        errors = [error(path[k][1]) for k in steps]
        resolution = f"1/{level}" if level > 1 else "full"
        axes[2].semilogy(steps, errors, "o-", label=f"at {resolution} resolution")
    axes[2].axhline(0.05, color="gray", linestyle=":", label="0.05 pixels")
    axes[2].set(title="progress", xlabel="step", ylabel="worst corner off by / pixels")
    axes[2].legend()
    figure.savefig(folder / "register.png", dpi=70)
    print((folder / "register.png").resolve())
