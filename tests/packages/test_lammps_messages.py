"""calcops/lammps: a model that passes messages gives the results of the periodic graph, on any
number of ranks."""

import itertools
import re
import sys

import numpy as np
import pytest
from lammps_plugin import SHAKE, THERMO, Lammps, difference, tables
from programs import ROOT, run

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from structures import inputs_of  # noqa: E402

sys.path.append(str(ROOT / "bench"))
from calcops.potentials.energies import potential_of  # noqa: E402
from calcops.potentials.package import save  # noqa: E402
from lammps_models import Messages  # noqa: E402

pytestmark = pytest.mark.long  # a foreign program

CUTOFF = 1.7
ABOUT = {"cutoff": CUTOFF, "units": "lj", "type_names": ["A", "B"]}
ATOMS = (
    "units lj\natom_modify map array\n{}\nlattice fcc 0.8442\nregion box {}\n"
    "create_box 2 box\ncreate_atoms 1 box\n"
)
ATOMS += (
    "set group all type/fraction 2 0.4 4711\nmass * 1.0\nvelocity all create 1.44 87287 loop geom\n"
    + SHAKE
)
SYSTEMS = {
    "block": ATOMS.format("", "block 0 4 0 4 0 3"),
    # 1.7 sigma wide: an atom is a neighbour of its own images.
    "small": ATOMS.format("", "block 0 1 0 2 0 1"),
    "tilted": ATOMS.format("", "prism 0 4 0 4 0 4 0.9 -0.7 0.4"),
    "surface": ATOMS.format("boundary p p f", "block 0 3 0 3 0 8").replace(
        "0.8442", "0.8442 origin 0 0 0.9"
    )
    # Of 4 ranks 2 have no atoms.
    + "region gas block INF INF INF INF 3.2 INF\ndelete_atoms region gas\n",
}
for name in SYSTEMS:  # so that an atom has the same id on any number of ranks
    SYSTEMS[name] += "reset_atoms id sort yes\n"
SYSTEMS["small"] += "neighbor 0.3 nsq\n"
SKIN = 0.3


def style(layers, ending=".pt", names="B A", cutoff=None):
    cutoff = layers * CUTOFF + SKIN if cutoff is None else cutoff
    return (
        f"comm_modify cutoff {cutoff}\npair_style calcops messages{layers}{ending}\n"
        f"pair_coeff * * {names}\n"
    )


@pytest.fixture(scope="module")
def modules():
    return {layers: Messages(layers, CUTOFF, 2, seed=layers) for layers in (1, 2, 3)}


@pytest.fixture(scope="module")
def lammps(tmp_path_factory, modules):
    folder = tmp_path_factory.mktemp("lammps")
    for layers, module in modules.items():
        save(module, folder / f"messages{layers}.pt", layers=layers, **ABOUT)
    save(Messages(2, CUTOFF, 2, seed=7), folder / "other.pt", layers=2, **ABOUT)
    # With the input edge_order, like a package for a GPU.
    save(modules[2], folder / "messages2.pt2", layers=2, edge_order=True, **ABOUT)
    return Lammps(folder)


RUN = "neigh_modify delay 0 every 1\nfix nve all nve\n"
DUMP = "dump atoms all custom 1000 {} id type xu yu zu fx fy fz c_e c_s[*] c_c[*]\n"
DUMP += "dump_modify atoms sort id format float %.17g first yes\n"
COMPUTES = (
    "compute e all pe/atom\ncompute s all stress/atom NULL virial\n"
    "compute c all centroid/stress/atom NULL virial\n"
)
CELL = "compute p all pressure NULL virial\nthermo_style custom step pe c_p[*] lx ly lz xy xz yz\n"
CELL += "thermo_modify norm no format float %.17g\n"


# LAMMPS's order of the components of a virial: six, and nine, which begin with the six.
ROWS, COLUMNS = [0, 1, 2, 0, 0, 1, 1, 2, 2], [0, 1, 2, 1, 2, 2, 0, 0, 1]


def compare(module, table, dumped, periodic=(1, 1, 1), tolerance=1e-12):
    lx, ly, lz, xy, xz, yz = table[8:14]
    cell = np.array([[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]])
    model = potential_of(module, layers=module.layers, **ABOUT)
    numbers = np.where(dumped[:, 1] == 1, 5, 1)  # "B A": boron, and hydrogen for A
    atoms = Atoms(numbers, positions=dumped[:, 2:5], cell=cell, pbc=periodic)
    model.type_names = ["H", "B"]
    energy, energies, force, virial, virials = (
        x[0].numpy() for x in model(*inputs_of(atoms, model))
    )
    assert abs(table[1] - energy) <= tolerance * abs(energy)
    volume = np.linalg.det(cell)
    assert difference(table[2:8], virial[COLUMNS, ROWS][:6] / volume) <= tolerance
    virials = -virials[:, COLUMNS, ROWS]
    expected = force, energies[:, None], virials[:, :6], virials
    for columns, value in zip(np.split(dumped[:, 5:], [3, 4, 10], axis=1), expected, strict=True):
        assert difference(columns, value) <= tolerance
    assert np.abs(force).max() > 1


def farthest(results, expected):
    """Return the largest difference, relative to the largest expected value of its column."""
    return (np.abs(results - expected).max(0) / np.abs(expected).max(0)).max()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_results_are_those_of_the_periodic_graph(lammps, modules, ranks):
    cases = [(name, layers, ".pt") for name, layers in itertools.product(SYSTEMS, modules)]
    cases.append(("tilted", 2, ".pt2"))
    script = ""
    for name, layers, ending in cases:
        script += f"clear\n{SYSTEMS[name]}{style(layers, ending)}{COMPUTES}{CELL}"
        script += f"{DUMP.format(f'{name}{layers}{ending}.{ranks}')}run 0\n"
    for (name, layers, ending), table in zip(cases, tables(lammps(script, ranks)), strict=True):
        dumped = np.loadtxt(lammps.folder / f"{name}{layers}{ending}.{ranks}", skiprows=9)
        compare(modules[layers], table[0], dumped, (1, 1, name != "surface"))


@pytest.mark.parametrize(
    "name, layers, ending", [("block", 2, ".pt2"), ("tilted", 3, ".pt"), ("surface", 3, ".pt")]
)
def test_a_run_is_the_same_on_any_number_of_ranks_and_threads(
    lammps, modules, name, layers, ending
):
    """Atoms move into the skin, out of it, and to other ranks. In 40 steps, rounding errors grow
    tenfold."""

    def run(ranks, threads=1, more=""):
        dump = DUMP.format("run").replace("1000", "40")
        script = SYSTEMS[name] + style(layers, ending) + COMPUTES + CELL + dump
        script += RUN + more + "thermo 10\nrun 40\n"
        printed = lammps(script, ranks, threads)
        assert int(re.search(r"Neighbor list builds = (\d+)", printed)[1]) > 3
        assert "Dangerous builds = 0" in printed
        *_, dumped = re.split(r"ITEM: ATOMS.*\n", (lammps.folder / "run").read_text())
        return tables(printed)[0], np.array([line.split() for line in dumped.splitlines()], float)

    table, dumped = run(1)
    assert difference(table[0, 1], table[-1, 1]) > 1e-3
    compare(modules[layers], table[-1], dumped, (1, 1, name != "surface"))
    balanced = "fix balance all balance 10 1.0 shift xyz 20 1.0\n"
    if name == "tilted":
        balanced = "comm_style tiled\nfix balance all balance 10 1.0 rcb\n"
    for ranks, threads, more in [(1, 2, ""), (2, 1, ""), (4, 1, ""), (4, 1, balanced)]:
        other, other_dumped = run(ranks, threads, more)
        assert farthest(other[:, :8], table[:, :8]) <= 1e-12
        assert farthest(other_dumped, dumped) <= 1e-12


@pytest.mark.parametrize("comm", ["", "comm_modify cutoff 3.5\n", "comm_modify cutoff 3.69999\n"])
def test_too_few_ghosts_are_refused_with_the_missing_comm_modify(lammps, comm):
    got = comm.split()[-1] if comm else "2"
    _, _, pair_lines = style(2).partition("\n")  # without comm_modify
    printed = lammps(SYSTEMS["block"] + pair_lines + comm + "run 0\n", 2, fails=True)
    message = (
        "expected comm_modify cutoff 3.7 or more, 2 layers of cutoff 1.7 and the "
        f"skin 0.3, got {got}"
    )
    assert f"Pair style calcops: {message}" in re.sub(r"\s+", " ", printed)


def test_another_style_with_a_longer_cutoff_gives_enough_ghosts(lammps):
    _, _, pair_lines = style(2).partition("\n")
    hybrid = pair_lines.replace("calcops", "hybrid/overlay zero 3.4 calcops")
    hybrid = hybrid.replace("coeff * *", "coeff * * calcops") + "pair_coeff * * zero\n"
    lammps(SYSTEMS["block"] + hybrid + "run 0\n", 2)


@pytest.mark.parametrize(
    "script, message",
    [
        (
            "neighbor 0.3 multi\ncomm_modify mode multi\n",
            "expected comm_modify mode single for a model that passes messages",
        ),
        ("newton off\n", "expected newton on"),
        (
            "create_atoms 1 single 0.1 0.1 0.1\ncreate_atoms 1 single 0.1 0.1 0.1\n",
            "at the same place",
        ),
        (
            "pair_style calcops messages2.pt messages3.pt\n",
            "expected the layers of messages2.pt, got another",
        ),
    ],
)
def test_scripts_that_cannot_run_are_refused_with_the_reason(lammps, script, message):
    if script.startswith("newton"):  # LAMMPS reads this before the box
        script += SYSTEMS["block"] + style(2)
    else:
        script = SYSTEMS["block"] + style(2) + script
    printed = lammps(script + "run 0\n", fails=True)
    assert message in re.sub(r"\s+", " ", printed)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_atoms_of_another_style_pass_no_messages(lammps, modules, ranks):
    hybrid = style(3, names="calcops B NULL").replace("pair_style", "pair_style hybrid zero 1.7")
    hybrid += "pair_coeff * 2 zero\n"
    script = SYSTEMS["tilted"] + hybrid + COMPUTES + CELL + DUMP.format("hybrid") + "run 0\n"
    table = tables(lammps(script, ranks))[0]
    dumped = np.loadtxt(lammps.folder / "hybrid", skiprows=9)
    is_of_model = dumped[:, 1] == 1
    assert 0.2 < is_of_model.mean() < 0.8
    assert not dumped[~is_of_model, 5:].any()
    compare(modules[3], table[0], dumped[is_of_model])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_deviation_of_a_committee_is_that_of_its_models_forces(lammps, ranks):
    results = {}
    for files in ("messages2.pt", "other.pt", "messages2.pt other.pt"):
        script = SYSTEMS["tilted"] + style(2).replace("messages2.pt", files) + COMPUTES
        thermo = THERMO
        if " " in files:  # a committee
            script += "compute devi all pair calcops\n"
            thermo = THERMO.replace("press", "press c_devi[9]")
        table = tables(lammps(script + DUMP.format("committee") + thermo + "run 0\n", ranks))[0]
        results[files] = table, np.loadtxt(lammps.folder / "committee", skiprows=9)
    (_, first), (_, second), (table, both) = results.values()
    assert farthest(both, first) <= 1e-12
    largest = np.linalg.norm(first[:, 5:8] - second[:, 5:8], axis=1).max() / 2
    assert table[0, -1] == pytest.approx(largest, rel=1e-12)


PYTHON = ROOT / "build" / "graph_potential" / "bin" / "python"
# Computes forces, energies and stress with SevenNet's own graph. Tensor.float is replaced, because
# SevenNet's one-hot code calls it for weights of any dtype.
OWN_NUMBERS = """
import sys, numpy, torch, sevenn._keys as KEY
from ase import Atoms
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevenn.util import load_checkpoint
model = load_checkpoint("7net-0").build_model().double().eval()
torch.Tensor.float = torch.Tensor.double
model.set_is_batch_data(False)
dumped = numpy.loadtxt(sys.argv[1], skiprows=9)
atoms = Atoms([("Na", "Cl")[int(t) - 1] for t in dumped[:, 1]], dumped[:, 2:5], pbc=[1, 0, 0])
atoms.cell = [float(x) for x in sys.argv[2:]]
graph = unlabeled_atoms_to_graph(atoms, 5.0, with_shift=True)
data = {key: torch.as_tensor(x) for key, x in graph.items() if not isinstance(x, (str, dict))}
data = {key: x.double() if x.is_floating_point() else x for key, x in data.items()}
results = model(data)
force = results[KEY.PRED_FORCE]
energy = results[KEY.ATOMIC_ENERGY].view(-1, 1)
numpy.savetxt("own", torch.cat([force, energy], 1).detach().numpy())
numpy.savetxt("own.pressure", results[KEY.PRED_STRESS].detach().numpy())
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="SevenNet is not installed: make graph-potential")
def test_a_pretrained_sevennet_gives_its_own_results_on_any_number_of_ranks(lammps):
    """Its five layers of 5 A need 26 A of ghosts, around a rod of salt with a period of 45 A."""

    def python(*arguments):
        words = "-W", "ignore", *arguments
        run(PYTHON, *words, cwd=lammps.folder, OMP_NUM_THREADS="1")

    python("-m", "calcops", "graph", "sevennet", "7net-0", lammps.folder / "7net-0.pt")
    script = (
        "units metal\nboundary p f f\natom_modify map array\n"
        "region box block 0 45.12 -20 20 -20 20\n"
    )
    script += "create_box 2 box\nmass 1 22.99\nmass 2 35.45\n"
    for i in range(64):
        x, y, z = i // 4 % 16, i // 2 % 2, i % 2
        script += (
            f"create_atoms {1 + (x + y + z) % 2} single {2.82 * x + 0.1} {2.82 * y} {2.82 * z}\n"
        )
    script += (
        SHAKE
        + "reset_atoms id sort yes\nvelocity all create 900 87287 loop geom\nneighbor 1.0 bin\n"
    )
    script += "pair_style calcops 7net-0.pt\npair_coeff * * Na Cl\n" + COMPUTES + RUN
    script += (
        CELL.replace("lx ly lz xy xz yz", "vol")
        + DUMP.replace("1000", "10")
        + "thermo 10\nrun 10\n"
    )
    refused = lammps(script.format("refused"), fails=True)
    assert "expected comm_modify cutoff 26 or more" in re.sub(r"\s+", " ", refused)
    alone = None
    for ranks in (1, 2, 4):
        table = tables(lammps("comm_modify cutoff 26\n" + script.format("7net"), ranks))[0]
        first, last = re.split("ITEM: TIMESTEP", (lammps.folder / "7net").read_text())[1:]
        for frame, row in zip((first, last), table):
            (lammps.folder / "frame").write_text("\n" + frame.lstrip("\n"))
            python("-c", OWN_NUMBERS, "frame", "45.12", "40", "40")
            dumped = np.loadtxt(lammps.folder / "frame", skiprows=9)
            own = np.loadtxt(lammps.folder / "own")
            assert farthest(dumped[:, 5:9], own) <= 1e-12
            assert row[1] == pytest.approx(own[:, 3].sum(), rel=1e-12)
            pressure = np.loadtxt(lammps.folder / "own.pressure")[[0, 1, 2, 3, 5, 4]] * 1.6021765e6
            assert difference(row[2:8], pressure) <= 1e-12
        alone = table if alone is None else alone
        assert farthest(table[:, 1:8], alone[:, 1:8]) <= 1e-11
