"""Calls of a model for blocks of atoms whose intermediate results fit the cache."""

import torch

# Pairs within the cutoff of a block, for each thread. A model with less to store for a pair has an
# attribute `block_slots` of its own.
kBlockSlots = 1 << 14


def near_pairs(list_neigh, Rij, cutoff):
    """Return the pairs within the cutoff, in rows without gaps.

    A list with a skin has twice as many pairs, and a model computes each slot.

    Args:
        list_neigh: [B, n, K], -1 in empty slots.
        Rij: [B, n, K, 3]. A pair whose vector is NaN stays.
        cutoff: a length.

    Returns:
        list_neigh [B, n, K'] and Rij [B, n, K', 3]. K' is the largest number of neighbours of an
        atom, at least 1.
    """
    x, y, z = Rij.unbind(-1)  # a sum over a dimension of three takes six times as long
    is_near = (list_neigh >= 0) & ~(x * x + y * y + z * z >= cutoff**2)
    count = is_near.sum(-1).flatten()
    slots = max(1, int(count.max())) if count.numel() else 1
    pairs = is_near.flatten().nonzero().squeeze(-1)
    # The first pair of row i goes to slot i * slots, the next ones follow it.
    first = count.cumsum(0) - count
    row_begin = torch.arange(len(count), device=pairs.device) * slots - first
    place = torch.arange(len(pairs), device=pairs.device) + row_begin.repeat_interleave(count)
    rows = len(count) * slots
    near_list = list_neigh.new_full((rows,), -1)
    near_list.index_copy_(0, place, list_neigh.flatten().index_select(0, pairs))
    near_Rij = Rij.new_zeros(rows, 3)
    near_Rij = near_Rij.index_copy(0, place, Rij.flatten(0, 2).index_select(0, pairs))
    shape = (*list_neigh.shape[:2], slots)
    return near_list.view(shape), near_Rij.view(*shape, 3)


def check_entries(list_neigh, natoms):
    """Raise ValueError if an entry of a list [B, n, K] names none of `natoms` atoms."""
    is_wrong = (list_neigh < -1) | (list_neigh >= natoms)
    if is_wrong.any():
        b, i, k = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"expected entries of list_neigh from -1 to {natoms - 1}, "
            f"got {list_neigh[b, i, k]} in slot {k} of atom {i} in frame {b}"
        )


def call_in_blocks(model, types, list_neigh, Rij, nghost, block_slots=kBlockSlots):
    """Return what model(types, list_neigh, Rij, nghost) returns, by calls for a part of the atoms.

    A call gets, as ghosts, the neighbours that are not in its part. The sums over atoms have
    another order than in a single call.

    Args:
        model: a function of types, list_neigh, Rij and nghost. The energy of an atom depends on its
            own row alone.
        types: [n + nghost] or [B, n + nghost].
        list_neigh: [B, n, K], -1 in empty slots. Other entries name one of the atoms.
        Rij: [B, n, K, 3].
        nghost: the number of ghosts.
        block_slots: pairs of a block for each thread.
    """
    B, n, slots = list_neigh.shape
    natoms = n + nghost
    rows = block_slots * torch.get_num_threads() // max(1, slots) + 1
    if B * n <= rows:
        return model(types, list_neigh, Rij, nghost)

    atom_energy = Rij.new_zeros(B, n)
    force = Rij.new_zeros(B, natoms, 3)
    atom_virial = Rij.new_zeros(B, natoms, 3, 3)
    for b in range(B):
        types_of_frame = types if types.dim() == 1 else types[b]
        for first in range(0, n, rows):
            part = slice(first, min(n, first + rows))
            atoms, own_list = numbered(list_neigh[b : b + 1, part], part, natoms)
            ghosts = len(atoms) - (part.stop - part.start)
            results = model(types_of_frame[atoms], own_list, Rij[b : b + 1, part], ghosts)
            _, part_energy, part_force, _, part_virial = results
            atom_energy[b, part] = part_energy[0]
            force[b].index_add_(0, atoms, part_force[0])
            atom_virial[b].index_add_(0, atoms, part_virial[0])
    return atom_energy.sum(-1), atom_energy, force, atom_virial.sum(1), atom_virial


def numbered(list_neigh, part, natoms):
    """Return the atoms of a block, its centres first, and the list by their numbers in the block.

    Args:
        list_neigh: [1, m, K], the rows of the centres.
        part: a slice, the centres.
        natoms: the number of all atoms.
    """
    filled = list_neigh >= 0
    # An empty slot stands for a centre, because a selection of the filled ones takes longer.
    neighbours = torch.where(filled, list_neigh, part.start).flatten().long()
    is_neighbour = torch.zeros(natoms, dtype=torch.bool, device=list_neigh.device)
    is_neighbour.index_fill_(0, neighbours, True)
    is_neighbour[part] = False
    centres = torch.arange(part.start, part.stop, device=list_neigh.device)
    atoms = torch.cat([centres, is_neighbour.nonzero().squeeze(-1)])
    number = torch.empty(natoms, dtype=list_neigh.dtype, device=list_neigh.device)
    number[atoms] = torch.arange(len(atoms), dtype=list_neigh.dtype, device=list_neigh.device)
    own = number.index_select(0, neighbours).view_as(list_neigh)
    return atoms, torch.where(filled, own, -1)
