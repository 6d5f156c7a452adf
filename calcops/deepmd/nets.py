"""Nets of a Deep Potential, and their weights in an .npz."""

import re
from functools import partial

import numpy as np
import torch


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
