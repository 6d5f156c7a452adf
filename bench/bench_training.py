"""Training by DeePMD-kit and by calcops.train: the same frames, steps, and one thread each.

    python bench/bench_training.py [--folder build/train_potential/silicon] [--steps 12000]
        [--models deep-potential nep] [--embedding 24 24] [--axis 12] [--fitting 48 48]
        [--backends pt tf] [--keep NEW] [--compile]

FOLDER has train.extxyz, held_out.extxyz and test.extxyz, which
`python examples/train_potential/make_frames.py silicon` writes; `silver-copper` are frames of
several kinds. A step takes one frame of train.extxyz. The printed errors are those of test.extxyz,
by each program's own code. DeePMD-kit gets the learning rates and the weights of the loss that its
documentation recommends, and counts sel itself. Each of its systems has the frames of one formula.
calcops.train keeps its own rates and weights, and chooses its best model by held_out.extxyz.

Deep Potentials have the nets of the options, and packages with --tabulated. A NEP has the defaults
of calcops.train, and the cutoff of the options.

The time is processor time, from the start of a program to its finished model: of calcops.train with
its package, of DeePMD-kit's `train` and `freeze`. So other work of the machine hardly changes it.
For calcops.train there are also the processor time of a training step, the least of several rounds
in which the models take turns, and that of an evaluation of energies, forces and virials of atoms
by the package, for some 500 atoms. If there is the LAMMPS of `make lammps`, the table has the
processor time of its step with each package, too, for some 4,000 atoms on one rank. The energy in
LAMMPS must be that of ASE.
--backends needs deepmd-kit[torch] (for tf also deepmd-kit[cpu]) in an environment in
build/deepmd/environment. Without a word it leaves DeePMD-kit out.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from bench_deepmd import DEEPMD_PYTHON, ROOT
from bench_nep_lammps import ATOMS, ENVIRONMENT, build_plugin, run_lammps, write_data
from calcops.ase import CalcOps
from calcops.potentials import load
from calcops.train import __main__ as command
from calcops.train.datasets import elements_of, frames_of, read
from calcops.train.first_model import first_model
from calcops.train.neighbours import neighbours, pair_vectors
from calcops.train.trainer import Data, Trainer

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "DP_INTRA_OP_PARALLELISM_THREADS": "1",
    "DP_INTER_OP_PARALLELISM_THREADS": "1",
}
MODELS = {"deep-potential": "Deep Potential", "nep": "NEP"}
ROUND = 20  # steps
# Evaluates a model of DeePMD-kit in its own environment.
PREDICT = """
import sys
import numpy as np
from deepmd.infer import DeepPot
model, frames, output = sys.argv[1:]
model = DeepPot(model)
arrays = np.load(frames)
results = {}
for b in range(len(arrays["types"])):
    is_atom = arrays["types"][b] >= 0
    cell = arrays["cells"][b].reshape(1, 9) if arrays["pbc"][b].any() else None
    energy, force, virial = model.eval(
        arrays["positions"][b][is_atom].reshape(1, -1), cell, arrays["types"][b][is_atom]
    )
    padded = np.zeros(arrays["force"][b].shape)
    padded[is_atom] = force[0]
    for name, value in (("energy", energy), ("force", padded), ("virial", virial)):
        results.setdefault(name, []).append(value)
np.savez(output, **results)
"""


def run(command, folder):
    """Run a command on one thread, and return what it printed.

    Raises:
        SystemExit: it failed; the message is the end of what it printed.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"bench_training: {command} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def write_systems(folder, images, type_names):
    """Write frames as systems of DeePMD-kit, each of one formula and kind of boundary."""
    groups = {}
    for image in images:
        key = image.get_chemical_formula(), bool(image.pbc.any())
        groups.setdefault(key, []).append(image)
    for number, ((_, is_periodic), group) in enumerate(groups.items()):
        system = folder / f"{number:03}"
        part = system / "set.000"
        part.mkdir(parents=True)
        frames = frames_of(group, type_names)
        order = frames["types"].argsort(dim=1, stable=True)
        for key in ("types", "positions", "force"):
            frames[key] = torch.stack([rows[own] for rows, own in zip(frames[key], order)])
        np.savetxt(system / "type.raw", frames["types"][0].numpy(), fmt="%d")
        (system / "type_map.raw").write_text("\n".join(type_names) + "\n")
        if not is_periodic:
            (system / "nopbc").touch()
        names = {"coord": "positions", "box": "cells", "energy": "energy", "force": "force"}
        if not frames["virial"].isnan().any():
            names["virial"] = "virial"
        for name, key in names.items():
            np.save(part / f"{name}.npy", frames[key].reshape(len(group), -1).numpy())
    return sorted(str(path.relative_to(folder.parent)) for path in folder.iterdir())


def settings_of(options, type_names, systems):
    """Return the settings of DeePMD-kit's water example, scaled to our nets and number of steps."""
    return {
        "model": {
            "type_map": type_names,
            "descriptor": {
                "type": "se_e2_a",
                "sel": "auto",
                "rcut": options.cutoff,
                "rcut_smth": options.smooth,
                "neuron": options.embedding,
                "axis_neuron": options.axis,
                "resnet_dt": False,
                "seed": 1,
            },
            "fitting_net": {"neuron": options.fitting, "resnet_dt": True, "seed": 1},
        },
        "learning_rate": {
            "type": "exp",
            "start_lr": 1e-3,
            "stop_lr": 3.51e-8,
            "decay_steps": max(1, options.steps // 200),
        },
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0.02,
            "limit_pref_v": 1,
        },
        "training": {
            "training_data": {"systems": systems, "batch_size": 1},
            "numb_steps": options.steps,
            "seed": 1,
            "disp_freq": options.steps // 4,
            "save_freq": options.steps,
        },
    }


def errors(labels, energy, force, virial):
    """Return RMSE of energy [meV/atom], force [meV/A] and virial [meV/atom]."""
    is_atom = labels["types"] >= 0
    natoms = is_atom.sum(1)
    virials = virial.reshape(labels["virial"].shape) - labels["virial"]
    differences = (
        (energy.reshape(-1) - labels["energy"]) / natoms,
        (force.reshape(labels["force"].shape) - labels["force"])[is_atom],
        (virials / natoms[:, None, None])[~np.isnan(labels["virial"])],
    )
    return [1e3 * np.sqrt(np.square(difference).mean()) for difference in differences]


def processor_minutes():
    """Return the processor time of all processes that run() has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) / 60


def train_deepmd(backend, labels, folder):
    """Return minutes and errors of DeePMD-kit's training in a folder with input.json."""
    dp = DEEPMD_PYTHON.with_name("dp")
    start = processor_minutes()
    run([dp, f"--{backend}", "train", "input.json"], folder)
    model = folder / ("model.pth" if backend == "pt" else "model.pb")
    run([dp, f"--{backend}", "freeze", "-o", model], folder)
    minutes = processor_minutes() - start
    script = [DEEPMD_PYTHON, "-c", PREDICT]
    run([*script, model, folder / "test.npz", folder / "predicted.npz"], folder)
    predicted = np.load(folder / "predicted.npz")
    return minutes, errors(labels, **predicted)


def words_of(options, model):
    """Return the options of calcops.train for a model."""
    words = ["--model", model, "--cutoff", options.cutoff, "--steps", options.steps]
    if model == "deep-potential":
        words += ["--smooth", options.smooth, "--embedding", *options.embedding]
        words += ["--axis", options.axis, "--fitting", *options.fitting, "--tabulated"]
    return [str(word) for word in words]


def train_calcops(options, folder, *words):
    """Return minutes and errors of calcops.train with these options."""
    words = [*words, options.folder / "train.extxyz"]
    words += ["--validate", options.folder / "held_out.extxyz"]
    words += ["--test", options.folder / "test.extxyz", "--folder", folder]
    start = processor_minutes()
    printed = run([sys.executable, "-W", "ignore", "-m", "calcops.train", *words], ROOT)
    minutes = processor_minutes() - start
    line = re.search(r"test frames: energy (\S+) \S+ force (\S+) \S+ virial (\S+)", printed)
    return minutes, [float(number) for number in line.groups()]


def step_times(options, images):
    """Return the processor time (ms) of a training step of each model, of which each takes turns.

    It is the mean of a round of steps, of the quickest of several rounds.
    """
    trainers = {}
    for model in options.models:
        parsed = command.parse(["frames", *words_of(options, model)])
        first, _ = first_model(images, parsed)
        data = Data(frames_of(images, first.type_names), first)
        trainers[model] = Trainer(first, data, steps=1000, seed=0)
    least = {}
    for _ in range(8):
        for model, trainer in trainers.items():
            start = time.process_time()
            for _ in range(ROUND):
                trainer.step()
            taken = 1e3 * (time.process_time() - start) / ROUND
            least[model] = min(taken, least.get(model, taken))
    return least


def evaluation_time(path, image):
    """Return the least processor time (us an atom) of a package for a crystal of 512 atoms."""
    package = load(path)
    image = image.repeat((2, 2, 2))
    frames = frames_of([image_of_zeros(image)], package.type_names)
    list_neigh, shift = neighbours(frames["positions"], frames["cells"], package.cutoff)
    Rij = pair_vectors(frames["positions"], list_neigh, shift)
    times = []
    for _ in range(20):
        start = time.process_time()
        package(frames["types"][0], list_neigh, Rij)
        times.append(time.process_time() - start)
    return 1e6 * min(times) / len(image)


def lammps_times(paths, image):
    """Return the least processor time (us an atom) of a step of LAMMPS with each package, in turns.

    Args:
        paths: {name: path of a package}.
        image: a periodic frame, of which the crystal is a multiple.

    Raises:
        SystemExit: the energy in LAMMPS is not that in ASE.
    """
    atoms = image.repeat(round((ATOMS / len(image)) ** (1 / 3)))
    plugin = build_plugin(ENVIRONMENT)
    least = {}
    for turn in range(5):
        for name, path in paths.items():
            package = load(path)
            with tempfile.TemporaryDirectory() as folder:
                data = Path(folder, "data")
                write_data(atoms, package.type_names, data)
                coeff = " ".join(package.type_names)
                script = {"data": data, "style": f"calcops {path}", "coeff": coeff, "steps": 20}
                seconds, energy, _ = run_lammps(ENVIRONMENT, plugin=plugin, **script)
            taken = 1e6 * seconds / len(atoms)
            least[name] = min(taken, least.get(name, taken))
            if turn == 0:
                atoms.calc = CalcOps(package)
                expected = atoms.get_potential_energy()
                if abs(energy - expected) > 1e-10 * abs(expected):
                    sys.exit(f"bench_training: {name}: {energy} eV in LAMMPS, {expected} in ASE")
    return least


def crystal_of(images):
    """Return the first frame that is periodic in three directions."""
    return next(image for image in images if image.pbc.all())


def image_of_zeros(image):
    """Return a frame with labels of zero, which frames_of asks for."""
    results = {"energy": 0.0, "forces": np.zeros((len(image), 3))}
    image.calc = SinglePointCalculator(image, **results)
    return image


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build/train_potential/silicon")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--cutoff", type=float, default=5.0)
    parser.add_argument("--smooth", type=float, default=3.5)
    parser.add_argument("--embedding", type=int, nargs="+", default=[24, 24])
    parser.add_argument("--axis", type=int, default=12)
    parser.add_argument("--fitting", type=int, nargs="+", default=[48, 48])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keep", type=Path, help="a new folder for the trained models")
    parser.add_argument("--compile", action="store_true", help="also calcops.train --compile")
    parser.add_argument("--backends", nargs="*", choices=("pt", "tf"), default=["pt", "tf"])
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    torch.set_num_threads(1)
    if options.backends and not DEEPMD_PYTHON.exists():
        sys.exit("bench_training: no DeePMD-kit in build/deepmd/environment")

    train_images = read([options.folder / "train.extxyz"])
    type_names = elements_of(train_images)
    test = frames_of(read([options.folder / "test.extxyz"]), type_names)
    labels = {key: value.numpy() for key, value in test.items()}
    rows = {}
    costs = {}
    packages = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep.absolute() if options.keep else Path(temporary)
        steps = step_times(options, train_images)
        for model in options.models:
            words = words_of(options, model)
            for switch in ["", "--compile"] if options.compile else [""]:
                name = f"calcops.train, {MODELS[model]} {switch}".strip()
                own = work / f"{model}{switch}"
                rows[name] = train_calcops(options, own, *words, *switch.split())
                if not switch:
                    evaluation = evaluation_time(own / "model.pt2", crystal_of(train_images))
                    costs[name] = f"{steps[model]:.1f} | {evaluation:.1f}"
                    packages[name] = own / "model.pt2"
        crystal = crystal_of(train_images)
        lammps = lammps_times(packages, crystal) if packages and ENVIRONMENT.exists() else {}
        for name in packages:
            costs[name] += f" | {lammps[name]:.1f}" if lammps else " | -"
        for backend in options.backends:
            folder = work / backend
            systems = write_systems(folder / "train", train_images, type_names)
            settings = settings_of(options, type_names, systems)
            (folder / "input.json").write_text(json.dumps(settings))
            np.savez(folder / "test.npz", **labels)
            name = {"pt": "PyTorch", "tf": "TensorFlow"}[backend]
            rows[f"DeePMD-kit 3.2.0, {name}"] = train_deepmd(backend, labels, folder)

    print(
        f"{options.folder.name}: {options.steps} steps, nets {options.embedding}, {options.fitting}"
    )
    print(
        "| trained by | energy, meV/atom | force, meV/A | virial, meV/atom "
        "| processor time, minutes | a step, ms | evaluation, us an atom "
        "| in LAMMPS, us an atom |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, (minutes, (energy, force, virial)) in rows.items():
        print(
            f"| {name} | {energy:.2f} | {force:.1f} | {virial:.1f} | {minutes:.1f} "
            f"| {costs.get(name, ' | | ')} |"
        )


if __name__ == "__main__":
    main()
