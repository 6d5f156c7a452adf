"""calcops/ase: what a model cannot compute, or not with finite results, is refused."""

import numpy as np
import pytest
import torch

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.potentials.potential import Potential  # noqa: E402


class Root(Potential):
    """A finite energy, whose derivative is NaN for pairs nearer than 2 A."""

    def __init__(self):
        super().__init__(4.0, "metal", ["Ar"])

    def atom_energies(self, types, list_neigh, Ri):
        r = Ri[..., 0]
        inside = (1 - r / self.cutoff).clamp(min=0.0).square()
        return (inside * (1 + torch.where(r > 2.0, (r - 2.0).sqrt(), 0.0))).sum(-1)


def test_forces_that_are_not_finite_are_refused():
    atoms = Atoms("Ar3", [[0, 0, 0], [3, 0, 0], [3, 2.5, 0]], cell=[9, 9, 9], pbc=True)
    atoms.calc = CalcOps(Root())
    assert np.isfinite(atoms.get_forces()).all()
    atoms.positions[2, 1] = 1.5
    message = r"expected finite results of the model, got the force \[.*nan.*\] of atom 1$"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            atoms.get_potential_energy()
    atoms.positions[2, 1] = 2.5
    assert np.isfinite(atoms.get_forces()).all()


def test_messages_about_several_structures_name_the_frame():
    calc = CalcOps(Root())
    good = Atoms("Ar2", [[0, 0, 0], [3, 0, 0]])
    close = Atoms("Ar3", [[0, 0, 0], [9, 0, 0], [9, 1.5, 0]])
    with pytest.raises(ValueError, match=r"of atom 1 in frame 2$"):
        calc.calculate_batch([good, good, close])
    other = Atoms("ArNe", [[0, 0, 0], [3, 0, 0]])
    with pytest.raises(ValueError, match=r"expected atoms of \['Ar'\], got ArNe in frame 1$"):
        calc.calculate_batch([good, other])
    twice = Atoms("Ar2", [[0, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"got atoms 0 and 1 in one place in frame 1$"):
        calc.calculate_batch([good, twice])
