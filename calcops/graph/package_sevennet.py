"""A SevenNet model as energies of atoms, which calcops.potentials.save() packages.

    model = SevenNet(sevenn.util.load_checkpoint("7net-0").build_model())
    save(model, "7net-0.pt", **model.about)

calcops graph writes such a file, too.
"""

import e3nn.util.jit
import torch
from ase.data import chemical_symbols
from sevenn.nn.convolution import IrrepsConvolution


class OneHot(torch.nn.Module):
    """SevenNet's one-hot encoding of types, in float64. SevenNet's own is always in float32."""

    def __init__(self, theirs):
        super().__init__()
        self.register_buffer("ones", torch.eye(theirs.num_classes, dtype=torch.float64))
        self.keys = theirs.key_x, theirs.key_output, theirs.key_additional_output, theirs.key_save

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the encoding of the types to the graph."""
        source, output, additional, save = self.keys
        types = data[source]
        data[output] = self.ones[types]
        if additional is not None:
            data[additional] = data[output]
        if save is not None:
            data[save] = types
        return data


class SevenNet(torch.nn.Module):
    """Energies of atoms from a graph, as ../potentials/energies.py expects them.

    `model` is changed, not copied: e3nn would compute the constants of a copy anew, and they would
    differ in the tenth digit.

    Attributes:
        about: cutoff, units, type_names and layers, for save().
    """

    def __init__(self, model):
        super().__init__()
        model.requires_grad_(False).eval().double()
        model.delete_module_by_key("force_output")
        model.replace_module("onehot_idx_to_onehot", OneHot(model.onehot_idx_to_onehot))
        model.eval_type_map = False
        model.key_grad = None
        model.set_is_batch_data(False)
        self.cutoff = float(model.cutoff)
        self.about = {
            "cutoff": self.cutoff,
            "units": "metal",
            # The keys of type_map, atomic numbers, are in the order of the types.
            "type_names": [chemical_symbols[z] for z in model.type_map],
            "layers": sum(isinstance(module, IrrepsConvolution) for module in model),
        }
        # e3nn traces parts of the model in the default dtype, and their constants have its digits.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            self.model = e3nn.util.jit.script(model)
        finally:
            torch.set_default_dtype(default)

    def forward(self, types, edge_index, edge_vec, natoms: int):
        """Return the energies [natoms, 1] of atoms."""
        # SevenNet's envelope is zero at the cutoff, but not beyond. Move farther pairs to it.
        near = torch.linalg.vector_norm(edge_vec, dim=1, keepdim=True) < self.cutoff
        end = torch.tensor([self.cutoff, 0.0, 0.0], dtype=edge_vec.dtype, device=edge_vec.device)
        edge_vec = torch.where(near, edge_vec, end)
        count = torch.full([1], natoms, dtype=torch.int64, device=types.device)
        data = {"x": types, "edge_index": edge_index, "edge_vec": edge_vec, "num_atoms": count}
        return self.model(data)["atomic_energy"]
