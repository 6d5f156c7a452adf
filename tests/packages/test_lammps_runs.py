"""calcops/lammps: a model gets the atoms and types that LAMMPS means, also if fixes or commands change
them between two lists or two runs."""

import re

import pytest
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.potential import Potential
from lammps_plugin import THERMO, Lammps, difference, tables

pytestmark = pytest.mark.long  # a foreign program

LONE = -0.8  # the energy of an atom without neighbours


class Lone(Potential):
    """A soft repulsion of this strength, and the energy LONE for each atom."""

    def __init__(self, strength, type_names, layers=1):
        super().__init__(2.5, "lj", type_names, layers)
        self.strength = strength

    def atom_energies(self, types, list_neigh, Ri):
        inside = (1 - Ri[..., 0] / self.cutoff).clamp(min=0.0)
        return self.strength * inside.square().sum(-1) - 0.8  # LONE


TWO = {"epsilon": [1.0, 0.7], "sigma": [1.0, 1.1], "type_names": ("A", "B")}
SWAPPED = {"epsilon": [0.7, 1.0], "sigma": [1.1, 1.0], "type_names": ("B", "A")}
OWN = "pair_style lj/cut 2.5\npair_coeff 1 1 1.0 1.0\npair_coeff 2 2 0.7 1.1\n"
OURS = "pair_style calcops two.pt\npair_coeff * * A B\n"
HYBRID = """pair_style hybrid calcops two.pt lj/cut 2.5
pair_coeff * * calcops A NULL
pair_coeff 1*2 2 lj/cut 0.8 1.1
"""
FIRST = "group first type 1\n"
HIDDEN = "neigh_modify exclude hides pairs from the model"


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    save(LennardJones(**TWO), folder / "two.pt")
    save(LennardJones(**SWAPPED), folder / "swapped.pt")
    save(Lone(1.0, ["A", "B"]), folder / "lone.pt")
    save(Lone(0.0, ["X"]), folder / "gas.pt")
    save(Lone(0.0, ["X"], layers=2), folder / "gas2.pt")
    return Lammps(folder)


def crystal(cells):
    """Return commands that make a displaced crystal of two types."""
    return f"""units lj
lattice fcc 0.8442
region box block 0 {cells} 0 {cells} 0 {cells}
create_box 2 box
create_atoms 1 box
set group all type/fraction 2 0.4 4711
mass * 1.0
displace_atoms all random 0.1 0.1 0.1 4711
velocity all create 1.0 4711
group second type 2
"""


# ---- atoms that are left out --------------------------------------------------------------------

GAS = """units lj
atom_style molecular
atom_modify map yes
region box block 0 12 0 12 0 12
create_box 1 box
mass 1 1.0
comm_modify cutoff 6.0
create_atoms 1 random 100 8 NULL
set group all mol 0
molecule dimer dimer.txt
"""
DIMER = "# dimer\n\n2 atoms\n\nCoords\n\n1 0 0 0\n2 1 0 0\n\nTypes\n\n1 1\n2 1\n"


@pytest.mark.parametrize("model, ranks", [("gas.pt", 1), ("gas.pt", 2), ("gas2.pt", 1)])
@pytest.mark.parametrize("molecules", [False, True])
def test_fix_gcmc_counts_no_energy_of_atoms_that_it_deletes(lammps, model, ranks, molecules):
    """Without interactions, both styles have the same energies but for LONE in each atom. With LONE
    in the chemical potential, or in the energy of a molecule, they accept the same moves."""
    (lammps.folder / "dimer.txt").write_text(DIMER)

    def numbers(style, lone):
        fix = f"fix gas all gcmc 1 10 3 1 4711 1.0 {-2.8 + lone} 0.5 full_energy\n"
        if molecules:
            fix = "delete_atoms group all\nfix gas all gcmc 1 10 0 0 4711 1.0 -3.5 0.5 full_energy "
            fix += f"mol dimer intra_energy {2 * lone}\n"
        thermo = "thermo 2\nthermo_style custom step atoms pe\nthermo_modify norm no\n"
        return tables(lammps(GAS + style + fix + thermo + "run 10\n", ranks))[0]

    expected = numbers("pair_style zero 2.5\npair_coeff * *\n", 0)
    found = numbers(f"pair_style calcops {model}\npair_coeff * * X\n", LONE)
    assert len(set(expected[:, 1])) > 2, "the fix accepts no move"
    assert found[:, 1].tolist() == expected[:, 1].tolist()
    assert found[:, 2] == pytest.approx(LONE * found[:, 1])


@pytest.mark.parametrize(
    "exclude", ["group second all", "group all second", "type 2 1 exclude type 2 2"]
)
def test_atoms_that_are_excluded_from_all_pairs_are_left_out(lammps, exclude):
    style = "pair_style calcops lone.pt two.pt\npair_coeff * * A B\ncompute devi all pair calcops\n"
    style += "compute virial all pressure NULL virial\n"
    thermo = "thermo_style custom pe c_virial c_devi[9] c_devi[10] c_devi[11] c_devi[6]\n"
    thermo += "thermo_modify norm no format float %.17g\n"
    script = crystal(3) + style + thermo
    rows = []
    for command in (f"neigh_modify exclude {exclude}", "delete_atoms group second"):
        printed = lammps(script + command + "\nrun 0\n")
        assert HIDDEN not in printed
        rows.append(re.search(r"^ +PotEng.*\n(.*)\n", printed, re.MULTILINE)[1].split())
    assert [float(word) for word in rows[0]] == pytest.approx([float(word) for word in rows[1]])


@pytest.mark.parametrize("exclude", ["group second second", "type 1 2"])
def test_hidden_pairs_are_missing_as_in_lammps_and_warned_of_in_the_same_run(lammps, exclude):
    command = f"neigh_modify exclude {exclude}\n"
    (expected,) = tables(lammps(crystal(3) + OWN + THERMO + command + "run 0\n"))
    printed = lammps(crystal(3) + OURS + THERMO + command + "run 0\n")
    assert difference(tables(printed)[0], expected) <= 1e-12
    assert printed.count(HIDDEN) == 1


# ---- types that change --------------------------------------------------------------------------


def test_fix_sgcmc_changes_types_between_two_lists(lammps):
    script = crystal(6) + "{}" + THERMO + "neigh_modify delay 0 every 9 check no\n"
    script += "fix swaps all sgcmc 2 0.2 1.0 0.0\nrun 6\n"
    own = "pair_style lj/cut 2.0\npair_coeff 1 1 1.0 1.0\npair_coeff 2 2 0.7 1.1\n"
    save(LennardJones(**TWO, cutoff=2.0), lammps.folder / "short.pt")
    ours = OURS.replace("two.pt", "short.pt")
    expected, found = (tables(lammps(script.format(style)))[0] for style in (own, ours))
    assert difference(found, expected) <= 1e-10


def test_a_type_that_the_model_does_not_get_in_an_old_list_is_an_error(lammps):
    script = crystal(3) + HYBRID + "run 0\nset group all type 2\nrun 1 pre no\n"
    printed = lammps(script, fails=True)
    assert "since the model does not get type 2" in re.sub(r"\s+", " ", printed)


# ---- another model between two runs -------------------------------------------------------------


def test_another_model_needs_pair_coeff_and_then_gives_the_same_energy(lammps):
    """The models are the same but for the order of their types."""
    run = THERMO + "run 0\n"
    other = OURS.replace("two.pt", "swapped.pt")
    script = crystal(3) + OURS + run + other + run + "pair_style none\n" + OURS + run
    expected, *found = tables(lammps(script))
    assert len(found) == 2
    for table in found:
        assert difference(table, expected) <= 1e-12
    for again in ("swapped.pt", "two.pt"):
        script = crystal(3) + OURS + run + f"pair_style calcops {again}\n" + run
        assert "All pair coeffs are not set" in lammps(script, fails=True)


@pytest.mark.parametrize("command", ["pair_style calcops swapped.pt", "pair_coeff * * B A"])
def test_a_run_with_pre_no_is_an_error_after_the_types_have_changed(lammps, command):
    script = crystal(3) + OURS + f"run 0\n{command}\nrun 1 pre no\n"
    assert "a run without `pre no`" in re.sub(r"\s+", " ", lammps(script, fails=True))


# ---- commands before a run with `pre no` --------------------------------------------------------


@pytest.mark.parametrize("exclude", ["group second all", "type 1 1", "molecule/intra second"])
def test_an_exclusion_before_a_run_with_pre_no_counts_from_the_next_run(lammps, exclude):
    def totals(style):
        script = (
            crystal(3).replace("units lj\n", "units lj\natom_style molecular\n") + style + THERMO
        )
        script += "neigh_modify delay 0 every 1 check no\nfix move all nve\nrun 2\n"
        for command in (exclude, "group second second"):
            script += f"neigh_modify exclude {command}\nrun 2 pre no\n"
        return tables(lammps(script + "run 0\n"))

    own = totals("comm_modify cutoff 2.9\n" + OWN)
    ours = totals("comm_modify cutoff 2.9\n" + OURS)
    for found, expected in zip(ours, own, strict=True):
        assert difference(found, expected) <= 1e-10


@pytest.mark.parametrize("ranks", [1, 2])
def test_ghosts_have_the_types_of_a_set_command_in_a_run_with_pre_no(lammps, ranks):
    script = (
        crystal(6)
        + OURS
        + THERMO
        + "fix move all nve/noforce\nrun 0\nset group second type 1\nrun 2"
    )
    expected, found = (tables(lammps(script + pre + "\n", ranks))[1] for pre in ("", " pre no"))
    assert difference(found[-1], expected[-1]) <= 1e-10


def test_a_type_that_the_model_gets_only_after_the_old_list_is_an_error(lammps):
    script = crystal(3) + HYBRID + "run 0\nset atom 1 type 1\nset atom 2 type 1\nrun 1 pre no\n"
    assert "have types of the model, got" in re.sub(r"\s+", " ", lammps(script, fails=True))


def test_a_list_that_was_made_while_the_model_did_not_compute_is_taken(lammps):
    script = crystal(6) + "pair_style hybrid/overlay calcops two.pt zero 2.5\n"
    script += "pair_coeff * * calcops A B\npair_coeff * * zero\n" + THERMO
    script += "neigh_modify delay 0 every 2 check no\nfix move all nve/noforce\nrun 0\n"
    script += "pair_modify pair calcops compute no\nvelocity all scale 40.0\nrun 8\n"
    script += "pair_modify pair calcops compute yes\nrun 1 pre no\nrun 0\n"
    *_, found, expected = tables(lammps(script))
    assert difference(found[-1], expected[-1]) <= 1e-10


# ---- a hybrid style -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exclude", ["group second second", "group first second", "molecule/intra second", "type 2 2"]
)
def test_exclusions_that_leave_the_models_pairs_are_not_warned_of(lammps, exclude):
    script = crystal(3).replace("units lj\n", "units lj\natom_style molecular\n") + FIRST + HYBRID
    printed = lammps(script + f"neigh_modify exclude {exclude}\nrun 0\n")
    assert HIDDEN not in printed


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("exclude", ["group first first", "group all first", "type 1 1"])
def test_a_group_with_all_atoms_of_the_model_is_excluded_like_their_types(lammps, exclude, ranks):
    script = crystal(3) + FIRST + HYBRID.replace("two.pt", "lone.pt")
    script += "compute model all pair calcops\nthermo_style custom step c_model\n"
    printed = lammps(script + f"neigh_modify exclude {exclude}\nrun 0\n", ranks)
    assert HIDDEN not in printed
    assert tables(printed)[0][:, 1] == 0


def test_a_group_that_gets_all_atoms_of_the_model_or_not_in_a_run_is_an_error(lammps):
    script = crystal(3) + FIRST + HYBRID + "neigh_modify exclude group first first\n"
    script += "fix gas all deposit 1 1 1 4711 region box near 0.2\n"
    assert "Exclude types" in re.sub(r"\s+", " ", lammps(script + "run 2\n", fails=True))


def test_pairs_that_a_later_pair_coeff_takes_from_the_model_are_an_error(lammps):
    hybrid = "pair_style {} calcops two.pt lj/cut 2.5\npair_coeff * * calcops A B\n"
    script = crystal(3) + hybrid + "pair_coeff 1 {} lj/cut 0.8 1.1\nrun 0\n"
    for second in (1, 2):
        printed = lammps(script.format("hybrid", second), fails=True)
        assert f"gives types 1 and {second} to another style" in re.sub(r"\s+", " ", printed)
    lammps(script.format("hybrid/overlay", 1))
