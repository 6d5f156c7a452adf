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
    """Return a Potential whose energies a module gives.

    Args:
        module: called as module(types, list_neigh, Rij, nghost) or, for a graph, as module(types,
            edge_index, edge_vec, natoms). It returns energies of atoms. With a single layer it may
            return their sum.
        cutoff: a length.
        units: LAMMPS's name of the units.
        type_names: the names of the types.
        layers: the number of times that messages pass along edges, to the atom in row 0 of
            edge_index from that in row 1, before they are an energy. 1: an energy depends on an
            atom's own neighbours alone.

    Raises:
        TypeError: the module is not a module.
        ValueError: its forward has other arguments.
    """
    if not isinstance(module, torch.nn.Module):
        hint = ""
        if isinstance(module, dict):
            hint = ": load a checkpoint into its module first"
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
    """Raise ValueError if an energy depends on pairs beyond the cutoff or on empty slots.

    Such a result would depend on the list, which changes with the skin and the number of ranks.

    Args:
        model: a Potential in float64.
        device: of the model.
        is_smooth: True to check that a pair just inside the cutoff changes nothing, either.
    """
    n = 5
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64) * 0.6 * model.cutoff
    types = (torch.arange(n) % len(model.type_names)).to(device)
    neighbours = torch.stack([(torch.arange(n - 1) + i + 1) % n for i in range(n)])
    direction = torch.tensor([0.48, 0.6, 0.64], dtype=torch.float64)

    def energies(distance=None):
        """Return energies with one more slot for every atom.

        The slot is empty, or holds a pair of the first atom at this distance, in cutoffs.
        """
        slots = torch.full((n, 1), -1)
        vectors = torch.full((n, 1, 3), 1e3 * model.cutoff, dtype=torch.float64)
        if distance is not None:
            slots[0, 0] = 1
            vectors[0, 0] = distance * model.cutoff * direction
        list_neigh = torch.cat([neighbours, slots], 1)[None]
        Rij = torch.cat([x[neighbours] - x[:, None], vectors], 1)[None]
        if distance == 0:  # no more slot
            list_neigh = list_neigh[..., :-1]
            Rij = Rij[:, :, :-1]
        return model(types, list_neigh.to(device), Rij.to(device), 0)[1]

    without = energies(0)
    size = without.abs().sum().clamp(min=1e-300)
    cases = {
        "an empty slot": energies(),
        "a pair just beyond the cutoff": energies(1 + 1e-9),
        "a pair far beyond the cutoff": energies(1.7),
    }
    if is_smooth:
        cases["a pair just inside the cutoff"] = energies(1 - 1e-9)
    for what, changed in cases.items():
        change = (changed - without).abs().sum()
        tolerance = 1e-6 if "inside" in what else 1e-12
        if not change <= tolerance * size:  # or NaN
            raise ValueError(
                f"expected energies that go to zero at the cutoff {model.cutoff:g}, "
                f"got ones that {what} changes by {change.item():.1e}: "
                "multiply what a pair adds by an envelope such as "
                "torch.where(r < cutoff, (1 - (r / cutoff) ** 2) ** 2, 0)"
            )


def check_layers(model, device):
    """Raise ValueError if an energy depends on atoms farther away than model.layers messages.

    The energy of a chain of atoms has to be the sum of its parts: each atom alone on a rank, with
    the rows that LAMMPS gives to it, those of atoms fewer than `layers` steps away.

    Args:
        model: a Potential in float64.
        device: of the model.
    """
    # A message goes one or two atoms along the chain, which is longer than all of its steps.
    n = 4 * model.layers + 4
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    x[:, 0] += 0.45 * torch.arange(n)
    types = torch.arange(n) % len(model.type_names)
    is_near = torch.cdist(x, x) < 1  # also for the atom itself
    # Atoms k steps apart are connected by power k of the matrix, and not by lower ones.
    steps = torch.zeros(n, n, dtype=torch.int64)
    for k in range(model.layers):
        steps += torch.linalg.matrix_power(is_near.double(), k) == 0
    list_neigh = torch.arange(n).where(is_near & ~torch.eye(n, dtype=torch.bool), -1)
    Rij = model.cutoff * (x - x[:, None])

    def atom_energies(types, list_neigh, Rij, owned=None):
        inputs = types.to(device), list_neigh[None].to(device), Rij[None].to(device)
        return model(*inputs, len(types) - len(list_neigh), owned=owned)[1]

    whole = atom_energies(types, list_neigh, Rij)
    sum_of_parts = torch.zeros((), dtype=torch.float64, device=device)
    for steps_away in steps:
        order = steps_away.argsort(stable=True)  # the atom itself comes first
        rows = order[: (steps_away < model.layers).sum()]
        number = order.argsort()
        part_list = number[list_neigh[rows]].where(list_neigh[rows] >= 0, -1)
        owned = (torch.arange(len(rows)) == 0).to(device)
        sum_of_parts += atom_energies(types[order], part_list, Rij[rows], owned).sum()
    difference = (whole.sum() - sum_of_parts).abs()
    if not difference <= 1e-12 * whole.abs().sum():  # or NaN
        raise ValueError(
            f"expected the energy of an atom to come by at most layers={model.layers} messages, "
            "each to the atom in row 0 of edge_index from that in row 1, "
            f"got energies that atoms farther away change by {difference.item():.1e}"
        )


class Energies(Potential):
    """The potential of a module for neighbour lists.

    The module gets types [n + nghost] or [B, n + nghost], list_neigh [B, n, K], Rij [B, n, K, 3]
    and nghost. It returns energies [B, n] of atoms, or [B] of frames.
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
        """Return the energies [B, n] of atoms, for pair vectors planes [3, B, K, n]."""
        Rij = planes.permute(1, 3, 2, 0).contiguous()
        energies = self.module(types, list_neigh, Rij, nghost)
        return energies if energies.dim() == 2 else self.shared(energies, list_neigh)

    def shared(self, energy, list_neigh):
        """Return the energy [B] of frames, shared equally among their n atoms: [B, n]."""
        if self.layers > 1:
            raise ValueError(
                "expected energies of atoms from a model that passes messages, got their sum"
            )
        n = list_neigh.shape[1]
        return (energy / n).unsqueeze(-1).expand(energy.shape[0], n)


class GraphEnergies(Energies):
    """The potential of a module for graphs.

    The module gets types [natoms], edge_index [2, E], edge_vec [E, 3] and natoms. It returns
    [natoms], [natoms, 1] or the sum of them. All frames and their ghosts are one graph. An empty
    slot is an edge from its atom to itself, more than three cutoffs long.
    """

    def energies(self, types, list_neigh, planes, nghost: int):
        """Return the energies [B, n] of atoms, for pair vectors planes [3, B, K, n]."""
        B, n, _ = list_neigh.shape
        natoms = n + nghost
        graph_types = types.expand(B, natoms).flatten()
        index = edges(list_neigh, natoms)
        index = torch.where(index < 0, index[:1], index)
        vec = planes.flatten(1).mT.contiguous()
        energies = self.module(graph_types, index, vec, B * natoms)
        if energies.numel() == B * natoms and energies.dim() > 0:
            return energies.view(B, natoms)[:, :n]
        # The sum contains energies of ghosts, which have no neighbours in the graph. Subtract them.
        if B != 1:
            raise ValueError(
                "expected energies of atoms from a graph of several frames, got a single one"
            )
        loop = torch.zeros_like(index[:, :1])  # an edge from atom 0 to itself
        far = torch.full_like(vec[:1], 2 * self.cutoff)
        of_all = self.module(graph_types, loop, far, natoms)
        of_ghosts = of_all - self.module(graph_types[:n], loop, far, n)
        return self.shared((energies - of_ghosts).view(1), list_neigh)
