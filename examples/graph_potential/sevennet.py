"""SevenNet with its forces, stress and atoms' virials from calcops.edge_force_virial."""

import sevenn._keys as KEY
import torch
from edge_forces import edge_forces


class EdgeForces(torch.nn.Module):
    """Replaces `force_output` in a SevenNet model: one structure or a batch, training or not."""

    _is_batch_data = True  # set_is_batch_data of the model sets it

    def get_grad_key(self):
        return KEY.EDGE_VEC  # what the model makes require a gradient

    def forward(self, data):
        volume = data[KEY.CELL_VOLUME].clamp(min=1e-3)  # where nothing is periodic it is zero
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
        # Of SevenNet's sign: its calculator changes it.
        data[KEY.PRED_STRESS] = six(virial / volume.view(-1, 1, 1)).view(
            -1 if volume.dim() == 0 else (-1, 6)
        )
        return data


def six(matrices):
    """xx, yy, zz, xy, yz, zx of each [3, 3], where SevenNet takes edge_vec's component first."""
    return matrices.flatten(1)[:, [0, 4, 8, 3, 7, 2]]


def with_edge_forces(model):
    """The SevenNet model itself, whose last module is now EdgeForces."""
    model.replace_module("force_output", EdgeForces().train(model.training))
    model.set_is_batch_data(model.is_batch_data)
    return model
