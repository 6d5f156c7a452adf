"""Train a Deep Potential on your own frames, by the force operators.

    python -m calcops.train frames.extxyz more.traj deepmd/data --folder water
    python -m calcops.train frames.extxyz --settings settings.toml --steps 100000
    torchrun --nproc-per-node 2 -m calcops.train frames.extxyz --batch 4

Frames are what ASE reads, with energy (eV), forces (eV/A) and, where there is one, stress (eV/A^3),
or folders of DeePMD-kit. The same command goes on from the checkpoint in the folder, which gets

    checkpoint.pt   the last state     log.csv      errors in the course of the training
    model.npz       the best model     loss.png     the same, of the training batches
    model.pt2       its package        parity.png   predictions over labels, of the held-out frames

settings.toml has the options below as keys, with _ for -; those of the command take precedence.
"""

import argparse
import csv
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
import torch
from calcops.potentials.package import save
from calcops.train.datasets import elements_of, frames_of, read
from calcops.train.deep_potential import DeepPotential, load_npz
from calcops.train.frames import neighbours
from calcops.train.plots import plot_loss, plot_parity
from calcops.train.trainer import Data, Trainer, kLossWeights, kRates
from calcops.train.weights import initial, least_energies, save_npz, standardise
from torch import distributed
from tqdm import tqdm

kSample = 100  # frames of which davg and dstd are taken
kColumns = "step rate energy force virial held_out_energy held_out_force held_out_virial".split()


def arguments():
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m calcops.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("frames", nargs="+", help="files that ASE reads, folders of DeePMD-kit")
    add("--settings", type=Path, help="a TOML file")
    add("--folder", type=Path, default=Path("trained"), help="for what is written")
    add("--start", type=Path, help="fine-tune this model: .npz, or DeePMD-kit's .pth, .pt, .dp")
    model = parser.add_argument_group("the model, unless --start gives it")
    add = model.add_argument
    add("--cutoff", type=float, default=5.0, help="A")
    add("--smooth", type=float, help="A, where the cutoff begins; default: 0.7 of the cutoff")
    add("--sel", type=int, nargs="+", help="most neighbours of each element; default: counted")
    add("--embedding", type=int, nargs="+", default=[24, 24], help="widths of the embedding nets")
    add("--axis", type=int, default=12, help="columns of the second factor of the descriptor")
    add("--fitting", type=int, nargs="+", default=[48, 48], help="widths of the fitting nets")
    training = parser.add_argument_group("the training")
    add = training.add_argument
    add("--steps", type=int, default=40000)
    add("--batch", type=int, default=1, help="frames a step, of all processes together")
    add("--rates", type=float, nargs=2, default=kRates, help="at the first and the last step")
    add(
        "--weights",
        type=float,
        nargs=3,
        default=kLossWeights,
        help="of the mean squares of energy and virial per atom (eV) and force (eV/A): E F V",
    )
    add("--held-out", type=float, default=0.1, help="share of the frames that are not trained on")
    add("--every", type=int, default=1000, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each process")
    add("--compile", action="store_true", help="torch.compile the step")
    add("--tabulated", action="store_true", help="package tables of the embedding nets: quicker")
    return parser


def parse(words):
    """Return the options of a command, whose defaults are those of its settings file.

    Raises ValueError if the file or an option has no meaning.
    """
    parser = arguments()
    options = parser.parse_args(words)
    if options.settings:
        try:
            settings = tomllib.loads(options.settings.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"cannot read {options.settings}: {error}") from None
        unknown = sorted(settings.keys() - vars(options).keys() | settings.keys() & {"settings"})
        if unknown:
            raise ValueError(f"{options.settings}: expected options, got {', '.join(unknown)}")
        for name in ("folder", "start"):
            if name in settings:
                settings[name] = Path(settings[name])
        parser.set_defaults(**settings)
        options = parser.parse_args(words)
    if options.smooth is None:
        options.smooth = 0.7 * options.cutoff
    check(options)
    return options


def check(options):
    """Raise ValueError if an option has no meaning."""
    for name in ("steps", "batch", "every", "axis", "cutoff", "smooth"):
        if not getattr(options, name) > 0:
            raise ValueError(f"expected --{name} > 0, got {getattr(options, name)}")
    if not options.smooth < options.cutoff:
        raise ValueError(f"expected --smooth < {options.cutoff:g}, got {options.smooth:g}")
    if not 0 < options.held_out < 1:
        raise ValueError(f"expected --held-out between 0 and 1, got {options.held_out:g}")
    if options.axis > options.embedding[-1]:
        raise ValueError(
            f"expected --axis of at most the {options.embedding[-1]} of --embedding, "
            f"got {options.axis}"
        )


def divided(images, options):
    """Return the frames to train on and the frames held out, drawn at random."""
    count = round(options.held_out * len(images))
    if not 0 < count < len(images):
        raise ValueError(
            f"expected frames to train on and to hold out, got {len(images)} in all with "
            f"--held-out {options.held_out:g}"
        )
    order = np.random.default_rng(options.seed).permutation(len(images))
    return [images[i] for i in order[count:]], [images[i] for i in order[:count]]


def most_neighbours(frames, ntypes, cutoff, images):
    """Return the most neighbours of each type [T] within the cutoff.

    Raises ValueError if an atom has none.
    """
    most = np.zeros(ntypes, int)
    for b, image in enumerate(images):
        one = {key: value[b : b + 1] for key, value in frames.items()}
        list_neigh, _ = neighbours(one["positions"], one["cells"], cutoff, one["types"], one["pbc"])
        lonely = (list_neigh[0, : len(image)] >= 0).sum(-1) == 0
        if lonely.any():
            raise ValueError(
                f"expected neighbours within --cutoff {cutoff:g} A of every atom, got none of atom "
                f"{lonely.nonzero()[0].item()} in {image.info['source']}"
            )
        types = torch.where(list_neigh >= 0, one["types"][0][list_neigh.clamp(min=0)], -1)
        for t in range(ntypes):
            most[t] = max(most[t], (types == t).sum(-1).max().item())
    return most


def begun(images, options):
    """Return a new model for these frames, or --start with its energies shifted to theirs."""
    if options.start:
        model = load_start(options.start)
        frames = frames_of(images, model.type_names)
        shift_energies(model, Data(frames, model))
        return model
    type_names = elements_of(images)
    frames = frames_of(images, type_names)
    most = most_neighbours(frames, len(type_names), options.cutoff, images)
    sel = options.sel or [max(1, int(1.1 * count) + 1) for count in most]
    if len(sel) != len(type_names):
        raise ValueError(f"expected --sel for each of {' '.join(type_names)}, got {sel}")
    shape = dict(emb=options.embedding, axis_neuron=options.axis, fit=options.fitting)
    weights = initial(
        sel=sel, rcut=options.cutoff, rcut_smth=options.smooth, seed=options.seed, **shape
    )
    model = DeepPotential(weights, type_names)
    some = {key: value[:kSample] for key, value in frames.items()}
    types, _, _, kind, R, _, energy, _, _ = Data(some, model)[:]
    standardise(model, types, kind, R, energy)
    model.bias_atom_e[:] = least_energies(frames["types"], frames["energy"], len(type_names))
    return model


def load_start(path):
    """Return the model to begin with. Raises ValueError if there is none."""
    if not path.exists():
        raise ValueError(f"expected a model, got {path}")
    if path.suffix == ".npz":
        try:
            return load_npz(path)
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(
                f"expected the weights of a Deep Potential, got {path}: {error}"
            ) from None
    from calcops.deepmd.import_deepmd import load

    model = load(path)
    model.set_tables(None, None)
    return model


@torch.no_grad()
def shift_energies(model, data):
    """Shift each type's energy, so that the model's energies come nearest to the frames'."""
    differences = []
    for b in range(len(data)):
        types, *environment, energy, _, _ = data[b : b + 1]
        with torch.enable_grad():
            differences.append(energy - model.evaluate(types, *environment, 0, False)[0])
    types = data.frames["types"]
    model.bias_atom_e += least_energies(types, torch.cat(differences), len(model.sel))


def rmse(trainer, data):
    """Return the errors of energy/atom, force and virial/atom on all frames of data.

    Each frame counts once for energy and virial, and each atom once for the force.
    """
    squares = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.float64)
    for b in range(len(data)):
        frame = data[b : b + 1]
        atoms = (frame[0] >= 0).sum().item()
        has_virial = not frame[-1].isnan().any()
        shares = torch.tensor([1.0, atoms, has_virial], dtype=torch.float64)
        of_frame = trainer.mean_squares(*frame, create_graph=False).double().cpu()
        squares += shares * of_frame
        counts += shares
    return (squares / counts.clamp(min=1)).sqrt().tolist()


def in_words(errors):
    """Return errors as a sentence."""
    energy, force, virial = errors
    return (
        f"energy {1e3 * energy:.2f} meV/atom, force {1e3 * force:.1f} meV/A, "
        f"virial {1e3 * virial:.1f} meV/atom"
    )


class Run:
    """The files of a training, and its best model so far."""

    def __init__(self, folder, trainer, held_out, options):
        self.folder, self.trainer, self.held_out = folder, trainer, held_out
        self.options = options
        self.best = float("inf")
        self.rows = []
        self.checkpoint = folder / "checkpoint.pt"

    def resume(self):
        """Go on from the checkpoint, if there is one. Raises ValueError if it does not fit."""
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
            done = len(self.trainer.history)
            rows = list(csv.reader(log.open()))[1:]
            self.rows = [row for row in rows if int(row[0]) <= done]
            losses = [self.loss([float(value) for value in row[5:]]) for row in self.rows]
            self.best = min(losses, default=self.best)

    def loss(self, errors):
        """Return the loss of errors."""
        return float(np.square(errors) @ np.array(self.options.weights))

    def record(self, step):
        """Write checkpoint, log and, if it is the best one, the model. Return its errors."""
        errors = rmse(self.trainer, self.held_out)
        recent = np.array(self.trainer.history[-self.options.every :]).mean(0) ** 0.5
        first, last = self.options.rates
        rate = first + (last - first) * step / self.options.steps
        self.rows.append([step, f"{rate:.3g}", *(f"{x:.6g}" for x in [*recent, *errors])])
        with open(self.folder / "log.csv", "w") as file:
            csv.writer(file).writerows([kColumns, *self.rows])
        if self.loss(errors) < self.best:
            self.best = self.loss(errors)
            save_npz(self.trainer.model, self.folder / "model.npz")
        self.trainer.save(self.checkpoint)
        return errors


def train(run, is_first):
    """Train up to --steps. Ctrl-C writes a checkpoint, and ends."""
    trainer, options = run.trainer, run.options
    steps = range(len(trainer.history), options.steps)
    progress = tqdm(steps, desc="training", unit="step", disable=None if is_first else True)
    try:
        for step in progress:
            trainer.step()
            is_recorded = (step + 1) % options.every == 0 or step + 1 == options.steps
            if is_first and is_recorded:
                progress.write(f"step {step + 1:6}, held out: {in_words(run.record(step + 1))}")
    except KeyboardInterrupt:
        progress.close()
        if is_first:
            trainer.save(run.checkpoint)
        raise SystemExit(
            f"stopped after {len(trainer.history)} of {options.steps} steps; "
            f"the same command goes on from {run.checkpoint}"
        ) from None


def finish(run):
    """Write the package of the best model and the pictures, and print how to use them."""
    folder, options = run.folder, run.options
    if not (folder / "model.npz").exists():
        raise ValueError(f"expected errors that are numbers, got {folder}/log.csv: smaller --rates")
    model = load_npz(folder / "model.npz")
    plot_loss(folder / "loss.png", run.trainer.history)
    held_out = Data(run.held_out.frames, model)
    plot_parity(folder / "parity.png", model, held_out, "labels")
    save(model.tabulated() if options.tabulated else model, folder / "model.pt2")
    path, elements = folder / "model.pt2", " ".join(model.type_names)
    print(
        f"""{path} is the best model. In ASE:
    from calcops.ase import CalcOps
    from calcops.potentials import load
    atoms.calc = CalcOps(load("{path}"))
In LAMMPS, with the plugin that `python -m calcops.lammps build` makes:
    pair_style calcops {path}
    pair_coeff * * {elements}"""
    )


def main(words=None):
    """Run the command."""
    options = parse(words)
    # torchrun sets both.
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if options.batch % processes:
        raise ValueError(
            f"expected a --batch that {processes} processes can share, got {options.batch}"
        )
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    images = read(options.frames)
    train_images, held_out_images = divided(images, options)
    model = begun(train_images, options).to(options.device)
    data = Data(frames_of(train_images, model.type_names), model)
    held_out = Data(frames_of(held_out_images, model.type_names), model)
    if processes > 1:
        distributed.init_process_group()  # gloo between CPUs, nccl between GPUs
    trainer = Trainer(
        model,
        data,
        options.steps,
        options.seed,
        options.batch,
        options.compile,
        options.rates,
        options.weights,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    run = Run(options.folder, trainer, held_out, options)
    run.resume()
    if rank == 0:
        kinds = ", ".join(f"{n} up to {count}" for n, count in zip(model.type_names, model.sel))
        print(
            f"{len(data)} frames to train on, {len(held_out)} held out; "
            f"neighbours within {model.cutoff:g} A: {kinds}"
        )
    train(run, is_first=rank == 0)
    if processes > 1:
        distributed.destroy_process_group()
    if rank == 0:
        finish(run)


if __name__ == "__main__":
    torch.set_num_threads(1)  # frames are too small to share
    try:
        main()
    except ValueError as error:
        sys.exit(f"calcops.train: {error}")
