"""calcops/graph: a MACE model with random weights gives MACE's own numbers in ASE."""

import re

import pytest
from mace_models import make_models, python

pytestmark = pytest.mark.long  # a foreign program

# Compares a file with MACE's own calculator for structures of any kind, and prints differences
# relative to the largest value.
COMPARE = """
import sys, numpy
from ase import Atoms
from ase.build import bulk, fcc111
from calcops.ase import CalcOps
from calcops.potentials import load
from mace.calculators import MACECalculator

model, file, head = sys.argv[1:]
theirs = MACECalculator(model, device="cpu", default_dtype="float64", head=head)
ours = CalcOps(load(file))
alloy = bulk("Cu", cubic=True) * 2
alloy.symbols[::3] = "Al"
slab = fcc111("Al", (2, 2, 3), vacuum=5)
small = bulk("Cu", a=3.4)  # an atom is a neighbour of its own images
cluster = Atoms("AlCu4", numpy.random.default_rng(0).uniform(0, 4, (5, 3)))
for atoms in (alloy, slab, small, cluster, Atoms("Cu")):
    atoms.rattle(0.1, seed=3)
    theirs.calculate(atoms)
    expected = dict(theirs.results)
    if not atoms.pbc.all():
        del expected["stress"]
    for name in ("energy", "energies", "forces", "stress"):
        if name in expected:
            difference = numpy.abs(ours.get_property(name, atoms) - expected[name]).max()
            print(name, difference / max(numpy.abs(expected[name]).max(), 1e-3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mace")
    make_models(folder)
    return folder


def differences(folder, *arguments):
    """Return the largest relative differences of energies, forces and stress, by name."""
    largest = {}
    printed = python(folder, "-c", COMPARE, *arguments)
    for name, value in re.findall(r"^(\w+) (\S+)$", printed, re.MULTILINE):
        largest[name] = max(largest.get(name, 0.0), float(value))
    assert set(largest) == {"energy", "energies", "forces", "stress"}
    return largest


def test_ase_gives_the_numbers_of_maces_calculator(folder):
    for name, difference in differences(folder, "my.model", "mace.pt", "Default").items():
        assert difference <= 1e-12, name


@pytest.mark.parametrize("head", ["pt_head", "Default"])
def test_each_head_of_a_float32_model_is_packaged_by_name(folder, head):
    python(folder, "-m", "calcops.graph", "mace", "two_heads.model", f"{head}.pt", "--head", head)
    for name, difference in differences(folder, "two_heads.model", f"{head}.pt", head).items():
        assert difference <= 1e-12, name


def test_a_float32_file_is_close(folder):
    python(folder, "-m", "calcops.graph", "mace", "my.model", "32.pt", "--dtype", "float32")
    largest = differences(folder, "my.model", "32.pt", "Default")
    assert 1e-9 < largest["forces"] < 1e-4
    assert max(largest.values()) < 1e-4


def test_what_cannot_be_packaged_is_refused_in_one_line(folder):
    cases = {
        ("my.model", "mace.pt2"): "got one whose trace holds only for .*write an archive",
        (
            "my.model",
            "other.pt",
            "--head",
            "x",
        ): "expected a head of the model, one of Default, got x",
        ("absent.model", "other.pt"): "No such file .*absent.model",
    }
    for arguments, message in cases.items():
        printed = python(folder, "-m", "calcops.graph", "mace", *arguments, fails=True)
        assert re.search(f"^calcops.graph: .*{message}", printed, re.MULTILINE), printed
        assert "Traceback" not in printed
        assert not (folder / arguments[1]).exists() or arguments[1] == "mace.pt"


# The rows of edge_index in MACE's order: messages go the wrong way.
TURNED = """
import mace.modules, torch
from calcops.graph.package_mace import Mace
from calcops.potentials import save

class Turned(Mace):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index.flip(0), -edge_vec, natoms)

model = Turned(torch.load("my.model", weights_only=False))
save(model, "turned.pt", **model.about)
"""


def test_messages_in_the_other_direction_are_refused(folder):
    printed = python(folder, "-c", TURNED, fails=True)
    assert "each to the atom in row 0 of edge_index from that in row 1, got" in printed
