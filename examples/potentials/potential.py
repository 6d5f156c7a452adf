"""The interface that every host of CalcOps calls a potential by. A subclass says what the energy of an atom is."""

import torch

import calcops_jit  # noqa: F401 - brings torch.ops.calcops


def describe(Rij):
    """Ri [B,n,K,4] = (r, x, y, z) of each pair."""
    return torch.cat([torch.linalg.vector_norm(Rij, dim=-1, keepdim=True), Rij], -1)


def edges(list_neigh, natoms: int):
    """edge_index [2,BnK] of all frames' slots, atom a of frame b being b natoms + a; -1 as neighbour: empty slot. An
    entry that names no atom of its frame stays one that the operators refuse."""
    B, n, K = list_neigh.shape
    first = torch.arange(B, device=list_neigh.device).view(B, 1, 1) * natoms
    centre = first + torch.arange(n, device=list_neigh.device).view(1, n, 1)
    neighbour = torch.where((list_neigh >= 0) & (list_neigh < natoms), list_neigh + first, list_neigh)
    neighbour = torch.where(list_neigh >= natoms, B * natoms, neighbour)
    return torch.stack([centre.expand(B, n, K).flatten(), neighbour.flatten()])


class Potential(torch.nn.Module):
    """cutoff: a length; units: LAMMPS's name, "metal" (eV, Angstrom) or "lj"; type_names: what types 0, 1, ... are;
    layers: how many cutoffs away an atom may be that the energy of an atom depends on.

    It is also a class that torch.jit.script compiles, hence torch.ops in place of calcops_jit.edge_force_virial."""

    def __init__(self, cutoff: float, units: str, type_names: list[str], layers: int = 1):
        super().__init__()
        self.cutoff, self.units, self.type_names, self.layers = cutoff, units, type_names, layers

    def atom_energies(self, types, list_neigh, Ri):
        """[B,n] from Ri [B,n,K,4] = (r, x, y, z); a slot with r >= cutoff must add exactly 0, and no NaN."""
        raise NotImplementedError

    def energies(self, types, list_neigh, Rij, nghost: int):
        """What forward differentiates: atom_energies."""
        return self.atom_energies(types, list_neigh, describe(Rij))

    def neighbour_types(self, types, list_neigh):
        """[B,n,K]; 0 in an empty slot."""
        rows = types.expand(list_neigh.shape[0], types.shape[-1])
        found = rows.gather(1, list_neigh.long().clamp(min=0).flatten(1)).view_as(list_neigh)
        return found.where(list_neigh >= 0, 0)

    def of_pairs(self, table, types, list_neigh):
        """Rows of table [T,T,p] for the types of each pair [B,n,K,p]; for a single type the only row there is."""
        if table.shape[0] == 1:
            return table[0, 0]
        centre = types[..., : list_neigh.shape[1]].expand(list_neigh.shape[:2])
        return table[centre.unsqueeze(-1), self.neighbour_types(types, list_neigh)]

    def forward(
        self,
        types,
        list_neigh,
        Rij,
        nghost: int = 0,
        create_graph: bool = False,
        edge_order: torch.Tensor | None = None,
        owned: torch.Tensor | None = None,
    ):
        """types [n+nghost] or [B,n+nghost], int64; list_neigh [B,n,K], -1: empty slot; Rij [B,n,K,3] = r_j - r_i
        -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]

        The list is full: each pair is in the rows of both its atoms. Pairs beyond the cutoff count for nothing.
        create_graph keeps all of it differentiable, for Rij and parameters; otherwise the results are detached.
        edge_order, what order_of in package.py makes of a list, saves CUDA time while it lives. owned [n], bool: of a
        part of a system, whose energies count; the other rows are there for messages to pass, their energies are 0."""
        if not create_graph:
            Rij = Rij.detach()
        # An empty slot may hold anything.
        pairs = torch.where((list_neigh >= 0).unsqueeze(-1), Rij, 2 * self.cutoff)
        if not pairs.requires_grad:
            pairs.requires_grad_()
        atom_energy = self.energies(types, list_neigh, pairs, nghost)
        if owned is not None:
            atom_energy = torch.where(owned, atom_energy, 0.0)
        gradient = torch.autograd.grad([atom_energy.sum()], [pairs], create_graph=create_graph)[0]
        assert gradient is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
        B, natoms = list_neigh.shape[0], list_neigh.shape[1] + nghost
        frame = torch.arange(B, device=Rij.device).unsqueeze(1).expand(B, natoms).flatten()
        force, virial, atom_virial = torch.ops.calcops.edge_force_virial(
            edges(list_neigh, natoms),
            gradient.flatten(0, 2),
            Rij.flatten(0, 2),
            B * natoms,
            batch=frame,
            nframes=B,
            edge_order=edge_order,
        )
        force, atom_virial = force.view(B, natoms, 3), atom_virial.view(B, natoms, 3, 3)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
