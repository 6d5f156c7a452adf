"""A MACE model as energies of atoms, which calcops.potentials.save() packages.

    model = Mace(torch.load("my.model", weights_only=False))
    save(model, "mace.pt", **model.about)

calcops graph writes such a file, too.
"""

import mace.modules
import torch
from ase.data import chemical_symbols


class Mace(torch.nn.Module):
    """Energies of atoms from a graph, as ../potentials/energies.py expects them.

    In MACE, messages go from the atom in row 0 of edge_index to that in row 1, along r_row1 -
    r_row0. Here they go to row 0 from row 1, and edge_vec is r_row1 - r_row0. So the rows change
    places, and the vectors their sign.

    Args:
        model: a MACE or ScaleShiftMACE. It is changed, not copied: it becomes float64 without
            gradients.
        head: the name of one of the model's heads. None: the only one, or "Default", as MACE's own
            calculator chooses it.

    Attributes:
        about: cutoff, units, type_names and layers, for save().

    Raises:
        ValueError: the model has other inputs than positions, or no such head.
    """

    def __init__(self, model, head=None):
        super().__init__()
        if not isinstance(model, mace.modules.MACE) or hasattr(model, "joint_embedding"):
            raise ValueError(
                "expected a MACE or ScaleShiftMACE, whose energy depends on positions alone, "
                f"got {type(model).__name__}"
            )
        model.requires_grad_(False).eval().double()
        self.about = {
            "cutoff": float(model.r_max),
            "units": "metal",
            "type_names": [chemical_symbols[number] for number in model.atomic_numbers],
            "layers": int(model.num_interactions),
        }
        ntypes = len(model.atomic_numbers)
        self.register_buffer("ones", torch.eye(ntypes, dtype=torch.float64))
        self.register_buffer("head", torch.tensor([number_of_head(model, head)]))
        # `import mace` lets PyTorch read e3nn's own files, so it has to come first.
        from e3nn.util.jit import script

        # e3nn traces parts of the model in the default dtype, and their constants have its digits.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            self.model = script(model)
        finally:
            torch.set_default_dtype(default)

    def forward(self, types, edge_index, edge_vec, natoms: int):
        """Return the energies [natoms] of atoms."""
        shifts = -edge_vec  # MACE computes positions[row 1] - positions[row 0] + shifts
        data = {
            "positions": edge_vec.new_zeros([natoms, 3]),
            "edge_index": edge_index.flip(0),
            "shifts": shifts,
            "node_attrs": self.ones[types],
            "cell": torch.zeros_like(shifts[:1]),
            "batch": torch.zeros_like(types),
            "ptr": torch.zeros([2], dtype=torch.int64, device=types.device),
            "head": self.head,
        }
        energies = self.model(data, compute_force=False)["node_energy"]
        assert energies is not None  # for torch.jit.script
        return energies


def number_of_head(model, name):
    """Return the number of a model's head."""
    heads = getattr(model, "heads", None) or ["Default"]
    if name is None:
        defaults = [head for head in heads if head.lower() == "default"]
        (name,) = heads if len(heads) == 1 else defaults[:1] or [None]
    if name not in heads:
        raise ValueError(f"expected a head of the model, one of {', '.join(heads)}, got {name}")
    return heads.index(name)
