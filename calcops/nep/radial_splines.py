"""Splines of NEP's radial functions, for torch.ops.calcops_models.density."""

import numpy as np


def radial_basis(r, cutoff, count):
    """Return NEP's radial basis [n, count] at distances r [n] up to the cutoff.

    f_k(r) = (T_k(2 (r/rc - 1)^2 - 1) + 1)/2 (1 + cos(pi r/rc))/2, where T_k is Chebyshev's
    polynomial.
    """
    x = 2 * (r / cutoff - 1) ** 2 - 1
    polynomials = np.cos(np.arange(count) * np.arccos(np.clip(x, -1, 1))[:, None])
    envelope = 0.5 + 0.5 * np.cos(np.pi * r / cutoff)
    return (polynomials + 1) / 2 * envelope[:, None]


def b_splines(position, cells):
    """Return the quintic B-splines [n, cells + 5] at positions [n] in cells of width 1."""
    cell = np.clip(np.floor(position), 0, cells - 1).astype(int)
    t = position - cell
    weights = [np.ones_like(t)]
    for degree in range(1, 6):  # de Boor's recursion
        padded = [np.zeros_like(t), *weights, np.zeros_like(t)]
        weights = [
            ((t + degree - b) * padded[b] + (b + 1 - t) * padded[b + 1]) / degree
            for b in range(degree + 1)
        ]
    result = np.zeros((len(t), cells + 5))
    for b, weight in enumerate(weights):
        result[np.arange(len(t)), cell + b] = weight
    return result


def interpolation(cutoff, cells, count):
    """Return the coefficients [cells + 5, count] of splines that interpolate the radial basis.

    They agree with it at both ends of each cell and, near both ends of the grid [0, cutoff], at
    two more points in place of conditions for derivatives.
    """
    more = np.array([0.5, 1.5])
    position = np.sort(np.concatenate([np.arange(cells + 1), more, cells - more]))
    values = radial_basis(position * cutoff / cells, cutoff, count)
    return np.linalg.solve(b_splines(position, cells), values)
