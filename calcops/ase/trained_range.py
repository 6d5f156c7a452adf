"""A warning when a structure is unlike the frames that its model was trained on."""

import warnings

import torch


class TrainedRange:
    """Warns once about too many neighbours of an atom, and once about too short a pair.

    Args:
        model: it may have `sel`, the most neighbours of each type that it takes into account, and
            `shortest` [T, T], the shortest pair of each two types that it was trained on.
    """

    def __init__(self, model):
        self.cutoff = model.cutoff
        self.type_names = model.type_names
        self.sel = getattr(model, "sel", None)
        self.shortest = getattr(model, "shortest", None)

    def check(self, types, near, Rij, count, nearest):
        """Warn about a structure.

        Args:
            types: [n].
            near: [n, K], the neighbours within the cutoff, -1 in empty slots.
            Rij: [n, K, 3].
            count: [n], of the neighbours within the cutoff.
            nearest: [n], the smallest |Rij|^2 of each atom.
        """
        if len(types) == 0:
            return
        if self.sel is not None and count.max() > min(self.sel):
            self.check_counts(types, near)
        if self.shortest is not None and nearest.min() < self.shortest.max() ** 2:
            r2 = torch.where(near >= 0, Rij.square().sum(-1), torch.inf)
            self.check_lengths(types, near, r2)

    def check_counts(self, types, near):
        """Warn about more neighbours of a type than `sel`."""
        kind = torch.where(near >= 0, types[near.clamp(min=0)], -1)
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

    def check_lengths(self, types, near, r2):
        """Warn about a pair shorter than any of its types in training, from r^2 [n, K]."""
        shortest = self.shortest.to(r2)
        limit = shortest[types.unsqueeze(-1), types[near.clamp(min=0)]]
        is_short = r2 < limit.square() * (1 - 1e-6)  # rounding of a text
        if not is_short.any():
            return
        self.shortest = None
        i, slot = is_short.nonzero()[0].tolist()
        j = near[i, slot].item()
        names = f"{self.type_names[types[i]]}-{self.type_names[types[j]]}"
        least = limit[i, slot].item()
        seen = "none" if least >= self.cutoff * (1 - 1e-6) else f"none below {least:.3g}"
        warnings.warn(
            f"CalcOps: atoms {i} and {j} are {r2[i, slot].sqrt().item():.3g} apart. In the model's "
            f"training there was {seen} of such pairs ({names}), so its energy is extrapolated",
            stacklevel=2,
        )
