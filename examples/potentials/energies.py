"""Any module that gives energies, as a potential: forces, virial and per-atom virial are added to it.

save(module, "model.pt2", cutoff=5.0, units="metal", type_names=["Si"])         # of package.py, which asks here
"""

import inspect

import torch
from potential import Potential, edges


def potential_of(module, cutoff, units, type_names):
    """module(types, list_neigh, Rij, nghost) or, of a graph, module(types, edge_index, edge_vec, natoms), which returns
    energies of atoms or their sum; as a Potential."""
    names = [*inspect.signature(module.forward).parameters]
    kind = GraphEnergies if names[1:3] == ["edge_index", "edge_vec"] else Energies
    return kind(module, float(cutoff), units, list(type_names))


class Energies(Potential):
    """module(types [n+nghost] or [B,n+nghost], list_neigh [B,n,K], Rij [B,n,K,3], nghost) -> [B,n] or [B]."""

    def __init__(self, module: torch.nn.Module, cutoff: float, units: str, type_names: list[str]):
        super().__init__(cutoff, units, type_names)
        self.module = module

    def energies(self, types, list_neigh, planes, nghost: int):
        found = self.module(types, list_neigh, planes.permute(1, 3, 2, 0).contiguous(), nghost)
        return found if found.dim() == 2 else shared(found, list_neigh)


class GraphEnergies(Energies):
    """module(types [natoms], edge_index [2,E], edge_vec [E,3], natoms) -> [natoms], [natoms,1] or the sum of them.

    All frames and their ghosts are one graph. An empty slot is an edge from its atom to itself, three cutoffs long."""

    def energies(self, types, list_neigh, planes, nghost: int):
        B, n, _ = list_neigh.shape
        natoms = n + nghost
        of_atoms = types.expand(B, natoms).flatten()
        index, vec = edges(list_neigh, natoms), planes.flatten(1).mT.contiguous()
        index = torch.where(index < 0, index[:1], index)
        found = self.module(of_atoms, index, vec, B * natoms)
        if found.numel() == B * natoms and found.dim() > 0:
            return found.view(B, natoms)[:, :n]
        # Of the sum, what ghosts have without a neighbour is not ours.
        if B != 1:
            raise ValueError("expected energies of atoms from a graph of several frames, got a single one")
        itself, far = torch.zeros_like(index[:, :1]), torch.full_like(vec[:1], 2 * self.cutoff)
        ghosts = self.module(of_atoms, itself, far, natoms) - self.module(of_atoms[:n], itself, far, n)
        return shared((found - ghosts).view(1), list_neigh)


def shared(energy, list_neigh):
    """Each of n atoms has the same part of its frame's energy."""
    n = list_neigh.shape[1]
    return (energy / n).unsqueeze(-1).expand(energy.shape[0], n)
