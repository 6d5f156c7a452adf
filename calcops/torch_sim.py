"""A torch-sim model over any model with the interface of potentials/potential.py.

It computes a batch of systems by one call of the model, on the device of the batch.

    model = CalcOpsModel(StillingerWeber())         # or load("silicon.pt2")
    final = torch_sim.optimize(system=crystals, model=model, optimizer=torch_sim.Optimizer.fire)
"""

import torch
from calcops.ase.calculator import checked_skin, place_of, threads_for, types_of_elements
from calcops.ase.neighbour_lists import near_pairs_of, numbered_rows
from calcops.ase.trained_range import TrainedRange
from calcops.potentials.pair_search import pairs_within, slots_in_rows
from torch_sim.models.interface import ModelInterface


class BatchList:
    """The pairs of all systems of a batch. A system's are kept until its atoms have moved too far.

    Args:
        model: it has cutoff and type_names.
        skin: a length of at least 0. The lists have pairs up to cutoff + skin.

    Attributes:
        types: [n], int64.
        list_neigh: [n, K], int32, -1 in empty slots.
        image: [n, K], int32, the row of `offset` for each pair.
        offset: [S, 3], float64, from the cell of an atom to that of its neighbour.
        builds: how often the pairs of a system were searched.
    """

    def __init__(self, model, skin):
        self.type_names = model.type_names
        self.type_of = types_of_elements(model.type_names)
        self.cutoff = model.cutoff
        self.skin = checked_skin(skin)
        self.builds = 0
        self.sizes = None  # the numbers of atoms and systems

    def update(self, state):
        """Search the pairs of systems whose lists are too old. A GPU waits once if none is.

        Args:
            state: a SimState.

        Returns:
            True if there was a search.

        Raises:
            ValueError: the model does not have an element, or a system cannot be searched.
        """
        positions = state.positions.detach().double()
        cells = state.row_vector_cell.detach().double()
        periods = torch.where(state.pbc.view(-1, 1), cells, 0.0)
        sizes = len(positions), len(periods)
        if self.sizes != sizes:
            self.sizes = None  # until the search ends
            self.parts = [None] * len(periods)
            self.positions = positions
            self.periods = periods
            systems = range(len(periods))
            has_new_cells = True
        else:
            *is_old, has_new_cells = self.changes(state, positions, periods).tolist()
            systems = [system for system, old in enumerate(is_old) if old]
        if systems:
            self.search(systems, state, positions, periods)
            self.sizes = sizes
        if systems or has_new_cells:
            self.cells = periods
            self.offset = torch.bmm(self.shift.unsqueeze(1), periods[self.shift_system]).squeeze(1)
        return len(systems) > 0

    def changes(self, state, positions, periods):
        """Return bools [S + 1]: if the list of a system is too old, and if any cell has changed.

        A pair that is not in the list was farther apart than cutoff + skin. A deformation of the
        cell by 1 + strain shortens a distance at most by the norm of the strain. The moves of two
        atoms relative to the cell shorten it at most by twice the longest move.
        """
        system_idx = state.system_idx
        strain = self.inverse @ (periods - self.periods)
        reference = self.positions.unsqueeze(1)
        moves = positions - (reference + reference @ strain[system_idx]).squeeze(1)
        is_other = state.atomic_numbers != self.atomic_numbers
        lengths = torch.where(is_other, torch.inf, moves.norm(dim=1))
        farthest = lengths.new_zeros(len(periods)).scatter_reduce(0, system_idx, lengths, "amax")
        least = 1 - strain.flatten(1).norm(dim=1)
        is_old = ~((self.cutoff + self.skin) * least - 2 * farthest >= self.cutoff)
        is_old |= (system_idx != self.system_idx).any() | (state.pbc != self.pbc).any()
        return torch.cat([is_old, (periods != self.cells).any().view(1)])

    def search(self, systems, state, positions, periods):
        """Search the pairs of `systems`, and write those of all systems into rows."""
        system_idx = state.system_idx
        types = self.type_of.to(system_idx.device)[state.atomic_numbers]
        if (types < 0).any():
            atom = (types < 0).nonzero()[0].item()
            raise ValueError(
                f"CalcOps: expected atoms of {self.type_names}, got the atomic number "
                f"{state.atomic_numbers[atom]} in system {system_idx[atom]}"
            )
        sizes = torch.bincount(system_idx).tolist()
        of_systems = positions.split(sizes)
        parts = list(self.parts)
        for system in systems:
            try:
                i, j, S = pairs_within(
                    of_systems[system], periods[system], state.pbc, self.cutoff + self.skin
                )
            except ValueError as error:
                raise ValueError(f"CalcOps: {error} in system {system}") from None
            image, shift = numbered_rows(S)
            parts[system] = torch.stack([i, j]) + sum(sizes[:system]), image, shift.double()

        i, j = torch.cat([pairs for pairs, _, _ in parts], 1)
        rows = torch.tensor([len(shift) for _, _, shift in parts], device=i.device)
        first_rows = (rows.cumsum(0) - rows).unbind(0)
        image = torch.cat([own + first for (_, own, _), first in zip(parts, first_rows)])
        slot, count = slots_in_rows(i, len(positions))
        shape = len(positions), int(count.max())
        self.list_neigh = torch.full(shape, -1, dtype=torch.int32, device=i.device)
        self.list_neigh[i, slot] = j.int()
        self.image = torch.zeros_like(self.list_neigh)
        self.image[i, slot] = image.int()
        self.shift = torch.cat([shift for _, _, shift in parts])
        self.shift_system = torch.arange(len(parts), device=i.device).repeat_interleave(rows)
        self.slots = 1

        self.builds += len(systems)
        self.parts = parts
        self.types = types
        is_new = torch.zeros(len(periods), dtype=torch.bool, device=periods.device)
        is_new[list(systems)] = True
        self.positions = positions.where(is_new[system_idx].view(-1, 1), self.positions)
        self.periods = periods.where(is_new.view(-1, 1, 1), self.periods)
        self.inverse = torch.linalg.pinv(self.periods)
        self.system_idx = system_idx.clone()
        self.atomic_numbers = state.atomic_numbers.clone()
        self.pbc = state.pbc.clone()

    def near_pairs(self, positions):
        """Return the pairs within the cutoff as NeighbourList.near_pairs of ../ase does.

        Raises:
            ValueError: two atoms of a system are in the same place.
        """
        arguments = positions, self.list_neigh, self.image, self.offset, self.cutoff
        results = near_pairs_of(arguments, self.slots)
        near, Rij, count, nearest = results
        self.slots = near.shape[1]
        if nearest.min() == 0:
            i, slot = ((near >= 0) & (Rij.square().sum(-1) == 0)).nonzero()[0].tolist()
            system = self.system_idx[i].item()
            first = (self.system_idx < system).sum().item()
            one, other = sorted((i - first, near[i, slot].item() - first))
            raise ValueError(
                "CalcOps: expected atoms in different places, "
                f"got atoms {one} and {other} of system {system} in the same place"
            )
        return results


class CalcOpsModel(ModelInterface):
    """Energy, forces and stress of each system of a batch, and the energy of each atom.

    The units are those of the model: eV and Angstrom where they are "metal".

    Args:
        model: called as model(types, list_neigh, Rij, nghost). It has cutoff, units and type_names
            (chemical symbols). A module follows to(), a package has a fixed device and dtype.
        skin: a length of at least 0. The lists have pairs up to cutoff + skin.
        retain_graph: True keeps the results of a module differentiable, with respect to its
            parameters and the positions.

    Raises:
        ValueError: a name of a type is no element or occurs twice, the skin is no length, or
            retain_graph is True for a package.
    """

    def __init__(self, model, skin=0.5, retain_graph=False):
        super().__init__()
        self.model = model
        self._compute_stress = True
        self._compute_forces = True
        if isinstance(model, torch.nn.Module):
            self.retain_graph = retain_graph
        elif retain_graph:
            raise ValueError("CalcOps: expected a module for retain_graph=True, got a package")
        self.neighbours = BatchList(model, skin)
        self.trained_range = TrainedRange(model)

    @property
    def device(self):
        """The device of the model."""
        return place_of(self.model)[0]

    @property
    def dtype(self):
        """The dtype in which the model computes."""
        return place_of(self.model)[1]

    def forward(self, state, **_):
        """Compute a batch of S systems with n atoms together.

        Args:
            state: a SimState. The model computes in its own dtype; the results are of the state's.

        Returns:
            A dict: energy [S] in eV, forces [n, 3] in eV/A, stress [S, 3, 3] in eV/A^3, NaN without
            a volume, and energies [n] of the atoms in eV.

        Raises:
            ValueError: the model does not have an element, or a system cannot be searched, or two
                of its atoms are in the same place, or its results are not finite.
        """
        neighbours = self.neighbours
        neighbours.update(state)
        types = neighbours.types
        positions = state.positions.double()
        near, Rij, count, nearest = neighbours.near_pairs(positions.detach())
        self.trained_range.check(types, near, Rij, count, nearest)
        with threads_for(len(positions)):
            if getattr(self, "retain_graph", False):  # a package does not have it
                moves = positions - positions.detach()
                Rij = Rij + moves[near.clamp(min=0)] - moves.unsqueeze(1)
                results = self.model(
                    types, near[None], Rij[None].to(self.dtype), 0, create_graph=True
                )
            else:
                compute = getattr(self.model, "of_near_pairs", self.model)
                results = compute(types, near[None], Rij[None].to(self.dtype), 0)

        _, energies, forces, _, atom_virials = (x.squeeze(0).to(state.dtype) for x in results)
        zeros = energies.new_zeros(len(state.cell))
        energy = zeros.index_add(0, state.system_idx, energies)
        virial = zeros.new_zeros(state.cell.shape).index_add(0, state.system_idx, atom_virials)
        is_wrong = ~(virial.flatten(1).sum(1) + energy).isfinite()
        if is_wrong.any():
            system = is_wrong.nonzero()[0].item()
            raise ValueError(
                f"CalcOps: expected finite results of the model, got the energy {energy[system]} "
                f"and the virial {virial[system].tolist()} of system {system}"
            )
        volume = torch.linalg.det(state.cell).abs()
        volume = torch.where(volume > 0, volume, torch.nan)
        return {
            "energy": energy,
            "forces": forces,
            "stress": -virial / volume.view(-1, 1, 1),
            "energies": energies,
        }
