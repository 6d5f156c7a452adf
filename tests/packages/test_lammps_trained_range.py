"""calcops/lammps: a warning, once, of a structure that is unlike the frames a model was trained on,
and a repulsion for short distances beside a model."""

import re

import numpy as np
import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.train.deep_potential import DeepPotential
from lammps_plugin import THERMO, Lammps, tables
from test_train import arrays

pytestmark = pytest.mark.long  # a foreign program

BOX = """units metal
atom_style atomic
boundary f f f
region box block -9 9 -9 9 -9 9
create_box 2 box
mass * 60
"""
STYLE = "pair_style calcops {}\npair_coeff * * Cu Au\n"


def model(sel=(9, 7), shortest=((1.5, 2.0), (2.0, 3.0))):
    more = {"shortest": np.array(shortest)}
    return DeepPotential(arrays(sel) | more, ["Cu", "Au"]).requires_grad_(False)


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    save(model(), folder / "model.pt")
    save(model((5, 2)), folder / "few.pt")
    save(model(shortest=((1.9, 2.0), (2.0, 3.0))), folder / "longer.pt")
    return Lammps(folder)


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
    place = BOX + atoms((1, 1, 1, 1), (1, 2.4, 1, 1), (1, 5, 5, 5)) + STYLE.format("model.pt")
    (message,) = warnings(lammps(place + "run 2\nrun 2\n", ranks))
    assert message.startswith(
        "atoms 1 and 2 are 1.4 apart. In the model's training there was none below 1.5 of such "
        "pairs (Cu-Cu), so its energy is extrapolated"
    ) or message.startswith("atoms 2 and 1 are 1.4 apart")


def test_pairs_of_the_lengths_in_training_are_not_warned_of(lammps):
    place = BOX + atoms((1, 1, 1, 1), (1, 2.5, 1, 1), (2, 1, 3, 1)) + STYLE.format("model.pt")
    assert warnings(lammps(place + "run 0\n")) == []


def test_a_pair_of_elements_that_never_met_in_training_is_warned_of(lammps):
    place = BOX + atoms((2, 1, 1, 1), (2, 3.9, 1, 1)) + STYLE.format("model.pt")
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
    script = STYLE.format("model.pt longer.pt") + "run 0\n"
    assert "none below 1.9" in warnings(lammps(place + script))[0]
    assert (
        "the model's sel is 5"
        in warnings(lammps(BOX + circle(6) + STYLE.format("model.pt few.pt") + "run 0\n"))[0]
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
    both = """pair_style hybrid/overlay calcops model.pt zbl 0.8 1.6
pair_coeff * * calcops Cu Au
pair_coeff 1 1 zbl 29 29
pair_coeff 1 2 zbl 29 79
pair_coeff 2 2 zbl 79 79
"""
    energies = [
        tables(lammps(place + style + THERMO + "run 0\n"))[0][0, 2]
        for style in (STYLE.format("model.pt"), zbl, both)
    ]
    assert energies[1] > 1
    np.testing.assert_allclose(energies[2], energies[0] + energies[1], rtol=1e-12)
