"""The loss on energies, forces and virials, and a training on one or many processes.

A training that was stopped resumes bit for bit.
"""

import copy
import os

import numpy as np
import torch
from calcops.deepmd.deep_potential import least_energies
from calcops.potentials.neighbours import neighbours, pair_vectors
from calcops.train.muon import Muon
from torch import distributed
from torch.func import functional_call
from torch.nn.functional import pad

# What energy per atom, force and virial per atom add to the loss if all of them are as wrong as
# their labels vary.
kShares = 0.08, 1.0, 0.6
kMostWeight = 1e3  # A^2, for labels that hardly vary
kLeastForce = 0.01  # eV/A, the unit of weights where forces are smaller, as in perfect crystals
kBatch = 128  # the least number of atoms in a batch
kRates = 1e-2, 0.0  # Muon's rate at the first and the last step, linear in between
kRatesOfStart = 1e-3, 0.0  # the same for a model of --start
kShareOfAdam = 0.3  # Adam's rate, in units of Muon's
kKeptBytes = 2e9  # the most bytes of environments of frames that are kept on a CPU
kKeptShare = 0.5  # of a GPU's free memory: the same
kAtomsAtOnce = 512  # in frames that are evaluated together

kWindow = 200  # steps: their median norm of the gradient limits the next one, their loss is watched
kUnlimited = 20  # steps before the first limit
kClip = 3.0  # the largest norm of a gradient, in units of the median
kGrowth = 2.0  # of the median loss of a window, in units of that at the start: a divergence
kFirstBatches = 50  # whose median loss is that at the start

# What a checkpoint has beside the state and the settings.
kSaved = "history", "divergences", "records", "order", "start_loss", "good"

# The components xx, yy, zz, xy, yz and zx of a virial, whose mean square is in GPUMD's loss.out.
kRows = 0, 1, 2, 0, 1, 2
kColumns = 0, 1, 2, 1, 2, 0


def save_whole(state, path):
    """Save `state` by torch.save. A process that is killed meanwhile leaves the old file."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def most_kept_bytes(device):
    """Return the most bytes of environments of frames that are kept on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return kKeptShare * free
    return kKeptBytes


def read_later(tensor):
    """Return a function that returns a tensor as a list.

    The copy from a GPU begins now, so that the function waits for nothing that comes later.
    """
    if not tensor.is_cuda:
        return tensor.tolist
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read():
        copied.synchronize()
        return on_host.tolist()

    return read


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
    squares = [
        ((frames["energy"] - bias) / natoms).square(),
        frames["force"].square().sum((1, 2)) / (3 * natoms),
        components(frames["virial"], natoms).square().mean(-1),
    ]
    of_energy, of_force, of_virial = (mean_of_atoms(values, natoms) for values in squares)
    of_force = max(of_force, kLeastForce**2)
    unit = of_force if np.isfinite(of_force) else 1.0
    variances = of_energy, of_force, of_virial
    weights = [share * unit / max(variance, 1e-30) for share, variance in zip(kShares, variances)]
    return [min(weight, kMostWeight) for weight in weights]


def mean_of_atoms(values, natoms):
    """Return the mean of values [F] of frames, each as often as it has atoms.

    NaN is no value. Without any value, the mean is infinite.
    """
    is_known = ~values.isnan()
    if not is_known.any():
        return np.inf
    return ((values * natoms)[is_known].sum() / natoms[is_known].sum()).item()


class Data:
    """Frames on a model's device, with everything that does not depend on the model's weights.

    data[numbers] returns these frames one after the other, as one list of N atoms without padding:
    types [1, N], the results of `model.environment`, `frame` [N], each atom's place in `numbers`,
    the labels energy [B], force [N, 3] and virial [B, 3, 3], and weights [B, 3] of the squares. The
    environments of few frames are kept. Those of many are computed at each use.

    A frame's squares count as often as it has atoms, so that all atoms weigh the same in the loss.

    Args:
        frames: a dict of datasets.frames_of.
        model: of first_model. Its `environment` gives what its `evaluate` needs.

    Attributes:
        counts: [F, 3] the energies, the atoms and the virials of each frame that have labels.
    """

    def __init__(self, frames, model):
        self.frames = frames
        self.model = model
        self.natoms = (frames["types"] >= 0).sum(-1)
        has_energy, has_forces, has_virial = (
            ~frames[name].view(len(frames[name]), -1).isnan().any(1)
            for name in ("energy", "force", "virial")
        )
        counts = [has_energy, self.natoms * has_forces, has_virial]
        self.counts = torch.stack(counts, -1).double()
        self.kept = None
        # An environment has some 20 numbers of 8 bytes for each slot, 12 of them in R_d.
        slots = self.natoms.sum().item() * model.most_neighbours
        if 8 * 20 * slots < most_kept_bytes(self.device):
            self.kept = [self.environment(number) for number in range(len(self))]

    def __len__(self):
        return len(self.natoms)

    @property
    def device(self):
        """The device of the model."""
        return next(self.model.parameters()).device

    def __getitem__(self, numbers):
        numbers = torch.arange(len(self))[numbers].tolist()
        kept = self.kept
        parts = [kept[number] if kept else self.environment(number) for number in numbers]
        natoms = self.natoms[numbers]
        frame = torch.arange(len(numbers)).repeat_interleave(natoms)
        types, list_neigh, *others = map(joined, zip(*parts))
        first = self.sent((natoms.cumsum(0) - natoms)[frame].view(1, -1, 1))
        list_neigh = torch.where(list_neigh >= 0, list_neigh + first, -1)
        is_atom = self.frames["types"][numbers] >= 0
        force = self.frames["force"][numbers][is_atom]
        labels = frame, self.frames["energy"][numbers], force, self.frames["virial"][numbers]
        ones = torch.ones_like(natoms)
        weights = self.frames["weights"][numbers] * torch.stack([natoms, ones, natoms], -1)
        return [types, list_neigh, *others, *map(self.sent, (*labels, weights))]

    def sent(self, tensor):
        """Return a tensor on the model's device, without waiting for it."""
        return tensor.to(self.device, non_blocking=True)

    def environment(self, number):
        """Return the types and the environment of a frame: [1, n] and [1, n, K, ...]."""
        natoms = self.natoms[number]
        types, positions, cell, pbc = (
            self.sent(self.frames[key][number : number + 1])
            for key in ("types", "positions", "cells", "pbc")
        )
        types = types[:, :natoms]
        positions = positions[:, :natoms]
        list_neigh, shift = neighbours(positions, cell, self.model.cutoff, pbc=pbc)
        Rij = pair_vectors(positions, list_neigh, shift)
        return [types, *self.model.environment(types, list_neigh, Rij)]

    def parts(self):
        """Yield the numbers of frames that are evaluated together."""
        numbers = []
        for number in range(len(self)):
            numbers.append(number)
            if self.natoms[numbers].sum() >= kAtomsAtOnce:
                yield numbers
                numbers = []
        if numbers:
            yield numbers


def joined(tensors):
    """Return tensors [1, n, K, ...] of frames as one [1, N, K, ...], with empty slots added."""
    if tensors[0].dim() == 2:
        return torch.cat(tensors, 1)
    slots = max(tensor.shape[2] for tensor in tensors)
    empty = 0 if tensors[0].is_floating_point() else -1
    of_others = [0, 0] * (tensors[0].dim() - 3)
    padded = [pad(x, [*of_others, 0, slots - x.shape[2]], value=empty) for x in tensors]
    return torch.cat(padded, 1)


class Squares(torch.nn.Module):
    """Squared errors [B, 3] of a model, for each frame of a batch.

    They are those of the energy per atom, of the forces, summed over the atoms, and of the virial
    per atom. A square of a force or of a virial is the mean of those of its 3 or 6 components.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def differences(self, types, *tensors, create_graph=False):
        """Return labels and errors of energy/atom [B], force [N, 3] and virial/atom [B, 6].

        An absent label is NaN, and so is its error.

        Args:
            types: [1, N].
            *tensors: the others of Data.
            create_graph: True if the errors are to be differentiated.
        """
        *environment, frame, energy, force, virial, _ = tensors
        results = self.model.evaluate(types, *environment, 0, create_graph)
        _, atom_energy, predicted_force, _, atom_virial = results
        natoms = torch.zeros_like(energy).index_add(0, frame, torch.ones_like(force[:, 0]))
        predicted_energy = torch.zeros_like(energy).index_add(0, frame, atom_energy[0])
        predicted_virial = torch.zeros_like(virial).index_add(0, frame, atom_virial[0])
        pairs = [
            (energy / natoms, predicted_energy / natoms),
            (force, predicted_force[0]),
            (components(virial, natoms), components(predicted_virial, natoms)),
        ]
        return [(label, predicted - label) for label, predicted in pairs]

    def forward(self, types, *tensors, create_graph=True):
        """Return the squares [B, 3]. Those of absent labels are zero."""
        pairs = self.differences(types, *tensors, create_graph=create_graph)
        squares = [torch.where(label.isnan(), 0.0, error).square() for label, error in pairs]
        of_energy, of_atoms, of_virial = squares
        frame = tensors[-5]
        of_forces = torch.zeros_like(of_energy).index_add(0, frame, of_atoms.mean(-1))
        return torch.stack([of_energy, of_forces, of_virial.mean(-1)], -1)


def components(virial, natoms):
    """Return xx, yy, zz, xy, yz and zx [B, 6] of virials [B, 3, 3] per atom."""
    return (virial / natoms.view(-1, 1, 1))[:, kRows, kColumns]


def squares_of(squares, data):
    """Return the squares [F, 3] of all frames of a Data, on the CPU."""
    parts = [squares(*data[numbers], create_graph=False).double().cpu() for numbers in data.parts()]
    return torch.cat(parts)


def errors_of(squares, counts):
    """Return the errors of energy/atom (eV), force (eV/A) and virial/atom (eV).

    Each frame with a label counts once for energy and virial, and each atom once for the force. An
    error is NaN if no frame has its label, and infinite if a prediction is no number.

    Args:
        squares: [F, 3] of frames.
        counts: [F, 3] of a Data.
    """
    sums = squares.sum(0)
    return (torch.where(sums.isnan(), torch.inf, sums) / counts.sum(0)).sqrt().tolist()


def differentiate(squares, parameters, factors, *batch):
    """Return the sums [3] of the squares of a batch, and the gradients of their loss.

    The gradients go through the operators' backward.

    Args:
        squares: a Squares.
        parameters: by name.
        factors: [3] of the weighted sums of squares in the loss.
        batch: the tensors of Data.
    """
    of_frames = functional_call(squares, parameters, batch)
    return gradients_of_loss(of_frames, parameters, factors, batch[-1])


def gradients_of_loss(squares, parameters, factors, weights):
    """Return the sums [3] of squares [B, 3], and the gradients of the loss for each parameter."""
    loss = (squares * weights).sum(0) @ factors
    return squares.detach().sum(0), torch.autograd.grad(loss, list(parameters.values()))


def sum_of_processes(tensors):
    """Return the sum of each tensor over all processes, by a single message."""
    if not distributed.is_initialized():
        return tensors
    message = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(message)
    parts = message.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


class Trainer:
    """Training on frames of at least `batch` atoms a step.

    The processes of torch.distributed, where there are several, share a batch. All draw the same
    frames and take the same step, so that their weights stay equal to the bit.

    Three rules keep it stable where a few frames have errors far above all others:

    - A gradient is scaled down to kClip times the median norm of the last kWindow steps.
    - A step whose gradient is not finite is left out, on the device itself.
    - If the median loss of kWindow steps is more than kGrowth times that at the start, the weights
      go back to those of the last window, and the rate is halved.

    Args:
        model: of first_model.
        data: its Data.
        steps: the number of steps, over which the rate falls.
        seed: of the order of the frames.
        batch: atoms a step, of all processes together.
        rates: of Muon, at the first and the last step.
        weights: of the mean squares of energy, force and virial; None: those of loss_weights.

    Attributes:
        history: for each step, the mean squares [3] of the batch and the norm of the gradient. NaN
            where there was no label or no finite number.
        divergences: the steps at which the weights went back.
    """

    def __init__(self, model, data, steps, seed, batch=kBatch, rates=kRates, weights=None):
        self.model = model
        self.data = data
        self.steps = steps
        self.batch = batch
        self.rates = rates
        self.weights = weights or loss_weights(data.frames, len(model.type_names))
        self.rank, self.processes = 0, 1
        if distributed.is_initialized():
            self.rank, self.processes = distributed.get_rank(), distributed.get_world_size()
        if self.processes > len(data):
            raise ValueError(
                f"expected a frame for each of {self.processes} processes, got {len(data)} frames"
            )
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = []  # the numbers of frames that come next
        self.squares = Squares(model)
        self.parameters = {
            name: parameter
            for name, parameter in self.squares.named_parameters()
            if parameter.requires_grad
        }
        self.optimizers = optimizers_of(self.parameters, model)
        self.rows = []  # of the history but the last step
        self.unread = []  # a function that returns the row of the last step
        self.divergences = []
        self.records = []  # what loop.Run records, one list each time
        self.identity = {}  # of the training, which its checkpoints keep: loop.identity_of
        self.start_loss = None  # the median of the first batches, before the first step
        self.good = None  # the state at the end of the last good window

    @property
    def history(self):
        """The rows of all steps. A GPU has to end the last one."""
        for read in self.unread:
            self.rows.append([x if np.isfinite(x) else np.nan for x in read()])
        self.unread = []
        return self.rows

    @history.setter
    def history(self, rows):
        self.rows = rows
        self.unread = []

    def rate(self, step):
        """Return Muon's rate at a step."""
        first, last = self.rates
        rate = first + (last - first) * step / self.steps
        return rate / 2 ** len(self.divergences)

    @property
    def order(self):
        """The state of the random numbers, and the frames that come next."""
        return self.generator.get_state(), list(self.queue)

    @order.setter
    def order(self, order):
        state, queue = order
        self.generator.set_state(state)
        self.queue = list(queue)

    def draw(self):
        """Return the numbers of the frames of the next batch; each comes once an epoch."""
        numbers = []
        atoms = 0
        while len(numbers) < self.processes or (
            atoms < self.batch and len(numbers) < len(self.data)
        ):
            if not self.queue:
                self.queue = torch.randperm(len(self.data), generator=self.generator).tolist()
            numbers.append(self.queue.pop())
            atoms += self.data.natoms[numbers[-1]].item()
        return numbers

    def step(self):
        """Draw a batch, and take one step of both optimizers along the processes' gradient."""
        number = len(self.rows) + len(self.unread)
        if number == 0:
            self.start_loss = self.median_loss(self.first_batches())
            self.good = self.state()
        order = self.order
        numbers = self.draw()
        counts = self.data.counts[numbers].sum(0)
        factors = torch.tensor(self.weights).double() / self.data.natoms[numbers].sum()
        batch = self.data[numbers[self.rank :: self.processes]]
        try:
            sums, gradients = differentiate(
                self.squares, self.parameters, self.data.sent(factors), *batch
            )
            sums, *gradients = sum_of_processes([sums, *gradients])
        except BaseException:  # after Ctrl-C another process may have gone: a checkpoint follows
            self.order = order
            raise
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        # A GPU has this step's gradient to compute while the last one's row is read.
        factor = (limit_of(self.history) / norm.clamp(min=1e-300)).clamp(max=1.0)
        is_finite = norm.isfinite()
        for parameter, gradient in zip(self.parameters.values(), gradients):
            parameter.grad = torch.where(is_finite, gradient * factor, 0.0)
        for optimizer in self.optimizers:  # Adam reads it on the device. Muon leaves out zeros.
            optimizer.found_inf = 1.0 - is_finite.float()
        self.update(self.rate(number))
        self.unread.append(read_later(torch.cat([sums / self.data.sent(counts), norm.view(1)])))
        if (number + 1) % kWindow == 0:
            self.watch()

    def update(self, rate):
        """Take one step of both optimizers with the parameters' gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * rate
            optimizer.step()

    def first_batches(self):
        """Return rows of the history for the next batches, with the parameters as they are."""
        order = self.order
        rows = []
        for _ in range(kFirstBatches):
            numbers = self.draw()
            sums = self.squares(*self.data[numbers], create_graph=False).sum(0).cpu()
            rows.append([*(sums / self.data.counts[numbers].sum(0)).tolist(), 0.0])
        self.order = order
        return rows

    def median_loss(self, rows):
        """Return the median of the losses of rows of the history; NaN for all without numbers."""
        losses = [self.loss(np.sqrt(row[:3])) for row in rows if np.isfinite(row[3])]
        return float(np.median(losses)) if losses else np.nan

    def loss(self, errors):
        """Return the loss of errors. That of an absent label, NaN, counts as zero."""
        return float(np.square(np.where(np.isnan(errors), 0.0, errors)) @ self.weights)

    def watch(self):
        """Keep the state at the end of a window of steps, or go back to that of the last one."""
        if self.median_loss(self.history[-kWindow:]) <= kGrowth * self.start_loss:
            self.good = self.state()
        else:
            self.divergences.append(len(self.history))
            self.set_state(self.good)

    def state(self):
        """Return a copy of the parameters and the states of the optimizers."""
        return copy.deepcopy(
            {
                "parameters": {name: p.detach() for name, p in self.parameters.items()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            }
        )

    @torch.no_grad()
    def set_state(self, state):
        """Set parameters and optimizers to those of a state."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        for optimizer, of_optimizer in zip(self.optimizers, copy.deepcopy(state["optimizers"])):
            optimizer.load_state_dict(of_optimizer)

    def settings(self):
        """Return what a checkpoint must have been made with to go on from it, by name."""
        return self.identity | self.model.settings()

    def save(self, path):
        """Write a checkpoint: the state, what was done and the random numbers."""
        state = {name: getattr(self, name) for name in kSaved} | self.state()
        save_whole(state | {"settings": self.settings()}, path)

    def resume(self, path):
        """Continue from a checkpoint.

        Raises:
            ValueError: the checkpoint is of another training.
        """
        state = torch.load(path, map_location="cpu")
        if "parameters" not in state:
            raise ValueError("another version wrote it, without its parameters")
        saved = state["settings"]
        for name, value in self.settings().items():
            if name not in saved:
                raise ValueError(f"another version wrote it, without its {name}")
            if saved[name] != value and isinstance(value, bytes):
                raise ValueError(f"it has other {name}")
            if saved[name] != value:
                raise ValueError(f"its {name} is {saved[name]}, not {value}")
        self.set_state(state)
        for name in kSaved:
            setattr(self, name, state[name])


def limit_of(history):
    """Return the largest norm of a gradient after the steps of a history."""
    norms = [norm for *_, norm in history[-kWindow:] if norm > 0]
    return kClip * np.median(norms) if len(norms) >= kUnlimited else np.inf


def clipped(history):
    """Return for each step of a history whether its gradient was clipped."""
    windows = [history[max(0, step - kWindow) : step] for step in range(len(history))]
    return [row[3] > limit_of(window) for row, window in zip(history, windows)]


def mean_without_nan(rows):
    """Return the mean [3] of rows [n, 3]. It is NaN in a column without a number."""
    rows = np.array(rows)
    counts = np.isfinite(rows).sum(0)
    return np.where(counts, np.nansum(rows, 0) / np.maximum(counts, 1), np.nan)


def optimizers_of(parameters, model):
    """Return the optimizers of parameters: Muon for matrices, Adam for the others.

    The descriptor's components are nearly collinear. Adam alone is slow then. Muon takes equal
    steps along all singular vectors.

    Args:
        parameters: by name.
        model: of first_model. Its `shares` are rates in units of Muon's, of matrices whose names
            have a word of this dict. Its `decay` is that of the other matrices.
    """
    matrices = {}
    others = []
    for name, parameter in parameters.items():
        if parameter.dim() > 1 and min(parameter.shape[-2:]) > 1:
            share = next((share for word, share in model.shares.items() if word in name), 1.0)
            matrices.setdefault(share, []).append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": group, "share": share, "decay": model.decay if share == 1 else 0.0}
        for share, group in matrices.items()
    ]
    adam = torch.optim.Adam(
        [{"params": others, "share": kShareOfAdam}], betas=(0.9, 0.99), fused=True
    )
    return [Muon(groups), adam] if groups else [adam]
