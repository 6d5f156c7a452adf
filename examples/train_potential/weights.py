"""Weights of a Deep Potential: a net's layers, to and from arrays of an npz, and random ones."""

import re
from functools import partial

import numpy as np
import torch

kLeast = 1e-2  # 1/A: a deviation from which no number is divided by less


class Tanh(torch.nn.Module):
    """By the exponential, whose vectors are faster than those of tanh; equal to 1e-16."""

    def forward(self, x):
        """The hyperbolic tangent of x, of any shape."""
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
    """y = x W + b, then idt times its activation, plus x; W [T,in,out]: one per type of centre."""

    def __init__(self, w, b, idt, residual, activation):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(w), torch.nn.Parameter(b)
        self.idt = None if idt is None else torch.nn.Parameter(idt)
        self.activation_name, self.activation = activation, kActivations[activation]()
        self.linear = False
        ratio = w.shape[-1] / w.shape[-2]
        self.repeats = int(ratio) if residual and ratio in (1, 2) else 0

    def forward(self, x, centre: int):
        """The layer's output [..., out] for x [..., in]."""
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
        else:  # a model that is not trained; twice as quick as PyTorch's on some CPUs
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
    """Layers in sequence for x [...,in] of atoms of type `centre`, or of their neighbours.

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
    """The array of a name in float64, or None."""
    return torch.tensor(np.asarray(arrays[key]), dtype=torch.float64) if key in arrays else None


def net(arrays, name):
    """The net whose layers are the arrays `name`_w0, `name`_b0, and so on."""
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

    def named(key):
        return re.sub(r"(emb|fit)\.(\d+)\.(\d+)\.(\w+)", r"\1\2_\4\3", key)

    arrays = {named(key): value.cpu() for key, value in model.state_dict().items()}
    layers = {key: layer for key, layer in model.named_modules() if isinstance(layer, Layer)}
    arrays |= {named(f"{key}.res"): int(layer.repeats > 0) for key, layer in layers.items()}
    others = {
        key: layer.activation_name
        for key, layer in layers.items()
        if layer.activation_name != "tanh"
    }
    arrays |= {named(f"{key}.act"): name for key, name in others.items()}
    arrays |= {"sel": model.sel, "axis_neuron": model.axis_neuron, "rcut": model.cutoff}
    arrays |= {"rcut_smth": model.rcut_smth, "type_names": model.type_names}
    np.savez(path, **arrays, float32_nets=model.has_float32_nets)


def initial(sel, rcut, rcut_smth, emb, axis_neuron, fit, seed):
    """Random arrays for DeepPotential as DeePMD-kit draws them; `emb`, `fit`: hidden widths.

    Only the first embedding layer is less so: its tanh are steps all over the range of its input,
    -1 to 2.5 once standardised, so that distances are told apart from the first training step on.
    Shuffled, since G_M2 has but the first axis_neuron columns.
    """
    random, ntypes = np.random.default_rng(seed), len(sel)
    arrays = {"sel": sel, "rcut": rcut, "rcut_smth": rcut_smth, "axis_neuron": axis_neuron}
    arrays |= {"davg": np.zeros((ntypes, ntypes, 4)), "dstd": np.ones((ntypes, ntypes, 4))}
    arrays["bias_atom_e"] = np.zeros(ntypes)
    for name, widths in (("emb", [1, *emb]), ("fit", [emb[-1] * axis_neuron, *fit, 1])):
        for t in range(ntypes):
            for i, (a, b) in enumerate(zip(widths, widths[1:])):
                arrays[f"{name}{t}_w{i}"] = random.normal(0, (a + b) ** -0.5, (a, b))
                arrays[f"{name}{t}_b{i}"] = random.normal(0, 1, b)
                arrays[f"{name}{t}_res{i}"] = 1
                if name == "fit" and a == b:
                    arrays[f"{name}{t}_idt{i}"] = random.normal(0.1, 0.001, b)
    for t in range(ntypes):
        steps, steepness = random.permutation(np.linspace(-1, 2.5, emb[0] + 2)[1:-1]), 0.2 * emb[0]
        arrays[f"emb{t}_w0"], arrays[f"emb{t}_b0"] = (
            np.full((1, emb[0]), steepness),
            -steepness * steps,
        )
    return arrays


@torch.no_grad()
def standardise(model, types, kind, R, energy):
    """Sets davg, dstd and bias_atom_e of a new model, whose R is not standardised yet, for frames;
    empty slots are included as in DeePMD-kit. The biases are the least_energies; of several
    answers, which a single compound has, it is the least.

    The directions get a tenth of their deviation: those of a crystal's bonds nearly cancel in the
    sum over the slots, and what remains of them is to have the weight of the distances.
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
    """The energies [T] of types that come nearest to frames' energies [F]; types [F,n], -1: no
    atom.
    """
    counts = torch.stack([(types == t).sum(-1) for t in range(ntypes)], -1)
    return torch.linalg.pinv(counts.to(energy)) @ energy
