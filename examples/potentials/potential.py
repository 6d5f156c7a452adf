"""The interface that every host of CalcOps calls a potential by. A subclass says what the energy of an atom is."""

import torch

import calcops_jit  # noqa: F401 - brings torch.ops.calcops


def describe(Rij):
    """Ri [B,n,K,4] = (r, x, y, z) of each pair and Ri_d [B,n,K,4,3], its derivative for atom i."""
    r = torch.linalg.vector_norm(Rij, dim=-1, keepdim=True)
    # Rij = r_j - r_i, so the derivatives for atom i are minus those for Rij.
    minus = -torch.eye(3, dtype=Rij.dtype, device=Rij.device)
    return torch.cat([r, Rij], -1), torch.cat([(-Rij / r).unsqueeze(-2), minus.expand(Rij.shape + (3,))], -2)


class Potential(torch.nn.Module):
    """cutoff: a length; units: LAMMPS's name, "metal" (eV, Angstrom) or "lj"; type_names: what types 0, 1, ... are.

    It is also a class that torch.jit.script compiles, hence torch.ops in place of calcops_jit.force_virial."""

    def __init__(self, cutoff: float, units: str, type_names: list[str]):
        super().__init__()
        self.cutoff, self.units, self.type_names = cutoff, units, type_names

    def atom_energies(self, types, list_neigh, Ri):
        """[B,n] from Ri [B,n,K,4] = (r, x, y, z); a slot with r >= cutoff must add exactly 0, and no NaN."""
        raise NotImplementedError

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
        neighbor_index: torch.Tensor | None = None,
    ):
        """types [n+nghost] or [B,n+nghost], int64; list_neigh [B,n,K], -1: empty slot; Rij [B,n,K,3] = r_j - r_i
        -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]

        The list is full: each pair is in the rows of both its atoms. Pairs beyond the cutoff count for nothing.
        create_graph keeps all of it differentiable, for Rij and parameters; otherwise the results are detached.
        neighbor_index, of calcops_jit.neighbor_index(list_neigh, nghost), saves CUDA time while a list lives."""
        if not create_graph:
            Rij = Rij.detach()
        # An empty slot may hold anything.
        Ri, Ri_d = describe(torch.where((list_neigh >= 0).unsqueeze(-1), Rij, 2 * self.cutoff))
        Ri.requires_grad_()
        atom_energy = self.atom_energies(types, list_neigh, Ri)
        dE = torch.autograd.grad([atom_energy.sum()], [Ri], create_graph=create_graph)[0]
        assert dE is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
        force, virial, atom_virial = torch.ops.calcops.force_virial(
            list_neigh, dE, Ri_d.flatten(2, 3), Rij, nghost, neighbor_index=neighbor_index
        )
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
