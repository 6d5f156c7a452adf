"""The loss on energies, forces and virials, and a training that resumes bit for bit.

The training runs on one process or on many.
"""

import os
from functools import partial

import torch
from calcops.train.frames import neighbours, pair_vectors
from torch import distributed
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

# These weigh the mean squares of energy and virial per atom, eV, and of force, eV/A.
kLossWeights = 100.0, 1.0, 10.0
kKeptBytes = 2e9  # of environments of frames
kRates = 1e-2, 1e-4  # of Muon at the first and the last step, linear between; Adam has 0.3 of it


def save_whole(state, path):
    """torch.save that leaves in `path` the new file or, if it is killed, the one before."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


class Data:
    """Frames as a model takes them, on its device, with all that its weights do not change: [index]
    gives types [F,n], what `model.environment` gives, and the labels: energy, force and virial.

    The environments of few frames are kept, those of many are computed when they are asked for.
    """

    def __init__(self, frames, model):
        self.frames, self.model = frames, model
        self.tensors = None
        # R_d is the largest tensor of an environment: 12 numbers a slot, of 16 or so.
        slots = frames["types"].numel() * sum(model.sel)
        if 8 * 20 * slots < kKeptBytes:
            self.tensors = self.environment(frames)

    def __len__(self):
        return len(self.frames["types"])

    def __getitem__(self, index):
        if self.tensors is not None:
            return [tensor[index] for tensor in self.tensors]
        return self.environment({key: value[index] for key, value in self.frames.items()})

    def environment(self, frames):
        """The tensors of some frames."""
        positions, types = frames["positions"], frames["types"]
        list_neigh, shift = neighbours(
            positions, frames["cells"], self.model.cutoff, types, frames.get("pbc")
        )
        Rij = pair_vectors(positions, list_neigh, shift)
        labels = [frames[key] for key in ("energy", "force", "virial")]
        device = self.model.davg.device
        types, list_neigh, Rij, *labels = (
            tensor.to(device) for tensor in (types, list_neigh, Rij, *labels)
        )
        return [types, *self.model.environment(types, list_neigh, Rij), *labels]


class MeanSquares(torch.nn.Module):
    """Mean squares [3] of a model's errors of energy/atom, force, virial/atom on frames of Data."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(
        self, types, list_neigh, Rij, kind, R, R_d, energy, force, virial, create_graph=True
    ):
        """Mean squares [3]; the arguments are those of Data, a frame in each row.

        A frame whose virial is NaN has none, and counts as one without an error of it.
        """
        ours = self.model.evaluate(types, list_neigh, Rij, kind, R, R_d, 0, create_graph)
        n = (types >= 0).sum(-1)
        of_energy = ((ours[0] - energy) / n).square()
        of_force = (ours[2] - force).square().sum((1, 2)) / (3 * n)
        error = torch.where(virial.isnan(), 0.0, ours[3] - virial) / n.view(-1, 1, 1)
        return torch.stack([of_energy.mean(), of_force.mean(), error.square().mean()])


def differentiate(mean_squares, parameters, *batch, weights=kLossWeights):
    """The mean squares, and the gradients of the loss through the operators' backward."""
    return gradients_of_loss(functional_call(mean_squares, parameters, batch), parameters, weights)


def gradients_of_loss(squares, parameters, weights=kLossWeights):
    """The mean squares, and the gradients of their weighted sum for each parameter."""
    loss = squares @ squares.new_tensor(weights)
    return squares.detach(), torch.autograd.grad(loss, list(parameters.values()))


def mean_of_processes(tensors):
    """The mean of each tensor over all processes, by a single message; alone, the tensor."""
    if not distributed.is_initialized():
        return tensors
    message = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(message)
    parts = (message / distributed.get_world_size()).split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


def about(model):
    """What the weights of a model do not show."""
    names = ("type_names", "sel", "cutoff", "rcut_smth", "axis_neuron")
    return {name: getattr(model, name) for name in names}


class Trainer:
    """Training on `batch` frames a step, which the processes of torch.distributed share, where
    there are several. All draw the same frames and take the same step, so that their weights stay
    equal to the bit.
    """

    def __init__(
        self, model, data, steps, seed, batch=1, compile=False, rates=kRates, weights=kLossWeights
    ):
        if batch > len(data):
            raise ValueError(
                f"expected a batch of at most the {len(data)} frames there are, got {batch}"
            )
        self.model, self.data, self.steps, self.batch = model, data, steps, batch
        self.rates = rates
        self.share = slice(None)  # of the batch
        if distributed.is_initialized():
            self.share = slice(distributed.get_rank(), None, distributed.get_world_size())
        self.generator = torch.Generator().manual_seed(seed)
        self.mean_squares = MeanSquares(model)
        self.parameters = dict(self.mean_squares.named_parameters())
        matrices = [p for p in self.parameters.values() if p.dim() == 2 and min(p.shape) > 1]
        others = [p for p in self.parameters.values() if p.dim() != 2 or min(p.shape) == 1]
        # The descriptor's components are nearly collinear, and Adam alone crawls: Muon steps along
        # all of them alike.
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=0),
            torch.optim.Adam(others, betas=(0.9, 0.99), fused=True),
        ]
        self.history = []  # mean squares of each step
        self.differentiate = partial(differentiate, self.mean_squares, weights=weights)
        # torch.compile has no double backward; make_fx follows both down to plain operators.
        if compile:
            # symbolic: frames differ in how many neighbours there are
            trace = make_fx(
                self.differentiate, tracing_mode="symbolic", _allow_non_fake_inputs=True
            )
            graph = trace(self.parameters, *data[torch.arange(batch)[self.share]])
            self.differentiate = torch.compile(graph)

    def step(self):
        """Draw a batch, and take one step of both optimizers along the mean of all processes."""
        first, last = self.rates
        rate = first + (last - first) * len(self.history) / self.steps
        index = torch.randperm(len(self.data), generator=self.generator)[: self.batch]
        squares, gradients = self.differentiate(self.parameters, *self.data[index[self.share]])
        squares, *gradients = mean_of_processes([squares, *gradients])
        for parameter, gradient in zip(self.parameters.values(), gradients):
            parameter.grad = gradient
        self.update(rate)
        self.history.append(squares.tolist())

    def update(self, rate):
        """Take the step, with the gradients that the parameters have."""
        for optimizer, share in zip(self.optimizers, (1, 0.3)):
            optimizer.param_groups[0]["lr"] = share * rate
            optimizer.step()

    def save(self, path):
        """Write a checkpoint: the model, the optimizers, the history and the random numbers."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        state |= {"history": self.history, "generator": self.generator.get_state()}
        save_whole(state | {"about": about(self.model)}, path)

    def resume(self, path):
        """Go on where a checkpoint was written. Raises ValueError if it is another model's."""
        state = torch.load(path, map_location="cpu")
        for name, value in about(self.model).items():
            saved = state.get("about", {}).get(name, value)
            if saved != value:
                raise ValueError(f"its {name} is {saved}, not {value}")
        self.model.load_state_dict(state["model"])
        for optimizer, old in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(old)
        self.history = state["history"]
        self.generator.set_state(state["generator"])
