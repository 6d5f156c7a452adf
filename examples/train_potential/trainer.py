"""The loss on energies, forces and virials, and a training that can be stopped and resumed, bit for bit."""

import os

import torch
from frames import neighbours, pair_vectors
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

kLossWeights = 100.0, 1.0, 10.0  # of the mean squares of energy and virial per atom, eV, and of force, eV/A
kBatch = 1  # frames a step
kRates = 1e-2, 1e-4  # of Muon at the first and the last step, linear between; Adam has 0.3 of it


def save_whole(state, path):
    """torch.save, after which `path` is the new file or, if the run is killed here, what it was before."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


class Data:
    """Frames as a model takes them; [index] gives types, list_neigh and Rij, then the labels."""

    def __init__(self, frames, model):
        list_neigh, shift = neighbours(frames["positions"], frames["cells"], model.cutoff)
        self.types, self.list_neigh = frames["types"], list_neigh
        self.Rij = pair_vectors(frames["positions"], list_neigh, shift)
        self.labels = frames["energy"], frames["force"], frames["virial"]

    def __getitem__(self, index):
        return [x[index] for x in (self.types, self.list_neigh, self.Rij, *self.labels)]


def mean_squares(model, parameters, types, list_neigh, Rij, energy, force, virial, create_graph=True):
    """Mean squares of the errors of energy per atom, force and virial per atom, [3]."""
    inputs, n = (types, list_neigh, Rij, 0, create_graph), types.shape[1]
    ours = functional_call(model, parameters, inputs)
    errors = (ours[0] - energy) / n, ours[2] - force, (ours[3] - virial) / n
    return torch.stack([error.square().mean() for error in errors])


def differentiate(model, parameters, *batch):
    """The mean squares, and the gradients of the loss: through the forces, so through the operators' backward."""
    return gradients_of_loss(mean_squares(model, parameters, *batch), parameters)


def gradients_of_loss(squares, parameters):
    loss = squares @ squares.new_tensor(kLossWeights)
    return squares.detach(), torch.autograd.grad(loss, list(parameters.values()))


class Trainer:
    def __init__(self, model, data, steps, seed, compile=False):
        self.model, self.data, self.steps = model, data, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = dict(model.named_parameters())
        matrices = [p for p in self.parameters.values() if p.dim() == 2 and min(p.shape) > 1]
        others = [p for p in self.parameters.values() if p.dim() < 2 or min(p.shape) == 1]
        # The descriptor's components are nearly collinear, and Adam alone crawls: Muon steps along all of them alike.
        self.optimizers = [torch.optim.Muon(matrices, weight_decay=0), torch.optim.Adam(others, betas=(0.9, 0.99))]
        self.history = []  # mean squares of each step
        self.differentiate = lambda *arguments: differentiate(model, *arguments)
        if compile:  # torch.compile has no double backward; make_fx follows both down to plain operators
            graph = make_fx(self.differentiate)(self.parameters, *data[torch.arange(kBatch)])
            self.differentiate = torch.compile(graph)

    def step(self):
        first, last = kRates
        rate = first + (last - first) * len(self.history) / self.steps
        index = torch.randperm(len(self.data.types), generator=self.generator)[:kBatch]
        squares, gradients = self.differentiate(self.parameters, *self.data[index])
        for parameter, gradient in zip(self.parameters.values(), gradients):
            parameter.grad = gradient
        for optimizer, share in zip(self.optimizers, (1, 0.3)):
            optimizer.param_groups[0]["lr"] = share * rate
            optimizer.step()
        self.history.append(squares.tolist())

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        save_whole(state | {"history": self.history, "generator": self.generator.get_state()}, path)

    def resume(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        for optimizer, old in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(old)
        self.history = state["history"]
        self.generator.set_state(state["generator"])
