"""A calculator of ASE for potentials and packages."""

from calcops.ase.calculator import CalcOps

__all__ = ["CalcOps"]
