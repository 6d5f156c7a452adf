"""Forces and virial of a potential on a graph, from the gradient of its energy along the edges."""

import torch

import calcops_jit


def edge_forces(energy, edge_index, edge_vec, natoms, batch=None, nframes=1, create_graph=False):
    """Returns force [N, 3], virial [F, 3, 3] and atom_virial [N, 3, 3]; stress = -virial / volume.

    `energy` has been computed from `edge_vec` = r_j - r_i (plus the shift of a periodic image),
    which requires a gradient; `edge_index` [2, E] has i in row 0 and j in row 1. Neither positions
    nor a strain take part. With `create_graph` the results have derivatives of their own, as
    training on forces needs. A graph without edges is fine: its forces are zero.
    """
    (gradient,) = torch.autograd.grad(
        energy.sum(), edge_vec, create_graph=create_graph, materialize_grads=True
    )
    return calcops_jit.edge_force_virial(edge_index, gradient, edge_vec, natoms, batch, nframes)
