"""Deep Potential, se_e2_a: smooth environment matrix, embedding nets, fitting nets; forces and virial by calcops.

    model = load_npz("model.npz")        # weights of any origin
    energy, atom_energy, force, virial, atom_virial = model(types, list_neigh, Rij, nghost)

The published definition: Zhang et al., NeurIPS 31, 4436 (2018); Zeng et al., J. Chem. Phys. 159, 054801 (2023), II.B.1.
DeePMD-kit computes the same numbers (tests/test_examples_train_potential.py compares). Its conventions, read in its
deepmd/dpmodel (v3.2): an empty slot takes part as (0 - davg) / dstd; D is divided by the number of slots squared.
"""

import numpy as np
import torch
from torch.nn.functional import pad
from weights import net, tensor

import calcops_jit  # noqa: F401 - brings torch.ops.calcops


def load_npz(path, type_names=None, units="metal"):
    """The model whose weights `path` holds, for T types of atoms; float64, energy and length in the data's units:

    emb{t}_w{l} [in,out], emb{t}_b{l} [out]     layer l of the embedding net for neighbours of type t; [T,in,out] and
                                                [T,out] if there is a net for each type of centre atom
    fit{t}_w{l} [in,out], fit{t}_b{l} [out]     layer l of the fitting net for centre atoms of type t
    emb{t}_idt{l}, fit{t}_idt{l} [out]          optional: what the layer's activation is multiplied by
    emb{t}_res{l}, fit{t}_res{l}                1: the layer's input is added, twice where the width doubles
    emb{t}_act{l}, fit{t}_act{l}                optional: the activation if not tanh, a name of kActivations
    davg, dstd [centre type, neighbour type, 4];  bias_atom_e [T];  sel [T];  rcut, rcut_smth, axis_neuron
    type_names [T]                              optional, what `type_names` is if not given"""
    with np.load(path) as arrays:
        return DeepPotential(dict(arrays), type_names, units)


class DeepPotential(torch.nn.Module):
    """The interface that hosts of CalcOps share, here and in torch.jit.script; `arrays`: what load_npz reads."""

    def __init__(self, arrays, type_names=None, units="metal"):
        super().__init__()
        self.cutoff, self.rcut_smth = float(arrays["rcut"]), float(arrays["rcut_smth"])
        self.axis_neuron, self.sel = int(arrays["axis_neuron"]), [int(count) for count in arrays["sel"]]
        if type_names is None:
            type_names = arrays.get("type_names", [f"X{t}" for t in range(len(self.sel))])
        self.type_names, self.units = [str(name) for name in type_names], units
        if len(self.type_names) != len(self.sel):
            raise ValueError(f"expected a name for each of {len(self.sel)} types, got {self.type_names}")
        self.emb = torch.nn.ModuleList(net(arrays, f"emb{t}") for t in range(len(self.sel)))
        self.fit = torch.nn.ModuleList(net(arrays, f"fit{t}") for t in range(len(self.sel)))
        for key in ("davg", "dstd", "bias_atom_e"):
            self.register_buffer(key, tensor(arrays, key))
        slot_types = torch.arange(len(self.sel)).repeat_interleave(torch.tensor(self.sel))
        self.register_buffer("slot_types", slot_types, persistent=False)

    def environment(self, types, list_neigh, Rij):
        """What `evaluate` takes of a structure: the neighbours that `select` gives and what `describe` makes of them.
        None of it depends on the weights, so training needs it once a frame."""
        list_neigh, Rij = self.select(types, list_neigh, Rij)
        R, R_d = self.describe(types[:, : list_neigh.shape[1]], Rij)
        return list_neigh, Rij, R, R_d

    def select(self, types, list_neigh, Rij):
        """The neighbours within the cutoff, sorted by type, then distance, in `sel` slots a type: list_neigh [B,n,S],
        Rij [B,n,S,3]. Of too many the nearest are kept; an empty slot gets -1 and a vector beyond the cutoff."""
        list_neigh, Rij = pad(list_neigh, [0, max(self.sel)], value=-1.0), pad(Rij, [0, 0, 0, max(self.sel)])
        kind = types.gather(1, list_neigh.clamp(min=0).long().flatten(1)).view_as(list_neigh)
        r2 = Rij.detach().square().sum(-1)
        near = (list_neigh >= 0) & (r2 < self.cutoff**2)
        nearest = []
        for t, count in enumerate(self.sel):
            distance = torch.where(near & (kind == t), r2, float("inf"))
            nearest.append(distance.argsort(dim=-1, stable=True)[..., :count])
        order = torch.cat(nearest, -1)
        kept = near.gather(-1, order) & (kind.gather(-1, order) == self.slot_types)
        order3 = order.unsqueeze(-1).expand(-1, -1, -1, 3)
        Rij = torch.where(kept.unsqueeze(-1), Rij.gather(2, order3), 2 * self.cutoff)
        return torch.where(kept, list_neigh.gather(-1, order), -1), Rij

    def describe(self, types, Rij):
        """R [B,n,S,4] = (Ri - davg) / dstd and R_d [B,n,4S,3], its derivative for atom i, one of `types` [B,n].

        Ri = s(r) (1, x/r, y/r, z/r), s = w(r)/r. w = 1 up to rcut_smth, 1 + q^3 (-6 q^2 + 15 q - 10) from there to the
        cutoff, q from 0 to 1, and 0 beyond."""
        r, width = torch.linalg.vector_norm(Rij, dim=-1, keepdim=True), self.cutoff - self.rcut_smth
        q = ((r - self.rcut_smth) / width).clamp(0, 1)
        w, dw = 1 + q**3 * (-6 * q**2 + 15 * q - 10), -30 * (q * (1 - q)).square() / width
        s, u = w / r, w / r**2
        ds, du = (dw - s) / r, (dw - 2 * s) / r**2
        unit, eye = Rij / r, torch.eye(3, dtype=Rij.dtype, device=Rij.device)
        outer = (du * Rij).unsqueeze(-1) * unit.unsqueeze(-2) + u.unsqueeze(-1) * eye
        Ri, Ri_d = torch.cat([s, u * Rij], -1), torch.cat([(ds * unit).unsqueeze(-2), outer], -2)
        centres = types.unsqueeze(-1)
        davg, dstd = self.davg[centres, self.slot_types], self.dstd[centres, self.slot_types]
        return (Ri - davg) / dstd, -(Ri_d / dstd.unsqueeze(-1)).flatten(2, 3)  # Rij = r_j - r_i, hence the minus

    def atom_energies(self, types, R):
        """Energy [B,n] of local atoms of `types` [B,n]."""
        of_type = R.split(self.sel, dim=2)
        embedded = [net(of_type[t][..., :1], types) for t, net in enumerate(self.emb)]
        T = torch.cat(embedded, 2).mT @ R / len(self.slot_types)
        D = (T @ T[..., : self.axis_neuron, :].mT).flatten(2)  # the same in every frame of reference
        fitted = torch.cat([net(D, types) for net in self.fit], -1)
        return fitted.gather(-1, types.unsqueeze(-1)).squeeze(-1) + self.bias_atom_e[types]

    def evaluate(self, types, list_neigh, Rij, R, R_d, nghost: int, create_graph: bool):
        """The results of `forward` for an `environment`."""
        R = R.view_as(R).requires_grad_()  # the caller's stays as it is
        atom_energy = self.atom_energies(types[:, : list_neigh.shape[1]], R)
        dE = torch.autograd.grad([atom_energy.sum()], [R], create_graph=create_graph)[0]
        assert dE is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
        force, virial, atom_virial = torch.ops.calcops.force_virial(list_neigh, dE, R_d, Rij, nghost)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """types [n+nghost] or [B,n+nghost], list_neigh [B,n,K], Rij [B,n,K,3], in any order, at any distance
        -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]"""
        types = types.expand(list_neigh.shape[0], types.shape[-1])
        list_neigh, Rij, R, R_d = self.environment(types, list_neigh, Rij if create_graph else Rij.detach())
        return self.evaluate(types, list_neigh, Rij, R, R_d, nghost, create_graph)
