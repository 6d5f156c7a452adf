"""Invariants of the sums A_nlm of a NEP."""

import itertools

import numpy as np
import torch
from numpy.polynomial.legendre import Legendre, leggauss

k1111 = 7 / 15  # of the square of q_n1 in q_1111


class TripleInvariant(torch.nn.Module):
    """The invariant of three l, such as q_123: sum of W A_1m A_2m' A_3m'' over m, m' and m''.

    Args:
        name: the three l, whose sum is even, in rising order.
    """

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.l = [int(letter) for letter in name]
        symbols = wigner_symbols(*self.l).flatten(0, 1).mT.contiguous()
        self.register_buffer("symbols", symbols, persistent=False)

    def forward(self, parts: list[torch.Tensor]):
        """Return the invariant [n, F] of A_nlm in parts [2 l + 1, n, F], for l = 0, 1, ..."""
        one, two, three = [parts[l] for l in self.l]  # noqa: E741
        products = (one.unsqueeze(1) * two).flatten(0, 1)
        coupled = (self.symbols @ products.flatten(1)).view_as(three)
        return (coupled * three).sum(0)


def wigner_symbols(*three_l):
    """Return Wigner's 3j symbols [2 l + 1, 2 l' + 1, 2 l'' + 1] for real harmonics, m from -l on.

    The sum of the l is even. Then the symbols are proportional to the integrals of products of
    three harmonics. The sum of their squares is 1, and that of m = m' = m'' = 0 has the sign
    (-1)^((l + l' + l'') / 2).
    """
    z, weights = leggauss(8)  # exact up to degree 15
    phi = np.arange(16) * (2 * np.pi / 16)
    harmonics = [real_harmonics(l, z[:, None], phi) for l in three_l]  # noqa: E741
    integrals = np.einsum("azp,bzp,czp,z->abc", *harmonics, weights)
    sign = (-1) ** (sum(three_l) // 2)
    return torch.from_numpy(sign * integrals / np.linalg.norm(integrals))


def real_harmonics(l, z, phi):  # noqa: E741
    """Return the real spherical harmonics of `density` for m = -l ... l, up to a factor of l."""
    rows = []
    for m in range(-l, l + 1):
        k = abs(m)
        of_z = (1 - z * z) ** (k / 2) * Legendre.basis(l).deriv(k)(z)
        of_phi = np.cos(k * phi) if m >= 0 else np.sin(k * phi)
        norm = np.prod(np.arange(l - k + 1.0, l + k + 1))  # (l + k)! / (l - k)!
        rows.append(of_z * of_phi * np.sqrt((1 if m == 0 else 2) / norm))
    return np.stack(rows)


def sums_of_squares(l_max, has_q222):
    """Return the matrix [sums, (l_max + 1)^2] of the sums of squares of A in the invariants.

    The first ones are q_l for l from 1 on. q_222 has two more, the factors of A_20 and of A_22.
    """
    rows = torch.zeros(l_max + 2 * has_q222, (l_max + 1) ** 2, dtype=torch.float64)
    for l in range(1, l_max + 1):  # noqa: E741
        rows[l - 1, l * l : (l + 1) ** 2] = 1
    if has_q222:
        W = wigner_symbols(2, 2, 2).tolist()
        of_z2 = [3 * W[2][4][4], 3 * W[2][3][3], W[2][2][2], 3 * W[2][3][3], 3 * W[2][4][4]]
        rows[-2, 4:9] = rows.new_tensor(of_z2)
        rows[-1, 4:9] = rows.new_tensor([0.0, 3 * W[4][1][1], 0.0, -3 * W[4][1][1], 0.0])
    return rows


def terms_of(l_max, has_q222, has_q1111, triples):
    """Return the invariants as polynomials of A, in the order of the descriptor.

    Returns:
        factors [M, 4], invariant [M] and coefficient [M], as density_net takes them.
    """
    of_invariants = [[([h, h], 1.0) for h in rows_of(l)] for l in range(1, l_max + 1)]  # noqa: E741
    if has_q222:
        of_invariants.append(terms_of_triple("222"))
    if has_q1111:
        squares = itertools.combinations_with_replacement(rows_of(1), 2)
        of_invariants.append([([h, h, k, k], k1111 * (1 if h == k else 2)) for h, k in squares])
    of_invariants += [terms_of_triple(name) for name in triples]

    factors = []
    invariant = []
    coefficient = []
    for number, terms in enumerate(of_invariants):
        for rows, factor in terms:
            factors.append(rows + [-1] * (4 - len(rows)))
            invariant.append(number)
            coefficient.append(factor)
    return (
        torch.tensor(factors, dtype=torch.int32),
        torch.tensor(invariant, dtype=torch.int32),
        torch.tensor(coefficient, dtype=torch.float64),
    )


def rows_of(l):  # noqa: E741
    """Return the numbers of the sums A_lm."""
    return range(l * l, (l + 1) * (l + 1))


def terms_of_triple(name):
    """Return the terms of an invariant of three l: rows of A, and a coefficient. Each is once."""
    three_l = [int(letter) for letter in name]
    coefficients = {}
    for m, symbol in np.ndenumerate(wigner_symbols(*three_l).numpy()):
        rows = tuple(sorted(rows_of(l)[k] for l, k in zip(three_l, m)))  # noqa: E741
        coefficients[rows] = coefficients.get(rows, 0) + symbol
    return [(list(rows), total) for rows, total in coefficients.items() if abs(total) > 1e-12]
