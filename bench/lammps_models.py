"""Write Lennard-Jones, Stillinger-Weber or a message-passing model for the `calcops` pair style.

    python bench/lammps_models.py build/lammps/silicon.pt2 build/lammps/lj.pt

A file is named silicon, lj or messages<N>, with .pt2 or .pt. N is the number of layers of the
message-passing model. Its weights are random: it serves tests and benchmarks.
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
    """A message-passing model with random weights, for graphs.

    Each of `layers` layers updates the features of an atom from its neighbours' features and from
    the vectors to them. A repulsion keeps atoms apart.
    """

    def __init__(self, layers, cutoff, ntypes=1, width=8, seed=0):
        super().__init__()
        self.layers = layers
        self.cutoff = cutoff
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape):
            return torch.nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64) / width**0.5
            )

        self.type_features = weights(ntypes, width)
        self.distance_weights = weights(layers, width, width)
        self.sum_weights = weights(layers, width, width)
        self.length_weights = weights(layers, width, width)

    def forward(self, types, edge_index, edge_vec, natoms: int):
        centre = edge_index[0]
        neighbour = edge_index[1]
        r = torch.linalg.vector_norm(edge_vec, dim=-1, keepdim=True) / self.cutoff
        inside = (1 - r).clamp(min=0) ** 3
        width = self.type_features.shape[1]
        waves = inside * torch.cos(3 * r * torch.arange(width, device=r.device))
        directions = (edge_vec / (self.cutoff * r)).unsqueeze(2)
        x = self.type_features[types]
        for layer in range(self.layers):
            messages = (waves @ self.distance_weights[layer]) * x[neighbour]
            messages = messages.unsqueeze(1)
            terms = torch.cat([messages, messages * directions], 1)  # [E, 4, width]
            moments = terms.new_zeros(natoms, 4, width).index_add(0, centre, terms)
            lengths = moments[:, 1:].square().sum(1)
            sums = moments[:, 0] @ self.sum_weights[layer]
            x = x + torch.tanh(sums + lengths @ self.length_weights[layer])
        repulsion = (inside / r**3).squeeze(1)
        return x.sum(1) + repulsion.new_zeros(natoms).index_add(0, centre, repulsion)


def write(path):
    """Write the model that a file is named for."""
    named = re.fullmatch(r"messages(\d+)", path.stem)
    if named:
        layers = int(named[1])
        about = {"cutoff": 5.0, "units": "metal", "type_names": ["Si"], "layers": layers}
        save(Messages(layers, 5.0), path, **about)
    else:
        save(kModels[path.stem](), path)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write(path)
