"""Train a Deep Potential on a crystal's energies, forces and virials, by the force operators.

    python examples/train_potential/train.py [FOLDER] [--system gallium-nitride] [--steps N]
        [--compile]
    torchrun --nproc-per-node 2 examples/train_potential/train.py --batch 2

The processes of torchrun share each batch. FOLDER, build/train_potential/SYSTEM if not given, gets
frames.pt, checkpoint.pt (the same command goes on from it), model.npz, loss.png and parity.png.
README.md beside this file shows what the script prints.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from calcops.train.deep_potential import DeepPotential
from calcops.train.frames import generate
from calcops.train.plots import plot_loss, plot_parity
from calcops.train.systems import kSystems
from calcops.train.trainer import Data, Trainer, save_whole
from calcops.train.weights import initial, save_npz, standardise
from torch import distributed
from tqdm import tqdm


def errors(trainer, data):
    """The RMSE of a model on data, in words."""
    squares = trainer.mean_squares(*data[:], create_graph=False)
    energy, force, virial = squares.sqrt().tolist()
    return (
        f"RMSE of energy {1e3 * energy:.2f} meV/atom, force {force:.4f} eV/A, "
        f"virial {1e3 * virial:.1f} meV/atom"
    )


def arguments():
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--system", choices=kSystems, default="silicon")
    parser.add_argument("--steps", type=int, default=40000)
    parser.add_argument(
        "--batch", type=int, default=1, help="frames a step, of all processes together"
    )
    parser.add_argument(
        "--every", type=int, default=1000, help="steps from one checkpoint to the next"
    )
    parser.add_argument(
        "--trajectories",
        type=int,
        nargs=3,
        default=(40, 8, 8),
        help="to learn from, held out, test",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each process"
    )
    return parser


def keep_frames(path, system, options):
    """Writes the frames of a new folder: to learn from, held out, test."""
    if path.exists():
        return
    seeds = range(3 * options.seed, 3 * options.seed + 3)
    sets = [generate(system, n, 8, seed) for n, seed in zip(options.trajectories, seeds)]
    save_whole({"system": options.system, "sets": sets}, path)


def train(trainer, held_out, checkpoint, options, is_first):
    """Trains from the checkpoint, if there is one; the first process saves and prints."""
    if checkpoint.exists():
        trainer.resume(checkpoint)
    steps = range(len(trainer.history), options.steps)
    progress = tqdm(steps, desc="training", unit="step", disable=None if is_first else True)
    for step in progress:
        trainer.step()
        if is_first and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            trainer.save(checkpoint)
            progress.write(f"step {step + 1:6}, held out: {errors(trainer, held_out)}")


def main():
    parser = arguments()
    options = parser.parse_args()
    folder = options.folder or Path("build/train_potential", options.system)
    # torchrun sets both.
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if options.batch % processes:
        parser.error(
            f"--batch: expected a multiple of the {processes} processes, got {options.batch}"
        )
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if processes > 1:
        distributed.init_process_group()  # gloo between CPUs, nccl between GPUs
    wall, cpu = time.perf_counter(), time.process_time()

    folder.mkdir(parents=True, exist_ok=True)
    system = kSystems[options.system]
    kept, checkpoint = folder / "frames.pt", folder / "checkpoint.pt"
    if rank == 0:
        keep_frames(kept, system, options)
    if processes > 1:
        distributed.barrier()
    frames = torch.load(kept)
    if frames["system"] != options.system:
        parser.error(
            f"expected a folder of {options.system}, got one of {frames['system']}: {folder}"
        )
    model = DeepPotential(initial(**system.model, seed=options.seed), system.labels.type_names).to(
        options.device
    )
    types, _, _, kind, R, _, energy, _, _ = Data(frames["sets"][0], model)[:]
    standardise(model, types, kind, R, energy)
    data, held_out, test = (Data(of_set, model) for of_set in frames["sets"])
    trainer = Trainer(model, data, options.steps, options.seed, options.batch, options.compile)
    train(trainer, held_out, checkpoint, options, is_first=rank == 0)
    if processes > 1:
        distributed.destroy_process_group()
    if rank > 0:
        return
    print(f"test frames, looked at only here: {errors(trainer, test)}")
    print(
        f"{time.perf_counter() - wall:.0f} s, "
        f"{time.process_time() - cpu:.0f} s of CPU, frames included"
    )
    save_npz(model, folder / "model.npz")
    plot_loss(folder / "loss.png", trainer.history)
    plot_parity(folder / "parity.png", model.cpu(), Data(frames["sets"][2], model))
    print(folder / "loss.png", folder / "parity.png", sep="\n")


if __name__ == "__main__":
    # 64 atoms are too few to share, and so the result does not depend on the number of cores.
    torch.set_num_threads(1)
    main()
