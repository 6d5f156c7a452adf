"""The time of a training step: forces and virial by the operators, and by plain autograd through the positions.

    python examples/train_potential/step_time.py [FOLDER] [--repeats 50]

Both give the same gradients of the same loss; they take turns, and the least time of each counts. FOLDER is that of
train.py.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from deep_potential import load_npz
from torch.fx.experimental.proxy_tensor import make_fx
from trainer import Data, differentiate, gradients_of_loss


def differentiate_plainly(model, parameters, types, list_neigh, Rij, energy, force, virial):
    """What trainer.differentiate returns; no operator of CalcOps takes part."""
    (B, n), frames = types.shape, torch.arange(len(types))[:, None, None]
    moved, strain = Rij.new_zeros(B, n, 3, requires_grad=True), Rij.new_zeros(B, 3, 3, requires_grad=True)
    list_neigh, Rij = model.select(types, list_neigh, Rij)
    live = (list_neigh >= 0)[..., None]
    Rij = Rij + (moved[frames, list_neigh.clamp(min=0)] - moved[:, :, None]).where(live, 0)
    Rij = Rij + Rij @ strain[:, None].mT
    atom_energy = model.atom_energies(types, model.describe(Rij)[0])
    dx, dW = torch.autograd.grad(atom_energy.sum(), (moved, strain), create_graph=True)
    errors = (atom_energy.sum(1) - energy) / n, -dx - force, (-dW - virial) / n
    return gradients_of_loss(torch.stack([error.square().mean() for error in errors]), parameters)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/train_potential/silicon"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="both also under torch.compile, which takes a minute")
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    data = Data(torch.load(options.folder / "frames.pt")["sets"][1], model)
    parameters = dict(model.named_parameters())
    for frames in (1, 8):
        batch = data[torch.arange(frames)]
        calls = {"operators": partial(differentiate, model), "autograd": partial(differentiate_plainly, model)}
        if options.compile:
            graphs = {name: make_fx(call)(parameters, *batch) for name, call in calls.items()}
            calls |= {f"{name}, compiled": torch.compile(graph) for name, graph in graphs.items()}
        results = {name: call(parameters, *batch)[1] for name, call in calls.items()}
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(options.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call(parameters, *batch)
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
        print(f"a step of {frames} x {batch[0].shape[1]} atoms, {torch.get_num_threads()} threads")
        expected = torch.cat([gradient.flatten() for gradient in results["operators"]])
        for name, gradients in results.items():
            apart = (torch.cat([g.flatten() for g in gradients]) - expected).norm() / expected.norm()
            ratio = times[name] / times["operators"]
            print(f"  {name:20}{times[name]:8.2f} ms {ratio:8.2f} of the first; gradients apart by {apart:.0e}")


if __name__ == "__main__":
    main()
