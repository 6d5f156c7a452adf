"""Neighbour lists that are used again until atoms have moved too far for them."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import numpy as np
import torch
from calcops.potentials.pair_search import pairs_within, slots_in_rows

kLists = 16  # most lists of structures that were computed alone
kSlots = 1 << 25  # most slots of these lists together, of 8 bytes each, and of those of a batch


class NeighbourList:
    """All pairs of `atoms` within cutoff + skin, in padded rows.

    Attributes:
        list_neigh: [n, K], int32, -1 in empty slots.
        image: [n, K], int32, the row of `shift` for each pair.
        shift: [S, 3], float64, the numbers of cells between an atom and its neighbour.
    """

    def __init__(self, atoms, cutoff, skin, device):
        self.cutoff = cutoff
        self.skin = skin
        self.positions = atoms.positions.copy()
        self.cell = periodic_cell(atoms).copy()
        self.pbc = atoms.pbc.copy()
        self.slots = 1  # of the rows of near pairs, at least 1; the first call finds how many

        positions, cell, pbc = (
            torch.from_numpy(array).to(device)
            for array in (atoms.positions, atoms.cell.array, atoms.pbc)
        )
        i, j, S = pairs_within(positions, cell, pbc, cutoff + skin)
        slot, count = slots_in_rows(i, len(atoms))
        image, shift = numbered_rows(S)
        shape = len(atoms), int(count.max()) if len(atoms) else 0
        self.list_neigh = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.list_neigh[i, slot] = j.int()
        self.image = torch.zeros_like(self.list_neigh)
        self.image[i, slot] = image.int()
        self.shift = shift.double()

    def holds(self, atoms):
        """Return True if the list still has every pair of `atoms` within the cutoff.

        A pair that is not in the list was farther apart than cutoff + skin. A deformation of the
        cell shortens a distance at most by its smallest singular value. The moves of two atoms
        relative to the cell shorten it at most by twice the longest move. A move that all atoms
        share does not count.
        """
        if len(atoms) != len(self.positions) or (atoms.pbc != self.pbc).any() or len(atoms) == 0:
            return False
        cell = periodic_cell(atoms)
        if not np.isfinite(cell).all():
            return False
        old_positions = self.positions
        least = 1.0
        if (cell != self.cell).any():
            deformation = np.linalg.solve(self.cell, cell)
            old_positions = old_positions @ deformation
            least = np.linalg.svd(deformation, compute_uv=False)[-1]
        moves = atoms.positions - old_positions
        moves -= moves.mean(0)
        farthest = np.sqrt(np.einsum("ix,ix->i", moves, moves).max())
        return (self.cutoff + self.skin) * least - 2 * farthest >= self.cutoff

    def near_pairs(self, atoms):
        """Return the pairs of `atoms` within the cutoff: near [n, K], Rij [n, K, 3], and count [n]
        and nearest [n] as torch.ops.calcops_models.near_pairs has them.
        """
        device = self.list_neigh.device
        positions = torch.from_numpy(atoms.positions).to(device)
        periods = np.where(atoms.pbc[:, None], atoms.cell.array, 0.0)
        offset = self.shift @ torch.from_numpy(periods).to(device)
        arguments = positions, self.list_neigh, self.image, offset, self.cutoff
        results = near_pairs_of(arguments, self.slots)
        self.slots = results[0].shape[1]
        return results


def near_pairs_of(arguments, slots):
    """Return the results of torch.ops.calcops_models.near_pairs, with room for all pairs.

    Args:
        arguments: its positions, list_neigh, image, offset and cutoff.
        slots: that may be enough. More pairs in a row cost another call.
    """
    near_pairs = torch.ops.calcops_models.near_pairs
    results = near_pairs(*arguments, slots)
    count = results[2]
    most = int(count.max()) if len(count) else 0
    return results if most <= slots else near_pairs(*arguments, most)


def numbered_rows(S):
    """Return the number [P] of each row of integers S [P, 3], and the different rows."""
    if len(S) == 0:
        return S[:, 0], S.new_zeros(1, 3)
    least, most = S.long().aminmax(dim=0)
    spans = (most - least + 1).tolist()
    if math.prod(spans) >= 2**63:  # atoms that are far outside of the cell
        rows, number = S.unique(dim=0, return_inverse=True)
        return number, rows
    _, height, depth = spans
    x, y, z = (S - least).unbind(1)
    keys, number = ((x * height + y) * depth + z).unique(return_inverse=True)
    columns = keys // (height * depth), keys // depth % height, keys % depth
    return number, torch.stack(columns, 1) + least


def periodic_cell(atoms):
    """Return the cell [3, 3], with a unit vector normal to the others for each open direction."""
    if atoms.pbc.all():
        return atoms.cell.array
    cell = atoms.cell.copy()
    cell[~atoms.pbc] = 0
    return cell.complete().array


class NeighbourLists:
    """The neighbour lists of the last structures.

    A trajectory needs one list, the images of a band one each. `builds` counts the lists that were
    built.
    """

    def __init__(self, cutoff, skin, device):
        self.cutoff = cutoff
        self.skin = skin
        self.device = device
        self.kept = []
        self.of_frames = {}
        self.slots_of_frames = 0
        self.builds = 0

    def of(self, atoms):
        """Return a list with all pairs of `atoms` within the cutoff: one that was kept, or new."""
        for neighbours in self.kept:
            if neighbours.holds(atoms):
                self.kept.remove(neighbours)
                break
        else:
            neighbours = self.built(atoms)
        self.kept = [neighbours, *self.kept][:kLists]
        while len(self.kept) > 1 and sum(kept.list_neigh.numel() for kept in self.kept) > kSlots:
            self.kept.pop()
        return neighbours

    def of_frame(self, atoms, frame):
        """Return such a list of a frame of a batch, which the next batch may use again."""
        neighbours = self.of_frames.pop(frame, None)
        if neighbours is not None:
            self.slots_of_frames -= neighbours.list_neigh.numel()
        if neighbours is None or not neighbours.holds(atoms):
            neighbours = self.built(atoms)
        slots = neighbours.list_neigh.numel()
        if self.slots_of_frames + slots <= kSlots:
            self.of_frames[frame] = neighbours
            self.slots_of_frames += slots
        return neighbours

    def built(self, atoms):
        """Return a new list."""
        self.builds += 1
        return NeighbourList(atoms, self.cutoff, self.skin, self.device)
