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
radial_splines.py. torch.ops.calcops_models.density computes the sums, with g_n as splines.

Source: Fan et al., J. Chem. Phys. 157, 114801 (2022), doi 10.1063/5.0106617; NEP4: Song et al.,
Nat. Commun. 15, 10208 (2024); ZBL: Liu et al., Phys. Rev. B 108, 054312 (2023).
"""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import numpy as np
import torch
from calcops.nep.nep_file import NepFile, read
from calcops.nep.radial_splines import b_splines, interpolation, radial_basis
from calcops.potentials.potential import forces_of_slots

kElements = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy "
    "Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu"
).split()
kCells = 256
kWithoutY00 = math.sqrt(4 * math.pi)  # the radial sums of density have a factor Y_00, NEP's do not

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
    model = Nep(file, cells).eval()
    values, slopes = model.spline_error()
    print(
        f"{path}: splines of {cells} cells differ by {values:.0e} of the largest radial function "
        f"and by {slopes:.0e} of the largest slope"
    )
    return model


class Nep(torch.nn.Module):
    """A neuroevolution potential.

    After `train()` every call computes the tables of the radial functions from their coefficients,
    which are parameters like those of the net. `eval()` computes them once.

    Args:
        file: a NepFile.
        cells: of the splines of the radial functions.
    """

    def __init__(self, file, cells=kCells):
        super().__init__()
        self.cutoff = float(file.cutoffs[:, 0].max())
        self.units = "metal"
        self.type_names = list(file.type_names)
        self.version = file.version
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

        self.cutoffs = file.cutoffs.tolist()
        self.neighbours = file.neighbours
        for part, name in enumerate(("radial", "angular")):
            c = torch.tensor(file.c[part]).flatten(0, 1)
            self.register_parameter(f"{name}_c", torch.nn.Parameter(c))  # [kinds, basis, F]
            basis, grid = splines_of_basis(file.cutoffs[:, part], c.shape[1], cells)
            if name == "radial":
                basis = basis * kWithoutY00
            self.register_buffer(f"{name}_basis", basis)
            self.register_buffer(f"{name}_grid", grid)
            self.register_buffer(f"{name}_table", basis @ c)
        self.w0 = torch.nn.Parameter(torch.tensor(file.w0).mT.contiguous())  # [nets, dim, neurons]
        self.b0 = torch.nn.Parameter(torch.tensor(file.b0))
        self.w1 = torch.nn.Parameter(torch.tensor(file.w1))
        self.bias = torch.nn.Parameter(torch.tensor(file.bias))  # [nets]
        self.register_buffer("scale", torch.tensor(file.scale))

        self.zbl_inner, self.zbl_outer = file.zbl or (0.0, 0.0)
        numbers = [0.0] * len(self.type_names)
        if file.zbl:
            unknown = [name for name in self.type_names if name not in kElements]
            if unknown:
                raise ValueError(f"expected chemical elements for the ZBL, got {' '.join(unknown)}")
            numbers = [kElements.index(name) + 1.0 for name in self.type_names]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64))

    def train(self, mode: bool = True):
        """Let the parameters be trained, or compute the tables from them. Return the model."""
        super().train(mode)
        if not mode:
            with torch.no_grad():
                self.radial_table = self.radial_basis @ self.radial_c
                self.angular_table = self.angular_basis @ self.angular_c
        return self

    def file(self):
        """Return the NepFile of the model, which nep_file.write writes for GPUMD."""
        return self.file_of((self.radial_c, self.angular_c), self.w0, self.b0, self.w1, self.bias)

    def file_of(self, c, w0, b0, w1, bias):
        """Return the NepFile of a model like this one, with other tensors.

        Args:
            c: the coefficients [T^2, basis, F] of the radial and the angular part.
            w0: [nets, dim, neurons].
            b0: [nets, neurons].
            w1: [nets, neurons].
            bias: [nets].
        """
        T = len(self.type_names)
        w0, b0, w1, bias, scale, *c = (
            tensor.detach().double().cpu().numpy()
            for tensor in (w0.mT, b0, w1, bias, self.scale, *c)
        )
        return NepFile(
            version=self.version,
            type_names=list(self.type_names),
            zbl=(self.zbl_inner, self.zbl_outer) if self.zbl_outer > 0 else None,
            cutoffs=np.array(self.cutoffs),
            l_max=self.l_max,
            has_q222=self.has_q222,
            has_q1111=self.has_q1111,
            w0=w0,
            b0=b0,
            w1=w1,
            bias=bias,
            c=tuple(part.reshape(T, T, *part.shape[1:]) for part in c),
            scale=scale,
            neighbours=self.neighbours,
        )

    def spline_error(self):
        """Return the largest error of the splines of radial functions and of their slopes.

        Each is relative to the largest value or slope of the functions of its kind.
        """
        worst = [0.0, 0.0]
        radial = self.radial_basis / kWithoutY00, self.radial_c, self.radial_grid
        angular = self.angular_basis, self.angular_c, self.angular_grid
        step = 0.01  # in cells, over which slopes are differences: exact to 1e-4
        for basis, c, grid in (radial, angular):
            cells = basis.shape[1] - 5
            middle = np.linspace(step, cells - step, 8 * cells + 1)
            positions = middle - step, middle, middle + step
            splines = [b_splines(position, cells) for position in positions]
            for cutoff in grid[:, 1].unique():
                kinds = (grid[:, 1] == cutoff).nonzero().flatten()
                lengths = [position * cutoff.item() / cells for position in positions]
                exact = [radial_basis(r, cutoff.item(), c.shape[1]) for r in lengths]
                spline = basis[kinds[0] if len(basis) > 1 else 0].numpy()
                error = [B @ spline - values for B, values in zip(splines, exact)]
                values = error[1], exact[1]
                slopes = error[2] - error[0], exact[2] - exact[0]
                for coefficients in c[kinds].detach().numpy():
                    for k, of_basis in enumerate((values, slopes)):
                        of_splines, largest = (np.abs(x @ coefficients).max() for x in of_basis)
                        worst[k] = max(worst[k], float(of_splines / max(largest, 1e-300)))
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
        w0 = self.w0
        q = q * self.scale
        bias = self.bias[0]
        if w0.shape[0] == 1:
            energy = torch.tanh(torch.addmm(-self.b0[0], q, w0[0])) @ self.w1[0]
        elif q.is_cuda:
            # nonzero() would wait for the GPU, so each net gets all atoms.
            hidden = q.new_zeros(len(q), w0.shape[-1])
            for t in range(w0.shape[0]):
                own = (types == t).unsqueeze(-1)
                hidden = torch.where(own, torch.addmm(-self.b0[t], q, w0[t]), hidden)
            energy = (torch.tanh(hidden) * self.w1[types.clamp(min=0)]).sum(-1)
            bias = self.bias[types.clamp(min=0)]
        else:
            energy = torch.zeros_like(q[:, 0])
            for t in range(w0.shape[0]):
                atoms = (types == t).nonzero().squeeze(-1)
                hidden = torch.tanh(torch.addmm(-self.b0[t], q[atoms], w0[t]))
                energy = energy.index_add(0, atoms, hidden @ self.w1[t])
            bias = self.bias[types.clamp(min=0)]
        return torch.where(types >= 0, energy - bias, 0.0)

    def energies_of_zbl(self, d, kind):
        """Return half of the ZBL energies [n] of the pairs of each atom."""
        T = len(self.type_names)
        d = torch.where((kind >= 0).unsqueeze(-1), d, self.cutoff)  # a slot may hold NaN
        square = d.square().sum(-1)
        is_near = (kind >= 0) & ~(square >= self.zbl_outer**2)
        r = torch.where(is_near, square, 1.0).sqrt()
        pair = kind.clamp(0, T * T - 1)
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
        radial_table, angular_table = self.radial_table, self.angular_table
        if self.training:
            radial_table = self.radial_basis @ self.radial_c
            angular_table = self.angular_basis @ self.angular_c
        radial = torch.ops.calcops_models.density(d, kind, radial_table, self.radial_grid, 1)
        harmonics = (self.l_max + 1) * (self.l_max + 1)
        A = torch.ops.calcops_models.density(d, kind, angular_table, self.angular_grid, harmonics)
        q = torch.cat([radial[0], self.invariants(A)], 1)
        energy = self.energies_of_nets(types, q)
        if self.zbl_outer > 0:
            energy = energy + self.energies_of_zbl(d, kind)
        return energy

    def kinds(self, types, list_neigh):
        """Return `kind` of atom_energies for a list [B, n, K] and types [B, n + nghost].

        A type that the model does not have becomes a kind that `density` refuses.
        """
        T = len(self.type_names)
        B, n, _ = list_neigh.shape
        neighbours = list_neigh.clamp(min=0).flatten(1).long()
        of_slots = types.gather(1, neighbours).view(list_neigh.shape)
        centres = types[:, :n].unsqueeze(-1)
        is_pair = (list_neigh >= 0) & (torch.minimum(centres, of_slots) >= 0)
        is_known = torch.maximum(centres, of_slots) < T
        return torch.where(is_pair, torch.where(is_known, centres * T + of_slots, T * T), -1)

    def environment(self, types, list_neigh, Rij):
        """Return what `evaluate` needs: list_neigh, Rij and `kind` of atom_energies [B, n, K].

        Nothing of it depends on the parameters, so a training computes it once for each frame.
        """
        types = types.expand(list_neigh.shape[0], types.shape[-1])
        return list_neigh, Rij, self.kinds(types, list_neigh)

    def evaluate(self, types, list_neigh, Rij, kind, nghost: int, create_graph: bool):
        """Return the results of `forward` from those of `environment`."""
        B, n, _ = list_neigh.shape
        types = types.expand(B, types.shape[-1])
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
        force, virial, atom_virial = forces_of_slots(list_neigh, kind >= 0, gradient, d, nghost)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """Return energies, forces and virials, as Potential.forward of ../potentials/potential.py.

        A type of -1 is no atom, and a neighbour of this type an empty slot. Pairs may be in any
        order and at any distance.
        """
        list_neigh, Rij, kind = self.environment(types, list_neigh, Rij)
        return self.evaluate(types, list_neigh, Rij, kind, nghost, create_graph)


def splines_of_basis(cutoffs, count, cells):
    """Return splines of the radial basis for all pairs of types, and the grid of density.

    Args:
        cutoffs: [T], of the types.
        count: of the functions of the basis.
        cells: of the splines.

    Returns:
        The coefficients [T T, cells + 5, count] of the splines, or [1, cells + 5, count] if all
        cutoffs are equal, and the grid [T T, 2].
    """
    of_pairs = ((cutoffs[:, None] + cutoffs) / 2).flatten()
    grid = np.stack([np.zeros_like(of_pairs), of_pairs], 1)
    bases = {cutoff: interpolation(cutoff, cells, count) for cutoff in set(of_pairs.tolist())}
    if len(bases) == 1:
        of_pairs = of_pairs[:1]
    basis = np.stack([bases[cutoff] for cutoff in of_pairs.tolist()])
    return torch.from_numpy(basis), torch.from_numpy(grid)
