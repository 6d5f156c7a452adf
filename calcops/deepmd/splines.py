"""Splines of embedding nets, for torch.ops.calcops_models.environment_spline.

    spline, message = of_model(model, tolerance, shortest)

A spline of degree 5 on cells of equal width has one coefficient for each cell and function. The
basis functions are summed over neighbours first and multiplied by the coefficients afterwards. So
the time for a pair does not depend on the number of functions. Nets with steep steps need so many
cells that tables.py is faster for them.
"""

import functools

import numpy as np
import torch
from calcops.deepmd.tables import derivatives
from scipy.interpolate import BSpline

kDegree = 5
# With more cells than the last of these, a table takes less time.
kCells = 32, 64, 96, 128, 192, 256
kFitted = 6  # points of a cell that are fitted
kChecked = 7  # points of a cell at which the error is taken
# The values of the B-splines where a cell begins.
kAtNode = torch.tensor([1, 26, 66, 26, 1], dtype=torch.float64) / 120


def of_model(model, tolerance, shortest):
    """Return a spline of a model's embedding nets, and a phrase that describes it.

    Args:
        model: a DeepPotential in float64.
        tolerance: the largest error of a value or a slope, relative to the largest.
        shortest: the shortest distance in the spline's cells, in the model's unit.

    Returns:
        (coefficients [T, T * functions, M], grid [T, T, 2], empty [T * T, 4 M]), as
        DeepPotential.set_spline takes them, or None if no spline is precise enough; the phrase.
    """
    ntypes = len(model.sel)
    nets = []
    ends = []
    for centre in range(ntypes):
        for t, net in enumerate(model.emb):
            s = torch.tensor([0, 1 / shortest], dtype=torch.float64)
            x = (s - model.davg[centre, t, 0]) / model.dstd[centre, t, 0]
            nets.append(functools.partial(net, centre=centre))
            ends.append(x.tolist())
    coefficients, error = fit(nets, ends, tolerance)
    if coefficients is None:
        return None, f"no spline of up to {kCells[-1]} cells, whose error is {error:.0e}"
    grid = torch.tensor(ends, dtype=torch.float64).view(ntypes, ntypes, 2)
    # An empty slot is at s = 0, where the cells begin.
    values = (kAtNode @ coefficients[:, :kDegree]).view(ntypes, ntypes, 1, -1)
    rows = -(model.davg / model.dstd).unsqueeze(-1)
    empty = (rows * values).transpose(0, 1).reshape(ntypes * ntypes, -1)
    cells = coefficients.shape[1] - kDegree
    phrase = (
        f"a spline of {cells} cells for each of {len(nets)} pairs of types, "
        f"{coefficients.nbytes / 1e6:.1f} MB, error {error:.0e}"
    )
    return (coefficients.view(ntypes, -1, model.width), grid, empty), phrase


def fit(functions, ends, tolerance):
    """Fit functions of one number by splines on the fewest cells that are precise enough.

    Args:
        functions: for each net, a function from [N, 1] to [N, M], in float64.
        ends: for each net, where its cells begin and end.
        tolerance: the largest error of a value or a slope, relative to the largest value or slope
            of its net.

    Returns:
        The coefficients [nets, cells + 5, M], None if no number of cells is precise enough, and the
        error.
    """
    for cells in kCells:
        fits = [fit_one(net, *of_net, cells) for net, of_net in zip(functions, ends)]
        error = max(error for _, error in fits)
        if error <= tolerance:
            return torch.stack([coefficients for coefficients, _ in fits]), error
    return None, error


def fit_one(function, begin, end, cells):
    """Return the coefficients [cells + kDegree, M] of a spline, and its error."""
    width = (end - begin) / cells
    knots = begin + width * np.arange(-kDegree, cells + kDegree + 1)
    fitted = points(begin, width, cells, kFitted)
    values, _, _ = derivatives(function, torch.from_numpy(fitted))
    basis = BSpline.design_matrix(fitted, knots, kDegree).toarray()
    coefficients = np.linalg.lstsq(basis, values.numpy(), rcond=None)[0]

    spline = BSpline(knots, coefficients, kDegree)
    checked = points(begin, width, cells, kChecked)
    values, slopes, _ = derivatives(function, torch.from_numpy(checked))
    value_error = relative_error(spline(checked), values.numpy())
    slope_error = relative_error(spline.derivative()(checked), slopes.numpy())
    return torch.from_numpy(coefficients), max(value_error, slope_error)


def points(begin, width, cells, count):
    """Return `count` points of each cell."""
    shares = (np.arange(count) + 0.5) / count
    return (begin + width * (np.arange(cells)[:, None] + shares)).ravel()


def relative_error(values, expected):
    """Return the largest difference, relative to the largest expected value."""
    return float(abs(values - expected).max() / abs(expected).max())
