"""What the examples here draw: the loss, predictions over labels, and the energies of a run."""

import numpy as np
import torch
from matplotlib.figure import Figure

kUnits = {"energy": "eV/atom", "force": "eV/Å", "virial": "eV/atom"}


def plot_loss(path, history):
    """history: the mean squares [3] of each step, drawn as RMSE of each hundredth of the steps."""
    squares = np.array(history)
    width = max(1, len(squares) // 100)
    blocks = squares[: len(squares) // width * width].reshape(-1, width, 3).mean(1) ** 0.5
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(
        width * (np.arange(len(blocks)) + 0.5),
        blocks,
        label=[f"{name}, {unit}" for name, unit in kUnits.items()],
    )
    axes.set(xlabel="step", ylabel="RMSE of the training batches")
    figure.legend(loc="outside upper center", ncols=3)  # where no curve is
    figure.savefig(path, dpi=120)


def plot_parity(path, model, data, source="Stillinger-Weber"):
    """Ours over the labels, which `source` made, of every frame of data."""
    types, *environment, energy, force, virial = data[:]
    ours = model.evaluate(types, *environment, 0, False)
    n = (types >= 0).sum(-1)
    real, labelled = types >= 0, ~virial.isnan()
    pairs = [(energy / n, ours[0] / n), (force[real], ours[2][real])]
    if labelled.any():
        per_atom = [each / n.view(-1, 1, 1) for each in (virial, ours[3])]
        pairs.append(tuple(each[labelled] for each in per_atom))
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    columns = figure.subplots(1, len(pairs))
    for axes, (name, unit), (label, prediction) in zip(columns, kUnits.items(), pairs):
        rmse = (prediction - label).square().mean().sqrt()
        both = torch.cat([label.flatten(), prediction.flatten()])
        low, high = both.min().item(), both.max().item()
        limits = low - 0.05 * (high - low), high + 0.05 * (high - low)
        axes.axline((low, low), slope=1, color="gray", linewidth=0.8)
        axes.plot(label.flatten(), prediction.flatten(), ".", markersize=2, alpha=0.5)
        axes.set(xlim=limits, ylim=limits, box_aspect=1, title=f"{name}: RMSE {rmse:#.2g} {unit}")
        axes.set(xlabel=f"{source} / ({unit})", ylabel=f"Deep Potential / ({unit})")
    figure.savefig(path, dpi=120)


def plot_nve(path, time, potential, kinetic):
    """time in ps, energies in meV/atom."""
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
