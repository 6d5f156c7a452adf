"""A small Deep Potential whose forces and virial come from calcops, exported for any size and packaged for C++.

    python examples/aot_inductor_force/model.py [FOLDER] [--device cuda]      # default: build/aot_inductor_force

README.md beside this file shows what is printed and how host.cpp runs the package.
"""

import argparse
from pathlib import Path

import torch
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit

kCutoff = 4.0  # Angstrom


def describe(Rij):
    """Ri [B,n,K,4] = u (r, x, y, z) of each pair and Ri_d [B,n,K,4,3], its derivative for atom i.

    u = (1 - r^2/kCutoff^2)^2 / r^2 goes to zero at the cutoff with its first derivative, and stays there."""
    q = Rij.square().sum(-1, keepdim=True)
    p = (1 - q / kCutoff**2).clamp(min=0)
    u, du = p.square() / q, -(p / q).square() - 2 * p / (q * kCutoff**2)  # du/dq
    r = q.sqrt()
    Ri = torch.cat([u * r, u * Rij], -1)
    radial = (2 * r * du + u / r) * Rij
    outer = 2 * du[..., None] * Rij[..., :, None] * Rij[..., None, :]
    along = outer + u[..., None] * torch.eye(3, dtype=Rij.dtype, device=Rij.device)
    return Ri, -torch.cat([radial[..., None, :], along], -2)  # Rij = r_j - r_i, hence the minus


class Potential(torch.nn.Module):
    """The interface that hosts of CalcOps share. In eV and Angstrom; numbers for weights, no training."""

    def __init__(self):
        super().__init__()

        def weights(*shape):
            count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
            return torch.nn.Parameter(count.sin().view(shape))

        self.kind, self.radial, self.W, self.w = weights(2, 4), weights(4), weights(16, 8), weights(8)

    def atom_energies(self, types, list_neigh, Ri):
        weight = torch.tanh(Ri[..., :1] * self.radial + self.kind[types[list_neigh.clamp(min=0)]])
        T = weight.mT @ Ri
        D = (T @ T.mT).flatten(2)  # the same in every frame of reference
        return torch.tanh(D @ self.W) @ self.w

    def forward(self, types, list_neigh, Rij, nghost: int):
        """types [n+nghost], list_neigh [B,n,K], Rij [B,n,K,3]
        -> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]"""
        # An empty slot may hold anything; beyond the cutoff it counts for nothing.
        Ri, Ri_d = describe(Rij.where((list_neigh >= 0)[..., None], 2 * kCutoff))
        atom_energy = self.atom_energies(types, list_neigh, Ri.requires_grad_())
        (dE,) = torch.autograd.grad(atom_energy.sum(), Ri)
        force, virial, atom_virial = calcops_jit.force_virial(list_neigh, dE, Ri_d.flatten(2, 3), Rij, nghost)
        return atom_energy.detach().sum(-1), atom_energy.detach(), force, virial, atom_virial


def random_frames(frames, natoms, neighbours, nghost):
    generator = torch.Generator().manual_seed(natoms)
    types = torch.randint(2, (natoms + nghost,), generator=generator)
    list_neigh = torch.randint(-1, natoms + nghost, (frames, natoms, neighbours), generator=generator)
    Rij = torch.randn(frames, natoms, neighbours, 3, generator=generator, dtype=torch.float64) * 2
    return types, list_neigh, Rij


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/aot_inductor_force"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = Potential().requires_grad_(False).to(options.device)

    def from_tensors(types, list_neigh, Rij):
        """A package takes no int: the length of types says how many ghosts there are."""
        return model(types, list_neigh, Rij, types.shape[-1] - list_neigh.shape[1])

    # Sizes that are equal in the example, or equal to a fixed one as the 3 of x, y, z, would be one symbol.
    example = [x.to(options.device) for x in random_frames(2, 7, 5, nghost=11)]
    # torch.export refuses a module that calls autograd.grad. make_fx follows it down to plain operators, with symbols
    # for the sizes, and what it writes is exported; so the weights are constants of the package.
    graph = make_fx(from_tensors, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    pairs = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    program = torch.export.export(graph, tuple(example), dynamic_shapes=({0: Dim.DYNAMIC}, pairs, pairs))
    package = options.folder / f"potential_{options.device}.pt2"
    about = {"aot_inductor.metadata": {"cutoff": str(kCutoff), "units": "eV Angstrom", "types": "A B"}}
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=about)

    run = torch._inductor.aoti_load_package(str(package))
    for size in ((1, 64, 30, 0), (3, 20, 9, 11), (2, 1, 1, 1)):
        frames = [x.to(options.device) for x in random_frames(*size)]
        ours, eager = run(*frames), model(*frames, size[3])
        worst = max((a - b).abs().max() / b.abs().max() for a, b in zip(ours, eager))
        print(f"{size[0]} frames, {size[1]} atoms, {size[2]} slots, {size[3]} ghosts: {worst:.0e} from eager")
