"""An ASE calculator over any model with the interface of ../potentials/potential.py.

It keeps its neighbour lists until atoms have moved too far for them.

    atoms.calc = CalcOps(StillingerWeber())
    atoms.calc = CalcOps(load("silicon.pt2"))       # load() of ../potentials/package.py
"""

import contextlib
import copy
import os
from functools import partial

import numpy as np
import torch
from calcops.ase.trained_range import TrainedRange
from calcops.potentials.blocks import near_pairs
from calcops.potentials.pair_search import pairs_within
from torch.nn.functional import pad

from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress

# The threads of GNU OpenMP do not survive a fork: the first parallel loop of a child would wait for
# them for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

kAtomsAThread = 100  # with fewer, threads wait for one another
kLists = 16  # most neighbour lists that a calculator keeps
kSlots = 1 << 23  # most slots of all lists together, of 64 bytes each


class NeighbourList:
    """All pairs of `atoms` within cutoff + skin, in padded rows.

    Attributes:
        list_neigh: [1, n, K], int64, -1 in empty slots.
        shift: [1, n, K, 3], the number of cells between an atom and its neighbour.
    """

    def __init__(self, atoms, cutoff, skin, device):
        i, j, S = pairs_within(atoms.positions, atoms.cell.array, atoms.pbc, cutoff + skin)
        count = np.bincount(i, minlength=len(atoms))
        first_pair = count.cumsum() - count
        slot = np.arange(len(i)) - first_pair[i]
        shape = 1, len(atoms), max(1, count.max(initial=0))
        list_neigh = np.full(shape, -1)
        shift = np.zeros((*shape, 3))
        list_neigh[0, i, slot] = j
        shift[0, i, slot] = S
        self.list_neigh = torch.from_numpy(list_neigh).to(device)
        self.shift = torch.from_numpy(shift).to(device)
        self.neighbours = self.list_neigh.clamp(min=0).flatten()
        self.last_cell = None
        self.last_offset = None
        self.cutoff = cutoff
        self.skin = skin
        self.positions = atoms.positions.copy()
        self.cell = periodic_cell(atoms)
        self.pbc = atoms.pbc.copy()

    def holds(self, atoms):
        """Return True if the list still has every pair of `atoms` within the cutoff.

        A pair that is not in the list was farther apart than cutoff + skin. A deformation of the
        cell shortens a distance at most by its smallest singular value. The moves of two atoms
        relative to the cell shorten it at most by twice the longest move. A move that all atoms
        share does not count.
        """
        if len(atoms) != len(self.positions) or (atoms.pbc != self.pbc).any() or len(atoms) == 0:
            return False
        cell = periodic_cell(atoms)
        if not np.isfinite(cell).all():
            return False
        deformation = np.linalg.solve(self.cell, cell)
        moves = atoms.positions - self.positions @ deformation
        farthest = np.linalg.norm(moves - moves.mean(0), axis=1).max()
        least = np.linalg.svd(deformation, compute_uv=False)[-1]
        return (self.cutoff + self.skin) * least - 2 * farthest >= self.cutoff

    def pair_vectors(self, positions, cell):
        """Return Rij [1, n, K, 3] for positions [n, 3] and cell [3, 3], differentiable in both."""
        neighbours = positions.index_select(0, self.neighbours).view(self.shift.shape)
        return neighbours - positions[:, None] + self.shift @ cell

    def detached_pair_vectors(self, positions, cell):
        """Return Rij as pair_vectors() does, without derivatives and in less time.

        The shifts in units of length are kept for the next call with the same cell. The vectors are
        computed in place, since new memory has to be cleared by the system.
        """
        if self.last_cell is None or not torch.equal(cell, self.last_cell):
            self.last_cell = cell.clone()
            self.last_offset = self.shift @ cell
        Rij = positions.index_select(0, self.neighbours).view(self.shift.shape)
        Rij -= positions[:, None]
        Rij += self.last_offset
        return Rij


def periodic_cell(atoms):
    """Return the cell [3, 3], with a unit vector normal to the others for each open direction."""
    cell = atoms.cell.copy()
    cell[~atoms.pbc] = 0
    return cell.complete().array


class NeighbourLists:
    """The neighbour lists of the last structures.

    A trajectory needs one list, the images of a band one each. `builds` counts the lists that were
    built.
    """

    def __init__(self, cutoff, skin, device):
        self.cutoff = cutoff
        self.skin = skin
        self.device = device
        self.kept = []
        self.builds = 0

    def of(self, atoms):
        """Return a list with all pairs of `atoms` within the cutoff: one that was kept, or new."""
        for neighbours in self.kept:
            if neighbours.holds(atoms):
                self.kept.remove(neighbours)
                break
        else:
            neighbours = NeighbourList(atoms, self.cutoff, self.skin, self.device)
            self.builds += 1
        self.kept = [neighbours, *self.kept][:kLists]
        while len(self.kept) > 1 and sum(kept.list_neigh.numel() for kept in self.kept) > kSlots:
            self.kept.pop()
        return neighbours


class CalcOps(Calculator):
    """Energy, forces, stress, and the energy and stress of each atom, which add up to the whole.

    The units are those of the model: eV and Angstrom where they are "metal". A calculator can be
    copied and pickled, and works in forked processes. It warns once of a pair shorter than any that
    the model was trained on, and once of more neighbours than the model takes into account.

    Args:
        model: called as model(types, list_neigh, Rij, nghost). It has cutoff, units and type_names
            (chemical symbols).
        skin: a length of at least 0. The lists have pairs up to cutoff + skin.
        device: where a module computes; None: where it is. Another device or dtype makes a copy of
            the module. A package has a fixed device and dtype.
        dtype: in which a module computes; None: its own.

    Raises:
        ValueError: the model has other units or names of types, a package another device or dtype,
            or the skin is no such length.
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]
    ignored_changes = {"initial_charges", "initial_magmoms"}

    def __init__(self, model, skin=0.5, device=None, dtype=None):
        super().__init__()
        if model.units not in ("metal", "lj"):
            raise ValueError(
                f'CalcOps: expected a model with units "metal" or "lj", got {model.units}'
            )
        names = model.type_names
        if len(set(names) & atomic_numbers.keys()) < len(names):
            raise ValueError(
                f"CalcOps: expected chemical symbols as names of types, each once, got {names}"
            )
        if not 0 <= skin < np.inf:  # or NaN
            raise ValueError(f"CalcOps: expected a skin of at least 0, got {skin}")
        own_device, own_dtype = place_of(model)
        self.model = model
        self.device = torch.device(device or own_device)
        self.dtype = dtype or own_dtype
        if (self.device, self.dtype) != (own_device, own_dtype):
            if not isinstance(model, torch.nn.Module):
                raise ValueError(
                    f"CalcOps: expected the package's own {own_device}, {own_dtype}, "
                    f"got {self.device}, {self.dtype}"
                )
            self.model = copy.deepcopy(model).to(self.device, self.dtype)
        self.trained_range = TrainedRange(model)
        self.neighbours = NeighbourLists(model.cutoff, skin, self.device)
        self.type_of = np.full(len(atomic_numbers), -1)
        for number, name in enumerate(names):
            self.type_of[atomic_numbers[name]] = number

    def tensors(self, atoms, frame=""):
        """Return types [n], positions [n, 3], cell [3, 3] and the NeighbourList of atoms."""
        types = self.type_of[atoms.numbers]
        if (types < 0).any():
            raise ValueError(
                f"CalcOps: expected atoms of {self.model.type_names}, got {atoms.symbols}{frame}"
            )
        try:
            neighbours = self.neighbours.of(atoms)
        except ValueError as error:
            raise ValueError(f"CalcOps: {error}{frame}") from None
        return (
            torch.as_tensor(types, device=self.device),
            torch.as_tensor(atoms.positions, device=self.device),
            torch.as_tensor(atoms.cell.array, device=self.device),
            neighbours,
        )

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        """Compute all properties at once: energies in eV, forces in eV/A, stresses in eV/A^3."""
        super().calculate(atoms, properties, system_changes)
        if not has_stress(self.atoms) and {"stress", "stresses"}.intersection(properties):
            raise PropertyNotImplementedError(
                "CalcOps: expected a periodic cell with a volume for the stress, "
                f"got pbc={self.atoms.pbc.tolist()} and cell {self.atoms.cell.tolist()}"
            )
        (self.results,) = self.calculate_batch([self.atoms])

    def calculate_batch(self, structures):
        """Return the results of each structure, dicts like `results`, by one call of the model.

        The model gets all structures as one system, in which only atoms of one structure are
        neighbours. So cells, elements and numbers of atoms may differ.

        Raises:
            ValueError: the model cannot compute a structure, or not with finite results.
        """
        if not structures:
            return []
        frames = [f" in frame {k}" if len(structures) > 1 else "" for k in range(len(structures))]
        parts = [self.part(atoms, frame) for atoms, frame in zip(structures, frames)]
        types, list_neigh, Rij = parts[0] if len(parts) == 1 else joined(parts)
        with threads_for(list_neigh.shape[1]):
            _, *outputs = self.model(types, list_neigh, Rij, 0)

        ends = np.cumsum([len(atoms) for atoms in structures])[:-1]
        energies, forces, _, virials = (
            np.split(x[0].double().cpu().numpy(), ends) for x in outputs
        )
        for frame, *of_one in zip(frames, energies, forces, virials):
            check_finite(*of_one, frame)
        return [results(*of_one) for of_one in zip(structures, energies, forces, virials)]

    def part(self, atoms, frame=""):
        """Return types [n], list_neigh [1, n, K] and Rij [1, n, K, 3] of one structure.

        Args:
            atoms: the structure.
            frame: its name in messages, after what is wrong.

        Raises:
            ValueError: two atoms are in one place, or the model does not have an element.
        """
        types, positions, cell, neighbours = self.tensors(atoms, frame)
        list_neigh = neighbours.list_neigh
        Rij = neighbours.detached_pair_vectors(positions, cell)
        x, y, z = Rij.unbind(-1)
        is_zero = (list_neigh >= 0) & (x == 0) & (y == 0) & (z == 0)
        if is_zero.any():
            _, i, slot = is_zero.nonzero()[0].tolist()
            j = list_neigh[0, i, slot].item()
            raise ValueError(
                "CalcOps: expected atoms apart from one another, "
                f"got atoms {i} and {j} in one place{frame}"
            )
        self.trained_range.check(types, list_neigh, Rij)
        if not getattr(self.model, "skips_far_pairs", False):
            list_neigh, Rij = near_pairs(list_neigh, Rij, self.neighbours.cutoff)
        return types, list_neigh, Rij.to(self.dtype)


def joined(parts):
    """Return types [n], list_neigh [1, n, K] and Rij [1, n, K, 3] of several structures as one."""
    slots = max(list_neigh.shape[2] for _, list_neigh, _ in parts)
    types = []
    lists = []
    vectors = []
    first = 0
    for part_types, list_neigh, Rij in parts:
        missing = slots - list_neigh.shape[2]
        own_list = torch.where(list_neigh < 0, -1, list_neigh + first)
        types.append(part_types)
        lists.append(pad(own_list, [0, missing], value=-1))
        vectors.append(pad(Rij, [0, 0, 0, missing]))
        first += len(part_types)
    return torch.cat(types), torch.cat(lists, 1), torch.cat(vectors, 1)


@contextlib.contextmanager
def threads_for(natoms):
    """Give PyTorch at most one thread for each kAtomsAThread atoms.

    With fewer atoms, threads wait for one another longer than they compute, above all on a busy
    machine.
    """
    threads = torch.get_num_threads()
    enough = max(1, min(threads, natoms // kAtomsAThread))
    if enough < threads:
        torch.set_num_threads(enough)
    try:
        yield
    finally:
        if enough < threads:
            torch.set_num_threads(threads)


def check_finite(energies, forces, atom_virials, frame):
    """Raise ValueError if the model has given a number that is not finite to an atom."""
    named = {"energy": energies, "force": forces, "virial": atom_virials}
    for name, values in named.items():
        is_wrong = ~np.isfinite(values).all(tuple(range(1, values.ndim)))
        if is_wrong.any():
            i = is_wrong.argmax()
            raise ValueError(
                "CalcOps: expected finite results of the model, "
                f"got the {name} {values[i].tolist()} of atom {i}{frame}"
            )


def results(atoms, energies, forces, atom_virials):
    """Return a dict of ASE's properties. Only a periodic cell with a volume has stresses."""
    properties = {
        "energy": energies.sum(),
        "free_energy": energies.sum(),
        "energies": energies,
        "forces": forces,
    }
    if has_stress(atoms):
        stresses = full_3x3_to_voigt_6_stress(-atom_virials / atoms.get_volume())
        properties["stresses"] = stresses
        properties["stress"] = stresses.sum(0)
    return properties


def has_stress(atoms):
    """Return True if `atoms` are periodic and have a volume, which is more than rounding."""
    return atoms.pbc.any() and atoms.cell.volume > 1e-12 * atoms.cell.lengths().prod()


def place_of(model):
    """Return device and dtype of a module's numbers, or of a package."""
    if not isinstance(model, torch.nn.Module):
        return torch.device(model.device), model.dtype
    numbers = (x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point())
    number = next(numbers, torch.zeros((), dtype=torch.float64))
    return number.device, number.dtype
