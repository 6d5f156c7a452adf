"""Times of force_virial on the CPU, relative to memory traffic, PyTorch and deepmd-kit's library.

    python bench/bench_force.py [--seconds 3] [--threads 1] [--atoms 12288] [--slots 138]

Prints the table of results/force.md. Each time is the least of many calls. The functions take turns,
so that compared times come from the same minutes.

Reading is a contiguous sum over as many bytes as the list and the live slots have. Reading and
writing also writes as many bytes as the gradients have (yardsticks.cpp). If empty slots lie between
live ones, a processor that prefetches moves more bytes. For these ratios, outputs go to memory that
is mapped already. For those to other programs, malloc works as it does by default. deepmd-kit (LGPL) is optional: `make bench` puts its libdeepmd.so into build/deepmd_kit.

These variants of the kernel were slower. The figures are their times divided by that of the kernel
(GCC 12, AVX-512, one thread, data in the L2 cache):
    plain loops over g[a] and R4[b]                         1.4 float64, 1.9 float32
        the same, backward of all                           0.9 float64, 1.3 float32
    __builtin_convertvector of four floats (GCC splits it)  2.5 float32
    columns of a 4 x 3 matrix gathered number by number,
        backward of all                                     1.2 float64, 1.3 float32
    an atom's sums as four rows of three, padded to four    1.0; at 10^4 atoms 1.1
        (a third more memory)
    one calloc buffer per task, mapped in every call        1.2 at 10^4 atoms

These variants change how rows are prefetched. The figures are for float64 and float32 (12,288 atoms
x 138 slots, one thread of an AVX2 machine, Zen 3, under load):
                                                    near          any           between
    no prefetch (the kernel before)                 1.07, 1.29    1.03, 1.29
    a list of a row's live slots, in blocks of four 1.02, 1.06    0.91, 1.06    1.34, 0.90
On that machine the empty ends of rows cost as much as if they were read (1.5 to 1.7 of reading). No
order or distance of prefetching changes that, and neither do large pages for the inputs.
"""

import argparse
import ctypes
import itertools
import pathlib
import sys
import time

import torch

import calcops_jit

HERE = pathlib.Path(__file__).resolve().parent
# {row of the table: (pattern of lattice(), empty part of a row)}
LISTS = {
    "near atoms": ("lattice", 1 / 3),
    "near atoms, 67 % empty": ("lattice", 2 / 3),
    "any atoms": ("random", 1 / 3),
    "any atoms, empty slots between": ("scattered", 1 / 3),
}
DEEPMD = pathlib.Path(__file__).resolve().parents[1] / "build" / "deepmd_kit" / "deepmd"


def box(natoms):
    """Return three factors of natoms that are as equal as possible."""
    factors = []
    for a in range(1, 200):
        for b in range(a, 400):
            if natoms % (a * b) == 0:
                factors.append((a, b, natoms // a // b))
    return min(factors, key=sum)


def lattice(natoms, neighbors, empty, dtype=torch.float64, device="cpu", pattern="lattice"):
    """Return list_neigh, dE, Ri_d and Rij of a simple cubic crystal. The nearest sites come first
    in a row, and the last part of the row, as large as `empty`, is -1.

    The pattern "random" has any atoms instead of near ones, and "scattered" has the -1 anywhere.
    """
    sizes = box(natoms)
    reach = range(-5, 6)
    offsets = itertools.product(reach, reach, reach)
    offsets = sorted(offsets, key=lambda offset: sum(x * x for x in offset))
    live = round(neighbors * (1 - empty))
    site = torch.stack(torch.unravel_index(torch.arange(natoms, device=device), sizes), -1)
    target = site[:, None] + torch.tensor(offsets[1 : live + 1], device=device)
    target %= torch.tensor(sizes, device=device)
    list_neigh = torch.full((1, natoms, neighbors), -1, dtype=torch.int32, device=device)
    x, y, z = target.unbind(-1)
    list_neigh[0, :, :live] = (x * sizes[1] + y) * sizes[2] + z
    del target, x, y, z
    generator = torch.Generator(device).manual_seed(0)
    size = (1, natoms, neighbors)
    if pattern == "random":
        list_neigh[0, :, :live].random_(natoms, generator=generator)
    if pattern == "scattered":
        order = torch.rand(size, generator=generator, device=device).argsort(-1)
        list_neigh = list_neigh.gather(2, order)
    options = dict(generator=generator, dtype=dtype, device=device)
    values = [torch.randn(*size, c, **options) for c in (4, 12, 3)]
    for x in values:
        x[list_neigh < 0] = 0  # deepmd-kit reads dE and Ri_d there
    dE, Ri_d, Rij = values
    return list_neigh, dE, Ri_d.view(1, natoms, 4 * neighbors, 3), Rij


def torch_force_virial(list_neigh, dE, Ri_d, Rij):
    """Return the results of force_virial, computed with matmul, einsum and index_add_."""
    frames, natoms, neighbors = list_neigh.shape
    live = (list_neigh >= 0).unsqueeze(-1)
    derivatives = Ri_d.view(frames, natoms, neighbors, 4, 3)
    g = torch.matmul(dE.unsqueeze(-2), derivatives).squeeze(-2) * live
    rows = list_neigh.clamp(min=0) + natoms * torch.arange(frames)[:, None, None]
    rows = rows.flatten().long()
    force = torch.zeros(frames * natoms, 3, dtype=dE.dtype).index_add_(0, rows, g.view(-1, 3))
    force = force.view(frames, natoms, 3) - g.sum(2)
    w = torch.einsum("bnka,bnkc->bnkac", g, Rij)
    atom_virial = torch.zeros(frames * natoms, 9, dtype=dE.dtype).index_add_(0, rows, w.view(-1, 9))
    atom_virial = atom_virial.view(frames, natoms, 3, 3)
    return force, atom_virial.sum(1), atom_virial


class DeepMD:
    """prod_force_a_cpu and prod_virial_a_cpu of libdeepmd.so, for one frame and int32."""

    def __init__(self):
        self.library = ctypes.CDLL(str(DEEPMD / "lib" / "libdeepmd.so"))

    def __call__(self, list_neigh, dE, Ri_d, Rij):
        real = "d" if dE.dtype == torch.float64 else "f"
        force = self.library[f"_ZN6deepmd16prod_force_a_cpuI{real}EEvPT_PKS1_S4_PKiiiii"]
        virial = self.library[f"_ZN6deepmd17prod_virial_a_cpuI{real}EEvPT_S2_PKS1_S4_S4_PKiiii"]
        natoms, neighbors = list_neigh.shape[1:]
        shapes = (natoms, 3), (9,), (natoms, 9)
        f, v, av = (torch.empty(*shape, dtype=dE.dtype) for shape in shapes)

        def pointers(*tensors):
            return [ctypes.c_void_p(x.data_ptr()) for x in tensors]

        force(*pointers(f, dE, Ri_d, list_neigh), natoms, natoms, neighbors, 1)
        virial(*pointers(v, av, dE, Ri_d, Rij, list_neigh), natoms, natoms, neighbors)
        return f[None], v.view(1, 3, 3), av.view(1, natoms, 3, 3)


def minimum_ms(functions, seconds, least=2):
    """Return the least milliseconds of each function. They take turns for `seconds`, and at least
    `least` times."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    turns = 0
    while turns < least or time.perf_counter() < end:
        turns += 1
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def keep_freed_memory():
    """Let malloc keep freed memory from now on, so that outputs go to mapped memory."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def kernels(inputs, live):
    """Return the calls of kernels and of the memory traffic that they need, by name."""
    list_neigh, dE, Ri_d, Rij = inputs
    neighbors = list_neigh.shape[2]
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward = torch.ops.calcops._force_virial_backward
    read_write = torch.ops.yardsticks.read_write
    exact = [x.flatten()[: x.numel() // neighbors * live] for x in (dE, Ri_d, Rij)]
    return {
        "force_virial": lambda: calcops_jit.force_virial(*inputs),
        "read": lambda: read_write([list_neigh, *exact], []),
        "backward of dE": lambda: backward(*upstream, *inputs, 0, True, [True, False, False]),
        "read, write dE": lambda: read_write([list_neigh, *exact[1:]], [dE]),
        "backward of all": lambda: backward(*upstream, *inputs, 0, True, [True] * 3),
        "read, write all": lambda: read_write([list_neigh, *exact], [dE, Ri_d, Rij]),
    }


def peers_of(inputs):
    """Return calls of other programs by name, whose results are those of force_virial."""
    compiled = torch.compile(torch_force_virial, dynamic=False)
    peers = {
        "PyTorch": lambda: torch_force_virial(*inputs),
        "torch.compile": lambda: compiled(*inputs),
    }
    if DEEPMD.is_dir():
        deepmd = DeepMD()
        deepmd.library.omp_set_num_threads(torch.get_num_threads())
        peers["deepmd-kit"] = lambda: deepmd(*inputs)
    tolerance = 1e-12 if inputs[1].dtype == torch.float64 else 1e-4
    results = calcops_jit.force_virial(*inputs)
    for name, peer in peers.items():
        for result, expected in zip(results, peer(), strict=True):
            difference = ((result - expected).abs().max() / expected.abs().max()).item()
            assert difference <= tolerance, (name, difference)
    return peers


# {column: (call, memory traffic)}
MEMORY = {
    "/ reading": ("force_virial", "read"),
    "backward of dE / reading, writing": ("backward of dE", "read, write dE"),
    "backward of all / reading, writing": ("backward of all", "read, write all"),
}


def least_times(calls, seconds):
    """Return the least milliseconds of calls by name."""
    return dict(zip(calls, minimum_ms(list(calls.values()), seconds, least=3), strict=True))


def beside_peers(inputs, seconds):
    """Return the milliseconds of force_virial, and ratios to the times of peers by column."""
    calls = {"own": lambda: calcops_jit.force_virial(*inputs)} | peers_of(inputs)
    times = least_times(calls, seconds)
    own = times.pop("own")
    return own, {f"/ {peer}": own / ms for peer, ms in times.items()}


def beside_memory(inputs, empty, seconds):
    """Return ratios to the times of memory traffic by column."""
    live = round(inputs[0].shape[2] * (1 - empty))
    times = least_times(kernels(inputs, live), seconds)
    return {column: times[call] / times[traffic] for column, (call, traffic) in MEMORY.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="for the kernels of each row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--atoms", type=int, default=12288)
    parser.add_argument("--slots", type=int, default=138)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not DEEPMD.is_dir():
        print("deepmd-kit is not installed: its column is left out", file=sys.stderr)
    calcops_jit.load(
        "yardsticks",
        [HERE / "yardsticks.cpp"],
        ["-march=native", "-fopenmp", "-DAT_PER_OPERATOR_HEADERS"],
        extra_ldflags=["-fopenmp"],
    )
    cases = list(itertools.product(LISTS, (torch.float64, torch.float32)))

    def inputs_of(name, dtype):
        pattern, empty = LISTS[name]
        return lattice(options.atoms, options.slots, empty, dtype, pattern=pattern)

    of_peers = [beside_peers(inputs_of(*case), options.seconds) for case in cases]
    keep_freed_memory()  # of which the peers must not profit, since it is not the default
    rows = []
    for case, (milliseconds, ratios) in zip(cases, of_peers, strict=True):
        empty = LISTS[case[0]][1]
        of_memory = beside_memory(inputs_of(*case), empty, options.seconds)
        rows.append((case, milliseconds, of_memory | ratios))

    columns = rows[0][2]
    print(f"| neighbours | type | force_virial, ms | {' | '.join(columns)} |")
    print(f"|{'---|' * (3 + len(columns))}")
    for (name, dtype), milliseconds, ratios in rows:
        cells = [name, str(dtype)[6:], f"{milliseconds:.1f}"]
        cells += [f"{ratio:.2f}" for ratio in ratios.values()]
        print(f"| {' | '.join(cells)} |")
    parts = []
    for column in rows[0][2].keys() - MEMORY.keys():
        ratios = [row[2][column] for row in rows]
        parts.append(f"{min(ratios):.2f}-{max(ratios):.2f} of {column.removeprefix('/ ')}'s")
    print(f"\nThe time of `force_virial` is {', '.join(sorted(parts))}.")


if __name__ == "__main__":
    main()
