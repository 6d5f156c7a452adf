"""Write frames of a crystal to train on: molecular dynamics in ASE, labelled by Stillinger-Weber.

    python examples/train_potential/make_frames.py silicon
    python examples/train_potential/make_frames.py gallium-nitride FOLDER --trajectories 40 8 8

FOLDER, build/train_potential/CRYSTAL if not given, gets train.extxyz, held_out.extxyz and
test.extxyz. silicon.toml and gallium-nitride.toml beside this file are settings of
`python -m calcops.train` for these files.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from ase.md.verlet import VelocityVerlet
from calcops.ase import CalcOps
from calcops.potentials import stillinger_weber
from calcops.potentials.stillinger_weber import StillingerWeber
from tqdm import tqdm

kGalliumNitride = Path(stillinger_weber.__file__).with_name("gallium_nitride.sw")
# The cell in which the potential has no stress, and the potential's file.
kCrystals = {
    "silicon": (bulk("Si", "diamond", a=5.431, cubic=True), None),
    "gallium-nitride": (bulk("GaN", "zincblende", a=4.512, cubic=True), kGalliumNitride),
}
kTemperatures = 150, 300, 450, 600  # K
kStrain = 0.02  # the largest component of the strain of a cell
kTimestep = 2 * units.fs
kSettle = 160  # steps before the first frame
kEvery = 20  # steps between two frames


def trajectory(crystal, potential, temperature, samples, random):
    """Yield frames of one run at constant energy, in a cell of random strain.

    Args:
        crystal: the perfect crystal, an ase.Atoms.
        potential: the model that labels the frames.
        temperature: in K, after half of the kinetic energy has become potential energy.
        samples: the number of frames.
        random: a numpy.random.Generator.
    """
    strain = random.uniform(-kStrain, kStrain, (3, 3))
    atoms = crystal.copy()
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    masses = atoms.get_masses()[:, None]
    velocities = np.sqrt(2 * units.kB * temperature / masses) * random.normal(size=(len(atoms), 3))
    atoms.set_velocities(velocities - (masses * velocities).sum(0) / masses.sum())
    atoms.calc = CalcOps(potential)
    dynamics = VelocityVerlet(atoms, kTimestep)
    dynamics.run(kSettle)
    for sample in range(samples):
        if sample > 0:
            dynamics.run(kEvery)
        frame = atoms.copy()
        frame.calc = SinglePointCalculator(
            frame,
            energy=atoms.get_potential_energy(),
            forces=atoms.get_forces(),
            stress=atoms.get_stress(),
        )
        yield frame


def generate(name, trajectories, samples, seed, copies=2):
    """Return frames of a crystal of `copies` cells each way, one trajectory after the other."""
    cell, parameters = kCrystals[name]
    crystal = cell.repeat(copies)
    potential = StillingerWeber(parameters)
    random = np.random.default_rng(seed)
    frames = []
    for number in tqdm(range(trajectories), desc="frames", unit="trajectory", disable=None):
        temperature = kTemperatures[number % len(kTemperatures)]
        frames += trajectory(crystal, potential, temperature, samples, random)
    return frames


def main():
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("crystal", choices=kCrystals)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--trajectories", type=int, nargs=3, default=(40, 8, 8), help="to train on, held out, test"
    )
    parser.add_argument("--samples", type=int, default=8, help="frames of each trajectory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder or Path("build/train_potential", options.crystal)
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in enumerate(("train", "held_out", "test")):
        seed = 3 * options.seed + part
        frames = generate(options.crystal, options.trajectories[part], options.samples, seed)
        path = folder / f"{name}.extxyz"
        write(path, frames)
        print(f"{path}: {len(frames)} frames of {len(frames[0])} atoms")


if __name__ == "__main__":
    main()
