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
    # Here, because importing scipy takes 0.2 s, and only a NEP that is read from its file needs it.
    from scipy.interpolate import BSpline

    knots = np.arange(-5.0, cells + 6)
    return BSpline.design_matrix(position, knots, 5, extrapolate=True).toarray()


def interpolation(cells, count):
    """Return the coefficients [cells + 5, count] of splines that interpolate the radial basis.

    They agree with it at both ends of each cell and, near both ends of the grid, at two more points
    in place of conditions for derivatives. They are those of any cutoff, since the basis depends on
    r / cutoff alone.
    """
    more = np.array([0.5, 1.5])
    position = np.sort(np.concatenate([np.arange(cells + 1), more, cells - more]))
    return np.linalg.solve(b_splines(position, cells), radial_basis(position, cells, count))


def error_bounds(cells, c):
    """Return bounds of the errors of splines of radial functions and of their slopes.

    Each is relative to the largest value or slope of the functions of the same pair of types. The
    errors of the basis bound those of its sums, so that many pairs of types cost little.

    Args:
        cells: of the splines.
        c: [kinds, basis, F], the coefficients of the functions.
    """
    count = c.shape[1]
    coefficients = interpolation(cells, count)

    def errors(position):
        return b_splines(position, cells) @ coefficients - radial_basis(position, cells, count)

    step = 0.002  # in cells, over which slopes are differences
    fine = np.linspace(step, cells - step, 20 * cells + 1)
    coarse = np.linspace(step, cells - step, 65)
    above = radial_basis(coarse + step, cells, count)
    below = radial_basis(coarse - step, cells, count)
    slopes = errors(fine + step) - errors(fine - step)
    bounds = []
    for error, values in ((errors(fine), (above + below) / 2), (slopes, above - below)):
        largest = np.abs(values @ c).max((1, 2))
        most = (np.abs(error).max(0) @ np.abs(c)).max(1)
        bounds.append(float((most / np.maximum(largest, 1e-300)).max()))
    return bounds
