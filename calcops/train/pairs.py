"""What frames say about their pairs of atoms: how many there are, how near, and of which s(r)."""

import numpy as np
import torch
from calcops.deepmd.deep_potential import switch
from calcops.potentials.neighbours import neighbours, pair_vectors


class Pairs:
    """Statistics of all pairs of frames within a cutoff, by the types of centre c and neighbour t.

    Attributes:
        atoms: [T] the number of atoms of type c.
        counts: [T, T] the number of pairs.
        sums, squares: [T, T] sums over the pairs of s = w(r) / r and of s^2, in 1/A and 1/A^2.
        largest: [T, T] the largest s, that of the shortest pair, in 1/A; 0 where there is none.
        shortest: [T, T] the least distance in A; the cutoff where there is no pair.
        most: [T] the largest number of neighbours of type t of an atom.
        crowded: [T] the source of the frame with that atom.

    Args:
        frames: a dict of datasets.frames_of.
        sources: what to call each frame.
        ntypes: T.
        cutoff: in A.
        smooth: where the switch begins, in A.

    Raises:
        ValueError: two atoms are in the same place, or a frame cannot be searched for its shape.
    """

    def __init__(self, frames, sources, ntypes, cutoff, smooth):
        self.cutoff = cutoff
        self.smooth = smooth
        self.atoms = np.zeros(ntypes, int)
        self.counts = np.zeros((ntypes, ntypes), int)
        self.sums = np.zeros((ntypes, ntypes))
        self.squares = np.zeros((ntypes, ntypes))
        self.largest = np.zeros((ntypes, ntypes))
        self.shortest = np.full((ntypes, ntypes), cutoff)
        self.most = np.zeros(ntypes, int)
        self.crowded = [None] * ntypes
        for b, source in enumerate(sources):
            self.add({key: value[b : b + 1] for key, value in frames.items()}, source)

    def add(self, frame, source):
        """Count the pairs of one frame."""
        types = frame["types"]
        positions = frame["positions"]
        try:
            list_neigh, shift = neighbours(
                positions, frame["cells"], self.cutoff, types, frame["pbc"]
            )
        except ValueError as error:
            raise ValueError(f"{error}: {source}") from None
        r = pair_vectors(positions, list_neigh, shift)[0].norm(dim=-1)
        is_pair = (list_neigh[0] >= 0) & (r < self.cutoff)
        if (is_pair & (r == 0)).any():
            raise ValueError(
                f"expected atoms in different places, got two in the same place: {source}"
            )
        s = switch(r, self.smooth, self.cutoff)[0] / r
        for c in range(len(self.atoms)):
            rows = types[0] == c
            self.atoms[c] += rows.sum().item()
            kind = torch.where(is_pair, types[0][list_neigh[0].clamp(min=0)], -1)[rows]
            for t in range(len(self.atoms)):
                of_pair = kind == t
                if not of_pair.any():
                    continue
                most = of_pair.sum(-1).max().item()
                if most > self.most[t]:
                    self.most[t] = most
                    self.crowded[t] = source
                chosen = s[rows][of_pair]
                self.counts[c, t] += len(chosen)
                self.sums[c, t] += chosen.sum().item()
                self.squares[c, t] += chosen.square().sum().item()
                self.largest[c, t] = max(self.largest[c, t], chosen.max().item())
                shortest = r[rows][of_pair].min().item()
                self.shortest[c, t] = min(self.shortest[c, t], shortest)
