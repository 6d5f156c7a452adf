"""Lennard-Jones, as LAMMPS's lj/cut, lj/cut with `pair_modify shift yes` and lj/smooth/linear."""

import torch
from calcops.potentials.potential import Potential


class LennardJones(Potential):
    """The pair energy 4 epsilon ((sigma/r)^12 - (sigma/r)^6), zero from the cutoff on.

    Args:
        epsilon: an energy: a number, one for each type, or a table [T, T].
        sigma: a length, given in the same ways as epsilon.
        cutoff: a length.
        tail: "cut": the energy has a step at the cutoff. "shift": its value there is subtracted.
            "linear": energy and force go to zero there (Toxvaerd and Dyre, J. Chem. Phys. 134,
            081102 (2011)).
        units: LAMMPS's name of the units.
        type_names: the names of the types.
        mix: the mean of two types' sigma, "geometric" (LAMMPS's default) or "arithmetic". That of
            epsilon is always geometric.

    Raises:
        ValueError: tail or mix is another word.
    """

    def __init__(
        self,
        epsilon=1.0,
        sigma=1.0,
        cutoff=2.5,
        tail="cut",
        units="lj",
        type_names=("X",),
        mix="geometric",
    ):
        super().__init__(float(cutoff), units, list(type_names))
        if tail not in ("cut", "shift", "linear") or mix not in ("geometric", "arithmetic"):
            raise ValueError(
                'expected tail "cut", "shift" or "linear" and '
                f'mix "geometric" or "arithmetic", got {tail}, {mix}'
            )
        epsilon = self.table(epsilon, len(type_names), geometric=True)
        sigma = self.table(sigma, len(type_names), mix == "geometric")
        s6 = (sigma / cutoff) ** 6
        height = 4 * epsilon * (s6 - 1) * s6 * (tail != "cut")
        slope = 24 * epsilon * (1 - 2 * s6) * s6 / cutoff * (tail == "linear")
        self.register_buffer("pairs", torch.stack([epsilon, sigma, height, slope], -1))

    @staticmethod
    def table(values, ntypes, geometric):
        """Return the table [ntypes, ntypes] from a number, one for each type, or a table."""
        values = torch.as_tensor(values, dtype=torch.float64)
        if values.dim() < 2:
            row = values.expand(ntypes)
            column = row[:, None]
            values = (row * column).sqrt() if geometric else (row + column) / 2
        return values.expand(ntypes, ntypes)

    def atom_energies(self, types, list_neigh, Ri):
        """Return the energies [B, n] of atoms from Ri [B, n, K, 4] = (r, x, y, z)."""
        epsilon, sigma, height, slope = self.of_pairs(self.pairs, types, list_neigh).unbind(-1)
        r = Ri[..., 0]
        s2 = (sigma / r).square()
        s6 = s2 * s2 * s2  # many times as fast as a power
        energy = 4 * epsilon * (s6 - 1) * s6 - height - slope * (r - self.cutoff)
        return torch.where(r < self.cutoff, energy, 0.0).sum(-1) / 2  # each pair is in two rows
