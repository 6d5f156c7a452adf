"""Silicon under Stillinger-Weber in ASE: relaxation, dynamics, elastic constants and phonons.

    python examples/train_potential/properties.py [--steps 2000] [--out build/ase]

calcops/ase/README.md shows what the script prints.
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
    """Relax atoms and cell, and return the number of steps."""
    optimizer = BFGS(FrechetCellFilter(atoms), logfile=None)
    optimizer.run(fmax=1e-6, steps=500)
    return optimizer.nsteps


def simulate(atoms, steps):
    """Return time in ps, potential and kinetic energy in meV/atom of each step of 1 fs."""
    dynamics = VelocityVerlet(atoms, timestep=units.fs)
    energies = []
    for _ in tqdm(dynamics.irun(steps), desc="NVE", total=steps + 1, unit="step", disable=None):
        energies.append((atoms.get_potential_energy(), atoms.get_kinetic_energy()))
    potential, kinetic = 1e3 * np.array(energies).T / len(atoms)
    return np.arange(steps + 1) / 1e3, potential, kinetic


def constants_of_sound(primitive, frequencies, q=1e-3):
    """Return C11, C12 and C44 in GPa from the sound of long waves.

    For the three acoustic waves, density (omega / q)^2 is C44, C44 and C11 along [100]. Its largest
    value along [110] is (C11 + C12 + 2 C44) / 2.
    """
    directions = np.array([[1, 0, 0], [0.5**0.5, 0.5**0.5, 0]])
    omega = 2 * np.pi * frequencies(q * directions) / (units.fs * 1e3)
    density = primitive.get_masses().sum() / primitive.get_volume()
    along_100, along_110 = density * (omega[:, :3] / q) ** 2 / units.GPa
    c44, _, c11 = along_100
    c12 = 2 * along_110[2] - c11 - 2 * c44
    return {"C11": c11, "C12": c12, "C44": c44}


def plot(path, time, potential, kinetic, primitive, frequencies):
    """Draw the energies of a run, above that of the perfect crystal, and the phonons."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplot_mosaic(
        [["energies", "phonons"], ["total", "phonons"]], height_ratios=[3, 1]
    )
    total = potential + kinetic
    axes["energies"].plot(time, potential, label="potential")
    axes["energies"].plot(time, kinetic, label="kinetic")
    axes["energies"].set(ylabel="meV/atom above the perfect crystal", title="NVE", ylim=(0, None))
    axes["energies"].legend()
    axes["total"].plot(time, 1e3 * (total - total.mean()), color="tab:green")
    axes["total"].set(xlabel="time / ps", ylabel="total - mean,\nµeV/atom")
    path_in_q = primitive.cell.bandpath("GXWKGL", npoints=300)
    wave_vectors = 2 * np.pi * path_in_q.cartesian_kpts()
    x, ticks, names = path_in_q.get_linear_kpoint_axis()
    axes["phonons"].plot(x, frequencies(wave_vectors), color="tab:blue")
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
    a = atoms.cell.lengths().mean()
    energy = atoms.get_potential_energy() / len(atoms)
    stress = abs(atoms.get_stress()).max() / units.GPa
    print(
        f"relaxed in {steps} steps: a = {a:.5f} A, {energy:.6f} eV/atom, "
        f"stress up to {stress:.0e} GPa"
    )

    crystal = bulk("Si", "diamond", a=a, cubic=True).repeat(3)
    crystal.rattle(0.055, seed=0)  # some 300 K once half of it is kinetic
    crystal.calc = CalcOps(StillingerWeber())
    time, potential, kinetic = simulate(crystal, options.steps)
    total = potential + kinetic
    drift = np.polyfit(time, total, 1)[0]
    second_half = kinetic[len(kinetic) // 2 :]
    temperature = 2 / 3 * second_half.mean() / 1e3 / units.kB
    print(
        f"NVE, {len(crystal)} atoms, {options.steps} fs at {temperature:.0f} K: "
        f"total energy within {np.ptp(total):.4f} meV/atom, drift {drift:+.4f} meV/atom/ps,"
    )
    builds = crystal.calc.neighbours.builds
    print(f"  neighbours found {builds} times in {options.steps + 1} steps")

    primitive = bulk("Si", "diamond", a=a)
    primitive.calc = calculator
    held, relaxed = elastic_constants(primitive)
    frequencies = phonons(primitive)
    sound = constants_of_sound(primitive, frequencies)
    print("GPa    ours  published  difference  from long phonons")
    constants = relaxed[[0, 0, 3], [0, 1, 3]].tolist()
    for (name, published), value in zip(kPublished.items(), constants):
        print(f"{name}{value:8.2f}{published:11.1f}{value - published:+12.2f}{sound[name]:19.2f}")
    print(f"C44 with the two sublattices held: {held[3, 3]:.2f} GPa")
    optical = frequencies(np.zeros((1, 3)))[0, -1]
    print(f"optical phonon at the zone centre: {optical:.2f} THz")

    picture = options.out / "silicon.png"
    plot(picture, time, potential - 1e3 * energy, kinetic, primitive, frequencies)
    print(picture.resolve())


if __name__ == "__main__":
    main()
