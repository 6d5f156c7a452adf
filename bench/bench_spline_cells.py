"""When splines can replace tabulated_sum: cells that trained nets need, and the time they take.

    python bench/bench_spline_cells.py model.npz [--atoms 512] [--seconds 20]

`error` is the largest error of values and slopes of splines of the model's embedding nets, from
0.5 A on, relative to the largest value and slope. The times are those of water in
bench_environment_spline.py: environment_spline, then matrix_product, for splines of so many cells
in blocks of atoms that fit the cache; and tabulated_sum, whose time does not depend on the cells
that a net needs. They are the sum of forward and gradient, relative to tabulated_sum's. One thread,
float64, the least time of the thread.
"""

import argparse
import time
from functools import partial

import calcops.ops
import numpy as np
import torch
from bench_environment_spline import (
    CELLS,
    KINDS,
    RCUT,
    RCUT_SMTH,
    TABLE_GRID,
    M,
    environment,
    inputs,
)
from calcops.deepmd.deep_potential import load_npz
from calcops.deepmd.splines import kChecked, kDegree, kFitted, points, relative_error
from calcops.deepmd.tables import derivatives
from scipy.interpolate import make_lsq_spline

COUNTS = 59, 128, 256, 512, 1024, 2048, 4096, 8192
TIMED = COUNTS[:5]
SHORTEST = 0.5
BLOCK = 1 << 18  # numbers of P in a call


def error_of_spline(net, begin, end, cells):
    """Return the error of a spline with a banded least-squares fit, which is quick."""
    width = (end - begin) / cells
    fitted, checked = (points(begin, width, cells, count) for count in (kFitted, kChecked))
    knots = begin + width * np.arange(-kDegree, cells + kDegree + 1)
    values, _, _ = derivatives(net, torch.from_numpy(fitted))
    spline = make_lsq_spline(fitted, values.numpy(), knots, kDegree)
    values, slopes, _ = (part.numpy() for part in derivatives(net, torch.from_numpy(checked)))
    of_values = relative_error(spline(checked), values)
    return max(of_values, relative_error(spline.derivative()(checked), slopes))


def error_of_model(path, cells):
    """Return the largest error of the splines of a model's embedding nets."""
    model = load_npz(path).requires_grad_(False)
    worst = 0.0
    for centre in range(len(model.sel)):
        for t, net in enumerate(model.emb):
            s = torch.tensor([0, 1 / SHORTEST], dtype=torch.float64)
            begin, end = ((s - model.davg[centre, t, 0]) / model.dstd[centre, t, 0]).tolist()
            of_net = error_of_spline(partial(net, centre=centre), begin, end, cells)
            worst = max(worst, of_net)
    return worst


def times(atoms, seconds):
    """Return {number of cells: time relative to that of tabulated_sum}."""
    d, kind, davg, dstd, grid, *_ = inputs(atoms, torch.float64)
    R = environment(d.detach(), RCUT_SMTH, RCUT, dstd[0]).requires_grad_()
    x = R.detach()[..., 0].contiguous().requires_grad_()
    table = torch.randn(KINDS, CELLS, 6, M, dtype=torch.float64)
    table_grid = torch.tensor([TABLE_GRID] * KINDS, dtype=torch.float64)
    upstream = torch.randn(atoms, 4, M, dtype=torch.float64)

    def splines(functions, C):
        sums = []
        for few, kinds in zip(*(t.split(max(1, BLOCK // (4 * len(C)))) for t in (d, kind))):
            P = calcops.ops.library.environment_spline(
                few, kinds, davg, dstd, grid, functions, RCUT_SMTH, RCUT
            )
            sums.append(calcops.ops.library.matrix_product(P.view(-1, len(C)), C).view(-1, 4, M))
        return torch.cat(sums)

    calls = {
        "tabulated_sum": (
            partial(calcops.ops.library.tabulated_sum, x, R, kind, table, table_grid),
            (x, R),
        )
    }
    for cells in TIMED:
        functions = cells + kDegree
        C = torch.randn(KINDS * functions, M, dtype=torch.float64)
        calls[cells] = partial(splines, functions, C), d
    best = {name: [float("inf")] * 2 for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (forward, leaves) in calls.items():
            marks = [time.thread_time()]
            T = forward()
            marks.append(time.thread_time())
            torch.autograd.grad(T, leaves, upstream)
            marks.append(time.thread_time())
            best[name] = np.minimum(best[name], np.diff(marks))
    of_table = sum(best.pop("tabulated_sum"))
    return {cells: sum(of_cells) / of_table for cells, of_cells in best.items()}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--atoms", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| cells | time / tabulated_sum's | error |\n|---|---|---|", flush=True)
    ratios = times(options.atoms, options.seconds)
    for cells in COUNTS:
        ratio = f"{ratios[cells]:.2f}" if cells in ratios else ""
        error = error_of_model(options.model, cells)
        print(f"| {cells} | {ratio} | {error:.0e} |", flush=True)


if __name__ == "__main__":
    main()
