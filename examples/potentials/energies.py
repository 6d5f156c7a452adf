"""Any module that gives energies, as a potential with forces, virial and per-atom virial.

save() of package.py makes such a potential of a module. With layers=3 the module passes messages
three times.

    about = dict(cutoff=5.0, units="metal", type_names=["Si"])
    save(module, "model.pt2", **about)
    save(module, "model.pt2", **about, layers=3)
"""

import inspect

import torch
from calcops.potentials.potential import Potential, edges


def potential_of(module, cutoff, units, type_names, layers=1):
    """module(types, list_neigh, Rij, nghost) or, of a graph, module(types, edge_index, edge_vec,
    natoms), which returns energies of atoms or, with a single layer, their sum; as a Potential.

    layers: how often messages pass along edges, to the atom in row 0 of edge_index from that in row
    1, until they are an energy; 1: from an atom's own neighbours only.
    """
    if not isinstance(module, torch.nn.Module):
        hint = ": load a checkpoint into its module first" * isinstance(module, dict)
        raise TypeError(f"expected a module that gives energies, got {type(module).__name__}{hint}")
    names = [*inspect.signature(module.forward).parameters]
    kinds = {
        ("list_neigh", "Rij", "nghost"): Energies,
        ("edge_index", "edge_vec", "natoms"): GraphEnergies,
    }
    kind = kinds.get(tuple(names[1:4]))
    if kind is None:
        raise ValueError(
            "expected forward(types, list_neigh, Rij, nghost) or "
            "forward(types, edge_index, edge_vec, natoms), "
            f"got forward({', '.join(names)})"
        )
    return kind(module, float(cutoff), units, list(type_names), layers)


def check_cutoff(model, device, is_smooth):
    """Of a model in float64: ValueError where an energy depends on what lies beyond the cutoff, on
    empty slots or, if is_smooth, on whether a pair at the cutoff is in the list. Then the result
    would depend on the list, which changes with the skin and with the number of ranks.
    """
    n, generator = 5, torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64) * 0.6 * model.cutoff
    types = (torch.arange(n) % len(model.type_names)).to(device)
    neighbours = torch.stack([(torch.arange(n - 1) + i + 1) % n for i in range(n)])
    direction = torch.tensor([0.48, 0.6, 0.64], dtype=torch.float64)

    def energies(distance=None):
        """With one more slot for every atom, empty or, of the first, with a pair this far apart."""
        slots = torch.full((n, 1), -1)
        vectors = torch.full((n, 1, 3), 1e3 * model.cutoff, dtype=torch.float64)
        if distance is not None:
            slots[0, 0], vectors[0, 0] = 1, distance * model.cutoff * direction
        list_neigh = torch.cat([neighbours, slots], 1)[None]
        Rij = torch.cat([x[neighbours] - x[:, None], vectors], 1)[None]
        if distance == 0:
            list_neigh, Rij = list_neigh[..., :-1], Rij[:, :, :-1]
        return model(types, list_neigh.to(device), Rij.to(device), 0)[1]

    without = energies(0)
    size = without.abs().sum().clamp(min=1e-300)
    cases = {"an empty slot": energies(), "a pair just beyond the cutoff": energies(1 + 1e-9)}
    cases |= {"a pair far beyond the cutoff": energies(1.7)}
    if is_smooth:
        cases["a pair just inside the cutoff"] = energies(1 - 1e-9)
    for what, found in cases.items():
        change = (found - without).abs().sum()
        if not change <= (1e-6 if "inside" in what else 1e-12) * size:
            raise ValueError(
                f"expected energies that go to zero at the cutoff {model.cutoff:g}, "
                f"got ones that {what} changes by {change.item():.1e}: "
                "multiply what a pair adds by an envelope such as "
                "torch.where(r < cutoff, (1 - (r / cutoff) ** 2) ** 2, 0)"
            )


def check_layers(model, device):
    """Of a model in float64: ValueError where a chain of atoms has another energy than its atoms
    have if each is on a rank of its own, with the rows that LAMMPS hands over: of the atoms fewer
    than `layers` steps away.
    """
    n = 4 * model.layers + 4  # a step is two or three atoms long
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    x[:, 0] += 0.45 * torch.arange(n)
    types = torch.arange(n) % len(model.type_names)
    near = (torch.cdist(x, x) < 1).double()  # or the atom itself
    steps = sum((torch.linalg.matrix_power(near, k) == 0).long() for k in range(model.layers))
    list_neigh = torch.arange(n).where((near > 0) & ~torch.eye(n, dtype=torch.bool), -1)
    Rij = model.cutoff * (x - x[:, None])

    def atom_energies(types, list_neigh, Rij, owned=None):
        inputs = types.to(device), list_neigh[None].to(device), Rij[None].to(device)
        return model(*inputs, len(types) - len(list_neigh), owned=owned)[1]

    whole, parts = atom_energies(types, list_neigh, Rij), []
    for away in steps:
        order = away.argsort(stable=True)
        rows = order[: (away < model.layers).sum()]
        named = order.argsort()[list_neigh[rows]].where(list_neigh[rows] >= 0, -1)
        owned = (torch.arange(len(rows)) == 0).to(device)
        parts.append(atom_energies(types[order], named, Rij[rows], owned).sum())
    apart = (whole.sum() - sum(parts)).abs()
    if not apart <= 1e-12 * whole.abs().sum():
        raise ValueError(
            f"expected the energy of an atom to come by at most layers={model.layers} messages, "
            "each to the atom in row 0 of edge_index from that in row 1, "
            f"got energies that atoms farther away change by {apart.item():.1e}"
        )


class Energies(Potential):
    """module(types [n+nghost] or [B,n+nghost], list_neigh [B,n,K], Rij [B,n,K,3], nghost).

    It returns [B,n] or [B].
    """

    def __init__(
        self,
        module: torch.nn.Module,
        cutoff: float,
        units: str,
        type_names: list[str],
        layers: int = 1,
    ):
        super().__init__(cutoff, units, type_names, layers)
        self.module = module

    def energies(self, types, list_neigh, planes, nghost: int):
        """Energies [B, n] of the atoms, for pair vectors planes [3, B, K, n]."""
        found = self.module(types, list_neigh, planes.permute(1, 3, 2, 0).contiguous(), nghost)
        return found if found.dim() == 2 else self.shared(found, list_neigh)

    def shared(self, energy, list_neigh):
        """Each of n atoms has the same part of its frame's energy."""
        if self.layers > 1:
            raise ValueError(
                "expected energies of atoms from a model that passes messages, got their sum"
            )
        n = list_neigh.shape[1]
        return (energy / n).unsqueeze(-1).expand(energy.shape[0], n)


class GraphEnergies(Energies):
    """module(types [natoms], edge_index [2,E], edge_vec [E,3], natoms).

    It returns [natoms], [natoms,1] or the sum of them. All frames and their ghosts are one graph.
    An empty slot is an edge from its atom to itself, three cutoffs long.
    """

    def energies(self, types, list_neigh, planes, nghost: int):
        """Energies [B, n] of the atoms, for pair vectors planes [3, B, K, n]."""
        B, n, _ = list_neigh.shape
        natoms = n + nghost
        of_atoms = types.expand(B, natoms).flatten()
        index, vec = edges(list_neigh, natoms), planes.flatten(1).mT.contiguous()
        index = torch.where(index < 0, index[:1], index)
        found = self.module(of_atoms, index, vec, B * natoms)
        if found.numel() == B * natoms and found.dim() > 0:
            return found.view(B, natoms)[:, :n]
        # Of the sum, what ghosts have without a neighbour is not ours.
        if B != 1:
            raise ValueError(
                "expected energies of atoms from a graph of several frames, got a single one"
            )
        itself, far = torch.zeros_like(index[:, :1]), torch.full_like(vec[:1], 2 * self.cutoff)
        ghosts = self.module(of_atoms, itself, far, natoms) - self.module(
            of_atoms[:n], itself, far, n
        )
        return self.shared((found - ghosts).view(1), list_neigh)
