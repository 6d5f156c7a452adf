"""NEP3 and NEP4 with the interface of ../potentials/potential.py.

    model = load("nep.txt")                       # or load("nep.txt", ["Au", "Cu"])

The energy of atom i is

    E_i = w1 . tanh(W0 q - b0) - b1 + half of the ZBL energy of its pairs
    q   = scale * (sums of the radial functions g_n, invariants of A_nlm in the order l, then n)

Functions of the radial part, n = 0, 1, ...: q_n = sum_j g_n(r_ij). The angular part has functions
of its own: A_nlm = sum_j g_n(r_ij) Y_lm(r_ij), and the invariants

    q_nl    sum_m A_nlm^2, l = 1 to l_max
    q_222   the invariant of third order in A_n2m
    q_1111  the square of q_n1

g_n = sum_k c_nk f_k, where c depends on the types of both atoms, and f_k is the radial basis of
splines.py. torch.ops.calcops.density computes the sums, with g_n as splines.

Source: Fan et al., J. Chem. Phys. 157, 114801 (2022), doi 10.1063/5.0106617; NEP4: Song et al.,
Nat. Commun. 15, 10208 (2024); ZBL: Liu et al., Phys. Rev. B 108, 054312 (2023).
"""

import math

import numpy as np
import torch
from calcops.nep.nep_file import read
from calcops.nep.splines import b_splines, interpolation, radial_basis

import calcops_jit  # noqa: F401 - brings torch.ops.calcops

kElements = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy "
    "Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu"
).split()
kCells = 256

# GPUMD's factors of the terms of q_222 and of q_1111. Its harmonics are 3z^2 - 1; xz and yz;
# x^2 - y^2 and 2xy; x, y and z. Orthonormal ones are these times kAxial, kMixed, kMixed / 2 and
# kLinear.
k222 = (
    -0.007499480826664,
    -0.134990654879954,
    0.067495327439977,
    0.404971964639861,
    -0.809943929279723,
)
k1111 = 0.026596810706114
kAxial = math.sqrt(5 / (16 * math.pi))
kMixed = math.sqrt(15 / (4 * math.pi))
kLinear = math.sqrt(3 / (4 * math.pi))


def load(path, type_names=None, cells=kCells):
    """Return the Nep of a nep.txt, in float64, eV and A. Print the error of its splines.

    Args:
        path: of a file of GPUMD, version 3 or 4.
        type_names: the types that are needed, in the order that the model shall have. Tables of
            pairs grow with the square of their number. None: all types of the file.
        cells: of the splines of the radial functions.

    Raises:
        ValueError: the file is no nep.txt, or a model that is not supported.
    """
    file = read(path)
    if type_names is not None:
        file = file.of_types(type_names)
    model = Nep(file, cells)
    values, slopes = model.spline_error(file)
    print(
        f"{path}: splines of {cells} cells differ by {values:.0e} of the largest radial function "
        f"and by {slopes:.0e} of the largest slope"
    )
    return model


class Nep(torch.nn.Module):
    """A neuroevolution potential.

    Args:
        file: a NepFile.
        cells: of the splines of the radial functions.
    """

    def __init__(self, file, cells=kCells):
        super().__init__()
        self.cutoff = float(file.cutoffs[:, 0].max())
        self.units = "metal"
        self.type_names = list(file.type_names)
        self.l_max = file.l_max
        self.has_q222 = file.has_q222
        self.has_q1111 = file.has_q1111
        planar = kMixed / 2  # of x^2 - y^2 and 2xy
        self.k222 = [
            k222[0] / kAxial**3,
            k222[1] / (kAxial * kMixed**2),
            k222[2] / (kAxial * planar**2),
            k222[3] / (planar * kMixed**2),
            k222[4] / (planar * kMixed**2),
        ]
        self.k1111 = k1111 / kLinear**4
        for part, name in enumerate(("radial", "angular")):
            table, grid = splines_of(file, part, cells)
            self.register_buffer(f"{name}_table", table)
            self.register_buffer(f"{name}_grid", grid)
        w0 = torch.from_numpy(file.w0 * file.scale)
        self.register_buffer("w0", w0.mT.contiguous())  # [nets, dim, neurons]
        self.register_buffer("b0", torch.from_numpy(file.b0))
        self.register_buffer("w1", torch.from_numpy(file.w1))
        self.register_buffer("bias", torch.from_numpy(file.bias))
        self.zbl_inner, self.zbl_outer = file.zbl or (0.0, 0.0)
        numbers = [0.0] * len(self.type_names)
        if file.zbl:
            unknown = [name for name in self.type_names if name not in kElements]
            if unknown:
                raise ValueError(f"expected chemical elements for the ZBL, got {' '.join(unknown)}")
            numbers = [kElements.index(name) + 1.0 for name in self.type_names]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64))

    def spline_error(self, file):
        """Return the largest error of the splines and of their slopes.

        Both are relative to the largest value of their kind of the radial functions.
        """
        worst = [0.0, 0.0]
        for part, (table, grid) in enumerate(
            ((self.radial_table, self.radial_grid), (self.angular_table, self.angular_grid))
        ):
            factor = math.sqrt(4 * math.pi) if part == 0 else 1.0
            c = file.c[part].reshape(-1, *file.c[part].shape[2:])
            cells = table.shape[1] - 5
            position = (np.arange(4 * cells) + 0.5) / 4
            B = b_splines(position, cells)
            for kind, (_, cutoff) in enumerate(grid.tolist()):
                r = position * cutoff / cells
                exact = radial_basis(r, cutoff, c.shape[1]) @ c[kind]
                splines = B @ table[kind].numpy() / factor
                for k, (own, other) in enumerate(
                    ((splines, exact), (np.gradient(splines, r, axis=0),
                                        np.gradient(exact, r, axis=0)))
                ):  # fmt: skip
                    largest = max(np.abs(other).max(), 1e-300)
                    worst[k] = max(worst[k], np.abs(own - other).max() / largest)
        return worst

    def invariants(self, A):
        """Return the invariants [n, dim of the angular part] of A [(l_max + 1)^2, n, F]."""
        squares = A.square()
        q = []
        for l in range(1, self.l_max + 1):  # noqa: E741
            q.append(squares[l * l : (l + 1) * (l + 1)].sum(0))
        if self.has_q222:
            k = self.k222
            xy, yz, z2, xz, x2 = A[4], A[5], A[6], A[7], A[8]  # m = -2 ... 2
            of_z2 = k[0] * z2 * z2 + k[1] * (xz * xz + yz * yz) + k[2] * (x2 * x2 + xy * xy)
            q.append(z2 * of_z2 + k[3] * x2 * (yz * yz - xz * xz) + k[4] * xz * yz * xy)
        if self.has_q1111:
            q.append(self.k1111 * q[0] * q[0])
        return torch.cat(q, 1)

    def energies_of_nets(self, types, q):
        """Return the energies [n] of the nets for atoms of `types` [n] and descriptors q [n, dim].

        A type of -1 is no atom: frames are padded to the size of the largest one.
        """
        if self.w0.shape[0] == 1:
            energy = torch.tanh(torch.addmm(-self.b0[0], q, self.w0[0])) @ self.w1[0]
            if len(self.type_names) == 1:
                return torch.where(types >= 0, energy - self.bias[0], 0.0)
        else:
            energy = torch.zeros_like(q[:, 0])
            for t in range(self.w0.shape[0]):
                atoms = (types == t).nonzero().squeeze(-1)
                hidden = torch.tanh(torch.addmm(-self.b0[t], q[atoms], self.w0[t]))
                energy = energy.index_add(0, atoms, hidden @ self.w1[t])
        return torch.where(types >= 0, energy - self.bias[types.clamp(min=0)], 0.0)

    def energies_of_zbl(self, d, kind):
        """Return half of the ZBL energies [n] of the pairs of each atom."""
        T = len(self.type_names)
        d = torch.where((kind >= 0).unsqueeze(-1), d, self.cutoff)  # a slot may hold NaN
        square = d.square().sum(-1)
        is_near = (kind >= 0) & ~(square >= self.zbl_outer**2)
        r = torch.where(is_near, square, 1.0).sqrt()
        pair = kind.clamp(min=0)
        Zi = self.atomic_numbers[pair // T]
        Zj = self.atomic_numbers[pair % T]
        x = r * ((Zi**0.23 + Zj**0.23) * 2.134563)
        phi = (
            0.18175 * torch.exp(-3.1998 * x)
            + 0.50986 * torch.exp(-0.94229 * x)
            + 0.28022 * torch.exp(-0.4029 * x)
            + 0.02817 * torch.exp(-0.20162 * x)
        )
        u = (r - self.zbl_inner) * (math.pi / (self.zbl_outer - self.zbl_inner))
        switch = torch.where(r < self.zbl_inner, 1.0, 0.5 + 0.5 * torch.cos(u))
        energy = 0.5 * 14.399645 * Zi * Zj / r * phi * switch
        return torch.where(is_near, energy, 0.0).sum(1)

    def atom_energies(self, types, kind, d):
        """Return the energies [n] of atoms.

        Args:
            types: [n], -1 where there is no atom.
            kind: [n, K], type of the centre times the number of types plus that of the neighbour;
                -1: an empty slot.
            d: [n, K, 3], vectors to the neighbours.
        """
        radial = torch.ops.calcops.density(d, kind, self.radial_table, self.radial_grid, 1)
        harmonics = (self.l_max + 1) * (self.l_max + 1)
        A = torch.ops.calcops.density(d, kind, self.angular_table, self.angular_grid, harmonics)
        q = torch.cat([radial[0], self.invariants(A)], 1)
        energy = self.energies_of_nets(types, q)
        if self.zbl_outer > 0:
            energy = energy + self.energies_of_zbl(d, kind)
        return energy

    def kinds(self, types, list_neigh):
        """Return `kind` of atom_energies for a list [B, n, K] and types [B, n + nghost]."""
        B, n, _ = list_neigh.shape
        neighbours = list_neigh.clamp(min=0).flatten(1).long()
        of_slots = types.gather(1, neighbours).view(list_neigh.shape)
        centres = types[:, :n].unsqueeze(-1)
        is_pair = (list_neigh >= 0) & (centres >= 0)
        return torch.where(is_pair, centres * len(self.type_names) + of_slots, -1)

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """Return energies, forces and virials, as Potential.forward of ../potentials/potential.py.

        A type of -1 is no atom. Pairs may be in any order and at any distance.
        """
        B, n, K = list_neigh.shape
        natoms = n + nghost
        types = types.expand(B, types.shape[-1])
        kind = self.kinds(types, list_neigh)
        if not create_graph:
            Rij = Rij.detach()
        d = Rij.flatten(0, 1)
        if not d.requires_grad:
            d = d.view_as(d).requires_grad_()  # the caller's stays as it is
        energies = self.atom_energies(types[:, :n].flatten(), kind.flatten(0, 1), d)
        gradient = torch.autograd.grad([energies.sum()], [d], create_graph=create_graph)[0]
        assert gradient is not None  # for torch.jit.script
        atom_energy = energies.view(B, n)
        if not create_graph:
            atom_energy = atom_energy.detach()
            d = d.detach()

        frame = torch.arange(B, device=Rij.device)
        first = (frame * natoms).view(B, 1, 1)
        centre = first + torch.arange(n, device=Rij.device).unsqueeze(-1)
        neighbour = torch.where(kind >= 0, list_neigh + first, -1)
        force, virial, atom_virial = torch.ops.calcops.edge_force_virial(
            torch.stack([centre.expand(B, n, K), neighbour]).flatten(1),
            gradient.flatten(0, 1),
            d.flatten(0, 1),
            B * natoms,
            batch=frame.unsqueeze(1).expand(B, natoms).flatten(),
            nframes=B,
        )
        force = force.view(B, natoms, 3)
        atom_virial = atom_virial.view(B, natoms, 3, 3)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial


def splines_of(file, part, cells):
    """Return the table [T T, cells + 5, F] and the grid [T T, 2] of density.

    The sums of the radial part have no harmonic. So its table has a factor that cancels Y_00.
    """
    T = len(file.type_names)
    cutoffs = file.cutoffs[:, part]
    of_pairs = ((cutoffs[:, None] + cutoffs) / 2).flatten()
    count = file.c[part].shape[2]
    bases = {cutoff: interpolation(cutoff, cells, count) for cutoff in set(of_pairs.tolist())}
    c = file.c[part].reshape(T * T, count, -1)
    factor = math.sqrt(4 * math.pi) if part == 0 else 1.0
    table = np.stack([bases[cutoff] @ c[k] * factor for k, cutoff in enumerate(of_pairs.tolist())])
    grid = np.stack([np.zeros(T * T), of_pairs], 1)
    return torch.from_numpy(table), torch.from_numpy(grid)
