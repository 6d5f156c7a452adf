"""The operators of the models and their hosts, such as calcops.nep, calcops.train and calcops.ase.

    import calcops.ops                              # compiles once, as calcops_jit does
    torch.ops.calcops_models.density(...)           # help(calcops.ops.library.density)

`density`, `density_net` and `screened_repulsion` serve NEPs; `environment_spline`, `tabulated_sum`
and `matrix_product` serve Deep Potentials; `near_pairs` serves all hosts in Python. README.md
describes them. `library` is a calcops_jit.Library: its `path` is that of the
.so for C++ programs.
"""

from pathlib import Path

import calcops_jit

library = calcops_jit.load("calcops_models", Path(__file__).parent, native=True, with_cuda="auto")
