"""Times of NEP relative to nep-adapters' in ASE, and of kernels relative to NEP_CPU's.

    python bench/bench_nep.py GPUMD [NEP_CPU] [--repeats 9] [--cases "C 2022"]
    python bench/bench_nep.py GPUMD --sizes
    python bench/bench_nep.py GPUMD --many-types

GPUMD and NEP_CPU are checkouts of https://github.com/brucefan1983, whose potentials are used.
nep-adapters comes from PyPI (`pip install nep-adapters`); without it its columns are empty.

A call is `atoms.get_forces()` in ASE of a disturbed crystal of 4,096 atoms, which have moved by some
0.01 A since the last call: by CalcOps(load("nep.txt")), and by nep-adapters' calculator. A kernel is
a package of the model for a block of 256 atoms with their neighbours, as LAMMPS runs packages, and
NEP_CPU's compute_for_lammps, compiled with -O3 -march=native. Both compute the sum of the virials;
ours also the virials of atoms.

All run in turn on one thread. The table has the smallest of the times of the thread, in us an atom,
and the largest differences of forces, relative to the largest.

--sizes prints the time of a step of dynamics of copper in ASE at 8 to 4,096 atoms, with ASE's EMT,
too. --many-types prints what all 89 types of NEP89 at once cost, compared with the two of a crystal.
"""

import argparse
import contextlib
import ctypes
import io
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from calcops.ase import CalcOps
from calcops.nep import load
from calcops.potentials import package
from scipy.spatial import cKDTree

try:
    from nep_adapters.ase import NepAseCalculator
    from nep_adapters.errors import NepAdaptersError
except ImportError:
    NepAseCalculator = None

BLOCK = 256
FCC = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
DIAMOND = np.concatenate([FCC, FCC + 0.25])
ALLOY = "Song-2024-UNEP-v1-AgAlAuCrCuMgMoNiPbPdPtTaTiVWZr.txt"
ROCK_SALT = np.concatenate([FCC, FCC + [0.5, 0, 0]])
NEP89 = "nep89_20250409/nep89_20250409.txt"
# {case: (file in GPUMD's potentials/nep or NEP_CPU, lattice constant, sites, their types)}
CASES = {
    "PbTe": ("NEP_CPU/test_nep/nep.txt", 6.57, ROCK_SALT, [0] * 4 + [1] * 4),
    "C 2022": ("C_2022_NEP4.txt", 3.57371, DIAMOND, [0] * 8),
    "Si 2022": ("Si_2022_NEP4_3body.txt", 5.43, DIAMOND, [0] * 8),
    "C 2024": ("C_2024_NEP4.txt", 3.57371, DIAMOND, [0] * 8),
    "NEP89": (NEP89, 5.64, ROCK_SALT, [0] * 4 + [1] * 4),
    "16 metals": (ALLOY, 3.92, FCC, None),  # drawn by lot
}
TYPES = {"NEP89": ["Na", "Cl"]}  # where a model has more
ATOMS = 4096
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
        """Take the numbers of the types in the file."""
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


def loaded(case, path):
    """Return the Nep of a case."""
    with contextlib.redirect_stdout(io.StringIO()):
        return load(path, TYPES.get(case))


def alternate(calls, repeats, clock=time.thread_time):
    """Return the smallest times of calls by name, which take turns, and their last results."""
    best = dict.fromkeys(calls, float("inf"))
    results = {}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = clock()
            results[name] = call()
            best[name] = min(best[name], clock() - begin)
    return best, results


def compared(times, forces, natoms):
    """Return columns: us an atom of ours and of the other, if there is one, and how they compare."""
    columns = [f"{1e6 * seconds / natoms:.2f}" for seconds in times.values()]
    if len(times) < 2:
        return [*columns, "", "", ""]
    ours, theirs = times.values()
    own, other = forces.values()
    apart = np.abs(own - other).max() / np.abs(other).max()
    return [*columns, f"{ours / theirs:.2f}", f"{apart:.0e}"]


def atoms_of(case, type_names):
    """Return the crystal of a case for ASE, with some ATOMS atoms."""
    _, constant, sites, _ = CASES[case]
    repeats = round((ATOMS / len(sites)) ** (1 / 3))
    types, x = crystal(case, repeats, len(type_names))
    symbols = np.array(type_names)[types]
    return Atoms(symbols, positions=x, cell=[repeats * constant] * 3, pbc=True)


def time_calls(case, path, model, repeats):
    """Return the columns of calls in ASE."""
    atoms = atoms_of(case, model.type_names)
    places = atoms.positions.copy()
    calculators = {"CalcOps": CalcOps(model)}
    if NepAseCalculator:
        with contextlib.suppress(NepAdaptersError):  # some models are refused
            calculators["nep-adapters"] = NepAseCalculator(str(path))
    random = np.random.default_rng(0)

    def forces_by(calculator):
        atoms.calc = calculator
        return atoms.get_forces()

    best = dict.fromkeys(calculators, float("inf"))
    for _ in range(repeats):
        atoms.positions = places + random.normal(0, 0.01, places.shape)
        calls = {name: lambda own=own: forces_by(own) for name, own in calculators.items()}
        times, forces = alternate(calls, 1)
        best = {name: min(best[name], times[name]) for name in best}
    columns = compared(best, forces, len(atoms))
    if NepAseCalculator and len(calculators) == 1:
        columns[1] = "refused"
    return columns


def time_kernels(case, path, model, library, repeats, folder):
    """Return the columns of kernels, and the number of pairs of an atom."""
    package.save(model, folder / "model.pt2")
    run = package.load(folder / "model.pt2").run
    types, list_neigh, x = block_of(case, model)
    inputs = torch.tensor(types), torch.tensor(list_neigh)[None]
    positions = torch.tensor(x)
    neighbours = inputs[1].clamp(min=0).flatten()

    def ours():
        Rij = positions.index_select(0, neighbours).view(BLOCK, -1, 3)
        return run(*inputs, (Rij - positions[:BLOCK, None])[None])

    calls = {"CalcOps": ours}
    if library is not None:
        in_file = path.read_text().split("\n", 1)[0].split()[2:]
        numbers = [in_file.index(name) for name in model.type_names]
        calls["NEP_CPU"] = NepCpu(library, path, np.array(numbers)[types], list_neigh, x)
    times, results = alternate(calls, 3 * repeats)
    forces = {"CalcOps": results["CalcOps"][2][0].numpy()}
    if library is not None:
        forces["NEP_CPU"] = calls["NEP_CPU"].results()[1]
    return compared(times, forces, BLOCK), f"{(list_neigh >= 0).sum() / BLOCK:.0f}"


def range_of(ratios):
    """Return the least and the largest of ratios as text, such as 0.22-0.24."""
    numbers = [float(ratio) for ratio in ratios if ratio]
    return f"{min(numbers):.2f}-{max(numbers):.2f}" if numbers else "-"


def print_sizes(gpumd, repeats):
    """Print the processor time of a step of dynamics by the number of atoms, in ms."""
    path = gpumd / "potentials" / "nep" / ALLOY
    model = loaded("16 metals", path)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        package.save(model, Path(folder, "model.pt2"))
        calculators = {"a package": CalcOps(package.load(Path(folder, "model.pt2")))}
    calculators = {"CalcOps": CalcOps(model)} | calculators | {"EMT": EMT()}
    if NepAseCalculator:
        calculators["nep-adapters"] = NepAseCalculator(str(path))
    head = ["atoms", *(f"{name}, ms" for name in calculators)]
    if NepAseCalculator:
        head.append("CalcOps / nep-adapters")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells in ((2, 1, 1), (4, 2, 2), (8, 4, 4), (16, 8, 8)):
        crystal = bulk("Cu", a=3.62, cubic=True).repeat(cells)
        MaxwellBoltzmannDistribution(crystal, temperature_K=300, rng=np.random.default_rng(0))
        steps = max(1, 512 // len(crystal))
        dynamics = {}
        for name, calculator in calculators.items():
            atoms = crystal.copy()
            atoms.calc = calculator
            dynamics[name] = VelocityVerlet(atoms, 2 * units.fs)
        calls = {
            name: lambda own=own, steps=steps: own.run(steps) for name, own in dynamics.items()
        }
        best, _ = alternate(calls, repeats, time.process_time)
        row = [str(len(crystal)), *(f"{1e3 * seconds / steps:.3f}" for seconds in best.values())]
        if NepAseCalculator:
            row.append(f"{best['CalcOps'] / best['nep-adapters']:.2f}")
        print(f"| {' | '.join(row)} |", flush=True)


def print_many_types(gpumd, repeats):
    """Print the costs of all types of NEP89 at once, and those of a crystal of two."""
    path = gpumd / "potentials" / "nep" / NEP89
    rows = {"Na Cl": [], "all 89 types": []}
    calculators = {}
    for name, types in zip(rows, (["Na", "Cl"], None)):
        before = peak_memory()
        begin = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            calculators[name] = CalcOps(load(path, types))
        seconds = time.process_time() - begin
        rows[name] += [f"{seconds:.2f}", f"{peak_memory() - before:.0f}"]
    sizes = []
    for cells in (2, 8):
        crystal = bulk("NaCl", "rocksalt", a=5.64, cubic=True).repeat(cells)
        sizes.append(len(crystal))
        best = dict.fromkeys(calculators, float("inf"))
        for seed in range(repeats):
            crystal.rattle(0.01, seed=seed)
            for name, crystal.calc in calculators.items():
                begin = time.process_time()
                crystal.get_forces()
                best[name] = min(best[name], 1e3 * (time.process_time() - begin))
        for name, milliseconds in best.items():
            rows[name].append(f"{milliseconds:.2f}")
    head = ["types", "load, s", "MB", *(f"a call for {size} atoms, ms" for size in sizes)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def peak_memory():
    """Return the largest resident memory of the process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpumd", type=Path, help="a checkout of GPUMD")
    parser.add_argument("nep_cpu", type=Path, nargs="?", help="a checkout of NEP_CPU")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", action="store_true", help="steps of dynamics alone")
    parser.add_argument("--many-types", action="store_true", help="all types of NEP89 alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.many_types:
        return print_many_types(options.gpumd, options.repeats)
    if options.sizes:
        return print_sizes(options.gpumd, options.repeats)
    head = ["model", "pairs", "call, us", "nep-adapters, us", "relative", "forces apart"]
    head += ["kernel, us", "NEP_CPU, us", "relative", "forces apart"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        library = library_of(options.nep_cpu, folder) if options.nep_cpu else None
        for case in options.cases:
            path = file_of(case, options.gpumd, options.nep_cpu)
            if path is None:
                continue
            model = loaded(case, path)
            calls = time_calls(case, path, model, options.repeats)
            kernels, pairs = time_kernels(case, path, model, library, options.repeats, folder)
            rows.append([case, pairs, *calls, *kernels])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    in_ase, as_kernel = (range_of(row[column] for row in rows) for column in (4, 8))
    print(
        f"\nThe time is {in_ase} of nep-adapters' in ASE, and {as_kernel} of NEP_CPU's as a kernel."
    )


if __name__ == "__main__":
    main()
