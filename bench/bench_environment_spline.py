"""environment_spline, tabulated_sum and the embedding net that they replace, in ns a pair.

    python bench/bench_environment_spline.py [--atoms 2048] [--seconds 2]

The sizes are those of water in ../calcops/deepmd: 84 neighbours within 6 A in 138 slots, two
kinds of neighbour, quintic splines of 59 cells, and 100 functions. The net has layers of 25, 50 and
100. There is one thread. The rows take turns of five calls, and the least time counts. `forward`
goes from pair vectors to T [n, 4, 100], and `gradient` from dE/dT to dE/dd. Both include the
product of matrices, which has rows of its own. The last column is the sum of both, relative to that of
the net in PyTorch.

tabulated_sum starts from the environment matrix and ends with the gradient of that matrix. It reads
a table with cells of 0.01 up to 13 and of 0.1 beyond. So do DeePMD-kit's kernels of compressed models,
but theirs is one table for both kinds. `pip install --no-deps deepmd-kit` brings them.
"""

import argparse
import ctypes
import time
from functools import partial

import calcops.ops
import torch
from bench_force import DEEPMD, DeepMD

NEIGHBOURS, SLOTS, KINDS, M = 84, 138, 2, 100
TABLE_CELLS, WIDTH = 1300, 0.01
RCUT_SMTH, RCUT, FUNCTIONS = 0.5, 6.0, 64
TABLE_GRID = 0.0, 0.01, 13.0, 0.1, 65.0  # begin, width and end of its cells, then width and end
CELLS = 1300 + 520
NET = "environment and net in PyTorch"
CALLS_OF_A_TURN = 5  # the first calls find the data of the previous function in the cache


def inputs(atoms, dtype):
    """Return random neighbours with a uniform r^3 from 0.96 A on, as at a constant density."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(atoms, SLOTS, 3, generator=generator, dtype=torch.float64)
    share = torch.rand(atoms, SLOTS, 1, generator=generator, dtype=torch.float64)
    r = (0.96**3 + share * (RCUT**3 - 0.96**3)) ** (1 / 3)
    d = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True) * r
    kind = torch.randint(KINDS, (atoms, SLOTS), generator=generator, dtype=torch.int32)
    empty = torch.rand(atoms, SLOTS, generator=generator).argsort(1) >= NEIGHBOURS
    davg = torch.zeros(KINDS, 4, dtype=torch.float64)
    dstd = torch.tensor([[0.1, 0.05, 0.05, 0.05]] * KINDS, dtype=torch.float64)
    grid = torch.tensor([[0.0, 13.0]] * KINDS, dtype=torch.float64)
    d = d.to(dtype).requires_grad_()
    return d, kind.masked_fill(empty, -1), davg, dstd, grid, FUNCTIONS, RCUT_SMTH, RCUT


def table_inputs(atoms, dtype):
    """Return random arguments of tabulated_sum, with a table whose cells are all used."""
    generator = torch.Generator().manual_seed(0)
    end = TABLE_CELLS * WIDTH
    x = end * torch.rand(atoms, SLOTS, generator=generator, dtype=torch.float64) ** 2
    R = torch.randn(atoms, SLOTS, 4, generator=generator, dtype=torch.float64)
    kind = torch.randint(KINDS, (atoms, SLOTS), generator=generator, dtype=torch.int32)
    empty = torch.rand(atoms, SLOTS, generator=generator).argsort(1) >= NEIGHBOURS
    table = torch.randn(KINDS, TABLE_CELLS, 6, M, generator=generator, dtype=torch.float64)
    grid = torch.tensor([[0, WIDTH, end, WIDTH, end]] * KINDS, dtype=torch.float64)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, R)]
    return [*leaves, kind.masked_fill(empty, -1), table.to(dtype), grid]


def environment(d, rcut_smth, rcut, dstd):
    """Return the environment matrix R [n, K, 4], computed in plain PyTorch."""
    r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    u = ((r - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)
    w = 1 + u**3 * (u * (15 - 6 * u) - 10)
    return torch.cat([w / r, w * d / r**2], -1) / dstd


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


class PlainNet(torch.nn.Module):
    """Environment and net, in blocks that fit the cache."""

    def __init__(self, dtype, dstd):
        super().__init__()
        self.net = Net(dtype)
        self.dstd = dstd.to(dtype)

    def forward(self, d):
        blocks = []
        for few in d.split(4096 // NEIGHBOURS):
            R = environment(few, RCUT_SMTH, RCUT, self.dstd)
            blocks.append(self.net(R[..., 0], R))
        return torch.cat(blocks)


def timed(function, times):
    """Return the result of the function, and append its seconds to `times`."""
    begin = time.process_time()
    result = function()
    times.append(time.process_time() - begin)
    return result


class DeepmdKernels:
    """`tabulate_fusion_se_a` of DeePMD-kit, forward and gradient. The filled slots of an atom come
    first, as DeePMD-kit orders them."""

    def __init__(self, d, kind, dstd):
        library = DeepMD().library
        dtype = d.dtype
        letter = {torch.float64: "d", torch.float32: "f"}[dtype]
        self.kernels = []
        for name, types in (
            ("tabulate_fusion_se_a_cpu", "T_PKS1_S4_S4_S4_S4_iiibi"),
            ("tabulate_fusion_se_a_grad_cpu", "T_S2_S2_PKS1_S4_S4_S4_S4_S4_iiibi"),
        ):
            symbol = f"_ZN6deepmd{len(name)}{name}I{letter}EEvP{types}"
            self.kernels.append(getattr(library, symbol))
        order = (kind < 0).int().argsort(dim=1, stable=True)[..., None]
        is_live = (kind >= 0)[..., None].take_along_dim(order, 1)
        R = environment(d.detach(), RCUT_SMTH, RCUT, dstd.to(dtype)).take_along_dim(order, 1)
        self.R = torch.where(is_live, R, 0).contiguous()
        self.x = self.R[..., 0].contiguous()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(CELLS + 10, M, 6, generator=generator, dtype=torch.float64)
        self.table = table.to(dtype)
        self.info = torch.tensor([0, 13, 65, 0.01, 0.1, 100], dtype=dtype)
        n, K = self.x.shape
        self.T = self.x.new_empty(n, 4, M)
        self.of_x = torch.empty_like(self.x)  # of_y is the gradient of y, here and below
        self.of_R = torch.empty_like(self.R)
        self.sizes = [*map(ctypes.c_int, (n, K, M)), ctypes.c_bool(True), ctypes.c_int(4)]

    def call(self, kernel, *arguments):
        pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in arguments]
        kernel(*pointers, *self.sizes)

    def forward(self):
        self.call(self.kernels[0], self.T, self.table, self.info, self.x, self.R, None)

    def gradient(self, of_T):
        inputs = self.table, self.info, self.x, self.R, None, of_T
        self.call(self.kernels[1], self.of_x, self.of_R, None, *inputs)

    def steps(self, of_T, forward_times, gradient_times):
        timed(self.forward, forward_times)
        timed(partial(self.gradient, of_T), gradient_times)


def autograd_steps(forward, leaves, upstream, forward_times, gradient_times):
    result = timed(forward, forward_times)
    timed(partial(torch.autograd.grad, result, leaves, upstream), gradient_times)


def compare(atoms, dtype, seconds):
    """Return {row: (forward, gradient)} in ns a pair."""
    d, kind, davg, dstd, grid, *rest = inputs(atoms, dtype)
    C = torch.randn(KINDS * FUNCTIONS, M, dtype=dtype)
    P = torch.randn(atoms, 4, KINDS * FUNCTIONS, dtype=dtype, requires_grad=True)
    d_without_empty = d[:, :NEIGHBOURS].detach().contiguous().requires_grad_()
    net = PlainNet(dtype, dstd[0])
    of_P = torch.randn(atoms, 4, KINDS, FUNCTIONS, dtype=dtype)
    of_T = torch.randn(atoms, 4, M, dtype=dtype)
    R = environment(d.detach(), RCUT_SMTH, RCUT, dstd[0].to(dtype)).requires_grad_()
    x = R.detach()[..., 0].contiguous().requires_grad_()
    table = torch.randn(KINDS, CELLS, 6, M, dtype=dtype)
    table_grid = torch.tensor([TABLE_GRID] * KINDS, dtype=torch.float64)

    def sums():
        return calcops.ops.library.environment_spline(d, kind, davg, dstd, grid, *rest)

    def product(P):
        return calcops.ops.library.matrix_product(P.view(-1, len(C)), C).view(atoms, 4, M)

    rows = {
        "environment_spline, then matrix_product": (lambda: product(sums()), d, of_T),
        "environment_spline alone": (sums, d, of_P),
        "matrix_product alone": (lambda: product(P), P, of_T),
        "torch.matmul in its place": (lambda: P @ C, P, of_T),
        "tabulated_sum": (
            lambda: calcops.ops.library.tabulated_sum(x, R, kind, table, table_grid),
            (x, R),
            of_T,
        ),
        NET: (lambda: net(d_without_empty), d_without_empty, of_T),
    }
    steps = {name: partial(autograd_steps, *row) for name, row in rows.items()}
    if DEEPMD:
        kernels = DeepmdKernels(d, kind, dstd[0])
        steps["DeePMD-kit's kernels of compressed models"] = partial(kernels.steps, of_T)
    times = {name: ([], []) for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            for _ in range(CALLS_OF_A_TURN):
                step(*times[name])
    per_pair = 1e9 / (atoms * NEIGHBOURS)
    return {
        name: (min(forward) * per_pair, min(gradient) * per_pair)
        for name, (forward, gradient) in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = torch.float64, torch.float32
    columns = [compare(options.atoms, dtype, options.seconds) for dtype in dtypes]
    print("| ns a pair | forward | gradient | relative | float32: forward | gradient | relative |")
    print("|---|---|---|---|---|---|---|")
    for name in columns[0]:
        cells = [name]
        for times in columns:
            relative = sum(times[name]) / sum(times[NET])
            cells += [*(f"{t:.1f}" for t in times[name]), f"{relative:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
