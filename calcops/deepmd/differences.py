"""The largest differences between results of two models."""

import math

import torch
from calcops.potentials.neighbours import neighbours, pair_vectors


def disturbed_lattice(model):
    """Return types [n], list_neigh [1, n, K] and Rij [1, n, K, 3] of a disturbed cubic lattice.

    Its density gives each atom two thirds of the neighbours that the model has room for.
    """
    random = torch.Generator().manual_seed(0)
    per_volume = sum(model.sel) / 1.5 / (4 / 3 * math.pi * model.cutoff**3)
    spacing = per_volume ** (-1 / 3)
    axis = torch.arange(4, dtype=torch.float64) * spacing
    positions = torch.cartesian_prod(axis, axis, axis)
    positions += 0.05 * spacing * torch.randn(positions.shape, generator=random)
    cell = 4 * spacing * torch.eye(3, dtype=torch.float64)
    list_neigh, shift = neighbours(positions[None], cell[None], model.cutoff)
    shares = torch.tensor(model.sel, dtype=torch.float64)
    types = torch.multinomial(shares, len(positions), replacement=True, generator=random)
    return types, list_neigh, pair_vectors(positions[None], list_neigh, shift)


def differences(model, other):
    """Return the largest differences of atoms' energies and of forces on a disturbed lattice.

    Both are relative to the largest energy or force of `model`. Energies do not include biases.
    """
    types, list_neigh, Rij = disturbed_lattice(model)
    _, energies, forces, _, _ = model(types, list_neigh, Rij)
    _, other_energies, other_forces, _, _ = other(types, list_neigh, Rij)
    size = (energies - model.bias_atom_e[types]).abs().max()
    energy_difference = (other_energies - energies).abs().max() / size
    force_difference = (other_forces - forces).abs().max() / forces.abs().max()
    return energy_difference.item(), force_difference.item()
