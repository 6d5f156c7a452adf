"""The interface by which every host of CalcOps calls a potential.

A subclass defines the energy of an atom. Lengths and energies have the units of the potential.
"""

import torch

import calcops_jit  # noqa: F401 - brings torch.ops.calcops


def describe(planes):
    """Return Ri [B, n, K, 4] = (r, x, y, z) of each pair, from planes [3, B, K, n] of x, y, z."""
    x, y, z = planes.unbind(0)
    r2 = x * x + y * y + z * z
    # Where r = 0, its derivative is 0, not NaN.
    r = torch.where(r2 > 0, torch.where(r2 > 0, r2, 1.0).sqrt(), 0.0)
    return torch.stack([r, x, y, z]).permute(1, 3, 2, 0)


def edges(list_neigh, natoms: int):
    """Return edge_index [2, B K n], an edge for each slot of a list [B, n, K].

    The edges are in the order of frames, then slots, then atoms. Atom a of frame b has the number
    b natoms + a. An empty slot has the neighbour -1. An entry that names no atom of its frame
    becomes one that the operators refuse.
    """
    B, n, K = list_neigh.shape
    first = torch.arange(B, device=list_neigh.device).view(B, 1, 1) * natoms
    centre = first + torch.arange(n, device=list_neigh.device)
    entry = list_neigh.mT
    neighbour = torch.where((entry >= 0) & (entry < natoms), entry + first, entry)
    neighbour = torch.where(entry >= natoms, B * natoms, neighbour)
    return torch.stack([centre.expand(B, K, n), neighbour]).flatten(1)


def forces_of_slots(list_neigh, is_pair, gradient, Rij, nghost: int):
    """Return force, virial and per-atom virial of energies that depend on Rij.

    Args:
        list_neigh: [B, n, K].
        is_pair: [B, n, K]: the slots that count.
        gradient: [B, n, K, 3] or [B n, K, 3], the derivative of the energy with respect to Rij.
        Rij: of the same shape.
        nghost: the number of ghosts.

    Returns:
        force [B, n + nghost, 3], virial [B, 3, 3], atom_virial [B, n + nghost, 3, 3].
    """
    B, n, K = list_neigh.shape
    natoms = n + nghost
    frame = torch.arange(B, device=Rij.device)
    first = (frame * natoms).view(B, 1, 1)
    centre = first + torch.arange(n, device=Rij.device).unsqueeze(-1)
    neighbour = torch.where(is_pair, list_neigh + first, -1)
    force, virial, atom_virial = torch.ops.calcops.edge_force_virial(
        torch.stack([centre.expand(B, n, K), neighbour]).flatten(1),
        gradient.reshape(-1, 3),
        Rij.reshape(-1, 3),
        B * natoms,
        batch=frame.unsqueeze(1).expand(B, natoms).flatten(),
        nframes=B,
    )
    return force.view(B, natoms, 3), virial, atom_virial.view(B, natoms, 3, 3)


class Potential(torch.nn.Module):
    """Energies of atoms, with forces, virial and per-atom virial by edge_force_virial.

    torch.jit.script compiles this class, too, hence torch.ops in place of calcops_jit.

    Args:
        cutoff: a length.
        units: LAMMPS's name of the units, "metal" (eV, Angstrom) or "lj".
        type_names: the names of the types 0, 1, ..., such as chemical symbols.
        layers: the distance, in cutoffs, of the farthest atoms on which an atom's energy depends.
    """

    def __init__(self, cutoff: float, units: str, type_names: list[str], layers: int = 1):
        super().__init__()
        self.cutoff = cutoff
        self.units = units
        self.type_names = type_names
        self.layers = layers

    def atom_energies(self, types, list_neigh, Ri):
        """Return the energies [B, n] of atoms from Ri [B, n, K, 4] = (r, x, y, z).

        A slot with r >= cutoff adds 0, not NaN.
        """
        raise NotImplementedError

    def energies(self, types, list_neigh, planes, nghost: int):
        """Return the energies [B, n] of atoms, for pair vectors planes [3, B, K, n].

        Subclasses that need the vectors or the ghosts override this in place of atom_energies.
        """
        return self.atom_energies(types, list_neigh, describe(planes))

    def neighbour_types(self, types, list_neigh):
        """Return the type of the neighbour in each slot [B, n, K]; 0 in an empty slot."""
        types_of_frames = types.expand(list_neigh.shape[0], types.shape[-1])
        neighbours = list_neigh.long().clamp(min=0)
        types_of_slots = types_of_frames.gather(1, neighbours.flatten(1)).view_as(list_neigh)
        return types_of_slots.where(list_neigh >= 0, 0)

    def of_pairs(self, table, types, list_neigh):
        """Return the row of a table [T, T, p] for the types of each pair: [B, n, K, p], or [p].

        With one type, all pairs have the single row.
        """
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
        """Compute energies, forces and virials.

        Args:
            types: [n + nghost] or [B, n + nghost], int64.
            list_neigh: [B, n, K], -1 in empty slots. The list is full: each pair is in the rows of
                both its atoms. Pairs beyond the cutoff count for nothing.
            Rij: [B, n, K, 3], r_j - r_i. Empty slots may hold anything.
            nghost: the number of ghosts, which have no rows.
            create_graph: True keeps the results differentiable, with respect to Rij and parameters.
                Otherwise they are detached.
            edge_order: calcops_jit.edge_order of edges(list_neigh, n + nghost). It saves CUDA time
                as long as the list stays the same.
            owned: [n], bool, for a part of a system: the atoms whose energies count. The energies
                of the others are 0; only messages pass along their rows.

        Returns:
            energy [B], atom_energy [B, n], force [B, n + nghost, 3], virial [B, 3, 3], atom_virial
            [B, n + nghost, 3, 3].
        """
        if not create_graph:
            Rij = Rij.detach()
        # Atoms follow one another in memory. So loops over atoms fill a processor's vectors, even
        # if an atom has few neighbours.
        is_filled = list_neigh.mT >= 0
        planes = torch.stack(
            [torch.where(is_filled, x.mT, 2 * self.cutoff) for x in Rij.unbind(-1)]
        )
        if not planes.requires_grad:
            planes.requires_grad_()
        atom_energy = self.energies(types, list_neigh, planes, nghost)
        if owned is not None:
            atom_energy = torch.where(owned, atom_energy, 0.0)
        gradient = torch.autograd.grad([atom_energy.sum()], [planes], create_graph=create_graph)[0]
        assert gradient is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
            planes = planes.detach()
        B = list_neigh.shape[0]
        natoms = list_neigh.shape[1] + nghost
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
        force = force.view(B, natoms, 3)
        atom_virial = atom_virial.view(B, natoms, 3, 3)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
