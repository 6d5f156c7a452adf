"""All pairs of atoms within a cutoff, as vesin finds them, after a check that it can."""

import numpy as np
import vesin

kLeastThickness = 1e-3  # of a periodic cell, in cutoffs: a smaller one has millions of images
kMostCells = 1e5  # of vesin's grid


def pairs_within(positions, cell, pbc, cutoff):
    """Return the pairs of atoms within the cutoff, each in both directions, sorted by the first.

    Args:
        positions: [n, 3], float64.
        cell: [3, 3], float64. The vectors of open directions have no effect.
        pbc: [3], bool.
        cutoff: a length.

    Returns:
        i [P], j [P], int64, and S [P, 3]: atom j, moved by S @ cell, is a neighbour of i.

    Raises:
        ValueError: a number is not finite, or the system is of a shape that vesin cannot search.
    """
    check_shape(positions, cell[pbc], pbc, cutoff)
    finder = vesin.NeighborList(cutoff=cutoff, full_list=True, sorted=True)
    i, j, S = finder.compute(positions, cell, pbc, "ijS")
    return i.astype(np.int64), j.astype(np.int64), S


def check_shape(positions, periods, pbc, cutoff):
    """Raise ValueError if vesin 0.6 would end the process or return wrong pairs.

    Args:
        positions: [n, 3].
        periods: the cell vectors of the periodic directions.
        pbc: [3], bool.
        cutoff: a length.
    """
    for name, vectors in (("positions", positions), ("periodic cell vectors", periods)):
        wrong = np.flatnonzero(~np.isfinite(vectors).all(1))
        if len(wrong):
            raise ValueError(f"expected finite {name}, got {vectors[wrong[0]]} in row {wrong[0]}")
    thickness = np.linalg.svd(periods, compute_uv=False).min(initial=np.inf)
    if thickness < kLeastThickness * cutoff:
        raise ValueError(
            "expected independent cell vectors in periodic directions, of a cell thicker than "
            f"{kLeastThickness:g} of the cutoff {cutoff:g}, got {periods.tolist()}"
        )
    if len(positions) == 0:
        return
    # vesin numbers cells of its grid by int32.
    farthest = np.linalg.norm(positions, axis=1).max()
    if farthest > 1e9 * min(thickness, cutoff):
        raise ValueError(
            f"expected positions within 1e9 cutoffs or cells, got one {farthest:g} from the origin"
        )
    extent = np.maximum(1.01 * np.ptp(positions, axis=0), 1)
    extent[pbc] = 1 / np.linalg.norm(np.linalg.pinv(periods), axis=0)  # between faces
    if 0 in grid_of(extent, cutoff):
        raise ValueError(
            f"expected a system of fewer than {kMostCells:g} cubes of the cutoff {cutoff:g}, or a "
            f"less flat or thin one, got extents of {extent.round(1).tolist()}"
        )


def grid_of(extent, cutoff):
    """Return vesin's numbers of cells [3] along each direction; it divides by them."""
    x, y, z = np.maximum(np.trunc(extent / cutoff), 1)
    if x * y * z <= kMostCells:
        return x, y, z
    # There are fewer cells then, in about the same proportions.
    last = np.trunc(np.cbrt(kMostCells / (x / y * (y / z) ** 2)))
    middle = np.trunc(y / z * last)
    return np.trunc(x / y * middle), middle, last
