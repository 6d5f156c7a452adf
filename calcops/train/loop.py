"""A training in a folder: its checkpoints, its log, its model, and what it prints."""

import csv
import fcntl
import hashlib
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
from calcops.deepmd.deep_potential import quick_form
from calcops.potentials.package import save
from calcops.train import report
from calcops.train.datasets import frames_of
from calcops.train.plots import plot_loss, plot_parity
from calcops.train.trainer import Data, Squares, clipped, errors_of, mean_without_nan, squares_of
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
            f"another training is running in {folder}: wait for it, or take another --folder"
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
            *(frames[key] for key in ("energy", "force", "virial", "weights"))
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


def in_words(errors):
    """Return errors as text, in meV and meV/A, without those of labels that are absent."""
    energy, force, virial = 1e3 * np.array(errors)
    words = f"energy {energy:.2f} meV/atom", f"force {force:.1f} meV/A"
    words += (f"virial {virial:.1f} meV/atom",)
    return ", ".join(text for text, error in zip(words, errors) if not np.isnan(error))


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
        self.model_file = self.folder / trainer.model.file_name

    def resume(self):
        """Continue from the folder's checkpoint, if there is one.

        Raises:
            ValueError: it is damaged, or of another model, or its model is gone.
        """
        if not self.checkpoint.exists():
            return
        try:
            self.trainer.resume(self.checkpoint)
        except Exception as error:  # of torch.load and load_state_dict
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"cannot resume from {self.checkpoint}: {reason}; "
                "take another --folder, or remove it"
            ) from None
        if np.isfinite(self.losses()).any() and not self.model_file.exists():
            raise ValueError(
                f"expected {self.model_file}, the best model so far, next to {self.checkpoint}; "
                "take another --folder, or remove the checkpoint"
            )

    def losses(self):
        """Return the losses of the records' errors."""
        return [self.trainer.loss(row[-3:]) for row in self.trainer.records]

    def is_better(self, loss):
        """Return True if a loss is finite and, with --start, less than that of the start."""
        losses = self.losses()
        start = losses[0] if self.options.start and losses else np.inf
        return np.isfinite(loss) and not loss >= start

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
        if is_first and self.options.start and not trainer.records:
            print(f"step      0, held out: {in_words(self.record(0))}")
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
                    if is_first and step + 1 in trainer.divergences:
                        progress.write(
                            f"step {step + 1:6}, the loss grew beyond that at the start: "
                            "going back to earlier weights, with half the rate"
                        )
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
                f"the same command resumes from {self.checkpoint}"
            ) from None
        done = len(trainer.history)
        if is_first and (not trainer.records or trainer.records[-1][0] < done):
            # It was stopped at this step, and --steps is no larger now.
            print(f"step {done:6}, held out: {in_words(self.record(done))}")
        if is_first and seconds:
            mean = 1e3 * sum(seconds) / len(seconds)
            print(f"{sum(seconds):.0f} s, {mean:.2f} ms a step")

    def record(self, step):
        """Write checkpoint, log and, unless --start is better, the model. Return its errors."""
        trainer = self.trainer
        batches = trainer.history[-self.options.every :] or trainer.first_batches()
        of_batches = np.sqrt(mean_without_nan([row[:3] for row in batches]))
        squares = squares_of(trainer.squares, self.held_out)
        errors = errors_of(squares, self.held_out.counts)
        if self.is_better(trainer.loss(errors)):
            self.write_model()
        trainer.records.append([step, trainer.rate(step), *map(float, of_batches), *errors])
        self.write_log()
        trainer.save(self.checkpoint)
        return errors

    def write_model(self):
        """Write the model. A process that is killed meanwhile leaves the old file."""
        new = self.model_file.with_stem(f"new_{self.model_file.stem}")  # np.savez wants the suffix
        self.trainer.model.write(new)
        os.replace(new, self.model_file)

    def write_log(self):
        """Write log.csv."""
        with open(self.folder / "log.csv", "w") as file:
            writer = csv.writer(file)
            writer.writerow(kColumns)
            for step, rate, *errors in self.trainer.records:
                writer.writerow([step, f"{rate:.3g}", *(f"{error:.6g}" for error in errors)])

    def finish(self, held_out, test):
        """Write the package of the model and the pictures, and print how to use them.

        Args:
            held_out: the frames held out [Atoms].
            test: frames for the errors and the picture of the predictions in place of those held
                out; empty: none.

        Raises:
            ValueError: there is no model, because all errors were NaN or infinite.
        """
        folder = self.folder
        if not np.isfinite(self.losses()).any():  # the file may be of another training
            raise ValueError(
                f"expected errors that are numbers, got {folder}/log.csv: smaller --rates"
            )
        model = self.trainer.model.from_file(self.model_file)
        self.write_log()  # it may have been removed since
        history = self.trainer.history
        plot_loss(folder / "loss.png", history, clipped(history))
        images = test or held_out
        data = Data(frames_of(images, model.type_names), model)
        plot_parity(folder / "parity.png", Squares(model), data)
        squares = squares_of(Squares(model), data)
        errors = errors_of(squares, data.counts)
        print(f"{'test' if test else 'held-out'} frames: {in_words(errors)}")
        for name, numbers in report.config_types(images).items():
            errors = errors_of(squares[numbers], data.counts[numbers])
            print(f"  {name} ({len(numbers)}): {in_words(errors)}")
        if not any(map(self.is_better, self.losses())):
            print("no record has smaller errors than --start, which stays the model")
        report.print_model(model)
        path = folder / "model.pt2"
        save(quick_form(model, self.options), path)
        print(
            f"""{path} is the package of the model. In ASE:
    from calcops.ase import CalcOps
    from calcops.potentials import load
    atoms.calc = CalcOps(load("{path}"))
In LAMMPS, after `pip install ./calcops/lammps` in a checkout of CalcOps:
    pair_style calcops {path}
    pair_coeff * * {" ".join(model.type_names)}"""
        )
