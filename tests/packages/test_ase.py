"""calcops/ase: results against ASE's Lennard-Jones, refusals, reuse of neighbour lists, second
derivatives, and the script properties.py."""

import re
import sys

import numpy as np
import pytest
import torch
from programs import ROOT, assert_shows_something, blocks, run
from reference import DEVICES

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase import Atoms, units  # noqa: E402
from ase.build import bulk, fcc111, molecule  # noqa: E402
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.calculators.lj import LennardJones as AseLennardJones  # noqa: E402
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.ase.second_derivatives import elastic_constants, phonons, response  # noqa: E402
from calcops.potentials.energies import potential_of  # noqa: E402
from calcops.potentials.lennard_jones import LennardJones  # noqa: E402
from calcops.potentials.potential import Potential  # noqa: E402
from calcops.potentials.stillinger_weber import StillingerWeber  # noqa: E402

ARGON = {"epsilon": 0.0104, "sigma": 3.4}


def argon(cutoff=8.5, tail="shift"):
    return LennardJones(**ARGON, cutoff=cutoff, tail=tail, units="metal", type_names=("Ar",))


def silicon(cells=2, rattle=0.1, shear=0.05):
    atoms = bulk("Si", "diamond", a=5.43, cubic=True).repeat(cells)
    strain = [[0, shear, 0], [0, 0, -shear], [0, 0, shear]]
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    atoms.rattle(rattle, seed=1)
    return atoms


def systems():
    """Return systems by name, with every kind of cell and of periodicity."""
    crystal = bulk("Ar", a=5.3, cubic=True).repeat(2)
    crystal.rattle(0.2, seed=0)
    triclinic = crystal.copy()
    shear = [[1, 0.3, 0], [0, 1, -0.4], [0, 0, 0.9]]
    triclinic.set_cell(crystal.cell.array @ shear, scale_atoms=True)
    outside = triclinic.copy()
    images = np.random.default_rng(0).integers(-2, 3, (len(triclinic), 3))
    outside.positions += images @ triclinic.cell.array
    slab = fcc111("Ar", (2, 2, 3), a=5.3, vacuum=6.0)
    slab.rattle(0.1, seed=0)
    positions = [[0, 0, 0], [1, 3.5, 0.5], [2, -1, 3]]
    wire = Atoms("Ar3", positions, cell=[0, 0, 4.5], pbc=[False, False, True])
    cluster = Atoms("Ar13", molecule("C60").positions[:13] * 2.5)
    return {
        "crystal": crystal,
        "triclinic": triclinic,
        "outside the cell": outside,
        "one atom, five images deep": bulk("Ar", a=5.3),
        "left-handed": Atoms(
            "Ar2", [[0, 0, 0], [1, 1, 3.3]], cell=[[0, 5, 0], [5, 0, 0], [1, 0, 6]], pbc=True
        ),
        "slab": slab,
        "wire without other cell vectors": wire,
        "cluster": cluster,
        "one atom alone": Atoms("Ar"),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", systems())
def test_everything_agrees_with_ases_lennard_jones(name, device):
    ours = systems()[name]
    ours.calc = CalcOps(argon(), device=device)
    theirs = systems()[name]
    theirs.calc = AseLennardJones(**ARGON, rc=8.5)
    properties = ["energy", "free_energy", "energies", "forces"]
    if ours.cell.rank == 3:
        properties += ["stress", "stresses"]
    for key in properties:
        expected = np.asarray(theirs.calc.get_property(key, theirs))
        scale = abs(theirs.get_forces()).max() + abs(theirs.get_potential_energies()).max()
        actual = ours.calc.get_property(key, ours)
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-13 + 1e-13 * scale)
    assert set(ours.calc.results) == set(properties)
    if name != "one atom alone":
        assert ours.get_potential_energy() != 0


def test_a_system_without_a_cell_has_no_stress():
    flat = [[10, 0.3, 0], [0.2, 10, 0.7], [1.02, 1.03, 0.07]]  # the open vector is in the plane
    sheet = Atoms("Ar2", [[0, 0, 0], [3, 0, 1]], cell=flat, pbc=[True, True, False])
    for atoms in (systems()["cluster"], sheet):
        atoms.calc = CalcOps(argon())
        for _ in range(2):  # the second time with the energy cached
            for get in (atoms.get_stress, atoms.get_stresses):
                with pytest.raises(PropertyNotImplementedError, match="a cell with a volume for"):
                    get()
            assert atoms.get_potential_energy() != 0
        assert "stress" not in atoms.calc.results


def test_an_open_molecule_in_a_cell_has_the_stress_of_ases_lennard_jones():
    atoms = systems()["cluster"]
    atoms.center(vacuum=5)
    atoms.calc = CalcOps(argon())
    stress = atoms.get_stress()
    atoms.calc = AseLennardJones(**ARGON, rc=8.5)
    np.testing.assert_allclose(stress, atoms.get_stress(), rtol=1e-11)
    assert abs(stress).max() > 1e-6


kUnsearchable = {
    "a cluster as long as 1e7 cutoffs": ([[0, 0, 0], [1e8, 0, 0]], np.zeros(3), "fewer than"),
    "a wide thin sheet": ([[0, 0, 0], [3, 0, 0]], [9000, 9000, 9], "fewer than 100000 cubes"),
    "an atom outside by 1e10 cells": ([[0, 0, 0], [3e11 + 3, 0, 0]], [30, 30, 30], "within 1e9"),
    "NaN": ([[0, 0, 0], [np.nan, 0, 0]], [30, 30, 30], r"finite positions, got \[nan"),
    "infinity": ([[0, 0, 0], [np.inf, 0, 0]], np.zeros(3), r"finite positions, got \[inf"),
    "a cell of NaN": ([[0, 0, 0], [3, 0, 0]], [np.nan, 9, 9], "finite periodic cell vectors"),
    "no cell vector": ([[0, 0, 0], [3, 0, 0]], [[0, 0, 0], [0, 9, 0], [0, 0, 9]], "independent"),
    "dependent vectors": (
        [[0, 0, 0], [3, 0, 0]],
        [[9, 0, 0], [0, 9, 0], [9, 9, 0]],
        "independent cell vectors",
    ),
    "a cell of 1e-5 A": ([[0, 0, 0], [3, 0, 0]], [1e-5, 9, 9], "thicker than 0.001"),
}


@pytest.mark.parametrize("name", kUnsearchable)
def test_systems_whose_pairs_cannot_be_found_are_refused(name):
    positions, cell, message = kUnsearchable[name]
    atoms = Atoms("Ar2", positions, cell=cell, pbc=bool(np.any(cell)))
    good = Atoms("Ar2", [[0, 0, 0], [3, 0, 0]], cell=[30, 30, 30], pbc=True)
    with pytest.raises(ValueError, match=f"CalcOps: expected .*{message}.* in frame 1$"):
        CalcOps(argon()).calculate_batch([good, atoms])
    good.calc = CalcOps(argon())
    good.get_potential_energy()
    good.positions = atoms.positions
    good.cell = atoms.cell
    good.pbc = atoms.pbc
    with pytest.raises(ValueError, match=f"CalcOps: expected .*{message}"):
        good.get_potential_energy()


@pytest.mark.parametrize("distance", [3.5, 1e4])
def test_long_systems_that_can_be_searched_are_right(distance):
    atoms = Atoms("Ar4", [[0, 0, 0], [3.6, 0, 0], [distance, 9, 0], [distance, 13, 0]])
    atoms.calc = CalcOps(argon(cutoff=5.0))
    theirs = atoms.copy()
    theirs.calc = AseLennardJones(**ARGON, rc=5.0)
    assert atoms.get_potential_energy() == pytest.approx(theirs.get_potential_energy(), rel=1e-12)


def test_other_elements_atoms_at_one_place_and_other_units_are_refused():
    atoms = bulk("C")
    atoms.calc = CalcOps(StillingerWeber())
    with pytest.raises(ValueError, match=r"expected atoms of \['Si'\], got C$"):
        atoms.get_potential_energy()
    atoms = bulk("Si", cubic=True)
    atoms.positions[3] = atoms.positions[1]
    atoms.calc = CalcOps(StillingerWeber())
    message = "expected atoms in different places, got atoms 1 and 3 in the same place"
    with pytest.raises(ValueError, match=message):
        atoms.get_forces()
    with pytest.raises(ValueError, match='expected a model with units "metal" or "lj", got real'):
        CalcOps(LennardJones(units="real", type_names=("Ar",)))
    for names in (["OW"], ["Ar", "Ar"]):
        with pytest.raises(ValueError, match="expected chemical symbols as names of types, each"):
            CalcOps(LennardJones(type_names=names))
    for skin in (-0.5, np.nan, np.inf):
        with pytest.raises(ValueError, match="expected a skin of at least 0, got"):
            CalcOps(argon(), skin=skin)


class Root(Potential):
    """A finite energy, whose derivative is NaN for pairs nearer than 2 A."""

    def __init__(self):
        super().__init__(4.0, "metal", ["Ar"])

    def atom_energies(self, types, list_neigh, Ri):
        r = Ri[..., 0]
        inside = (1 - r / self.cutoff).clamp(min=0.0).square()
        return (inside * (1 + torch.where(r > 2.0, (r - 2.0).sqrt(), 0.0))).sum(-1)


def test_forces_that_are_not_finite_are_refused():
    atoms = Atoms("Ar3", [[0, 0, 0], [3, 0, 0], [3, 2.5, 0]], cell=[9, 9, 9], pbc=True)
    atoms.calc = CalcOps(Root())
    assert np.isfinite(atoms.get_forces()).all()
    atoms.positions[2, 1] = 1.5
    message = r"expected finite results of the model, got the force \[.*nan.*\] of atom 1$"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            atoms.get_potential_energy()
    atoms.positions[2, 1] = 2.5
    assert np.isfinite(atoms.get_forces()).all()


def test_messages_about_several_structures_name_the_frame():
    calc = CalcOps(Root())
    good = Atoms("Ar2", [[0, 0, 0], [3, 0, 0]])
    close = Atoms("Ar3", [[0, 0, 0], [9, 0, 0], [9, 1.5, 0]])
    with pytest.raises(ValueError, match=r"of atom 1 in frame 2$"):
        calc.calculate_batch([good, good, close])
    other = Atoms("ArNe", [[0, 0, 0], [3, 0, 0]])
    with pytest.raises(ValueError, match=r"expected atoms of \['Ar'\], got Ne in frame 1$"):
        calc.calculate_batch([good, other])
    twice = Atoms("Ar2", [[0, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"got atoms 0 and 1 in the same place in frame 1$"):
        calc.calculate_batch([good, twice])


def test_the_list_is_found_anew_only_when_it_must_be():
    atoms = silicon()
    atoms.calc = calc = CalcOps(StillingerWeber(), skin=0.4)

    def builds():
        before = calc.neighbours.builds
        energy = atoms.get_potential_energy()
        forces = atoms.get_forces()
        fresh = atoms.copy()
        fresh.calc = CalcOps(StillingerWeber(), skin=0.0)
        assert energy == pytest.approx(fresh.get_potential_energy(), rel=1e-13)
        np.testing.assert_allclose(forces, fresh.get_forces(), atol=1e-12)
        return calc.neighbours.builds - before

    assert builds() == 1
    assert builds() == 0
    atoms.positions[3] += [0.19, 0, 0]
    assert builds() == 0
    atoms.positions[4] -= [0, 0.1, 0.17]  # 0.197 A
    assert builds() == 0
    atoms.positions[3] += [0.02, 0, 0]  # 0.21 A from its place when the list was built
    assert builds() == 1
    atoms.positions[3] -= [0.19, 0, 0]  # displacements now count from the new list
    assert builds() == 0
    atoms.info["note"] = None
    atoms.set_initial_charges(np.ones(len(atoms)))
    assert builds() == 0
    atoms.positions[5] += atoms.cell[0]  # the same crystal, but another image
    assert builds() == 1
    atoms.set_cell(atoms.cell * 1.001)  # moves the farthest atom by 0.015 A relative to the cell
    assert builds() == 0
    atoms.set_cell(atoms.cell * 0.97)
    assert builds() == 1
    atoms.pbc = [True, True, False]
    assert builds() == 1
    del atoms[7]
    assert builds() == 1
    atoms.numbers[:] = atoms.numbers  # no change
    assert builds() == 0


def test_another_skin_is_used_from_the_next_call_on():
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber(), skin=0.4)
    energy = atoms.get_potential_energy()
    assert atoms.calc.set(skin=2.0) == {"skin": 2.0}
    assert atoms.calc.parameters["skin"] == 2.0
    assert atoms.calc.set(skin=2.0) == {}
    atoms.positions[3] += [0.9, 0, 0]
    atoms.get_potential_energy()
    atoms.positions[3] -= [0.9, 0, 0]
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-13)
    assert atoms.calc.neighbours.builds == 1


@pytest.mark.parametrize("options", [{"nonsense": 1}, {"skin": 1.0, "dtype": torch.float32}])
def test_setting_what_cannot_be_set_is_refused(options):
    calculator = CalcOps(StillingerWeber())
    with pytest.raises(ValueError, match="CalcOps.set: expected skin, got .*(nonsense|dtype)"):
        calculator.set(**options)
    with pytest.raises(ValueError, match="expected a skin of at least 0, got -1"):
        calculator.set(skin=-1)
    assert calculator.parameters["skin"] == 0.5


def test_the_skin_holds_pairs_that_come_into_reach_from_both_sides():
    atoms = Atoms("Ar2", [[0, 0, 0], [8.5 + 0.38, 0, 0]])
    atoms.calc = CalcOps(argon(cutoff=8.5, tail="cut"), skin=0.4)
    assert atoms.get_potential_energy() == 0
    atoms.positions[:, 0] += [0.199, -0.199]  # 8.482 A
    expected = 4 * 0.0104 * ((3.4 / 8.482) ** 12 - (3.4 / 8.482) ** 6)
    assert atoms.get_potential_energy() == pytest.approx(expected)
    assert atoms.calc.neighbours.builds == 1


class Watched:
    """A model of silicon that records its arguments and the number of threads."""

    def __init__(self):
        self.model = StillingerWeber()
        self.cutoff = self.model.cutoff
        self.units = self.model.units
        self.type_names = self.model.type_names
        self.device = "cpu"
        self.dtype = torch.float64

    def __call__(self, types, list_neigh, Rij, nghost):
        self.list_neigh = list_neigh
        self.Rij = Rij
        self.threads = torch.get_num_threads()
        return self.model(types, list_neigh, Rij, nghost)


def test_a_model_gets_the_pairs_within_its_cutoff_and_no_others():
    watched = Watched()
    atoms = silicon()
    atoms.calc = CalcOps(watched, skin=2.0)
    forces = atoms.get_forces()
    far = torch.linalg.vector_norm(watched.Rij, dim=-1) >= watched.cutoff
    assert not ((watched.list_neigh >= 0) & far).any()
    assert (watched.list_neigh >= 0).sum(-1).max() == watched.list_neigh.shape[2]
    atoms.calc = CalcOps(StillingerWeber(), skin=0.0)
    np.testing.assert_allclose(forces, atoms.get_forces(), atol=1e-13)


def test_few_atoms_get_few_threads():
    watched = Watched()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for cells, threads in ((1, 1), (4, 2)):
            atoms = silicon(cells)
            atoms.calc = CalcOps(watched)
            atoms.get_forces()
            assert (watched.threads, torch.get_num_threads()) == (threads, 2)
    finally:
        torch.set_num_threads(before)


def test_the_hessian_is_that_of_differences_of_forces():
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    (_, stress_u), (_, force_u) = response(atoms)
    assert abs(force_u - force_u.T).max() < 1e-10
    assert abs(force_u.view(-1, len(atoms), 3).sum(1)).max() < 1e-10  # translations
    h = 1e-4
    for k in (0, 100):
        at = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions.ravel()[k] += sign * h
            at.append((moved.get_forces().ravel(), moved.get_stress()))
        force, stress = ((plus - minus) / (2 * h) for plus, minus in zip(*at))
        np.testing.assert_allclose(force_u[:, k], force, atol=1e-5)
        np.testing.assert_allclose(stress_u[:, k], stress, atol=1e-7)


def test_elastic_constants_are_differences_of_the_stress():
    """In fcc argon every atom is a centre of symmetry, so no atom relaxes."""
    atoms = bulk("Ar", a=5.4)
    atoms.calc = CalcOps(argon(cutoff=8.0, tail="linear"))
    held, relaxed = elastic_constants(atoms)
    torch.testing.assert_close(held, relaxed)
    h = 1e-5
    columns = []
    for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        stress = []
        for sign in (1, -1):
            strain = np.zeros((3, 3))
            strain[i, j] += sign * h / 2
            strain[j, i] += sign * h / 2
            strained = atoms.copy()
            strained.calc = atoms.calc
            strained.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            stress.append(strained.get_stress())
        columns.append((stress[0] - stress[1]) / (2 * h) / units.GPa)
    np.testing.assert_allclose(held, np.array(columns).T, atol=1e-5)
    assert held[0, 0] > 1


def test_phonons_are_those_of_ase(tmp_path):
    from ase.phonons import Phonons

    atoms = bulk("Si", "diamond", a=5.43095)
    atoms.calc = CalcOps(StillingerWeber())
    scaled = np.array([[0, 0, 0], [0.5, 0, 0.5], [0.5, 0.5, 0.5], [0.1, 0.23, 0.37]])
    q = 2 * np.pi * scaled @ atoms.cell.reciprocal()
    ours = phonons(atoms)(q)
    assert abs(ours[0, :3]).max() < 1e-5 < 15 < ours[0, 3]
    options = {"supercell": (5, 5, 5), "delta": 1e-3, "name": str(tmp_path / "phonons")}
    theirs = Phonons(atoms, atoms.calc, **options)
    theirs.run()
    theirs.read(acoustic=True)
    energies = theirs.band_structure(scaled, verbose=False)
    expected = energies / (2 * np.pi * units._hbar / units._e) / 1e12  # THz
    np.testing.assert_allclose(ours[1:], expected[1:], rtol=1e-5)


class TwoLayers(torch.nn.Module):
    """An energy that depends on neighbours of neighbours."""

    def forward(self, types, edge_index, edge_vec, natoms: int):
        r = torch.linalg.vector_norm(edge_vec, dim=-1)
        near = (1 - r / 4.5).clamp(min=0) ** 3
        density = near.new_zeros(natoms).index_add(0, edge_index[0], near)
        message = near * (1 + density[edge_index[1]])
        return near.new_zeros(natoms).index_add(0, edge_index[0], message).square()


def two_layers():
    return potential_of(TwoLayers(), cutoff=4.5, units="metal", type_names=["Ar"], layers=2)


@pytest.mark.parametrize("model", [argon, two_layers])
@pytest.mark.parametrize("pbc", [[True, True, True], [True, True, False], [False, False, True]])
def test_phonons_of_a_doubled_cell_are_those_of_two_wave_vectors(model, pbc):
    """The interaction goes far beyond both cells, which are not orthogonal."""
    cell = [[4.1, 0.2, 0], [0.5, 3.9, 0.3], [0, -0.4, 4.3]]
    atoms = Atoms("Ar2", [[0, 0, 0], [1.8, 2.2, 2.0]], cell=cell, pbc=pbc)
    atoms.calc = CalcOps(model())
    k = pbc.index(True)
    doubled = atoms.repeat([1 + (d == k) for d in range(3)])
    doubled.calc = atoms.calc
    expected = phonons(doubled)(np.zeros((1, 3)))[0]
    of_two = phonons(atoms)(np.array([np.zeros(3), np.pi * atoms.cell.reciprocal()[k]]))
    assert of_two.shape == (2, 6)
    of_both = np.sort(of_two.ravel())
    # A frequency near 0 is the root of a rounding error.
    np.testing.assert_allclose(of_both * abs(of_both), expected * abs(expected), atol=1e-9)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    out = tmp_path_factory.mktemp("silicon")
    words = ROOT / "examples/train_potential/properties.py", "--steps", "300", "--out", out
    # Threads of scipy that wait for each other would take minutes on a busy machine.
    return run(sys.executable, *words, cwd=out, OPENBLAS_NUM_THREADS="1").stdout


def test_silicon_relaxes_to_the_known_crystal(printed):
    line = re.search(r"a = (\S+) A, (\S+) eV/atom, stress up to (\S+) GPa", printed)
    a, energy, stress = line.groups()
    assert float(a) == pytest.approx(5.43095, abs=2e-5)
    assert float(energy) == pytest.approx(-4.3366, abs=1e-6)
    assert float(stress) < 1e-4


def test_silicon_conserves_energy(printed):
    spread, drift = re.search(r"within (\S+) meV/atom, drift (\S+) meV/atom/ps", printed).groups()
    assert float(spread) < 0.3
    assert abs(float(drift)) < 0.2
    builds = int(re.search(r"neighbours found (\d+) times in 301 steps", printed)[1])
    assert 2 <= builds <= 30


def test_silicon_has_the_published_elastic_constants(printed):
    rows = re.findall(r"^(C\d\d) +(\S+) +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    published = [(name, value) for name, _, value, _, _ in rows]
    assert published == [("C11", "151.4"), ("C12", "76.4"), ("C44", "56.4")]
    for _, ours, published, difference, sound in rows:
        assert float(ours) == pytest.approx(float(published), abs=0.1)
        assert float(difference) == pytest.approx(float(ours) - float(published), abs=0.006)
        assert float(sound) == pytest.approx(float(ours), abs=0.011)


def test_silicon_draws_its_picture(printed):
    assert_shows_something(printed.splitlines()[-1], 500, 1200)


def test_the_readme_shows_what_is_printed(printed):
    """Only lines that do not depend on the number of steps are compared."""
    (shown,) = blocks("calcops/ase/README.md", "text")
    lines = shown.splitlines()
    assert len(lines) == len(printed.splitlines())
    for line in lines:
        if line.startswith(("C", "optical")):
            assert line in printed
