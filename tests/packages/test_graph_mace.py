"""calcops/graph: a MACE model with random weights gives MACE's own numbers in ASE and LAMMPS."""

import re

import numpy as np
import pytest
from programs import ROOT, run

PYTHON = ROOT / "build" / "mace" / "bin" / "python"
pytestmark = [
    pytest.mark.long,  # a foreign program
    pytest.mark.skipif(not PYTHON.exists(), reason="MACE is not installed: make mace"),
]

# Writes my.model, as MACE's training does, and two_heads.model.
MAKE_MODELS = """
import mace.modules, numpy, torch
from e3nn import o3

def model(heads, pair_repulsion):
    torch.manual_seed(0)
    kinds = mace.modules.interaction_classes
    return mace.modules.ScaleShiftMACE(
        r_max=4.0, num_bessel=6, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
        interaction_cls=kinds["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=kinds["RealAgnosticDensityInteractionBlock"],
        num_elements=2, atomic_numbers=[13, 29], hidden_irreps=o3.Irreps("4x0e + 4x1o"),
        MLP_irreps=o3.Irreps("8x0e"), gate=torch.nn.functional.silu, correlation=3,
        atomic_energies=numpy.array([[-1.0, -3.0], [-2.0, -5.0]])[:len(heads)],
        avg_num_neighbors=8.0, atomic_inter_scale=[1.5, 0.5][:len(heads)],
        atomic_inter_shift=[0.1, -0.2][:len(heads)], heads=heads, pair_repulsion=pair_repulsion)

torch.set_default_dtype(torch.float64)
torch.save(model(["Default"], True), "my.model")
torch.set_default_dtype(torch.float32)
torch.save(model(["pt_head", "Default"], False), "two_heads.model")
"""

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


def python(folder, *arguments, **options):
    """Run Python with MACE in a folder, and return what it prints."""
    words = "-W", "ignore", *arguments
    done = run(PYTHON, *words, cwd=folder, OMP_NUM_THREADS="1", **options)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with my.model, two_heads.model, and mace.pt, a package of the former."""
    folder = tmp_path_factory.mktemp("mace")
    python(folder, "-c", MAKE_MODELS)
    python(folder, "-m", "calcops", "graph", "mace", "my.model", "mace.pt")
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
    python(
        folder, "-m", "calcops", "graph", "mace", "two_heads.model", f"{head}.pt", "--head", head
    )
    for name, difference in differences(folder, "two_heads.model", f"{head}.pt", head).items():
        assert difference <= 1e-12, name


def test_a_float32_file_is_close(folder):
    python(folder, "-m", "calcops", "graph", "mace", "my.model", "32.pt", "--dtype", "float32")
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
        printed = python(folder, "-m", "calcops", "graph", "mace", *arguments, fails=True)
        assert re.search(f"^calcops graph: .*{message}", printed, re.MULTILINE), printed
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


# Computes what LAMMPS has dumped with MACE's own calculator.
OWN_NUMBERS = """
import sys, numpy
from ase import Atoms
from mace.calculators import MACECalculator
dumped = numpy.loadtxt(sys.argv[1], skiprows=9)
symbols = [("Cu", "Al")[int(number) - 1] for number in dumped[:, 1]]
atoms = Atoms(symbols, dumped[:, 2:5], cell=[float(x) for x in sys.argv[2:]], pbc=True)
atoms.calc = MACECalculator("my.model", device="cpu", default_dtype="float64")
numpy.savez("own.npz", energy=atoms.get_potential_energy(), force=atoms.get_forces(),
            stress=atoms.get_stress(voigt=False))
"""
SYSTEM = (
    "units metal\natom_modify map array\nlattice fcc 3.8\nregion box block 0 3 0 2 0 2\n"
    "create_box 2 box\ncreate_atoms 1 box\nmass 1 63.5\nmass 2 27.0\n"
    "set group all type/fraction 2 0.4 4711\n"
    "displace_atoms all random 0.1 0.1 0.1 4711\nneighbor 1.0 bin\n"
    "velocity all create 600 87287 loop geom\ncomm_modify cutoff 9\n"
    "pair_style calcops mace.pt\npair_coeff * * Cu Al\nfix nve all nve\n"
    "compute p all pressure NULL virial\nthermo_style custom step pe c_p[*] temp\n"
    "thermo_modify norm no format float %.17g\nthermo 10\n"
    "dump atoms all custom 10 atoms id type xu yu zu fx fy fz\n"
    "dump_modify atoms sort id format float %.17g first yes\n"
)


def test_lammps_gives_the_numbers_of_maces_calculator_on_one_and_two_ranks(folder):
    from lammps_plugin import Lammps, difference, tables  # skips the test if there is no LAMMPS

    lammps = Lammps(folder)
    for ranks in (1, 2):
        table = tables(lammps(SYSTEM + "run 10\n", ranks))[0]
        frames = re.split("ITEM: TIMESTEP", (folder / "atoms").read_text())[1:]
        for frame, (_, energy, *pressure, _) in zip(frames, table, strict=True):
            (folder / "frame").write_text("\n" + frame.lstrip("\n"))
            python(folder, "-c", OWN_NUMBERS, "frame", "11.4", "7.6", "7.6")
            own = np.load(folder / "own.npz")
            forces = np.loadtxt(folder / "frame", skiprows=9)[:, 5:]
            assert difference(forces, own["force"]) <= 1e-12
            assert energy == pytest.approx(own["energy"].item(), rel=1e-12)
            xx, yy, zz, xy, xz, yz = pressure  # bar
            stress = -np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) / 1.6021765e6
            assert difference(stress, own["stress"]) <= 1e-12
        assert table[0, -1] != table[-1, -1]  # the atoms have moved
