"""tabulated_sum and the embedding net that its table replaces, in ns a pair on one thread.

    python bench/bench_tabulated_sum.py [--atoms 2048] [--seconds 2]

The sizes are those of water in ../calcops/deepmd: 84 neighbours in 138 slots, two kinds of
neighbour, x from 0 to 13 in cells of 0.01, and 100 functions. The net has layers of 25, 50 and 100.
They take turns, and the least time counts. `gradient` is the time of the gradients of x and R after
the forward. If all x are in one cell, the coefficients stay in the cache.
"""

import argparse
import time
from functools import partial

import calcops.ops
import torch

NEIGHBOURS, SLOTS, KINDS, CELLS, WIDTH, M = 84, 138, 2, 1300, 0.01, 100


def inputs(atoms, dtype):
    generator = torch.Generator().manual_seed(0)
    x = CELLS * WIDTH * torch.rand(atoms, SLOTS, generator=generator, dtype=torch.float64) ** 2
    R = torch.randn(atoms, SLOTS, 4, generator=generator, dtype=torch.float64)
    kind = torch.randint(KINDS, (atoms, SLOTS), generator=generator, dtype=torch.int32)
    empty = torch.rand(atoms, SLOTS, generator=generator).argsort(1) >= NEIGHBOURS
    table = torch.randn(KINDS, CELLS, 6, M, generator=generator, dtype=torch.float64)
    end = CELLS * WIDTH
    grid = torch.tensor([[0, WIDTH, end, WIDTH, end]] * KINDS, dtype=torch.float64)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, R)]
    return [*leaves, kind.masked_fill(empty, -1), table.to(dtype), grid]


class Net(torch.nn.Module):
    """The sum with the net itself, in blocks of 4,096 pairs, which fit the cache."""

    def __init__(self, dtype):
        super().__init__()
        sizes = [1, 25, 50, M]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b, dtype=dtype) for a, b in zip(sizes, sizes[1:])
        )

    def forward(self, x, R):
        T = []
        for few_x, few_R in zip(x.split(4096 // NEIGHBOURS), R.split(4096 // NEIGHBOURS)):
            g = few_x[..., None]
            for layer in self.layers:
                y = torch.tanh(layer(g))
                is_double = y.shape[-1] == 2 * g.shape[-1]
                g = y + torch.cat([g, g], -1) if is_double else y
            T.append(torch.einsum("isa,ism->iam", few_R, g))
        return torch.cat(T)


def timed(function, times):
    """Return the result of the function, and append its seconds to `times`."""
    begin = time.process_time()
    result = function()
    times.append(time.process_time() - begin)
    return result


def compare(atoms, dtype, seconds):
    x, R, kind, table, grid = inputs(atoms, dtype)
    net = Net(dtype)
    few_x, few_R = (t[:, :NEIGHBOURS].detach().contiguous().requires_grad_() for t in (x, R))
    upstream = torch.randn(atoms, 4, M, dtype=dtype)
    x_in_one_cell = torch.full_like(x, WIDTH / 2).requires_grad_()

    def tabulated(x):
        return calcops.ops.library.tabulated_sum(x, R, kind, table, grid)

    rows = {
        "tabulated_sum": (lambda: tabulated(x), (x, R)),
        "the same, all x in one cell": (lambda: tabulated(x_in_one_cell), (x_in_one_cell, R)),
        "the net in PyTorch": (lambda: net(few_x, few_R), (few_x, few_R)),
    }
    times = {name: ([], []) for name in rows}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["tabulated_sum"][0]) < 3:
        for name, (forward, leaves) in rows.items():
            T = timed(forward, times[name][0])
            gradient = partial(torch.autograd.grad, T, leaves, upstream)
            timed(gradient, times[name][1])
    for name, seconds_of_calls in times.items():
        forward, gradient = (1e9 * min(each) / (atoms * NEIGHBOURS) for each in seconds_of_calls)
        print(f"| {name}, {str(dtype).removeprefix('torch.')} | {forward:.0f} | {gradient:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| ns a pair | forward | gradient |\n|---|---|---|")
    for dtype in (torch.float64, torch.float32):
        compare(options.atoms, dtype, options.seconds)


if __name__ == "__main__":
    main()
