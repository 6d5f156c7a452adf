"""Writes silicon.pt2, lj.pt2 or the same with .pt: the potentials of ../potentials that LAMMPS has, too.

python examples/lammps/models.py build/lammps/silicon.pt2 build/lammps/lj.pt
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "potentials"))
from lennard_jones import LennardJones
from package import save
from stillinger_weber import StillingerWeber

kModels = {"silicon": StillingerWeber, "lj": LennardJones}  # defaults: LAMMPS's Si.sw, and lj/cut 2.5

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        save(kModels[path.stem](), path)
