"""Package the trained model, run it in ASE as a host does, and see whether it conserves energy.

    python examples/train_potential/deploy.py [FOLDER] [--steps 2000]

FOLDER is that of train.py; it gets silicon.pt2, silicon.pt and nve.png. README.md has the command for LAMMPS.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from ase import units
from ase.build import bulk
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from frames import kLattice
from model import load_npz
from plots import plot_nve
from tqdm import tqdm

for folder in ("ase", "potentials"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / folder))
from calculator import CalcOps  # noqa: E402
from package import load, save  # noqa: E402


def simulate(atoms, steps):
    """Velocity Verlet with steps of 1 fs -> time [ps], potential and kinetic energy [meV/atom] of each step."""
    dynamics, trace = VelocityVerlet(atoms, timestep=units.fs), []
    for _ in tqdm(dynamics.irun(steps), desc="NVE", total=steps + 1, unit="step", disable=None):
        trace.append((atoms.get_potential_energy(), atoms.get_kinetic_energy()))
    potential, kinetic = 1e3 * np.array(trace).T / len(atoms)
    return np.arange(steps + 1) / 1e3, potential, kinetic


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/train_potential"))
    parser.add_argument("--steps", type=int, default=2000, help="of molecular dynamics, 1 fs each")
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    atoms = bulk("Si", "diamond", a=kLattice, cubic=True).repeat(3)
    MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=np.random.default_rng(0))  # half of it remains
    Stationary(atoms)
    moved = atoms.copy()
    moved.rattle(0.05, seed=0)
    moved.calc = CalcOps(model)
    energy, forces = moved.get_potential_energy(), moved.get_forces()
    print(f"{'silicon, as trained':20}{energy:16.9f} eV, {len(atoms)} atoms")
    for name in ("silicon.pt", "silicon.pt2"):
        save(model, options.folder / name)
        moved.calc = CalcOps(load(options.folder / name))
        apart = abs(moved.get_forces() - forces).max()
        print(f"{name:20}{moved.get_potential_energy():16.9f} eV, forces apart by {apart:.0e} eV/A")

    atoms.calc = moved.calc
    time, potential, kinetic = trace = simulate(atoms, options.steps)
    total, temperature = potential + kinetic, 2 / 3 * kinetic[len(time) // 2 :].mean() / 1e3 / units.kB
    print(
        f"NVE in ASE, {options.steps} fs at {temperature:.0f} K: total energy within {np.ptp(total):.3f} meV/atom, "
        f"drift {np.polyfit(time, total, 1)[0]:+.4f} meV/atom/ps"
    )
    plot_nve(options.folder / "nve.png", *trace)
    print((options.folder / "nve.png").resolve())


if __name__ == "__main__":
    main()
