"""calcops/lammps: models in LAMMPS against LAMMPS's own pair styles."""

import functools
import os
import re
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.stillinger_weber import StillingerWeber
from lammps_plugin import (
    FOLDER,
    HOME,
    MELT,
    ROOT,
    SHAKE,
    SHARE,
    SILICON,
    SW,
    THERMO,
    Lammps,
    difference,
    tables,
)

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from structures import inputs_of  # noqa: E402

pytestmark = pytest.mark.long  # a foreign program

ATOMS = "units lj\n{}\nlattice fcc 0.8442\nregion box {}\ncreate_box 2 box\ncreate_atoms 1 box\n"
ATOMS += "set group all type/fraction 2 0.4 4711\nmass * 1.0\n" + SHAKE
TILTED = ATOMS.format("", "prism 0 4 0 5 0 4 0.9 -0.7 1.3")
SMALL = ATOMS.format("", "block 0 2 0 2 0 2")  # 3.4 sigma wide, less than two cutoffs
CORNER = ATOMS.format("processors * 1 1", "block 0 16 0 4 0 4")
# All atoms are on the first of 4 ranks.
CORNER += "region rest block 4 INF INF INF INF INF\ndelete_atoms region rest\n"

MIXED = "pair_style lj/cut 2.5\npair_coeff 1 1 1.0 1.0\npair_coeff 2 2 0.7 1.1\n"
# {model: (system, LAMMPS's own pair style, names of the model's types)}
OWN = {
    "cut": (MELT, "pair_style lj/cut 2.5\npair_coeff * * 1 1\n", "X"),
    "shift": (MELT, "pair_style lj/cut 2.5\npair_coeff * * 1 1\npair_modify shift yes\n", "X"),
    "linear": (MELT, "pair_style lj/smooth/linear 2.5\npair_coeff * * 1 1\n", "X"),
    "sw": (SILICON, f"pair_style sw\npair_coeff * * {SW / 'Si.sw'} Si\n", "Si"),
    "tilted": (TILTED, MIXED, "B A"),
    "small": (SMALL, MIXED, "B A"),
    "corner": (CORNER, MIXED, "B A"),
}


class Limited(LennardJones):
    neighbors = 40


def write_wrong_models(folder):
    save(Limited(), folder / "limited.pt")
    torch.jit.save(torch.jit.script(torch.nn.Identity()), folder / "strange.pt")
    about = {"operators": "calcops::edge_force my_ops::f"}
    torch.jit.save(torch.jit.script(torch.nn.Identity()), folder / "other.pt", _extra_files=about)
    (folder / "broken.pt2").write_bytes(b"PK")
    with (
        zipfile.ZipFile(folder / "cut.pt2") as source,
        zipfile.ZipFile(folder / "foreign.pt2", "w") as copy,
    ):
        for item in source.infolist():
            content = source.read(item)
            content = content.replace(b'"AOTI_DEVICE_KEY": "cpu"', b'"AOTI_DEVICE_KEY": "cuda"')
            copy.writestr(item, content)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the folder of the models. Models of two types have them in another order than the
    systems."""
    folder = tmp_path_factory.mktemp("lammps")
    for tail in ("cut", "shift", "linear"):
        save(LennardJones(tail=tail), folder / f"{tail}.pt")
    mixture = LennardJones(epsilon=[0.7, 1.0], sigma=[1.1, 1.0], type_names=("A", "B"))
    for name in ("tilted", "small", "corner"):
        save(mixture, folder / f"{name}.pt")
    save(LennardJones(), folder / "cut.pt2", edge_order=True)  # like a package for a GPU
    save(StillingerWeber(SW / "Si.sw"), folder / "sw.pt")
    save(StillingerWeber(SW / "Si.sw"), folder / "sw.pt2")
    write_wrong_models(folder)
    return folder


@pytest.fixture(scope="module")
def lammps(models):
    return Lammps(models)


def pair(name, ending):
    """Return the lines of a pair style: of a model's file, or LAMMPS's own if `ending` is None."""
    _, own, names = OWN[name]
    if ending is None:
        return own
    return f"pair_style calcops {name}{ending}\npair_coeff * * {names}\n"


@pytest.fixture(scope="module")
def zero(lammps, models):
    """Return a function: zero(ranks)[name, ending] is (energy and six pressures, rows of atoms).

    One start of LAMMPS does `run 0` for all systems and styles.
    """

    @functools.cache
    def zero(ranks):
        script = ""
        keys = []
        for name, (system, _, _) in OWN.items():
            for ending in (None, ".pt", ".pt2"):
                if ending and not (models / (name + ending)).exists():
                    continue
                columns = "id x y z fx fy fz c_e c_s[*]"
                computes = ""
                if name != "sw" or ending:  # LAMMPS's sw has no centroid stress
                    computes = "compute c all centroid/stress/atom NULL virial\n"
                    columns += " c_c[*]"
                if name == "sw" and ending:
                    computes += "compute k all ke/atom\ncompute j all heat/flux k e c\n"
                    columns += " vx vy vz"
                keys.append((name, ending))
                script += f"""
clear
{system}
{pair(name, ending)}
compute e all pe/atom
compute s all stress/atom NULL virial
{computes}
dump atoms all custom 1 {name}{ending}.{ranks} {columns}
dump_modify atoms sort id format float %.17g
thermo_style custom pe pxx pyy pzz pxy pxz pyz vol {"c_j[*]" if name == "sw" and ending else ""}
thermo_modify norm no line one format float %.17g
run 0
"""
        rows = re.findall(r"^ +PotEng.*\n(.*)\n", lammps(script, ranks), re.MULTILINE)
        results = {}
        for (name, ending), row in zip(keys, rows, strict=True):
            atoms = np.loadtxt(models / f"{name}{ending}.{ranks}", skiprows=9)[:, 1:]
            results[name, ending] = np.array(row.split(), float), atoms
        return results

    return zero


# LAMMPS's constants of `units metal`: mass times velocity^2 as an energy, and energy over volume as
# a pressure.
MVV2E = 1.0364269e-4
NKTV2P = 1.6021765e6
MASS_SI = 28.06  # that of the example's system
CASES = [*((name, ".pt") for name in OWN), ("cut", ".pt2"), ("sw", ".pt2")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name, ending", CASES)
def test_forces_energy_and_pressure_are_those_of_lammps(zero, name, ending, ranks):
    totals, atoms = zero(ranks)[name, ending]
    expected_totals, expected_atoms = zero(ranks)[name, None]
    np.testing.assert_array_equal(atoms[:, :3], expected_atoms[:, :3])
    assert np.abs(expected_atoms[:, 3:6]).max() > 1
    assert difference(atoms[:, 3:6], expected_atoms[:, 3:6]) <= 1e-12
    energy, pressure = slice(0, 1), slice(1, 7)
    for columns in (energy, pressure):
        assert difference(totals[columns], expected_totals[columns]) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name, ending", [case for case in CASES if case[0] != "sw"])
def test_atoms_of_lennard_jones_have_the_energies_and_stresses_of_lammps(zero, name, ending, ranks):
    _, atoms = zero(ranks)[name, ending]
    _, expected = zero(ranks)[name, None]
    energy, stress, centroid_stress = slice(6, 7), slice(7, 13), slice(13, 22)
    for columns in (energy, stress, centroid_stress):
        assert difference(atoms[:, columns], expected[:, columns]) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 4])
def test_atoms_of_silicon_have_the_virial_and_the_heat_flux_of_the_definition(zero, ranks):
    """The force g_ij acts on j. Then W_j = sum_i g_ij Rij is the virial of atom j. The heat flux is
    J = sum_i e_i v_i + sum_ij Rij (g_ij . v_j) = sum_i e_i v_i + sum_j W_j^T v_j."""
    total, atoms = zero(ranks)["sw", ".pt2"]
    atoms = torch.from_numpy(atoms)
    x, energy, centroid, v = atoms[:, :3], atoms[:, 6], atoms[:, 13:22], atoms[:, 22:]
    model = StillingerWeber(SW / "Si.sw")
    crystal = Atoms(f"Si{len(x)}", positions=x.numpy(), cell=[3 * 5.431] * 3, pbc=True)
    _, energies, _, _, W = (result[0] for result in model(*inputs_of(crystal, model)))
    # LAMMPS's order of the nine components: (axis of Rij, axis of the force).
    order = [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)]
    expected = -NKTV2P * torch.stack([W[:, b, a] for a, b in order], -1)
    assert difference(centroid.numpy(), expected.numpy()) <= 1e-12
    assert difference(energy.numpy(), energies.numpy()) <= 1e-12
    # LAMMPS's sw gives each of three atoms a third of their energy, and not all to the central one.
    thirds = zero(ranks)["sw", None][1][:, 6]
    assert difference(energy.numpy(), thirds) > 0.1
    assert abs(energy.sum().item() / thirds.sum() - 1) <= 1e-12
    # W is not symmetric, so the test would fail with the components in another order.
    assert difference((W - W.mT).numpy(), W.numpy()) > 0.01
    flux = (energies + 0.5 * MVV2E * MASS_SI * v.square().sum(-1)) @ v
    flux += torch.einsum("jab,ja->b", W, v)
    assert difference(total[8:11], flux.numpy()) <= 1e-10


@pytest.mark.parametrize("name, ending, skin", [("linear", ".pt", 0.3), ("sw", ".pt2", 1.0)])
def test_500_steps_conserve_energy_as_well_as_lammps(lammps, name, ending, skin):
    def run(ending):
        script = f"{OWN[name][0]}{pair(name, ending)}neighbor {skin} bin\n"
        script += "neigh_modify delay 0 every 5\nfix nve all nve\n"
        return script + THERMO + "thermo 10\nrun 500\n"

    def drift(table):
        return np.polyfit(table[:, 0], table[:, 3], 1)[0] * 500

    expected, table = tables(lammps(run(None) + "clear\n" + run(ending), 2))
    assert len(expected) == 51
    energy = expected[:, 3]
    kinetic = (expected[:, 3] - expected[:, 2]).mean()
    assert np.ptp(energy) < 0.02 * kinetic
    assert abs(drift(table) - drift(expected)) <= 1e-7 * kinetic
    # Later rows differ, because the differences by rounding grow exponentially.
    np.testing.assert_allclose(table[:20], expected[:20], rtol=1e-9)


def test_a_run_continues_from_a_restart_file(lammps):
    style = pair("cut", ".pt2")
    run = style + THERMO + "fix nve all nve\nrun 20\n"
    script = MELT + run + "write_restart melt.restart\nrun 20\nclear\n"
    script += f"plugin load {lammps.plugin}\nread_restart melt.restart\n" + run
    _, straight, restarted = tables(lammps(script, 2))
    np.testing.assert_allclose(restarted[-1], straight[-1], rtol=1e-10)


def test_omp_num_threads_sets_the_number_of_threads_and_results_stay_the_same(lammps):
    """With OMP_NUM_THREADS larger by one, a run has one or two threads more. at::set_num_threads
    may add one that stays idle. A second OpenMP library would add more."""
    script = SILICON + pair("sw", ".pt2") + THERMO
    script += "run 1\nshell 'grep Threads: /proc/$PPID/status'\n"
    printed = {threads: lammps(script, 1, threads) for threads in (1, 2, 3)}
    count = {n: int(re.search(r"Threads:\s+(\d+)", text)[1]) for n, text in printed.items()}
    assert 1 <= count[2] - count[1] <= 2
    assert count[3] - count[2] == count[2] - count[1]
    np.testing.assert_allclose(tables(printed[2])[0], tables(printed[1])[0], rtol=1e-12)


def test_a_float32_model_gives_the_energy_to_1e_5(lammps, models, zero):
    save(LennardJones(), models / "single.pt", dtype=torch.float32)
    script = MELT + "pair_style calcops single.pt\npair_coeff * * X\n" + THERMO + "run 0\n"
    energy = tables(lammps(script))[0][0, 2]
    (expected, *_), _ = zero(1)["cut", None]
    assert energy == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ending", [".pt", ".pt2"])
def test_a_gpu_gives_the_forces_of_lammps(lammps, models, zero, ending, gpu):
    save(LennardJones(), models / f"gpu{ending}", device=gpu)
    dump = (
        f"dump atoms all custom 1 gpu{ending}.1 id fx fy fz\n"
        "dump_modify atoms sort id format float %.17g\n"
    )
    lammps(MELT + f"pair_style calcops gpu{ending}\npair_coeff * * X\n" + dump + "run 0\n")
    forces = np.loadtxt(models / f"gpu{ending}.1", skiprows=9)[:, 1:]
    _, expected = zero(1)["cut", None]
    assert difference(forces, expected[:, 3:6]) <= 1e-12


# {model and names of types, or less: the reason}
REFUSED = {
    "limited.pt\npair_coeff * * X": r"at most 40 neighbours.*, got \d\d within",
    "cut.pt\npair_coeff * * Ar": r"that the model has \(X\), got Ar",
    "cut.pt\npair_coeff * * X X": r"expected pair_coeff \* \* and 1 names",
    "absent.pt2": "absent.pt2: cannot be read",
    "in.test": "ends in .pt2 or .pt",
    "strange.pt": "expected the metadata cutoff, got none",
    "other.pt": "operators of calcops_jit and calcops.ops, got one that calls my_ops::f",
    "broken.pt2": "broken.pt2: ",
    "": "expected a model's file, got none",
}
if not torch.cuda.is_available():
    REFUSED["foreign.pt2"] = "foreign.pt2: made for CUDA, but no GPU is visible"


def assert_refuses(lammps, script, message):
    printed = lammps(script + "\nrun 0\n", fails=True)
    assert re.search(r"ERROR.*Pair style calcops: .*" + message, printed), printed


@pytest.mark.parametrize("words, message", REFUSED.items())
def test_models_that_cannot_run_are_refused_with_the_reason(lammps, words, message):
    assert_refuses(lammps, MELT + "pair_style calcops " + words, message)


def test_scripts_that_cannot_run_are_refused_with_the_reason(lammps):
    assert_refuses(lammps, "newton off\n" + MELT + pair("cut", ".pt"), "expected newton on")
    in_metal = MELT.replace("lj", "metal", 1) + pair("cut", ".pt")
    assert_refuses(lammps, in_metal, "expected units lj.*, got metal")


def example(*arguments):
    command = [HOME / "bin" / "mpiexec", "-n", "2", HOME / "bin" / "lmp"]
    command += ["-log", "none", "-in", ROOT / "examples/train_potential/in.silicon"]
    environment = os.environ | {"LAMMPS_POTENTIALS": str(SHARE / "potentials")}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)


def test_the_example_prints_the_table_of_lammps_and_of_the_readme(lammps, models):
    options = ["-var", "plugin", lammps.plugin, "-var", "model", models / "sw.pt2"]
    (table,) = tables(example(*options).stdout)
    (expected,) = tables(example().stdout)
    np.testing.assert_array_equal(table[:, :5], expected)
    (shown,) = tables((FOLDER / "README.md").read_text())
    np.testing.assert_allclose(shown[:, :5], table[:, :5], rtol=1e-6)


def test_without_the_plugin_the_example_ends_with_an_error():
    result = example("-var", "plugin", "absent.so", "-var", "model", "absent.pt2")
    assert result.returncode
    assert "Open of file absent.so failed" in result.stdout
    assert "ERROR: Unrecognized pair style 'calcops'" in result.stdout
