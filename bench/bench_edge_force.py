"""Times of edge_force_virial on the CPU, of one read of its inputs, and of torch's index_add_.

    python bench/bench_edge_force.py [--seconds 1] [--calls]

The first line is the time of a call that has almost nothing to compute, and of torch.mm.

The column `read` is the time to read as many bytes as a call needs, with as many threads, in the
same run. `/` are times relative to it, and to PyTorch's, which calls index_add_ three times. Each
figure is the minimum of many. The graph has
12,288 atoms with 92 neighbours each. The index of a neighbour differs from that of its centre by at
most 2,000, as in a list from a cell grid. The CPU kernel gets no edge_order, because it would not
use one. With an order by atoms, it would read the edges in random order, and the edges have more
bytes than the sums of the atoms.

These variants of the kernel were slower (GCC 12, AVX2, Zen 3, one thread of a machine under load).
The figures are their times divided by that of the kernel. No command prints them, because the
variants are not kept.

    variant                                                 sorted edges    shuffled edges
    scalar loops over the 3 x 4 products                    1.5 to 2.3      1.2 to 1.6
    nothing prefetched                                      1.2 to 1.5      1.1 to 1.2
    only the centres not prefetched                                         2
    sums of centres and of neighbours in arrays apart       1.0             1.0 to 1.2
    setting a block of sums inlined into the loop           1.1 to 1.4
    the centre's sum as three numbers                                       1.3 to 1.4
    float32 converted four at a time (AVX or generic)       0.9 to 1.2      1.0 to 1.5
    small pages                                             1.05
    small pages, 100,000 atoms with 40 neighbours           1.5             2.2

GCC does not vectorise the scalar loops. Either layout of the sums takes three cache lines an edge.

When each thread allocated the sums of its task, two threads took longer than one (27 ms and 16 ms,
sorted float64). Now the caller allocates the sums of all tasks. Two threads take 4.3 ms, and one
takes 7.1 ms.
"""

import argparse
import functools
import time

import torch

import calcops_jit

CALLS = 50  # that are timed together: fewer than fill the time slice of a busy machine


def graph(natoms, neighbors, order, dtype):
    generator = torch.Generator().manual_seed(0)
    centre = torch.arange(natoms).repeat_interleave(neighbors)
    step = torch.randint(-2000, 2001, centre.shape, generator=generator)
    edge_index = torch.stack([centre, (centre + step) % natoms])
    if order == "shuffled":
        edge_index = edge_index[:, torch.randperm(len(centre), generator=generator)]
    gradient = torch.randn(len(centre), 3, generator=generator, dtype=dtype)
    vec = torch.randn(len(centre), 3, generator=generator, dtype=dtype)
    return edge_index.contiguous(), gradient, vec, natoms


def with_index_add(edge_index, gradient, vec, natoms):
    force = gradient.new_zeros(natoms, 3)
    atom_virial = gradient.new_zeros(natoms, 9)
    force.index_add_(0, edge_index[0], gradient)
    force.index_add_(0, edge_index[1], gradient, alpha=-1)
    products = (gradient[:, :, None] * vec[:, None]).flatten(1)
    atom_virial.index_add_(0, edge_index[1], products, alpha=-1)
    return force, atom_virial.sum(0), atom_virial


def minimum_ms(functions, seconds):
    """Return the least milliseconds of each function. The functions take turns, so that the load of
    the machine is the same for all."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def print_calls(seconds):
    """Print the least microseconds of calls that have almost nothing to compute."""
    torch.set_num_threads(1)
    matrix, one = torch.eye(3), torch.ones(1, 3)
    edge_index = torch.zeros(2, 1, dtype=torch.int64)
    slot = torch.zeros(1, 1, 1, dtype=torch.int64)
    slots = slot, torch.ones(1, 1, 1, 4), torch.ones(1, 1, 4, 3), torch.ones(1, 1, 1, 3)
    functions = {
        "torch.mm": functools.partial(torch.mm, matrix, matrix),
        "edge_force": functools.partial(calcops_jit.edge_force, edge_index, one, 1),
        "force_virial": functools.partial(calcops_jit.force_virial, *slots),
        "warp_perspective": functools.partial(
            calcops_jit.warp_perspective, torch.ones(1, 2, 2), matrix
        ),
    }

    def repeated(function):
        def run():
            for _ in range(CALLS):
                function()

        return run

    times = minimum_ms([repeated(function) for function in functions.values()], seconds)
    costs = (f"{name} {1e3 * ms / CALLS:.2f}" for name, ms in zip(functions, times))
    print("us a call: " + ", ".join(costs))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1, help="for each row")
    parser.add_argument("--calls", action="store_true", help="only the cost of a call")
    options = parser.parse_args()
    seconds = options.seconds
    print_calls(4 * seconds)
    if options.calls:
        return
    print("| edges | type | threads | read, ms | edge_force_virial, ms | / read | / index_add_ |")
    print("|---|---|---|---|---|---|---|")
    for order in ("sorted", "shuffled"):
        for dtype in (torch.float64, torch.float32):
            inputs = graph(12_288, 92, order, dtype)
            bytes_needed = sum(x.numel() * x.element_size() for x in inputs[:3])
            yardstick = torch.ones(bytes_needed // 8, dtype=torch.float64)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                functions = (
                    yardstick.sum,
                    functools.partial(calcops_jit.edge_force_virial, *inputs),
                    functools.partial(with_index_add, *inputs),
                )
                read, kernel, index_add = minimum_ms(functions, seconds)
                print(
                    f"| {order} | {str(dtype)[6:]} | {threads} | {read:.2f} "
                    f"| {kernel:.2f} | {kernel / read:.2f} | {kernel / index_add:.2f} |"
                )


if __name__ == "__main__":
    main()
