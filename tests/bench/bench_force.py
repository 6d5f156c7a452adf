"""Force, virial and per-atom virial on the CPU against the memory, plain torch and deepmd-kit's own library.

    python tests/bench/bench_force.py          (make bench)

Prints the README's table (--readme writes it there) and draws force_roofline.png and force_growth.png into
tests/bench/results/. Times are the least of many runs, interleaved; whatever is compared comes from one run. `read`
reads the list once and what live slots hold once, `read + write` also writes the gradients: into new memory, as an
operator must (yardsticks.cpp). The peer is optional: `pip install --no-deps deepmd-kit` (LGPL) ships libdeepmd.so.

What was tried in the kernel and lost, as time over the kernel's (GCC 12, AVX-512, one thread, data in the L2 cache):
    plain loops over g[a] and R4[b]                             1.4 float64, 1.9 float32; backward of all 0.9 and 1.3
    __builtin_convertvector of four floats (GCC splits it)      2.5 float32
    columns of a 4 x 3 matrix gathered one number at a time     backward of all 1.2 float64, 1.3 float32
    an atom's sums as four rows of three, padded to four        1.0, 1.1 at 10^4 atoms: a third more memory
    prefetching by hand, 16 or 32 slots ahead                   1.0, at 10^4 atoms 0.9 to 1.5
    a buffer of calloc a task, mapped anew in every call        1.2 at 10^4 atoms
"""

import argparse
import ctypes
import datetime
import importlib.util
import itertools
import pathlib
import platform
import subprocess
import time

import torch

import calcops_jit

HERE = pathlib.Path(__file__).resolve().parent
SIZES = ((12288, 138), (13500, 500))
# Of one pair: g, the sums of R4 (x) g and of the centre; e and the products that give the gradients.
FLOP = {"force_virial": 21 + 24 + 3, "backward of dE": 27 + 20, "backward of all": 27 + 20 + 12 + 21 + 15}


def box(natoms):
    """Three factors of natoms, as equal as they can be."""
    factors = [(a, b, natoms // a // b) for a in range(1, 200) for b in range(a, 400) if natoms % (a * b) == 0]
    return min(factors, key=sum)


def lattice(natoms, neighbors, empty, dtype=torch.float64, device="cpu"):
    """A simple cubic crystal's list, the nearest sites first, the last `empty` part of each row -1."""
    sizes = box(natoms)
    reach = range(-5, 6)
    offsets = sorted(itertools.product(reach, reach, reach), key=lambda o: sum(x * x for x in o))
    live = round(neighbors * (1 - empty))
    site = torch.stack(torch.unravel_index(torch.arange(natoms, device=device), sizes), -1)
    target = site[:, None] + torch.tensor(offsets[1 : live + 1], device=device)
    target %= torch.tensor(sizes, device=device)
    list_neigh = torch.full((1, natoms, neighbors), -1, dtype=torch.int32, device=device)
    list_neigh[0, :, :live] = (target[..., 0] * sizes[1] + target[..., 1]) * sizes[2] + target[..., 2]
    del target
    generator = torch.Generator(device).manual_seed(0)
    size = (1, natoms, neighbors)
    options = dict(generator=generator, dtype=dtype, device=device)
    values = [torch.randn(*size, c, **options) for c in (4, 12, 3)]
    for x in values:
        x[:, :, live:] = 0  # deepmd-kit reads dE and Ri_d there
    dE, Ri_d, Rij = values
    return list_neigh, dE, Ri_d.view(1, natoms, 4 * neighbors, 3), Rij


def torch_force_virial(list_neigh, dE, Ri_d, Rij):
    """What one writes without custom operators: matmul, einsum, index_add_."""
    frames, natoms, neighbors = list_neigh.shape
    live = (list_neigh >= 0).unsqueeze(-1)
    g = torch.matmul(dE.unsqueeze(-2), Ri_d.view(frames, natoms, neighbors, 4, 3)).squeeze(-2) * live
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
        force(pointer(out[0]), pointer(dE), pointer(Ri_d), pointer(list_neigh), natoms, natoms, neighbors, 1)
        virial(*map(pointer, (*out[1:], dE, Ri_d, Rij, list_neigh)), natoms, natoms, neighbors)
        return out[0][None], out[1].view(1, 3, 3), out[2].view(1, natoms, 3, 3)


def minimum_ms(functions, seconds, least=2):
    """The least time of each, called in turn for `seconds` and at least so many times, in milliseconds."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while least > 0 or time.perf_counter() < end:
        least -= 1
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def kernels(inputs, live):
    """What is measured and what it is measured against, and the bytes that each must move."""
    list_neigh, dE, Ri_d, Rij = inputs
    natoms, neighbors = list_neigh.shape[1:]
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward, yardstick = torch.ops.calcops._force_virial_backward, torch.ops.yardsticks
    read = list_neigh.nbytes + live / neighbors * (dE.nbytes + Ri_d.nbytes + Rij.nbytes)
    small = sum(x.nbytes for x in upstream)
    calls = {
        "read": lambda: yardstick.read_write(list_neigh, [dE, Ri_d, Rij], [], live),
        "force_virial": lambda: calcops_jit.force_virial(*inputs),
        "private buffers": lambda: yardstick.private_buffers(*inputs),
        "read + write dE": lambda: yardstick.read_write(list_neigh, [Ri_d, Rij], [dE], live),
        "backward of dE": lambda: backward(*upstream, *inputs, 0, True, [True, False, False]),
        "read + write all": lambda: yardstick.read_write(list_neigh, [dE, Ri_d, Rij], [dE, Ri_d, Rij], live),
        "backward of all": lambda: backward(*upstream, *inputs, 0, True, [True] * 3),
    }
    nbytes = {
        "force_virial": read + small,
        "backward of dE": read - live / neighbors * dE.nbytes + dE.nbytes + small,
        "backward of all": read + dE.nbytes + Ri_d.nbytes + Rij.nbytes + small,
    }
    return calls, nbytes


def measure(natoms, neighbors, empty, dtype, deepmd, seconds):
    inputs = lattice(natoms, neighbors, empty, dtype)
    live = round(neighbors * (1 - empty))
    calls, nbytes = kernels(inputs, live)
    compiled = torch.compile(torch_force_virial, dynamic=False)
    peers = {"torch": lambda: torch_force_virial(*inputs), "torch.compile": lambda: compiled(*inputs)}
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
        row = dict(natoms=natoms, neighbors=neighbors, empty=empty, dtype=dtype, threads=threads)
        row |= {"pairs": natoms * live, "bytes": nbytes}
        row |= zip(calls, minimum_ms(list(calls.values()), seconds), strict=True)
        row |= zip(peers, minimum_ms(list(peers.values()), 0, least=2), strict=True)
        found.append(row)
    return found


TABLE = """| atoms x slots, empty | type | threads | read, ms | force_virial, ms | of read \
| backward of dE | of all | deepmd-kit | torch | torch.compile | determinism |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def as_markdown(row):
    def times(a, b, digits=2):
        return f"{row[a] / row[b]:.{digits}f}x" if a in row else "-"

    return (
        "| "
        + " | ".join(
            (
                f"{row['natoms']} x {row['neighbors']}, {row['empty']:.0%}",
                str(row["dtype"])[6:],
                str(row["threads"]),
                f"{row['read']:.1f}",
                f"{row['force_virial']:.1f}",
                times("force_virial", "read"),
                times("backward of dE", "read + write dE"),
                times("backward of all", "read + write all"),
                times("deepmd-kit", "force_virial", 0),
                times("torch", "force_virial", 0),
                times("torch.compile", "force_virial", 0),
                times("force_virial", "private buffers"),
            )
        )
        + " |"
    )


# Column, target of issue D, whether less is better.
TARGETS = (
    ("force_virial / read", lambda r: r["force_virial"] / r["read"], 1.6, True),
    ("backward of dE / read + write", lambda r: r["backward of dE"] / r["read + write dE"], 1.8, True),
    ("backward of all / read + write", lambda r: r["backward of all"] / r["read + write all"], 1.8, True),
    ("over deepmd-kit", lambda r: r["deepmd-kit"] / r["force_virial"] if "deepmd-kit" in r else None, 10, False),
    ("over torch", lambda r: r["torch"] / r["force_virial"], 10, False),
    ("over torch.compile", lambda r: r["torch.compile"] / r["force_virial"], 4, False),
    ("cost of determinism", lambda r: r["force_virial"] / r["private buffers"], 1.25, True),
)


def print_targets(rows):
    for name, ratio, target, less in TARGETS:
        values = [value for row in rows if (value := ratio(row)) is not None]
        if not values:
            continue
        reached = sum(value <= target if less else value >= target for value in values)
        worst = max(values) if less else min(values)
        sign = "<=" if less else ">="
        print(f"{name}: {sign} {target} in {reached} of {len(values)}, worst {worst:.2f}")


def overhead(seconds):
    """Microseconds of a call on one atom with one slot, and what an operator that does nothing takes."""
    torch.set_num_threads(1)
    inputs = lattice(1, 1, 0)
    inputs[0].zero_()
    small = lattice(192, 138, 1 / 3)
    functions = (
        lambda: [calcops_jit.force_virial(*inputs) for _ in range(100)],
        lambda: [torch.ops.yardsticks.empty_force_virial(*inputs) for _ in range(100)],
        lambda: [calcops_jit.force_virial(*small) for _ in range(10)],
    )
    ours, empty, small_us = (1e3 * ms / n for ms, n in zip(minimum_ms(functions, seconds), (100, 100, 10), strict=True))
    print(
        f"one atom, one slot: {ours:.1f} us, an empty operator {empty:.1f} us, overhead {ours - empty:.1f} us"
        f" (target <= 5); 192 x 138: {small_us:.0f} us"
    )


def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(field + ":")[1].split()[0])


def peak_bytes(call):
    """Most memory above what was there and what is returned, as the kernel counts pages."""
    ctypes.CDLL(None).malloc_trim(0)  # what malloc kept would not be counted
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    outputs = call()
    return max(0, resident("VmHWM") - before - sum(x.nbytes for x in outputs))


def growth(seconds):
    """Time and peak memory of every kernel from 10^3 to 10^7 pairs, one thread, float64, a third empty."""
    torch.set_num_threads(1)
    found = []
    for side in (2, 3, 4, 6, 9, 14, 19, 30, 42):
        inputs = lattice(side**3, 138, 1 / 3)
        calls, _ = kernels(inputs, 92)
        calls["force"] = lambda: calcops_jit.force(*inputs[:3])  # noqa: B023
        row = {"pairs": side**3 * 92, "inputs": sum(x.nbytes for x in inputs)}
        row |= zip(calls, minimum_ms(list(calls.values()), seconds), strict=True)
        row["peak"] = {name: peak_bytes(calls[name]) for name in ("force", *FLOP)}
        found.append(row)
    print("\npairs, and for each kernel ns a pair / peak memory above inputs and outputs as a part of the inputs")
    for row in found:
        cells = (
            f"{name} {1e6 * row[name] / row['pairs']:5.1f} / {row['peak'][name] / row['inputs']:5.1%}"
            for name in row["peak"]
        )
        bytes_only = (f"{name} {1e6 * row[name] / row['pairs']:5.1f}" for name in row if name.startswith("read"))
        print(f"{row['pairs']:9}  " + "   ".join((*cells, *bytes_only)))
    return found


def draw_roofline(rows, machine):
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    markers = {"force_virial": "o", "backward of dE": "^", "backward of all": "s"}
    peers = {"deepmd-kit": "v", "torch": "x", "torch.compile": "+"}
    for panel, threads in zip(panels, (1, 2), strict=True):
        here = [row for row in rows if row["threads"] == threads]
        rates = [(r["bytes"]["force_virial"]) / r["read"] / 1e6 for r in here]
        intensity = [0.1, 1.2]
        panel.fill_between(
            intensity,
            [min(rates) * x for x in intensity],
            [max(rates) * x for x in intensity],
            color="0.85",
            label=f"roof: reading once, {min(rates):.0f} to {max(rates):.0f} GB/s",
        )
        for name, marker in (markers | peers).items():
            work = name if name in markers else "force_virial"
            points = [
                (r["pairs"] * FLOP[work] / r["bytes"][work], r["pairs"] * FLOP[work] / r[name] / 1e6)
                for r in here
                if name in r
            ]
            if points:
                panel.scatter(*zip(*points, strict=True), marker=marker, label=name, zorder=3)
        title = f"{threads} thread{'s' * (threads > 1)}"
        panel.set(xscale="log", yscale="log", xlabel="flop a byte that must move", title=title)
        panel.set_ylim(0.02, 30 * max(rates))  # room for the legend
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8, ncols=2, loc="upper center")
    panels[0].set_ylabel("Gflop/s")
    figure.suptitle(machine, fontsize=9)
    figure.savefig(HERE / "results" / "force_roofline.png", dpi=90)


def draw_growth(rows, machine):
    import matplotlib.pyplot as plt

    figure, (time_panel, memory_panel) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    pairs = [row["pairs"] for row in rows]
    for name in ("read", "read + write all"):
        time_panel.plot(pairs, [row[name] for row in rows], "--", color="0.5" if name == "read" else "0.7", label=name)
    for name in rows[0]["peak"]:
        time_panel.plot(pairs, [row[name] for row in rows], "o-", markersize=4, label=name)
        peaks = [row["peak"][name] / 1e6 for row in rows]
        memory_panel.plot(pairs, [max(x, 1e-3) for x in peaks], "o-", markersize=4, label=name)
    memory_panel.plot(pairs, [row["inputs"] / 4e6 for row in rows], "k--", label="a quarter of the inputs")
    time_panel.set(title="time, ms", xlabel="pairs", xscale="log", yscale="log")
    memory_panel.set(title="peak above inputs and outputs, MB", xlabel="pairs", xscale="log", yscale="log")
    for panel in (time_panel, memory_panel):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(machine + ", 1 thread, float64, a third empty", fontsize=9)
    figure.savefig(HERE / "results" / "force_growth.png", dpi=90)


def machine():
    cpu = pathlib.Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    gcc = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    today = datetime.date.today()
    return f"{cpu}, 2 threads at most, {platform.system()}, GCC {gcc}, torch {torch.__version__}, {today}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6, help="for the kernels of each row")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
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
    (HERE / "results").mkdir(exist_ok=True)
    print(machine(), TABLE, sep="\n\n")
    rows = []
    for natoms, neighbors in SIZES:
        for dtype in (torch.float64, torch.float32):
            for empty in (1 / 3, 2 / 3):
                found = measure(options.atoms or natoms, neighbors, empty, dtype, deepmd, options.seconds)
                print(*map(as_markdown, found), sep="\n", flush=True)
                rows += found
    if options.readme:
        readme = HERE.parents[1] / "README.md"
        before, _, rest = readme.read_text().partition("<!-- results -->")
        pictures = [f"![{x}](tests/bench/results/force_{x}.png)" for x in ("roofline", "growth")]
        table = "\n".join((f"{machine()}\n", TABLE, *map(as_markdown, rows), "", *pictures))
        readme.write_text(f"{before}<!-- results -->\n{table}\n<!-- /{rest.partition('<!-- /')[2]}")
    print()
    print_targets(rows)
    overhead(min(options.seconds, 2))
    grown = growth(options.seconds / 4)
    if importlib.util.find_spec("matplotlib"):
        draw_roofline(rows, machine())
        draw_growth(grown, machine())
        print(f"pictures: {HERE / 'results'}/force_*.png")


if __name__ == "__main__":
    main()
