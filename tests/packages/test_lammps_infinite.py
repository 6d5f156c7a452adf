"""calcops/lammps: forces that are not finite end the run, whichever model and rank they come from."""

import re

import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.potential import Potential
from lammps_plugin import MELT, Lammps

pytestmark = pytest.mark.long  # a foreign program

PAIR = "pair_style calcops {}\npair_coeff * * X\ncomm_modify cutoff 5.3\n"


class Root(Potential):
    """A finite energy, whose derivative is NaN for pairs nearer than 0.6."""

    def __init__(self, layers=1):
        super().__init__(2.5, "lj", ["X"], layers)

    def atom_energies(self, types, list_neigh, Ri):
        r = Ri[..., 0]
        inside = (1 - r / self.cutoff).clamp(min=0.0).square()
        return (inside * (1 + torch.where(r > 0.6, (r - 0.6).sqrt(), 0.0))).sum(-1)


@pytest.fixture(scope="module")
def lammps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lammps")
    save(LennardJones(), folder / "lj.pt")
    save(Root(), folder / "root.pt")
    save(Root(layers=2), folder / "root2.pt")
    save(Root(), folder / "single.pt", dtype=torch.float32)
    return Lammps(folder)


@pytest.mark.parametrize("files", ["root.pt", "root2.pt", "single.pt", "lj.pt root.pt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_forces_that_are_not_finite_are_refused_with_the_atom(lammps, files, ranks):
    lammps(MELT + PAIR.format(files) + "run 0\n", ranks)
    close = MELT + "create_atoms 1 single 1.5 1.05 1.05 units box\n"
    printed = lammps(
        close + "create_atoms 1 single 1.5 1.05 1.4 units box\n" + PAIR.format(files) + "run 0\n",
        ranks,
        fails=True,
    )
    message = (
        r"ERROR.*Pair style calcops: expected finite forces of the model, got -?nan on atom \d+"
    )
    assert re.search(message, re.sub(r"\s+", " ", printed)), printed
