"""A warning when a structure is unlike the frames that its model was trained on."""

import warnings

import torch


class TrainedRange:
    """Warns once of too many neighbours of an atom, and once of too short a pair.

    Args:
        model: it may have `sel`, the most neighbours of each type that it takes into account, and
            `shortest` [T, T], the shortest pair of each two types that it was trained on.
    """

    def __init__(self, model):
        self.cutoff = model.cutoff
        self.type_names = model.type_names
        self.sel = getattr(model, "sel", None)
        self.shortest = getattr(model, "shortest", None)

    def check(self, types, list_neigh, Rij):
        """Warn of a structure.

        Args:
            types: [n].
            list_neigh: [1, n, K], -1 in empty slots.
            Rij: [1, n, K, 3].
        """
        if (self.sel is None and self.shortest is None) or list_neigh.numel() == 0:
            return
        x, y, z = Rij[0].unbind(-1)
        r2 = torch.where(list_neigh[0] >= 0, x * x + y * y + z * z, torch.inf)
        if self.sel is not None:
            self.check_counts(types, list_neigh[0], r2 < self.cutoff**2)
        if self.shortest is not None:
            self.check_lengths(types, list_neigh[0], r2)

    def check_counts(self, types, list_neigh, is_near):
        """Warn of more neighbours of a type [n, K] than `sel`."""
        if is_near.sum(-1).max().item() <= min(self.sel):
            return
        kind = torch.where(is_near, types[list_neigh.clamp(min=0)], -1)
        for t, allowed in enumerate(self.sel):
            count, atom = (kind == t).sum(-1).max(0)
            if count.item() <= allowed:
                continue
            self.sel = None
            warnings.warn(
                f"CalcOps: atom {atom.item()} has {count.item()} neighbours {self.type_names[t]} "
                f"within {self.cutoff:g}, and the model's sel is {allowed}. It takes the nearest, "
                "so that energies jump and forces are not their derivatives. Train with a larger "
                "sel",
                stacklevel=2,
            )
            return

    def check_lengths(self, types, list_neigh, r2):
        """Warn of a pair shorter than any of its types in training, from r^2 [n, K]."""
        shortest = self.shortest.to(r2)
        if r2.min() >= shortest.max() ** 2:
            return
        limit = shortest[types.unsqueeze(-1), types[list_neigh.clamp(min=0)]]
        is_short = r2 < limit.square() * (1 - 1e-6)  # rounding of a text
        if not is_short.any():
            return
        self.shortest = None
        i, slot = is_short.nonzero()[0].tolist()
        j = list_neigh[i, slot].item()
        names = f"{self.type_names[types[i]]}-{self.type_names[types[j]]}"
        least = limit[i, slot].item()
        seen = "none" if least >= self.cutoff * (1 - 1e-6) else f"none below {least:.3g}"
        warnings.warn(
            f"CalcOps: atoms {i} and {j} are {r2[i, slot].sqrt().item():.3g} apart. In the model's "
            f"training there was {seen} of such pairs ({names}), so its energy is extrapolated",
            stacklevel=2,
        )
