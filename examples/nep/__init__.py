"""NEP, the neuroevolution potential of GPUMD, as a potential."""

from calcops.nep.model import Nep, load

__all__ = ["Nep", "load"]
