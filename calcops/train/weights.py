"""Nets of a Deep Potential, their weights in an .npz, and the initial weights of a training."""

import re
from functools import partial

import numpy as np
import torch

kLeast = 1e-2  # 1/A, the least deviation that a column of R is divided by
kSteepness = 0.7  # of a step of a first layer, in units of one over the distance of two steps
kDirections = 3.0  # directions weigh so much more than distances, as they cancel in sums over slots


class Tanh(torch.nn.Module):
    """tanh by the exponential, which is faster because it is vectorised; equal to 1e-16."""

    def forward(self, x):
        """Return the hyperbolic tangent of x, of any shape."""
        return 2 * torch.sigmoid(2 * x) - 1


kActivations = {
    "tanh": Tanh,
    "gelu": partial(torch.nn.GELU, "tanh"),
    "silu": torch.nn.SiLU,
    "sigmoid": torch.nn.Sigmoid,
    "softplus": torch.nn.Softplus,
    "relu": torch.nn.ReLU,
    "relu6": torch.nn.ReLU6,
    "linear": torch.nn.Identity,
}


class Layer(torch.nn.Module):
    """A layer of a net: idt * activation(x w + b) + x. Without idt the factor is 1.

    Args:
        w: [in, out], or [T, in, out] with weights for each type of centre.
        b: [out] or [T, out].
        idt: [out], [T, out] or None.
        residual: True to add x; twice side by side if the layer doubles the width.
        activation: a name of kActivations.
    """

    def __init__(self, w, b, idt, residual, activation):
        super().__init__()
        self.w = torch.nn.Parameter(w)
        self.b = torch.nn.Parameter(b)
        self.idt = None if idt is None else torch.nn.Parameter(idt)
        self.activation_name = activation
        self.activation = kActivations[activation]()
        self.linear = False  # True for the last layer of a fitting net: x w + b
        ratio = w.shape[-1] / w.shape[-2]
        self.repeats = int(ratio) if residual and ratio in (1, 2) else 0

    def forward(self, x, centre: int):
        """Return the layer's output [..., out] for x [..., in]."""
        w = self.w.to(x.dtype)
        b = self.b.to(x.dtype)
        idt = self.idt
        if idt is not None:
            idt = idt.to(x.dtype)
        if w.dim() == 3:
            w = w[centre]
            b = b[centre]
            idt = None if idt is None else idt[centre]
        if w.shape[0] == 1:
            y = x * w + b
        elif w.shape[1] == 1:
            y = (x * w.squeeze(-1)).sum(-1, keepdim=True) + b
        elif w.requires_grad or w.is_cuda:
            y = torch.nn.functional.linear(x, w.mT, b)
        else:  # a model that is not trained: twice as quick as PyTorch's linear on some CPUs
            rows = torch.ops.calcops_models.matrix_product(x.reshape(-1, w.shape[0]), w)
            y = rows.view(x.shape[:-1] + w.shape[1:]) + b
        if self.linear:
            return y
        y = self.activation(y)
        if idt is not None:
            y = y * idt
        if self.repeats == 0:
            return y
        return y + (x if self.repeats == 1 else torch.cat([x] * self.repeats, -1))


class Net(torch.nn.Sequential):
    """Layers in sequence, for atoms of type `centre` or for their neighbours.

    With `in_float32` the layers compute in float32, whatever the type of x.
    """

    def __init__(self, *layers):
        super().__init__(*layers)
        self.of_pairs = layers[0].w.dim() == 3
        self.in_float32 = False

    def forward(self, x, centre: int):
        """Return the net's output [..., out], of the type of x, for x [..., in]."""
        y = x.float() if self.in_float32 else x
        for layer in self:
            y = layer(y, centre)
        return y.to(x.dtype)


def tensor(arrays, key):
    """Return an array as a tensor of float64; None if there is no such array."""
    return torch.tensor(np.asarray(arrays[key]), dtype=torch.float64) if key in arrays else None


def net(arrays, name):
    """Return the net whose layers have the arrays `name`_w0, `name`_b0, and so on."""
    depth = sum(key.startswith(f"{name}_w") for key in arrays)
    layers = []
    for i in range(depth):
        w, b, idt = (tensor(arrays, f"{name}_{key}{i}") for key in ("w", "b", "idt"))
        layers.append(
            Layer(
                w,
                b,
                idt,
                arrays.get(f"{name}_res{i}", 0),
                str(arrays.get(f"{name}_act{i}", "tanh")),
            )
        )
    layers[-1].linear = name.startswith("fit")
    return Net(*layers)


def save_npz(model, path):
    """Write a model as the arrays that load_npz reads."""

    def array_name(key):
        """Return emb0_w1 for emb.0.1.w."""
        return re.sub(r"(emb|fit)\.(\d+)\.(\d+)\.(\w+)", r"\1\2_\4\3", key)

    arrays = {array_name(key): value.cpu() for key, value in model.state_dict().items()}
    for key, layer in model.named_modules():
        if isinstance(layer, Layer):
            arrays[array_name(f"{key}.res")] = int(layer.repeats > 0)
            if layer.activation_name != "tanh":
                arrays[array_name(f"{key}.act")] = layer.activation_name
    np.savez(
        path,
        **arrays,
        sel=model.sel,
        axis_neuron=model.axis_neuron,
        rcut=model.cutoff,
        rcut_smth=model.rcut_smth,
        type_names=model.type_names,
        float32_nets=model.has_float32_nets,
    )


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


def least_energies(types, energy, ntypes):
    """Return the energies [T] of types that come nearest to the frames' energies [F].

    Of several solutions, as for a single compound, it is the one of least norm. A type of -1 in
    types [F, n] is no atom. An energy of NaN is no label.
    """
    counts = torch.stack([(types == t).sum(-1) for t in range(ntypes)], -1).to(energy)
    is_known = ~energy.isnan()
    return torch.linalg.pinv(counts[is_known]) @ energy[is_known]
