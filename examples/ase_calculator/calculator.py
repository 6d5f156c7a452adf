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
import vesin
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress
from calcops.potentials.blocks import near_pairs
from torch.nn.functional import pad

# The threads of GNU OpenMP do not survive a fork: the first parallel loop of a child would wait for
# them for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

kAtomsAThread = 100
kLists, kSlots = 16, 1 << 23  # most lists kept, and slots in them: 32 bytes each


class NeighbourList:
    """All pairs of `atoms` within cutoff + skin, in padded rows.

    list_neigh [1,n,K]: int64, -1 in empty slots.
    shift [1,n,K,3]: the cells that lie between i and its neighbour.
    """

    def __init__(self, atoms, cutoff, skin, device):
        finder = vesin.NeighborList(cutoff=cutoff + skin, full_list=True, sorted=True)
        i, j, S = finder.compute(atoms.positions, atoms.cell.array, atoms.pbc, "ijS")
        i = i.astype(np.int64)
        count = np.bincount(i, minlength=len(atoms))
        slot = np.arange(len(i)) - (count.cumsum() - count)[i]
        shape = 1, len(atoms), max(1, count.max(initial=0))
        list_neigh, shift = np.full(shape, -1), np.zeros((*shape, 3))
        list_neigh[0, i, slot] = j
        shift[0, i, slot] = S
        self.list_neigh = torch.from_numpy(list_neigh).to(device)
        self.shift = torch.from_numpy(shift).to(device)
        self.neighbours = self.list_neigh.clamp(min=0).flatten()
        self.cutoff, self.skin = cutoff, skin
        self.positions, self.cell, self.pbc = (
            atoms.positions.copy(),
            periodic_cell(atoms),
            atoms.pbc.copy(),
        )

    def holds(self, atoms):
        """Whether the list still has every pair within the cutoff.

        A pair that it lacks was farther apart than cutoff + skin. The deformation of the cell
        leaves at least its least singular value times that, and the moves of the atoms beside it
        take off at most twice the farthest. A move that all atoms share does not count.
        """
        if len(atoms) != len(self.positions) or (atoms.pbc != self.pbc).any() or len(atoms) == 0:
            return False
        deformation = np.linalg.solve(self.cell, periodic_cell(atoms))
        moves = atoms.positions - self.positions @ deformation
        farthest = np.linalg.norm(moves - moves.mean(0), axis=1).max()
        least = np.linalg.svd(deformation, compute_uv=False)[-1]
        return (self.cutoff + self.skin) * least - 2 * farthest >= self.cutoff

    def pair_vectors(self, positions, cell):
        """Rij [1,n,K,3] for float64 positions [n,3] and cell [3,3]; differentiable in both."""
        neighbours = positions.index_select(0, self.neighbours).view(self.shift.shape)
        return neighbours - positions[:, None] + self.shift @ cell


def periodic_cell(atoms):
    """The cell [3,3]; a direction without period gets a unit vector normal to the others."""
    cell = atoms.cell.copy()
    cell[~atoms.pbc] = 0
    return cell.complete().array


class NeighbourLists:
    """The lists of the structures that were asked for last: a trajectory needs one, the images of a
    band one each. `builds` counts how often a list was found anew.
    """

    def __init__(self, cutoff, skin, device):
        self.cutoff, self.skin, self.device = cutoff, skin, device
        self.kept, self.builds = [], 0

    def of(self, atoms):
        """The list of `atoms`, which is built anew if none that is kept holds."""
        found = next((kept for kept in self.kept if kept.holds(atoms)), None)
        if found is None:
            found, self.builds = (
                NeighbourList(atoms, self.cutoff, self.skin, self.device),
                self.builds + 1,
            )
        others = [kept for kept in self.kept if kept is not found]
        self.kept = [found, *others][:kLists]
        while len(self.kept) > 1 and sum(kept.list_neigh.numel() for kept in self.kept) > kSlots:
            self.kept.pop()
        return found


class CalcOps(Calculator):
    """Energy, forces, stress, and the energy and stress of each atom, which add up to the whole.

    The units are those of the model: eV and Angstrom where they are "metal". A calculator can be
    copied and pickled, and works in forked processes.

    model   called as model(types, list_neigh, Rij, nghost); it has cutoff, units and type_names
            (chemical symbols)
    skin    a length: the lists reach so far beyond the cutoff
    device, dtype   of a module; None: its own. A module that is elsewhere is copied; the caller's
            stays as it is. What package.load() returns has its own
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]
    ignored_changes = {"initial_charges", "initial_magmoms"}

    def __init__(self, model, skin=0.5, device=None, dtype=None):
        super().__init__()
        if model.units not in ("metal", "lj"):
            raise ValueError(
                f'CalcOps: expected a model with units "metal" or "lj", got {model.units}'
            )
        self.model, self.device, self.dtype = model, *place_of(model)
        wanted = torch.device(device or self.device), dtype or self.dtype
        if wanted != (self.device, self.dtype):
            if not isinstance(model, torch.nn.Module):
                raise ValueError(
                    f"CalcOps: expected the package's own {self.device}, {self.dtype}, got {wanted}"
                )
            self.model, (self.device, self.dtype) = copy.deepcopy(model).to(*wanted), wanted
        self.neighbours = NeighbourLists(model.cutoff, skin, self.device)
        self.type_of = np.full(len(atomic_numbers), -1)
        self.type_of[[atomic_numbers[name] for name in model.type_names]] = range(
            len(model.type_names)
        )

    def tensors(self, atoms):
        """types [n], positions [n,3], cell [3,3] and neighbour list of the atoms for this model."""
        types = self.type_of[atoms.numbers]
        if (types < 0).any():
            raise ValueError(
                f"CalcOps: expected atoms of {self.model.type_names}, got {atoms.symbols}"
            )
        arrays = types, atoms.positions, atoms.cell.array
        return *(torch.as_tensor(x, device=self.device) for x in arrays), self.neighbours.of(atoms)

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        """Compute all properties at once: energies in eV, forces in eV/A, stresses in eV/A^3."""
        super().calculate(atoms, properties, system_changes)
        if not has_stress(self.atoms) and {"stress", "stresses"}.intersection(properties):
            raise PropertyNotImplementedError(
                "CalcOps: expected a periodic cell with a volume for the stress, "
                f"got pbc={self.atoms.pbc.tolist()} and {self.atoms.cell.rank} cell vectors"
            )
        (self.results,) = self.calculate_batch([self.atoms])

    def calculate_batch(self, structures):
        """The results of each structure, dicts like `results`, by one call of the model.

        The model sees a single system whose parts have no neighbours in common. The structures may
        therefore differ in everything.
        """
        if not structures:
            return []
        parts, first = [], 0
        for atoms in structures:
            types, positions, cell, neighbours = self.tensors(atoms)
            list_neigh = torch.where(neighbours.list_neigh < 0, -1, neighbours.list_neigh + first)
            vectors = neighbours.pair_vectors(positions, cell)
            if ((list_neigh >= 0) & (vectors == 0).all(-1)).any():
                _, i, slot = ((list_neigh >= 0) & (vectors == 0).all(-1)).nonzero()[0].tolist()
                j = neighbours.list_neigh[0, i, slot].item()
                raise ValueError(
                    "CalcOps: expected atoms apart from one another, "
                    f"got atoms {i} and {j} in one place"
                )
            if not getattr(self.model, "skips_far_pairs", False):
                list_neigh, vectors = near_pairs(list_neigh, vectors, self.neighbours.cutoff)
            parts.append((types, list_neigh, vectors.to(self.dtype)))
            first += len(atoms)
        types, lists, vectors = zip(*parts)
        slots = max(x.shape[2] for x in lists)
        list_neigh = torch.cat([pad(x, [0, slots - x.shape[2]], value=-1) for x in lists], 1)
        Rij = torch.cat([pad(x, [0, 0, 0, slots - x.shape[2]]) for x in vectors], 1)
        with threads_for(list_neigh.shape[1]):
            _, *outputs = self.model(torch.cat(types), list_neigh, Rij, 0)
        ends = np.cumsum([len(atoms) for atoms in structures])[:-1]
        energies, forces, _, virials = (
            np.split(x[0].double().cpu().numpy(), ends) for x in outputs
        )
        return [results(*of_one) for of_one in zip(structures, energies, forces, virials)]


@contextlib.contextmanager
def threads_for(natoms):
    """At most one of PyTorch's threads for each kAtomsAThread atoms.

    Threads that wait for one another take longer than few atoms, and much longer on a machine with
    other work.
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


def results(atoms, energies, forces, atom_virials):
    """What ASE calls them; virials only become stresses in a periodic cell with a volume."""
    found = {
        "energy": energies.sum(),
        "free_energy": energies.sum(),
        "energies": energies,
        "forces": forces,
    }
    if has_stress(atoms):
        found["stresses"] = full_3x3_to_voigt_6_stress(-atom_virials / atoms.get_volume())
        found["stress"] = found["stresses"].sum(0)
    return found


def has_stress(atoms):
    """Return True if `atoms` are periodic and have a volume."""
    return atoms.pbc.any() and atoms.cell.rank == 3


def place_of(model):
    """device and dtype of a module's numbers, or of a package."""
    if not isinstance(model, torch.nn.Module):
        return torch.device(model.device), model.dtype
    numbers = (x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point())
    number = next(numbers, torch.zeros((), dtype=torch.float64))
    return number.device, number.dtype
