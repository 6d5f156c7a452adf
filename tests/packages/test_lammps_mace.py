"""calcops/lammps: a MACE model gives the numbers of MACE's own calculator on one and two ranks."""

import re

import numpy as np
import pytest
from lammps_plugin import SHAKE, Lammps, difference, tables
from mace_models import make_models, python

pytestmark = pytest.mark.long  # a foreign program

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
    "set group all type/fraction 2 0.4 4711\n" + SHAKE + "neighbor 1.0 bin\n"
    "velocity all create 600 87287 loop geom\ncomm_modify cutoff 9\n"
    "pair_style calcops mace.pt\npair_coeff * * Cu Al\nfix nve all nve\n"
    "compute p all pressure NULL virial\nthermo_style custom step pe c_p[*] temp\n"
    "thermo_modify norm no format float %.17g\nthermo 10\n"
    "dump atoms all custom 10 atoms id type xu yu zu fx fy fz\n"
    "dump_modify atoms sort id format float %.17g first yes\n"
)


def test_lammps_gives_the_numbers_of_maces_calculator_on_one_and_two_ranks(tmp_path):
    make_models(tmp_path)
    lammps = Lammps(tmp_path)
    for ranks in (1, 2):
        table = tables(lammps(SYSTEM + "run 10\n", ranks))[0]
        frames = re.split("ITEM: TIMESTEP", (tmp_path / "atoms").read_text())[1:]
        for frame, (_, energy, *pressure, _) in zip(frames, table, strict=True):
            (tmp_path / "frame").write_text("\n" + frame.lstrip("\n"))
            python(tmp_path, "-c", OWN_NUMBERS, "frame", "11.4", "7.6", "7.6")
            own = np.load(tmp_path / "own.npz")
            forces = np.loadtxt(tmp_path / "frame", skiprows=9)[:, 5:]
            assert difference(forces, own["force"]) <= 1e-12
            assert energy == pytest.approx(own["energy"].item(), rel=1e-12)
            xx, yy, zz, xy, xz, yz = pressure  # bar
            stress = -np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) / 1.6021765e6
            assert difference(stress, own["stress"]) <= 1e-12
        assert table[0, -1] != table[-1, -1]  # the atoms have moved
