"""Times of the force operators on a GPU, of copies of the device, and of kernels with atomics.

    python bench/bench_force_cuda.py          (make bench; needs a GPU)

`of copy` compares a call with a device-to-device copy that moves as many bytes as the call must
move: the list, the live slots and the outputs, each once. It is the time of the copy divided by
that of the call. Calls are replayed from a CUDA graph over sets of inputs that together are several
times as large as the L2 cache. So the times include neither work of the host nor hits in the cache.
The table of growth and the system of 192 atoms have one set of inputs. `copy ms` of the growth is
the time of a copy of all inputs.

`shuffled` numbers the atoms at random, so that neighbours are far apart in memory. `unfused` is
matmul, scatter of the force and scatter of the virial, with one atomic for each component.
`fused atomics` is one kernel without a fixed order (yardsticks_cuda.cu). force_cuda.json in $OUT or
in build/gpu_check is written after each table. With matplotlib, force_growth_cuda.png is drawn
there. bench_kernels_cuda.py has the other operators.
"""

import importlib.util
import itertools
import pathlib
import sys

import gpu_results
import torch
from bench_force import lattice, torch_force_virial

import calcops_jit

BEYOND_L2 = 400e6  # bytes; the L2 cache of an H200 has 60e6
SIZES = ((12288, 138), (13500, 500))


def milliseconds(calls, repeats=20):
    """Return the mean milliseconds of a call, in the fastest replay of a graph with all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The list keeps the outputs, so that each call writes to memory of its own.
        outputs = [call() for call in calls]  # noqa: F841
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
    """Return the milliseconds of a copy that reads nbytes / 2 and writes as many.

    Together the sources are larger than the L2 cache.
    """
    count = max(2, round(BEYOND_L2 / nbytes))
    sources = [torch.ones(nbytes // 8, dtype=torch.float32, device="cuda") for _ in range(count)]
    return milliseconds([source.clone for source in sources])


def unfused(list_neigh, dE, Ri_d, Rij):
    center = -torch.matmul(dE.flatten(2).unsqueeze(-2), Ri_d).squeeze(-2)
    return torch.ops.yardsticks.atomics(list_neigh, dE, Ri_d, Rij, center)


def shuffled(list_neigh, dE, Ri_d, Rij):
    """Return the same inputs with the atoms in random order."""
    natoms = list_neigh.shape[1]
    options = {"dtype": list_neigh.dtype, "device": list_neigh.device}
    order = torch.randperm(natoms, generator=torch.Generator().manual_seed(0))
    order = order.to(list_neigh.device)
    new_index = torch.empty(natoms + 1, **options)
    new_index[order] = torch.arange(natoms, **options)
    new_index[-1] = -1  # the entry -1 of an empty slot stays -1
    renamed = new_index[list_neigh.long()]
    return [x[:, order] for x in (renamed, dE, Ri_d, Rij)]


def relative_difference(results, expected):
    differences = [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, expected, strict=True)
    ]
    return max(differences)


def table(natoms, neighbors, empty, dtype, order):
    inputs = lattice(natoms, neighbors, empty, dtype, "cuda")
    if order == "shuffled":
        inputs = shuffled(*inputs)
    list_neigh, *values = inputs
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

    # This backward does not read dE, and it writes the gradient of every slot.
    dE_only = read + (1 - live) * values[0].nbytes
    indexed_calls = [
        lambda s=s, index=index: calcops_jit.force_virial(*s, neighbor_index=index)
        for s, index in zip(sets, indices, strict=True)
    ]
    rows = {
        "force_virial": (read, [lambda s=s: calcops_jit.force_virial(*s) for s in sets]),
        "force_virial, index given": (read + indices[0].nbytes, indexed_calls),
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
    result = {"natoms": natoms, "neighbors": neighbors, "empty": 1 - live}
    result |= {"dtype": str(dtype), "order": order}
    print(f"{natoms} atoms x {neighbors} slots, {1 - live:.0%} empty, {dtype}, {order}")
    with torch.device("cuda"):
        expected = torch_force_virial(*inputs)
        result["difference from torch"] = relative_difference(outputs, expected)
        for name, (nbytes, calls) in rows.items():
            time, copy = milliseconds(calls), copy_milliseconds(int(nbytes))
            result[name] = {"ms": time, "of copy": copy / time, "GB/s": nbytes / time / 1e6}
            print(
                f"  {name:36}{time:9.4f} ms "
                f"{nbytes / time / 1e6:7.0f} GB/s {copy / time:7.1%} of copy"
            )
    ms = result["force_virial"]["ms"]
    result["over torch"] = result["torch matmul + einsum + index_add_"]["ms"] / ms
    result["over unfused"] = result["unfused"]["ms"] / ms
    result["cost of determinism"] = ms / result["fused atomics"]["ms"]
    print(
        f"  {result['over torch']:.1f}x over torch, "
        f"{result['over unfused']:.1f}x over unfused, cost of determinism "
        f"{result['cost of determinism']:.2f}x; difference {result['difference from torch']:.1e}\n"
    )
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    result["agrees"] = result["difference from torch"] <= limit
    return result


def small_system():
    """Return the microseconds of a call for 192 atoms x 138 slots, in a graph of one call and in
    one of twenty. At this size the launches take most of the time."""
    inputs = lattice(192, 138, 1 / 3, device="cuda")
    index = calcops_jit.neighbor_index(inputs[0])

    def call():
        return calcops_jit.force_virial(*inputs)

    def indexed_call():
        return calcops_jit.force_virial(*inputs, neighbor_index=index)

    times = {f"{n} in a graph, us": 1e3 * milliseconds([call] * n) for n in (1, 20)}
    times |= {f"{n} with an index, us": 1e3 * milliseconds([indexed_call] * n) for n in (1, 20)}
    print("192 atoms x 138 slots, force_virial:", times)
    return times


def growth_row(side):
    inputs = lattice(side**3, 138, 1 / 3, torch.float32, "cuda")
    upstream = [torch.randn_like(x) for x in calcops_jit.force_virial(*inputs)]
    backward = torch.ops.calcops._force_virial_backward
    row = {"pairs": side**3 * 92, "inputs": sum(x.nbytes for x in inputs)}
    functions = {
        "force_virial": lambda: calcops_jit.force_virial(*inputs),
        "backward of all": lambda: backward(*upstream, *inputs, 0, True, [True] * 3),
    }
    for name, function in functions.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            written = sum(x.nbytes for x in function())
            peak = torch.cuda.max_memory_allocated() - before - written
            row[name] = {"ms": milliseconds([function]), "peak": peak / row["inputs"]}
        except torch.OutOfMemoryError:  # the graph has a second copy of the gradients
            print(f"{name} of {row['pairs']} pairs does not fit")
        torch.cuda.empty_cache()
    copied = min(row["inputs"], 10**9)  # two sources and two results of a gigabyte fit
    row["copy ms"] = copy_milliseconds(copied) * row["inputs"] / copied
    print(row)
    return row


def growth():
    """Yield the times and the peak memory without inputs and outputs, for 10^4 to 5x10^8 pairs in
    float32 with 1/3 empty slots. The largest size needs 85 GB."""
    for side in (5, 10, 22, 48, 103, 176):
        try:
            yield growth_row(side)
        except torch.OutOfMemoryError:
            print(f"{side**3} atoms do not fit into the memory of this GPU")
        torch.cuda.empty_cache()


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
    source = pathlib.Path(__file__).parent / "yardsticks_cuda.cu"
    calcops_jit.load("yardsticks_cuda", [source], with_cuda=True)
    path = gpu_results.folder() / "force_cuda.json"
    measured = {"machine": gpu_results.describe(), "192 x 138": small_system()}
    measured |= {"growth": [], "tables": []}
    for row in growth():
        measured["growth"].append(row)
        gpu_results.write_json(path, measured)
    if importlib.util.find_spec("matplotlib"):
        draw_growth(measured["growth"], path.with_name("force_growth_cuda.png"))
    dtypes = (torch.float64, torch.float32)
    for size, dtype, empty, order in itertools.product(
        SIZES, dtypes, (1 / 3, 2 / 3), ("sorted", "shuffled")
    ):
        measured["tables"].append(table(*size, empty, dtype, order))
        gpu_results.write_json(path, measured)
    print(path)
    if not all(result["agrees"] for result in measured["tables"]):
        sys.exit("bench_force_cuda: results differ from those of PyTorch")


if __name__ == "__main__":
    main()
