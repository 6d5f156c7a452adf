"""The initial weights of a Deep Potential, and how they follow from the frames."""

import numpy as np
import torch

kLeast = 1e-2  # 1/A, the least deviation that a column of R is divided by
kSteepness = 0.7  # of a step of a first layer, in units of one over the distance of two steps
kDirections = 3.0  # directions weigh so much more than distances, as they cancel in sums over slots


def initial(sel, rcut, rcut_smth, emb, axis_neuron, fit, seed):
    """Return random arrays for DeepPotential, drawn as DeePMD-kit draws them but for one layer.

    The first embedding layer consists of steps by tanh over the range from 0 to 1, which
    `standardise` moves to that of its input. So the nets distinguish distances from the first
    training step on. The steps are in random order, since G_M2 has only the first axis_neuron
    columns.

    Args:
        sel: [T], the most neighbours of each type.
        rcut: the cutoff, a length.
        rcut_smth: the length where the switch begins.
        emb: the widths of the embedding nets.
        axis_neuron: the columns of G_M2.
        fit: the widths of the fitting nets' hidden layers.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    ntypes = len(sel)
    arrays = {
        "sel": sel,
        "rcut": rcut,
        "rcut_smth": rcut_smth,
        "axis_neuron": axis_neuron,
        "davg": np.zeros((ntypes, ntypes, 4)),
        "dstd": np.ones((ntypes, ntypes, 4)),
        "bias_atom_e": np.zeros(ntypes),
    }
    for name, widths in (("emb", [1, *emb]), ("fit", [emb[-1] * axis_neuron, *fit, 1])):
        for t in range(ntypes):
            for i, (a, b) in enumerate(zip(widths, widths[1:])):
                arrays[f"{name}{t}_w{i}"] = random.normal(0, (a + b) ** -0.5, (a, b))
                arrays[f"{name}{t}_b{i}"] = random.normal(0, 1, b)
                arrays[f"{name}{t}_res{i}"] = 1
                if name == "fit" and a == b:
                    arrays[f"{name}{t}_idt{i}"] = random.normal(0.1, 0.001, b)
    for t in range(ntypes):
        steps = random.permutation(np.linspace(0, 1, emb[0] + 2)[1:-1])
        steepness = kSteepness * emb[0]
        arrays[f"emb{t}_w0"] = np.full((1, emb[0]), steepness)
        arrays[f"emb{t}_b0"] = -steepness * steps
    return arrays


@torch.no_grad()
def standardise(model, pairs):
    """Set davg and dstd of a new model, and the range of its first layers, from statistics.

    Mean and deviation include empty slots, as in DeePMD-kit, up to the largest number of
    neighbours. Room beyond it in `sel` does not change the size of the sums over slots. The range
    of a first layer goes from an empty slot to the nearest neighbour in the frames.

    Args:
        model: a DeepPotential of the arrays of `initial`.
        pairs: the pairs.Pairs of frames.
    """
    slots = np.maximum(pairs.atoms[:, None] * pairs.most, 1)
    mean = pairs.sums / slots
    square = pairs.squares / slots
    deviation = np.sqrt(square - mean**2).clip(kLeast)
    direction = np.sqrt(square / 3).clip(kLeast) / kDirections
    has_pairs = pairs.counts > 0
    if has_pairs.any():  # others may come later
        deviation[~has_pairs] = deviation[has_pairs].mean()
        direction[~has_pairs] = direction[has_pairs].mean()
    scale = pairs.most.sum() / sum(model.sel)
    model.davg[..., 0] = torch.from_numpy(mean)
    model.dstd[..., 0] = torch.from_numpy(scale * deviation)
    model.dstd[..., 1:] = torch.from_numpy(scale * direction).unsqueeze(-1)
    largest = torch.from_numpy(pairs.largest)
    for t, net in enumerate(model.emb):
        low = (-model.davg[:, t, 0] / model.dstd[:, t, 0]).min()
        high = ((largest[:, t] - model.davg[:, t, 0]) / model.dstd[:, t, 0]).max()
        first = net[0]
        first.b -= (first.w * low / (high - low)).squeeze(0)
        first.w /= high - low
