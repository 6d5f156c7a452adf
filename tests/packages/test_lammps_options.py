"""calcops/lammps: options of LAMMPS act on a model as on LAMMPS's own styles, or are refused. Forces
that are not finite end the run. Structures unlike those of the training are warned of, once."""

import re

import numpy as np
import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.potential import Potential
from calcops.potentials.stillinger_weber import StillingerWeber
from lammps_plugin import MELT, SHAKE, SW, THERMO, Lammps, difference, tables

pytest.importorskip("scipy")

from calcops.deepmd.deep_potential import DeepPotential  # noqa: E402
from test_train import arrays  # noqa: E402

pytestmark = pytest.mark.long  # a foreign program

OWN = "pair_style lj/cut 2.5\npair_coeff * * 1 1\n"
OURS = "pair_style calcops lj.pt\npair_coeff * * X\n"
ZERO = THERMO + "run 0\n"


class Root(Potential):
    """A finite energy, whose derivative is NaN for pairs nearer than 0.6."""

    def __init__(self, layers=1):
        super().__init__(2.5, "lj", ["X"], layers)

    def atom_energies(self, types, list_neigh, Ri):
        r = Ri[..., 0]
        inside = (1 - r / self.cutoff).clamp(min=0.0).square()
        return (inside * (1 + torch.where(r > 0.6, (r - 0.6).sqrt(), 0.0))).sum(-1)


def deep(sel=(9, 7), shortest=((1.5, 2.0), (2.0, 3.0))):
    more = {"shortest": np.array(shortest)}
    return DeepPotential(arrays(sel) | more, ["Cu", "Au"]).requires_grad_(False)


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    save(LennardJones(), folder / "lj.pt")
    save(LennardJones(0.7, 1.1), folder / "other.pt")
    save(LennardJones(), folder / "single.pt", dtype=torch.float32)
    save(StillingerWeber(SW / "Si.sw"), folder / "sw.pt")
    save(Root(), folder / "root.pt")
    save(Root(layers=2), folder / "root2.pt")
    save(Root(), folder / "root32.pt", dtype=torch.float32)
    save(deep(), folder / "deep.pt")
    save(deep((5, 2)), folder / "few.pt")
    save(deep(shortest=((1.9, 2.0), (2.0, 3.0))), folder / "longer.pt")
    return Lammps(folder)


def refusal(lammps, script, ranks=1):
    """Return the error message of the pair style."""
    printed = lammps(script, ranks, fails=True)
    return re.search(r"ERROR.*(Pair style calcops: .*)", printed)[1]


# The option, and the column of the thermo output that it changes: pressure or energy.
@pytest.mark.parametrize("option, column", [("tail", 4), ("shift", 2)])
def test_pair_modify_tail_or_shift_is_refused(lammps, option, column):
    plain, with_option = tables(lammps(f"{MELT}{OWN}{ZERO}pair_modify {option} yes\n{ZERO}"))
    assert abs(with_option[0, column] / plain[0, column] - 1) > 0.02, "the option has no effect"
    script = f"{MELT}{OURS}pair_modify {option} yes\nrun 0\n"
    assert f"expected pair_modify {option} no" in refusal(lammps, script)
    hybrid = (
        "pair_style hybrid/overlay calcops lj.pt zero 2.5\npair_coeff * * calcops X\n"
        "pair_coeff * * zero\n"
    )
    script = MELT + hybrid + f"pair_modify pair calcops {option} yes\nrun 0\n"
    assert f"expected pair_modify {option} no" in refusal(lammps, script)
    table = tables(lammps(f"{MELT}{OURS}pair_modify {option} no\n{ZERO}"))[0]
    assert difference(table, plain) <= 1e-12


def test_pair_modify_of_coefficients_is_warned_of_unless_another_style_may_use_it(lammps):
    script = MELT + OURS + "pair_modify mix arithmetic table 0 compute yes nofdotr\nrun 0\n"
    printed = lammps(script, ranks=2)
    assert re.findall("WARNING: .*pair_modify (.*) has no effect", printed) == ["mix", "table"]
    hybrid = "pair_style hybrid/overlay calcops lj.pt lj/cut 2.5\npair_coeff * * calcops X\n"
    hybrid += "pair_coeff * * lj/cut 1 1\npair_modify mix arithmetic\nrun 0\n"
    assert "has no effect" not in lammps(MELT + hybrid)


# A melt in whose left half neighbouring atoms are bonded.
BONDED = re.sub(r"atom_style.*", "atom_style bond", MELT)
BONDED = re.sub(
    r"create_box.*",
    "create_box 2 box bond/types 1 extra/bond/per/atom 12 extra/special/per/atom 200\n"
    "region left block INF 2 INF INF INF INF",
    BONDED,
)
BONDED = re.sub(r"mass.*", "mass * 1.0\nset region left type 2\ngroup left type 2", BONDED)
BONDS = "bond_style zero\nbond_coeff *\ncomm_modify cutoff 5.0\n"
BONDS += "pair_style zero 2.5\npair_coeff * *\ncreate_bonds many left left 1 0.1 1.3\n"
OURS_FOR_BOTH_TYPES = OURS.replace("X\n", "X X\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_bonded_atoms_are_refused_unless_special_bonds_gives_them_full_weight(lammps, ranks):
    script = BONDED + BONDS + OURS_FOR_BOTH_TYPES
    message = refusal(lammps, script + "special_bonds lj/coul 0 0 0\nrun 0\n", ranks)
    assert "expected special_bonds lj 1 1 1 for bonded atoms" in message
    message = refusal(lammps, script + "special_bonds lj/coul 1 0.5 1\nrun 0\n", ranks)
    assert "got 1 0.5 1" in message

    weighted = f"special_bonds lj/coul 1 0.5 1\n{ZERO}special_bonds lj/coul 0 0 0\n{ZERO}"
    full = f"special_bonds lj 1 1 1 coul 0 0 0.5\n{ZERO}"
    own = tables(lammps(f"{BONDED}{BONDS}{OWN}{full}{weighted}", ranks))
    assert len({round(table[0, 2], 3) for table in own}) == 3, "the weights have no effect"
    assert difference(tables(lammps(script + full, ranks))[0], own[0]) <= 1e-12


def test_special_bonds_has_no_effect_without_bonds(lammps):
    expected, table = (
        tables(lammps(f"{BONDED}{style}special_bonds lj/coul 0 0 0\n{ZERO}"))[0]
        for style in (OWN, OURS_FOR_BOTH_TYPES)
    )
    assert difference(table, expected) <= 1e-12


def test_bonds_between_atoms_of_another_style_may_have_any_weight(lammps):
    weights = "special_bonds lj/coul 0 0.5 1\n"
    hybrid = "pair_style hybrid calcops lj.pt lj/cut 2.5\npair_coeff * * calcops X NULL\n"
    hybrid += "pair_coeff 1 2 lj/cut 1 1\npair_coeff 2 2 lj/cut 1 1\n"
    expected, table = (
        tables(lammps(BONDED + BONDS + style + weights + ZERO))[0] for style in (OWN, hybrid)
    )
    assert difference(table, expected) <= 1e-12


def test_pair_modify_special_of_a_hybrid_style_gives_the_model_full_weights(lammps):
    """The general weights are 1e-50: with 0, LAMMPS would leave the pairs out of the list."""
    own = (
        "pair_style hybrid/overlay lj/cut 2.5 lj/cut 2.5\n"
        "pair_coeff * * lj/cut 1 1 1\npair_coeff * * lj/cut 2 1 1\n"
    )
    ours = (
        "pair_style hybrid/overlay calcops lj.pt lj/cut 2.5\n"
        "pair_coeff * * calcops X X\npair_coeff * * lj/cut 1 1\n"
    )
    weights = "special_bonds lj/coul 1e-50 1e-50 1\n"
    special = "special lj/coul 1 1 1\n"
    own += weights + "pair_modify pair lj/cut 1 " + special
    ours += weights + "pair_modify pair calcops " + special
    expected, table = (tables(lammps(BONDED + BONDS + style + ZERO))[0] for style in (own, ours))
    assert difference(table, expected) <= 1e-12


TWO = (
    "units metal\nlattice diamond 5.431\nregion box block 0 3 0 3 0 3\n"
    "create_box 2 box\ncreate_atoms 1 box\n"
)
TWO += "set group all type/fraction 2 0.3 4711\nmass * 28.0\n" + SHAKE
SW_AND_LJ = (
    "{style}\npair_coeff * * {name} Si NULL\npair_coeff 1 2 lj/cut 0.01 2.2\n"
    "pair_coeff 2 2 lj/cut 0.02 2.1\n"
)
# {name: (system, styles of LAMMPS alone, styles with models)}
HYBRIDS = {
    "sw": (
        TWO,
        SW_AND_LJ.format(style="pair_style hybrid sw lj/cut 5", name=f"sw {SW / 'Si.sw'}"),
        SW_AND_LJ.format(style="pair_style hybrid calcops sw.pt lj/cut 5", name="calcops"),
    ),
    "two models": (
        BONDED,
        (
            "pair_style lj/cut 2.5\npair_coeff 1 1 1 1\npair_coeff 2 2 0.7 1.1\n"
            "pair_coeff 1 2 0.9 1.05\n"
        ),
        "pair_style hybrid calcops lj.pt calcops other.pt lj/cut 2.5\n"
        "pair_coeff * * calcops 1 X NULL\n"
        "pair_coeff * * calcops 2 NULL X\npair_coeff 1 2 lj/cut 0.9 1.05\n",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_for_some_types_of_a_hybrid_gives_what_lammps_gives(lammps, name, ranks):
    system, *styles = HYBRIDS[name]
    results = []
    for i, style in enumerate(styles):
        dump = f"dump atoms all custom 1 hybrid.{i} id type fx fy fz c_e c_s[*]\n"
        dump += "dump_modify atoms sort id format float %.17g\n"
        computes = "compute e all pe/atom\ncompute s all stress/atom NULL virial\n"
        thermo = tables(lammps(system + style + computes + dump + ZERO, ranks))[0]
        results.append((thermo, np.loadtxt(lammps.folder / f"hybrid.{i}", skiprows=9)))
    (expected, expected_atoms), (table, atoms) = results
    assert 0.1 < (expected_atoms[:, 1] == 2).mean() < 0.9
    assert difference(table, expected) <= 1e-12
    # LAMMPS's sw divides a three-body term among its atoms in another way. So for sw, the energies
    # and stresses of single atoms (the last columns) are not compared.
    columns = slice(5) if name == "sw" else slice(None)
    for type in (1, 2):
        rows = atoms[:, 1] == type
        assert difference(atoms[rows, columns], expected_atoms[rows, columns]) <= 1e-12


def test_null_is_refused_outside_a_hybrid_style(lammps):
    printed = lammps(TWO + "pair_style calcops sw.pt\npair_coeff * * Si NULL\nrun 0\n", fails=True)
    assert "ERROR: All pair coeffs are not set" in printed


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["lj.pt", "single.pt", "indexed.pt2"])
def test_atoms_at_the_same_place_are_an_error_that_names_them(lammps, model, ranks):
    if model == "indexed.pt2":
        save(LennardJones(), lammps.folder / model, edge_order=True)
    lattice = MELT.replace(SHAKE, "")
    second = "create_atoms 1 single 0 0 0\n"  # at the place of atom 1, on a border between ranks
    own = lammps(lattice + OWN + second + ZERO, ranks, fails=None)
    assert re.search("nan|inf|Non-numeric", own), "LAMMPS's own styles have a finite energy"
    script = lattice + OURS.replace("lj.pt", model) + second + "run 0\n"
    printed = refusal(lammps, script, ranks)
    if model == "indexed.pt2":
        assert re.search("expected a finite energy of the model, got -?(nan|inf)", printed)
    else:
        assert re.search(
            r"atoms apart from each other, got (1 and 501|501 and 1) at the same place", printed
        )


def test_pytorch_does_not_call_functions_of_lammps(lammps):
    """LAMMPS contains the reference BLAS, which is ten times as slow as PyTorch's."""
    log = lammps.folder / "bindings"
    lammps(MELT + OURS + "run 0\n", LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log))
    texts = [path.read_text() for path in lammps.folder.glob("bindings.*")]
    (text,) = [text for text in texts if "libpair_calcops.so" in text]  # of lmp, not of mpiexec
    pattern = r"binding file (\S+) \[0\] to (\S+) \[0\]: normal symbol `(\S+)'"
    bindings = re.findall(pattern, text)  # (user, provider, symbol)
    to_lammps = [
        (user, symbol) for user, provider, symbol in bindings if "/liblammps.so" in provider
    ]
    assert any(user.endswith("libpair_calcops.so") for user, _ in to_lammps)
    for user, symbol in to_lammps:
        if re.search(r"/torch/lib/|calcops/.*\.so|/model/", user):
            # All libraries share some constants of the C++ library, which are empty objects.
            assert re.match("_ZSt|_ZZNSt", symbol), (user, symbol)
    blas = [(user, provider) for user, provider, symbol in bindings if symbol == "dgemm_"]
    assert any(
        "libtorch_cpu.so" in user and "libtorch_cpu.so" in provider for user, provider in blas
    )


# ---- forces that are not finite ------------------------------------------------------------------

WITH_GHOSTS = "pair_style calcops {}\npair_coeff * * X\ncomm_modify cutoff 5.3\n"


@pytest.mark.parametrize("files", ["root.pt", "root2.pt", "root32.pt", "lj.pt root.pt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_forces_that_are_not_finite_are_refused_with_the_atom(lammps, files, ranks):
    lammps(MELT + WITH_GHOSTS.format(files) + "run 0\n", ranks)
    close = MELT + "create_atoms 1 single 1.5 1.05 1.05 units box\n"
    printed = lammps(
        close
        + "create_atoms 1 single 1.5 1.05 1.4 units box\n"
        + WITH_GHOSTS.format(files)
        + "run 0\n",
        ranks,
        fails=True,
    )
    message = (
        r"ERROR.*Pair style calcops: expected finite forces of the model, got -?nan on atom \d+"
    )
    assert re.search(message, re.sub(r"\s+", " ", printed)), printed


# ---- structures unlike those of the training ----------------------------------------------------

BOX = """units metal
atom_style atomic
boundary f f f
region box block -9 9 -9 9 -9 9
create_box 2 box
mass * 60
"""
STYLE = "pair_style calcops {}\npair_coeff * * Cu Au\n"


def atoms(*rows):
    """Return commands that make atoms of (type, x, y, z)."""
    return "".join("create_atoms {} single {} {} {}\n".format(*row) for row in rows)


def circle(count):
    """Return an atom 2 with this number of neighbours 1, all of them on a circle."""
    rows = [(2, 0, 0, 0)]
    for angle in 2 * np.pi * np.arange(count) / count:
        rows.append((1, 2.9 * np.cos(angle), 2.9 * np.sin(angle), 0))
    return atoms(*rows)


def warnings(printed):
    return re.findall(r"WARNING: Pair style calcops: (.*)", printed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_shorter_than_any_in_training_is_warned_of_once(ranks, lammps):
    place = BOX + atoms((1, 1, 1, 1), (1, 2.4, 1, 1), (1, 5, 5, 5)) + STYLE.format("deep.pt")
    (message,) = warnings(lammps(place + "run 2\nrun 2\n", ranks))
    assert message.startswith(
        "atoms 1 and 2 are 1.4 apart. In the model's training there was none below 1.5 of such "
        "pairs (Cu-Cu), so its energy is extrapolated"
    ) or message.startswith("atoms 2 and 1 are 1.4 apart")


def test_pairs_of_the_lengths_in_training_are_not_warned_of(lammps):
    place = BOX + atoms((1, 1, 1, 1), (1, 2.5, 1, 1), (2, 1, 3, 1)) + STYLE.format("deep.pt")
    assert warnings(lammps(place + "run 0\n")) == []


def test_a_pair_of_elements_that_never_met_in_training_is_warned_of(lammps):
    place = BOX + atoms((2, 1, 1, 1), (2, 3.9, 1, 1)) + STYLE.format("deep.pt")
    (message,) = warnings(lammps(place + "run 0\n"))
    assert "there was none of such pairs (Au-Au)" in message


def test_more_neighbours_than_sel_are_warned_of_once(lammps):
    assert warnings(lammps(BOX + circle(5) + STYLE.format("few.pt") + "run 0\n")) == []
    (message,) = warnings(lammps(BOX + circle(6) + STYLE.format("few.pt") + "run 0\nrun 0\n"))
    assert message.startswith(
        "atom 1 has 6 neighbours Cu within the cutoff, and the model's sel is 5. It takes the nearest"
    )


def test_a_committee_warns_as_soon_as_one_of_its_models_would(lammps):
    place = BOX + atoms((1, 1, 1, 1), (1, 2.6, 1, 1))
    script = STYLE.format("deep.pt longer.pt") + "run 0\n"
    assert "none below 1.9" in warnings(lammps(place + script))[0]
    assert (
        "the model's sel is 5"
        in warnings(lammps(BOX + circle(6) + STYLE.format("deep.pt few.pt") + "run 0\n"))[0]
    )


def test_a_package_that_takes_all_slots_is_checked_at_new_lists(lammps):
    lj = LennardJones()
    lj.sel = [1]
    lj.shortest = torch.tensor([[0.9]])
    save(lj, lammps.folder / "ordered.pt2", edge_order=True)
    box = BOX.replace("metal", "lj").replace("create_box 2", "create_box 1")
    style = "pair_style calcops ordered.pt2\npair_coeff * * X\n"
    near = box + atoms((1, 1, 1, 1), (1, 1.8, 1, 1)) + style
    (message,) = warnings(lammps(near + "run 0\n"))
    assert "are 0.8 apart. In the model's training there was none below 0.9" in message
    crowded = box + atoms((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2.2, 1)) + style
    (message,) = warnings(lammps(crowded + "run 0\n"))
    assert re.match(
        "atom . has 2 neighbours X within the cutoff, and the model's sel is 1", message
    )
    loose = box + atoms((1, 1, 1, 1), (1, 2, 1, 1), (1, 8, 8, 8)) + style
    assert warnings(lammps(loose + "run 0\n")) == []


def test_zbl_adds_its_repulsion_to_a_model(lammps):
    """The script of calcops/lammps/README.md, on two atoms."""
    place = BOX + atoms((1, 1, 1, 1), (2, 2.0, 1, 1))
    zbl = (
        "pair_style zbl 0.8 1.6\npair_coeff 1 1 29 29\npair_coeff 1 2 29 79\npair_coeff 2 2 79 79\n"
    )
    both = """pair_style hybrid/overlay calcops deep.pt zbl 0.8 1.6
pair_coeff * * calcops Cu Au
pair_coeff 1 1 zbl 29 29
pair_coeff 1 2 zbl 29 79
pair_coeff 2 2 zbl 79 79
"""
    energies = [
        tables(lammps(place + style + THERMO + "run 0\n"))[0][0, 2]
        for style in (STYLE.format("deep.pt"), zbl, both)
    ]
    assert energies[1] > 1
    np.testing.assert_allclose(energies[2], energies[0] + energies[1], rtol=1e-12)
