"""The time of a training step: forces and virial by the operators, and by plain autograd through the positions.

    python examples/train_potential/step_time.py [FOLDER] [--repeats 50]

Both give the same gradients of the same loss; they take turns, and the least time of each counts. FOLDER is that of
train.py.
"""

import argparse
import time
from pathlib import Path

import torch
from model import load_npz
from torch.fx.experimental.proxy_tensor import make_fx
from trainer import Data, differentiate, kBatch, kLossWeights


def differentiate_plainly(model, parameters, types, list_neigh, Rij, energy, force, virial):
    """What trainer.differentiate returns; no operator of CalcOps takes part."""
    (B, n), frames = types.shape, torch.arange(len(types))[:, None, None]
    moved, strain = Rij.new_zeros(B, n, 3, requires_grad=True), Rij.new_zeros(B, 3, 3, requires_grad=True)
    live = (list_neigh >= 0)[..., None]
    Rij = Rij + (moved[frames, list_neigh.clamp(min=0)] - moved[:, :, None]).where(live, 0)
    Rij = Rij + Rij @ strain[:, None].mT
    atom_energy = model.atom_energies(types, model.describe(Rij)[0])
    dx, dW = torch.autograd.grad(atom_energy.sum(), (moved, strain), create_graph=True)
    errors = (atom_energy.sum(1) - energy) / n, -dx - force, (-dW - virial) / n
    squares = torch.stack([error.square().mean() for error in errors])
    loss = squares @ squares.new_tensor(kLossWeights)
    return squares.detach(), torch.autograd.grad(loss, list(parameters.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/train_potential"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--compile", action="store_true", help="both also under torch.compile, which takes a minute"
    )
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    batch = Data(torch.load(options.folder / "frames.pt")[1], model)[torch.arange(kBatch)]
    parameters = dict(model.named_parameters())

    def compiled(function):
        return torch.compile(make_fx(lambda *arguments: function(model, *arguments))(parameters, *batch))

    functions = {"operators": differentiate, "plain autograd": differentiate_plainly}
    calls = {name: lambda *a, f=f: f(model, *a) for name, f in functions.items()}
    if options.compile:
        calls |= {f"{name}, compiled": compiled(function) for name, function in functions.items()}
    results = {name: call(parameters, *batch) for name, call in calls.items()}
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(options.repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call(parameters, *batch)
            times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    expected = torch.cat([gradient.flatten() for gradient in results["operators"][1]])
    print(f"{kBatch} frames of {batch[0].shape[1]} atoms, {torch.get_num_threads()} threads")
    for name, (_, gradients) in results.items():
        apart = (torch.cat([g.flatten() for g in gradients]) - expected).norm() / expected.norm()
        ratio = times[name] / times["operators"]
        print(
            f"{name:25}{times[name]:7.2f} ms a step, {ratio:.2f} of the first; gradients apart by {apart:.0e}"
        )


if __name__ == "__main__":
    main()
