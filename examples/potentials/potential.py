"""The interface by which every host of CalcOps calls a potential.

A subclass says what the energy of an atom is.
"""

import torch

import calcops_jit  # noqa: F401 - brings torch.ops.calcops


def describe(planes):
    """Ri [B,n,K,4] = (r, x, y, z) of each pair; planes [3,B,K,n]: x, y and z."""
    x, y, z = planes.unbind(0)
    r2 = x * x + y * y + z * z
    # Where r = 0, its derivative is 0, not NaN.
    r = torch.where(r2 > 0, torch.where(r2 > 0, r2, 1.0).sqrt(), 0.0)
    return torch.stack([r, x, y, z]).permute(1, 3, 2, 0)


def edges(list_neigh, natoms: int):
    """edge_index [2,BKn] of all frames' slots, the first slots of a frame's atoms first; atom a of
    frame b is b natoms + a; -1 as neighbour: empty slot. An entry that names no atom of its frame
    stays one that the operators refuse.
    """
    B, n, K = list_neigh.shape
    first = torch.arange(B, device=list_neigh.device).view(B, 1, 1) * natoms
    centre = first + torch.arange(n, device=list_neigh.device)
    named = list_neigh.mT
    neighbour = torch.where((named >= 0) & (named < natoms), named + first, named)
    neighbour = torch.where(named >= natoms, B * natoms, neighbour)
    return torch.stack([centre.expand(B, K, n), neighbour]).flatten(1)


class Potential(torch.nn.Module):
    """cutoff: a length; units: LAMMPS's name, "metal" (eV, Angstrom) or "lj"; type_names: what
    types 0, 1, ... are; layers: how many cutoffs away an atom may be that the energy of an atom
    depends on.

    It is also a class that torch.jit.script compiles, hence torch.ops in place of
    calcops_jit.edge_force_virial.
    """

    def __init__(self, cutoff: float, units: str, type_names: list[str], layers: int = 1):
        super().__init__()
        self.cutoff, self.units, self.type_names, self.layers = cutoff, units, type_names, layers

    def atom_energies(self, types, list_neigh, Ri):
        """[B,n] from Ri [B,n,K,4] = (r, x, y, z); a slot with r >= cutoff adds 0, not NaN."""
        raise NotImplementedError

    def energies(self, types, list_neigh, planes, nghost: int):
        """What forward differentiates: atom_energies."""
        return self.atom_energies(types, list_neigh, describe(planes))

    def neighbour_types(self, types, list_neigh):
        """[B,n,K]; 0 in an empty slot."""
        rows = types.expand(list_neigh.shape[0], types.shape[-1])
        found = rows.gather(1, list_neigh.long().clamp(min=0).flatten(1)).view_as(list_neigh)
        return found.where(list_neigh >= 0, 0)

    def of_pairs(self, table, types, list_neigh):
        """Rows of table [T,T,p] for the types of each pair [B,n,K,p]; one type has a single row."""
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
        """types [n+nghost] or [B,n+nghost], int64; list_neigh [B,n,K], -1: empty slot; Rij
        [B,n,K,3] = r_j - r_i -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial
        [B,3,3], atom_virial [B,n+nghost,3,3]

        The list is full: each pair is in the rows of both its atoms. Pairs beyond the cutoff count
        for nothing. create_graph keeps all of it differentiable, for Rij and parameters; otherwise
        the results are detached. edge_order, what order_of in package.py makes of a list, saves
        CUDA time while it lives. owned [n], bool: of a part of a system, whose energies count; the
        other rows are there for messages to pass, their energies are 0.
        """
        if not create_graph:
            Rij = Rij.detach()
        # Atom after atom in memory, so that a compiler's vectors are full where rows are short.
        # Empty slots may hold anything.
        named = list_neigh.mT >= 0
        planes = torch.stack([torch.where(named, x.mT, 2 * self.cutoff) for x in Rij.unbind(-1)])
        if not planes.requires_grad:
            planes.requires_grad_()
        atom_energy = self.energies(types, list_neigh, planes, nghost)
        if owned is not None:
            atom_energy = torch.where(owned, atom_energy, 0.0)
        gradient = torch.autograd.grad([atom_energy.sum()], [planes], create_graph=create_graph)[0]
        assert gradient is not None  # for torch.jit.script
        if not create_graph:
            atom_energy, planes = atom_energy.detach(), planes.detach()
        B, natoms = list_neigh.shape[0], list_neigh.shape[1] + nghost
        frame = torch.arange(B, device=Rij.device).unsqueeze(1).expand(B, natoms).flatten()
        force, virial, atom_virial = torch.ops.calcops.edge_force_virial(
            edges(list_neigh, natoms),
            gradient.flatten(1).mT,
            planes.flatten(1).mT,
            B * natoms,
            batch=frame,
            nframes=B,
            edge_order=edge_order,
        )
        force, atom_virial = force.view(B, natoms, 3), atom_virial.view(B, natoms, 3, 3)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
