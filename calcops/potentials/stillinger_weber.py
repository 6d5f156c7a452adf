"""The Stillinger-Weber potential of any number of elements, with LAMMPS's format of parameters.

Si.sw of LAMMPS is an example of the format.
"""

import itertools
import math
from pathlib import Path

import torch
from calcops.potentials.potential import Potential

# F. H. Stillinger and T. A. Weber, Phys. Rev. B 31, 5262 (1985): three elements, then epsilon (eV),
# sigma (A), a, lambda, gamma, cos theta0, A, B, p, q and tol.
kSilicon = """
Si Si Si 2.1683 2.0951 1.80 21.0 1.20 -0.333333333333 7.049556277 0.6022245584 4.0 0.0 0.0
"""


def read(text):
    """Return the entries of a .sw file: eleven numbers for each (i, j, k) of elements.

    Element i is that of the central atom.
    """
    words = " ".join(line.partition("#")[0] for line in text.splitlines()).split()
    if not words or len(words) % 14:
        raise ValueError(f"expected entries of 3 elements and 11 numbers, got {len(words)} words")
    entries = {}
    for first in range(0, len(words), 14):
        elements = tuple(words[first : first + 3])
        entries[elements] = [number(word, elements) for word in words[first + 3 : first + 14]]
    return entries


def number(word, elements):
    """Return the number that a word of the entry of `elements` is; ValueError if it is none."""
    try:
        value = float(word.replace("_", "?"))  # Python reads 1_0 as 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"expected a number in the entry of {' '.join(elements)}, got {word}")
    return value


class StillingerWeber(Potential):
    """The Stillinger-Weber potential. Energies are in eV, lengths in A.

    The three-body sum needs no K x K tensors. With h_j = exp(gamma sigma / (r_j - a sigma)), unit
    vectors u_j, and the moments S = sum h, P = sum h u and Q = sum h u u of a row,

        sum_jk h_j h_k (u_j.u_k - c)^2 = Q:Q - 2 c P.P + c^2 S S

    for each pair of elements. The moments are written as single multiplications: powers and matrix
    products would take most of the time.

    Args:
        path: a .sw file; None: silicon.
        type_names: elements of the file; None: all, in its order.
    """

    def __init__(self, path=None, type_names=None):
        entries = read(Path(path).read_text() if path else kSilicon)
        names = list(type_names or dict.fromkeys(name for triple in entries for name in triple))
        triples = list(itertools.product(names, repeat=3))
        for triple in triples:
            if triple not in entries:
                raise ValueError(f"expected an entry of {' '.join(triple)} in {path}, got none")
        rows = [entries[triple] for triple in triples]
        table = torch.tensor(rows, dtype=torch.float64).view(len(names), len(names), len(names), 11)
        types = torch.arange(len(names))
        pairs = table[:, types, types]  # the pair (i, j) has the parameters of (i, j, j)
        sigma = pairs[..., 1]
        gamma = pairs[..., 4]
        cut = sigma * pairs[..., 2]
        # LAMMPS's shorter cutoff: where the exponentials have fallen to tol.
        tol = pairs[..., 10].clamp(max=0.01)
        cut += torch.where(tol > 0, sigma * gamma.clamp(max=1) / tol.log(), 0.0)
        super().__init__(cut.max().item(), "metal", names)
        self.register_buffer("pairs", torch.cat([pairs, cut[..., None]], -1))
        self.register_buffer("strength", table[..., 3] * table[..., 0])  # lambda epsilon
        self.register_buffer("cosine", table[..., 5])
        self.usual_powers = bool((pairs[..., 8] == 4).all() and (pairs[..., 9] == 0).all())

    def atom_energies(self, types, list_neigh, Ri):
        """Return the energies [B, n] of atoms from Ri [B, n, K, 4] = (r, x, y, z), in A."""
        epsilon, sigma, reach, lamda, gamma, cosine, A, B, p, q, _, cut = self.of_pairs(
            self.pairs, types, list_neigh
        ).unbind(-1)
        r, x, y, z = Ri.unbind(-1)
        s = sigma / r
        # exp(1 / gap) is 0 from r = a sigma - 0.001 sigma on, and so are its derivatives.
        gap = (1 / s - reach).clamp(max=-1e-3)
        powers = B * s.square().square() - 1 if self.usual_powers else B * s**p - s**q
        pair = torch.where(r < cut, A * epsilon * powers * torch.exp(1 / gap), 0.0)
        h = torch.where(r < cut, torch.exp(gamma / gap), 0.0)
        itself = lamda * epsilon * (h * (1 - cosine)).square()  # the terms j = k of the sum

        x, y, z = x / r, y / r, z / r
        ntypes = self.cosine.shape[0]
        moments: list[list[torch.Tensor]] = []
        for kind in range(ntypes):
            hk = h
            if ntypes > 1:
                hk = h.where(self.neighbour_types(types, list_neigh) == kind, 0.0)
            hx, hy, hz = hk * x, hk * y, hk * z
            # Q is symmetric: each component off the diagonal counts twice in Q:Q.
            second = [hx * x, hy * y, hz * z, 2**0.5 * hx * y, 2**0.5 * hx * z, 2**0.5 * hy * z]
            moments.append([m.sum(-1) for m in [hk, hx, hy, hz] + second])
        if ntypes == 1:
            strength = self.strength[0]
            cosine = self.cosine[0]
        else:
            centre = types[..., : list_neigh.shape[1]]
            strength = self.strength[centre]
            cosine = self.cosine[centre]
        energy = pair.sum(-1) - itself.sum(-1)
        for j, a in enumerate(moments):
            for k, b in enumerate(moments):
                c = cosine[..., j, k]
                P = a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
                Q = (
                    a[4] * b[4]
                    + a[5] * b[5]
                    + a[6] * b[6]
                    + a[7] * b[7]
                    + a[8] * b[8]
                    + a[9] * b[9]
                )
                energy = energy + strength[..., j, k] * (Q - 2 * c * P + c**2 * a[0] * b[0])
        return energy / 2
