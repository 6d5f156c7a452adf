"""Structures of ASE, and the arguments that models take of them."""

import torch
from ase import Atoms
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from calcops.potentials import Potential
from calcops.potentials.neighbours import neighbours, pair_vectors


class Morse(Potential):
    """An energy as a user writes it, of copper's cutoff and bond length."""

    def __init__(self):
        super().__init__(4.5, "metal", ["Cu", "Au"])

    def atom_energies(self, types, list_neigh, Ri):
        r = Ri[..., 0]
        energy = (1 - torch.exp(-1.5 * (r - 2.6))).square() - 1
        return torch.where(r < 4.5, energy * (4.5 - r).square(), 0.0).sum(-1) / 2


def atoms_of(structure, names):
    """Return the atoms of a dictionary with types, positions and a cell, which may be None."""
    symbols = [names[t] for t in structure["types"]]
    cell = structure["cell"]
    return Atoms(symbols, positions=structure["positions"], cell=cell, pbc=cell is not None)


def labelled(atoms, labels=("energy", "forces", "stress"), calculator=None):
    """Return the atoms with labels, by EMT unless told otherwise."""
    atoms.calc = calculator or EMT()
    results = {name: atoms.calc.get_property(name, atoms) for name in labels}
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def inputs_of(structure, model, skin=0.5):
    """Return types, list_neigh and Rij of atoms, or of a dictionary of atoms_of."""
    atoms = structure if isinstance(structure, Atoms) else atoms_of(structure, model.type_names)
    types = torch.tensor([model.type_names.index(symbol) for symbol in atoms.symbols])
    positions, cell, pbc = (
        torch.from_numpy(array)[None] for array in (atoms.positions, atoms.cell.array, atoms.pbc)
    )
    list_neigh, shift = neighbours(positions, cell, model.cutoff + skin, pbc=pbc)
    return types, list_neigh, pair_vectors(positions, list_neigh, shift)
