"""The time of a training step by the operators and by plain autograd through the positions.

    python examples/train_potential/step_time.py [FOLDER] [--repeats 50]

A step needs forces and virial. Both give the same gradients of the same loss, from neighbours that
were selected before. Timed beside them is what either needs: the derivatives of the nets, and the
optimizers. All take turns, and the least time of each counts. FOLDER is that of train.py.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from calcops.train.deep_potential import load_npz
from calcops.train.trainer import Data, Trainer, differentiate, gradients_of_loss
from torch.fx.experimental.proxy_tensor import make_fx


def differentiate_plainly(
    model, parameters, types, list_neigh, Rij, kind, R, R_d, energy, force, virial
):
    """What trainer.differentiate returns, without an operator of CalcOps, without R and R_d."""
    (B, n), frames = types.shape, torch.arange(len(types))[:, None, None]
    moved, strain = (
        Rij.new_zeros(B, n, 3, requires_grad=True),
        Rij.new_zeros(B, 3, 3, requires_grad=True),
    )
    live = (list_neigh >= 0)[..., None]
    Rij = Rij + (moved[frames, list_neigh.clamp(min=0)] - moved[:, :, None]).where(live, 0)
    Rij = Rij + Rij @ strain[:, None].mT
    atom_energy = model.atom_energies(types, kind, model.describe(types, kind, Rij)[0])
    dx, dW = torch.autograd.grad(atom_energy.sum(), (moved, strain), create_graph=True)
    errors = (atom_energy.sum(1) - energy) / n, -dx - force, (-dW - virial) / n
    return gradients_of_loss(torch.stack([error.square().mean() for error in errors]), parameters)


def differentiate_nets(
    model, parameters, types, list_neigh, Rij, kind, R, R_d, energy, force, virial
):
    """First and second derivatives of the nets alone: the loss is of the energies and of dE/dR."""
    R = R.view_as(R).requires_grad_()
    atom_energy = model.atom_energies(types, kind, R)
    dE = torch.autograd.grad(atom_energy.sum(), R, create_graph=True)[0]
    squares = torch.stack(
        [x.square().mean() for x in (atom_energy.sum(1) - energy, dE, dE[..., 0])]
    )
    return gradients_of_loss(squares, parameters)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("build/train_potential/silicon")
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--compile", action="store_true", help="both also under torch.compile, which takes a minute"
    )
    options = parser.parse_args()
    model = load_npz(options.folder / "model.npz")
    data = Data(torch.load(options.folder / "frames.pt")["sets"][1], model)
    for frames in (1, 8):
        batch = data[torch.arange(frames)]
        trainer = Trainer(model, data, steps=1, seed=0)
        calls = {
            "operators": partial(differentiate, trainer.mean_squares),
            "autograd": partial(differentiate_plainly, model),
            "of either, the nets": partial(differentiate_nets, model),
        }
        if options.compile:
            # As in trainer.py.
            trace = partial(make_fx, tracing_mode="symbolic", _allow_non_fake_inputs=True)
            graphs = {name: trace(call)(trainer.parameters, *batch) for name, call in calls.items()}
            calls |= {f"{name}, compiled": torch.compile(graph) for name, graph in graphs.items()}
        calls = {name: partial(call, trainer.parameters, *batch) for name, call in calls.items()}
        gradients = {
            name: torch.cat([x.flatten() for x in call()[1]]) for name, call in calls.items()
        }
        expected = gradients["operators"]
        for parameter in trainer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)  # so that the model stays as it is
        calls["beside either, the optimizers"] = partial(trainer.update, 0.01)
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(options.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
        print(f"a step of {frames} x {batch[0].shape[1]} atoms, {torch.get_num_threads()} threads")
        for name, milliseconds in times.items():
            line = (
                f"  {name:32}{milliseconds:8.2f} ms "
                f"{milliseconds / times['operators']:8.2f} of the first"
            )
            if name.startswith(("operators", "autograd")):
                line += (
                    "; gradients apart by "
                    f"{(gradients[name] - expected).norm() / expected.norm():.0e}"
                )
            print(line)


if __name__ == "__main__":
    main()
