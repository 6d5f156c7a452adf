"""Forces and virial of a potential on a graph, from the gradient of its energy along the edges."""

import torch

import calcops_jit


def edge_forces(energy, edge_index, edge_vec, natoms, batch=None, nframes=1, create_graph=False):
    """Return force [N, 3], virial [F, 3, 3] and atom_virial [N, 3, 3]; stress = -virial / volume.

    Positions and a strain are not needed. The forces of a graph without edges are zero.

    Args:
        energy: any shape, computed from `edge_vec`.
        edge_index: [2, E], with the centre i in row 0 and the neighbour j in row 1.
        edge_vec: [E, 3], r_j - r_i plus the shift of a periodic image. It requires a gradient.
        natoms: the number N of atoms.
        batch: [N], the structure of each atom; None: a single structure.
        nframes: the number F of structures.
        create_graph: True makes the results differentiable, as training on forces needs.
    """
    (gradient,) = torch.autograd.grad(
        energy.sum(), edge_vec, create_graph=create_graph, materialize_grads=True
    )
    return calcops_jit.edge_force_virial(edge_index, gradient, edge_vec, natoms, batch, nframes)
