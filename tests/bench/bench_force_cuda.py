"""The force operators on a GPU against the device's own copy and against atomics, plain and fused.

    python tests/bench/bench_force_cuda.py          (make bench; needs a GPU)

`of copy` is the rate of the compulsory bytes (the list once, what live slots hold once, every
output once) over the rate of a device-to-device copy that moves as many bytes. Calls are replayed
from a CUDA graph that goes round enough sets of inputs to be several times the L2, so neither the
host nor the cache flatters them. `shuffled` numbers the atoms at random: neighbours are far apart
in memory then. `unfused` is matmul, scatter force, scatter virial, each with an atomic a component,
`fused atomics` one kernel without a fixed order (yardsticks_cuda.cu). The rows are added to
results.json ($OUT, else here), and force_growth_cuda.png is drawn beside it where matplotlib is
installed.
"""

import importlib.util
import json
import os
import pathlib

import torch
from bench_force import lattice, torch_force_virial

import calcops_jit

BEYOND_L2 = 400e6  # bytes; the L2 of an H200 has 50e6
SIZES = ((12288, 138), (13500, 500))


def milliseconds(calls, repeats=20):
    """The least time of one of `calls`, replayed together from one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The outputs lie apart from each other, as the inputs do.
        kept = [call() for call in calls]  # noqa: F841
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / len(calls)


def copy_milliseconds(nbytes):
    """A copy that reads nbytes/2 and writes nbytes/2, from as many sources as exceed the L2."""
    count = max(2, round(BEYOND_L2 / nbytes))
    sources = [torch.ones(nbytes // 8, dtype=torch.float32, device="cuda") for _ in range(count)]
    return milliseconds([source.clone for source in sources])


def unfused(list_neigh, dE, Ri_d, Rij):
    center = -torch.matmul(dE.flatten(2).unsqueeze(-2), Ri_d).squeeze(-2)
    return torch.ops.yardsticks.atomics(list_neigh, dE, Ri_d, Rij, center)


def shuffled(list_neigh, *values):
    natoms = list_neigh.shape[1]
    order = torch.randperm(natoms, generator=torch.Generator().manual_seed(0))
    name = torch.empty(natoms + 1, dtype=list_neigh.dtype)
    # The last one is what -1 indexes.
    name[order], name[-1] = torch.arange(natoms, dtype=name.dtype), -1
    return name[list_neigh.long()][:, order], *(x[:, order] for x in flat(*values))


def flat(dE, Ri_d, Rij):
    return dE, Ri_d.view(*dE.shape, 3), Rij


def relative_difference(ours, theirs):
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)
    )


def table(natoms, neighbors, empty, dtype, order):
    inputs = lattice(natoms, neighbors, empty, dtype)
    inputs = [x.cuda() for x in (shuffled(*inputs) if order == "shuffled" else inputs)]
    list_neigh, values = inputs[0], inputs[1:]
    live = (list_neigh >= 0).double().mean().item()
    outputs = calcops_jit.force_virial(*inputs)
    upstream = [torch.randn_like(x) for x in outputs]
    small = sum(x.nbytes for x in outputs)
    read = list_neigh.nbytes + live * sum(x.nbytes for x in values) + small
    copies = max(2, round(BEYOND_L2 / read))
    sets = [[x.clone().contiguous() for x in inputs] for _ in range(copies)]
    indices = [calcops_jit.neighbor_index(s[0]) for s in sets]

    def backward(mask):
        op = torch.ops.calcops._force_virial_backward
        return [lambda s=s: op(*upstream, *s, 0, True, mask) for s in sets]

    # dE is not read, its gradient is written in every slot.
    dE_only = read + (1 - live) * values[0].nbytes
    rows = {
        "force_virial": (read, [lambda s=s: calcops_jit.force_virial(*s) for s in sets]),
        "force_virial, index given": (
            read + indices[0].nbytes,
            [
                lambda s=s, index=index: calcops_jit.force_virial(*s, neighbor_index=index)
                for s, index in zip(sets, indices, strict=True)
            ],
        ),
        "force": (
            read - live * values[2].nbytes - outputs[2].nbytes,
            [lambda s=s: calcops_jit.force(*s[:3]) for s in sets],
        ),
        "backward of dE": (dE_only, backward([True, False, False])),
        "backward of dE, Ri_d, Rij": (read + sum(x.nbytes for x in values), backward([True] * 3)),
        "fused atomics": (read, [lambda s=s: torch.ops.yardsticks.atomics(*s) for s in sets]),
        "unfused": (read, [lambda s=s: unfused(*s) for s in sets]),
        "torch matmul + einsum + index_add_": (
            read,
            [lambda s=s: torch_force_virial(*s) for s in sets],
        ),
    }
    found = {
        "natoms": natoms,
        "neighbors": neighbors,
        "empty": 1 - live,
        "dtype": str(dtype),
        "order": order,
    }
    print(f"{natoms} atoms x {neighbors} slots, {1 - live:.0%} empty, {dtype}, {order}")
    with torch.device("cuda"):
        found["difference from torch"] = relative_difference(outputs, torch_force_virial(*inputs))
        for name, (nbytes, calls) in rows.items():
            time, copy = milliseconds(calls), copy_milliseconds(int(nbytes))
            found[name] = {"ms": time, "of copy": copy / time, "GB/s": nbytes / time / 1e6}
            print(
                f"  {name:36}{time:9.4f} ms "
                f"{nbytes / time / 1e6:7.0f} GB/s {copy / time:7.1%} of copy"
            )
    ours = found["force_virial"]["ms"]
    found["over torch"] = found["torch matmul + einsum + index_add_"]["ms"] / ours
    found["over unfused"] = found["unfused"]["ms"] / ours
    found["cost of determinism"] = ours / found["fused atomics"]["ms"]
    print(
        f"  {found['over torch']:.1f}x over torch, "
        f"{found['over unfused']:.1f}x over unfused, cost of determinism "
        f"{found['cost of determinism']:.2f}x; difference {found['difference from torch']:.1e}\n"
    )
    assert found["difference from torch"] <= (1e-12 if dtype == torch.float64 else 1e-5)
    return found


def small_system():
    """192 atoms x 138 slots, where launches count: a call alone in its graph, and one of twenty."""
    inputs = [x.cuda() for x in lattice(192, 138, 1 / 3)]
    call = lambda: calcops_jit.force_virial(*inputs)  # noqa: E731
    index = calcops_jit.neighbor_index(inputs[0])
    indexed = lambda: calcops_jit.force_virial(*inputs, neighbor_index=index)  # noqa: E731
    found = {f"{n} in a graph, us": 1e3 * milliseconds([call] * n) for n in (1, 20)}
    found |= {f"{n} with an index, us": 1e3 * milliseconds([indexed] * n) for n in (1, 20)}
    print("192 atoms x 138 slots, force_virial:", found)
    return found


def growth_row(side):
    inputs = lattice(side**3, 138, 1 / 3, torch.float32, "cuda")
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward = torch.ops.calcops._force_virial_backward
    row = {"pairs": side**3 * 92, "inputs": sum(x.nbytes for x in inputs)}
    for name, function in {
        "force_virial": lambda: calcops_jit.force_virial(*inputs),
        "backward of all": lambda: backward(*upstream, *inputs, 0, True, [True] * 3),
    }.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            written = sum(x.nbytes for x in function())
            peak = torch.cuda.max_memory_allocated() - before - written
            row[name] = {"ms": milliseconds([function]), "peak": peak / row["inputs"]}
        except torch.OutOfMemoryError:  # a graph keeps its outputs: the gradients are there twice
            print(f"{name} of {row['pairs']} pairs does not fit")
        torch.cuda.empty_cache()
    row["copy ms"] = copy_milliseconds(min(row["inputs"], 10**10)) * max(1, row["inputs"] / 1e10)
    print(row)
    return row


def growth():
    """Time and peak memory beyond inputs and outputs, 10^4 to 5x10^8 pairs, float32, 1/3 empty."""
    return [growth_row(side) for side in (5, 10, 22, 48, 103, 176)]


def draw_growth(rows, path):
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 5), layout="constrained")
    pairs = [row["pairs"] for row in rows]
    panel.plot(pairs, [row["copy ms"] for row in rows], "k--", label="copy of as many bytes")
    for name in ("force_virial", "backward of all"):
        points = [(row["pairs"], row[name]["ms"]) for row in rows if name in row]
        panel.plot(*zip(*points, strict=True), "o-", label=name)
    panel.set(
        xscale="log", yscale="log", xlabel="pairs", ylabel="ms", title=torch.cuda.get_device_name()
    )
    panel.legend()
    figure.savefig(path, dpi=90)


def main():
    if not torch.cuda.is_available():
        print("bench_force_cuda: PyTorch sees no GPU, nothing to measure")
        return
    calcops_jit.load(
        "yardsticks_cuda", [pathlib.Path(__file__).parent / "yardsticks_cuda.cu"], with_cuda=True
    )
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found["tables"] = [
        table(*size, empty, dtype, order)
        for size in SIZES
        for dtype in (torch.float64, torch.float32)
        for empty in (1 / 3, 2 / 3)
        for order in ("sorted", "shuffled")
    ]
    found["192 x 138"] = small_system()
    found["growth"] = growth()
    path = pathlib.Path(
        os.environ.get("OUT", pathlib.Path(__file__).resolve().parents[2]), "results.json"
    )
    results = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(results | {"bench_force_cuda": found}, indent=2) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw_growth(found["growth"], path.with_name("force_growth_cuda.png"))
    print(path)


if __name__ == "__main__":
    main()
