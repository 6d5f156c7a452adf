"""Write frames to train on: molecular dynamics in ASE of a crystal, or of several kinds of systems.

    python examples/train_potential/make_frames.py silicon
    python examples/train_potential/make_frames.py gallium-nitride FOLDER --trajectories 40 8 8
    python examples/train_potential/make_frames.py silver-copper

FOLDER, build/train_potential/NAME if not given, gets train.extxyz, held_out.extxyz and
test.extxyz. The crystals are labelled by Stillinger-Weber. silicon.toml and gallium-nitride.toml
beside this file are settings of `calcops train` for their files.

The frames of silver and copper are labelled by ASE's effective medium theory. Of four trajectories
each, one is of strained bulk, one of a slab with vacuum, one of a cluster without periodicity and
one of a dense liquid. The name of the kind is the frame's `config_type`.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from ase.build import bulk, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.cluster import Octahedron
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
kMixed = "silver-copper"
kKinds = "bulk", "slab", "cluster", "liquid"
# Trajectories to train on, held out and for the test, and the frames of each. Those of silver and
# copper differ in shares, strain and temperature, so there are many of them.
kCounts = {name: ((40, 8, 8), 8) for name in kCrystals} | {kMixed: ((160, 32, 32), 2)}
kTemperatures = 150, 300, 450, 600  # K
kStrain = 0.02  # the largest component of the strain of a cell
kTimestep = 2 * units.fs
kSettle = 160  # steps before the first frame
kEvery = 20  # steps between two frames


def strained(atoms, largest, random):
    """Return a copy of periodic atoms in a cell of random strain, with components to `largest`."""
    strain = random.uniform(-largest, largest, (3, 3))
    atoms = atoms.copy()
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    return atoms


def silver_copper(kind, random):
    """Return an ase.Atoms of silver and copper of one of kKinds, and its temperature in K."""
    share = random.uniform()  # of silver
    a = (1 - share) * 3.6 + share * 4.06  # A, the lattice constant
    crystal = bulk("Cu", a=a, cubic=True).repeat(2)
    temperature = random.uniform(150, 900)
    if kind == "bulk":
        atoms = strained(crystal, 0.08, random)
    elif kind == "slab":
        atoms = fcc111("Cu", (3, 3, 4), a=a, vacuum=6.0)
    elif kind == "cluster":
        atoms = Octahedron("Cu", 4, 1, latticeconstant=a)
    else:
        atoms = crystal
        atoms.set_cell(random.uniform(0.88, 1.0) * atoms.cell, scale_atoms=True)
        atoms.rattle(0.2, rng=random)
        temperature = random.uniform(2000, 5000)
    atoms.symbols[random.random(len(atoms)) < share] = "Ag"
    atoms.info = {"config_type": kind}
    return atoms, temperature


def trajectory(atoms, calculator, temperature, samples, random):
    """Yield labelled frames of one run at constant energy.

    Args:
        atoms: the ase.Atoms at the start, near their positions of least energy.
        calculator: it labels the frames.
        temperature: in K, after half of the kinetic energy has become potential energy.
        samples: the number of frames.
        random: a numpy.random.Generator.
    """
    masses = atoms.get_masses()[:, None]
    velocities = np.sqrt(2 * units.kB * temperature / masses) * random.normal(size=(len(atoms), 3))
    atoms.set_velocities(velocities - (masses * velocities).sum(0) / masses.sum())
    atoms.calc = calculator
    dynamics = VelocityVerlet(atoms, kTimestep)
    dynamics.run(kSettle)
    for sample in range(samples):
        if sample > 0:
            dynamics.run(kEvery)
        frame = atoms.copy()
        labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if atoms.cell.rank == 3:
            labels["stress"] = atoms.get_stress()
        frame.calc = SinglePointCalculator(frame, **labels)
        yield frame


def generate(name, trajectories, samples, seed, copies=2):
    """Return frames of a system, one trajectory after the other.

    A crystal has `copies` cells each way.
    """
    random = np.random.default_rng(seed)
    is_crystal = name in kCrystals
    if is_crystal:
        cell, parameters = kCrystals[name]
        potential = StillingerWeber(parameters)
    frames = []
    for number in tqdm(range(trajectories), desc="frames", unit="trajectory", disable=None):
        if is_crystal:
            atoms = strained(cell.repeat(copies), kStrain, random)
            temperature = kTemperatures[number % len(kTemperatures)]
            calculator = CalcOps(potential)
        else:
            atoms, temperature = silver_copper(kKinds[number % len(kKinds)], random)
            calculator = EMT()
        frames += trajectory(atoms, calculator, temperature, samples, random)
    return frames


def main():
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=kCounts)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--trajectories", type=int, nargs=3, help="to train on, held out, test; see kCounts"
    )
    parser.add_argument("--samples", type=int, help="frames of each trajectory; see kCounts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trajectories, samples = kCounts[options.system]
    trajectories = options.trajectories or trajectories
    samples = options.samples or samples
    folder = options.folder or Path("build/train_potential", options.system)
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in enumerate(("train", "held_out", "test")):
        seed = 3 * options.seed + part
        frames = generate(options.system, trajectories[part], samples, seed)
        path = folder / f"{name}.extxyz"
        write(path, frames)
        print(f"{path}: {len(frames)} frames of {len(frames[0])} atoms")


if __name__ == "__main__":
    main()
