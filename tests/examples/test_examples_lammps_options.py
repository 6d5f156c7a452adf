"""examples/lammps: an option of LAMMPS does for a model what it does for LAMMPS's own styles, or it
is refused."""

import re

import numpy as np
import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.stillinger_weber import StillingerWeber
from lammps_plugin import MELT, SHAKE, SW, THERMO, Lammps, difference, tables

OWN = "pair_style lj/cut 2.5\npair_coeff * * 1 1\n"
OURS = "pair_style calcops lj.pt\npair_coeff * * X\n"
ZERO = THERMO + "run 0\n"


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    save(LennardJones(), folder / "lj.pt")
    save(LennardJones(0.7, 1.1), folder / "other.pt")
    save(StillingerWeber(SW / "Si.sw"), folder / "sw.pt")
    return Lammps(folder)


def refusal(lammps, script, ranks=1):
    # A rank that aborts takes the others down, and on a busy machine mpiexec may end before it has
    # passed its words on.
    for _ in range(3):
        if found := re.search(
            r"ERROR.*(Pair style calcops: .*)", lammps(script, ranks, fails=True)
        ):
            return found[1]
    raise AssertionError("no word of the reason")


@pytest.mark.parametrize("option, changed", [("tail", 4), ("shift", 2)])  # pressure, energy
def test_a_tail_or_a_shift_that_the_model_has_not_is_refused(lammps, option, changed):
    plain, with_option = tables(lammps(f"{MELT}{OWN}{ZERO}pair_modify {option} yes\n{ZERO}"))
    assert abs(with_option[0, changed] / plain[0, changed] - 1) > 0.02, "so it must not be ignored"
    assert f"expected pair_modify {option} no" in refusal(
        lammps, f"{MELT}{OURS}pair_modify {option} yes\nrun 0\n"
    )
    hybrid = (
        "pair_style hybrid/overlay calcops lj.pt zero 2.5\npair_coeff * * calcops X\n"
        "pair_coeff * * zero\n"
    )
    script = MELT + hybrid + f"pair_modify pair calcops {option} yes\nrun 0\n"
    assert f"expected pair_modify {option} no" in refusal(lammps, script)
    ours = tables(lammps(f"{MELT}{OURS}pair_modify {option} no\n{ZERO}"))[0]
    assert difference(ours, plain) <= 1e-12


# A melt whose atoms of the left half are bonded to their neighbours.
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
BOTH = OURS.replace("X\n", "X X\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_bonded_pairs_count_fully_or_are_refused(lammps, ranks):
    assert "expected special_bonds lj 1 1 1 for bonded atoms" in refusal(
        lammps, BONDED + BONDS + BOTH + "special_bonds lj/coul 0 0 0\nrun 0\n", ranks
    )
    assert "got 1 0.5 1" in refusal(
        lammps, BONDED + BONDS + BOTH + "special_bonds lj/coul 1 0.5 1\nrun 0\n", ranks
    )

    weighted = f"special_bonds lj/coul 1 0.5 1\n{ZERO}special_bonds lj/coul 0 0 0\n{ZERO}"
    full = f"special_bonds lj 1 1 1 coul 0 0 0.5\n{ZERO}"
    own = tables(lammps(f"{BONDED}{BONDS}{OWN}{full}{weighted}", ranks))
    assert len({round(table[0, 2], 3) for table in own}) == 3, "so weights must not be ignored"
    assert difference(tables(lammps(BONDED + BONDS + BOTH + full, ranks))[0], own[0]) <= 1e-12


def test_weights_of_bonds_that_do_not_exist_matter_to_nobody(lammps):
    own, ours = (
        tables(lammps(f"{BONDED}{style}special_bonds lj/coul 0 0 0\n{ZERO}"))[0]
        for style in (OWN, BOTH)
    )
    assert difference(ours, own) <= 1e-12


def test_bonds_among_atoms_that_the_model_does_not_see_are_left_to_their_style(lammps):
    weights = "special_bonds lj/coul 0 0.5 1\n"
    ours = "pair_style hybrid calcops lj.pt lj/cut 2.5\npair_coeff * * calcops X NULL\n"
    ours += "pair_coeff 1 2 lj/cut 1 1\npair_coeff 2 2 lj/cut 1 1\n"
    tables_of = [
        tables(lammps(BONDED + BONDS + style + weights + ZERO))[0] for style in (OWN, ours)
    ]
    assert difference(tables_of[1], tables_of[0]) <= 1e-12


def test_a_hybrid_style_may_give_the_model_weights_of_its_own(lammps):
    """LAMMPS keeps pairs in the list whose weight is not 0 but nearly so."""
    own = (
        "pair_style hybrid/overlay lj/cut 2.5 lj/cut 2.5\n"
        "pair_coeff * * lj/cut 1 1 1\npair_coeff * * lj/cut 2 1 1\n"
    )
    ours = (
        "pair_style hybrid/overlay calcops lj.pt lj/cut 2.5\n"
        "pair_coeff * * calcops X X\npair_coeff * * lj/cut 1 1\n"
    )
    weights, special = "special_bonds lj/coul 1e-50 1e-50 1\n", "special lj/coul 1 1 1\n"
    expected = tables(
        lammps(f"{BONDED}{BONDS}{own}{weights}pair_modify pair lj/cut 1 {special}{ZERO}")
    )[0]
    found = tables(
        lammps(f"{BONDED}{BONDS}{ours}{weights}pair_modify pair calcops {special}{ZERO}")
    )[0]
    assert difference(found, expected) <= 1e-12


TWO = (
    "units metal\nlattice diamond 5.431\nregion box block 0 3 0 3 0 3\n"
    "create_box 2 box\ncreate_atoms 1 box\n"
)
TWO += "set group all type/fraction 2 0.3 4711\nmass * 28.0\n" + SHAKE
SW_AND_LJ = (
    "{ours}\npair_coeff * * {name} Si NULL\npair_coeff 1 2 lj/cut 0.01 2.2\n"
    "pair_coeff 2 2 lj/cut 0.02 2.1\n"
)
HYBRIDS = {  # the system; LAMMPS's own; ours
    "sw": (
        TWO,
        SW_AND_LJ.format(ours="pair_style hybrid sw lj/cut 5", name=f"sw {SW / 'Si.sw'}"),
        SW_AND_LJ.format(ours="pair_style hybrid calcops sw.pt lj/cut 5", name="calcops"),
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
    found = []
    for i, style in enumerate(styles):
        dump = f"dump atoms all custom 1 hybrid.{i} id type fx fy fz c_e c_s[*]\n"
        dump += "dump_modify atoms sort id format float %.17g\n"
        computes = "compute e all pe/atom\ncompute s all stress/atom NULL virial\n"
        thermo = tables(lammps(system + style + computes + dump + ZERO, ranks))[0]
        found.append((thermo, np.loadtxt(lammps.folder / f"hybrid.{i}", skiprows=9)))
    (own, own_atoms), (ours, our_atoms) = found
    assert 0.1 < (own_atoms[:, 1] == 2).mean() < 0.9
    assert difference(ours, own) <= 1e-12
    # LAMMPS shares the terms of three atoms in another way, which the sums do not show.
    columns = slice(5) if name == "sw" else slice(None)
    for type in (1, 2):
        ours, own = (atoms[atoms[:, 1] == type, columns] for atoms in (our_atoms, own_atoms))
        assert difference(ours, own) <= 1e-12


def test_null_is_for_hybrid_styles(lammps):
    printed = lammps(TWO + "pair_style calcops sw.pt\npair_coeff * * Si NULL\nrun 0\n", fails=True)
    assert "ERROR: All pair coeffs are not set" in printed


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["lj.pt", "single.pt", "indexed.pt2"])
def test_atoms_at_the_same_place_are_named(lammps, model, ranks):
    if model == "single.pt":
        save(LennardJones(), lammps.folder / model, dtype=torch.float32)
    if model == "indexed.pt2":
        save(LennardJones(), lammps.folder / model, edge_order=True)
    script = MELT.replace(SHAKE, "") + OURS.replace("lj.pt", model)
    script += "create_atoms 1 single 0 0 0\nrun 0\n"  # on the border of ranks, where atom 1 is
    own = lammps(
        MELT.replace(SHAKE, "") + OWN + f"create_atoms 1 single 0 0 0\n{THERMO}run 0\n",
        ranks,
        fails=None,
    )
    assert re.search("nan|inf|Non-numeric", own), "LAMMPS's own styles have no finite energy either"
    printed = refusal(lammps, script, ranks)
    if model == "indexed.pt2":
        assert re.search("expected a finite energy of the model, got -?(nan|inf)", printed)
    else:
        assert re.search(
            r"atoms apart from each other, got (1 and 501|501 and 1) at the same place", printed
        )


def test_lammps_own_libraries_do_not_serve_pytorch(lammps):
    """LAMMPS has the reference BLAS on board, ten times as slow as PyTorch's."""
    log = lammps.folder / "bindings"
    lammps(MELT + OURS + "run 0\n", LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log))
    (run,) = [
        text
        for path in lammps.folder.glob("bindings.*")
        if "libpair_calcops.so" in (text := path.read_text())
    ]
    found = re.findall(r"binding file (\S+) \[0\] to (\S+) \[0\]: normal symbol `(\S+)'", run)
    to_lammps = [(user, symbol) for user, provider, symbol in found if "/liblammps.so" in provider]
    assert any(user.endswith("libpair_calcops.so") for user, _ in to_lammps)
    of_pytorch = [
        pair for pair in to_lammps if re.search(r"/torch/lib/|calcops/.*\.so|/model/", pair[0])
    ]
    # Two constants of the C++ library, which have no content, are one in a process by their kind.
    assert not [pair for pair in of_pytorch if not re.match("_ZSt|_ZZNSt", pair[1])]
    assert any(
        "libtorch_cpu.so" in user and "libtorch_cpu.so" in provider
        for user, provider, s in found
        if s == "dgemm_"
    )
