"""Train a Deep Potential on energies, forces and virials of a crystal, the force operators inside the loss.

    python examples/train_potential/train.py [FOLDER] [--system gallium-nitride] [--steps N] [--compile]

FOLDER, build/train_potential/SYSTEM if not given, gets frames.pt, checkpoint.pt (the same command goes on from it),
model.npz, loss.png and parity.png. README.md beside this file shows what is printed.
"""

import argparse
import time
from pathlib import Path

import torch
from deep_potential import DeepPotential
from frames import generate
from plots import plot_loss, plot_parity
from systems import kSystems
from tqdm import tqdm
from trainer import Data, Trainer, mean_squares, save_whole
from weights import initial, save_npz, standardise


def errors(trainer, data):
    """The RMSE of a model on data, in words."""
    squares = mean_squares(trainer.model, trainer.parameters, *data[:], create_graph=False)
    energy, force, virial = squares.sqrt().tolist()
    return f"RMSE of energy {1e3 * energy:.2f} meV/atom, force {force:.4f} eV/A, virial {1e3 * virial:.1f} meV/atom"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--system", choices=kSystems, default="silicon")
    parser.add_argument("--steps", type=int, default=40000)
    parser.add_argument("--trajectories", type=int, nargs=3, default=(40, 8, 8), help="to learn from, held out, test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    options = parser.parse_args()
    folder = options.folder or Path("build/train_potential", options.system)
    folder.mkdir(parents=True, exist_ok=True)
    wall, cpu = time.perf_counter(), time.process_time()

    system, kept, checkpoint = kSystems[options.system], folder / "frames.pt", folder / "checkpoint.pt"
    if not kept.exists():
        seeds = range(3 * options.seed, 3 * options.seed + 3)
        sets = [generate(system, n, 8, seed) for n, seed in zip(options.trajectories, seeds)]
        save_whole({"system": options.system, "sets": sets}, kept)
    frames = torch.load(kept)
    if frames["system"] != options.system:
        parser.error(f"expected a folder of {options.system}, got one of {frames['system']}: {folder}")
    model = DeepPotential(initial(**system.model, seed=options.seed), system.labels.type_names)
    data, held_out, test = (Data(of_set, model) for of_set in frames["sets"])
    standardise(model, *data[:][:4])
    trainer = Trainer(model, data, options.steps, options.seed, options.compile)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    progress = tqdm(range(len(trainer.history), options.steps), desc="training", unit="step", disable=None)
    for step in progress:
        trainer.step()
        if (step + 1) % 1000 == 0 or step + 1 == options.steps:
            trainer.save(checkpoint)
            progress.write(f"step {step + 1:6}, held out: {errors(trainer, held_out)}")
    print(f"test frames, looked at only here: {errors(trainer, test)}")
    print(f"{time.perf_counter() - wall:.0f} s, {time.process_time() - cpu:.0f} s of CPU, frames included")
    save_npz(model, folder / "model.npz")
    plot_loss(folder / "loss.png", trainer.history)
    plot_parity(folder / "parity.png", model, test)
    print(folder / "loss.png", folder / "parity.png", sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # 64 atoms are too few to share, and so the result does not depend on the number of cores
    main()
