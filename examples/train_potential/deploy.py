"""Package the trained model, run it in ASE as a host does, and measure how it conserves energy.

    python examples/train_potential/deploy.py [FOLDER] [--steps 2000] [--tabulated]
        [--float32-nets]

FOLDER is that of the training on silicon or gallium nitride. It gets model.pt, model.pt2 and
nve.png. README.md has the command for LAMMPS.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from calcops.ase.calculator import CalcOps
from calcops.deepmd.deep_potential import load_npz, quick_form
from calcops.potentials.package import load, save
from calcops.train.plots import plot_nve
from make_frames import kCrystals
from properties import simulate


def cell_of(type_names):
    """Return the cubic cell of the crystal that has these elements."""
    for cell, _ in kCrystals.values():
        if set(cell.symbols) == set(type_names):
            return cell
    raise ValueError(f"expected a model of one of {', '.join(kCrystals)}, got {type_names}")


def main():
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/train_potential/silicon")
    )
    parser.add_argument("--steps", type=int, default=2000, help="of molecular dynamics, 1 fs each")
    parser.add_argument(
        "--tabulated", action="store_true", help="splines or tables in the place of embedding nets"
    )
    parser.add_argument("--float32-nets", action="store_true", help="nets compute in float32")
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    cell = cell_of(model.type_names)

    crystal = cell.repeat(4)  # of silicon: that of in.silicon
    crystal.calc = CalcOps(model)
    disturbed = crystal.copy()
    disturbed.rattle(0.05, seed=0)
    disturbed.calc = CalcOps(model)
    forces = disturbed.get_forces()
    energy = crystal.get_potential_energy()
    print(f"{'as trained':12}{energy:18.9f} eV, a perfect crystal of {len(crystal)} atoms")

    packaged = quick_form(model, options)
    for name in ("model.pt", "model.pt2"):
        save(packaged, options.folder / name)
        package = load(options.folder / name)
        crystal.calc = CalcOps(package)
        disturbed.calc = CalcOps(package)
        energy = crystal.get_potential_energy()
        difference = abs(disturbed.get_forces() - forces).max()
        print(f"{name:12}{energy:18.9f} eV, forces when disturbed apart by {difference:.0e} eV/A")

    atoms = cell.repeat(3)
    atoms.rattle(0.055, seed=0)  # some 300 K once half of it is kinetic
    atoms.calc = CalcOps(package)
    time, potential, kinetic = simulate(atoms, options.steps)
    total = potential + kinetic
    second_half = kinetic[len(time) // 2 :]
    temperature = 2 / 3 * second_half.mean() / 1e3 / units.kB
    drift = np.polyfit(time, total, 1)[0]
    print(
        f"NVE in ASE, {options.steps} fs at {temperature:.0f} K: "
        f"total energy within {np.ptp(total):.3f} meV/atom, drift {drift:+.4f} meV/atom/ps"
    )
    plot_nve(options.folder / "nve.png", time, potential, kinetic)
    print(options.folder / "nve.png")


if __name__ == "__main__":
    main()
