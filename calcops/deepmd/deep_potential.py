"""Deep Potential, se_e2_a: environment matrix, embedding and fitting nets, forces by calcops.

    model = load_npz("model.npz")        # weights of any origin
    energy, atom_energy, force, virial, atom_virial = model(types, list_neigh, Rij, nghost)

Definition: Zhang et al., NeurIPS 31, 4436 (2018); Zeng et al., J. Chem. Phys. 159, 054801 (2023),
II.B.1. DeePMD-kit computes the same numbers, as tests/packages/test_deepmd.py
shows. Two of its conventions, from its deepmd/dpmodel (v3.2): an empty slot has the row
(0 - davg) / dstd, and D is divided by the number of slots squared.
"""

import copy

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import numpy as np
import torch
from calcops.deepmd import splines, tables
from calcops.deepmd.differences import differences
from calcops.deepmd.nets import net as net_of
from calcops.deepmd.nets import save_npz, tensor
from calcops.potentials.potential import forces_of_slots


def load_npz(path, type_names=None, units="metal"):
    """Return the model of a file of weights, in float64, for T types of atoms.

    Energies and lengths have the units of the weights. The file has these arrays:

    emb{t}_w{l} [in, out], emb{t}_b{l} [out]: layer l of the embedding net for neighbours of type t.
        [T, in, out] and [T, out] are nets for each type of centre
    fit{t}_w{l} [in, out], fit{t}_b{l} [out]: layer l of the fitting net for centres of type t
    emb{t}_idt{l}, fit{t}_idt{l} [out], optional: factors of the layer's activation
    emb{t}_res{l}, fit{t}_res{l}: 1 to add the layer's input; twice, if the width doubles
    emb{t}_act{l}, fit{t}_act{l}, optional: a name of kActivations; absent: tanh
    table, grid, optional: of torch.ops.calcops_models.tabulated_sum, instead of the embedding nets.
        A neighbour of type t has the kind t or, with T^2 kinds, T t + type of the centre
    spline [T, T * functions, M], spline_grid [T, T, 2], optional: coefficients and grid of
        torch.ops.calcops_models.environment_spline for each type of centre, instead of the
        embedding nets
    spline_empty [T * T, 4 M], with `spline`: what an empty slot adds. Type t and centre c have the
        row T t + c
    davg, dstd [centre type, neighbour type, 4]; bias_atom_e [T]; sel [T]
    rcut, rcut_smth, axis_neuron
    shortest [T, T], optional: the shortest pair of each two types that the model was trained on
    type_names [T], optional: the names of the types, unless the argument gives them
    float32_nets, optional: true if the nets compute in float32
    """
    with np.load(path) as arrays:
        return DeepPotential(dict(arrays), type_names, units)


def quick_form(model, options):
    """Return the model to package, for a command with --tabulated and --float32-nets."""
    if options.tabulated and model.has_nets:
        model = model.tabulated()
    if options.float32_nets:
        model = model.with_float32_nets()
    return model


class DeepPotential(torch.nn.Module):
    """A Deep Potential with the interface of ../potentials/potential.py; `arrays`: of load_npz."""

    def __init__(self, arrays, type_names=None, units="metal"):
        super().__init__()
        self.cutoff = float(arrays["rcut"])
        self.rcut_smth = float(arrays["rcut_smth"])
        self.axis_neuron = int(arrays["axis_neuron"])
        self.sel = [int(count) for count in arrays["sel"]]
        ntypes = len(self.sel)
        if type_names is None:
            type_names = arrays.get("type_names", [f"X{t}" for t in range(ntypes)])
        self.type_names = [str(name) for name in type_names]
        self.units = units
        if len(self.type_names) != ntypes:
            raise ValueError(f"expected a name for each of {ntypes} types, got {self.type_names}")
        self.emb = torch.nn.ModuleList(net_of(arrays, f"emb{t}") for t in range(ntypes))
        self.fit = torch.nn.ModuleList(net_of(arrays, f"fit{t}") for t in range(ntypes))
        for key in ("davg", "dstd", "bias_atom_e", "shortest"):
            self.register_buffer(key, tensor(arrays, key))
        self.width = self.emb[0][-1].b.shape[-1]
        self.set_tables(tensor(arrays, "table"), tensor(arrays, "grid"))
        if "spline" in arrays:
            self.set_spline(*(tensor(arrays, f"spline{end}") for end in ("", "_grid", "_empty")))
        self.set_float32_nets(bool(arrays.get("float32_nets", False)))

    def set_tables(self, table=None, grid=None):
        """Use tables instead of the embedding nets; None: use the nets."""
        self.register_buffer("table", table)
        self.register_buffer("grid", grid)
        self.set_spline(None, None, None)

    def set_spline(self, spline, grid, empty):
        """Use splines instead of the embedding nets; None: use nets or tables."""
        self.register_buffer("spline", spline)
        self.register_buffer("spline_grid", grid)
        self.register_buffer("spline_empty", empty)

    def set_float32_nets(self, in_float32):
        """Compute the nets in float32, or in the type of the model's other numbers."""
        self.has_float32_nets = in_float32
        for net in [*self.emb, *self.fit]:
            net.in_float32 = in_float32

    def with_float32_nets(self):
        """Return a model whose nets compute in float32, which takes less time.

        The environment matrix, the sums over neighbours and the forces stay as they are. A line on
        stdout says by how much forces and energies differ on a disturbed lattice.
        """
        model = copy.deepcopy(self)
        model.set_float32_nets(True)
        energy, force = differences(self, model)
        print(
            f"float32 nets: energies of a disturbed lattice differ by {energy:.0e} of the energy "
            f"of an atom, forces by {force:.0e} of the largest"
        )
        return model

    file_name = "model.npz"  # of the model of a training
    shares = {}  # of Muon's rate, for parts of the model
    decay = 0.0  # of the other matrices, by Muon

    @property
    def most_neighbours(self):
        """Return the largest number of neighbours of an atom that count."""
        return sum(self.sel)

    def settings(self):
        """Return the attributes of the model that its weights do not contain."""
        names = ("type_names", "cutoff", "rcut_smth", "axis_neuron", "sel")
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def shift(self, types, differences):
        """Add to the types' energies what comes nearest to `differences` [F] of frames' energies.

        A type of -1 in types [F, n] is no atom.
        """
        self.bias_atom_e += least_energies(types, differences, len(self.sel))

    def write(self, path):
        """Write the model's weights, which load_npz reads."""
        save_npz(self, path)

    def from_file(self, path):
        """Return the model that `write` wrote."""
        return load_npz(path)

    @property
    def has_nets(self):
        """Return True if the model uses embedding nets, not tables or splines."""
        return self.table is None and self.spline is None

    @property
    def block_slots(self):
        """Return the number of pairs in a call that fits the cache; see blocks.py.

        Nets store M numbers for each pair, splines and tables for each atom.
        """
        return 1 << 14 if self.has_nets else 1 << 17

    def tabulated(self, tolerance=1e-9, shortest=0.5):
        """Return a model with splines or tables instead of its embedding nets.

        A spline takes less time, but needs smooth nets. Tables serve steep nets. The forces of both
        are exact derivatives of their energies. Neither can be trained. A line on stdout says which
        was chosen.

        Args:
            tolerance: the largest error of the nets' values and slopes, relative to the largest.
            shortest: the distance down to which they are that precise. Nearer, a spline is a
                straight line, and a table has wider cells down to a fifth of this distance.

        Raises:
            ValueError: no table of bounded size is precise enough, as for an activation with kinks.
        """
        exact = copy.deepcopy(self).to("cpu", torch.float64).requires_grad_(False)
        exact.set_float32_nets(False)
        model = copy.deepcopy(self)
        model.set_tables()
        spline, message = splines.of_model(exact, tolerance, shortest)
        if spline is not None:
            model.set_spline(*(array.to(self.davg) for array in spline))
        else:
            table, table_message = tables.of_model(exact, tolerance, shortest)
            model.set_tables(*(array.to(self.davg) for array in table))
            message = f"{message}; {table_message}"
        print(f"tabulated: {message}")
        return model

    @torch.no_grad()
    def table_error(self):
        """Return the largest difference between tables and embedding nets, relative to the largest
        value of the nets. The difference is taken where cells begin.
        """
        nets = [(net, c) for net in self.emb for c in range(len(net[0].w) if net.of_pairs else 1)]
        errors = []
        for (net, c), table, row in zip(nets, self.table, self.grid):
            x = tables.nodes_of(row)[:-1].to(row)
            values = net(x.unsqueeze(-1), c)
            errors.append((table[: len(x), 0] - values).abs().max() / values.abs().max())
        return torch.stack(errors).max().item()

    def environment(self, types, list_neigh, Rij):
        """Return what `evaluate` needs: list_neigh, Rij, the neighbours' types, R and R_d.

        Nothing of it depends on the weights, so a training computes it once for each frame.
        """
        kind = self.select(types, list_neigh, Rij)
        is_filled = kind >= 0
        Rij = torch.where(is_filled.unsqueeze(-1), Rij, 2 * self.cutoff)
        R, R_d = self.describe(types[:, : list_neigh.shape[1]], kind, Rij)
        return torch.where(is_filled, list_neigh, -1), Rij, kind, R, R_d

    def select(self, types, list_neigh, Rij):
        """Return the type of the neighbour in each slot [B, n, K].

        It is -1 if the slot has no neighbour within the cutoff, or if `sel` others of its type are
        nearer.
        """
        kind = types.gather(1, list_neigh.clamp(min=0).long().flatten(1)).view_as(list_neigh)
        r2 = Rij.detach().square().sum(-1)
        kind = torch.where((list_neigh >= 0) & (r2 < self.cutoff**2), kind, -1).flatten(0, 1)
        for t, count in enumerate(self.sel):
            # Only crowded rows are sorted, which takes long. There is hardly ever one.
            crowded = ((kind == t).sum(-1) > count).nonzero().squeeze(-1)
            row = kind[crowded]
            distance = torch.where(row == t, r2.flatten(0, 1)[crowded], float("inf"))
            rank = distance.argsort(dim=-1, stable=True).argsort(dim=-1)
            kind = kind.index_copy(0, crowded, torch.where((row == t) & (rank >= count), -1, row))
        return kind.view_as(list_neigh)

    def describe(self, types, kind, Rij):
        """Return R [B, n, K, 4] = (Ri - davg) / dstd and R_d [B, n, 4K, 3] = dR/dr_i.

        Ri = s(r) (1, x/r, y/r, z/r) with s = w(r)/r, where w is pairs.switch. R is 0 in an empty
        slot. `types` [B, n] are those of the centres, `kind` those of the neighbours.
        """
        r = torch.linalg.vector_norm(Rij, dim=-1, keepdim=True)
        w, dw = switch(r, self.rcut_smth, self.cutoff)
        s = w / r
        ds = (dw - w / r) / r
        u = w / r**2
        du = (dw - 2 * (w / r)) / r**2
        unit = Rij / r
        eye = torch.eye(3, dtype=Rij.dtype, device=Rij.device)
        outer = (du * Rij).unsqueeze(-1) * unit.unsqueeze(-2) + u.unsqueeze(-1) * eye
        Ri = torch.cat([s, u * Rij], -1)
        Ri_d = torch.cat([(ds * unit).unsqueeze(-2), outer], -2)
        centre = types.clamp(min=0).unsqueeze(-1)
        neighbour = kind.clamp(min=0)
        davg = self.davg[centre, neighbour]
        dstd = self.dstd[centre, neighbour]
        R = torch.where((kind >= 0).unsqueeze(-1), (Ri - davg) / dstd, 0.0)
        return R, -(Ri_d / dstd.unsqueeze(-1)).flatten(2, 3)  # Rij = r_j - r_i, hence the minus

    def atom_energies(self, types, kind, R):
        """Return the energies [B, n] of atoms of `types` [B, n], from R and the neighbours' types.

        Embedding nets compute filled slots only, and fitting nets the atoms of their type.
        """
        shape = types.shape
        types = types.flatten()
        kind = kind.flatten(0, 1)
        R = R.flatten(0, 1)
        table, grid = self.table, self.grid
        if table is None or grid is None:
            sums = self.sums_of_nets(types, kind, R)
        else:
            sums = self.sums_of_tables(types, kind, R, table, grid)
        return self.energies_of_sums(types, sums).view(shape)

    def energies_of_sums(self, types, sums):
        """Return the energies [n] of atoms of `types` [n], from sums over neighbours [n, 4, M]."""
        T = sums / sum(self.sel)
        # A type of -1 is no atom: frames are padded to the size of the largest one.
        energy = torch.where(types >= 0, self.bias_atom_e[types.clamp(min=0)], 0.0)
        for c, net in enumerate(self.fit):
            atoms = (types == c).nonzero().squeeze(-1)
            own = T[atoms]
            # D does not change if the structure is rotated.
            D = (own.mT @ own[..., : self.axis_neuron]).flatten(1)
            energy = energy.index_add(0, atoms, net(D, c).squeeze(-1))
        return energy

    def sums_of_nets(self, types, kind, R):
        """Return the sums [n, 4, M] over slots of R times the embedding net of its first column."""
        ntypes = len(self.sel)
        centre = types.unsqueeze(-1).expand_as(kind)
        s = R[..., :1].flatten(0, 1)
        G = R.new_zeros(s.shape[0], self.width)
        empty: list[torch.Tensor] = []
        for t, net in enumerate(self.emb):
            for c in range(ntypes if net.of_pairs else 1):
                filled = (kind == t) & (centre == c) if net.of_pairs else kind == t
                slots = filled.flatten().nonzero().squeeze(-1)
                G = G.index_copy(0, slots, net(s[slots], c))
            for c in range(ntypes):
                R0 = -self.davg[c, t] / self.dstd[c, t]
                empty.append((R0.unsqueeze(-1) * net(R0[:1], c)).flatten())
        of_filled = R.mT @ G.view(R.shape[0], R.shape[1], self.width)
        return of_filled + self.sums_of_empty(types, kind, torch.stack(empty))

    def sums_of_tables(self, types, kind, R, table: torch.Tensor, grid: torch.Tensor):
        """Return the sums of sums_of_nets by tables, without storing M numbers for each slot."""
        ntypes = len(self.sel)
        grid = grid.double()
        of_pairs = table.shape[0] > ntypes
        rows = kind
        if of_pairs:
            rows = torch.where(kind < 0, kind, ntypes * kind + types.unsqueeze(-1))
        of_filled = torch.ops.calcops_models.tabulated_sum(R[..., 0], R, rows, table, grid)
        # An empty slot's row for each pair of types, the neighbour's first.
        R0 = -(self.davg / self.dstd).transpose(0, 1).reshape(-1, 1, 4)
        pairs = torch.arange(ntypes * ntypes, device=kind.device).unsqueeze(-1)
        R0_rows = pairs if of_pairs else pairs // ntypes
        empty = torch.ops.calcops_models.tabulated_sum(R0[..., 0], R0, R0_rows, table, grid)
        return of_filled + self.sums_of_empty(types, kind, empty.flatten(1))

    def sums_of_spline(self, types, kind, d, spline: torch.Tensor, grid: torch.Tensor):
        """Return the sums [n, 4, M] over filled slots by a spline, for pair vectors d [n, K, 3]."""
        ntypes = len(self.sel)
        functions = spline.shape[1] // ntypes
        sums = d.new_zeros(d.shape[0], 4, self.width)
        for c in range(ntypes):
            atoms = (types == c).nonzero().squeeze(-1)
            P = torch.ops.calcops_models.environment_spline(
                d.index_select(0, atoms),
                kind.index_select(0, atoms),
                self.davg[c],
                self.dstd[c],
                grid[c],
                functions,
                self.rcut_smth,
                self.cutoff,
            )
            rows = torch.ops.calcops_models.matrix_product(
                P.reshape(-1, spline.shape[1]), spline[c]
            )
            sums = sums.index_copy(0, atoms, rows.view(-1, 4, self.width))
        return sums

    def sums_of_empty(self, types, kind, empty):
        """Return what the empty slots add [n, 4, M]. `empty` [T^2, 4M] has the share of one slot in
        row T t + c, for neighbours of type t and centres of type c.
        """
        missing: list[torch.Tensor] = []
        for t in range(len(self.sel)):
            for c in range(len(self.sel)):
                missing.append((self.sel[t] - (kind == t).sum(-1)) * (types == c))
        return (torch.stack(missing, -1).to(empty) @ empty).view(-1, 4, self.width)

    def evaluate(self, types, list_neigh, Rij, kind, R, R_d, nghost: int, create_graph: bool):
        """Return the results of `forward` from those of `environment`."""
        R = R.view_as(R).requires_grad_()  # the caller's stays as it is
        atom_energy = self.atom_energies(types[:, : list_neigh.shape[1]], kind, R)
        dE = torch.autograd.grad([atom_energy.sum()], [R], create_graph=create_graph)[0]
        assert dE is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
        force, virial, atom_virial = torch.ops.calcops.force_virial(
            list_neigh, dE, R_d, Rij, nghost
        )
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial

    def evaluate_spline(
        self,
        types,
        list_neigh,
        Rij,
        nghost: int,
        create_graph: bool,
        spline: torch.Tensor,
        grid: torch.Tensor,
        empty: torch.Tensor,
    ):
        """Return the results of `forward` by a spline."""
        B, n, _ = list_neigh.shape
        kind = self.select(types, list_neigh, Rij)
        types = types[:, :n].flatten()
        d = Rij.flatten(0, 1)
        d = d.view_as(d).requires_grad_()  # the caller's stays as it is
        of_slots = kind.flatten(0, 1)
        sums = self.sums_of_spline(types, of_slots, d, spline, grid)
        sums = sums + self.sums_of_empty(types, of_slots, empty)
        atom_energy = self.energies_of_sums(types, sums).view(B, n)
        dE = torch.autograd.grad([atom_energy.sum()], [d], create_graph=create_graph)[0]
        assert dE is not None  # for torch.jit.script
        if not create_graph:
            atom_energy = atom_energy.detach()
        force, virial, atom_virial = forces_of_slots(list_neigh, kind >= 0, dE, Rij, nghost)
        return atom_energy.sum(-1), atom_energy, force, virial, atom_virial

    def forward(self, types, list_neigh, Rij, nghost: int = 0, create_graph: bool = False):
        """Return energies, forces and virials, as Potential.forward of ../potentials/potential.py.

        A type of -1 is no atom. Pairs may be in any order and at any distance.
        """
        types = types.expand(list_neigh.shape[0], types.shape[-1])
        if not create_graph:
            Rij = Rij.detach()
        spline, grid, empty = self.spline, self.spline_grid, self.spline_empty
        if spline is not None and grid is not None and empty is not None:
            return self.evaluate_spline(
                types, list_neigh, Rij, nghost, create_graph, spline, grid, empty
            )
        list_neigh, Rij, kind, R, R_d = self.environment(types, list_neigh, Rij)
        return self.evaluate(types, list_neigh, Rij, kind, R, R_d, nghost, create_graph)


def switch(r, smooth: float, cutoff: float):
    """Return w(r) and dw/dr of a Deep Potential, for distances of any shape.

    w is 1 up to `smooth` and 0 beyond the cutoff. In between, q goes from 0 to 1 and
    w = 1 + q^3 (-6 q^2 + 15 q - 10).
    """
    width = cutoff - smooth
    q = ((r - smooth) / width).clamp(0, 1)
    w = 1 + q**3 * (-6 * q**2 + 15 * q - 10)
    return w, -30 * (q * (1 - q)).square() / width


def least_energies(types, energy, ntypes):
    """Return the energies [T] of types that come nearest to the frames' energies [F].

    Of several solutions, as for a single compound, it is the one of least norm. A type of -1 in
    types [F, n] is no atom. An energy of NaN is no label.
    """
    counts = torch.stack([(types == t).sum(-1) for t in range(ntypes)], -1).to(energy)
    is_known = ~energy.isnan()
    return torch.linalg.pinv(counts[is_known]) @ energy[is_known]
