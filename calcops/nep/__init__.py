"""NEP, the neuroevolution potential of GPUMD, as a potential."""

from calcops.nep.model import Nep, load
from calcops.nep.nep_file import write

__all__ = ["Nep", "load", "write"]
