"""Neighbour lists of many frames, padded to one shape, and the vectors between their pairs."""

import torch
from calcops.potentials.pair_search import pairs_within, slots_in_rows


def neighbours(positions, cells, cutoff, types=None, pbc=None):
    """Return the neighbour lists of frames, and the shifts to the images of the neighbours.

    All tensors are on one device, where the pairs are found.

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
    device = positions.device
    rows = []
    others = []
    shifts = []
    for b in range(B):
        natoms = n if types is None else int((types[b] >= 0).sum())
        periodic = torch.ones(3, dtype=torch.bool, device=device) if pbc is None else pbc[b]
        i, j, S = pairs_within(positions[b, :natoms], cells[b], periodic, cutoff)
        rows.append(i + b * n)
        others.append(j)
        shifts.append(S.to(cells) @ cells[b])

    row, other, shift_of_pair = map(torch.cat, (rows, others, shifts))
    slot, count = slots_in_rows(row, B * n)
    slots = max(1, int(count.max()))
    list_neigh = other.new_full((B * n, slots), -1)
    list_neigh[row, slot] = other
    shift = positions.new_zeros(B * n, slots, 3)
    shift[row, slot] = shift_of_pair
    return list_neigh.view(B, n, slots), shift.view(B, n, slots, 3)


def pair_vectors(positions, list_neigh, shift):
    """Return Rij [B, n, K, 3] in A; the values in empty slots have no meaning."""
    rows = list_neigh.clamp(min=0).flatten(1)[..., None].expand(-1, -1, 3)
    return positions.gather(1, rows).view(shift.shape) - positions[:, :, None] + shift
