"""Neighbour lists of many frames, padded to one shape, and the vectors between their pairs."""

import numpy as np
import torch
from calcops.potentials.pair_search import pairs_within


def neighbours(positions, cells, cutoff, types=None, pbc=None):
    """Return the neighbour lists of frames, and the shifts to the images of the neighbours.

    Args:
        positions: [B, n, 3] in A, float64.
        cells: [B, 3, 3] in A.
        cutoff: in A.
        types: [B, n], -1 where there is no atom; None: every row is an atom.
        pbc: [B, 3] of bool; None: periodic in each direction.

    Returns:
        list_neigh [B, n, K], int64, -1 in empty slots, and shift [B, n, K, 3] in A: a neighbour's
        vector is r_j - r_i + shift.
    """
    B, n, _ = positions.shape
    pairs_of_frames = []
    counts = np.zeros((B, n), int)
    for b in range(B):
        natoms = n if types is None else int((types[b] >= 0).sum())
        cell = cells[b].numpy()
        periodic = np.ones(3, bool) if pbc is None else pbc[b].numpy()
        centres, others, images = pairs_within(
            positions[b, :natoms].numpy(), cell, periodic, cutoff
        )
        counts[b] = np.bincount(centres, minlength=n)
        pairs_of_frames.append((centres, others, images @ cell))

    slots = max(1, counts.max())
    list_neigh = np.full((B, n, slots), -1)
    shift = np.zeros((B, n, slots, 3))
    for b, (centres, others, shifts) in enumerate(pairs_of_frames):
        first_pair = counts[b].cumsum() - counts[b]
        slot = np.arange(len(centres)) - first_pair[centres]
        list_neigh[b, centres, slot] = others
        shift[b, centres, slot] = shifts
    return torch.from_numpy(list_neigh), torch.from_numpy(shift)


def pair_vectors(positions, list_neigh, shift):
    """Return Rij [B, n, K, 3] in A; the values in empty slots have no meaning."""
    rows = list_neigh.clamp(min=0).flatten(1)[..., None].expand(-1, -1, 3)
    return positions.gather(1, rows).view(shift.shape) - positions[:, :, None] + shift
