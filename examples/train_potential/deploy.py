"""Package the trained model, run it in ASE as a host does, and see whether it conserves energy.

    python examples/train_potential/deploy.py [FOLDER] [--steps 2000] [--tabulated]

FOLDER is that of train.py; it gets model.pt, model.pt2 and nve.png. README.md has the command for
LAMMPS.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from calcops.ase.calculator import CalcOps
from calcops.ase.silicon import simulate
from calcops.potentials.package import load, save
from calcops.train.deep_potential import load_npz
from calcops.train.plots import plot_nve
from calcops.train.systems import kSystems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/train_potential/silicon")
    )
    parser.add_argument("--steps", type=int, default=2000, help="of molecular dynamics, 1 fs each")
    parser.add_argument(
        "--tabulated", action="store_true", help="package tables of the embedding nets: quicker"
    )
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    (cell,) = (
        system.cell for system in kSystems.values() if system.labels.type_names == model.type_names
    )
    crystal = cell.repeat(4)  # of silicon: that of ../lammps/in.silicon
    moved = crystal.copy()
    moved.rattle(0.05, seed=0)
    moved.calc = crystal.calc = CalcOps(model)
    forces = moved.get_forces()
    print(
        f"{'as trained':12}{crystal.get_potential_energy():18.9f} eV, "
        f"a perfect crystal of {len(crystal)} atoms"
    )
    packaged = model.tabulated() if options.tabulated else model
    for name in ("model.pt", "model.pt2"):
        save(packaged, options.folder / name)
        moved.calc = crystal.calc = CalcOps(load(options.folder / name))
        apart = abs(moved.get_forces() - forces).max()
        print(
            f"{name:12}{crystal.get_potential_energy():18.9f} eV, "
            f"forces when disturbed apart by {apart:.0e} eV/A"
        )

    atoms = cell.repeat(3)
    atoms.rattle(0.055, seed=0)  # some 300 K once half of it is kinetic
    atoms.calc = moved.calc
    time, potential, kinetic = trace = simulate(atoms, options.steps)
    total, temperature = (
        potential + kinetic,
        2 / 3 * kinetic[len(time) // 2 :].mean() / 1e3 / units.kB,
    )
    print(
        f"NVE in ASE, {options.steps} fs at {temperature:.0f} K: "
        f"total energy within {np.ptp(total):.3f} meV/atom, "
        f"drift {np.polyfit(time, total, 1)[0]:+.4f} meV/atom/ps"
    )
    plot_nve(options.folder / "nve.png", *trace)
    print(options.folder / "nve.png")


if __name__ == "__main__":
    main()
