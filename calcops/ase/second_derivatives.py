"""Elastic constants and phonons: second derivatives of the energy, from the operators' results.

create_graph=True keeps the graph of force and virial, so torch.autograd differentiates the
operators once more. There are no finite differences. The functions serve any potential.
"""

import numpy as np
import torch
from calcops.potentials.pair_search import pairs_within

from ase import units


def response(atoms):
    """Return the Jacobian of (stress [6], force [3n]) by (strain [6], displacement [3n]).

    Stress and strain are in Voigt's order. The displacements are applied before the strain.

    Args:
        atoms: at rest (the forces are zero), with a CalcOps calculator.
    """
    types, list_neigh, Rij = atoms.calc.pairs(atoms)
    neighbours = list_neigh[0].clamp(min=0)
    volume = atoms.get_volume()
    eye = torch.eye(3).to(Rij)
    full = torch.tensor([[0, 5, 4], [5, 1, 3], [4, 3, 2]])  # Voigt's index of each component

    def stress_and_force(strain, u):
        deformation = eye + strain[full] * (1 + eye) / 2  # Voigt's shear is twice the tensor's
        moves = u.view(-1, 3)
        moved = (Rij + moves[neighbours] - moves[:, None]) @ deformation
        force, virial = in_graph(atoms.calc.model, types, list_neigh, moved)
        stress = -virial[0] / (volume * torch.linalg.det(deformation))
        return stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], force.flatten()

    at_rest = torch.zeros(6).to(Rij), torch.zeros(3 * len(atoms)).to(Rij)
    return torch.autograd.functional.jacobian(stress_and_force, at_rest, vectorize=True)


def in_graph(model, types, list_neigh, Rij):
    """Return force [1, n, 3] and virial [1, 3, 3] of a model, differentiable in Rij.

    Raises:
        ValueError: the model is a package (.pt2), which has no gradients.
    """
    if str(getattr(model, "path", "")).endswith(".pt2"):
        raise ValueError(
            "expected a module or an archive (.pt) for second derivatives, "
            f"got the package {model.path}, which has no gradients"
        )
    _, _, force, virial, _ = model(types, list_neigh, Rij, 0, create_graph=True)
    return force, virial


def elastic_constants(atoms):
    """Return two matrices C [6, 6] in GPa: with held atoms, which only follow the strain, and with
    relaxed atoms, which also move until their forces are zero.
    """
    (stress_strain, stress_u), (force_strain, force_u) = response(atoms)
    held = stress_strain / units.GPa
    # The pseudo-inverse leaves the translations out.
    u_strain = -torch.linalg.pinv(force_u, rtol=1e-9) @ force_strain
    relaxed = held + stress_u @ u_strain / units.GPa
    return held, relaxed


def phonons(primitive):
    """Return a function from wave vectors q [m, 3] in 1/A to frequencies [m, 3p] in THz.

    p is the number of atoms in the primitive cell. Imaginary frequencies are negative.

    Args:
        primitive: the cell, with a CalcOps calculator.
    """
    p = len(primitive)
    atoms, number = surroundings(primitive)
    types, list_neigh, Rij = primitive.calc.pairs(atoms)
    u = torch.zeros(len(atoms), 3).to(Rij).requires_grad_()
    moved = Rij + u[list_neigh[0].clamp(min=0)] - u[:, None]
    force, _ = in_graph(primitive.calc.model, types, list_neigh, moved)
    rows = force[0, :p].flatten()  # the forces on the atoms of one cell: a row of the Hessian each
    (hessian,) = torch.autograd.grad(rows, u, -torch.eye(3 * p).to(rows), is_grads_batched=True)
    # [atom, x, image, x], divided by the roots of both atoms' masses.
    hessian = hessian.cpu().numpy().reshape(p, 3, -1, 3)
    root = np.sqrt(atoms.get_masses())
    hessian = hessian / (root[:p, None, None, None] * root[:, None])
    vectors = atoms.positions - primitive.positions[:, None]
    is_image = number == np.arange(p)[:, None]

    def frequencies(q):
        phase = np.exp(1j * np.einsum("inx,mx->min", vectors, q))
        dynamical = np.einsum("ianb,min,kn->miakb", hessian, phase, is_image, optimize=True)
        squares = np.linalg.eigvalsh(dynamical.reshape(-1, 3 * p, 3 * p))
        return np.sign(squares) * np.sqrt(abs(squares)) / (2 * np.pi) * units.fs * 1e3

    return frequencies


def surroundings(primitive):
    """Return a cluster with all atoms on which the forces in a cell depend, the cell's first.

    An atom's energy depends on atoms up to `layers` cutoffs away, and its force on energies that
    far away. So the cluster goes twice as far, and each image of an atom is an atom of its own. In
    a supercell images that are too near would count as one.

    Returns:
        atoms: without periodic directions.
        number: [n], of each atom in the cell.
    """
    reach = 2 * getattr(primitive.calc.model, "layers", 1) * primitive.calc.model.cutoff
    _, j, S = pairs_within(primitive.positions, primitive.cell.array, primitive.pbc, reach)
    of_images = np.unique(np.column_stack([S, j]), axis=0)
    of_images = of_images[of_images[:, :3].any(1)]
    number = np.concatenate([np.arange(len(primitive)), of_images[:, 3]])
    atoms = primitive[number]
    atoms.positions[len(primitive) :] += of_images[:, :3] @ primitive.cell.array
    atoms.pbc = False
    return atoms, number
