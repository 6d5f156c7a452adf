"""A small Deep Potential with forces and virial by calcops, as a model and as a package for C++.

    python examples/aot_inductor_force/energy_model.py [FOLDER] [--device cuda]

FOLDER is build/aot_inductor_force if not given. README.md beside this file shows what the script
prints and how host.cpp runs the package.
"""

import argparse
from pathlib import Path

import torch
from calcops.potentials.package import load, save
from calcops.potentials.potential import Potential


class EnergyModel(Potential):
    """A potential in eV and Angstrom whose weights are made up, not trained."""

    def __init__(self):
        super().__init__(4.0, "metal", ["A", "B"])

        def weights(*shape):
            count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
            return torch.nn.Parameter(count.sin().view(shape))

        self.kind, self.radial, self.W, self.w = (
            weights(2, 4),
            weights(4),
            weights(16, 8),
            weights(8),
        )

    def atom_energies(self, types, list_neigh, Ri):
        q = Ri[..., :1].square()
        # Goes to zero at the cutoff with its first derivative, and stays there.
        R = (1 - q / self.cutoff**2).clamp(min=0).square() / q * Ri
        weight = torch.tanh(
            R[..., :1] * self.radial + self.kind[self.neighbour_types(types, list_neigh)]
        )
        T = weight.mT @ R
        D = (T @ T.mT).flatten(2)  # the same in every frame of reference
        return torch.tanh(D @ self.W) @ self.w


def random_frames(frames, natoms, slots, nghost, device):
    generator = torch.Generator().manual_seed(natoms)
    types = torch.randint(2, (natoms + nghost,), generator=generator)
    list_neigh = torch.randint(-1, natoms + nghost, (frames, natoms, slots), generator=generator)
    Rij = torch.randn(frames, natoms, slots, 3, generator=generator, dtype=torch.float64) * 2
    return [x.to(device) for x in (types, list_neigh, Rij)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/aot_inductor_force"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, path = (
        EnergyModel().to(options.device),
        options.folder / f"potential_{options.device}.pt2",
    )
    save(model, path, device=options.device, edge_order=False)  # which host.cpp does not make
    package = load(path)
    # Other sizes than those it was made with: a wrong package would be wrong without a word.
    for frames, natoms, slots, nghost in ((1, 64, 30, 0), (3, 20, 9, 11), (2, 1, 1, 1)):
        inputs = random_frames(frames, natoms, slots, nghost, options.device)
        results = zip(package(*inputs, nghost), model(*inputs, nghost))
        worst = max((ours - eager).abs().max() / eager.abs().max() for ours, eager in results)
        print(
            f"{frames} frames, {natoms} atoms, {slots} slots, {nghost} ghosts: "
            f"{worst:.0e} from eager"
        )
