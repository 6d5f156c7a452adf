"""calcops/lammps: the first model of a committee moves the atoms, and LAMMPS gets the deviations
of all models."""

import re

import numpy as np
import pytest
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from lammps_plugin import MELT, Lammps, difference, tables

pytestmark = pytest.mark.long  # a foreign program

MODELS = {"a": (1.0, 1.0), "b": (1.1, 1.0), "c": (0.95, 1.02)}  # epsilon and sigma
ALONE = "pair_style calcops {}\npair_coeff * * X X\n"
HYBRID = (
    "pair_style hybrid calcops {} lj/cut 2.5\npair_coeff * * calcops X NULL\n"
    "pair_coeff * 2 lj/cut 0.9 1.05\n"
)
COMMITTEE = ALONE.format("a.pt b.pt c.pt")
SYSTEM = re.sub(r"(mass +)1", r"\1*", MELT)
SYSTEM = re.sub(r"(create_box +)1", r"\1 2", SYSTEM)
SYSTEM += "set group all type/fraction 2 0.3 4711\n"
DEVIATION = "compute devi all pair calcops\nfix atoms all pair 1 calcops devi_f 1\n"
THERMO = "thermo_style custom step pe {}\nthermo_modify norm no format float %.17g\n"
COLUMNS = " ".join(f"c_devi[{i}]" for i in range(6, 12))


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    for name, parameters in MODELS.items():
        save(LennardJones(*parameters), folder / f"{name}.pt")
    save(LennardJones(cutoff=2.0), folder / "short.pt")
    save(LennardJones(type_names=("Y",)), folder / "named.pt")
    return Lammps(folder)


def dump(name, columns):
    return (
        f"dump atoms all custom 1 {name} id {columns}\n"
        "dump_modify atoms sort id format float %.17g\n"
    )


def forces_and_virials(lammps, ranks=1, style=ALONE):
    """Return the forces [models, N, 3] and virials [models, 9] of each model alone."""
    forces = []
    virials = []
    for name in MODELS:
        script = SYSTEM + style.format(f"{name}.pt") + dump("alone", "fx fy fz")
        script += "compute w all pressure NULL virial\n" + THERMO.format("vol c_w[*]") + "run 0\n"
        _, _, volume, *w = tables(lammps(script, ranks))[0][0]
        forces.append(np.loadtxt(lammps.folder / "alone", skiprows=9)[:, 1:])
        xx, yy, zz, xy, xz, yz = np.array(w) * volume
        virials.append([xx, xy, xz, xy, yy, yz, xz, yz, zz])
    return np.array(forces), np.array(virials)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("style", [ALONE, HYBRID], ids=["alone", "hybrid"])
def test_the_deviations_are_those_of_the_definition(lammps, style, ranks):
    """In a hybrid style, the forces of the other style are the same for all models."""
    forces, virials = forces_and_virials(lammps, ranks, style)
    script = SYSTEM + style.format("a.pt b.pt c.pt") + DEVIATION
    script += dump("devi", "type fx fy fz f_atoms") + THERMO.format(COLUMNS) + "run 0\n"
    _, _, *deviations = tables(lammps(script, ranks))[0][0]
    type, *force, deviation = np.loadtxt(lammps.folder / "devi", skiprows=9)[:, 1:].T
    assert 0.2 < (type == 2).mean() < 0.4
    is_of_models = (type == 1) | (style == ALONE)
    of_atoms = np.linalg.norm(np.std(forces, axis=0), axis=-1)[is_of_models]
    of_virial = np.std(virials, axis=0) / is_of_models.sum()
    assert of_atoms.min() < 0.5 * of_atoms.max()
    assert difference(np.array(force).T, forces[0]) <= 1e-12
    assert difference(deviation[is_of_models], of_atoms) <= 1e-12
    assert not deviation[~is_of_models].any()
    expected = [of_virial.max(), of_virial.min(), np.linalg.norm(of_virial) / 3]
    np.testing.assert_allclose(deviations[:3], expected, rtol=1e-9)
    expected = [of_atoms.max(), of_atoms.min(), of_atoms.mean()]
    np.testing.assert_allclose(deviations[3:], expected, rtol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_model_moves_the_atoms_and_a_fix_gets_the_deviations_of_each_step(lammps, ranks):
    run = "velocity all create 1.44 87287 loop geom\nfix nve all nve\nthermo 5\nrun 10\n"
    alone = tables(lammps(SYSTEM + ALONE.format("a.pt") + THERMO.format("etotal") + run, ranks))[0]
    script = SYSTEM + COMMITTEE + DEVIATION + dump("devi", "f_atoms")
    table = tables(lammps(script + THERMO.format("etotal c_devi[9]") + run, ranks))[0]
    np.testing.assert_array_equal(table[:, :3], alone)
    deviations = re.findall(r"^\d+ (\S+) *$", (lammps.folder / "devi").read_text(), re.MULTILINE)
    largest = np.array(deviations, float).reshape(11, -1).max(1)  # of the 11 steps
    assert len(np.unique(largest)) == 11
    np.testing.assert_array_equal(largest[::5], table[:, 3])


def test_fix_halt_ends_a_run_when_the_deviation_exceeds_a_limit(lammps):
    script = SYSTEM + COMMITTEE + DEVIATION.partition("fix")[0] + "variable devi equal c_devi[9]\n"
    script += (
        "fix nve all nve\nvelocity all create 20 87287\n"
        "fix stop all halt 1 v_devi > LIMIT error soft\n"
    )
    script += THERMO.format("v_devi") + "run 100\n"
    start = tables(lammps(script.replace("LIMIT", "1e9")))[0]
    first, last = start[:, 2]
    assert first < last
    limit = (first + last) / 2
    printed = lammps(script.replace("LIMIT", str(limit)))
    halt = re.search(r"halt condition .* met on step (\d+) with value (\S+)", printed)
    assert 0 < int(halt[1]) < 100
    assert float(halt[2]) > limit


@pytest.mark.parametrize(
    "files, message",
    [
        ("a.pt short.pt", "short.pt: expected the cutoff of a.pt, got another"),
        ("a.pt b.pt named.pt", "named.pt: expected the type_names of a.pt, got another"),
        ("a.pt absent.pt", "absent.pt: cannot be read"),
    ],
)
def test_models_with_different_cutoffs_or_types_are_refused(lammps, files, message):
    script = SYSTEM + f"pair_style calcops {files}\npair_coeff * * X X\nrun 0\n"
    printed = lammps(script, fails=True)
    assert f"Pair style calcops: {message}" in re.sub(r"\s+", " ", printed)


def test_one_model_has_no_deviation(lammps):
    script = SYSTEM + ALONE.format("a.pt") + "fix atoms all pair 1 calcops devi_f 1\nrun 0\n"
    assert re.search("ERROR.* cannot extract .*devi_f", lammps(script, fails=True))
