"""SevenNet with its forces, stress and atoms' virials from calcops.edge_force_virial."""

import sevenn._keys as KEY
import torch
from calcops.graph.edge_forces import edge_forces


class EdgeForces(torch.nn.Module):
    """Replaces `force_output` in a SevenNet model: one structure or a batch, training or not."""

    _is_batch_data = True  # the model's set_is_batch_data changes it

    def get_grad_key(self):
        """Return the key of the tensor for which the model requires a gradient."""
        return KEY.EDGE_VEC

    def forward(self, data):
        """Add forces, atoms' virials and stress to the dict `data`, and return it."""
        volume = data[KEY.CELL_VOLUME].clamp(min=1e-3)  # zero if no direction is periodic
        force, virial, atom_virial = edge_forces(
            data[KEY.PRED_TOTAL_ENERGY],
            data[KEY.EDGE_IDX],
            data[KEY.EDGE_VEC],
            natoms=len(data[KEY.ATOMIC_ENERGY]),
            batch=data[KEY.BATCH] if self._is_batch_data else None,
            nframes=volume.numel(),
            create_graph=self.training,
        )
        data[KEY.PRED_FORCE] = force
        data[KEY.PRED_ATOMIC_VIRIAL] = six(atom_virial)
        # SevenNet's sign, which its calculator changes.
        stress = six(virial / volume.view(-1, 1, 1))
        data[KEY.PRED_STRESS] = stress.flatten() if volume.dim() == 0 else stress
        return data


def six(matrices):
    """Return the components xx, yy, zz, xy, yz, zx of each matrix [3, 3].

    SevenNet's order has the component of edge_vec first, hence the indices of yx, zy and xz.
    """
    return matrices.flatten(1)[:, [0, 4, 8, 3, 7, 2]]


def with_edge_forces(model):
    """Replace the last module of a SevenNet model by EdgeForces, and return the model."""
    model.replace_module("force_output", EdgeForces().train(model.training))
    model.set_is_batch_data(model.is_batch_data)
    return model
