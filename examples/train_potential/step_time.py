"""Time a training step by the operators and by plain autograd through the positions.

    python examples/train_potential/step_time.py [FOLDER] [--repeats 50]

A step needs forces and virial. Both ways give the same gradients of the same loss, for the same
selected neighbours. Two parts that both ways need are timed alone: the derivatives of the nets, and
the optimizers. All take turns, and the least time of each counts. FOLDER is that of the training.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from calcops.deepmd.deep_potential import load_npz
from calcops.train.datasets import frames_of, read
from calcops.train.trainer import Data, Trainer, components, differentiate, gradients_of_loss


def differentiate_plainly(
    model, parameters, factors, types, list_neigh, Rij, kind, R, R_d, frame, *labels
):
    """Return the results of trainer.differentiate, by autograd without operators of CalcOps."""
    energy, force, virial, weights = labels
    natoms = frame.bincount().to(energy)
    moved = torch.zeros_like(force, requires_grad=True)
    strain = torch.zeros_like(virial, requires_grad=True)
    is_filled = (list_neigh >= 0)[..., None]
    moves = moved[list_neigh.clamp(min=0)] - moved[:, None]
    Rij = Rij + moves.where(is_filled, 0)
    Rij = Rij + Rij @ strain[frame].mT
    atom_energy = model.atom_energies(types, kind, model.describe(types, kind, Rij)[0])[0]
    dE, dW = torch.autograd.grad(atom_energy.sum(), (moved, strain), create_graph=True)
    of_frames = torch.zeros_like(energy).index_add(0, frame, atom_energy)
    virial_error = components(-dW - virial, natoms)
    force_squares = (-dE - force).square().mean(-1)
    squares = [
        ((of_frames - energy) / natoms).square(),
        torch.zeros_like(energy).index_add(0, frame, force_squares),
        virial_error.square().mean(-1),
    ]
    return gradients_of_loss(torch.stack(squares, -1), parameters, factors, weights)


def differentiate_nets(
    model, parameters, factors, types, list_neigh, Rij, kind, R, R_d, frame, *labels
):
    """Return gradients of a loss of energies and dE/dR, which need only derivatives of the nets."""
    *_, weights = labels
    R = R.view_as(R).requires_grad_()
    atom_energy = model.atom_energies(types, kind, R)
    dE = torch.autograd.grad(atom_energy.sum(), R, create_graph=True)[0]
    squares = torch.stack([error.square().mean() for error in (atom_energy, dE, dE[..., 0])])
    return gradients_of_loss(squares.expand_as(weights), parameters, factors, weights)


def calls_of(trainer, batch):
    """Return the functions that are timed, by name. Each returns squares and gradients."""
    calls = {
        "operators": partial(differentiate, trainer.squares),
        "autograd": partial(differentiate_plainly, trainer.model),
        "of either, the nets": partial(differentiate_nets, trainer.model),
    }
    factors = torch.ones(3, dtype=torch.float64)
    return {
        name: partial(call, trainer.parameters, factors, *batch) for name, call in calls.items()
    }


def least_times(calls, repeats):
    """Return the least time of each call in ms. The calls take turns."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    return times


def compare(model, data, frames, options):
    """Print the times of a step on a batch of `frames`."""
    batch = data[torch.arange(frames)]
    trainer = Trainer(model, data, steps=1, seed=0)
    calls = calls_of(trainer, batch)
    gradients = {}
    for name, call in calls.items():
        gradients[name] = torch.cat([gradient.flatten() for gradient in call()[1]])
    expected = gradients["operators"]
    for parameter in trainer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)  # so that the model stays as it is
    calls["beside either, the optimizers"] = partial(trainer.update, 0.01)
    times = least_times(calls, options.repeats)
    print(f"a step of {batch[0].shape[1]} atoms, {torch.get_num_threads()} threads")
    for name, milliseconds in times.items():
        ratio = milliseconds / times["operators"]
        line = f"  {name:32}{milliseconds:8.2f} ms {ratio:8.2f} of the first"
        if name.startswith(("operators", "autograd")):
            difference = (gradients[name] - expected).norm() / expected.norm()
            line += f"; gradients apart by {difference:.0e}"
        print(line)


def main():
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/train_potential/silicon")
    )
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    images = read([options.folder / "held_out.extxyz"])
    data = Data(frames_of(images, model.type_names), model)
    for frames in (2, 8):
        compare(model, data, frames, options)


if __name__ == "__main__":
    main()
