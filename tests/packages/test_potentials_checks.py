"""calcops/potentials: save() writes no file that computes something else than its model, and no
model whose results are not finite."""

import pytest
import torch
from calcops.potentials.checks import check_file, results_for, systems_for
from calcops.potentials.energies import potential_of
from calcops.potentials.package import load, save
from calcops.potentials.potential import Potential

ABOUT = {"cutoff": 3.0, "units": "metal", "type_names": ["A", "B"]}


class Graph(torch.nn.Module):
    """Features of atoms by a sum over edges; `part` makes an energy of them."""

    def __init__(self, part=None):
        super().__init__()
        self.part = part

    def features(self, types, edge_index, edge_vec, natoms: int):
        r = torch.linalg.vector_norm(edge_vec, dim=-1, keepdim=True)
        waves = torch.cos(r * torch.arange(1, 5, device=r.device))
        waves = waves * (1 - r / 3.0).clamp(min=0) ** 3
        return waves.new_zeros(natoms, 4).index_add(0, edge_index[0], waves)

    def forward(self, types, edge_index, edge_vec, natoms: int):
        return self.part(self.features(types, edge_index, edge_vec, natoms))


class Doubled(torch.nn.Module):
    """Computes with sizes, as the code that e3nn generates does."""

    def forward(self, x):
        entries = x.size(0) * 4
        return x.square().reshape([entries]).reshape([entries // 4, 4]).sum(1)


@pytest.mark.parametrize(
    "compiled",
    [torch.jit.script(Doubled()), torch.jit.trace(Doubled(), torch.ones(36, 4).double())],
    ids=["scripted", "traced"],
)
def test_a_package_of_a_part_that_fixes_sizes_is_refused_and_leaves_no_file(compiled, tmp_path):
    (tmp_path / "own.pt2").write_text("an older file")
    with pytest.raises(
        ValueError,
        match=r"any number of atoms, ghosts and slots, got one whose trace holds only for "
        r"Eq\(.*all_atoms\*frames.*torch.jit compiled module.part, which fixes sizes",
    ):
        save(Graph(compiled), tmp_path / "own.pt2", **ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["own.pt2"]
    assert (tmp_path / "own.pt2").read_text() == "an older file"


def test_the_archive_of_a_scripted_part_is_exact_at_any_size(tmp_path):
    model = Graph(torch.jit.script(Doubled()))
    save(model, tmp_path / "own.pt", **ABOUT)
    potential = potential_of(model, **ABOUT)
    systems = systems_for(potential, torch.float64, "cpu")
    check_file(load(tmp_path / "own.pt"), systems, *results_for(potential, systems))


class FewAtoms(Graph):
    """Computes something else for many atoms: a trace has one of the two branches."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        x = self.features(types, edge_index, edge_vec, natoms)
        return x.sum(1) if natoms > 100 else x.square().sum(1)


class FewEdges(Graph):
    """Computes something else for many edges."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        x = self.features(types, edge_index, edge_vec, natoms)
        return x.sum(1) if edge_index.shape[1] > 1000 else x.square().sum(1)


class Lengths(torch.nn.Module):
    """Energies of neighbour lists."""

    def forward(self, types, list_neigh, Rij, nghost: int):
        r = torch.linalg.vector_norm(Rij, dim=-1)
        pairs = torch.where((list_neigh >= 0) & (r < 3.0), (1 - r / 3.0).clamp(min=0) ** 3, 0.0)
        return pairs.sum(-1)


class Branch(Lengths):
    """Computes something else between two sizes of a dimension of the list."""

    def __init__(self, dim, low, high):
        super().__init__()
        self.size = dim, low, high

    def forward(self, types, list_neigh, Rij, nghost: int):
        dim, low, high = self.size
        factor = 2.0 if low < list_neigh.shape[dim] < high else 1.0
        return factor * super().forward(types, list_neigh, Rij, nghost)


kBranches = [(0, 16, 10**9), (2, 64, 10**9), (1, 1, 4), (2, 1, 4)]


@pytest.mark.parametrize(
    "model", [FewAtoms(), FewEdges(), *(Branch(*branch) for branch in kBranches)]
)
def test_a_model_that_branches_on_a_size_is_refused_by_name_of_the_line(model, tmp_path):
    with pytest.raises(ValueError, match=r"trace holds only for .*, as .*_checks\.py:\d+ has it$"):
        save(model, tmp_path / "own.pt2", **ABOUT)
    assert not list(tmp_path.iterdir())


class OtherWhenScripted(Graph):
    """Computes in TorchScript something else than in Python, from the sixth atom on."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        x = self.features(types, edge_index, edge_vec, natoms).square().sum(1)
        if torch.jit.is_scripting():
            x = torch.where(torch.arange(natoms) < 5, x, 1.001 * x)
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_archive_that_computes_something_else_is_refused(dtype, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"expected a file that computes what its model does, got energy that differ by "
        r"\S+ of \S+ for 1 frames, 13 atoms, 5 ghosts and 9 slots",
    ):
        save(OtherWhenScripted(), tmp_path / "own.pt", dtype=dtype, **ABOUT)
    assert not list(tmp_path.iterdir())


class OfSize(torch.nn.Module):
    """A file that is right only for systems of some size."""

    dtype = torch.float64

    def __init__(self, potential, is_right, wrong):
        super().__init__()
        self.potential = potential
        self.is_right = is_right
        self.wrong = wrong

    def call(self, types, list_neigh, Rij, nghost):
        results = self.potential(types, list_neigh, Rij, nghost)
        if self.is_right(*list_neigh.shape, nghost):
            return results
        return [self.wrong(x) if k == 2 else x for k, x in enumerate(results)]


@pytest.mark.parametrize(
    "is_right",
    [
        lambda frames, natoms, slots, nghost: frames < 2,
        lambda frames, natoms, slots, nghost: natoms < 13,
        lambda frames, natoms, slots, nghost: slots < 17,
        lambda frames, natoms, slots, nghost: nghost == 0,
        lambda frames, natoms, slots, nghost: nghost > 0,
    ],
    ids=["frames", "atoms", "slots", "ghosts", "no ghosts"],
)
@pytest.mark.parametrize("wrong", [lambda x: x + 1e-6, lambda x: x * torch.nan], ids=["by", "NaN"])
def test_each_size_is_compared(is_right, wrong):
    potential = potential_of(Graph(Doubled()), **ABOUT)
    systems = systems_for(potential, torch.float64, "cpu")
    expected, tolerance = results_for(potential, systems)
    assert tolerance < 1e-7
    with pytest.raises(ValueError, match="got force that differ by"):
        check_file(OfSize(potential, is_right, wrong), systems, expected, tolerance)
    check_file(OfSize(potential, lambda *size: True, wrong), systems, expected, tolerance)


def test_the_systems_have_images_empty_rows_empty_slots_and_far_pairs():
    potential = potential_of(Graph(Doubled()), **ABOUT)
    alone, *others = systems_for(potential, torch.float64, "cpu")
    assert alone["list_neigh"].tolist() == [[[0]]]
    assert alone["Rij"].tolist() == [[[[pytest.approx(2.7, rel=1e-15), 0, 0]]]]
    for system in others:
        list_neigh = system["list_neigh"]
        is_pair = list_neigh >= 0
        r = torch.linalg.vector_norm(system["Rij"], dim=-1)
        assert (r[is_pair] >= 3.0).any() and (r[is_pair] < 3.0).sum() > is_pair.sum() / 2
        assert r[~is_pair].isnan().all()
        assert is_pair.any(-1).logical_not().any()
        assert (list_neigh == torch.arange(list_neigh.shape[1])[:, None]).any()
        assert is_pair[..., 1:].logical_and(~is_pair[..., :-1]).any()
        assert set(system["types"].tolist()) == {0, 1}
        assert bool(system["nghost"]) == (list_neigh >= list_neigh.shape[1]).any()


class Float32Part(torch.nn.Module):
    def forward(self, x):
        return x.float().square().sum(1).to(x.dtype)


def test_a_model_with_a_part_in_float32_may_differ_by_its_digits():
    potential = potential_of(Graph(Float32Part()), **ABOUT)
    systems = systems_for(potential, torch.float64, "cpu")
    expected, tolerance = results_for(potential, systems)
    assert 1e-4 < tolerance < 1e-3
    rounded = OfSize(potential, lambda *size: False, lambda x: x * (1 + 1e-6))
    check_file(rounded, systems, expected, tolerance)


class Norm(Graph):
    """An energy whose derivative is NaN for an atom without neighbours within the cutoff."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        return torch.linalg.vector_norm(
            self.features(types, edge_index, edge_vec, natoms), dim=1
        ).sqrt()


class Root(Graph):
    """Forces that are NaN beyond the cutoff, where the energy is zero."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        r = torch.linalg.vector_norm(edge_vec, dim=-1)
        pairs = torch.where(r < 3.0, (3.0 - r) ** 2.5, 0.0)
        return pairs.new_zeros(natoms).index_add(0, edge_index[0], pairs)


@pytest.mark.parametrize(
    "model, cause", [(Norm(), "13 atoms, 5 ghosts"), (Root(), "a pair just beyond the cutoff")]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forces_that_are_not_finite_are_refused(model, cause, dtype, tmp_path):
    with pytest.raises(
        ValueError,
        match=f"expected finite results of the model, got force nan of atom .* of frame 0 .*{cause}",
    ):
        save(model, tmp_path / "own.pt", dtype=dtype, **ABOUT)
    assert not list(tmp_path.iterdir())


class Shaped(Lengths):
    """Energies that `shape` makes of those of atoms."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, types, list_neigh, Rij, nghost: int):
        return self.shape(super().forward(types, list_neigh, Rij, nghost), nghost)


@pytest.mark.parametrize(
    "shape, message",
    [
        (lambda x, nghost: x[0], r"\[1, 5\] of atoms or \[1\] of frames from .*got \[5\]"),
        (lambda x, nghost: x.sum(1, keepdim=True), r"got \[1, 1\]"),
        (lambda x, nghost: x.unsqueeze(-1), r"got \[1, 5, 1\]"),
        (lambda x, nghost: x.sum(), r"got \[\]"),
        (
            lambda x, nghost: torch.nn.functional.pad(x, [0, nghost]),
            r"of atoms or \[1\] of .*got \[1, ",
        ),
    ],
)
def test_energies_of_another_shape_are_refused(shape, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save(Shaped(shape), tmp_path / "own.pt2", **ABOUT)
    assert not list(tmp_path.iterdir())


class WithoutTypes(torch.nn.Module):
    """An energy whose forward has no types of its arguments."""

    def forward(self, types, list_neigh, Rij, nghost):
        r2 = Rij.square().sum(-1)
        pair = (1 - r2 / 9.0).clamp(min=0) ** 3
        return pair.where(list_neigh >= 0, 0.0).sum(-1)[:, : types.shape[-1] - nghost]


class GraphWithoutTypes(Graph):
    def forward(self, types, edge_index, edge_vec, natoms):
        return self.features(types, edge_index, edge_vec, natoms).square().sum(1)


class NoTorchScript(Graph):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        features = self.features(types, edge_index, edge_vec, natoms)
        return sum(getattr(features, name)().sum(1) for name in ["square"])


@pytest.mark.parametrize(
    "model, words",
    [
        (WithoutTypes(), "`nghost: int` in the forward of WithoutTypes"),
        (GraphWithoutTypes(), "`natoms: int` in the forward of GraphWithoutTypes"),
        (NoTorchScript(), "a forward in TorchScript, Python's typed subset"),
    ],
)
def test_an_archive_of_a_model_that_does_not_compile_is_refused_by_the_reason(
    model, words, tmp_path
):
    with pytest.raises(ValueError, match=rf"\(\.pt\) needs: {words}; a package \(\.pt2\) accepts"):
        save(model, tmp_path / "own.pt", **ABOUT)
    assert not list(tmp_path.iterdir())


class FewNeighbours(Potential):
    """An energy for at most eight slots."""

    neighbors = 8

    def atom_energies(self, types, list_neigh, Ri):
        r2 = Ri[..., 0].square()
        return ((1 - r2 / self.cutoff**2).clamp(min=0) ** 3).sum(-1)


@pytest.mark.parametrize("suffix", [".pt", pytest.param(".pt2", marks=pytest.mark.long)])
def test_more_neighbours_than_a_model_takes_are_refused(suffix, tmp_path):
    model = FewNeighbours(**ABOUT)
    save(model, tmp_path / f"few{suffix}")
    package = load(tmp_path / f"few{suffix}")
    assert package.neighbors == 8
    types = torch.zeros(1, dtype=torch.int64)
    list_neigh = torch.zeros(1, 1, 9, dtype=torch.int64)
    Rij = torch.zeros(1, 1, 9, 3, dtype=torch.float64)
    Rij[..., 0] = torch.linspace(1.0, 2.6, 9)
    message = "expected at most 8 neighbours of an atom, as the model takes, got 9 slots"
    with pytest.raises(ValueError, match=message):
        package(types, list_neigh, Rij)
    # A pair beyond the cutoff does not count.
    Rij[..., 4, 0] = 3.1
    torch.testing.assert_close(package(types, list_neigh, Rij)[0], model(types, list_neigh, Rij)[0])
