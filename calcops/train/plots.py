"""Pictures: the loss, predictions over labels, and the energies of a run."""

import numpy as np
import torch
from calcops.train.trainer import mean_without_nan
from matplotlib.figure import Figure

kUnits = {"energy": "eV/atom", "force": "eV/Å", "virial": "eV/atom"}


def plot_loss(path, history, is_clipped):
    """Draw the errors of the training batches, and mark the steps whose gradient was clipped.

    Args:
        path: of the picture.
        history: of a trainer.Trainer. Each hundredth of the steps is a point of the curves.
        is_clipped: for each step, whether its gradient was clipped.
    """
    squares = np.array(history)[:, :3]
    width = max(1, len(squares) // 100)
    count = len(squares) // width
    blocks = np.split(squares[: count * width], count)
    errors = np.array([mean_without_nan(block) for block in blocks]) ** 0.5
    steps = width * (np.arange(count) + 0.5)
    names = [f"{name}, {unit}" for name, unit in kUnits.items()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for column in np.flatnonzero(np.isfinite(errors).any(0)):
        axes.semilogy(steps, errors[:, column], label=names[column], zorder=3)
    clipped = np.flatnonzero(is_clipped)
    axes.semilogy(
        clipped, squares[clipped, 1] ** 0.5, ".", markersize=2, color="gray", label="clipped steps"
    )
    axes.set(xlabel="step", ylabel="RMSE of the training batches")
    figure.legend(loc="outside upper center", ncols=4)  # where no curve is
    figure.savefig(path, dpi=120)


def plot_parity(path, squares, data):
    """Draw predictions over labels of energy, force and, where there are labels, virial.

    Args:
        path: of the picture.
        squares: a trainer.Squares of the model.
        data: the frames, a trainer.Data.
    """
    parts = [squares.differences(*data[numbers]) for numbers in data.parts()]
    panels = []
    for (name, unit), of_parts in zip(kUnits.items(), zip(*parts)):
        label, error = (torch.cat(tensors).flatten().cpu() for tensors in zip(*of_parts))
        is_labelled = ~label.isnan()
        if is_labelled.any():
            panels.append((name, unit, label[is_labelled], error[is_labelled]))
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    columns = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, unit, label, error) in zip(columns, panels):
        prediction = label + error
        rmse = error.square().mean().sqrt()
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
