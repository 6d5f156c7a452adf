"""Times of NEP: packages of calcops.nep and, if a checkout of it is given, NEP_CPU's.

    python bench/bench_nep.py GPUMD [NEP_CPU] [--repeats 9]
    python bench/bench_nep.py --many-types

GPUMD and NEP_CPU are checkouts of https://github.com/brucefan1983, whose potentials are used. Each
case is a disturbed crystal in blocks of 256 atoms with their neighbours, as LAMMPS runs packages.
NEP_CPU is compiled with -O3 -march=native, and computes the same blocks by compute_for_lammps. Both
compute the sum of the virials; ours also the virials of atoms.

Both run in turn on one thread. The table has the smallest of the times of the thread, in us an
atom, and the largest differences of energies of atoms (eV) and of forces, relative to the largest.

--many-types prints the processor time of an ASE step of copper and gold with all of 89 types of a
model of random numbers, and with the two types alone.
"""

import argparse
import contextlib
import ctypes
import io
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ase.build import bulk
from calcops.ase import CalcOps
from calcops.nep import Nep, load
from calcops.nep.model import kElements
from calcops.nep.nep_file import NepFile
from calcops.potentials import package
from scipy.spatial import cKDTree

BLOCK = 256
FCC = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
DIAMOND = np.concatenate([FCC, FCC + 0.25])
ALLOY = "Song-2024-UNEP-v1-AgAlAuCrCuMgMoNiPbPdPtTaTiVWZr.txt"
ROCK_SALT = np.concatenate([FCC, FCC + [0.5, 0, 0]])
# {case: (file in GPUMD's potentials/nep or NEP_CPU, lattice constant, sites, their types)}
CASES = {
    "PbTe": ("NEP_CPU/test_nep/nep.txt", 6.57, ROCK_SALT, [0] * 4 + [1] * 4),
    "C 2022": ("C_2022_NEP4.txt", 3.57371, DIAMOND, [0] * 8),
    "Si 2022": ("Si_2022_NEP4_3body.txt", 5.43, DIAMOND, [0] * 8),
    "C 2024": ("C_2024_NEP4.txt", 3.57371, DIAMOND, [0] * 8),
    "16 metals": (ALLOY, 3.92, FCC, None),  # drawn by lot
}
# A C interface of NEP_CPU's entry for LAMMPS.
SHIM = r"""
#include "nep.h"
struct Handle {
  NEP nep;
  std::vector<int> rows, count, types, map;
  std::vector<std::vector<int>> lists;
  std::vector<int*> first;
  std::vector<double> x, f, energy;
  std::vector<double*> xp, fp;
};
extern "C" {
Handle* make(const char* path) {
  Handle* h = new Handle;
  h->nep.init_from_file(path, false);
  for (size_t t = 0; t < h->nep.paramb.num_types; ++t) h->map.push_back(int(t));
  return h;
}
void set(Handle* h, int n, int all, int K, const int* list, const int* types, const double* x) {
  h->types.assign(types, types + all);
  h->x.assign(x, x + 3 * all);
  h->f.resize(3 * all);
  h->energy.resize(n);
  h->lists.assign(n, {});
  h->rows.resize(n), h->count.resize(n), h->first.resize(n), h->xp.resize(all), h->fp.resize(all);
  for (int i = 0; i < n; ++i) {
    for (int s = 0; s < K; ++s)
      if (list[i * K + s] >= 0) h->lists[i].push_back(list[i * K + s]);
    h->rows[i] = i, h->count[i] = int(h->lists[i].size()), h->first[i] = h->lists[i].data();
  }
  for (int i = 0; i < all; ++i) h->xp[i] = &h->x[3 * i], h->fp[i] = &h->f[3 * i];
}
void run(Handle* h) {
  double total = 0, virial[6] = {};
  std::fill(h->f.begin(), h->f.end(), 0.0);
  std::fill(h->energy.begin(), h->energy.end(), 0.0);
  const int n = int(h->rows.size());
  h->nep.compute_for_lammps(n, n, h->rows.data(), h->count.data(), h->first.data(), h->types.data(),
                            h->map.data(), h->xp.data(), total, virial, h->energy.data(),
                            h->fp.data(), nullptr);
}
const double* energy(Handle* h) { return h->energy.data(); }
const double* force(Handle* h) { return h->f.data(); }
}
"""


class NepCpu:
    """NEP_CPU for one block of atoms."""

    def __init__(self, library, path, types, list_neigh, x):
        self.library = library
        for name in ("make", "energy", "force"):
            getattr(library, name).restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(library.make(str(path).encode()))
        self.shape = len(list_neigh), len(x)
        arrays = [
            np.ascontiguousarray(a, dtype)
            for a, dtype in ((list_neigh, np.int32), (types, np.int32), (x, float))
        ]
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
        library.set(self.handle, *self.shape, list_neigh.shape[1], *pointers)

    def __call__(self):
        self.library.run(self.handle)

    def results(self):
        """Return energies [n] and forces [n + nghost, 3]."""
        n, natoms = self.shape
        pointer = ctypes.POINTER(ctypes.c_double)
        energy = ctypes.cast(self.library.energy(self.handle), pointer)
        force = ctypes.cast(self.library.force(self.handle), pointer)
        return np.ctypeslib.as_array(energy, (n,)), np.ctypeslib.as_array(force, (natoms, 3))


def compile_nep_cpu(checkout, source, library, *flags):
    """Compile NEP_CPU and one more source into a library."""
    sources = [checkout / "src" / f"{name}.cpp" for name in ("nep", "ewald_nep", "neighbor_nep")]
    command = ["g++", "-O3", "-march=native", "-fPIC", "-shared", f"-I{checkout / 'src'}", *flags]
    subprocess.run([*command, source, *sources, "-o", library], check=True)


def library_of(checkout, folder):
    """Return the library of NEP_CPU with the C interface."""
    (folder / "shim.cpp").write_text(SHIM)
    library = folder / "libnep_cpu.so"
    compile_nep_cpu(checkout, folder / "shim.cpp", library)
    return ctypes.CDLL(str(library))


def file_of(case, gpumd, nep_cpu):
    """Return the nep.txt of a case, or None if it is in a checkout that is not given."""
    name = CASES[case][0]
    if not name.startswith("NEP_CPU/"):
        return gpumd / "potentials" / "nep" / name
    return nep_cpu and nep_cpu / name.removeprefix("NEP_CPU/")


def crystal(case, repeats, ntypes):
    """Return the types and the disturbed positions (A) of `repeats` cells in each direction."""
    _, constant, sites, types_of_sites = CASES[case]
    random = np.random.default_rng(0)
    cells = np.stack(np.meshgrid(*[np.arange(repeats)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    x = ((cells + sites) * constant).reshape(-1, 3)
    if types_of_sites is None:
        types = random.integers(0, ntypes, len(x))
    else:
        types = np.tile(types_of_sites, len(x) // len(sites))
    return types, x + random.normal(0, 0.05, x.shape)


def block_of(case, model):
    """Return types, list_neigh [BLOCK, K] and positions of a block of atoms and its neighbours."""
    constant = CASES[case][1]
    types, x = crystal(case, 2 * int(np.ceil(model.cutoff / constant)) + 8, len(model.type_names))
    middle = x.mean(0)
    centres = np.argsort(np.abs(x - middle).max(1), kind="stable")[:BLOCK]
    rows = cKDTree(x).query_ball_point(x[centres], model.cutoff)
    rows = [[j for j in row if j != i] for i, row in zip(centres, rows)]
    ghosts = sorted({j for row in rows for j in row} - set(centres))
    atoms = np.concatenate([centres, ghosts]).astype(int)
    number = np.full(len(x), -1)
    number[atoms] = np.arange(len(atoms))
    list_neigh = np.full((BLOCK, max(map(len, rows))), -1)
    for i, row in enumerate(rows):
        list_neigh[i, : len(row)] = sorted(number[row])
    return types[atoms], list_neigh, x[atoms]


def measure(case, path, library, repeats, folder):
    """Return the row of a case in the table."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = load(path)
    package.save(model, folder / "model.pt2")
    run = package.load(folder / "model.pt2").run
    types, list_neigh, x = block_of(case, model)
    inputs = torch.tensor(types), torch.tensor(list_neigh)[None]
    positions = torch.tensor(x)
    neighbours = inputs[1].clamp(min=0).flatten()

    def ours():
        Rij = positions.index_select(0, neighbours).view(BLOCK, -1, 3)
        return run(*inputs, (Rij - positions[:BLOCK, None])[None])

    calls = {"ours": ours}
    if library is not None:
        calls["NEP_CPU"] = NepCpu(library, path, types, list_neigh, x)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            for _ in range(3):
                begin = time.thread_time()
                results = call()
                best[name] = min(best[name], time.thread_time() - begin)
                if name == "ours":
                    _, energy, force, _, _ = results
    pairs = (list_neigh >= 0).sum() / BLOCK
    row = [case, f"{pairs:.0f}", *(f"{1e6 * t / BLOCK:.2f}" for t in best.values())]
    if library is not None:
        expected_energy, expected_force = calls["NEP_CPU"].results()
        largest = np.abs(expected_force).max()
        row.append(f"{best['NEP_CPU'] / best['ours']:.1f}")
        row.append(f"{np.abs(energy[0].numpy() - expected_energy).max():.0e}")
        row.append(f"{np.abs(force[0].numpy() - expected_force).max() / largest:.0e}")
    return row


def file_of_many_types():
    """Return a NepFile of 89 types of the size of GPUMD's NEP89, with random numbers."""
    random = np.random.default_rng(0)
    T, dim, neurons = 89, 35, 80
    return NepFile(
        version=4,
        type_names=kElements[:T],
        zbl=(0.5, 1.0),
        cutoffs=np.array([[6.0, 5.0]] * T),
        l_max=4,
        has_q222=True,
        has_q1111=True,
        w0=random.normal(0, 0.3, (T, neurons, dim)),
        b0=random.normal(0, 1, (T, neurons)),
        w1=random.normal(0, 0.1, (T, neurons)),
        bias=np.zeros(T),
        c=tuple(random.normal(0, 0.2, (T, T, 9, 5)) for _ in range(2)),
        scale=np.full(dim, 0.05),
    )


def print_many_types(repeats):
    """Print the smallest processor time of a step, in ms, with all types and with two."""
    file = file_of_many_types()
    files = {"89 types": file, "2 types": file.of_types(["Cu", "Au"])}
    calculators = {name: CalcOps(Nep(own).eval()) for name, own in files.items()}
    for cells in (2, 10):
        crystal = bulk("Cu", a=3.8, cubic=True).repeat((4, 2, 2) if cells == 2 else cells)
        crystal.symbols[::2] = "Au"
        best = dict.fromkeys(files, float("inf"))
        for seed in range(repeats):
            crystal.rattle(0.01, seed=seed)
            for name, crystal.calc in calculators.items():
                begin = time.process_time()
                crystal.get_forces()
                best[name] = min(best[name], 1e3 * (time.process_time() - begin))
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in best.items())
        print(f"{len(crystal)} atoms: {times}", flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpumd", type=Path, nargs="?", help="a checkout of GPUMD")
    parser.add_argument("nep_cpu", type=Path, nargs="?", help="a checkout of NEP_CPU")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--many-types", action="store_true", help="a model of 89 types alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.many_types:
        return print_many_types(options.repeats)
    if options.gpumd is None:
        parser.error("expected a checkout of GPUMD or --many-types")
    head = ["model", "pairs an atom", "CalcOps, us"]
    if options.nep_cpu:
        head += ["NEP_CPU, us", "NEP_CPU / CalcOps", "energy apart", "forces apart"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        library = library_of(options.nep_cpu, folder) if options.nep_cpu else None
        for case in options.cases:
            path = file_of(case, options.gpumd, options.nep_cpu)
            if path is None:
                continue
            row = measure(case, path, library, options.repeats, folder)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
