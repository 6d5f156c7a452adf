"""All pairs of atoms within a cutoff, as vesin finds them, after a check that it can."""

import math

import numpy as np
import torch
import vesin

kLeastThickness = 1e-3  # of a periodic cell, in cutoffs: a smaller one has millions of images
kMostCells = 1e5  # of vesin's grid
kAtomsAThread = 200  # with fewer, threads wait for one another


def pairs_within(positions, cell, pbc, cutoff):
    """Return the pairs of atoms within the cutoff, each in both directions, sorted by the first.

    The arguments are NumPy arrays, or tensors of a device, on which the pairs are found.

    Args:
        positions: [n, 3], float64.
        cell: [3, 3], float64. The vectors of open directions have no effect.
        pbc: [3], bool.
        cutoff: a length.

    Returns:
        i [P], j [P], int64, and S [P, 3], int32: atom j, moved by S @ cell, is a neighbour of i.

    Raises:
        ValueError: a number is not finite, or the system is of a shape that vesin cannot search.
    """
    if isinstance(positions, np.ndarray):
        tensors = (torch.from_numpy(array) for array in (positions, cell, pbc))
        return tuple(found.numpy() for found in pairs_within(*tensors, cutoff))
    natoms = len(positions)
    if natoms == 0:
        none = torch.empty(0, dtype=torch.int64, device=positions.device)
        return none, none, none.int().view(0, 3)
    box, cutoff = search_box(positions, cell, pbc, cutoff)
    box = torch.tensor(box, dtype=positions.dtype, device=positions.device)
    threads = max(1, min(torch.get_num_threads(), natoms // kAtomsAThread))
    finder = vesin.NeighborList(cutoff=cutoff, full_list=True, sorted=True, n_threads=threads)
    pairs, S = finder.compute(positions, box, True, "PS", copy=False)
    i, j = (column.clone() for column in pairs.view(torch.int64).unbind(1))
    return i, j, S.clone()


def slots_in_rows(i, rows: int):
    """Return the place [P] of each pair in the row of its atom, and the number of pairs of rows.

    torch.jit.script compiles this function, too.

    Args:
        i: [P], the atom of each pair, sorted.
        rows: the number of atoms.
    """
    count = torch.bincount(i, minlength=rows)
    first_pair = count.cumsum(0) - count
    return torch.arange(len(i), device=i.device) - first_pair[i], count


def search_box(positions, cell, pbc, cutoff):
    """Return the periodic cell [3, 3] of a search, as lists, and its cutoff. A GPU waits once.

    Its vectors in open directions are normal to the periodic ones, and so long that no image is
    within the cutoff. In vesin's own open directions, a cutoff beyond the extent costs its cube. On
    a GPU, vesin reserves memory by that cube, so the cutoff of an open system ends at its extent.

    Args:
        positions: [n, 3], at least one.
        cell: [3, 3].
        pbc: [3], bool.
        cutoff: a length.

    Raises:
        ValueError: vesin 0.6 would end the process or return wrong pairs.
    """
    parts = *positions.aminmax(dim=0), cell.flatten().to(positions), pbc.to(positions)
    numbers = torch.cat(parts).tolist()
    lowest, highest, *box, is_periodic = (numbers[k : k + 3] for k in range(0, 18, 3))
    if not math.isfinite(sum(lowest) + sum(highest)):
        row = (~positions.isfinite().all(1)).nonzero()[0].item()
        raise ValueError(f"expected finite positions, got {positions[row].tolist()} in row {row}")
    periods = [vector for vector, periodic in zip(box, is_periodic) if periodic]
    if not math.isfinite(sum(map(sum, periods))):
        raise ValueError(f"expected finite periodic cell vectors, got {periods}")

    open_directions = [k for k in range(3) if not is_periodic[k]]
    if not periods:
        cutoff = min(cutoff, 1.01 * math.dist(lowest, highest) + 1)
    if open_directions:
        normals = np.linalg.svd(np.reshape(periods, (-1, 3)))[2][len(periods) :].tolist()
        for k, normal in zip(open_directions, normals):
            extent = sum(abs(n) * (high - low) for n, high, low in zip(normal, highest, lowest))
            length = max(extent, cutoff) + 1.1 * cutoff
            box[k] = [n * length for n in normal]

    heights = heights_of(box)
    if min(heights) < kLeastThickness * cutoff:
        raise ValueError(
            "expected independent cell vectors in periodic directions, of a cell thicker than "
            f"{kLeastThickness:g} of the cutoff {cutoff:g}, got {periods}"
        )
    # vesin numbers cells of its grid by int32.
    farthest = max(map(abs, lowest + highest))
    if farthest > 1e9 * min(*heights, cutoff):
        raise ValueError(
            f"expected positions within 1e9 cutoffs or cells, got one {farthest:g} from the origin"
        )
    if 0 in grid_of(heights, cutoff):
        raise ValueError(
            f"expected a system of fewer than {kMostCells:g} cubes of the cutoff {cutoff:g}, or a "
            f"less flat or thin one, got extents of {[round(height, 1) for height in heights]}"
        )
    return box, cutoff


def heights_of(box):
    """Return the distances [3] between the faces of a cell, 0 if its vectors are dependent."""
    a, b, c = box
    normals = cross(b, c), cross(c, a), cross(a, b)
    volume = abs(sum(x * y for x, y in zip(a, normals[0])))
    return [volume / (math.hypot(*normal) or 1.0) for normal in normals]


def cross(a, b):
    """Return the vector product [3] of two vectors."""
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def grid_of(heights, cutoff):
    """Return vesin's numbers of cells [3] along each direction; it divides by them."""
    x, y, z = (max(height // cutoff, 1.0) for height in heights)
    if x * y * z <= kMostCells:
        return x, y, z
    # There are fewer cells then, in about the same proportions.
    last = math.trunc(math.cbrt(kMostCells / (x / y * (y / z) ** 2)))
    middle = math.trunc(y / z * last)
    return math.trunc(x / y * middle), middle, last
