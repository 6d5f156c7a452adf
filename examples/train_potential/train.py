"""Train a Deep Potential on energies, forces and virials of silicon; the force operators are inside the loss.

    python examples/train_potential/train.py [FOLDER] [--steps 6000] [--compile]    # default: build/train_potential

FOLDER gets frames.pt, checkpoint.pt (the same command again resumes from it), model.npz, loss.png and parity.png.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from frames import generate, neighbours, pair_vectors
from model import DeepPotential
from plots import plot_loss, plot_parity
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm
from weights import initial, save_npz

kWeights = 100.0, 1.0, 10.0  # of the mean squares of energy and virial, eV/atom, and of force, eV/A
kRates = 3e-3, 1e-5  # of Adam, at the first and the last step


class Data:
    """Frames with the neighbours that the model sees of them; index: types, list_neigh, Rij and the three labels."""

    def __init__(self, frames, model):
        list_neigh, shift = neighbours(frames["positions"], frames["cells"], model.cutoff)
        Rij = pair_vectors(frames["positions"], list_neigh, shift)
        self.types = torch.zeros(len(list_neigh), list_neigh.shape[1], dtype=torch.int64)
        self.list_neigh, self.Rij = model.select(self.types, list_neigh, Rij)
        self.labels = frames["energy"], frames["force"], frames["virial"]

    def __len__(self):
        return len(self.types)

    def __getitem__(self, index):
        return [x[index] for x in (self.types, self.list_neigh, self.Rij, *self.labels)]


def mean_squares(model, parameters, types, list_neigh, Rij, *labels, create_graph=True):
    """Of the errors in energy per atom, force and virial per atom."""
    inputs = types, list_neigh, Rij, 0, create_graph
    energy, _, force, virial, _ = functional_call(model, parameters, inputs)
    n = types.shape[1]
    errors = (energy - labels[0]) / n, force - labels[1], (virial - labels[2]) / n
    return torch.stack([error.square().mean() for error in errors])


def differentiate(model, parameters, *batch):
    """The mean squares and the loss's gradients: through forces and virial, so through the operators' backward."""
    squares = mean_squares(model, parameters, *batch)
    loss = squares @ squares.new_tensor(kWeights)
    return squares.detach(), torch.autograd.grad(loss, list(parameters.values()))


class Trainer:
    def __init__(self, model, data, steps, batch_size, seed, compile=False):
        self.model, self.data, self.steps, self.batch_size = model, data, steps, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values())
        self.history = []  # a row of mean squares a step
        self.differentiate = lambda *arguments: differentiate(model, *arguments)
        if compile:  # torch.compile has no double backward; make_fx follows both down to plain operators
            graph = make_fx(self.differentiate)(self.parameters, *data[:batch_size])
            self.differentiate = torch.compile(graph)

    def step(self):
        first, last = kRates
        rate = first * (last / first) ** (len(self.history) / self.steps)
        index = torch.randperm(len(self.data), generator=self.generator)[: self.batch_size]
        squares, gradients = self.differentiate(self.parameters, *self.data[index])
        for parameter, gradient in zip(self.parameters.values(), gradients):
            parameter.grad = gradient
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.history.append(squares.tolist())

    def save(self, path):
        state = dict(
            model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), history=self.history
        )
        torch.save(state | {"generator": self.generator.get_state()}, f"{path}.new")
        os.replace(f"{path}.new", path)

    def resume(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.history = state["history"]
