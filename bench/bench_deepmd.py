"""Time of the forces of a Deep Potential in DeePMD-kit and imported into CalcOps, on one thread.

    python bench/bench_deepmd.py

Both have the same weights. A call computes energy, forces and virial. DeePMD-kit is called in two
ways: through its C library with a neighbour list, as LAMMPS does, and through its Python class,
which makes the list in each call. CalcOps is called as a package and as the model itself. Both get
the list of the C library, and compute the vectors between atoms in each call. The list has a skin
of 2 A, as LAMMPS has by default in metal units. `apart` is the largest difference of the forces,
relative to the largest force.

Needs the environment in build/deepmd, which this command makes:
`python -m pytest -m long tests/packages/test_deepmd.py`.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "DP_INTRA_OP_PARALLELISM_THREADS": "1",
    "DP_INTER_OP_PARALLELISM_THREADS": "1",
}
ROOT = Path(__file__).resolve().parent.parent
DEEPMD_PYTHON = ROOT / "build/deepmd/environment/bin/python"
NETS = {"rcut": 6.0, "rcut_smth": 2.0, "neuron": [25, 50, 100], "axis_neuron": 16, "seed": 1}
NEAREST = {"water": 0.7, "silicon": 2.0}  # the least distance of two atoms, in A
MODELS = {"water": (["O", "H"], [46, 92]), "silicon": (["Si"], [60])}
SYSTEMS = [("water", 192), ("silicon", 1000), ("silicon", 8000)]


def seconds(call):
    """Return the seconds of the fastest of several calls, and the result of the last one."""
    call()
    times = []
    while len(times) < 3 or (sum(times) < 10 and len(times) < 50):
        begin = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - begin)
    return min(times), result


def write_models(folder):
    """Write each <name>.pth, with random weights as DeePMD-kit draws them."""
    import torch
    from deepmd.pt.model.model import get_model

    for name, (type_map, sel) in MODELS.items():
        descriptor = {"type": "se_e2_a", "sel": sel, "type_one_side": name != "water", **NETS}
        fitting = {"neuron": [240, 240, 240], "seed": 2}
        settings = {"type_map": type_map, "descriptor": descriptor, "fitting_net": fitting}
        model = get_model(settings).eval()
        model.atomic_model.descriptor.sea.stddev[:] = 0.1
        model.min_nbor_dist.fill_(NEAREST[name])  # the tables of `dp compress` begin there
        torch.jit.save(torch.jit.script(model), folder / f"{name}.pth")


def structure(name, natoms):
    """Return periodic silicon with random displacements, or water in blocks of 192 atoms. The
    molecules of water are on a grid and turned at random."""
    from ase import Atoms
    from ase.build import bulk, molecule

    if name == "silicon":
        atoms = bulk("Si", "diamond", a=5.431, cubic=True).repeat(round((natoms / 8) ** (1 / 3)))
        atoms.rattle(0.05, seed=0)
        return atoms
    atoms = Atoms(cell=[12.42] * 3, pbc=True)
    random = np.random.default_rng(0)
    for site in np.ndindex(4, 4, 4):
        water = molecule("H2O")
        water.euler_rotate(*random.uniform(0, 180, 3))
        water.translate(np.array(site) * 12.42 / 4)
        atoms += water
    return atoms.repeat(round((natoms / 192) ** (1 / 3)))


def measure_deepmd(folder, name, natoms):
    """Write theirs.npz with the times, the energy and the forces of DeePMD-kit."""
    import deepmd
    import torch
    from deepmd.infer import DeepPot

    torch.set_num_threads(1)
    system = np.load(folder / f"{name}{natoms}.npz")
    positions, types, cell = (system[key] for key in ("positions", "types", "cell"))
    python = DeepPot(str(folder / f"{name}.pth"))
    python_seconds, (energy, force, _) = seconds(
        lambda: python.eval(positions.reshape(1, -1), cell.reshape(1, 9), types)
    )

    library = ctypes.CDLL(str(Path(deepmd.__path__[0]) / "lib/libdeepmd_c.so"))
    library.DP_NewDeepPot.restype = library.DP_NewNlist.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p
    potential = pointer(library.DP_NewDeepPot(str(folder / f"{name}.pth").encode()))

    # The library gets a ghost for every periodic image that is a neighbour.
    i, j, S = system["i"], system["j"], system["S"]
    is_image = S.any(1)
    images, ghost = np.unique(np.column_stack([j, S])[is_image], axis=0, return_inverse=True)
    neighbour = j.astype(np.int32)
    neighbour[is_image] = natoms + ghost.ravel()
    ghost_positions = positions[images[:, 0]] + images[:, 1:] @ cell
    all_positions = np.concatenate([positions, ghost_positions])
    all_types = np.concatenate([types, types[images[:, 0]]]).astype(np.int32)

    count = np.bincount(i, minlength=natoms).astype(np.int32)
    row_offsets = 4 * (count.cumsum() - count).astype(np.int64)  # in bytes
    rows = neighbour.ctypes.data + row_offsets
    atoms = np.arange(natoms, dtype=np.int32)
    arrays = [pointer(x.ctypes.data) for x in (atoms, count, rows)]
    nlist = pointer(library.DP_NewNlist(natoms, *arrays))
    energies = np.zeros(1)
    forces = np.zeros_like(all_positions)
    virial = np.zeros(9)
    ago = 0  # calls since the list was made; at 0 the library copies it

    def compute():
        nonlocal ago
        system = [pointer(x.ctypes.data) for x in (all_positions, all_types, cell)]
        results = [pointer(x.ctypes.data) for x in (energies, forces, virial)]
        library.DP_DeepPotComputeNList(
            potential,
            len(all_positions),
            *system,
            len(images),
            nlist,
            ago,
            *results,
            pointer(),
            pointer(),
        )
        ago = 1

    c_seconds, _ = seconds(compute)
    np.add.at(forces, images[:, 0], forces[natoms:])
    forces = forces[:natoms]
    difference = abs(forces - force[0]).max()
    assert difference < 1e-9 * abs(force).max(), "the C library and Python differ"
    results = {"python": python_seconds, "c": c_seconds, "energy": energies[0], "force": forces}
    np.savez(folder / "theirs.npz", **results)


def measure(folder, name, natoms):
    """Print a row of the table."""
    import torch
    from calcops.deepmd.import_deepmd import load
    from calcops.potentials import package
    from calcops.potentials.neighbours import neighbours, pair_vectors

    torch.set_num_threads(1)
    model = load(folder / f"{name}.pth")
    if not (folder / f"{name}.pt2").exists():
        package.save(model, folder / f"{name}.pt2")
    atoms = structure(name, natoms)
    assert len(atoms) == natoms
    types = torch.tensor([model.type_names.index(symbol) for symbol in atoms.symbols])
    positions = torch.from_numpy(atoms.positions)[None]
    cell = torch.from_numpy(atoms.cell.array)
    list_neigh, shift = neighbours(positions, cell[None], model.cutoff + 2.0)
    is_pair = list_neigh[0] >= 0
    system = {
        "i": is_pair.nonzero()[:, 0],
        "j": list_neigh[0][is_pair],
        "S": (shift[0][is_pair] @ cell.inverse()).round().long(),
        "types": types,
        "positions": atoms.positions,
        "cell": atoms.cell.array,
    }
    np.savez(folder / f"{name}{natoms}.npz", **system)
    run_in_deepmd(folder, name, str(natoms))
    peer = np.load(folder / "theirs.npz")

    times = [float(peer["c"]), float(peer["python"])]
    for form in (package.load(folder / f"{name}.pt2"), model):
        least, (_, _, force, *_) = seconds(
            lambda form=form: form(types, list_neigh, pair_vectors(positions, list_neigh, shift))
        )
        times.append(least)
    columns = [f"{value * 1e3:.0f}" for value in times] + [f"{times[2] / times[0]:.2f}"]
    difference = abs(force[0].numpy() - peer["force"]).max() / abs(peer["force"]).max()
    print(f"| {natoms} of {name} | {' | '.join(columns)} | {difference:.0e} |", flush=True)


def run_in_deepmd(*arguments):
    """Run this script in the environment of DeePMD-kit."""
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([DEEPMD_PYTHON, __file__, *arguments], check=True, **output)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_models(Path(sys.argv[1]))
    elif len(sys.argv) == 4:
        measure_deepmd(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    elif not DEEPMD_PYTHON.exists():
        print(
            "bench_deepmd: no DeePMD-kit in build/deepmd; "
            "python -m pytest -m long tests/packages/test_deepmd.py"
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_in_deepmd(folder)
            print(
                "| atoms | deepmd-kit in C, ms | in Python, ms | package, ms | "
                "model, ms | package / C | apart |"
            )
            print("|---|---|---|---|---|---|---|")
            for system in SYSTEMS:
                measure(Path(folder), *system)
