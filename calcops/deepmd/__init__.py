"""DeePMD-kit's models as potentials."""

from calcops.deepmd.import_deepmd import load

__all__ = ["load"]
