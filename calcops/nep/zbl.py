"""The repulsion of nuclei that a NEP may have: Ziegler, Biersack and Littmark's, or one like it.

The energy of two atoms is

    K Z Z' / r sum of four a exp(-b r / s) switch(r),  s = 1 / (2.134563 (Z^0.23 + Z'^0.23))

where the switch is 1 up to the inner cutoff, and falls to 0 at the outer one like half a cosine.
"""

import numpy as np
from calcops.nep.nep_file import kElements

kCoulomb = 14.399645  # eV A, e^2 / (4 pi epsilon_0)
kUniversal = 0.18175, 3.1998, 0.50986, 0.94229, 0.28022, 0.4029, 0.02817, 0.20162  # a, b, ...
# pm, from hydrogen on: Pyykko and Atsumi, Chem. Eur. J. 15, 186 (2009), those of metals less 10 %,
# as DFT-D3 has them.
kRadii = """
    32 46 120 94 77 75 71 63 64 67 140 125 113 104 110 102 99 96 176 154 133 122 121 110 107 104 100
    99 101 109 112 109 115 110 114 117 189 167 147 139 132 124 115 113 113 108 115 123 128 126 126
    123 132 131 209 176 162 147 158 157 156 155 151 152 151 150 149 149 148 153 146 137 131 123 118
    116 111 112 113 132 130 130 136 131 138 142 201 181 167 158 152 153 154 155
""".split()


def terms_of_zbl(zbl, type_names):
    """Return the table [T^2, 10] of half of the energy, for the types of centre and neighbour.

    A row has the inner and the outer cutoff in A, and four times A (eV A) and B (1/A) of
    A exp(-B r) / r.

    Args:
        zbl: of a NepFile. None gives a table [0, 10].
        type_names: T chemical symbols.
    """
    if zbl is None:
        return np.empty((0, 10))
    numbers = np.array([kElements.index(name) for name in type_names])
    T = len(numbers)
    if isinstance(zbl, np.ndarray):
        table = zbl.copy()
    else:
        inner, outer, *factor = zbl
        table = np.tile([inner, outer, *kUniversal], (T, T, 1))
        if factor:
            # GPUMD and NEP_CPU have 4/3 of the radii in A with six digits.
            radii = np.array([float(f"{int(kRadii[number]) / 75:.6g}") for number in numbers])
            table[..., 0] = 0
            table[..., 1] = np.minimum(outer, factor[0] * (radii[:, None] + radii))
    Z = numbers + 1.0
    power = Z**0.23
    table[..., 2::2] *= 0.5 * kCoulomb * (Z[:, None] * Z)[..., None]
    table[..., 3::2] *= 2.134563 * (power[:, None] + power)[..., None]
    return table.reshape(T * T, 10)
