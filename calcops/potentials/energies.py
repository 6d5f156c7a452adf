"""Any module that gives energies, as a potential with forces, virial and per-atom virial.

save() of package.py makes such a potential of a module. With layers=3 the module passes messages
three times.

    about = dict(cutoff=5.0, units="metal", type_names=["Si"])
    save(module, "model.pt2", **about)
    save(module, "model.pt2", **about, layers=3)
"""

import inspect

import torch
from calcops.potentials.potential import Potential, edges


def potential_of(module, cutoff, units, type_names, layers=1):
    """Return a Potential whose energies a module gives.

    Args:
        module: called as module(types, list_neigh, Rij, nghost) or, for a graph, as module(types,
            edge_index, edge_vec, natoms). It returns energies of atoms. With a single layer it may
            return their sum.
        cutoff: a length.
        units: LAMMPS's name of the units.
        type_names: the names of the types.
        layers: the number of times that messages pass along edges, to the atom in row 0 of
            edge_index from that in row 1, before they are an energy. 1: an energy depends on an
            atom's own neighbours alone.

    Raises:
        TypeError: the module is not a module.
        ValueError: its forward has other arguments.
    """
    if not isinstance(module, torch.nn.Module):
        hint = ""
        if isinstance(module, dict):
            hint = ": load a checkpoint into its module first"
        raise TypeError(f"expected a module that gives energies, got {type(module).__name__}{hint}")
    names = [*inspect.signature(module.forward).parameters]
    kinds = {
        ("list_neigh", "Rij", "nghost"): Energies,
        ("edge_index", "edge_vec", "natoms"): GraphEnergies,
    }
    kind = kinds.get(tuple(names[1:4]))
    if kind is None:
        raise ValueError(
            "expected forward(types, list_neigh, Rij, nghost) or "
            "forward(types, edge_index, edge_vec, natoms), "
            f"got forward({', '.join(names)})"
        )
    return kind(module, float(cutoff), units, list(type_names), layers)


class Energies(Potential):
    """The potential of a module for neighbour lists.

    The module gets types [n + nghost] or [B, n + nghost], list_neigh [B, n, K], Rij [B, n, K, 3]
    and nghost. It returns energies [B, n] of atoms, or [B] of frames.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        cutoff: float,
        units: str,
        type_names: list[str],
        layers: int = 1,
    ):
        super().__init__(cutoff, units, type_names, layers)
        self.module = module

    def energies(self, types, list_neigh, planes, nghost: int):
        """Return the energies [B, n] of atoms, for pair vectors planes [3, B, K, n]."""
        Rij = planes.permute(1, 3, 2, 0).contiguous()
        energies = self.module(types, list_neigh, Rij, nghost)
        B, n, _ = list_neigh.shape
        shape = list(energies.shape)
        if shape == [B, n]:
            return energies
        if shape != [B]:  # hosts would read beyond the energies of fewer atoms
            raise ValueError(
                f"expected energies [{B}, {n}] of atoms or [{B}] of frames from the module, "
                f"got {shape}"
            )
        return self.shared(energies, list_neigh)

    def shared(self, energy, list_neigh):
        """Return the energy [B] of frames, shared equally among their n atoms: [B, n]."""
        if self.layers > 1:
            raise ValueError(
                "expected energies of atoms from a model that passes messages, got their sum"
            )
        n = list_neigh.shape[1]
        return (energy / n).unsqueeze(-1).expand(energy.shape[0], n)


class GraphEnergies(Energies):
    """The potential of a module for graphs.

    The module gets types [natoms], edge_index [2, E], edge_vec [E, 3] and natoms. It returns
    [natoms], [natoms, 1] or the sum of them. All frames and their ghosts are one graph. An empty
    slot is an edge from its atom to itself, more than three cutoffs long.
    """

    def energies(self, types, list_neigh, planes, nghost: int):
        """Return the energies [B, n] of atoms, for pair vectors planes [3, B, K, n]."""
        B, n, _ = list_neigh.shape
        natoms = n + nghost
        graph_types = types.expand(B, natoms).flatten()
        index = edges(list_neigh, natoms)
        index = torch.where(index < 0, index[:1], index)
        vec = planes.flatten(1).mT.contiguous()
        energies = self.module(graph_types, index, vec, B * natoms)
        if energies.numel() == B * natoms and energies.dim() > 0:
            return energies.view(B, natoms)[:, :n]
        # The sum contains energies of ghosts, which have no neighbours in the graph. Subtract them.
        if B != 1:
            raise ValueError(
                "expected energies of atoms from a graph of several frames, got a single one"
            )
        loop = torch.zeros_like(index[:, :1])  # an edge from atom 0 to itself
        far = torch.full_like(vec[:1], 2 * self.cutoff)
        of_all = self.module(graph_types, loop, far, natoms)
        of_ghosts = of_all - self.module(graph_types[:n], loop, far, n)
        return self.shared((energies - of_ghosts).view(1), list_neigh)
