"""A training in a folder: its checkpoints, its log, its best model, and what it prints."""

import csv
import time

import numpy as np
import torch
from calcops.potentials.package import save
from calcops.train.deep_potential import load_npz, quick_form
from calcops.train.plots import plot_loss, plot_parity
from calcops.train.trainer import Data, MeanSquares
from calcops.train.weights import save_npz
from tqdm import tqdm

kColumns = "step rate energy force virial held_out_energy held_out_force held_out_virial".split()


def rmse(mean_squares, data):
    """Return the errors of energy/atom (eV), force (eV/A) and virial/atom (eV) on frames.

    Each frame counts once for energy and virial, and each atom once for the force.

    Args:
        mean_squares: the trainer.MeanSquares of a model.
        data: the frames, a trainer.Data.
    """
    squares = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.float64)
    for b in range(len(data)):
        frame = data[b : b + 1]
        natoms = (frame[0] >= 0).sum().item()
        has_virial = not frame[-1].isnan().any()
        weights = torch.tensor([1.0, natoms, has_virial], dtype=torch.float64)
        squares += weights * mean_squares(*frame, create_graph=False).double().cpu()
        counts += weights
    return (squares / counts.clamp(min=1)).sqrt().tolist()


def in_words(errors):
    """Return errors as text, in meV and meV/A."""
    energy, force, virial = errors
    return (
        f"energy {1e3 * energy:.2f} meV/atom, force {1e3 * force:.1f} meV/A, "
        f"virial {1e3 * virial:.1f} meV/atom"
    )


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
        self.rows = []
        self.least_loss = float("inf")

    def resume(self):
        """Continue from the checkpoint, if there is one.

        Raises:
            ValueError: it is damaged, or of another model.
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
        log = self.folder / "log.csv"
        if log.exists():
            self.read_log(log)

    def read_log(self, log):
        """Read the rows of a log up to the trainer's step, and the least loss."""
        steps = len(self.trainer.history)
        for row in list(csv.reader(log.open()))[1:]:
            if int(row[0]) <= steps:
                self.rows.append(row)
                errors = [float(value) for value in row[5:]]
                self.least_loss = min(self.least_loss, self.loss(errors))

    def loss(self, errors):
        """Return the loss of errors."""
        return float(np.square(errors) @ np.array(self.options.weights))

    def train(self, is_first):
        """Train up to --steps. Ctrl-C writes a checkpoint, and ends.

        Args:
            is_first: True in the process that prints and writes files.
        """
        trainer = self.trainer
        last = self.options.steps
        seconds = []
        progress = tqdm(
            range(len(trainer.history), last),
            desc="training",
            unit="step",
            disable=None if is_first else True,
        )
        try:
            for step in progress:
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
                trainer.save(self.checkpoint)
            raise SystemExit(
                f"stopped after {len(trainer.history)} of {last} steps; "
                f"the same command goes on from {self.checkpoint}"
            ) from None
        if is_first and len(seconds) > 1:
            # With --compile the first step compiles, so it does not count.
            mean = 1e3 * sum(seconds[1:]) / (len(seconds) - 1)
            print(f"{sum(seconds):.0f} s, {mean:.2f} ms a step")

    def record(self, step):
        """Write checkpoint, log and, if it is the best one, the model. Return its errors."""
        errors = rmse(self.trainer.mean_squares, self.held_out)
        of_batches = np.array(self.trainer.history[-self.options.every :]).mean(0) ** 0.5
        numbers = [f"{value:.6g}" for value in (*of_batches, *errors)]
        self.rows.append([step, f"{self.trainer.rate(step):.3g}", *numbers])
        with open(self.folder / "log.csv", "w") as file:
            csv.writer(file).writerows([kColumns, *self.rows])
        if self.loss(errors) < self.least_loss:
            self.least_loss = self.loss(errors)
            save_npz(self.trainer.model, self.folder / "model.npz")
        self.trainer.save(self.checkpoint)
        return errors

    def finish(self, test=None):
        """Write the package of the best model and the pictures, and print how to use them.

        Args:
            test: frames for the picture of the predictions in place of those held out, a dict of
                frames_of. The errors on them are printed.

        Raises:
            ValueError: there is no best model, because all errors were NaN or infinite.
        """
        folder = self.folder
        if not (folder / "model.npz").exists():
            raise ValueError(
                f"expected errors that are numbers, got {folder}/log.csv: smaller --rates"
            )
        model = load_npz(folder / "model.npz")
        plot_loss(folder / "loss.png", self.trainer.history)
        data = Data(test or self.held_out.frames, model)
        plot_parity(folder / "parity.png", model, data)
        if test:
            print(f"test frames: {in_words(rmse(MeanSquares(model), data))}")
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
