"""Lennard-Jones, as LAMMPS's lj/cut, lj/cut with `pair_modify shift yes` and lj/smooth/linear."""

import torch
from calcops.potentials.potential import Potential


class LennardJones(Potential):
    """4 epsilon ((sigma/r)^12 - (sigma/r)^6), zero from the cutoff on.

    epsilon, sigma  a number, one for each type, or a table [T,T]
    tail            "cut": a step at the cutoff; "shift": the energy is lowered by its value there;
                    "linear": energy and force go to zero there (Toxvaerd and Dyre, J. Chem. Phys.
                    134, 081102 (2011))
    mix             of types: epsilon always geometric, sigma "geometric" (LAMMPS's default) or
                    "arithmetic"
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
        """Spread a number, a list for each type, or a table to [ntypes, ntypes], by mixing."""
        values = torch.as_tensor(values, dtype=torch.float64)
        if values.dim() < 2:
            a, b = values.expand(ntypes), values.expand(ntypes)[:, None]
            values = (a * b).sqrt() if geometric else (a + b) / 2
        return values.expand(ntypes, ntypes)

    def atom_energies(self, types, list_neigh, Ri):
        """Energies [B, n] of the atoms, half of each pair's; Ri [B, n, K, 4] is (r, x, y, z)."""
        epsilon, sigma, height, slope = self.of_pairs(self.pairs, types, list_neigh).unbind(-1)
        r = Ri[..., 0]
        s2 = (sigma / r).square()
        s6 = s2 * s2 * s2  # many times as fast as a power
        energy = 4 * epsilon * (s6 - 1) * s6 - height - slope * (r - self.cutoff)
        return torch.where(r < self.cutoff, energy, 0.0).sum(-1) / 2  # each pair is in two rows
