"""calcops.check: it finds calculators with a planted fault, and raises no alarm for right ones."""

import re
import sys

import numpy as np
import pytest
import torch
from programs import ROOT, blocks

pytest.importorskip("ase", reason="calculators and structures")
vesin = pytest.importorskip("vesin", reason="neighbour lists in less time than ASE's")

from ase import Atoms  # noqa: E402
from ase.build import bulk, fcc111, molecule  # noqa: E402
from ase.calculators.calculator import Calculator, all_changes  # noqa: E402
from ase.calculators.emt import EMT  # noqa: E402
from ase.calculators.lj import LennardJones  # noqa: E402
from ase.constraints import FixAtoms  # noqa: E402
from ase.stress import full_3x3_to_voigt_6_stress  # noqa: E402
from calcops.check import check, kChecks, run_checks  # noqa: E402

kCutoff = 4.0


class Soft(Calculator):
    """Pairs that repel each other, with the energy 0.1 (4 A - r)^3 eV/A^3, and a fault."""

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault

    def pairs(self):
        """Return i, j, D and S of ASE's neighbour lists."""
        return vesin.ase_neighbor_list("ijDS", self.atoms, kCutoff)

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        i, j, D, S = self.pairs()
        if self.fault == "an atom does not see its images":
            kept = i != j
        elif self.fault == "atoms outside the cell are lost":
            kept = abs(S).max(1, initial=0) <= 1
        else:
            kept = np.full(len(i), True)
        i, j, D = i[kept], j[kept], D[kept]

        r = np.linalg.norm(D, axis=1)
        edge = kCutoff + (0.1 if self.fault == "the pairs are cut" else 0)
        weights = np.full(len(i), 0.1)
        if self.fault == "the first atom is special":
            weights[(i == 0) | (j == 0)] = 0.101
        energies = weights * (edge - r) ** 3 / 2
        pulls = (-3 * weights * (edge - r) ** 2 / r)[:, None] * D
        results = {
            "energies": np.bincount(i, energies, len(self.atoms)),
            "forces": np.stack([np.bincount(i, x, len(self.atoms)) for x in pulls.T], 1),
        }
        if self.fault == "a field is along z":
            results["energies"] = results["energies"] + 0.1 * self.atoms.positions[:, 2]
            results["forces"] = results["forces"] - [0, 0, 0.1]
        results["energy"] = results["free_energy"] = results["energies"].sum()
        if self.atoms.cell.rank == 3:
            virial = D.T @ pulls / 2 / self.atoms.get_volume()
            results["stress"] = full_3x3_to_voigt_6_stress(virial)
        kFaults.get(self.fault, lambda results, atoms: None)(results, self.atoms)
        self.results = results


def scaled(name, factor):
    def change(results, atoms):
        if name in results:
            results[name] = results[name] * factor

    return change


def ordered(*order):
    def change(results, atoms):
        if "stress" in results:
            results["stress"] = results["stress"][list(order)]

    return change


def times_volume(results, atoms):
    if "stress" in results:
        results["stress"] = results["stress"] * atoms.get_volume()


def one_force(results, atoms):
    results["forces"][-1, 1] += 1e-3


def rough(results, atoms):
    results["forces"] = results["forces"] + 1e-3 * np.random.standard_normal((len(atoms), 3))


def energy_of_place(results, atoms):
    results["energy"] = results["energy"] + 0.1 * atoms.positions[0, 0]


kFaults = {
    "forces are 0.1 % large": scaled("forces", 1.001),
    "one force is off by 1 meV/A": one_force,
    "forces have the opposite sign": scaled("forces", -1),
    "energies do not add up": scaled("energies", 0.99),
    "only the free energy is right": energy_of_place,
    "noise": rough,
    "stress of the opposite sign": scaled("stress", -1),
    "stress times the volume": times_volume,
    "yy and zz are exchanged": ordered(0, 2, 1, 3, 4, 5),
    "xy and yz are exchanged": ordered(0, 1, 2, 5, 4, 3),
    "half the shear": scaled("stress", [1, 1, 1, 0.5, 0.5, 0.5]),
    "twice the shear": scaled("stress", [1, 1, 1, 2, 2, 2]),
}
# {fault: the checks that fail}
kFailed = {
    "forces are 0.1 % large": "forces",
    "one force is off by 1 meV/A": "forces, permutation, rotation, supercell",
    "forces have the opposite sign": "forces, drift",
    "energies do not add up": "sums",
    "only the free energy is right": (
        "sums, permutation, rotation, translation, wrapping, supercell, small cell"
    ),
    "noise": "repeat",
    "stress of the opposite sign": "stress",
    "stress times the volume": "stress, supercell, small cell",
    "yy and zz are exchanged": "stress, rotation",
    "xy and yz are exchanged": "stress, rotation",
    "half the shear": "stress, rotation",
    "twice the shear": "stress, rotation",
    "an atom does not see its images": "supercell, small cell",
    "atoms outside the cell are lost": "wrapping, vectors",
    "the pairs are cut": "cutoff",
    "the first atom is special": "permutation, supercell, small cell",
    "a field is along z": "stress, rotation, translation, wrapping, supercell, small cell",
}
# {fault: what the check of the stress says}
kWords = {
    "stress of the opposite sign": "the stress has the opposite sign",
    "stress times the volume": "the stress is not divided by the volume",
    "yy and zz are exchanged": "the stress has the order xx zz yy yz xz xy",
    "xy and yz are exchanged": "the stress has the order xx yy zz xy xz yz",
    "half the shear": "the stress has half the shear",
    "twice the shear": "the stress has twice the shear",
}
kSlow = {"cutoff", "drift"}


def crystal():
    return bulk("Cu", cubic=True) * (2, 1, 1)


def failed(results):
    return {result.name for result in results if result.failed}


@pytest.mark.parametrize("fault", kFailed)
def test_a_planted_fault_fails_its_checks_and_no_others(fault):
    expected = set(kFailed[fault].split(", "))
    names = [name for name in kChecks if name in expected or name not in kSlow]
    results = list(run_checks(Soft(fault), crystal(), names))
    assert failed(results) == expected, "\n".join(map(str, results))
    if fault in kWords:
        (stress,) = [result for result in results if result.name == "stress"]
        assert stress.message.endswith(f": {kWords[fault]}")


class Lazy(Soft):
    """A calculator that keeps its neighbour list until an atom has moved by the skin."""

    listed = Atoms()

    def __init__(self, skin):
        super().__init__()
        self.skin = skin

    def is_near(self):
        if len(self.atoms) != len(self.listed) or (self.atoms.cell != self.listed.cell).any():
            return False
        moves = self.atoms.positions - self.listed.positions
        return np.linalg.norm(moves, axis=1).max() < self.skin

    def pairs(self):
        if not self.is_near():
            self.listed = self.atoms.copy()
            self.list = vesin.ase_neighbor_list("ijS", self.atoms, kCutoff + self.skin)
        i, j, S = self.list
        D = self.atoms.positions[j] - self.atoms.positions[i] + S @ self.atoms.cell.array
        kept = np.linalg.norm(D, axis=1) < kCutoff
        return i[kept], j[kept], D[kept], S[kept]


@pytest.mark.parametrize("skin", [0.3, 0.7])
def test_a_neighbour_list_that_is_kept_for_too_long_is_found(skin):
    atoms = bulk("Cu", "bcc", a=2.9, cubic=True) * 2
    for seed in range(3):
        assert failed(run_checks(Lazy(skin), atoms, ["repeat"], seed)) == {"repeat"}
        assert failed(run_checks(Soft(), atoms, ["repeat"], seed)) == set()


def test_a_calculator_that_changes_the_atoms_is_found():
    class Wrapping(EMT):
        def calculate(self, atoms, *arguments):
            atoms.wrap()
            super().calculate(atoms, *arguments)

    (result,) = run_checks(Wrapping(), crystal(), ["repeat"])
    assert result.failed and result.message == "the calculator changes the atoms"


def test_a_calculator_that_ignores_the_directions_that_are_not_periodic_is_found():
    class Periodic(Soft):
        def pairs(self):
            self.atoms.pbc = True
            return super().pairs()

    slab = fcc111("Cu", (2, 2, 3), vacuum=1.0)
    assert failed(run_checks(Periodic(), slab, ["vectors", "open cell"])) == {"open cell"}
    assert failed(run_checks(Soft(), slab, ["vectors", "open cell"])) == set()


@pytest.mark.parametrize("change", ["cell", "numbers"])
def test_a_cache_that_ignores_a_change_is_found(change):
    class Cached(EMT):
        def check_state(self, atoms, tol=1e-15):
            changes = super().check_state(atoms, tol)
            return [] if changes == [change] else changes

    atoms = bulk("CuAu", "rocksalt", a=5.0, cubic=True)
    for seed in range(3):
        assert failed(run_checks(Cached(), atoms, ["repeat"], seed)) == {"repeat"}
        assert failed(run_checks(EMT(), atoms, ["repeat"], seed)) == set()


def test_a_calculator_without_a_fault_fails_no_check():
    results = check(Soft(), crystal())
    assert [result.name for result in results] == list(kChecks)
    skipped = [result.name for result in results if result.value is None]
    assert skipped == ["open cell"] and not failed(results)


def right_calculators():
    """Return {name: a function that returns a calculator, and a structure}."""
    from calcops.ase import CalcOps
    from calcops.nep import load
    from calcops.potentials import StillingerWeber

    silicon = bulk("Si", cubic=True)
    smooth = {"sigma": 2.3, "epsilon": 0.4, "rc": 6.0, "ro": 4.0, "smooth": True}
    nep = ROOT / "tests" / "packages" / "nep_models" / "nep4.txt"
    return {
        "EMT": (EMT, bulk("Cu")),
        "LennardJones": (lambda: LennardJones(**smooth), crystal()),
        "StillingerWeber": (lambda: CalcOps(StillingerWeber()), silicon),
        "StillingerWeber, float32": (
            lambda: CalcOps(StillingerWeber(), dtype=torch.float32),
            silicon,
        ),
        "Nep": (lambda: CalcOps(load(nep)), silicon),
        "Nep, float32": (lambda: CalcOps(load(nep), dtype=torch.float32), bulk("Si")),
    }


@pytest.mark.parametrize(
    "name",
    ["EMT", "LennardJones", "StillingerWeber", "StillingerWeber, float32", "Nep", "Nep, float32"],
)
def test_right_calculators_fail_no_check(name):
    calculator, atoms = right_calculators()[name]
    results = check(calculator(), atoms)
    assert [result.name for result in results if result.value is None] == ["open cell"]


class Rounded(Soft):
    """A calculator with the energies of core electrons, in float32."""

    implemented_properties = ["energy", "forces", "stress"]

    def calculate(self, *arguments):
        super().calculate(*arguments)
        energy = self.results["energy"] - 2000 * len(self.atoms)
        self.results["energy"] = float(np.float32(energy))


def test_the_rounding_of_a_large_energy_is_no_fault_and_hides_none():
    names = ["forces", "stress", "supercell", "small cell"]
    for seed in range(5):
        assert failed(run_checks(Rounded(), crystal(), names, seed)) == set()
    wrong = Rounded("forces have the opposite sign")
    assert failed(run_checks(wrong, crystal(), ["forces"])) == {"forces"}


def structures():
    """Return {name: a structure, and the checks that are skipped}."""
    periodic = {"stress", "wrapping", "supercell", "vectors", "small cell"}
    slab = fcc111("Cu", (1, 1, 3), vacuum=6.0)
    wire = Atoms("Cu", cell=[0, 0, 2.5], pbc=[False, False, True])
    closed = {"open cell"}
    fixed = bulk("Cu", cubic=True)
    fixed.set_constraint(FixAtoms([0, 1, 2]))
    fixed.set_initial_magnetic_moments([1, 0, -1, 0])
    fixed.set_tags([1, 2, 3, 4])
    boxed = molecule("H2O", vacuum=4.0)
    left_handed = bulk("Cu", cubic=True)
    left_handed.set_cell(left_handed.cell.array[[1, 0, 2]])
    return {
        "molecule": (molecule("H2O"), periodic | closed),
        "molecule with a cell": (boxed, periodic),
        "atom": (Atoms("Cu"), periodic | closed | {"cutoff"}),
        "slab": (slab, {"small cell"}),
        "wire without other cell vectors": (wire, closed | {"stress", "vectors", "small cell"}),
        "primitive cell": (bulk("Cu"), closed),
        "constraints": (fixed, closed),
        "left-handed cell": (left_handed, closed),
    }


@pytest.mark.parametrize("name", structures())
def test_every_kind_of_structure_is_checked_or_skipped_with_a_reason(name):
    atoms, skipped = structures()[name]
    before = atoms.copy()
    names = [name for name in kChecks if name != "drift"]
    results = check(EMT(), atoms, names)
    assert {result.name for result in results if result.value is None} == skipped
    for result in results:
        if result.name in skipped:
            assert re.search("no periodic cell|periodic$|no neighbour|open$", result.message)
    assert atoms == before and atoms.calc is None


def test_charges_and_tags_of_atoms_reach_the_calculator_in_every_structure():
    class Tagged(Soft):
        def calculate(self, atoms, *arguments):
            super().calculate(atoms, *arguments)
            assert set(atoms.get_tags()) <= {5, 6} and (atoms.get_initial_charges() == 0.5).all()

    atoms = crystal()
    atoms.set_tags([5, 6] * 4)
    atoms.set_initial_charges([0.5] * 8)
    check(Tagged(), atoms, [name for name in kChecks if name != "drift"])


def test_a_property_that_is_not_implemented_is_skipped_and_an_error_is_a_failure():
    class Simple(Soft):
        implemented_properties = ["energy", "forces"]
        error = ValueError

        def calculate(self, atoms, *arguments):
            if len(atoms) > 20:
                raise self.error("no more than 20 atoms\nat once")
            super().calculate(atoms, *arguments)
            self.results.pop("stress", None)

    atoms = bulk("Cu", cubic=True) * (3, 1, 1)
    names = ["sums", "stress", "permutation", "supercell", "small cell"]
    calculator = Simple()
    results = {result.name: result for result in run_checks(calculator, atoms, names)}
    assert str(results["sums"]).startswith("skip  sums          not implemented: ")
    assert str(results["stress"]).startswith("skip  stress        not implemented: ")
    assert str(results["permutation"]).startswith("pass  permutation   ")
    line = "FAIL  supercell     inf >  0.0e+00 raised ValueError: no more than 20 atoms"
    assert str(results["supercell"]) == line
    message = "refused by ValueError: no more than 20 atoms"
    assert str(results["small cell"]) == f"skip  small cell    {message}"
    calculator.error = IndexError
    assert failed(run_checks(calculator, atoms, ["small cell"])) == {"small cell"}


def test_an_energy_that_is_not_a_number_fails_wherever_it_is():
    class Window(Soft):
        def calculate(self, atoms, *arguments):
            super().calculate(atoms, *arguments)
            r = self.pairs()[2]
            if len(atoms) < 6 and (np.linalg.norm(r, axis=1) > 3.9).any():
                self.results["free_energy"] = np.nan

    for seed in range(3):
        (result,) = run_checks(Window(), crystal(), ["cutoff"], seed)
        assert result.failed
        assert result.message == "raised FloatingPointError: free_energy not finite"


def test_check_raises_with_a_line_for_each_check_and_run_checks_does_not():
    names = ["forces", "sums", "rotation"]
    with pytest.raises(AssertionError) as error:
        check(Soft("energies do not add up"), crystal(), names)
    first, *lines = str(error.value).splitlines()
    assert first == "the calculator fails sums:"
    assert [line[:12].split() for line in lines] == [
        ["pass", "forces"],
        ["FAIL", "sums"],
        ["pass", "rotati"],
    ]
    results = list(run_checks(Soft("energies do not add up"), crystal(), names))
    assert "\n".join(map(str, results)) == "\n".join(lines)


def test_a_check_gives_the_same_numbers_with_and_without_others_and_other_ones_by_the_seed():
    alone = list(run_checks(Soft(), crystal(), ["rotation"]))
    assert list(run_checks(Soft(), crystal(), ["permutation", "rotation"]))[1:] == alone
    assert list(run_checks(Soft(), crystal(), ["rotation"], seed=1)) != alone


def test_what_cannot_be_checked_is_a_value_error():
    class Infinite(Soft):
        def calculate(self, atoms, *arguments):
            super().calculate(atoms, *arguments)
            self.results["forces"][3] = np.nan

    with pytest.raises(ValueError, match="expected a structure with atoms, got none"):
        check(Soft(), Atoms())
    with pytest.raises(ValueError, match="expected checks of repeat, sums, .*, got speed"):
        check(Soft(), crystal(), ["speed"])
    with pytest.raises(ValueError, match="computes Si8, got NotImplementedError: No EMT-potential"):
        check(EMT(), bulk("Si", cubic=True))
    with pytest.raises(ValueError, match="computes Cu8, got FloatingPointError: forces not fin"):
        check(Infinite(), crystal())


# ---- the command ---------------------------------------------------------------------------------

kFile = """
from ase.calculators.emt import EMT

calculator = EMT()


class Wrong(EMT):
    def calculate(self, *arguments, **options):
        super().calculate(*arguments, **options)
        self.results["energies"] = 2 * self.results["energies"]


def unfinished():
    raise KeyError("parameters")
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `calcops check` in a folder with a calculator and a crystal."""
    from calcops.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    for name in ("my_calculators.py", "my.2nd.calculators.py"):
        (tmp_path / name).write_text(kFile)
    bulk("Cu", cubic=True).write("copper.cif")
    (tmp_path / "text.cif").write_text("no structure")

    def run(*words):
        status = 0
        try:
            main(["check", *words])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    yield run
    sys.modules.pop("my_calculators", None)


@pytest.mark.parametrize(
    "calculator",
    [
        "my_calculators:calculator",
        "my_calculators.py:calculator",
        "./my_calculators.py:EMT",
        "./my.2nd.calculators.py:EMT",
        "ase.calculators.emt:EMT",
    ],
)
def test_the_command_checks_an_object_or_a_class_of_a_module_or_file(calculator, command):
    status, out, err = command(calculator, "copper.cif", "--only", "sums", "permutation")
    assert (status, err) == (0, "")
    assert [line[:12] for line in out.splitlines()] == ["pass  sums  ", "pass  permut"]


def test_the_command_exits_with_1_if_a_check_fails(command):
    words = "my_calculators:Wrong", "copper.cif", "--only", "sums", "permutation"
    status, out, err = command(*words)
    assert status == 1
    assert [line[:12] for line in out.splitlines()] == ["FAIL  sums  ", "pass  permut"]
    assert err == "calcops check: failed: sums\n"


@pytest.mark.parametrize(
    "calculator, structure, message",
    [
        ("my_calculators:calculator", "none.cif", "expected a structure that ASE reads, got none"),
        ("my_calculators:calculator", "text.cif", "expected a structure that ASE reads, got text"),
        ("my_calculators:none", "copper.cif", "my_calculators:none, got AttributeError: module"),
        ("nowhere:none", "copper.cif", "nowhere:none, got ModuleNotFoundError: No module named"),
        ("my_calculators:unfinished", "copper.cif", "unfinished, got KeyError: 'parameters'"),
        ("EMT", "copper.cif", "expected module:name, file.py:name or model.pt2, got EMT"),
        ("none.pt2", "copper.cif", "none.pt2"),
    ],
)
def test_the_command_exits_with_2_and_a_sentence_if_there_is_nothing_to_check(
    calculator, structure, message, command
):
    status, out, err = command(calculator, structure)
    assert (status, out) == (2, "")
    assert err.startswith("calcops check: ") and message in err
    assert err.count("\n") == 1


def test_the_command_draws_the_energy_in_dynamics(command, tmp_path):
    pytest.importorskip("matplotlib", reason="it draws")
    words = "my_calculators:calculator", "copper.cif", "--only", "drift", "--plot", "drift.png"
    assert command(*words)[0] == 0
    assert (tmp_path / "drift.png").read_bytes()[:4] == b"\x89PNG"
    assert command(*words[:-1], "absent/drift.png")[0] == 2
    status, _, err = command(*words[:2], "--only", "sums", "--plot", "drift.png")
    assert (status, err) == (2, "calcops check: expected the check drift for a plot, got sums\n")


def test_the_command_checks_a_package(command):
    from calcops.potentials import StillingerWeber, save

    save(StillingerWeber(), "silicon.pt")
    bulk("Si").write("silicon.cif")
    status, out, _ = command("silicon.pt", "silicon.cif", "--only", "rotation", "wrapping")
    assert (status, out.count("pass")) == (0, 2)


def test_the_page_shows_what_the_command_prints(command):
    (shown,) = blocks("calcops/README.md", "text")
    bulk("Cu", a=3.61, cubic=True).write("copper.cif")
    status, out, _ = command("ase.calculators.emt:EMT", "copper.cif")
    assert status == 0
    assert [line[:18] for line in out.splitlines()] == [line[:18] for line in shown.splitlines()]
