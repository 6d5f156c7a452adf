"""The loss on energies, forces and virials, and a training on one or many processes.

A training that was stopped resumes bit for bit.
"""

import os
from functools import partial

import torch
from calcops.train.muon import Muon
from calcops.train.neighbours import neighbours, pair_vectors
from calcops.train.weights import least_energies
from torch import distributed
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

# What energy per atom, force and virial per atom add to the loss if all of them are as wrong as
# their labels vary.
kShares = 0.08, 1.0, 0.6
kMostWeight = 1e3  # A^2, for labels that hardly vary
kLeastForce = 0.01  # eV/A, the unit of weights where forces are smaller, as in perfect crystals
kRates = 1e-2, 1e-4  # Muon's rate at the first and the last step, linear in between
kShareOfAdam = 0.3  # Adam's rate, in units of Muon's
kKeptBytes = 2e9  # the most bytes of environments of frames that are kept


def save_whole(state, path):
    """Save `state` by torch.save. A process that is killed meanwhile leaves the old file."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def loss_weights(frames, ntypes):
    """Return the weights [3] of the mean squares of energy/atom, force and virial/atom.

    They are kShares over the variances of the labels, in units of the force's. So no label
    outweighs the others, be the frames of a crystal, or of a dense liquid with large virials. The
    energies of lone atoms do not count as a variation.

    Args:
        frames: a dict of datasets.frames_of.
        ntypes: the number of types.
    """
    natoms = (frames["types"] >= 0).sum(-1)
    is_lone = (natoms == 1) & frames["virial"].isnan().any(-1).any(-1)
    if not is_lone.all():
        frames = {key: value[~is_lone] for key, value in frames.items()}
        natoms = natoms[~is_lone]
    types = frames["types"]
    biases = least_energies(types, frames["energy"], ntypes)
    bias = torch.where(types >= 0, biases[types.clamp(min=0)], 0.0).sum(-1)
    virial = (frames["virial"] / natoms.view(-1, 1, 1)).flatten()
    virial = virial[~virial.isnan()]
    variances = [
        ((frames["energy"] - bias) / natoms).square().mean(),
        (frames["force"].square().sum((1, 2)) / (3 * natoms)).mean(),
        virial.square().mean() if len(virial) else torch.tensor(torch.inf),
    ]
    of_force = max(variances[1].item(), kLeastForce**2)
    variances[1] = torch.tensor(of_force)
    weights = [
        share * of_force / max(variance.item(), 1e-30)
        for share, variance in zip(kShares, variances)
    ]
    return [min(weight, kMostWeight) for weight in weights]


class Data:
    """Frames on a model's device, with everything that does not depend on the model's weights.

    data[index] returns types [F, n], the results of `model.environment`, and the labels energy,
    force and virial. The environments of few frames are kept. Those of many are computed at each
    use.

    Args:
        frames: a dict of datasets.frames_of.
        model: of first_model. Its `environment` gives what its `evaluate` needs.
    """

    def __init__(self, frames, model):
        self.frames = frames
        self.model = model
        self.tensors = None
        # An environment has some 20 numbers of 8 bytes for each slot, 12 of them in R_d.
        slots = frames["types"].numel() * model.most_neighbours
        if 8 * 20 * slots < kKeptBytes:
            self.tensors = self.environment(frames)

    def __len__(self):
        return len(self.frames["types"])

    def __getitem__(self, index):
        if self.tensors is not None:
            return [tensor[index] for tensor in self.tensors]
        return self.environment({key: value[index] for key, value in self.frames.items()})

    def environment(self, frames):
        """Return the tensors of data[index] for frames."""
        positions = frames["positions"]
        types = frames["types"]
        list_neigh, shift = neighbours(
            positions, frames["cells"], self.model.cutoff, types, frames.get("pbc")
        )
        Rij = pair_vectors(positions, list_neigh, shift)
        device = next(self.model.parameters()).device
        types, list_neigh, Rij = (tensor.to(device) for tensor in (types, list_neigh, Rij))
        labels = [frames[key].to(device) for key in ("energy", "force", "virial")]
        return [types, *self.model.environment(types, list_neigh, Rij), *labels]


class MeanSquares(torch.nn.Module):
    """Mean squares [3] of a model's errors of energy/atom, force and virial/atom."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, types, *tensors, create_graph=True):
        """Return the mean squares [3] for the tensors of Data, a frame in each row.

        A frame whose virial is NaN has no label. Its error of the virial counts as zero.
        """
        *environment, energy, force, virial = tensors
        predicted = self.model.evaluate(types, *environment, 0, create_graph)
        predicted_energy, _, predicted_force, predicted_virial, _ = predicted
        natoms = (types >= 0).sum(-1)
        energy_error = (predicted_energy - energy) / natoms
        force_squares = (predicted_force - force).square().sum((1, 2)) / (3 * natoms)
        virial_error = torch.where(virial.isnan(), 0.0, predicted_virial - virial)
        virial_error = virial_error / natoms.view(-1, 1, 1)
        return torch.stack(
            [energy_error.square().mean(), force_squares.mean(), virial_error.square().mean()]
        )


def differentiate(mean_squares, parameters, *batch, weights=(1.0, 1.0, 1.0)):
    """Return the mean squares, and the gradients of the loss through the operators' backward."""
    return gradients_of_loss(functional_call(mean_squares, parameters, batch), parameters, weights)


def gradients_of_loss(squares, parameters, weights=(1.0, 1.0, 1.0)):
    """Return the mean squares, and the gradients of their weighted sum for each parameter."""
    loss = squares @ squares.new_tensor(weights)
    return squares.detach(), torch.autograd.grad(loss, list(parameters.values()))


def mean_of_processes(tensors):
    """Return the mean of each tensor over all processes, by a single message."""
    if not distributed.is_initialized():
        return tensors
    message = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(message)
    parts = (message / distributed.get_world_size()).split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


class Trainer:
    """Training on `batch` frames a step.

    The processes of torch.distributed, where there are several, share a batch. All draw the same
    frames and take the same step, so that their weights stay equal to the bit.

    Args:
        model: of first_model.
        data: its Data.
        steps: the number of steps, over which the rate falls.
        seed: of the order of the frames.
        batch: frames a step, of all processes together.
        compile: True to compile the step by torch.compile.
        rates: of Muon, at the first and the last step.
        weights: of the mean squares of energy, force and virial; None: those of loss_weights.

    Raises:
        ValueError: the batch has more frames than there are.
    """

    def __init__(
        self, model, data, steps, seed, batch=1, compile=False, rates=kRates, weights=None
    ):
        if batch > len(data):
            raise ValueError(
                f"expected a batch of at most {len(data)}, the number of frames, got {batch}"
            )
        self.model = model
        self.data = data
        self.steps = steps
        self.batch = batch
        self.rates = rates
        self.weights = weights or loss_weights(data.frames, len(model.type_names))
        self.share = slice(None)  # this process's frames of a batch
        if distributed.is_initialized():
            self.share = slice(distributed.get_rank(), None, distributed.get_world_size())
        self.generator = torch.Generator().manual_seed(seed)
        self.mean_squares = MeanSquares(model)
        self.parameters = {
            name: parameter
            for name, parameter in self.mean_squares.named_parameters()
            if parameter.requires_grad
        }
        self.optimizers = optimizers_of(self.parameters, model.shares)
        self.history = []  # mean squares of each step
        self.records = []  # what training.Run records, one list each time
        self.identity = {}  # of the training, which its checkpoints keep: training.identity_of
        self.differentiate = partial(differentiate, self.mean_squares, weights=self.weights)
        if compile:
            # torch.compile has no double backward. make_fx writes forces and gradients as plain
            # operators. Sizes are symbols, since frames differ in the number of neighbours.
            trace = make_fx(
                self.differentiate, tracing_mode="symbolic", _allow_non_fake_inputs=True
            )
            graph = trace(self.parameters, *data[torch.arange(batch)[self.share]])
            self.differentiate = torch.compile(graph)

    def rate(self, step):
        """Return Muon's rate at a step."""
        first, last = self.rates
        return first + (last - first) * step / self.steps

    def step(self):
        """Draw a batch, and take one step of both optimizers along the processes' mean gradient."""
        state = self.generator.get_state()
        index = torch.randperm(len(self.data), generator=self.generator)[: self.batch]
        try:
            squares, gradients = self.differentiate(self.parameters, *self.data[index[self.share]])
            squares, *gradients = mean_of_processes([squares, *gradients])
        except BaseException:  # after Ctrl-C another process may have gone: a checkpoint follows
            self.generator.set_state(state)
            raise
        for parameter, gradient in zip(self.parameters.values(), gradients):
            parameter.grad = gradient
        self.update(self.rate(len(self.history)))
        self.history.append(squares.tolist())

    def update(self, rate):
        """Take one step of both optimizers with the parameters' gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * rate
            optimizer.step()

    def settings(self):
        """Return what a checkpoint must have been made with to go on from it, by name."""
        return self.identity | self.model.settings()

    def save(self, path):
        """Write a checkpoint: the model, the optimizers, what they did and the random numbers."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "history": self.history,
            "records": self.records,
            "generator": self.generator.get_state(),
            "settings": self.settings(),
        }
        save_whole(state, path)

    def resume(self, path):
        """Continue from a checkpoint.

        Raises:
            ValueError: the checkpoint is of another training.
        """
        state = torch.load(path, map_location="cpu")
        if "records" not in state:
            raise ValueError("another version wrote it, without its records")
        saved = state["settings"]
        for name, value in self.settings().items():
            if name not in saved:
                raise ValueError(f"another version wrote it, without its {name}")
            if saved[name] != value and isinstance(value, bytes):
                raise ValueError(f"it has other {name}")
            if saved[name] != value:
                raise ValueError(f"its {name} is {saved[name]}, not {value}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved_state in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved_state)
        self.history = state["history"]
        self.records = state["records"]
        self.generator.set_state(state["generator"])


def optimizers_of(parameters, shares):
    """Return the optimizers of parameters: Muon for matrices, Adam for the others.

    The descriptor's components are nearly collinear. Adam alone is slow then. Muon takes equal
    steps along all singular vectors.

    Args:
        parameters: by name.
        shares: rates in units of Muon's, of matrices whose names have a word of this dict.
    """
    matrices = {}
    others = []
    for name, parameter in parameters.items():
        if parameter.dim() > 1 and min(parameter.shape[-2:]) > 1:
            share = next((share for word, share in shares.items() if word in name), 1.0)
            matrices.setdefault(share, []).append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": group, "share": share} for share, group in matrices.items()]
    adam = torch.optim.Adam(
        [{"params": others, "share": kShareOfAdam}], betas=(0.9, 0.99), fused=True
    )
    return [Muon(groups), adam] if groups else [adam]
