"""A training in a folder: its checkpoints, its log, its best model, and what it prints."""

import csv
import fcntl
import hashlib
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import torch
from calcops.potentials.package import save
from calcops.train import report
from calcops.train.datasets import frames_of
from calcops.train.deep_potential import quick_form
from calcops.train.plots import plot_loss, plot_parity
from calcops.train.trainer import Data, MeanSquares
from tqdm import tqdm

kColumns = "step rate energy force virial held_out_energy held_out_force held_out_virial".split()

# The options of a model that it does not know itself, by --model.
kIdentity = {
    "deep-potential": ["embedding", "axis", "fitting"],
    "nep": ["n_max", "basis_size", "neurons"],
}


@contextmanager
def locked(folder):
    """Make a folder, and keep other trainings out of it.

    File systems without locks of folders, such as some of networks, do not keep them out.

    Raises:
        ValueError: another training is in it, or it is no folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"cannot write to --folder {folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another training is at work in {folder}: wait for it, or take another --folder"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def delayed_interrupt():
    """Delay Ctrl-C to the end of the block, which then raises KeyboardInterrupt.

    Python's own handler would raise it within a step, whose optimizers it leaves half done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = []
    handler = signal.signal(signal.SIGINT, lambda *received: signals.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            raise KeyboardInterrupt


def identity_of(data, held_out, options):
    """Return what makes a training this one, by name: options as they are, the rest as digests.

    Args:
        data: the frames to train on, a trainer.Data.
        held_out: those held out.
        options: those of the command.
    """
    names = ["model", "batch", "rates", "weights", "seed"]
    if not options.start:
        names += kIdentity[options.model]
    identity = {option(name): as_list(getattr(options, name)) for name in names}
    identity["--start"] = options.start is not None
    if options.start:
        identity["weights of --start"] = digest(options.start.read_bytes())
    for prefix, frames in (("", data.frames), ("held-out ", held_out.frames)):
        identity[f"{prefix}frames"] = digest(
            *(frames[key] for key in ("types", "positions", "cells", "pbc"))
        )
        identity[f"{prefix}labels"] = digest(
            *(frames[key] for key in ("energy", "force", "virial"))
        )
    return identity


def option(name):
    """Return the option of the command for a name of its settings."""
    return f"--{name.replace('_', '-')}"


def as_list(value):
    """Return a tuple as a list, as which a settings file has it."""
    return list(value) if isinstance(value, tuple) else value


def digest(*parts):
    """Return the SHA-256 of bytes or tensors."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part if isinstance(part, bytes) else part.numpy().tobytes())
    return sha.digest()


def has_no_virial(data):
    """Return True if no frame has a label of the virial."""
    return bool(data.frames["virial"].isnan().any((1, 2)).all())


class Squares:
    """Squared errors of each frame, of which there are means over any part of them.

    Args:
        mean_squares: the trainer.MeanSquares of a model.
        data: the frames, a trainer.Data.
    """

    def __init__(self, mean_squares, data):
        squares = []
        weights = []
        for b in range(len(data)):
            frame = data[b : b + 1]
            natoms = (frame[0] >= 0).sum().item()
            has_virial = not frame[-1].isnan().any()
            squares.append(mean_squares(*frame, create_graph=False).double().cpu())
            weights.append([1.0, natoms, has_virial])
        self.squares = torch.stack(squares)
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def errors(self, numbers=slice(None)):
        """Return the errors of energy/atom (eV), force (eV/A) and virial/atom (eV).

        Each frame counts once for energy and virial, and each atom once for the force. The error of
        the virial is NaN if no frame has a label.
        """
        weights = self.weights[numbers]
        sums = (self.squares[numbers] * weights).sum(0)
        return (sums / weights.sum(0)).sqrt().tolist()


def in_words(errors):
    """Return errors as text, in meV and meV/A; without the virial where it has no labels."""
    energy, force, virial = errors
    text = f"energy {1e3 * energy:.2f} meV/atom, force {1e3 * force:.1f} meV/A"
    return text if np.isnan(virial) else f"{text}, virial {1e3 * virial:.1f} meV/atom"


class Run:
    """A training and its folder.

    Args:
        trainer: a trainer.Trainer.
        held_out: frames that are not trained on, a trainer.Data.
        options: those of the command.
    """

    def __init__(self, trainer, held_out, options):
        self.trainer = trainer
        self.held_out = held_out
        self.options = options
        self.folder = options.folder
        self.checkpoint = self.folder / "checkpoint.pt"
        self.best = self.folder / trainer.model.file_name
        self.least_loss = float("inf")
        self.has_no_virial = has_no_virial(held_out)

    def resume(self):
        """Continue from the folder's checkpoint, if there is one.

        Raises:
            ValueError: it is damaged, or of another model, or its best model is gone.
        """
        if not self.checkpoint.exists():
            return
        try:
            self.trainer.resume(self.checkpoint)
        except Exception as error:  # of torch.load and load_state_dict
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"cannot go on from {self.checkpoint}: {reason}; "
                "take another --folder, or remove it"
            ) from None
        for *_, energy, force, virial in self.trainer.records:
            self.least_loss = min(self.least_loss, self.loss((energy, force, virial)))
        best = self.best
        if np.isfinite(self.least_loss) and not best.exists():
            raise ValueError(
                f"expected {best}, the best model until now, beside {self.checkpoint}; "
                "take another --folder, or remove the checkpoint"
            )

    def loss(self, errors):
        """Return the loss of errors. A virial without labels counts as zero."""
        energy, force, virial = errors
        known = [energy, force, 0.0 if self.has_no_virial else virial]
        return float(np.square(known) @ np.array(self.trainer.weights))

    def train(self, is_first):
        """Train up to --steps. Ctrl-C writes a checkpoint, and ends.

        Args:
            is_first: True in the process that prints and writes files.
        """
        trainer = self.trainer
        last = self.options.steps
        seconds = []
        done = len(trainer.history)
        if is_first and done > 0:
            what = "going on from" if done < last else "nothing to do:"
            print(f"{what} {self.checkpoint}, which has {done} of {last} steps")
        progress = tqdm(
            range(len(trainer.history), last),
            desc="training",
            unit="step",
            disable=None if is_first else True,
        )
        try:
            for step in progress:
                with delayed_interrupt():
                    start = time.perf_counter()
                    trainer.step()
                    seconds.append(time.perf_counter() - start)
                    is_recorded = (step + 1) % self.options.every == 0 or step + 1 == last
                    if is_first and is_recorded:
                        errors = self.record(step + 1)
                        progress.write(f"step {step + 1:6}, held out: {in_words(errors)}")
        except KeyboardInterrupt:
            progress.close()
            if is_first:
                # torchrun passes Ctrl-C on, so that a process gets it twice.
                with suppress(KeyboardInterrupt), delayed_interrupt():
                    trainer.save(self.checkpoint)
            raise SystemExit(
                f"stopped after {len(trainer.history)} of {last} steps; "
                f"the same command goes on from {self.checkpoint}"
            ) from None
        done = len(trainer.history)
        if is_first and (not trainer.records or trainer.records[-1][0] < done):
            # It was stopped at this step, and --steps is no larger now.
            print(f"step {done:6}, held out: {in_words(self.record(done))}")
        if is_first and len(seconds) > 1:
            # With --compile the first step compiles, so it does not count.
            mean = 1e3 * sum(seconds[1:]) / (len(seconds) - 1)
            print(f"{sum(seconds):.0f} s, {mean:.2f} ms a step")

    def record(self, step):
        """Write checkpoint, log and, if it is the best one, the model. Return its errors."""
        errors = Squares(self.trainer.mean_squares, self.held_out).errors()
        of_batches = np.array(self.trainer.history[-self.options.every :]).mean(0) ** 0.5
        if has_no_virial(self.trainer.data):
            of_batches[2] = np.nan
        records = self.trainer.records
        records.append([step, self.trainer.rate(step), *of_batches.tolist(), *errors])
        self.write_log()
        if self.loss(errors) < self.least_loss:
            self.least_loss = self.loss(errors)
            self.write_best()
        self.trainer.save(self.checkpoint)
        return errors

    def write_best(self):
        """Write the best model. A process that is killed meanwhile leaves the old file."""
        new = self.best.with_stem(f"new_{self.best.stem}")  # np.savez wants the suffix
        self.trainer.model.write(new)
        os.replace(new, self.best)

    def write_log(self):
        """Write log.csv."""
        with open(self.folder / "log.csv", "w") as file:
            writer = csv.writer(file)
            writer.writerow(kColumns)
            for step, rate, *errors in self.trainer.records:
                writer.writerow([step, f"{rate:.3g}", *(f"{error:.6g}" for error in errors)])

    def finish(self, held_out, test):
        """Write the package of the best model and the pictures, and print how to use them.

        Args:
            held_out: the frames held out [Atoms].
            test: frames for the errors and the picture of the predictions in place of those held
                out; empty: none.

        Raises:
            ValueError: there is no best model, because all errors were NaN or infinite.
        """
        folder = self.folder
        if not np.isfinite(self.least_loss):  # the file may be of another training
            raise ValueError(
                f"expected errors that are numbers, got {folder}/log.csv: smaller --rates"
            )
        model = self.trainer.model.from_file(self.best)
        self.write_log()  # it may have been removed since
        plot_loss(folder / "loss.png", self.trainer.history)
        images = test or held_out
        data = Data(frames_of(images, model.type_names), model)
        plot_parity(folder / "parity.png", model, data)
        squares = Squares(MeanSquares(model), data)
        print(f"{'test' if test else 'held-out'} frames: {in_words(squares.errors())}")
        for name, numbers in report.config_types(images).items():
            print(f"  {name} ({len(numbers)}): {in_words(squares.errors(numbers))}")
        report.print_model(model)
        path = folder / "model.pt2"
        save(quick_form(model, self.options), path)
        print(
            f"""{path} is the best model. In ASE:
    from calcops.ase import CalcOps
    from calcops.potentials import load
    atoms.calc = CalcOps(load("{path}"))
In LAMMPS, with the plugin that `python -m calcops.lammps build` makes:
    pair_style calcops {path}
    pair_coeff * * {" ".join(model.type_names)}"""
        )
