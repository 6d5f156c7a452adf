"""Silicon under Stillinger-Weber in ASE: relaxation, dynamics, elastic constants and phonons.

    python examples/ase_calculator/silicon.py [--steps 2000] [--out build/ase]

README.md beside this file shows what the script prints.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import units
from ase.build import bulk
from ase.filters import FrechetCellFilter
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from calcops.ase.calculator import CalcOps
from calcops.ase.second_derivatives import elastic_constants, phonons
from calcops.potentials.stillinger_weber import StillingerWeber
from matplotlib.figure import Figure
from tqdm import tqdm

# GPa: E. R. Cowley, Phys. Rev. Lett. 60, 2379 (1988).
kPublished = {"C11": 151.4, "C12": 76.4, "C44": 56.4}


def relax(atoms):
    """Atoms and cell to no force and no stress -> the number of steps."""
    optimizer = BFGS(FrechetCellFilter(atoms), logfile=None)
    optimizer.run(fmax=1e-6, steps=500)
    return optimizer.nsteps


def simulate(atoms, steps):
    """Velocity Verlet by 1 fs -> time [ps], potential and kinetic energy [meV/atom] of a step."""
    dynamics, trace = VelocityVerlet(atoms, timestep=units.fs), []
    for _ in tqdm(dynamics.irun(steps), desc="NVE", total=steps + 1, unit="step", disable=None):
        trace.append((atoms.get_potential_energy(), atoms.get_kinetic_energy()))
    potential, kinetic = 1e3 * np.array(trace).T / len(atoms)
    return np.arange(steps + 1) / 1e3, potential, kinetic


def constants_of_sound(primitive, frequencies, q=1e-3):
    """C11, C12 and C44 in GPa: density (omega / q)^2 of long waves is C44 (twice) and C11 along
    [100], and (C11 + C12 + 2 C44) / 2 is the largest along [110].
    """
    omega = (
        2
        * np.pi
        * frequencies(q * np.array([[1, 0, 0], [0.5**0.5, 0.5**0.5, 0]]))
        / (units.fs * 1e3)
    )
    density = primitive.get_masses().sum() / primitive.get_volume()
    (c44, _, c11), (*_, c110) = density * (omega[:, :3] / q) ** 2 / units.GPa
    return {"C11": c11, "C12": 2 * c110 - c11 - 2 * c44, "C44": c44}


def plot(path, trace, ground, primitive, frequencies):
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplot_mosaic(
        [["energies", "phonons"], ["total", "phonons"]], height_ratios=[3, 1]
    )
    time, potential, kinetic = trace
    total = potential + kinetic
    axes["energies"].plot(time, potential - ground, label="potential")
    axes["energies"].plot(time, kinetic, label="kinetic")
    axes["energies"].set(ylabel="meV/atom above the perfect crystal", title="NVE", ylim=(0, None))
    axes["energies"].legend()
    axes["total"].plot(time, 1e3 * (total - total.mean()), color="tab:green")
    axes["total"].set(xlabel="time / ps", ylabel="total - mean,\nµeV/atom")
    path_in_q = primitive.cell.bandpath("GXWKGL", npoints=300)
    x, ticks, names = path_in_q.get_linear_kpoint_axis()
    axes["phonons"].plot(x, frequencies(2 * np.pi * path_in_q.cartesian_kpts()), color="tab:blue")
    axes["phonons"].set(
        xlim=(x[0], x[-1]), ylim=(0, None), ylabel="frequency / THz", title="phonons"
    )
    axes["phonons"].set_xticks(ticks, [name.replace("G", "Γ") for name in names])
    axes["phonons"].grid(axis="x")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of molecular dynamics, 1 fs each")
    parser.add_argument("--out", type=Path, default=Path("build/ase"), help="folder of the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    calculator = CalcOps(StillingerWeber())

    atoms = bulk("Si", "diamond", a=5.6, cubic=True)
    atoms.rattle(0.1, seed=0)
    atoms.set_cell(
        atoms.cell.array @ (np.eye(3) + [[0, 0.03, 0], [0, 0, 0], [0, 0, 0.02]]), scale_atoms=True
    )
    atoms.calc = calculator
    steps = relax(atoms)
    a, energy = atoms.cell.lengths().mean(), atoms.get_potential_energy() / len(atoms)
    stress = abs(atoms.get_stress()).max() / units.GPa
    print(
        f"relaxed in {steps} steps: a = {a:.5f} A, {energy:.6f} eV/atom, "
        f"stress up to {stress:.0e} GPa"
    )

    crystal = bulk("Si", "diamond", a=a, cubic=True).repeat(3)
    crystal.rattle(0.055, seed=0)  # some 300 K once half of it is kinetic
    crystal.calc = CalcOps(StillingerWeber())
    time, potential, kinetic = trace = simulate(crystal, options.steps)
    total, builds = potential + kinetic, crystal.calc.neighbours.builds
    temperature = 2 / 3 * kinetic[len(kinetic) // 2 :].mean() / 1e3 / units.kB
    print(
        f"NVE, {len(crystal)} atoms, {options.steps} fs at {temperature:.0f} K: "
        "total energy within",
        end=" ",
    )
    print(f"{np.ptp(total):.4f} meV/atom, drift {np.polyfit(time, total, 1)[0]:+.4f} meV/atom/ps,")
    print(f"  neighbours found {builds} times in {options.steps + 1} steps")

    primitive = bulk("Si", "diamond", a=a)
    primitive.calc = calculator
    held, relaxed = elastic_constants(primitive)
    frequencies = phonons(primitive)
    sound = constants_of_sound(primitive, frequencies)
    print("GPa    ours  published  difference  from long phonons")
    for name, value in zip(kPublished, relaxed[[0, 0, 3], [0, 1, 3]].tolist()):
        published = kPublished[name]
        print(f"{name}{value:8.2f}{published:11.1f}{value - published:+12.2f}{sound[name]:19.2f}")
    print(f"C44 with the two sublattices held: {held[3, 3]:.2f} GPa")
    print(f"optical phonon at the zone centre: {frequencies(np.zeros((1, 3)))[0, -1]:.2f} THz")

    picture = options.out / "silicon.png"
    plot(picture, trace, 1e3 * energy, primitive, frequencies)
    print(picture.resolve())


if __name__ == "__main__":
    main()
