"""NEP3 and NEP4 with the interface of ../potentials/potential.py.

    model = load("nep.txt")                       # or load("nep.txt", ["Au", "Cu"])

The energy of atom i is

    E_i = w1 . tanh(W0 q - b0) - b1 + half of the ZBL energy of its pairs
    q   = scale * (sums of the radial functions g_n, invariants of A_nlm in the order l, then n)

Functions of the radial part, n = 0, 1, ...: q_n = sum_j g_n(r_ij). The angular part has functions
of its own: A_nlm = sum_j g_n(r_ij) Y_lm(r_ij), and the invariants

    q_nl    sum_m A_nlm^2, l = 1 to l_max
    q_1111  7/15 of the square of q_n1
    q_222, q_112, q_123, q_233, q_134
            sum over l, m of W A_nlm A_nl'm' A_nl''m'' with the l of the name, where W are Wigner's
            3j symbols for real harmonics

g_n = sum_k c_nk f_k, where c depends on the types of both atoms, and f_k is the radial basis of
radial_splines.py. torch.ops.calcops_models.density computes the sums, with g_n as splines.

Source: Fan et al., J. Chem. Phys. 157, 114801 (2022), doi 10.1063/5.0106617; NEP4: Song et al.,
Nat. Commun. 15, 10208 (2024); ZBL: Liu et al., Phys. Rev. B 108, 054312 (2023).
"""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import numpy as np
import torch
from calcops.nep.invariants import TripleInvariant, k1111, sums_of_squares, terms_of, wigner_symbols
from calcops.nep.nep_file import NepFile, read
from calcops.nep.radial_splines import error_bounds, interpolation
from calcops.nep.zbl import terms_of_zbl
from calcops.potentials.blocks import call_in_blocks
from calcops.potentials.potential import forces_of_slots

kCells = 256
kBlockSlots = 1 << 16  # pairs of a call for each thread whose intermediate results fit the cache
kWithoutY00 = math.sqrt(4 * math.pi)  # the radial sums of density have a factor Y_00, NEP's do not


def load(path, type_names=None, cells=kCells):
    """Return the Nep of a nep.txt, in float64, eV and A. Print a bound of its splines' errors.

    Args:
        path: of a file of GPUMD, version 3 or 4.
        type_names: the types that are needed, in the order that the model shall have. None: all
            types of the file.
        cells: of the splines of the radial functions.

    Raises:
        ValueError: the file is no nep.txt, or a model that is not supported.
    """
    file = read(path)
    if type_names is not None:
        file = file.of_types(type_names)
    model = Nep(file, cells).eval()
    values, slopes = (1.5 * bound for bound in model.spline_error())  # one digit does not cut them
    print(
        f"{path}: splines of {cells} cells differ by at most {values:.0e} of the largest radial "
        f"function and {slopes:.0e} of the largest slope"
    )
    return model


class Nep(torch.nn.Module):
    """A neuroevolution potential.

    After `train()` every call computes the tables of the radial functions from their coefficients,
    which are parameters like those of the net. After `eval()` the first call with a pair of types
    computes its table: those of all pairs take 165 MB for 89 types. On a GPU and in another dtype,
    a model has all tables.

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
        self.register_buffer("rows", sums_of_squares(file.l_max, file.has_q222), persistent=False)
        self.k222 = 6 * wigner_symbols(2, 2, 2)[0, 1, 3].item()  # of xy yz xz
        self.k1111 = k1111
        self.triples = torch.nn.ModuleList(TripleInvariant(name) for name in file.triples)
        terms = terms_of(file.l_max, file.has_q222, file.has_q1111, file.triples)
        for name, tensor in zip(("factors", "invariant", "coefficient"), terms):
            self.register_buffer(name, tensor, persistent=False)

        self.cutoffs = file.cutoffs.tolist()
        self.neighbours = file.neighbours
        for part, name in enumerate(("radial", "angular")):
            c = torch.tensor(file.c[part]).flatten(0, 1)
            self.register_parameter(f"{name}_c", torch.nn.Parameter(c))  # [kinds, basis, F]
            basis = torch.from_numpy(interpolation(cells, c.shape[1]))
            if name == "radial":
                basis = basis * kWithoutY00
            self.register_buffer(f"{name}_basis", basis)
            self.register_buffer(f"{name}_grid", grid_of(file.cutoffs[:, part]))
        self.w0 = torch.nn.Parameter(torch.tensor(file.w0).mT.contiguous())  # [nets, dim, neurons]
        self.b0 = torch.nn.Parameter(torch.tensor(file.b0))
        self.w1 = torch.nn.Parameter(torch.tensor(file.w1))
        self.bias = torch.nn.Parameter(torch.tensor(file.bias))  # [nets]
        self.register_buffer("scale", torch.tensor(file.scale))

        self.zbl = file.zbl
        table = terms_of_zbl(file.zbl, self.type_names)
        self.zbl_outer = float(table[:, 1].max(initial=0))
        self.register_buffer("zbl_table", torch.from_numpy(table))
        self.forget_tables()

    def train(self, mode: bool = True):
        """Let the parameters be trained, or let calls compute tables of them. Return the model."""
        super().train(mode)
        self.forget_tables()
        return self

    def forget_tables(self):
        """Let the next call compute the tables of its pairs of types, from the parameters now."""
        for name in ("radial", "angular"):
            basis = getattr(self, f"{name}_basis")
            c = getattr(self, f"{name}_c")
            # The system provides memory of this size only as it is written.
            table = basis.new_empty(len(c), len(basis), c.shape[2])
            self.register_buffer(f"{name}_table", table, persistent=False)
        with torch.no_grad():
            weights = self.scale.unsqueeze(-1) * self.w0
            functions = self.radial_c.shape[2]
            w_angular = weights[:, functions:].unflatten(1, (-1, self.angular_c.shape[2]))
            w_radial = weights[:, :functions]
        self.register_buffer("w_radial", w_radial.contiguous(), persistent=False)
        self.register_buffer("w_angular", w_angular.contiguous(), persistent=False)
        self.has_table = np.zeros(len(self.radial_c), bool)
        self.has_all_tables = False
        self.versions = self.versions_now()
        if self.radial_c.is_cuda and not self.training:
            self.fill()

    def fill_if_needed(self, types):
        """Call `fill`, which TorchScript does not compile: a script has tables of its own."""
        if torch.jit.is_scripting():
            assert self.has_all_tables, "call fill() before torch.jit.script"
        else:
            self.fill(types)

    @torch.jit.unused
    def versions_now(self) -> list[int]:
        """Return the versions of what tables and weights come from, which PyTorch counts."""
        sources = self.radial_c, self.angular_c, self.w0, self.scale
        return [0 if x.is_inference() else x._version for x in sources]

    @torch.jit.unused
    @torch.no_grad()
    def fill(self, types: torch.Tensor | None = None):
        """Compute the tables for all pairs of `types`, an int64 tensor; None: of all types.

        Tables and weights that are older than the parameters are computed anew.
        """
        if self.versions != self.versions_now():
            self.forget_tables()
        if self.has_all_tables:
            return
        T = len(self.type_names)
        present = np.arange(T)
        if types is not None:
            present = np.unique(types.cpu().numpy())
            present = present[(present >= 0) & (present < T)]
        kinds = (present[:, None] * T + present).flatten()
        kinds = kinds[~self.has_table[kinds]]
        if len(kinds):
            own = torch.from_numpy(kinds).to(self.radial_c.device)
            self.radial_table[own] = self.radial_basis @ self.radial_c[own]
            self.angular_table[own] = self.angular_basis @ self.angular_c[own]
            self.has_table[kinds] = True
            self.has_all_tables = bool(self.has_table.all())

    def _apply(self, *arguments):
        """Move or convert the model, as `to` and others do, with all tables."""
        if not self.training:
            self.fill()
        super()._apply(*arguments)
        self.versions = self.versions_now()
        return self

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.forget_tables()

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
            zbl=self.zbl,
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
            triples=tuple(triple.name for triple in self.triples),
        )

    def spline_error(self):
        """Return bounds of the errors of the splines and of their slopes, as error_bounds does."""
        cells = len(self.radial_basis) - 5
        of_parts = [
            error_bounds(cells, c.detach().numpy()) for c in (self.radial_c, self.angular_c)
        ]
        return [max(bounds) for bounds in zip(*of_parts)]

    def invariants(self, A):
        """Return the invariants [n, dim of the angular part] of A [(l_max + 1)^2, n, F]."""
        # Sums of squares by one product: a step of a training has small tensors and many operators.
        sums = (self.rows @ A.square().flatten(1)).view(-1, A.shape[1], A.shape[2])
        parts = A.split([2 * l + 1 for l in range(self.l_max + 1)])  # noqa: E741
        q = list(sums[: self.l_max].unbind(0))
        if self.has_q222:
            xy, yz, z2, xz, x2 = parts[2].unbind(0)  # m = -2 ... 2
            of_z2, of_x2 = sums[self.l_max], sums[self.l_max + 1]
            q.append(z2 * of_z2 + x2 * of_x2 + self.k222 * xz * yz * xy)
        if self.has_q1111:
            q.append(self.k1111 * q[0] * q[0])
        for triple in self.triples:
            q.append(triple(parts))
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
        d = torch.where((kind >= 0).unsqueeze(-1), d, self.cutoff)  # a slot may hold NaN
        square = d.square().sum(-1)
        is_near = (kind >= 0) & ~(square >= self.zbl_outer**2)
        pair = kind.clamp(0, len(self.zbl_table) - 1)
        r = torch.where(is_near, square, 1.0).sqrt()
        return torch.where(is_near, self.energies_of_near_pairs(r, pair), 0.0).sum(1)

    def energies_of_near_pairs(self, r, pair):
        """Return half of the ZBL energies of pairs at distances r, both of any shape."""
        inner, outer, a1, b1, a2, b2, a3, b3, a4, b4 = self.zbl_table[pair].unbind(-1)
        x = ((r - inner) / (outer - inner)).clamp(0.0, 1.0)
        sums = (
            a1 * torch.exp(-b1 * r)
            + a2 * torch.exp(-b2 * r)
            + a3 * torch.exp(-b3 * r)
            + a4 * torch.exp(-b4 * r)
        )
        return sums / r * (0.5 + 0.5 * torch.cos(math.pi * x))

    def atom_energies(self, types, kind, d):
        """Return the energies [n] of atoms.

        Args:
            types: [n], -1 where there is no atom.
            kind: [n, K], type of the centre times the number of types plus that of the neighbour;
                -1: an empty slot.
            d: [n, K, 3], vectors to the neighbours.
        """
        q = self.unscaled_descriptors(kind, d)
        energy = self.energies_of_nets(types, q)
        if self.zbl_outer > 0:
            energy = energy + self.energies_of_zbl(d, kind)
        return energy

    def energies_and_gradient(self, types, kind, d):
        """Return the energies [n] of atom_energies, and the gradient [n, K, 3] of their sum for d.

        The operators give both without PyTorch's autograd, whose graph costs more than they do.
        """
        radial, A = self.sums(kind, d, self.radial_table, self.angular_table)
        energy, of_radial, of_A = torch.ops.calcops_models.density_net(
            radial[0],
            A,
            types if self.w0.shape[0] > 1 else types.clamp(max=0),  # a NEP3 has one net
            self.factors,
            self.invariant,
            self.coefficient,
            self.w_radial,
            self.w_angular,
            self.b0.detach(),
            self.w1.detach(),
            self.bias.detach(),
        )
        gradient = torch.ops.calcops_models._density_backward(
            of_radial.unsqueeze(0), d, kind, self.radial_table, self.radial_grid, 1
        )
        gradient += torch.ops.calcops_models._density_backward(
            of_A, d, kind, self.angular_table, self.angular_grid, A.shape[0]
        )
        if self.zbl_outer > 0:
            of_zbl, of_d = torch.ops.calcops_models.screened_repulsion(d, kind, self.zbl_table)
            energy += of_zbl
            gradient += of_d
        return energy, gradient

    def sums(self, kind, d, radial_table, angular_table):
        """Return the sums over neighbours of the radial [1, n, F] and the angular part [.., n, F].

        The arguments are those of atom_energies, and what `tables` returns.
        """
        harmonics = (self.l_max + 1) * (self.l_max + 1)
        radial = torch.ops.calcops_models.density(d, kind, radial_table, self.radial_grid, 1)
        A = torch.ops.calcops_models.density(d, kind, angular_table, self.angular_grid, harmonics)
        return radial, A

    def tables(self):
        """Return the splines [kinds, cells + 5, F] of the functions of both parts.

        They depend on the coefficients in PyTorch's graph, unless nobody asks for a gradient.
        """
        if self.has_all_tables and not self.radial_c.requires_grad:
            return self.radial_table, self.angular_table
        return self.radial_basis @ self.radial_c, self.angular_basis @ self.angular_c

    def nets(self):
        """Return w0 [nets, dim, neurons] for descriptors without a scale, b0 and w1."""
        return self.scale.unsqueeze(-1) * self.w0, self.b0, self.w1

    def unscaled_descriptors(self, kind, d):
        """Return the descriptors [n, dim] of atoms before `scale`; the arguments as above."""
        radial, A = self.sums(kind, d, *self.tables())
        return torch.cat([radial[0], self.invariants(A)], 1)

    @torch.no_grad()
    def descriptors(self, types, list_neigh, Rij):
        """Return the descriptors q [B n, dim] of atoms, as calorine and GPUMD give them.

        They are the numbers that the nets take: `scale` is applied. The arguments are those of
        `forward`.
        """
        _, Rij, kind = self.environment(types, list_neigh, Rij)
        if self.training:
            tables = self.tables()
        else:
            self.fill(types)
            tables = self.radial_table, self.angular_table
        radial, A = self.sums(kind.flatten(0, 1), Rij.flatten(0, 1), *tables)
        return torch.cat([radial[0], self.invariants(A)], 1) * self.scale

    @torch.no_grad()
    def latent(self, types, list_neigh, Rij):
        """Return the outputs [B n, neurons] of the hidden layer times w1, as NEP_CPU gives them.

        They add up to the energy of an atom plus its bias, without ZBL. The arguments are those of
        `forward`.
        """
        q = self.descriptors(types, list_neigh, Rij) / self.scale
        w0, b0, w1 = self.nets()
        B, n, _ = list_neigh.shape
        nets = types.expand(B, types.shape[-1])[:, :n].flatten().clamp(max=len(w0) - 1)
        latent = q.new_zeros(len(q), w0.shape[2])
        for t in nets[nets >= 0].unique().tolist():
            hidden = torch.tanh(torch.addmm(-b0[t], q[nets == t], w0[t]))
            latent[nets == t] = hidden * w1[t]
        return latent

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
        centres = types.expand(B, types.shape[-1])[:, :n].flatten().long()
        if not create_graph:
            Rij = Rij.detach()
        d = Rij.flatten(0, 1)
        if not (create_graph or self.training):
            self.fill_if_needed(types)
            energies, gradient = self.energies_and_gradient(centres, kind.flatten(0, 1), d)
            force, virial, atom_virial = forces_of_slots(list_neigh, kind >= 0, gradient, d, nghost)
            atom_energy = energies.view(B, n)
            return atom_energy.sum(-1), atom_energy, force, virial, atom_virial
        if not d.requires_grad:
            d = d.view_as(d).requires_grad_()  # the caller's stays as it is
        energies = self.atom_energies(centres, kind.flatten(0, 1), d)
        gradient = torch.autograd.grad([energies.sum()], [d], create_graph=create_graph)[0]
        assert gradient is not None  # for torch.jit.script
        atom_energy = energies.view(B, n)
        if not create_graph:
            atom_energy = atom_energy.detach()
            d = d.detach()
        force, virial, atom_virial = forces_of_slots(list_neigh, kind >= 0, gradient, d, nghost)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial

    @torch.jit.unused
    def of_near_pairs(self, types, list_neigh, Rij, nghost: int = 0):
        """Return the results of `forward`, on a CPU by blocks of atoms that fit the cache."""
        if self.training or list_neigh.device.type != "cpu":
            return self(types, list_neigh, Rij, nghost)
        return call_in_blocks(self, types, list_neigh, Rij, nghost, kBlockSlots)

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """Return energies, forces and virials, as Potential.forward of ../potentials/potential.py.

        A type of -1 is no atom, and a neighbour of this type an empty slot. Pairs may be in any
        order and at any distance.
        """
        list_neigh, Rij, kind = self.environment(types, list_neigh, Rij)
        return self.evaluate(types, list_neigh, Rij, kind, nghost, create_graph)


def grid_of(cutoffs):
    """Return the grid [T^2, 2] of density for all pairs of types with cutoffs [T]."""
    of_pairs = ((cutoffs[:, None] + cutoffs) / 2).flatten()
    return torch.from_numpy(np.stack([np.zeros_like(of_pairs), of_pairs], 1))
