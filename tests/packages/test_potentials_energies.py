"""calcops/potentials: a module that computes energies alone, from a list or a graph, becomes a
potential with forces and virials."""

import sys
from pathlib import Path

import pytest
import torch
from reference import assert_equal_lists

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from calcops.potentials.checks import check_layers  # noqa: E402
from calcops.potentials.energies import potential_of  # noqa: E402
from calcops.potentials.package import load, save  # noqa: E402
from calcops.potentials.potential import Potential  # noqa: E402
from lammps_models import Messages  # noqa: E402
from test_potentials import frames  # noqa: E402

ABOUT = {"cutoff": 3.0, "units": "metal", "type_names": ["A", "B"]}


def pair_energy(r, depth):
    """Return an energy that goes to zero at the cutoff together with its derivative."""
    return depth * torch.where(r < 3.0, (3.0 - r).square() * (1 + torch.sin(r)), 0.0)


class Expected(Potential):
    """The potential that the modules below compute. `own` is the energy of an isolated atom."""

    def __init__(self):
        super().__init__(**ABOUT)
        self.register_buffer("depth", torch.tensor([1.0, 0.6], dtype=torch.float64))
        self.register_buffer("own", torch.tensor([-3.0, 2.0], dtype=torch.float64))

    def atom_energies(self, types, list_neigh, Ri):
        depth = self.depth[self.neighbour_types(types, list_neigh)]
        rows = types.expand(list_neigh.shape[0], types.shape[-1])[:, : list_neigh.shape[1]]
        return pair_energy(Ri[..., 0], depth).sum(-1).tanh() + self.own[rows]


class OfList(torch.nn.Module):
    def __init__(self):
        super().__init__()
        expected = Expected()
        self.own = torch.nn.Parameter(expected.own)
        self.depth = torch.nn.Parameter(expected.depth)

    def forward(self, types, list_neigh, Rij, nghost: int):
        types = types.expand(list_neigh.shape[0], types.shape[-1])
        neighbours = types.gather(1, list_neigh.clamp(min=0).flatten(1)).view_as(list_neigh)
        pairs = pair_energy(torch.linalg.vector_norm(Rij, dim=-1), self.depth[neighbours])
        return pairs.sum(-1).tanh() + self.own[types[:, : list_neigh.shape[1]]]


class TotalOfList(OfList):
    def forward(self, types, list_neigh, Rij, nghost: int):
        return super().forward(types, list_neigh, Rij, nghost).sum(-1)


class OfGraph(OfList):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        depth = self.depth[types[edge_index[1]]]
        pairs = pair_energy(torch.linalg.vector_norm(edge_vec, dim=-1), depth)
        return pairs.new_zeros(natoms).index_add(0, edge_index[0], pairs).tanh() + self.own[types]


class ColumnOfGraph(OfGraph):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index, edge_vec, natoms).unsqueeze(-1)


class TotalOfGraph(OfGraph):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index, edge_vec, natoms).sum()


MODULES = [OfList, TotalOfList, OfGraph, ColumnOfGraph, TotalOfGraph]


@pytest.mark.parametrize("module", MODULES)
def test_forces_and_virials_are_those_of_the_energy(module):
    potential = potential_of(module(), **ABOUT)
    for B, n, K, nghost in [(1, 20, 9, 11), (1, 6, 4, 0), (3, 5, 4, 2)]:
        if module is TotalOfGraph and B > 1:
            with pytest.raises(
                ValueError, match="expected energies of atoms from a graph of several frames"
            ):
                potential(*frames(B, n, K, nghost, 2), nghost)
            continue
        results = list(potential(*frames(B, n, K, nghost, 2), nghost))
        expected = list(Expected()(*frames(B, n, K, nghost, 2), nghost))
        if "Total" in module.__name__:  # compare the sum of the atoms' energies alone
            results[1] = results[1].sum(-1)
            expected[1] = expected[1].sum(-1)
        assert_equal_lists(results, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "module, ending",
    [(OfList, "pt"), (OfGraph, "pt"), pytest.param(OfGraph, "pt2", marks=pytest.mark.long)],
)
def test_save_packages_a_module_in_one_line(module, ending, tmp_path):
    trained = module()
    save(trained, tmp_path / f"own.{ending}", **ABOUT)
    package = load(tmp_path / f"own.{ending}")
    assert (package.cutoff, package.units, package.type_names) == (3.0, "metal", ["A", "B"])
    for B, n, K, nghost in [(1, 20, 9, 11), (2, 7, 3, 0)]:
        inputs = frames(B, n, K, nghost, 2)
        expected = Expected()(*inputs, nghost)
        assert_equal_lists(package(*inputs, nghost), expected, rtol=1e-12, atol=1e-12)
    assert trained.own.requires_grad, "the caller's module stays as it is"


def periodic(n=12, period=10.0):
    """Return types, list_neigh and Rij of n atoms in a box that is periodic in x."""
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    x[:, 0] = period * torch.arange(n) / n + x[:, 0] / 10
    d = x - x[:, None]
    d[..., 0] -= period * (d[..., 0] / period).round()
    near = (d.norm(dim=-1) < 3.0) & ~torch.eye(n, dtype=torch.bool)
    list_neigh = torch.arange(n).where(near, -1)
    return torch.arange(n) % 2, list_neigh[None], d.where(near[..., None], torch.nan)[None]


@pytest.mark.parametrize("ending", ["pt", pytest.param("pt2", marks=pytest.mark.long)])
def test_parts_of_a_system_add_up_where_messages_pass(ending, tmp_path):
    """The system is divided into three parts, as among three ranks. A part has rows for its own
    atoms, and then for the ghosts whose messages reach them. A ghost may be an image of any atom,
    even of one of the same part."""
    layers = 2
    module = Messages(layers, 3.0, 2)
    save(module, tmp_path / f"own.{ending}", layers=layers, **ABOUT)
    model = load(tmp_path / f"own.{ending}")
    assert model.layers == layers
    types, list_neigh, Rij = periodic()
    whole = model(types, list_neigh, Rij)
    centre, slot = (list_neigh[0] >= 0).nonzero().T
    neighbour = list_neigh[0][centre, slot]
    vectors = Rij[0][centre, slot].requires_grad_()
    energies = module(types, torch.stack([centre, neighbour]), vectors, len(types))
    (slope,) = torch.autograd.grad(energies.sum(), vectors)
    force = torch.zeros(len(types), 3, dtype=torch.float64)
    force.index_add_(0, centre, slope)
    force.index_add_(0, neighbour, -slope)
    torch.testing.assert_close(whole[1][0], energies.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole[2][0], force, rtol=1e-12, atol=1e-12)

    parts = [torch.zeros_like(x) for x in whole]
    for first in range(0, len(types), 4):
        # `atoms` holds the original of each atom of this part. Every neighbour of a row is a new
        # ghost; the rows grow by one shell of ghosts a layer.
        atoms = list(range(first, first + 4))
        rows = []
        for _ in range(layers):
            for atom in atoms[len(rows) :]:
                row = []
                for j in list_neigh[0, atom].tolist():
                    if j < 0:
                        row.append(-1)
                    else:
                        row.append(len(atoms))
                        atoms.append(j)
                rows.append(row)
        nghost = len(atoms) - len(rows)
        of_rows = torch.tensor(atoms[: len(rows)])
        inputs = types[atoms], torch.tensor(rows)[None], Rij[:, of_rows]
        owned = torch.arange(len(rows)) < 4
        energy, atom_energy, force, virial, atom_virial = model(*inputs, nghost, owned=owned)
        assert not atom_energy[0, 4:].any()
        parts[0] += energy
        parts[1].index_add_(1, of_rows, atom_energy)
        parts[2].index_add_(1, torch.tensor(atoms), force)
        parts[3] += virial
        parts[4].index_add_(1, torch.tensor(atoms), atom_virial)
    assert_equal_lists(parts, whole, rtol=1e-12, atol=1e-12)


class ToTheNeighbour(Messages):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index.flip(0), -edge_vec, natoms)


class Sum(Messages):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index, edge_vec, natoms).sum()


@pytest.mark.parametrize(
    "module, layers, message",
    [
        (Messages(3, 3.0, 2), 2, "at most layers=2 messages"),
        (Messages(2, 3.0, 2), 1, "at most layers=1 messages"),
        (ToTheNeighbour(2, 3.0, 2), 2, "to the atom in row 0 of edge_index from that in row 1"),
        (
            Sum(2, 3.0, 2),
            2,
            "expected energies of atoms from a model that passes messages, got their sum",
        ),
        (Sum(2, 3.0, 2), 1, "at most layers=1 messages"),
    ],
)
def test_a_model_with_more_layers_than_declared_is_refused(module, layers, message, tmp_path):
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(ValueError, match=message):
            save(module, tmp_path / "own.pt", dtype=dtype, layers=layers, **ABOUT)


class OneTypeFarther(OfList):
    """Energies whose pairs of the type B and B alone do not end at the cutoff."""

    def forward(self, types, list_neigh, Rij, nghost: int):
        rows = types.expand(list_neigh.shape[0], types.shape[-1])
        neighbours = rows.gather(1, list_neigh.clamp(min=0).flatten(1)).view_as(list_neigh)
        both = neighbours + rows[:, : list_neigh.shape[1], None] == 2
        r = torch.linalg.vector_norm(Rij, dim=-1)
        is_pair = (list_neigh >= 0) & (r < torch.where(both, 4.0, 3.0))
        return torch.where(is_pair, (1 - r / torch.where(both, 4.0, 3.0)) ** 2, 0.0).sum(-1)


class OfOrder(OfList):
    """Energies that depend on the order of the slots."""

    def forward(self, types, list_neigh, Rij, nghost: int):
        near = (1 - torch.linalg.vector_norm(Rij, dim=-1) / 3.0).clamp(min=0) ** 3
        return (near * torch.arange(1, near.shape[-1] + 1)).sum(-1)


class DeepAmongEquals(Messages):
    """A third message between equal types alone, of which two messages are declared."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        energies = super().forward(types, edge_index, edge_vec, natoms)
        i, j = edge_index[0], edge_index[1]
        r = torch.linalg.vector_norm(edge_vec, dim=-1)
        inside = torch.where(types[i] == types[j], (1 - r / 3.0).clamp(min=0) ** 3, 0.0)
        return energies + energies.new_zeros(natoms).index_add(0, i, inside * energies[j])


def test_messages_between_equal_types_are_counted(tmp_path):
    about = ABOUT | {"type_names": ["A", "B", "C"]}
    check_layers(potential_of(DeepAmongEquals(2, 3.0, 3), layers=3, **about), "cpu")
    with pytest.raises(ValueError, match="at most layers=2 messages"):
        save(DeepAmongEquals(2, 3.0, 3), tmp_path / "own.pt", layers=2, **about)


class WithoutEnvelope(OfList):
    """Energies that reach beyond the cutoff, end there with a step, or count empty slots."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, types, list_neigh, Rij, nghost: int):
        r = torch.linalg.vector_norm(Rij, dim=-1)
        is_near = (list_neigh >= 0) & (r < 3.0)
        if self.form == "yukawa":
            return torch.where(list_neigh >= 0, torch.exp(-r) / r, 0.0).sum(-1)
        if self.form == "step":
            return torch.where(is_near, torch.exp(-r) / r, 0.0).sum(-1)
        return torch.exp(-r).sum(-1)


ZERO = "go to zero at the cutoff 3, got ones that "


@pytest.mark.parametrize(
    "module, fault",
    [
        (OneTypeFarther(), ZERO + "a pair just beyond the cutoff changes by"),
        (WithoutEnvelope("yukawa"), ZERO + "a pair just beyond"),
        (WithoutEnvelope("step"), ZERO + "a pair just inside"),
        (WithoutEnvelope("count"), ZERO + "(an empty slot|a pair just)"),
        (OfOrder(), "slots in any order, got ones that another order changes"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_energies_that_no_potential_has_are_refused(module, fault, dtype, tmp_path):
    with pytest.raises(ValueError, match=fault):
        save(module, tmp_path / "own.pt", dtype=dtype, **ABOUT)


def test_objects_other_than_a_module_of_energies_are_refused(tmp_path):
    class OtherNames(torch.nn.Module):
        def forward(self, z, index, vectors, count):
            return vectors

    with pytest.raises(
        ValueError, match=r"expected forward\(types, .*got forward\(z, index, vectors, count\)"
    ):
        save(OtherNames(), tmp_path / "own.pt", **ABOUT)
    with pytest.raises(TypeError, match="got OrderedDict: load a checkpoint into its module first"):
        save(OfList().state_dict(), tmp_path / "own.pt", **ABOUT)
    with pytest.raises(TypeError, match="got no cutoff, type_names, units"):
        save(OfList(), tmp_path / "own.pt")
