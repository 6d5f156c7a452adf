"""Writes the potentials of ../potentials that LAMMPS has too, and one that passes messages.

Their names are silicon.pt2, lj.pt2 and messages2.pt; each may end in .pt or .pt2. The number says
how many times the model passes messages. That model is for tests and times.

python examples/lammps/models.py build/lammps/silicon.pt2 build/lammps/lj.pt
"""

import re
import sys
from pathlib import Path

import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import save
from calcops.potentials.stillinger_weber import StillingerWeber

# The defaults are LAMMPS's Si.sw and lj/cut 2.5.
kModels = {"silicon": StillingerWeber, "lj": LennardJones}


class Messages(torch.nn.Module):
    """Features of an atom that change `layers` times by those of its neighbours and their vectors.

    The weights are random. Atoms repel each other, so that they stay apart.
    """

    def __init__(self, layers, cutoff, ntypes=1, width=8, seed=0):
        super().__init__()
        self.layers, self.cutoff = layers, cutoff
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape):
            return torch.nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64) / width**0.5
            )

        self.of_type, self.of_distance = weights(ntypes, width), weights(layers, width, width)
        self.of_sum, self.of_vectors = weights(layers, width, width), weights(layers, width, width)

    def forward(self, types, edge_index, edge_vec, natoms: int):
        centre, neighbour = edge_index[0], edge_index[1]
        r = torch.linalg.vector_norm(edge_vec, dim=-1, keepdim=True) / self.cutoff
        inside = (1 - r).clamp(min=0) ** 3
        waves = inside * torch.cos(3 * r * torch.arange(self.of_distance.shape[1], device=r.device))
        directions = edge_vec / (self.cutoff * r)
        x = self.of_type[types]
        for layer in range(self.layers):
            messages = (waves @ self.of_distance[layer]) * x[neighbour]
            moments = torch.cat(
                [messages.unsqueeze(1), messages.unsqueeze(1) * directions.unsqueeze(2)], 1
            )
            moments = moments.new_zeros(natoms, 4, x.shape[1]).index_add(0, centre, moments)
            lengths = moments[:, 1:].square().sum(1)
            x = x + torch.tanh(
                moments[:, 0] @ self.of_sum[layer] + lengths @ self.of_vectors[layer]
            )
        repulsion = (inside / r**3).squeeze(1)
        return x.sum(1) + repulsion.new_zeros(natoms).index_add(0, centre, repulsion)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        if layers := re.fullmatch(r"messages(\d+)", path.stem):
            layers = int(layers[1])
            save(
                Messages(layers, 5.0),
                path,
                cutoff=5.0,
                units="metal",
                type_names=["Si"],
                layers=layers,
            )
        else:
            save(kModels[path.stem](), path)
