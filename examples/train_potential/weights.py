"""Nets of a Deep Potential, their weights in an .npz, and the initial weights of a training."""

import re
from functools import partial

import numpy as np
import torch

kLeast = 1e-2  # 1/A, the least deviation that a column of R is divided by


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
            rows = torch.ops.calcops.matrix_product(x.reshape(-1, w.shape[0]), w)
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

    The first embedding layer consists of steps by tanh over the range of its input, which is -1 to
    2.5 once it is standardised. So the nets distinguish distances from the first training step on.
    The steps are in random order, since G_M2 has only the first axis_neuron columns.

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
        steps = random.permutation(np.linspace(-1, 2.5, emb[0] + 2)[1:-1])
        steepness = 0.2 * emb[0]
        arrays[f"emb{t}_w0"] = np.full((1, emb[0]), steepness)
        arrays[f"emb{t}_b0"] = -steepness * steps
    return arrays


@torch.no_grad()
def standardise(model, types, kind, R, energy):
    """Set davg, dstd and bias_atom_e of a new model from frames.

    Mean and deviation include empty slots, as in DeePMD-kit. The dstd of directions is a tenth of
    their deviation: the directions of a crystal's bonds nearly cancel in the sum over slots, and
    the rest should weigh as much as the distances.

    Args:
        model: a DeepPotential with davg 0 and dstd 1.
        types: [F, n].
        kind: [F, n, K], the neighbours' types.
        R: [F, n, K, 4], of this model.
        energy: [F].
    """
    for centre in range(len(model.sel)):
        for t, count in enumerate(model.sel):
            near = R[(types == centre).unsqueeze(-1) & (kind == t)]
            if len(near) == 0:  # such a pair may come in other frames
                continue
            missing = max(0, (types == centre).sum() * count - len(near))
            slots = torch.cat([near, near.new_zeros(missing, 4)])
            model.davg[centre, t, 0] = slots[..., 0].mean()
            model.dstd[centre, t, 0] = slots[..., 0].std().clamp(min=kLeast)
            model.dstd[centre, t, 1:] = slots[..., 1:].square().mean().sqrt().clamp(min=kLeast) / 10
    model.bias_atom_e[:] = least_energies(types, energy, len(model.sel))


def least_energies(types, energy, ntypes):
    """Return the energies [T] of types that come nearest to the frames' energies [F].

    Of several solutions, as for a single compound, it is the one of least norm. A type of -1 in
    types [F, n] is no atom.
    """
    counts = torch.stack([(types == t).sum(-1) for t in range(ntypes)], -1)
    return torch.linalg.pinv(counts.to(energy)) @ energy
