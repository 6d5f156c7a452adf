"""Time of a step of LAMMPS with a Deep Potential, by the pair styles of DeePMD-kit and CalcOps.

    python bench/bench_deepmd_lammps.py [--systems water1536] [--ranks 1 2] [--times 3]
        [--steps 10] [--lammps ENVIRONMENT]

All run the same weights. `pair_style deepmd` runs a model by TensorFlow: the plain .pb, and the one
that `dp compress` makes of it. `pair_style calcops` runs three packages that calcops/deepmd makes
of the same .pth: the plain one, one with --tabulated, and one with --float32-nets, too. Each rank
has one thread. The models take turns, and the fastest of the `times` runs counts. A column
"relative" is the time before it, divided by that of DeePMD-kit's model of the same kind.

`apart` compares the tabulated package with the plain .pb before the first step. It is the largest
relative difference of forces, energy and pressure; forces are compared with the largest force. The
last columns are calls of the first two packages by the ASE calculator, with the same skin.

Needs the environment of bench_deepmd.py, and installs DeePMD-kit's LAMMPS into it. The LAMMPS of
CalcOps is that of `make lammps`, or of any other environment with lammps[mpi].
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_deepmd import DEEPMD_PYTHON, MODELS, ROOT, run_in_deepmd, structure
from bench_nep import range_of

DEEPMD_ENVIRONMENT = DEEPMD_PYTHON.parent.parent
PACKAGES = ["deepmd-kit[torch,cpu,lmp]==3.2.0"]
HEAD = [
    "atoms",
    "ranks",
    ".pb, ms",
    "calcops, ms",
    "relative",
    "compressed .pb, ms",
    "tabulated, ms",
    "relative",
    "float32 nets, ms",
    "relative",
    "apart",
    "in ASE, ms",
    "tabulated in ASE, ms",
]
SYSTEMS = {
    "water1536": ("water", 1536),
    "silicon1000": ("silicon", 1000),
    "silicon8000": ("silicon", 8000),
}
# `dp compress` 3.2.0 requires a learning rate and training data, which a converted .pb does not
# have.
COMPRESS = """
import importlib, sys
module = importlib.import_module("deepmd.tf.entrypoints.compress")
update = module.update_deepmd_input
rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 1}
data = {"training_data": {"systems": []}}
module.update_deepmd_input = lambda settings: update(
    settings | {"learning_rate": rate, "training": settings["training"] | data}
)
module.compress(
    input=sys.argv[1], output=sys.argv[2], extrapolate=5, step=0.01, frequency="-1",
    checkpoint_folder="model-compression", training_script=None, mpi_log="master", log_path=None,
    log_level=0,
)
"""
SCRIPT = """
units metal
read_data {data}
neighbor 2.0 bin
pair_style {style}
pair_coeff * * {names}
velocity all create 300 1 loop geom
timestep 0.0005
fix motion all nve
thermo_style custom step pe press
thermo_modify norm no format float %.17g
thermo 1000000
run 0
write_dump all custom {forces} id fx fy fz modify sort id format float %.17g
run 2
run {steps}
"""


def run(environment, ranks, plugin="", **script):
    """Return the seconds of a step, and energy, pressure and forces before the first step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.lammps"
        forces = Path(folder) / "forces"
        text = SCRIPT.format(forces=forces, **script)
        path.write_text(f"plugin load {plugin}\n{text}" if plugin else text)
        command = [environment / "bin/mpiexec", "-n", str(ranks), environment / "bin/lmp"]
        command += ["-log", "none", "-in", path]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode or not forces.exists():
            raise SystemExit(result.stdout)
        energy, pressure = re.search(r"Press +\n +0 +(\S+) +(\S+)", result.stdout).groups()
        vectors = np.loadtxt(forces, skiprows=9)[:, 1:]
    loop_seconds = float(re.findall(r"Loop time of (\S+)", result.stdout)[-1])
    values = [np.array(float(energy)), np.array(float(pressure)), vectors]
    return loop_seconds / script["steps"], values


def write_data(name, natoms, path):
    from ase.io import write

    atoms = structure(name, natoms)
    assert len(atoms) == natoms
    options = {"specorder": MODELS[name][0], "masses": True, "atom_style": "atomic"}
    write(path, atoms, format="lammps-data", **options)


def convert(model):
    """Make .pb, compressed .pb, and the .pt2 of a .pth: as it is, tabulated, with float32 nets."""
    frozen = model.with_suffix(".pb")
    importer = [sys.executable, "-m", "calcops", "deepmd", model]
    commands = [
        [DEEPMD_ENVIRONMENT / "bin/dp", "convert-backend", model, frozen],
        [DEEPMD_PYTHON, "-c", COMPRESS, frozen, model.with_name(f"{model.stem}_compressed.pb")],
        [*importer, model.with_suffix(".pt2")],
        [*importer, "--tabulated", model.with_name(f"{model.stem}_tabulated.pt2")],
        [*importer, "--tabulated", "--float32-nets", model.with_name(f"{model.stem}_float32.pt2")],
    ]
    for command in commands:
        result = subprocess.run(
            command, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(result.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lammps", type=Path, default=ROOT / "build/lammps/environment")
    options = parser.parse_args()
    if not (DEEPMD_ENVIRONMENT / "bin/lmp").exists():
        subprocess.run([DEEPMD_PYTHON, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    make = ["make", "-s", "-C", ROOT / "calcops/lammps", "plugin", f"LAMMPS={options.lammps}"]
    subprocess.run([*make, f"PYTHON={sys.executable}"], check=True)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_in_deepmd(folder)
        for kind in {SYSTEMS[system][0] for system in options.systems}:
            convert(folder / f"{kind}.pth")
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for kind, natoms in map(SYSTEMS.get, options.systems):
            data = folder / f"{kind}{natoms}.data"
            write_data(kind, natoms, data)
            for ranks in options.ranks:
                rows.append(row_of(kind, natoms, ranks, data, options))
                print(f"| {' | '.join(rows[-1])} |", flush=True)
    plain, tabulated = (range_of(row[column] for row in rows) for column in (4, 7))
    print(
        f"\nThe time is {plain} of DeePMD-kit's, and {tabulated} of that of its compressed models"
    )
    print("with `--tabulated`.")


def row_of(kind, natoms, ranks, data, options):
    """Return the cells of a system on a number of ranks."""
    folder = data.parent
    plugin = ROOT / "build/lammps/calcopsplugin.so"
    script = {"data": data, "names": " ".join(MODELS[kind][0]), "steps": options.steps}
    calls = []
    for file in (f"{kind}.pb", f"{kind}_compressed.pb"):
        calls.append(dict(environment=DEEPMD_ENVIRONMENT, style=f"deepmd {folder / file}"))
    packages = [folder / f"{kind}{form}.pt2" for form in ("", "_tabulated", "_float32")]
    for package in packages:
        calls.append(dict(environment=options.lammps, style=f"calcops {package}", plugin=plugin))
    runs = []
    ase_times = []
    for _ in range(options.times):
        runs.append([run(ranks=ranks, **call, **script) for call in calls])
        if ranks == 1:
            ase_times.append([call_in_ase(package, kind, natoms) for package in packages[:2]])

    times = [1e3 * min(seconds for seconds, _ in column) for column in zip(*runs)]
    pb, compressed, plain, *tabulated = times
    cells = [f"{natoms} of {kind}", str(ranks)]
    cells += [f"{pb:.0f}", f"{plain:.0f}", f"{plain / pb:.2f}", f"{compressed:.0f}"]
    for milliseconds in tabulated:
        cells += [f"{milliseconds:.0f}", f"{milliseconds / compressed:.2f}"]
    expected, of_tabulated = runs[0][0][1], runs[0][3][1]
    differences = [abs(a - b).max() / abs(b).max() for a, b in zip(of_tabulated, expected)]
    cells.append(f"{max(differences):.0e}")
    cells += [f"{1e3 * min(column):.0f}" for column in zip(*ase_times)] or ["", ""]
    return cells


def call_in_ase(package, kind, natoms):
    """Return the seconds of a call of a package by the ASE calculator, with LAMMPS's skin."""
    import torch
    from calcops.ase import CalcOps
    from calcops.potentials import load

    torch.set_num_threads(1)
    atoms = structure(kind, natoms)
    calculator = CalcOps(load(package), skin=2.0)
    calculator.calculate(atoms)  # which finds the neighbour list
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        calculator.calculate(atoms)
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    if DEEPMD_PYTHON.exists():
        main()
    else:
        print(
            "bench_deepmd_lammps: no DeePMD-kit; "
            "python -m pytest -m long tests/packages/test_deepmd.py makes it"
        )
