"""Times of force_virial on the CPU, and of memory traffic, PyTorch and deepmd-kit's library.

    python bench/bench_force.py          (make bench)

Prints the table of results/force.md. --write also writes it there and draws its picture. Each time
is the least of many runs. The functions take turns, so that compared times come from the same
minutes.

`read` is a contiguous sum over as many bytes as the list and the live slots have. `read + write`
also writes as many bytes as the gradients have (yardsticks.cpp). If empty slots lie between live
ones, a processor that prefetches moves more bytes. The outputs go to memory that is mapped already.
In the columns with "new", they go to memory that the system maps during the call. deepmd-kit (LGPL)
is optional. `pip install --no-deps deepmd-kit` installs libdeepmd.so.

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
                                                    lattice       random        scattered -1
    no prefetch (the kernel before)                 1.07, 1.29    1.03, 1.29
    a list of a row's live slots, in blocks of four 1.02, 1.06    0.91, 1.06    1.34, 0.90
On that machine the empty ends of rows cost as much as if they were read (1.5 to 1.7 of `read`). No
order or distance of prefetching changes that, and neither do large pages for the inputs.
"""

import argparse
import ctypes
import datetime
import importlib.util
import itertools
import pathlib
import platform
import re
import subprocess
import time

import force_picture
import torch

import calcops_jit

HERE = pathlib.Path(__file__).resolve().parent
SIZES = ((12288, 138), (13500, 500))
PATTERNS = (("lattice", 1 / 3), ("lattice", 2 / 3), ("random", 1 / 3), ("scattered", 1 / 3))


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
        folder = pathlib.Path(importlib.util.find_spec("deepmd").submodule_search_locations[0])
        self.library = ctypes.CDLL(str(folder / "lib" / "libdeepmd.so"))

    def set_threads(self, threads):
        self.library.omp_set_num_threads(threads)

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


def keep_memory(keep):
    """Let malloc keep freed memory, so that outputs go to mapped memory. If `keep` is false, the
    system maps new memory for each output."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0 if keep else 65536)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1 if keep else 128 << 10)  # M_TRIM_THRESHOLD
    libc.malloc_trim(0)


def kernels(inputs, live):
    """Return the calls of kernels and of yardsticks by name, and the bytes that each kernel must
    move."""
    list_neigh, dE, Ri_d, Rij = inputs
    natoms, neighbors = list_neigh.shape[1:]
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward = torch.ops.calcops._force_virial_backward
    yardstick = torch.ops.yardsticks
    exact = [x.flatten()[: x.numel() // neighbors * live] for x in (dE, Ri_d, Rij)]
    read = sum(x.nbytes for x in (list_neigh, *exact))
    small = sum(x.nbytes for x in upstream)
    calls = {
        "read": lambda: yardstick.read_write([list_neigh, *exact], []),
        "force_virial": lambda: calcops_jit.force_virial(*inputs),
        "private buffers": lambda: yardstick.private_buffers(*inputs),
        "read + write dE": lambda: yardstick.read_write([list_neigh, *exact[1:]], [dE]),
        "backward of dE": lambda: backward(*upstream, *inputs, 0, True, [True, False, False]),
        "read + write all": lambda: yardstick.read_write([list_neigh, *exact], [dE, Ri_d, Rij]),
        "backward of all": lambda: backward(*upstream, *inputs, 0, True, [True] * 3),
    }
    nbytes = {
        "force_virial": read + small,
        "backward of dE": read - exact[0].nbytes + dE.nbytes + small,
        "backward of all": read + dE.nbytes + Ri_d.nbytes + Rij.nbytes + small,
    }
    return calls, nbytes


def minimum_of_calls(calls, seconds):
    """Return the least milliseconds of each call. Names with ", new" are calls whose gradients go
    to new memory."""
    keep_memory(True)
    times = dict(zip(calls, minimum_ms(list(calls.values()), seconds), strict=True))
    keep_memory(False)
    names = ("read + write all", "backward of all")
    new_times = minimum_ms([calls[name] for name in names], seconds / 4)
    return times | {f"{name}, new": ms for name, ms in zip(names, new_times, strict=True)}


def measure(natoms, neighbors, empty, pattern, dtype, deepmd, seconds):
    inputs = lattice(natoms, neighbors, empty, dtype, pattern=pattern)
    live = round(neighbors * (1 - empty))
    calls, nbytes = kernels(inputs, live)
    compiled = torch.compile(torch_force_virial, dynamic=False)
    peers = {
        "torch": lambda: torch_force_virial(*inputs),
        "torch.compile": lambda: compiled(*inputs),
    }
    if deepmd:
        peers["deepmd-kit"] = lambda: deepmd(*inputs)
    results = calcops_jit.force_virial(*inputs)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for name, peer in (*peers.items(), ("private buffers", calls["private buffers"])):
        for result, expected in zip(results, peer(), strict=True):
            difference = ((result - expected).abs().max() / expected.abs().max()).item()
            assert difference <= tolerance, (name, difference)

    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if deepmd:
            deepmd.set_threads(threads)
        row = {"natoms": natoms, "neighbors": neighbors, "empty": empty, "pattern": pattern}
        row |= {"dtype": dtype, "threads": threads}
        row |= {"pairs": natoms * live, "bytes": nbytes}
        row |= minimum_of_calls(calls, seconds)
        row |= zip(peers, minimum_ms(list(peers.values()), 0, least=2), strict=True)
        rows.append(row)
    return rows


TABLE = """| atoms x slots, empty | type | threads | read, ms | force_virial, ms | of read \
| backward of dE | of all | of all, new | deepmd-kit | torch | torch.compile | determinism |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def as_markdown(row):
    def ratio(a, b, digits=2):
        return f"{row[a] / row[b]:.{digits}f}x" if a in row else "-"

    cells = (
        f"{row['natoms']} x {row['neighbors']}, {row['pattern']}, {row['empty']:.0%}",
        str(row["dtype"])[6:],
        str(row["threads"]),
        f"{row['read']:.1f}",
        f"{row['force_virial']:.1f}",
        ratio("force_virial", "read"),
        ratio("backward of dE", "read + write dE"),
        ratio("backward of all", "read + write all"),
        ratio("backward of all, new", "read + write all, new"),
        ratio("deepmd-kit", "force_virial", 0),
        ratio("torch", "force_virial", 0),
        ratio("torch.compile", "force_virial", 0),
        ratio("force_virial", "private buffers"),
    )
    return f"| {' | '.join(cells)} |"


def target_for(float64, float32, other_pattern=None):
    """Return a function that returns the target of a row.

    The target depends on the type. With `other_pattern`, all patterns but "lattice" have that one.
    """

    def target(row):
        if other_pattern and row["pattern"] != "lattice":
            return other_pattern
        return float32 if row["dtype"] == torch.float32 else float64

    return target


# Name, numerator and denominator of a ratio, its target, and whether less is better.
TARGETS = (
    ("force_virial / read", "force_virial", "read", target_for(1.3, 1.4, 1.6), True),
    (
        "backward of dE / read + write",
        "backward of dE",
        "read + write dE",
        target_for(1.4, 1.4),
        True,
    ),
    (
        "backward of all / read + write",
        "backward of all",
        "read + write all",
        target_for(1.4, 1.9),
        True,
    ),
    ("over deepmd-kit", "deepmd-kit", "force_virial", target_for(25, 25), False),
    ("over torch", "torch", "force_virial", target_for(15, 15), False),
    ("over torch.compile", "torch.compile", "force_virial", target_for(4, 4), False),
    ("cost of determinism", "force_virial", "private buffers", target_for(1.25, 1.25), True),
)


def print_targets(rows):
    for name, numerator, denominator, target_of, less_is_better in TARGETS:
        values = []
        for row in rows:
            if numerator in row:
                values.append((row[numerator] / row[denominator], target_of(row)))
        if not values:
            continue
        if less_is_better:
            reached = sum(value <= target for value, target in values)
            worst, target = max(values, key=lambda pair: pair[0] / pair[1])
        else:
            reached = sum(value >= target for value, target in values)
            worst, target = min(values, key=lambda pair: pair[0] / pair[1])
        sign = "<=" if less_is_better else ">="
        print(
            f"{name}: reached in {reached} of {len(values)}, worst {worst:.2f} "
            f"(target {sign} {target})"
        )


def print_overhead(seconds):
    """Print the microseconds of a call on one atom with one slot, and of an operator that does
    nothing."""
    torch.set_num_threads(1)
    inputs = lattice(1, 1, 0)
    inputs[0].zero_()
    small = lattice(192, 138, 1 / 3)
    functions = (
        lambda: [calcops_jit.force_virial(*inputs) for _ in range(100)],
        lambda: [torch.ops.yardsticks.empty_force_virial(*inputs) for _ in range(100)],
        lambda: [calcops_jit.force_virial(*small) for _ in range(10)],
    )
    one_ms, empty_ms, small_ms = minimum_ms(functions, seconds)
    one_us, empty_us, small_us = 10 * one_ms, 10 * empty_ms, 100 * small_ms
    print(
        f"one atom, one slot: {one_us:.1f} us, an empty operator {empty_us:.1f} us, "
        f"overhead {one_us - empty_us:.1f} us (target <= 5); 192 x 138: {small_us:.0f} us"
    )


def machine():
    processors = pathlib.Path("/proc/cpuinfo").read_text()
    cpu = re.search(r"(?:model name|CPU part)\s*: (.*)", processors)[1]
    gcc = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    today = datetime.date.today()
    system = f"{platform.system()}, GCC {gcc}, torch {torch.__version__}"
    return f"{cpu}, 2 threads at most, {system}, {today}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6, help="for the kernels of each row")
    parser.add_argument(
        "--write", action="store_true", help="put the table and its picture into results/force.md"
    )
    parser.add_argument("--atoms", type=int, help="instead of those of the table, for a short run")
    options = parser.parse_args()
    deepmd = DeepMD() if importlib.util.find_spec("deepmd") else None
    if deepmd is None:
        print("deepmd-kit is not installed (pip install --no-deps deepmd-kit): its column is empty")
    calcops_jit.load(
        "yardsticks",
        [HERE / "yardsticks.cpp"],
        ["-march=native", "-fopenmp", "-DAT_PER_OPERATOR_HEADERS"],
        extra_ldflags=["-fopenmp"],
        extra_include_paths=[HERE.parent / "ops"],
    )
    print(machine(), TABLE, sep="\n\n")
    rows = []
    for natoms, neighbors in SIZES:
        for dtype in (torch.float64, torch.float32):
            for pattern, empty in PATTERNS:
                atoms = options.atoms or natoms
                new = measure(atoms, neighbors, empty, pattern, dtype, deepmd, options.seconds)
                print(*map(as_markdown, new), sep="\n", flush=True)
                rows += new
    if options.write:
        page = HERE / "results" / "force.md"
        before, _, rest = page.read_text().partition("<!-- results -->")
        table = "\n".join((f"{machine()}\n", TABLE, *map(as_markdown, rows)))
        page.write_text(f"{before}<!-- results -->\n{table}\n<!-- /{rest.partition('<!-- /')[2]}")
        force_picture.draw()
    print()
    print_targets(rows)
    print_overhead(min(options.seconds, 2))


if __name__ == "__main__":
    main()
