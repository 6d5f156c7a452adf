"""Times of calcops.torch_sim: a batch of crystals, relative to one crystal after another.

    python bench/bench_torch_sim.py [NEP] [--crystals 100] [--steps 50]

The models are Stillinger-Weber and NEP, a nep.txt with silicon. Each crystal is silicon of 8, 64 or
216 atoms, disturbed and strained in its own way. Its atoms vibrate with amplitudes of 300 K, so that
lists grow old. Both ways go through CalcOpsModel. One after another, each crystal has a CalcOpsModel
of its own, which keeps its list.

The table has ratios of the smallest of three times of the thread. Forces that differ by more than
1e-10 eV/A are an error.
"""

import argparse
import contextlib
import sys
import time

import torch
import torch_sim
from ase.build import bulk
from calcops.nep import load
from calcops.potentials import StillingerWeber
from calcops.torch_sim import CalcOpsModel


def crystals(count, cells):
    """Return a state of `count` cubes of silicon, of cells^3 cubic cells each."""
    atoms = bulk("Si", cubic=True).repeat(cells)
    structures = []
    for k in range(count):
        structure = atoms.copy()
        structure.set_cell(atoms.cell * (1 + 0.02 * k / count), scale_atoms=True)
        structures.append(structure)
    return torch_sim.initialize_state(structures, torch.device("cpu"), torch.float64)


def trajectory(state, steps):
    """Return states of a vibration with 15 THz and 0.1 A, one for each step of 1 fs."""
    generator = torch.Generator().manual_seed(0)
    phases = 2 * torch.pi * torch.rand(state.positions.shape, generator=generator).double()
    states = []
    for step in range(steps):
        moved = state.clone()
        moved.positions = state.positions + 0.1 * torch.sin(phases + 2 * torch.pi * 0.015 * step)
        states.append(moved)
    return states


def seconds_of(models, states):
    """Return the time of the thread of all steps, and the forces of the last one."""
    start = time.thread_time()
    for of_step in states:
        forces = [model(state)["forces"] for model, state in zip(models, of_step)]
    return time.thread_time() - start, torch.cat(forces)


def relative_time(model, states):
    """Return the time of the batch relative to that of one crystal after another."""
    batches = [[state] for state in states]
    singles = [state.split() for state in states]
    alone, together = [], []
    for _ in range(3):
        own = [CalcOpsModel(model) for _ in singles[0]]
        time_alone, forces_alone = seconds_of(own, singles)
        time_together, forces = seconds_of([CalcOpsModel(model)], batches)
        alone.append(time_alone)
        together.append(time_together)
    apart = (forces - forces_alone).abs().max()
    assert apart <= 1e-10, f"forces are {apart:.0e} eV/A apart"
    return min(together) / min(alone)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nep", nargs="?")
    parser.add_argument("--crystals", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"Stillinger-Weber": StillingerWeber()}
    if options.nep:
        with contextlib.redirect_stdout(sys.stderr):
            models["NEP"] = load(options.nep, ["Si"])
    print(f"| atoms of a crystal | {' | '.join(models)} |\n|{'---|' * (1 + len(models))}")
    for cells in (1, 2, 3):
        states = trajectory(crystals(options.crystals, cells), options.steps)
        ratios = [f"{relative_time(model, states):.2f}" for model in models.values()]
        print(f"| {8 * cells**3} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
