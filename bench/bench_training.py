"""Errors and times of calcops.train: trainings of a NEP and of a Deep Potential on one thread.

    python bench/bench_training.py
    python bench/bench_training.py --folder FOLDER [--models nep] [--seeds 3] [-- OPTIONS]

Without --folder, it trains on the three sets of frames that examples/train_potential/make_frames.py
writes, with the options in SETS. FOLDER has train.extxyz, test.extxyz and perhaps held_out.extxyz, or train.xyz and
test.xyz. The printed errors are those of the test frames. OPTIONS are those of calcops.train, for
both models. Packages of Deep Potentials are made with --tabulated.

The time is processor time, from the start of the command to its package. So other work of the
machine hardly changes it. There are also the processor time of a training step, the least of
several rounds in which the models take turns, and that of an evaluation of energies, forces and
virials of atoms by the package, for some 500 atoms. If there is the LAMMPS of `make lammps`, the
table has the processor time of its step with each package, too, for some 4,000 atoms on one rank.
The energy in LAMMPS must be that of ASE.
"""

import argparse
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
from bench_nep import ATOMS
from bench_nep_lammps import ENVIRONMENT, ROOT, build_plugin, run_lammps, write_data
from calcops.ase import CalcOps
from calcops.potentials import load
from calcops.potentials.neighbours import neighbours, pair_vectors
from calcops.train import __main__ as command
from calcops.train.datasets import frames_of, read
from calcops.train.first_model import first_model
from calcops.train.trainer import Data, Trainer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MODELS = {"deep-potential": "Deep Potential", "nep": "NEP"}
ROUND = 20  # steps
FRAMES = ROOT / "build/train_potential"
# {folder: {model: options of calcops.train}}
SETS = {
    "silicon": {"deep-potential": "--steps 8000 --smooth 3.6", "nep": "--steps 4000"},
    "gallium-nitride": {
        "deep-potential": "--steps 8000 --cutoff 4.2 --smooth 3",
        "nep": "--steps 4000 --cutoff 4.2",
    },
    "silver-copper": {"deep-potential": "--steps 12000", "nep": "--steps 12000"},
}


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


def processor_minutes():
    """Return the processor time of all processes that run() has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) / 60


def file_of(folder, name):
    """Return the file of frames NAME.extxyz or NAME.xyz in a folder."""
    path = folder / f"{name}.extxyz"
    return path if path.exists() else folder / f"{name}.xyz"


def train(frames, model, words, folder, seed):
    """Return minutes and errors of a training on a folder of frames."""
    words = ["--model", model, *words, "--seed", seed, "--folder", folder]
    words += [file_of(frames, "train"), "--test", file_of(frames, "test")]
    held_out = frames / "held_out.extxyz"
    words += ["--validate", held_out] if held_out.exists() else []
    words += ["--tabulated"] if model == "deep-potential" else []
    start = processor_minutes()
    printed = run([sys.executable, "-W", "ignore", "-m", "calcops", "train", *words], ROOT)
    minutes = processor_minutes() - start
    line = re.search(r"test frames: energy (\S+) \S+ force (\S+) \S+ virial (\S+)", printed)
    return minutes, [float(number) for number in line.groups()]


def step_times(models, images):
    """Return the processor time (ms) of a training step of each model, of which each takes turns.

    It is the mean of a round of steps, of the quickest of several rounds.
    """
    trainers = {}
    for model, words in models.items():
        parsed = command.parse(["frames", "--model", model, *words])
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


def rows_of(frames, models, seeds):
    """Return the rows of a folder of frames in the table, for {model: options of calcops.train}."""
    train_images = read([file_of(frames, "train")])
    trainings = []
    packages = {}
    with tempfile.TemporaryDirectory() as temporary:
        steps = step_times(models, train_images)
        for model, words in models.items():
            for seed in range(seeds):
                own = Path(temporary, f"{model}-{seed}")
                trainings.append((model, str(seed), *train(frames, model, words, own, seed)))
            packages[model] = own / "model.pt2"
        crystal = crystal_of(train_images)
        evaluation = {name: evaluation_time(path, crystal) for name, path in packages.items()}
        lammps = lammps_times(packages, crystal) if ENVIRONMENT.exists() else {}

    rows = []
    for model, seed, minutes, (energy, force, virial) in trainings:
        row = [frames.name, MODELS[model], seed]
        row += [f"{energy:.2f}", f"{force:.1f}", f"{virial:.1f}", f"{minutes:.1f}"]
        row += [f"{steps[model]:.1f}", f"{evaluation[model]:.1f}"]
        row.append(f"{lammps[model]:.1f}" if lammps else "-")
        rows.append(row)
    return rows


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each model")
    parser.add_argument("words", nargs="*", help="options of calcops.train, after --")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder:
        trainings = {options.folder.absolute(): dict.fromkeys(options.models, options.words)}
    else:
        trainings = {}
        for name, models in SETS.items():
            words = {model: text.split() for model, text in models.items()}
            trainings[FRAMES / name] = words

    head = ["frames", "model", "seed", "energy, meV/atom", "force, meV/A", "virial, meV/atom"]
    head += ["processor time, minutes", "a step, ms", "evaluation, us an atom"]
    head.append("in LAMMPS, us an atom")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for frames, models in trainings.items():
        for row in rows_of(frames, models, options.seeds):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
