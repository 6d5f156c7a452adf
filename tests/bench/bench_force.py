"""Force, virial and per-atom virial on the CPU beside memory, torch and deepmd-kit's library.

    python tests/bench/bench_force.py          (make bench)

Prints the table of results/force.md; --write writes it there and draws its picture. Times are the
least of many runs, interleaved. Whatever is compared comes from one run.

`read` is one contiguous sum of as many bytes as the list and the live slots hold, `read + write`
also writes as many as the gradients hold (yardsticks.cpp). Where empty slots lie between live ones,
a processor that reads ahead moves more. Outputs go to memory that is mapped already; "new" is
memory that the system maps for the call. The peer is optional: `pip install --no-deps deepmd-kit`
(LGPL) ships libdeepmd.so.

These variants of the kernel lost. Their time over the kernel's (GCC 12, AVX-512, one thread, data
in the L2 cache):
    plain loops over g[a] and R4[b]                         1.4 float64, 1.9 float32
        the same, backward of all                           0.9 float64, 1.3 float32
    __builtin_convertvector of four floats (GCC splits it)  2.5 float32
    columns of a 4 x 3 matrix gathered number by number,
        backward of all                                     1.2 float64, 1.3 float32
    an atom's sums as four rows of three, padded to four    1.0; at 10^4 atoms 1.1
        (a third more memory)
    a buffer of calloc a task, mapped anew in every call    1.2 at 10^4 atoms

And with a row prefetched, for float64 and float32 (12,288 atoms x 138 slots, one thread of an AVX2
machine, Zen 3, under load):
                                                    lattice       random        scattered -1
    no prefetch (the kernel before)                 1.07, 1.29    1.03, 1.29
    a list of a row's live slots, in blocks of four 1.02, 1.06    0.91, 1.06    1.34, 0.90
There the empty ends of rows cost what they hold: reading them takes as long as leaving them out,
whatever is prefetched, in which order and how far ahead (1.5 to 1.7 of `read`). Large pages for
the inputs do not change that.
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
    """Three factors of natoms, as equal as they can be."""
    factors = [
        (a, b, natoms // a // b)
        for a in range(1, 200)
        for b in range(a, 400)
        if natoms % (a * b) == 0
    ]
    return min(factors, key=sum)


def lattice(natoms, neighbors, empty, dtype=torch.float64, device="cpu", pattern="lattice"):
    """A simple cubic crystal's list, the nearest sites first, the last `empty` part of each row -1.

    "random": any atoms instead of near ones; "scattered": the -1 anywhere in a row.
    """
    sizes = box(natoms)
    reach = range(-5, 6)
    offsets = sorted(itertools.product(reach, reach, reach), key=lambda o: sum(x * x for x in o))
    live = round(neighbors * (1 - empty))
    site = torch.stack(torch.unravel_index(torch.arange(natoms, device=device), sizes), -1)
    target = site[:, None] + torch.tensor(offsets[1 : live + 1], device=device)
    target %= torch.tensor(sizes, device=device)
    list_neigh = torch.full((1, natoms, neighbors), -1, dtype=torch.int32, device=device)
    list_neigh[0, :, :live] = (target[..., 0] * sizes[1] + target[..., 1]) * sizes[2] + target[
        ..., 2
    ]
    del target
    generator = torch.Generator(device).manual_seed(0)
    size = (1, natoms, neighbors)
    if pattern == "random":
        list_neigh[0, :, :live].random_(natoms, generator=generator)
    if pattern == "scattered":
        list_neigh = list_neigh.gather(
            2, torch.rand(size, generator=generator, device=device).argsort(-1)
        )
    options = dict(generator=generator, dtype=dtype, device=device)
    values = [torch.randn(*size, c, **options) for c in (4, 12, 3)]
    for x in values:
        x[list_neigh < 0] = 0  # deepmd-kit reads dE and Ri_d there
    dE, Ri_d, Rij = values
    return list_neigh, dE, Ri_d.view(1, natoms, 4 * neighbors, 3), Rij


def torch_force_virial(list_neigh, dE, Ri_d, Rij):
    """What one writes without custom operators: matmul, einsum, index_add_."""
    frames, natoms, neighbors = list_neigh.shape
    live = (list_neigh >= 0).unsqueeze(-1)
    g = (
        torch.matmul(dE.unsqueeze(-2), Ri_d.view(frames, natoms, neighbors, 4, 3)).squeeze(-2)
        * live
    )
    rows = (list_neigh.clamp(min=0) + natoms * torch.arange(frames)[:, None, None]).flatten().long()
    force = torch.zeros(frames * natoms, 3, dtype=dE.dtype).index_add_(0, rows, g.view(-1, 3))
    force = force.view(frames, natoms, 3) - g.sum(2)
    w = torch.einsum("bnka,bnkc->bnkac", g, Rij)
    atom_virial = torch.zeros(frames * natoms, 9, dtype=dE.dtype).index_add_(0, rows, w.view(-1, 9))
    atom_virial = atom_virial.view(frames, natoms, 3, 3)
    return force, atom_virial.sum(1), atom_virial


class DeepMD:
    """prod_force_a_cpu and prod_virial_a_cpu of libdeepmd.so; one frame, int32."""

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
        out = [torch.empty(*shape, dtype=dE.dtype) for shape in ((natoms, 3), (9,), (natoms, 9))]
        pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
        force(*map(pointer, (out[0], dE, Ri_d, list_neigh)), natoms, natoms, neighbors, 1)
        virial(*map(pointer, (*out[1:], dE, Ri_d, Rij, list_neigh)), natoms, natoms, neighbors)
        return out[0][None], out[1].view(1, 3, 3), out[2].view(1, natoms, 3, 3)


def minimum_ms(functions, seconds, least=2):
    """The least milliseconds of each, called in turn for `seconds`, `least` times at least."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while least > 0 or time.perf_counter() < end:
        least -= 1
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def keep_memory(keep):
    """Lets malloc keep what is freed, so that outputs lie in mapped memory; else it maps anew."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0 if keep else 65536)  # M_MMAP_MAX
    libc.mallopt(-1, 2**31 - 1 if keep else 128 << 10)  # M_TRIM_THRESHOLD
    libc.malloc_trim(0)


def kernels(inputs, live):
    """What is measured and what it is measured against, and the bytes that each must move."""
    list_neigh, dE, Ri_d, Rij = inputs
    natoms, neighbors = list_neigh.shape[1:]
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward, yardstick = torch.ops.calcops._force_virial_backward, torch.ops.yardsticks
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
    """The least time of each; "..., new": gradients written into memory mapped for the call."""
    keep_memory(True)
    found = dict(zip(calls, minimum_ms(list(calls.values()), seconds), strict=True))
    keep_memory(False)
    fresh = ("read + write all", "backward of all")
    times = minimum_ms([calls[name] for name in fresh], seconds / 4)
    return found | {f"{name}, new": ms for name, ms in zip(fresh, times, strict=True)}


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
    ours = calcops_jit.force_virial(*inputs)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for name, peer in (*peers.items(), ("private buffers", calls["private buffers"])):
        for a, b in zip(ours, peer(), strict=True):
            difference = ((a - b).abs().max() / b.abs().max()).item()
            assert difference <= tolerance, (name, difference)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if deepmd:
            deepmd.set_threads(threads)
        row = dict(
            natoms=natoms,
            neighbors=neighbors,
            empty=empty,
            pattern=pattern,
            dtype=dtype,
            threads=threads,
        )
        row |= {"pairs": natoms * live, "bytes": nbytes}
        row |= minimum_of_calls(calls, seconds)
        row |= zip(peers, minimum_ms(list(peers.values()), 0, least=2), strict=True)
        found.append(row)
    return found


TABLE = """| atoms x slots, empty | type | threads | read, ms | force_virial, ms | of read \
| backward of dE | of all | of all, new | deepmd-kit | torch | torch.compile | determinism |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def as_markdown(row):
    def times(a, b, digits=2):
        return f"{row[a] / row[b]:.{digits}f}x" if a in row else "-"

    return (
        "| "
        + " | ".join(
            (
                f"{row['natoms']} x {row['neighbors']}, {row['pattern']}, {row['empty']:.0%}",
                str(row["dtype"])[6:],
                str(row["threads"]),
                f"{row['read']:.1f}",
                f"{row['force_virial']:.1f}",
                times("force_virial", "read"),
                times("backward of dE", "read + write dE"),
                times("backward of all", "read + write all"),
                times("backward of all, new", "read + write all, new"),
                times("deepmd-kit", "force_virial", 0),
                times("torch", "force_virial", 0),
                times("torch.compile", "force_virial", 0),
                times("force_virial", "private buffers"),
            )
        )
        + " |"
    )


def at_most(float64, float32, elsewhere=None):
    """A target for each type, and perhaps another where the list is no lattice's."""
    return lambda row: (
        elsewhere
        if elsewhere and row["pattern"] != "lattice"
        else (float64, float32)[row["dtype"] == torch.float32]
    )


def over(name):
    return lambda row: row[name] / row["force_virial"] if name in row else None


# Column, target, whether less is better.
TARGETS = (
    ("force_virial / read", lambda r: r["force_virial"] / r["read"], at_most(1.3, 1.4, 1.6), True),
    (
        "backward of dE / read + write",
        lambda r: r["backward of dE"] / r["read + write dE"],
        at_most(1.4, 1.4),
        True,
    ),
    (
        "backward of all / read + write",
        lambda r: r["backward of all"] / r["read + write all"],
        at_most(1.4, 1.9),
        True,
    ),
    ("over deepmd-kit", over("deepmd-kit"), lambda row: 25, False),
    ("over torch", over("torch"), lambda row: 15, False),
    ("over torch.compile", over("torch.compile"), lambda row: 4, False),
    (
        "cost of determinism",
        lambda r: r["force_virial"] / r["private buffers"],
        lambda row: 1.25,
        True,
    ),
)


def print_targets(rows):
    for name, ratio, target, less in TARGETS:
        values = [(value, target(row)) for row in rows if (value := ratio(row)) is not None]
        if not values:
            continue
        reached = sum(value <= aim if less else value >= aim for value, aim in values)
        worst, aim = (max if less else min)(values, key=lambda pair: pair[0] / pair[1])
        print(
            f"{name}: reached in {reached} of {len(values)}, worst {worst:.2f} "
            f"(target {'<=' if less else '>='} {aim})"
        )


def overhead(seconds):
    """Microseconds of a call on one atom with one slot, and of an operator that does nothing."""
    torch.set_num_threads(1)
    inputs = lattice(1, 1, 0)
    inputs[0].zero_()
    small = lattice(192, 138, 1 / 3)
    functions = (
        lambda: [calcops_jit.force_virial(*inputs) for _ in range(100)],
        lambda: [torch.ops.yardsticks.empty_force_virial(*inputs) for _ in range(100)],
        lambda: [calcops_jit.force_virial(*small) for _ in range(10)],
    )
    ours, empty, small_us = (
        1e3 * ms / n for ms, n in zip(minimum_ms(functions, seconds), (100, 100, 10), strict=True)
    )
    print(
        f"one atom, one slot: {ours:.1f} us, an empty operator {empty:.1f} us, "
        f"overhead {ours - empty:.1f} us (target <= 5); 192 x 138: {small_us:.0f} us"
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
    parser.add_argument("--atoms", type=int, help="instead of those of the table, to try it out")
    options = parser.parse_args()
    deepmd = DeepMD() if importlib.util.find_spec("deepmd") else None
    if deepmd is None:
        print("deepmd-kit is not installed (pip install --no-deps deepmd-kit): its column is empty")
    calcops_jit.load(
        "yardsticks",
        [HERE / "yardsticks.cpp"],
        ["-march=native", "-fopenmp", "-DAT_PER_OPERATOR_HEADERS"],
        extra_ldflags=["-fopenmp"],
        extra_include_paths=[HERE.parents[1] / "ops"],
    )
    print(machine(), TABLE, sep="\n\n")
    rows = []
    for natoms, neighbors in SIZES:
        for dtype in (torch.float64, torch.float32):
            for pattern, empty in PATTERNS:
                atoms = options.atoms or natoms
                found = measure(atoms, neighbors, empty, pattern, dtype, deepmd, options.seconds)
                print(*map(as_markdown, found), sep="\n", flush=True)
                rows += found
    if options.write:
        page = HERE / "results" / "force.md"
        before, _, rest = page.read_text().partition("<!-- results -->")
        table = "\n".join((f"{machine()}\n", TABLE, *map(as_markdown, rows)))
        page.write_text(f"{before}<!-- results -->\n{table}\n<!-- /{rest.partition('<!-- /')[2]}")
        force_picture.draw()
    print()
    print_targets(rows)
    overhead(min(options.seconds, 2))


if __name__ == "__main__":
    main()
