"""Train a Deep Potential on energies, forces and virials of silicon, the force operators inside the loss.

    python examples/train_potential/train.py [FOLDER] [--steps N] [--compile]      # default: build/train_potential

FOLDER gets frames.pt, checkpoint.pt (the same command goes on from it), model.npz, loss.png and parity.png.
README.md beside this file shows what is printed.
"""

import argparse
import time
from pathlib import Path

import torch
from deep_potential import DeepPotential
from frames import generate
from plots import plot_loss, plot_parity
from tqdm import tqdm
from trainer import Data, Trainer, mean_squares
from weights import initial, save_npz, standardise

kModel = dict(sel=[34], rcut=5.0, rcut_smth=3.6, emb=[24, 24], axis_neuron=12, fit=[48, 48])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/train_potential"))
    parser.add_argument("--steps", type=int, default=40000)
    parser.add_argument("--trajectories", type=int, nargs=2, default=(40, 8), help="to learn from, held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    wall, cpu = time.perf_counter(), time.process_time()

    kept, checkpoint = options.folder / "frames.pt", options.folder / "checkpoint.pt"
    if not kept.exists():
        torch.save([generate(n, 8, options.seed + i) for i, n in enumerate(options.trajectories)], kept)
    learnt, held_out = torch.load(kept)
    model = DeepPotential(initial(**kModel, seed=options.seed), ["Si"])
    data, test = Data(learnt, model), Data(held_out, model)
    standardise(model, *data[:][:4])
    trainer = Trainer(model, data, options.steps, options.seed, options.compile)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    progress = tqdm(range(len(trainer.history), options.steps), desc="training", unit="step", disable=None)
    for step in progress:
        trainer.step()
        if (step + 1) % 1000 == 0 or step + 1 == options.steps:
            trainer.save(checkpoint)
            squares = mean_squares(model, trainer.parameters, *test[:], create_graph=False)
            energy, force, virial = squares.sqrt().tolist()
            progress.write(
                f"step {step + 1:6}, held out: RMSE of energy {1e3 * energy:.2f} meV/atom, force {force:.4f} eV/A, "
                f"virial {1e3 * virial:.1f} meV/atom"
            )
    print(f"{time.perf_counter() - wall:.0f} s, {time.process_time() - cpu:.0f} s of CPU, frames included")
    save_npz(model, options.folder / "model.npz")
    plot_loss(options.folder / "loss.png", trainer.history)
    plot_parity(options.folder / "parity.png", model, test)
    print(options.folder / "loss.png", options.folder / "parity.png", sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # 64 atoms are too few to share, and so the result does not depend on the number of cores
    main()
