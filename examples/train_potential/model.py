"""Deep Potential, se_e2_a: smooth environment matrix, embedding nets, fitting nets; forces and virial by calcops.

    model = load_npz("model.npz")        # weights of any origin; keys and shapes: load_npz
    energy, atom_energy, force, virial, atom_virial = model(types, list_neigh, Rij, nghost)

The published definition: Zhang et al., NeurIPS 31, 4436 (2018); Zeng et al., J. Chem. Phys. 159, 054801 (2023), II.B.1.
DeePMD-kit computes the same numbers (tests/test_examples_train_potential.py compares). Its conventions, read in its
deepmd/dpmodel (v3.2): an empty slot takes part as (0 - davg) / dstd; D is divided by the number of slots squared.
"""

import re

import numpy as np
import torch
from torch.nn.functional import pad

import calcops_jit


def load_npz(path, type_names=("Si",), units="metal"):
    """The model whose weights `path` holds, T types of atoms, S = sum(sel) neighbour slots:

    emb{t}_w{l} [in,out], emb{t}_b{l} [out], emb{t}_idt{l} [out] (optional)  layer l, embedding net, neighbours of type t
    fit{t}_w{l}, fit{t}_b{l}, fit{t}_idt{l}                                  layer l, fitting net, centre atoms of type t
    emb{t}_res{l}, fit{t}_res{l}                                             1: a residual layer
    davg, dstd [T,T,4]  of centre and neighbour type;  bias_atom_e [T];  sel [T];  rcut, rcut_smth, axis_neuron"""
    with np.load(path) as arrays:
        return DeepPotential(dict(arrays), type_names, units)


def save_npz(model, path):
    np.savez(path, **model.arrays())


class DeepPotential(torch.nn.Module):
    """The interface that hosts of CalcOps share; `arrays`: what load_npz reads. float64; units: the data's."""

    def __init__(self, arrays, type_names=("Si",), units="metal"):
        super().__init__()
        self.cutoff, self.rcut_smth = float(arrays["rcut"]), float(arrays["rcut_smth"])
        self.axis_neuron, self.sel = int(arrays["axis_neuron"]), [int(count) for count in arrays["sel"]]
        self.type_names, self.units = list(type_names), units
        if len(self.type_names) != len(self.sel):
            raise ValueError(f"expected a name for each of {len(self.sel)} types, got {self.type_names}")
        tensors = {key: torch.tensor(np.asarray(value), dtype=torch.float64) for key, value in arrays.items()}
        self.weights = torch.nn.ParameterDict(
            {key: tensors[key] for key in arrays if re.fullmatch(r"(emb|fit)\d+_(w|b|idt)\d+", key)}
        )
        self.residual = {key for key in arrays if re.fullmatch(r"(emb|fit)\d+_res\d+", key) and arrays[key]}
        for key in ("davg", "dstd", "bias_atom_e"):
            self.register_buffer(key, tensors[key])
        slot_types = torch.arange(len(self.sel)).repeat_interleave(torch.tensor(self.sel))
        self.register_buffer("slot_types", slot_types, persistent=False)

    def arrays(self):
        """What DeepPotential was made from, with the weights of now."""
        now = {
            key: value.detach().cpu().numpy() for key, value in (*self.weights.items(), *self.named_buffers())
        }
        now |= {key: np.array(1) for key in self.residual} | {"sel": np.array(self.sel), "rcut": self.cutoff}
        del now["slot_types"]
        return now | {"rcut_smth": self.rcut_smth, "axis_neuron": self.axis_neuron}

    def select(self, types, list_neigh, Rij):
        """The neighbours within the cutoff, sorted by type, then distance, in `sel` slots a type: list_neigh [B,n,S],
        Rij [B,n,S,3]. Of too many the nearest are kept; an empty slot gets -1 and a vector beyond the cutoff."""
        list_neigh, Rij = pad(list_neigh, (0, max(self.sel)), value=-1), pad(Rij, (0, 0, 0, max(self.sel)))
        kind = types.gather(1, list_neigh.clamp(min=0).long().flatten(1)).view(list_neigh.shape)
        r2 = Rij.detach().square().sum(-1)
        near = (list_neigh >= 0) & (r2 < self.cutoff**2)
        order = torch.cat(
            [
                r2.where(near & (kind == t), torch.inf).argsort(dim=-1, stable=True)[..., :count]
                for t, count in enumerate(self.sel)
            ],
            -1,
        )
        kept = near.gather(-1, order) & (kind.gather(-1, order) == self.slot_types)
        Rij = Rij.gather(2, order[..., None].expand(-1, -1, -1, 3)).where(kept[..., None], 2 * self.cutoff)
        return list_neigh.gather(-1, order).where(kept, -1), Rij

    def describe(self, Rij):
        """Ri [B,n,S,4] = s(r) (1, x/r, y/r, z/r), s = w(r)/r, and Ri_d [B,n,S,4,3], its derivative for atom i.

        w = 1 up to rcut_smth, 1 + q^3 (-6 q^2 + 15 q - 10) from there to the cutoff, q from 0 to 1, and 0 beyond."""
        r, width = Rij.norm(dim=-1, keepdim=True), self.cutoff - self.rcut_smth
        q = ((r - self.rcut_smth) / width).clamp(0, 1)
        w, dw = 1 + q**3 * (-6 * q**2 + 15 * q - 10), -30 * (q * (1 - q)).square() / width
        s, u = w / r, w / r**2
        ds, du = (dw - s) / r, (dw - 2 * s) / r**2
        unit, eye = Rij / r, torch.eye(3, dtype=Rij.dtype, device=Rij.device)
        outer = du[..., None] * Rij[..., :, None] * unit[..., None, :] + u[..., None] * eye
        # Rij = r_j - r_i, hence the minus.
        return torch.cat([s, u * Rij], -1), -torch.cat([(ds * unit)[..., None, :], outer], -2)

    def net(self, name, x):
        """tanh(x w + b) idt, plus x or, where the width doubles, (x, x) in residual layers; a fitting net ends linear."""
        weights, depth = self.weights, sum(key.startswith(f"{name}_w") for key in self.weights)
        for l in range(depth):  # noqa: E741, the l of the keys
            y = x @ weights[f"{name}_w{l}"] + weights[f"{name}_b{l}"]
            if name.startswith("fit") and l == depth - 1:
                return y
            y = y.tanh()
            if f"{name}_idt{l}" in weights:
                y = y * weights[f"{name}_idt{l}"]
            if f"{name}_res{l}" in self.residual and y.shape[-1] in (x.shape[-1], 2 * x.shape[-1]):
                y = y + (x if y.shape == x.shape else torch.cat([x, x], -1))
            x = y
        return x

    def atom_energies(self, types, Ri):
        """Energy [B,n] of local atoms of `types` [B,n]."""
        centres = types[..., None]
        R = (Ri - self.davg[centres, self.slot_types]) / self.dstd[centres, self.slot_types]
        embedded = [self.net(f"emb{t}", R_t[..., :1]) for t, R_t in enumerate(R.split(self.sel, dim=2))]
        T = torch.cat(embedded, 2).mT @ R / len(self.slot_types)
        D = (T @ T[..., : self.axis_neuron, :].mT).flatten(2)  # the same in every frame of reference
        fitted = torch.cat([self.net(f"fit{t}", D) for t in range(len(self.sel))], -1)
        return fitted.gather(-1, centres).squeeze(-1) + self.bias_atom_e[types]

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """types [n+nghost] or [B,n+nghost], list_neigh [B,n,K], Rij [B,n,K,3], any order, any K, any distance
        -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]"""
        B, n, _ = list_neigh.shape
        types = types.expand(B, -1)
        with torch.enable_grad():  # a host may be under no_grad
            list_neigh, Rij = self.select(types, list_neigh, Rij if create_graph else Rij.detach())
            Ri, Ri_d = self.describe(Rij)
            atom_energy = self.atom_energies(types[:, :n], Ri.requires_grad_())
            (dE,) = torch.autograd.grad(atom_energy.sum(), Ri, create_graph=create_graph)
            force, virial, atom_virial = calcops_jit.force_virial(
                list_neigh, dE, Ri_d.flatten(2, 3), Rij, nghost
            )
        atom_energy = atom_energy if create_graph else atom_energy.detach()
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
