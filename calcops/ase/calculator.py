"""An ASE calculator over any model with the interface of ../potentials/potential.py.

It keeps its neighbour lists until atoms have moved too far for them.

    atoms.calc = CalcOps(StillingerWeber())
    atoms.calc = CalcOps(load("silicon.pt2"))       # load() of ../potentials/package.py
"""

import contextlib
import copy
import hashlib
import os
from functools import partial

import numpy as np
import torch
from calcops.ase.neighbour_lists import NeighbourLists
from calcops.ase.trained_range import TrainedRange
from torch.nn.functional import pad

from ase import Atoms
from ase.calculators.calculator import (
    Calculator,
    Parameters,
    PropertyNotImplementedError,
    all_changes,
)
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress

# The threads of GNU OpenMP do not survive a fork: the first parallel loop of a child would wait for
# them for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

kAtomsAThread = 100  # with fewer, threads wait for one another
kDeviations = ["energy_deviation", "force_deviation"]


class CalcOps(Calculator):
    """Energy, forces, stress, and the energy and stress of each atom, which add up to the whole.

    The units are those of the model: eV and Angstrom where they are "metal". A calculator can be
    copied and pickled, and works in forked processes. It warns once of a pair shorter than any that
    the model was trained on, and once of more neighbours than the model takes into account.

    A committee has two more properties, the standard deviations of its models, `model` among them:
    `energy_deviation` in eV, and `force_deviation` [n] in eV/A, the root of the mean square
    distance of the forces on an atom from their mean.

    Args:
        model: called as model(types, list_neigh, Rij, nghost). It has cutoff, units and type_names
            (chemical symbols).
        skin: a length of at least 0. The lists have pairs up to cutoff + skin.
        device: where a module computes; None: where it is. Another device or dtype makes a copy of
            the module. A package has a fixed device and dtype.
        dtype: in which a module computes; None: its own.
        committee: more models of the same elements. They are called for the deviations alone.

    Raises:
        ValueError: the model has other units or names of types, a package another device or dtype,
            or the skin is no such length.
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress", "stresses"]

    def __init__(self, model, skin=0.5, device=None, dtype=None, committee=()):
        super().__init__()
        if not hasattr(model, "type_names"):
            raise ValueError(
                "CalcOps: expected a model, such as calcops.potentials.load or calcops.nep.load "
                f"gives, got {model!r}"
            )
        if hasattr(committee, "type_names"):
            raise ValueError("CalcOps: expected a list of models as the committee, got one model")
        if model.units not in ("metal", "lj"):
            raise ValueError(
                f'CalcOps: expected a model with units "metal" or "lj", got {model.units}'
            )
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
        self.type_of = types_of_elements(model.type_names).numpy()
        self.parameters = Parameters(
            model=str(getattr(model, "path", type(model).__name__)),
            type_names=list(model.type_names),
            cutoff=model.cutoff,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
        )
        self.weights_seen = None
        self.committee = [CalcOps(other, skin, device, dtype) for other in committee]
        self.set(skin=skin)
        if committee:
            self.implemented_properties = self.implemented_properties + kDeviations
            self.parameters["committee"] = [other.parameters for other in self.committee]

    def set(self, **options):
        """Change the skin, and forget the neighbour lists. Return what has changed.

        Raises:
            ValueError: another option, which needs a new calculator, or no such length.
        """
        if options.keys() - {"skin"}:
            raise ValueError(f"CalcOps.set: expected skin, got {', '.join(options)}")
        if not options or options["skin"] == self.parameters.get("skin"):
            return {}
        skin = checked_skin(options["skin"])
        self.parameters["skin"] = skin
        for other in self.committee:
            other.set(skin=skin)
        self.neighbours = NeighbourLists(self.model.cutoff, skin, self.device)
        return options

    def todict(self, skip_default=True):
        """Return the parameters, and a digest of the model that tells it from others."""
        parameters = super().todict(skip_default)
        if isinstance(self.model, torch.nn.Module):
            digest = hashlib.sha256()
            for name, tensor in self.model.state_dict().items():
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().numpy().tobytes())
            return {**parameters, "digest": digest.hexdigest()[:16]}
        if hasattr(self.model, "digest"):
            return {**parameters, "digest": self.model.digest[:16]}
        return parameters

    def check_state(self, atoms, tol=1e-15):
        """Return what has changed since the last calculation. ASE's own comparison is slow.

        Parameters of a module that an optimizer has changed count as a change of everything.
        """
        last = self.atoms
        if last is None or self.weights() != self.weights_seen:
            return list(all_changes)
        same_numbers = np.array_equal(last.numbers, atoms.numbers)
        same = {
            "positions": same_numbers and (last.positions == atoms.positions).all(),
            "numbers": same_numbers,
            "cell": (last.cell.array == atoms.cell.array).all(),
            "pbc": (last.pbc == atoms.pbc).all(),
        }
        return [name for name, is_same in same.items() if not is_same]

    def weights(self):
        """Return the versions of all parameters of modules, which PyTorch counts."""
        versions = [other.weights() for other in self.committee]
        if isinstance(self.model, torch.nn.Module):
            for parameter in self.model.parameters():
                versions.append(0 if parameter.is_inference() else parameter._version)
        return versions

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        """Compute all properties at once: energies in eV, forces in eV/A, stresses in eV/A^3."""
        super().calculate(atoms, properties, system_changes)
        self.results = {}  # so that none is left of other atoms if this call fails
        if not has_volume(self.atoms) and {"stress", "stresses"}.intersection(properties):
            raise PropertyNotImplementedError(
                "CalcOps: expected a cell with a volume for the stress, "
                f"got cell {self.atoms.cell.tolist()}"
            )
        self.weights_seen = self.weights()
        (self.results,) = self.calculate_batch([self.atoms])
        if set(kDeviations).intersection(properties):
            self.results.update(self.deviations())

    def deviations(self):
        """Return the two deviations of the committee for the atoms of the last calculation."""
        others = [other.calculate_batch([self.atoms])[0] for other in self.committee]
        members = [self.results, *others]
        energies = np.array([member["energy"] for member in members])
        forces = np.array([member["forces"] for member in members])
        return {
            "energy_deviation": energies.std(),
            "force_deviation": np.sqrt(forces.var(0).sum(-1)),
        }

    def get_descriptors(self, atoms):
        """Return the descriptors [n, dim] of atoms, as a NEP computes them."""
        return self.internal("descriptors", atoms)

    def get_latent_space(self, atoms):
        """Return the outputs [n, neurons] of a NEP's hidden layer for atoms, times w1."""
        return self.internal("latent", atoms)

    def internal(self, name, atoms):
        """Return what a function of the model, other than its results, computes for each atom."""
        if not hasattr(self.model, name):
            raise PropertyNotImplementedError(
                f"CalcOps: expected a model with {name}, as calcops.nep.load gives, "
                f"got {self.parameters.model}"
            )
        return getattr(self.model, name)(*self.pairs(atoms)).detach().double().cpu().numpy()

    def calculate_batch(self, structures):
        """Return the results of each structure, dicts like `results`, by one call of the model.

        The model gets all structures as one system, in which only atoms of one structure are
        neighbours. So cells, elements and numbers of atoms may differ.

        Raises:
            ValueError: the model cannot compute a structure, or not with finite results.
        """
        if isinstance(structures, Atoms):
            raise ValueError("CalcOps: expected a list of structures, got one")
        if not structures:
            return []
        if len(structures) == 1:
            frames = [""]
            types, list_neigh, Rij = self.pairs(structures[0])
        else:
            frames = [f" in frame {k}" for k in range(len(structures))]
            parts = [self.pairs(atoms, k) for k, atoms in enumerate(structures)]
            types, list_neigh, Rij = joined(parts)
        compute = getattr(self.model, "of_near_pairs", self.model)
        with threads_for(list_neigh.shape[1]):
            _, *outputs = compute(types, list_neigh, Rij, 0)

        energies, forces, _, virials = (x[0].double().cpu().numpy() for x in outputs)
        results = []
        first = 0
        for atoms, frame in zip(structures, frames):
            own = slice(first, first + len(atoms))
            check_finite(energies[own], forces[own], virials[own], frame)
            results.append(properties_of(atoms, energies[own], forces[own], virials[own]))
            first = own.stop
        return results

    def pairs(self, atoms, frame=None):
        """Return types [n], list_neigh [1, n, K] and Rij [1, n, K, 3] within the cutoff.

        Args:
            atoms: the structure.
            frame: its number in a batch.

        Raises:
            ValueError: two atoms are in the same place, or the model does not have an element.
        """
        where = "" if frame is None else f" in frame {frame}"
        types = self.type_of[atoms.numbers]
        if (types < 0).any():
            names = self.model.type_names
            raise ValueError(
                f"CalcOps: expected atoms of {names if len(names) < 10 else 'the model'}, "
                f"got {' '.join(sorted(set(atoms.symbols[types < 0])))}{where}"
            )
        try:
            if frame is None:
                neighbours = self.neighbours.of(atoms)
            else:
                neighbours = self.neighbours.of_frame(atoms, frame)
        except ValueError as error:
            raise ValueError(f"CalcOps: {error}{where}") from None
        near, Rij, count, nearest = neighbours.near_pairs(atoms)
        if len(atoms) > 0 and nearest.min() == 0:
            is_zero = (near >= 0) & (Rij.square().sum(-1) == 0)
            i, slot = is_zero.nonzero()[0].tolist()
            raise ValueError(
                "CalcOps: expected atoms in different places, "
                f"got atoms {i} and {near[i, slot]} in the same place{where}"
            )
        types = torch.as_tensor(types, device=self.device)
        self.trained_range.check(types, near, Rij, count, nearest)
        return types, near[None], Rij[None].to(self.dtype)


def types_of_elements(names):
    """Return the type [119] of each atomic number, -1 without one, for chemical symbols of types.

    Raises:
        ValueError: a name is no symbol, or occurs twice.
    """
    if len(set(names) & atomic_numbers.keys()) < len(names):
        raise ValueError(
            f"CalcOps: expected chemical symbols as names of types, each once, got {names}"
        )
    type_of = torch.full((len(atomic_numbers),), -1)
    for number, name in enumerate(names):
        type_of[atomic_numbers[name]] = number
    return type_of


def checked_skin(skin):
    """Return a skin. Raise ValueError if it is no length of at least 0."""
    if not 0 <= skin < np.inf:  # or NaN
        raise ValueError(f"CalcOps: expected a skin of at least 0, got {skin}")
    return skin


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
        if np.isfinite(values).all():
            continue
        i = np.isfinite(values).reshape(len(values), -1).all(1).argmin()
        raise ValueError(
            "CalcOps: expected finite results of the model, "
            f"got the {name} {values[i].tolist()} of atom {i}{frame}"
        )


def properties_of(atoms, energies, forces, atom_virials):
    """Return a dict of ASE's properties. Only a cell with a volume has stresses."""
    energy = energies.sum()
    properties = {"energy": energy, "free_energy": energy, "energies": energies, "forces": forces}
    if has_volume(atoms):
        stresses = full_3x3_to_voigt_6_stress(-atom_virials / atoms.get_volume())
        properties["stresses"] = stresses
        properties["stress"] = stresses.sum(0)
    return properties


def has_volume(atoms):
    """Return True if the cell of `atoms` has a volume, which is more than rounding."""
    return atoms.cell.volume > 1e-12 * atoms.cell.lengths().prod()


def place_of(model):
    """Return device and dtype of a module's numbers, or of a package."""
    if not isinstance(model, torch.nn.Module):
        return torch.device(model.device), model.dtype
    numbers = (x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point())
    number = next(numbers, torch.zeros((), dtype=torch.float64))
    return number.device, number.dtype
