"""An ASE calculator over any model with the interface of ../potentials/potential.py, with a neighbour list that lives.

atoms.calc = CalcOps(StillingerWeber())                # or CalcOps(load("silicon.pt2")), of ../potentials/package.py
"""

import numpy as np
import torch
import vesin
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes, compare_atoms
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress


class NeighbourList:
    """All pairs within cutoff + skin, in padded rows; found anew only when an atom has moved by more than half the
    skin since, or when cell, periodicity or elements changed. `builds` counts how often.

    list_neigh [1,n,K]: int64, -1 in empty slots; shift [1,n,K,3]: the cells that lie between i and its neighbour."""

    def __init__(self, cutoff, skin, device="cpu"):
        self.finder = vesin.NeighborList(cutoff=cutoff + skin, full_list=True, sorted=True)
        self.skin, self.device = skin, device
        self.atoms, self.builds = None, 0

    def holds(self, atoms):
        others = ["positions", "initial_charges", "initial_magmoms"]
        if compare_atoms(self.atoms, atoms, excluded_properties=others):
            return False
        moved = np.linalg.norm(atoms.positions - self.atoms.positions, axis=1)
        return moved.max(initial=0) <= self.skin / 2

    def update(self, atoms):
        if self.holds(atoms):
            return
        i, j, S = self.finder.compute(atoms.positions, atoms.cell.array, atoms.pbc, "ijS")
        i = i.astype(np.int64)
        count = np.bincount(i, minlength=len(atoms))
        slot = np.arange(len(i)) - (count.cumsum() - count)[i]
        shape = 1, len(atoms), max(1, count.max(initial=0))
        list_neigh, shift = np.full(shape, -1), np.zeros((*shape, 3))
        list_neigh[0, i, slot], shift[0, i, slot] = j, S
        self.list_neigh, self.shift = (torch.from_numpy(x).to(self.device) for x in (list_neigh, shift))
        self.atoms, self.builds = atoms.copy(), self.builds + 1

    def pair_vectors(self, positions, cell):
        """Rij [1,n,K,3] for tensors positions [n,3] and cell [3,3], float64; differentiable in both."""
        return positions[self.list_neigh.clamp(min=0)] - positions[:, None] + self.shift @ cell


class CalcOps(Calculator):
    """Energy, forces, stress and what each atom has of energy and stress (each sums to the whole), in the model's
    units: eV and Angstrom where they are "metal".

    model   called as model(types, list_neigh, Rij, nghost); has cutoff, units, type_names (chemical symbols). A module
            is moved to device and dtype; what package.load() returns has its own dtype
    skin    a length: the list reaches so far beyond the cutoff
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]

    def __init__(self, model, skin=0.5, device="cpu", dtype=None, **parameters):
        super().__init__(**parameters)
        if model.units not in ("metal", "lj"):
            raise ValueError(f'CalcOps: expected a model with units "metal" or "lj", got {model.units}')
        self.dtype = dtype or getattr(model, "dtype", torch.float64)
        self.model = model.to(device, self.dtype) if isinstance(model, torch.nn.Module) else model
        self.neighbours = NeighbourList(model.cutoff, skin, device)
        self.type_of = np.full(len(atomic_numbers), -1)
        self.type_of[[atomic_numbers[name] for name in model.type_names]] = range(len(model.type_names))

    def tensors(self, atoms):
        """types [n], positions [n,3] and cell [3,3] for this model; the list is brought up to date."""
        types = self.type_of[atoms.numbers]
        if (types < 0).any():
            raise ValueError(f"CalcOps: expected atoms of {self.model.type_names}, got {atoms.symbols}")
        self.neighbours.update(atoms)
        arrays = types, atoms.positions, atoms.cell.array
        return [torch.as_tensor(x, device=self.neighbours.device) for x in arrays]

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        periodic = self.atoms.pbc.any() and self.atoms.cell.rank == 3
        if not periodic and {"stress", "stresses"}.intersection(properties):
            raise PropertyNotImplementedError(
                f"CalcOps: expected a periodic cell with a volume for the stress, got pbc={self.atoms.pbc.tolist()} "
                f"and {self.atoms.cell.rank} cell vectors"
            )
        types, positions, cell = self.tensors(self.atoms)
        Rij = self.neighbours.pair_vectors(positions, cell).to(self.dtype)
        energy, energies, forces, virial, atom_virial = (
            x[0].double().cpu().numpy() for x in self.model(types, self.neighbours.list_neigh, Rij, 0)
        )
        self.results = {"energies": energies, "forces": forces}
        self.results["energy"] = self.results["free_energy"] = energy.item()
        if periodic:
            volume = self.atoms.get_volume()
            self.results["stress"] = full_3x3_to_voigt_6_stress(-virial / volume)
            self.results["stresses"] = full_3x3_to_voigt_6_stress(-atom_virial / volume)
