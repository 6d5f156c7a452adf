"""Pictures: the loss, predictions over labels, and the energies of a run."""

import numpy as np
import torch
from matplotlib.figure import Figure

kUnits = {"energy": "eV/atom", "force": "eV/Å", "virial": "eV/atom"}


def plot_loss(path, history):
    """Draw the errors of the training batches.

    Args:
        path: of the picture.
        history: the mean squares [3] of each step. Each hundredth of the steps is a point.
    """
    squares = np.array(history)
    width = max(1, len(squares) // 100)
    blocks = squares[: len(squares) // width * width].reshape(-1, width, 3)
    errors = blocks.mean(1) ** 0.5
    steps = width * (np.arange(len(errors)) + 0.5)
    names = [f"{name}, {unit}" for name, unit in kUnits.items()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    is_labelled = errors.any(0)  # without labels, the errors of the virial are zero
    for column in np.flatnonzero(is_labelled):
        axes.semilogy(steps, errors[:, column], label=names[column])
    axes.set(xlabel="step", ylabel="RMSE of the training batches")
    figure.legend(loc="outside upper center", ncols=3)  # where no curve is
    figure.savefig(path, dpi=120)


def plot_parity(path, model, data):
    """Draw predictions over labels of energy, force and, where there are labels, virial.

    Args:
        path: of the picture.
        model: of first_model.
        data: the frames, a trainer.Data.
    """
    types, *environment, energy, force, virial = data[:]
    predicted = model.evaluate(types, *environment, 0, False)
    predicted_energy, _, predicted_force, predicted_virial, _ = predicted
    is_atom = types >= 0
    natoms = is_atom.sum(-1)
    pairs = [
        (energy / natoms, predicted_energy / natoms),
        (force[is_atom], predicted_force[is_atom]),
    ]
    has_virial = ~virial.isnan()
    if has_virial.any():
        per_atom = virial / natoms.view(-1, 1, 1)
        predicted_per_atom = predicted_virial / natoms.view(-1, 1, 1)
        pairs.append((per_atom[has_virial], predicted_per_atom[has_virial]))
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    columns = figure.subplots(1, len(pairs))
    for axes, (name, unit), (label, prediction) in zip(columns, kUnits.items(), pairs):
        rmse = (prediction - label).square().mean().sqrt()
        low, high = limits_of(torch.cat([label.flatten(), prediction.flatten()]))
        axes.axline((low, low), slope=1, color="gray", linewidth=0.8)
        axes.plot(label.flatten(), prediction.flatten(), ".", markersize=2, alpha=0.5)
        axes.set(xlim=(low, high), ylim=(low, high), box_aspect=1)
        axes.set(title=f"{name}: RMSE {rmse:#.2g} {unit}")
        axes.set(xlabel=f"label / ({unit})", ylabel=f"potential / ({unit})")
    figure.savefig(path, dpi=120)


def limits_of(values):
    """Return the ends of an axis that shows all values."""
    low, high = values.min().item(), values.max().item()
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def plot_nve(path, time, potential, kinetic):
    """Draw the energies in meV/atom of a run over the time in ps."""
    total = potential + kinetic
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(time, potential - potential.mean(), label="potential - mean")
    left.plot(time, kinetic - kinetic.mean(), label="kinetic - mean")
    left.set(xlabel="time / ps", ylabel="energy / (meV/atom)")
    figure.legend(loc="outside upper left", ncols=2)
    right.plot(time, total - total.mean(), color="tab:green")
    right.set(xlabel="time / ps", ylabel="(total - mean) / (meV/atom)")
    figure.savefig(path, dpi=120)
