"""Tables of embedding nets, for torch.ops.calcops_models.tabulated_sum.

    (table, grid), message = of_model(model, tolerance, shortest)

A cell holds the polynomial of degree 5 that has a net's value, slope and curvature at both of its
ends. Source: Lu et al., J. Chem. Theory Comput. 18, 5559 (2022), doi 10.1021/acs.jctc.2c00102.
"""

import functools

import torch

# Widths that float32 holds exactly, so that a table and its grid agree in it.
kWidths = [2.0**-power for power in range(3, 13)]
kCoarse = 8  # width of the coarse cells, in fine cells
kSamples = 7  # points of a cell at which the error is taken


def of_model(model, tolerance, shortest):
    """Return tables of a model's embedding nets, and a phrase that describes them.

    Args:
        model: a DeepPotential in float64.
        tolerance: the largest error of a value or a slope, relative to the largest.
        shortest: the shortest distance in the fine cells, in the model's unit. The coarse cells go
            down to a fifth of it.

    Returns:
        (table [kinds, cells, 6, M], grid [kinds, 5]), as DeepPotential.set_tables takes them; the
        phrase.

    Raises:
        ValueError: no table of bounded size is precise enough.
    """
    ntypes = len(model.sel)
    functions = []
    ends = []
    for t, net in enumerate(model.emb):
        for c in range(ntypes if net.of_pairs else 1):
            centres = [c] if net.of_pairs else list(range(ntypes))
            s = torch.tensor([0, 1 / shortest, 5 / shortest], dtype=torch.float64)
            x = (s - model.davg[centres, t, :1]) / model.dstd[centres, t, :1]
            ends.append((x[:, 0].min().item(), *x[:, 1:].amax(0).tolist()))
            functions.append(functools.partial(net, centre=c))
    table, grid, error = tabulate(functions, ends, tolerance)
    phrase = (
        f"{len(functions)} tables in cells of {grid[0, 1]:g}, {table.nbytes / 1e6:.1f} MB, "
        f"error {error:.0e}"
    )
    return (table, grid), phrase


def tabulate(functions, ends, tolerance):
    """Tabulate functions of one number with the widest cells that are precise enough.

    Args:
        functions: for each kind, a function from [N, 1] to [N, M], in float64.
        ends: for each kind (begin, end of the fine cells, end of the coarse cells).
        tolerance: the largest error of a value or a slope in the fine cells, relative to the
            largest value or slope of its kind.

    Returns:
        table [kinds, cells, 6, M] and grid [kinds, 5] of tabulated_sum, and the error.

    Raises:
        ValueError: no width is precise enough.
    """
    errors = []
    for width in kWidths:
        grid = torch.tensor([grid_row(width, *row) for row in ends], dtype=torch.float64)
        tables = [table_of(function, row) for function, row in zip(functions, grid)]
        pairs = zip(functions, tables, grid)
        error = max(error_of(function, table, row) for function, table, row in pairs)
        if error <= tolerance:
            cells = max(len(table) for table in tables)
            padded = [
                torch.nn.functional.pad(table, (0, 0, 0, 0, 0, cells - len(table)))
                for table in tables
            ]
            return torch.stack(padded), grid, error
        errors.append(error)
        if len(errors) > 2 and error > 0.5 * errors[-2]:
            break  # narrower cells do not help: the error is rounding, or a kink
    raise ValueError(
        f"expected nets that a table has within {tolerance:g}, got {min(errors):.0e}: "
        "take a larger tolerance, or the nets themselves"
    )


def grid_row(width, begin, end, coarse_end):
    """Return the row of a grid whose parts consist of whole cells."""
    begin = begin // width * width
    fine = -((begin - end) // width) * width
    coarse = -((begin + fine - coarse_end) // (kCoarse * width)) * kCoarse * width
    return [begin, width, begin + fine, kCoarse * width, begin + fine + max(coarse, 0)]


def nodes_of(row):
    """Return the ends of the cells [cells + 1] of a row of a grid."""
    begin, width, end, coarse_width, coarse_end = row.tolist()
    fine = torch.arange(round((end - begin) / width), dtype=torch.float64)
    coarse = torch.arange(round((coarse_end - end) / coarse_width) + 1, dtype=torch.float64)
    return torch.cat([begin + width * fine, end + coarse_width * coarse])


def derivatives(function, x):
    """Return the values, slopes and curvatures [N, M] of a function at x [N]."""

    def slope(x):
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))

    x = x.unsqueeze(-1)
    (value, first), (_, second) = torch.func.jvp(slope, (x,), (torch.ones_like(x),))
    return value.detach(), first.detach(), second.detach()


def table_of(function, row):
    """Return the coefficients [cells, 6, M] of a function, those of t^k in plane k."""
    nodes = nodes_of(row)
    value, slope, curvature = derivatives(function, nodes)
    h = nodes.diff().unsqueeze(-1)
    # Quintic Hermite interpolation from 0 to 1: the k-th derivatives at both ends have factors h^k.
    a, b, c = value[:-1], h * slope[:-1], h**2 * curvature[:-1]
    rise = value[1:] - a
    d, e = h * slope[1:], h**2 * curvature[1:]
    powers = [
        a,
        b,
        c / 2,
        10 * rise - 6 * b - 4 * d - 1.5 * c + 0.5 * e,
        -15 * rise + 8 * b + 7 * d + 1.5 * c - e,
        6 * rise - 3 * b - 3 * d - 0.5 * c + 0.5 * e,
    ]
    return torch.stack([power / h**k for k, power in enumerate(powers)], 1)


def error_of(function, table, row):
    """Return the largest error of values and slopes in the fine cells, relative to the largest."""
    cells = round(((row[2] - row[0]) / row[1]).item())
    t = (torch.arange(kSamples, dtype=torch.float64) + 0.5) / kSamples * row[1]
    x = (row[0] + row[1] * torch.arange(cells, dtype=torch.float64)).unsqueeze(-1) + t
    value, slope, _ = (
        part.view(cells, kSamples, -1) for part in derivatives(function, x.flatten())
    )
    c = table[:cells, :, None]
    t = t.unsqueeze(-1)
    polynomial = torch.zeros_like(value)
    derivative = torch.zeros_like(value)
    for k in reversed(range(6)):  # Horner's scheme
        derivative = derivative * t + polynomial
        polynomial = polynomial * t + c[:, k]
    value_error = (polynomial - value).abs().max() / value.abs().max()
    slope_error = (derivative - slope).abs().max() / slope.abs().max()
    return max(value_error.item(), slope_error.item())
