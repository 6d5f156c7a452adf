"""Force, virial and per-atom virial on the CPU against plain torch and deepmd-kit's own library.

    python tests/bench/bench_force.py          (make bench)

The peer is optional: `pip install --no-deps deepmd-kit` (LGPL) ships libdeepmd.so, whose functions are
called through ctypes. Times are the minimum of many runs, interleaved; all rows come from one run.
"""

import argparse
import ctypes
import importlib.util
import itertools
import pathlib
import time

import torch

import calcops_jit


def lattice(natoms, neighbors, empty, dtype=torch.float64):
    """A simple cubic crystal's list, the nearest sites first, the last `empty` part of each row -1."""
    side = round(natoms ** (1 / 3))
    sizes = (natoms // side**2 or 1, side, side) if natoms % side**2 == 0 else (natoms, 1, 1)
    reach = range(-5, 6)
    offsets = sorted(itertools.product(reach, reach, reach), key=lambda o: sum(x * x for x in o))
    live = round(neighbors * (1 - empty))
    site = torch.stack(torch.unravel_index(torch.arange(natoms), sizes), -1)
    target = (site[:, None] + torch.tensor(offsets[1 : live + 1])) % torch.tensor(sizes)
    list_neigh = torch.full((1, natoms, neighbors), -1, dtype=torch.int32)
    list_neigh[0, :, :live] = target @ torch.tensor([sizes[1] * sizes[2], sizes[2], 1])
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, natoms, neighbors, c, generator=generator, dtype=dtype) for c in (4, 12, 3)]
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
    """prod_force_a_cpu and prod_virial_a_cpu of libdeepmd.so; one frame, float64, int32."""

    def __init__(self):
        folder = pathlib.Path(importlib.util.find_spec("deepmd").submodule_search_locations[0])
        self.library = ctypes.CDLL(str(folder / "lib" / "libdeepmd.so"))
        self.force = self.library["_ZN6deepmd16prod_force_a_cpuIdEEvPT_PKS1_S4_PKiiiii"]
        self.virial = self.library["_ZN6deepmd17prod_virial_a_cpuIdEEvPT_S2_PKS1_S4_S4_PKiiii"]

    def set_threads(self, threads):
        self.library.omp_set_num_threads(threads)

    def __call__(self, list_neigh, dE, Ri_d, Rij):
        natoms, neighbors = list_neigh.shape[1:]
        out = [torch.empty(*shape, dtype=torch.float64) for shape in ((natoms, 3), (9,), (natoms, 9))]
        pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
        self.force(
            pointer(out[0]), pointer(dE), pointer(Ri_d), pointer(list_neigh), natoms, natoms, neighbors, 1
        )
        self.virial(*map(pointer, (*out[1:], dE, Ri_d, Rij, list_neigh)), natoms, natoms, neighbors)
        return out[0][None], out[1].view(1, 3, 3), out[2].view(1, natoms, 3, 3)


def minimum_ms(functions, seconds):
    """The least time of each, called in turn for `seconds`, in milliseconds."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def table(natoms, neighbors, empty, deepmd, seconds):
    inputs = lattice(natoms, neighbors, empty)
    flat = [x.flatten() for x in inputs]
    rows = {
        "calcops::force_virial": lambda: calcops_jit.force_virial(*inputs),
        "calcops::force": lambda: calcops_jit.force(*inputs[:3]),
        "torch matmul + einsum + index_add_": lambda: torch_force_virial(*inputs),
        "torch sum of every input (reading once)": lambda: [x.sum() for x in flat],
    }
    if deepmd:
        rows["deepmd-kit prod_force_a + prod_virial_a"] = lambda: deepmd(*inputs)
        for ours, theirs in zip(calcops_jit.force_virial(*inputs), deepmd(*inputs), strict=True):
            difference = (ours - theirs).abs().max() / theirs.abs().max()
            print(f"largest difference from deepmd-kit: {difference:.1e} of the largest element")
            assert difference <= 1e-12
    megabytes = sum(x.nbytes for x in inputs) / 1e6
    print(f"{natoms} atoms x {neighbors} slots, {empty:.0%} empty, float64, {megabytes:.0f} MB")
    print(f"{'':42}{'1 thread':>22}{'2 threads':>22}")
    times = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if deepmd:
            deepmd.set_threads(threads)
        times.append(minimum_ms(list(rows.values()), seconds))
    for name, *row in zip(rows, *times, strict=True):
        cells = (f"{ms:9.2f} ms {ms / column[0]:6.2f}x" for ms, column in zip(row, times, strict=True))
        print(f"{name:42}" + "".join(f"{cell:>22}" for cell in cells))
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="for each column of a table")
    seconds = parser.parse_args().seconds
    deepmd = DeepMD() if importlib.util.find_spec("deepmd") else None
    if deepmd is None:
        print("deepmd-kit is not installed (pip install --no-deps deepmd-kit): its rows are left out")
    for empty in (1 / 3, 2 / 3):
        table(12288, 138, empty, deepmd, seconds)


if __name__ == "__main__":
    main()
