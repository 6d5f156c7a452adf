"""Train a small NEP on copper, and draw its equation of state with the reference beside it.

    python bench/nep_picture.py [--steps 2500]

The reference is ASE's effective medium theory (EMT). The frames are disturbed fcc and bcc crystals
of several densities. The table has the lattice constant (A) and the bulk modulus (GPa) of fcc, the
energy of bcc above fcc (meV/atom), and the errors on frames that were not trained on. The picture is
results/nep.png.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from ase import units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.eos import EquationOfState
from calcops.ase import CalcOps
from calcops.nep.model import Nep
from calcops.nep.nep_file import NepFile
from calcops.potentials.neighbours import neighbours, pair_vectors

CUTOFFS = 5.5, 4.5  # radial and angular, A
FUNCTIONS, BASIS, NEURONS = 7, 9, 20
KINDS = {"fcc": (3.0, 4.1), "bcc": (2.4, 3.25)}  # least and largest lattice constant, A
FRAMES = 60  # of each kind
HELD_OUT = 20


def crystals(random):
    """Return disturbed crystals, 4 atoms each, with the reference as their calculator."""
    frames = []
    for name, (least, largest) in KINDS.items():
        for _ in range(FRAMES):
            atoms = bulk("Cu", name, a=random.uniform(least, largest), cubic=True)
            if name == "bcc":
                atoms = atoms.repeat((1, 1, 2))
            strain = np.eye(3) + random.normal(0, 0.02, (3, 3))
            atoms.set_cell(atoms.cell @ strain, scale_atoms=True)
            atoms.rattle(random.uniform(0, 0.12), rng=random)
            atoms.calc = EMT()
            frames.append(atoms)
    random.shuffle(frames)
    return frames


def batch(frames, cutoff):
    """Return the arguments of a Nep, energies [B] and forces [B, n, 3] of frames."""
    positions = torch.tensor(np.array([atoms.positions for atoms in frames]))
    cells = torch.tensor(np.array([atoms.cell.array for atoms in frames]))
    list_neigh, shift = neighbours(positions, cells, cutoff)
    Rij = pair_vectors(positions, list_neigh, shift)
    types = torch.zeros(1, positions.shape[1], dtype=torch.int64)
    energy = torch.tensor([atoms.get_potential_energy() for atoms in frames])
    force = torch.tensor(np.array([atoms.get_forces() for atoms in frames]))
    return (types, list_neigh, Rij), energy, force


def untrained(inputs, energy, random):
    """Return a Nep of random numbers whose descriptors and energies have the size of the data."""
    dim = FUNCTIONS * 5  # radial, and l = 1 to 4
    file = NepFile(
        version=4,
        type_names=["Cu"],
        zbl=None,
        cutoffs=np.array([CUTOFFS]),
        l_max=4,
        has_q222=False,
        has_q1111=False,
        w0=random.normal(0, 1, (1, NEURONS, dim)),
        b0=random.normal(0, 1, (1, NEURONS)),
        w1=random.normal(0, 0.3, (1, NEURONS)),
        bias=-energy.mean(0, keepdim=True).numpy() / inputs[1].shape[1],
        c=tuple(random.normal(0, 0.5, (1, 1, BASIS, FUNCTIONS)) for _ in range(2)),
        scale=np.ones(dim),
    )
    model = Nep(file)
    descriptors = []
    energies_of_nets = model.energies_of_nets
    model.energies_of_nets = lambda types, q: (descriptors.append(q), energies_of_nets(types, q))[1]
    model(*inputs)
    model.energies_of_nets = energies_of_nets
    q = descriptors[0].detach()
    model.scale = 1 / (q.amax(0) - q.amin(0))
    return model


def train(model, data, steps):
    """Train on energies and forces by Adam, and return the model ready for use."""
    inputs, energy, force = data
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        of_model = model(*inputs, create_graph=True)
        of_energy = (of_model[0] - energy).div(force.shape[1]).square().mean()
        loss = 100 * of_energy + (of_model[2] - force).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.2e}", file=sys.stderr)
    return model.eval()


def equation_of_state(name, calculator):
    """Return the volumes (A^3) and the energies (eV) of an atom of undisturbed crystals."""
    volumes, energies = [], []
    least, largest = KINDS[name]
    for a in np.linspace(least * 1.06, largest * 0.97, 21):
        atoms = bulk("Cu", name, a=a)
        atoms.calc = calculator
        volumes.append(atoms.get_volume())
        energies.append(atoms.get_potential_energy())
    return np.array(volumes), np.array(energies)


def properties(curves):
    """Return the lattice constant and bulk modulus of fcc, and the energy of bcc above fcc."""
    fits = {}
    for name, (volumes, energies) in curves.items():
        near = np.abs(volumes / volumes[energies.argmin()] - 1) < 0.12
        fits[name] = EquationOfState(volumes[near], energies[near], "birchmurnaghan").fit()
    volume, energy, modulus = fits["fcc"]
    return (4 * volume) ** (1 / 3), modulus / units.GPa, 1000 * (fits["bcc"][1] - energy)


def draw(curves, path):
    """Write the picture of {calculator: {crystal: (volumes, energies)}}."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for name, colour in (("fcc", "#20639b"), ("bcc", "#d1495b")):
        axes.plot(*curves["EMT"][name], color=colour, label=f"{name}, reference (EMT)")
        axes.plot(*curves["NEP"][name], "o", color=colour, markersize=4, label=f"{name}, NEP")
    axes.set_xlabel("volume of an atom, Å$^3$")
    axes.set_ylabel("energy of an atom, eV")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(
        "A NEP that was trained on EMT follows it in both lattices of copper", fontsize=10
    )
    figure.savefig(path, dpi=130)


def main():
    """Train, print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    torch.set_num_threads(1)
    frames = crystals(random)
    data = batch(frames[HELD_OUT:], max(CUTOFFS))
    model = train(untrained(*data[:2], random), data, options.steps)
    inputs, energy, force = batch(frames[:HELD_OUT], max(CUTOFFS))
    results = model(*inputs)
    errors = (results[0] - energy) / force.shape[1], results[2] - force
    rmse = [1000 * error.square().mean().sqrt().item() for error in errors]

    calculators = {"EMT": EMT(), "NEP": CalcOps(model)}
    curves = {
        name: {crystal: equation_of_state(crystal, calculator) for crystal in KINDS}
        for name, calculator in calculators.items()
    }
    print("| | a of fcc, A | bulk modulus, GPa | bcc above fcc, meV |\n|---|---|---|---|")
    for name, of_calculator in curves.items():
        a, modulus, above = properties(of_calculator)
        print(f"| {name} | {a:.4f} | {modulus:.1f} | {above:.1f} |")
    print(f"\nHeld-out frames: energy {rmse[0]:.2f} meV/atom, force {rmse[1]:.1f} meV/A.")
    draw(curves, Path(__file__).resolve().parent / "results" / "nep.png")


if __name__ == "__main__":
    main()
