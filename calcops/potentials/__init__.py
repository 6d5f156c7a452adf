"""Potentials in PyTorch, and packages of them for every host: ASE, LAMMPS, C++ programs."""

from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import load, save
from calcops.potentials.potential import Potential
from calcops.potentials.stillinger_weber import StillingerWeber

__all__ = ["LennardJones", "Potential", "StillingerWeber", "load", "save"]
