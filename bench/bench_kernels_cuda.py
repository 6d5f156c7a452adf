"""Times of every operator's CUDA kernels, beside a device-to-device copy of as many bytes.

    python bench/bench_kernels_cuda.py [--only force] [--seconds 60]      needs a GPU
    python bench/bench_kernels_cuda.py --table kernels.json               needs none, like the next
    python bench/bench_kernels_cuda.py --rehearse

Prints a line for each case: the microseconds of a call in a replayed CUDA graph, the bytes that the
call must move, and the time of a copy that moves as many, as a share of the time of the call. A
call must read each input once, but not the padding of a neighbour list, and write each output once.
Each call of a graph has inputs of its own. Together they are larger than the L2 cache. kernels.json
in $OUT or in build/gpu_check is written after each case. A case that fails is a row with its error.
`torch.mm` and `grid_sample` are PyTorch's kernels, for comparison.

`--table` prints a kernels.json as Markdown, beside the predictions of results/cuda_predictions.md.
`--rehearse` runs each call once on the CPU with small inputs. `--once` runs each call once between
cudaProfilerStart and cudaProfilerStop, for ncu, which `gpu_check.py --parts ncu` starts.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bench_edge_force
import bench_environment_spline
import bench_force_cuda
import calcops.ops  # noqa: F401 - registers the operators, and so does calcops_jit
import gpu_results
import torch
from bench_force import lattice
from calcops.nep.invariants import terms_of

import calcops_jit  # noqa: F401

ops = torch.ops.calcops
models = torch.ops.calcops_models
BOTH_DTYPES = torch.float64, torch.float32
kFurther = "further cases"  # the name of those that cannot be made


class Case(NamedTuple):
    """A call that is measured. `nbytes` is what it must move; None: all arguments and results."""

    name: str
    call: Callable
    arguments: list
    nbytes: float | None = None


class Scale(NamedTuple):
    """The device and the sizes of all cases."""

    device: str
    atoms: int
    height: int
    width: int
    rows: int  # of a long matrix


ON_GPU = Scale("cuda", 12288, 2160, 3840, 1 << 20)
REHEARSAL = Scale("cpu", 192, 54, 96, 1 << 10)


def short(dtype):
    return str(dtype).removeprefix("torch.")


def bytes_of(*values):
    return sum(x.nbytes for x in values if isinstance(x, torch.Tensor))


def on(device, values):
    return [x.detach().to(device) if isinstance(x, torch.Tensor) else x for x in values]


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def empty_share(slots):
    """Return the share of empty slots, whose numbers a kernel need not read."""
    return (slots < 0).double().mean().item()


def upstream_of(results):
    """Return random upstream gradients of an operator's results."""
    return [torch.randn_like(x) for x in as_list(results)]


# ---- cases of each operator ----------------------------------------------------------------------


def force_cases(scale):
    for dtype in BOTH_DTYPES:
        inputs = lattice(scale.atoms, 138, 1 / 3, dtype, scale.device)
        for order in ("sorted", "shuffled"):
            x = bench_force_cuda.shuffled(*inputs) if order == "shuffled" else inputs
            x = [t.contiguous() for t in x]
            yield from force_cases_of(f"force {short(dtype)} {order}", x)
            if dtype == torch.float64:
                yield Case(f"neighbor_index {order}", ops.neighbor_index, x[:1])


def force_cases_of(name, inputs):
    list_neigh, *values = inputs
    outputs = ops.force_virial(*inputs)
    index = ops.neighbor_index(list_neigh)
    nbytes = bytes_of(*inputs, *outputs) - empty_share(list_neigh) * bytes_of(*values)

    def with_index(index, *x):
        return ops.force_virial(*x, neighbor_index=index)

    def backward(*x):
        return ops._force_virial_backward(*x, 0, True, [True] * 3)

    yield Case(f"{name}, index", with_index, [index, *inputs], nbytes + index.nbytes)
    yield Case(f"{name}, no index", ops.force_virial, inputs, nbytes)
    gradients = [*upstream_of(outputs), *inputs]
    yield Case(f"{name}, backward", backward, gradients, nbytes + bytes_of(*values))


def edge_cases(scale):
    natoms = scale.atoms
    for dtype in BOTH_DTYPES:
        for order in ("sorted", "shuffled"):
            inputs = bench_edge_force.graph(natoms, 92, order, dtype)[:3]
            name = f"edge_force {short(dtype)} {order}"
            inputs = on(scale.device, inputs)
            yield from edge_cases_of(name, inputs, natoms)
            if dtype == torch.float64:
                yield Case(f"edge_order {order}", lambda x: ops.edge_order(x, natoms), inputs[:1])


def edge_cases_of(name, inputs, natoms):
    order = ops.edge_order(inputs[0], natoms)
    batch = torch.arange(natoms, device=order.device) * 512 // natoms

    def forward(order, *x):
        return ops.edge_force_virial(*x, natoms, edge_order=order)

    def of_frames(order, batch, *x):
        return ops.edge_force_virial(*x, natoms, batch, 512, edge_order=order)

    def backward(order, *x):
        mask = [True] * 2
        return ops._edge_force_virial_backward(*x, natoms, None, 1, mask, edge_order=order)

    yield Case(f"{name}, order", forward, [order, *inputs])
    if name == "edge_force float32 sorted":
        yield Case(f"{name}, order, 512 frames", of_frames, [order, batch, *inputs])
    upstream = upstream_of(ops.edge_force_virial(*inputs, natoms))
    nbytes = bytes_of(*inputs, *upstream) + bytes_of(*inputs[1:])  # the gradients of the last two
    yield Case(f"{name}, backward", backward, [order, *upstream, *inputs], nbytes)


def warp_cases(scale):
    size = scale.height, scale.width
    matrix = [[0.9, 0.05, 40], [-0.04, 0.95, 30], [1e-5, -2e-5, 1]]
    matrix = torch.tensor([matrix], dtype=torch.float64, device=scale.device)
    source = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(scale.device)
    for dtype in (torch.float32, torch.uint8, torch.float16):
        image = (source * (255 if dtype == torch.uint8 else 1)).to(dtype)
        for interpolation in ("linear", "cubic"):

            def forward(image, matrix, interpolation=interpolation):
                options = interpolation, "constant", None, False
                return ops.warp_perspective(image, matrix, size, *options)

            yield Case(f"warp {short(dtype)} {interpolation}", forward, [image, matrix])
    yield from warp_derivative_cases(source, matrix)


def warp_derivative_cases(image, matrix):
    upstream = torch.randn_like(image)
    for name, mask in (("image", [True, False]), ("matrix", [False, True])):

        def backward(*x, mask=mask):
            options = "linear", "constant", None, False, 0, 0, mask
            return ops._warp_perspective_backward(*x, *options)

        inputs = [upstream, image, matrix]
        # The gradient of the image is written, but the image is not read. For the matrix it is.
        nbytes = 2 * upstream.nbytes
        yield Case(f"warp float32 linear, backward of {name}", backward, inputs, nbytes)
    height, width = image.shape[2:]
    axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    y, x = torch.meshgrid(*axes, indexing="ij")
    grid = torch.stack([x, y], -1)[None].to(image.device)

    def sample(image, grid):
        return torch.nn.functional.grid_sample(image, grid, align_corners=True)

    def sample_backward(*x):
        return torch.ops.aten.grid_sampler_2d_backward(*x, 0, 0, True, [True, True])

    yield Case("torch grid_sample float32", sample, [image, grid])
    yield Case(
        "torch grid_sample float32, backward of both", sample_backward, [upstream, image, grid]
    )


def density_cases(scale):
    generator = torch.Generator().manual_seed(0)
    size = scale.atoms, 96
    direction = torch.randn(*size, 3, generator=generator, dtype=torch.float64)
    direction /= direction.norm(dim=-1, keepdim=True)
    share = torch.rand(*size, 1, generator=generator, dtype=torch.float64)
    d = direction * (6 * share ** (1 / 3)).clamp(min=1)
    kind = torch.randint(4, size, generator=generator)
    grid = torch.tensor([[0, 6.0]] * 4, dtype=torch.float64)
    for dtype in BOTH_DTYPES:
        for harmonics, functions in ((1, 8), (25, 8), (25, 16)):
            table = torch.randn(4, 261, functions, generator=generator, dtype=torch.float64)
            x = on(scale.device, (d.to(dtype), kind, table.to(dtype), grid, harmonics))
            of = f"harmonics {harmonics}, functions {functions}"
            yield from density_cases_of(f"density {short(dtype)}, {of}", x)


def density_cases_of(name, inputs):
    tangent = torch.randn_like(inputs[0]).unsqueeze(2)
    gradients = [*upstream_of(models.density(*inputs)), *inputs]
    yield Case(name, models.density, inputs)
    yield Case(f"{name}, backward of d", models._density_backward, gradients)
    yield Case(f"{name}, backward of table", models._density_table_backward, gradients)
    yield Case(f"{name}, one tangent", models._density_along, [*inputs, tangent])


def net_cases(scale):
    """A net of NEP89's size, and all invariants of orders two and three."""
    factors, invariant, coefficient = terms_of(4, True, True, ())
    numbers = torch.Generator().manual_seed(0)
    functions, neurons = 5, 80
    P = int(invariant.max()) + 1
    for dtype in BOTH_DTYPES:

        def random(*shape, dtype=dtype):
            return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)

        x = (
            random(scale.atoms, functions),
            random(25, scale.atoms, functions),
            torch.randint(2, (scale.atoms,), generator=numbers),
            factors,
            invariant,
            coefficient.to(dtype),
            random(2, functions, neurons),
            random(2, P, functions, neurons),
            random(2, neurons),
            random(2, neurons),
            random(2),
        )
        yield Case(f"density_net {short(dtype)}", models.density_net, on(scale.device, x))


def pair_cases(scale):
    numbers = torch.Generator().manual_seed(0)
    size = scale.atoms, 96
    positions = torch.randn(scale.atoms, 3, generator=numbers, dtype=torch.float64)
    list_neigh = torch.randint(scale.atoms, size, generator=numbers, dtype=torch.int32)
    image = torch.randint(27, size, generator=numbers, dtype=torch.int32)
    offset = torch.zeros(27, 3, dtype=torch.float64)
    x = positions, list_neigh, image, offset, 2.0, 64
    yield Case("near_pairs", models.near_pairs, on(scale.device, x))
    d = 4 * torch.randn(*size, 3, generator=numbers, dtype=torch.float64)
    table = torch.tensor([[0.5, 1.0, 5.0, 3.0, 5.0, 1.0, 3.0, 0.4, 1.0, 0.2]] * 27).double()
    x = d, image.long(), table
    yield Case("screened_repulsion float64", models.screened_repulsion, on(scale.device, x))


def environment_cases(scale):
    for dtype in BOTH_DTYPES:
        x = on(scale.device, bench_environment_spline.inputs(scale.atoms, dtype))
        d, kind = x[:2]
        name = f"environment_spline {short(dtype)}"
        upstream = upstream_of(models.environment_spline(*x))
        nbytes = bytes_of(*x, *upstream) - empty_share(kind) * d.nbytes
        yield Case(name, models.environment_spline, x, nbytes)
        gradients = [*upstream, *x, "quintic"]
        nbytes += d.nbytes
        yield Case(f"{name}, backward", models._environment_spline_backward, gradients, nbytes)


def table_cases(scale):
    def backward(*x):
        return models._tabulated_sum_backward(*x, 0, [True, True])

    for dtype in BOTH_DTYPES:
        x = on(scale.device, bench_environment_spline.table_inputs(scale.atoms, dtype))
        slots, kind = x[:2], x[2]
        name = f"tabulated_sum {short(dtype)}"
        upstream = upstream_of(models.tabulated_sum(*x))
        nbytes = bytes_of(*x, *upstream) - empty_share(kind) * bytes_of(*slots)
        yield Case(name, models.tabulated_sum, x, nbytes)
        nbytes += bytes_of(*slots)
        yield Case(f"{name}, backward", backward, [*upstream, *x], nbytes)


def product_cases(scale):
    for dtype in BOTH_DTYPES:
        for rows, size in ((scale.atoms, "12288"), (scale.rows, "2^20")):
            a = torch.randn(rows, 64, dtype=dtype, device=scale.device)
            b = torch.randn(64, 100, dtype=dtype, device=scale.device)
            of = f"{short(dtype)} {size} x 64 x 100"
            yield Case(f"matrix_product {of}", models.matrix_product, [a, b])
            yield Case(f"torch.mm {of}", torch.mm, [a, b])


# In the order of what is most wanted, because the last ones may find no time.
OPERATORS = {
    "force": force_cases,
    "edge_force": edge_cases,
    "warp": warp_cases,
    "density": density_cases,
    "density_net": net_cases,
    "pairs": pair_cases,
    "environment_spline": environment_cases,
    "tabulated_sum": table_cases,
    "matrix_product": product_cases,
}

# ---- measurements --------------------------------------------------------------------------------


def measured(case, nbytes):
    """Return the times of a call and of a copy in replayed CUDA graphs."""
    copies = max(1, min(64, math.ceil(bench_force_cuda.BEYOND_L2 / bytes_of(*case.arguments))))
    sets = [
        [x.clone() if isinstance(x, torch.Tensor) else x for x in case.arguments]
        for _ in range(copies)
    ]
    calls = [lambda x=x: case.call(*x) for x in sets]
    ms = bench_force_cuda.milliseconds(calls, repeats=12)
    copy_ms = bench_force_cuda.copy_milliseconds(round(nbytes))
    if copy_ms > 1.1 * ms:  # the call has done something else
        raise ValueError(f"{1e3 * ms:.1f} us are less than the {1e3 * copy_ms:.1f} us of a copy")
    rate = nbytes / ms / 1e6
    return {"us": 1e3 * ms, "copy us": 1e3 * copy_ms, "of copy": copy_ms / ms, "GB/s": rate}


def profiled(case):
    """Run a call once while ncu reads the counters of its kernels."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range(case.name):
        case.call(*case.arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return {}


def row_of(case, options):
    results = as_list(case.call(*case.arguments))  # the first call loads the kernels
    nbytes = bytes_of(*case.arguments, *results) if case.nbytes is None else case.nbytes
    row = {"MB": nbytes / 1e6}
    del results
    if options.rehearse:
        return row
    return row | (profiled(case) if options.once else measured(case, nbytes))


def attempt(function, *arguments):
    """Return the result of a function, or a row with its error, after which the next case runs."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def cases_of(operator, scale):
    """Yield the cases of an operator. If one cannot be made, the last case raises the error."""
    try:
        yield from OPERATORS[operator](scale)
    except Exception as error:
        problem = error

        def fail():
            raise problem

        yield Case(f"{operator}: {kFurther}", fail, [])


def line_of(name, row):
    if "us" in row:
        return f"{name:66}{row['us']:10.1f} us {row['MB']:8.1f} MB {row['of copy']:7.1%} of copy"
    return f"{name:66} {row.get('error') or row.get('skipped') or 'ran'}"


def predictions(gpu):
    """Return {case: its predicted microseconds, as "95-115"} of results/cuda_predictions.md.

    They are those of two GPUs.
    """
    if gpu not in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        return {}
    page = Path(__file__).parent / "results" / "cuda_predictions.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines()]
    predicted = {}
    for name, *figures in (row for row in rows if len(row) == 6 and row[1].isdigit()):
        on_h100, on_h200 = figures[2:4]
        has_own = gpu == "NVIDIA H200" and on_h200 != "same"
        predicted[name] = on_h200 if has_own else on_h100
    return predicted


def finding(row, predicted):
    """Return whether the time of a row is in the predicted range."""
    if not predicted or "us" not in row:
        return ""
    least, most = map(float, predicted.split("-"))
    return "confirmed" if least <= row["us"] <= most else "**refuted**"


def markdown(results):
    """Return the Markdown table of kernels.json, with the predictions."""
    machine = results["machine"]
    lines = [f"{machine['gpu']}, {machine['date'][:10]}, commit {machine['commit']}", ""]
    lines += [
        "| case | MB | copy us | us | of copy | predicted us | |",
        "|---|---|---|---|---|---|---|",
    ]
    predicted_times = predictions(machine["gpu"])
    for name, row in results["cases"].items():
        figures = f"{row.get('error') or row.get('skipped') or 'ran'} | | "
        if "us" in row:
            figures = f"{row['copy us']:.0f} | {row['us']:.0f} | {row['of copy']:.0%}"
        predicted = predicted_times.get(name, "")
        end = f"{predicted} | {finding(row, predicted)} |"
        lines.append(f"| {name} | {row.get('MB', 0):.0f} | {figures} | {end}")
    return "\n".join(lines)


def measure_all(options):
    """Measure each case, write and print it. Return whether there are cases and none has failed."""
    end = time.monotonic() + options.seconds
    path = gpu_results.folder() / "kernels.json"
    results = {"machine": gpu_results.describe(), "cases": {}}
    rows = results["cases"]
    scale = REHEARSAL if options.rehearse else ON_GPU
    for operator in OPERATORS:
        for case in cases_of(operator, scale):
            if options.only not in case.name and kFurther not in case.name:
                continue
            rows[case.name] = {"skipped": "no time left"}
            if time.monotonic() < end:
                rows[case.name] = attempt(row_of, case, options)
            print(line_of(case.name, rows[case.name]), flush=True)
            if not options.once:
                gpu_results.write_json(path, results)
    failed = sum("error" in row for row in rows.values())
    skipped = sum("skipped" in row for row in rows.values())
    print(f"{len(rows)} cases, {failed} failed, {skipped} skipped for lack of time: {path}")
    return bool(rows) and not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after these")
    parser.add_argument("--once", action="store_true", help="run each call once, for ncu")
    parser.add_argument("--rehearse", action="store_true", help="run small cases on the CPU")
    parser.add_argument("--table", type=Path, help="print this kernels.json as a Markdown table")
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return 0
    if not (options.rehearse or torch.cuda.is_available()):
        print("bench_kernels_cuda: PyTorch sees no GPU, nothing to measure")
        return 0
    with torch.no_grad():
        return 0 if measure_all(options) else 1


if __name__ == "__main__":
    sys.exit(main())
