"""Check what any ASE calculator promises: its forces, its stress and its symmetries.

from calcops.check import check

check(calculator, atoms)                        # AssertionError if a check fails

calcops check module:calculator structure.cif   # the same as a command
"""

import argparse
import heapq
import importlib.util
import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import ase.io
import numpy as np
from ase import units
from ase.build import bulk
from ase.md.verlet import VelocityVerlet
from ase.neighborlist import neighbor_list
from ase.stress import full_3x3_to_voigt_6_stress, voigt_6_to_full_3x3_stress

kAtoms = 8  # a periodic structure with fewer is repeated, because forces in a primitive cell are 0
kElements = 4  # most elements of which an atom leaves its neighbours
kReach = 15.0  # A, as far as it goes
kPoints = 1500  # most places on this way
kPrecision = 1e-6  # of equal results, relative to the largest force or stress
kRepeat = 1e-3  # at most, of the same structure computed twice
kJump = 3e-4  # of a force at a cutoff, relative to the largest on the way
kLeast = 1e-12  # eV, eV/A, eV/A^3: the bound of numbers that are 0
kNoises = 30  # standard deviations of the noise that are allowed besides
kUnits = {"energy": "eV", "free_energy": "eV", "forces": "eV/A", "stress": "eV/A^3"}
kBugs = ArithmeticError, AttributeError, LookupError, TypeError  # no calculator refuses by them
kOther = "small cell", "cutoff"  # checks of other structures, which a calculator may refuse
kVoigt = "xx", "yy", "zz", "yz", "xz", "xy"


class Skipped(Exception):
    """A check does not apply. The message says why."""


@dataclass
class Result:
    """The result of a check.

    Attributes:
        name: of the check.
        value: how far two numbers are apart that should be equal; None: not checked.
        bound: how far they may be apart.
        message: what was compared, and the unit; or why it was not checked.
    """

    name: str
    value: float | None
    bound: float | None
    message: str

    @property
    def failed(self):
        """Return True if the value is beyond the bound, or is NaN."""
        return self.value is not None and not self.value <= self.bound

    def __str__(self):
        """Return a line."""
        if self.value is None:
            return f"skip  {self.name:12}  {self.message}"
        status = "FAIL" if self.failed else "pass"
        sign = ">" if self.failed else "<="
        return (
            f"{status}  {self.name:12}  {self.value:.1e} {sign:2} {self.bound:.1e} {self.message}"
        )


def check(calculator, atoms, only=None, seed=0, plot=None):
    """Check a calculator, and return the Result of each check.

    Args:
        calculator: of ASE, with energy and forces. Stress and energies of atoms are checked if it
            has them.
        atoms: a structure that it computes: a molecule, slab or crystal. A copy is moved at random.
        only: the names of the checks to run; None: all, which call the calculator some 1000 times.
        seed: of the random moves.
        plot: a path, to which a picture of the energy in dynamics is written; None: no picture.

    Returns:
        [Result]. One whose value is None was not checked, and its message says why.

    Raises:
        AssertionError: a check has failed. The message has a line for each check.
        OSError: the picture cannot be written.
        ValueError: the calculator does not compute the structure, or there is no such check.
    """
    results = list(run_checks(calculator, atoms, only, seed, plot))
    failed = [result.name for result in results if result.failed]
    if failed:
        lines = "\n".join(map(str, results))
        raise AssertionError(f"the calculator fails {', '.join(failed)}:\n{lines}")
    return results


def run_checks(calculator, atoms, only=None, seed=0, plot=None):
    """Yield the Result of each check as soon as it is known. See check() for the arguments."""
    names = kChecks if only is None else only
    unknown = set(names) - set(kChecks)
    if unknown:
        raise ValueError(f"expected checks of {', '.join(kChecks)}, got {', '.join(unknown)}")
    if plot and "drift" not in names:
        raise ValueError(f"expected the check drift for a plot, got {', '.join(names)}")
    checks = Checks(calculator, atoms, seed)
    for name in names:
        # The same numbers, whichever checks run.
        checks.random = np.random.default_rng([seed, list(kChecks).index(name)])
        try:
            result = kChecks[name](checks)
        except Skipped as reason:
            result = None, None, str(reason)
        except NotImplementedError as error:
            result = None, None, f"not implemented: {sentence(error)}"
        except Exception as error:
            message = f"{type(error).__name__}: {sentence(error)}"
            if name in kOther and not isinstance(error, kBugs):
                result = None, None, f"refused by {message}"
            else:
                result = np.inf, 0.0, f"raised {message}"
        value, bound, message = result
        if value is None:
            yield Result(name, None, None, message)
        else:
            yield Result(name, float(value), float(bound), message)
    if plot and checks.curves:
        draw(checks.curves, len(checks.atoms), plot)


class Checks:
    """A calculator, and a structure that is like the given one but has no symmetry.

    The methods that kChecks names return a value, its bound and a message, or raise Skipped.

    Attributes:
        reference: {name of kUnits: array}, the properties of the structure.
        noise: {name: standard deviation of the rounding}.
        bounds: {name: how far equal properties may be apart}.
        energies: the names of the energies. Forces are derivatives of the last.
        curves: {time step: total energies} of the dynamics.
        has_changed_atoms: whether the calculator has changed a structure.
    """

    def __init__(self, calculator, atoms, seed):
        if len(atoms) == 0:
            raise ValueError("expected a structure with atoms, got none")
        self.calculator = calculator
        self.curves = {}
        self.has_changed_atoms = False
        self.random = np.random.default_rng(seed)
        is_free = "free_energy" in getattr(calculator, "implemented_properties", ())
        self.energies = ["energy", "free_energy"] if is_free else ["energy"]
        self.atoms = self.shaken(atoms)
        self.no_stress = ""
        try:
            self.reference = self.first_properties()
            self.noise = self.measured_noise()
        except Exception as error:
            raise ValueError(
                f"expected a calculator that computes {atoms.symbols}, "
                f"got {type(error).__name__}: {sentence(error)}"
            ) from error
        self.bounds = self.bounds_of(self.atoms, self.reference)

    def shaken(self, atoms):
        """Return a copy of at least kAtoms atoms, moved at random, with a strained cell."""
        atoms = atoms.copy()
        atoms.set_constraint()
        while len(atoms) < kAtoms and atoms.pbc.any():
            atoms = doubled(atoms)
        P = periodic_projection(atoms)
        atoms = strained(atoms, 0.01 * P @ self.random.standard_normal((3, 3)) @ P)
        atoms.positions += 0.05 * self.random.standard_normal(atoms.positions.shape)
        return atoms

    def properties(self, atoms, names=None):
        """Return {name: array} of a structure. Without names, those of the reference.

        Raises:
            FloatingPointError: a property is not finite.
        """
        given = atoms
        atoms = atoms.copy()
        atoms.calc = self.calculator
        functions = {
            "energy": atoms.get_potential_energy,
            "free_energy": lambda: atoms.get_potential_energy(force_consistent=True),
            "forces": atoms.get_forces,
            "stress": atoms.get_stress,
        }
        # A copy, because a calculator may use its arrays again.
        properties = {name: np.array(functions[name](), float) for name in names or self.reference}
        for name, values in properties.items():
            if not np.isfinite(values).all():
                raise FloatingPointError(f"{name} not finite")
        self.has_changed_atoms |= atoms != given
        return properties

    def energy(self, atoms):
        """Return the energy whose derivatives the forces are."""
        name = self.energies[-1]
        return self.properties(atoms, [name])[name].item()

    def first_properties(self):
        """Return the properties of the structure, and set no_stress to why there is no stress."""
        properties = self.properties(self.atoms, [*self.energies, "forces"])
        if not self.atoms.pbc.any() or self.atoms.cell.rank < 3:
            self.no_stress = "the structure has no periodic cell with a volume"
        else:
            try:
                properties |= self.properties(self.atoms, ["stress"])
            except NotImplementedError as error:
                self.no_stress = f"not implemented: {sentence(error)}"
        return properties

    def measured_noise(self):
        """Return {name: standard deviation} of the noise of each property.

        A smooth function has no 4th difference over steps as short as these, so that only the noise
        is left (J. J. More and S. M. Wild, Estimating computational noise, SIAM J. Sci. Comput. 33,
        1292 (2011)). A calculator that begins with its last result computes another structure
        before each point. Where energies repeat, a step changes them by less than their rounding:
        the steps grow, and the least change is the unit to which they are rounded. The lesser of
        two lines counts, because a pair may cross a cutoff.
        """
        shape = self.atoms.positions.shape
        lines = []
        for _ in range(2):
            direction = self.random.standard_normal(shape)
            for step in 1e-5 * 2.0 ** np.arange(10):
                points = []
                for k in range(9):
                    self.energy(moved(self.atoms, self.random.uniform(-0.1, 0.1, shape)))
                    points.append(self.properties(moved(self.atoms, step * k * direction)))
                energies = [[point[name] for name in self.energies] for point in points]
                changes = abs(np.diff(energies, axis=0)).min(0)
                if changes.all():
                    break
            line = {}
            for name in self.reference:
                differences = np.diff([point[name] for point in points], 4, axis=0)
                line[name] = np.sqrt(np.mean(differences**2) / 70)
            if step > 1e-5:
                for name, change in zip(self.energies, changes):
                    line[name] = max(line[name], change / 12**0.5)
            lines.append(line)
        return {name: min(line[name] for line in lines) for name in self.reference}

    def bounds_of(self, atoms, properties, precision=kPrecision, noises=kNoises):
        """Return {name: how far equal properties of a structure may be apart}.

        Args:
            atoms: the structure.
            properties: its properties.
            precision: the part that is relative to the largest force or stress.
            noises: the part that is relative to the noise.
        """
        forces = properties["forces"]
        scales = dict.fromkeys(self.energies, np.linalg.norm(forces))
        scales["forces"] = abs(forces).max()
        if "stress" in properties:
            scales["stress"] = abs(properties["stress"]).max()
            for name in self.energies:
                scales[name] += atoms.get_volume() * scales["stress"]
        return {
            name: precision * scale + noises * self.noise[name] + kLeast
            for name, scale in scales.items()
        }

    def compared(self, properties, message, expected=None, bounds=None):
        """Return the difference of a property that is largest for its bound, and the message."""
        expected = expected or self.reference
        bounds = bounds or self.bounds
        errors = {name: abs(properties[name] - expected[name]).max() for name in expected}
        worst = max(errors, key=lambda name: ratio(errors[name], bounds[name]))
        return errors[worst], bounds[worst], f"{kUnits[worst]}, {worst} {message}"

    def repeat(self):
        """Compute structures in a row, and each again after one that is far away.

        In the row, the cell alone changes, then the elements alone: a cache that does not compare
        them returns the last result. Then each atom walks 1 A in a direction of its own: a
        neighbour list that is kept for too long lacks pairs, if any come within the cutoff.
        """
        other_cell = self.atoms.copy()
        other_cell.set_cell(1.01 * self.atoms.cell.array)
        other_elements = other_cell.copy()
        other_elements.numbers = np.roll(self.atoms.numbers, 1)
        row = [self.atoms, other_cell, other_elements]
        for _ in range(2):
            way = self.random.standard_normal(self.atoms.positions.shape)
            way /= np.linalg.norm(way, axis=1, keepdims=True)
            row += [moved(self.atoms, 0.07 * k * way) for k in range(15)]
        far = strained(self.atoms, 0.2 * np.eye(3))

        self.energy(far)
        expectations = [self.properties(atoms) for atoms in row]
        largest = self.bounds_of(self.atoms, self.reference, kRepeat, noises=0)
        results = []
        for atoms, expected in zip(row, expectations):
            self.energy(far)
            of_noise = self.bounds_of(atoms, expected)
            bounds = {name: min(of_noise[name], largest[name]) for name in expected}
            again = self.properties(atoms)
            results.append(self.compared(again, "computed again", expected, bounds))
        if self.has_changed_atoms:
            return np.inf, 0.0, "the calculator changes the atoms"
        return worst(results)

    def sums(self):
        """Compare the sum of the energies of atoms with the energy."""
        atoms = self.atoms.copy()
        atoms.calc = self.calculator
        if "energies" not in getattr(self.calculator, "implemented_properties", ()):
            raise Skipped("not implemented: the energies of atoms")
        error = abs(atoms.get_potential_energies().sum() - atoms.get_potential_energy())
        return error, self.bounds["energy"], "eV, the sum of the atoms' energies against the energy"

    def forces(self):
        """Compare forces with differences of the energy along random directions."""
        results = []
        for _ in range(3):
            direction = self.random.standard_normal(self.atoms.positions.shape)
            expected, error = self.slope(
                lambda step, d=direction: self.energy(moved(self.atoms, step * d))
            )
            actual = -np.sum(self.reference["forces"] * direction)
            bound = error + self.bounds["forces"] * np.linalg.norm(direction)
            results.append((abs(actual - expected), bound))
        return *worst(results), "eV/A, forces against differences of the energy"

    def stress(self):
        """Compare the stress with differences of the energy by strain, over the volume."""
        stress = self.needed_stress()
        volume = self.atoms.get_volume()
        P = periodic_projection(self.atoms)
        expected = np.zeros(6)
        errors = np.zeros(6)
        actual = np.zeros(6)
        for k in range(6):
            strain = P @ voigt_6_to_full_3x3_stress(np.eye(6)[k] * [1, 1, 1, 0.5, 0.5, 0.5]) @ P
            actual[k] = np.sum(strain * voigt_6_to_full_3x3_stress(stress))
            # A fourth of the step, which would be a large strain.
            derivative, error = self.slope(
                lambda step, e=strain: self.energy(strained(self.atoms, step / 4 * e))
            )
            expected[k] = 4 * derivative / volume
            errors[k] = 4 * error / volume
        bounds = errors + self.bounds["stress"]
        differences = abs(actual - expected)
        worst = max(range(6), key=lambda k: ratio(differences[k], bounds[k]))
        message = f"eV/A^3, {kVoigt[worst]} against differences of the energy"
        if differences[worst] > bounds[worst]:
            message += mistake(stress, expected, volume)
        return differences[worst], bounds[worst], message

    def needed_stress(self):
        """Return the stress. Raise Skipped if there is none."""
        if self.no_stress:
            raise Skipped(self.no_stress)
        return self.reference["stress"]

    def slope(self, function):
        """Return the derivative of an energy at 0, and its error, by differences.

        Formulas of sixth order are tried with ever shorter steps. Long steps leave the range in
        which the function is a polynomial, and short ones amplify its noise. The step counts at
        which the slope changes least.
        """
        steps = 0.08 / 2.0 ** np.arange(10)
        slopes = np.array([(function(step) - function(-step)) / (2 * step) for step in steps])
        for factor in (4, 16):  # each removes the next order of the error
            slopes = (factor * slopes[1:] - slopes[:-1]) / (factor - 1)
        changes = abs(np.diff(slopes))
        rounding = self.noise[self.energies[-1]] / steps[3:-1]
        errors = 5 * (np.maximum(changes[1:], changes[:-1]) + rounding)
        best = errors.argmin()
        return slopes[best + 1], errors[best]

    def permutation(self):
        """Compute the atoms in another order."""
        order = self.random.permutation(len(self.atoms))
        properties = self.properties(self.atoms[order])
        properties["forces"] = properties["forces"][order.argsort()]
        return self.compared(properties, "of permuted atoms")

    def rotation(self):
        """Rotate cell and atoms."""
        Q = np.linalg.qr(self.random.standard_normal((3, 3)))[0]
        Q *= np.sign(np.linalg.det(Q))
        rotated = self.atoms.copy()
        rotated.set_cell(self.atoms.cell.array @ Q.T)
        rotated.positions = self.atoms.positions @ Q.T
        properties = self.properties(rotated)
        properties["forces"] = properties["forces"] @ Q
        if "stress" in properties:
            stress = voigt_6_to_full_3x3_stress(properties["stress"])
            properties["stress"] = full_3x3_to_voigt_6_stress(Q.T @ stress @ Q)
        return self.compared(properties, "of a rotated structure")

    def translation(self):
        """Move all atoms together, and wrap them into the cell."""
        shifted = moved(self.atoms, self.random.uniform(-5, 5, 3))
        shifted.wrap()
        return self.compared(self.properties(shifted), "of a translated structure")

    def wrapping(self):
        """Move atoms by cell vectors, out of the cell."""
        images = self.random.integers(-2, 3, self.atoms.positions.shape) * self.needed_periodicity()
        outside = moved(self.atoms, images @ self.atoms.cell.array)
        return self.compared(self.properties(outside), "of atoms outside the cell")

    def needed_periodicity(self):
        """Return which directions are periodic. Raise Skipped if none is."""
        if not self.atoms.pbc.any():
            raise Skipped("no direction is periodic")
        return self.atoms.pbc

    def supercell(self):
        """Compare two cells side by side with one."""
        self.needed_periodicity()
        properties = self.properties(doubled(self.atoms))
        for name in self.energies:
            properties[name] /= 2
        properties["forces"] = properties["forces"][: len(self.atoms)]
        return self.compared(properties, "of two cells")

    def other_vectors(self):
        """Describe the same lattice with other vectors."""
        axes = np.flatnonzero(self.needed_periodicity())
        if len(axes) == 1:
            raise Skipped("only one direction is periodic")
        cell = self.atoms.cell.array.copy()
        i, j = self.random.permutation(axes)[:2]
        cell[i] += cell[j]
        other = self.atoms.copy()
        other.set_cell(cell)
        return self.compared(self.properties(other), "of the same lattice with other vectors")

    def open_vectors(self):
        """Lengthen the cell vectors along which the structure is not periodic."""
        lengthened = self.atoms.cell.array.any(1) & ~self.atoms.pbc
        if not lengthened.any():
            raise Skipped("no cell vector is open")
        other = self.atoms.copy()
        other.set_cell(self.atoms.cell.array * np.where(lengthened, 1.5, 1.0)[:, None])
        properties = self.properties(other)
        if "stress" in properties:
            properties["stress"] *= other.get_volume() / self.atoms.get_volume()
        return self.compared(properties, "in a longer open cell")

    def small_cell(self):
        """Compare an fcc cell of one atom, smaller than the cutoff, with 27 such cells."""
        if not self.atoms.pbc.all():
            raise Skipped("not all directions are periodic")
        results = []
        for number in elements(self.atoms):
            small = self.atoms[self.atoms.numbers == number][:1]
            volume = self.atoms.get_volume() / len(self.atoms)
            small.set_cell(bulk("X", "fcc", a=(4 * volume) ** (1 / 3)).cell)
            large = small.repeat(3)
            expected = self.properties(large)
            properties = self.properties(small)
            bounds = self.bounds_of(large, expected)
            del expected["forces"]  # 0
            for name in self.energies:
                expected[name] /= len(large)
            about = f"of a cell of one {small.symbols}"
            results.append(self.compared(properties, about, expected, bounds))
        return worst(results)

    def cutoff(self):
        """Look for jumps of energy and forces while an atom leaves its neighbours."""
        results = []
        for number in elements(self.atoms):
            cluster, direction = self.cluster(number)
            results.append(self.largest_jump(cluster, direction))
        return worst(results)

    def cluster(self, number):
        """Return an atom of an element with its nearest neighbours, and the way to leave them.

        The neighbours are the two nearest atoms, and the nearest of each element.
        """
        atom = np.flatnonzero(self.atoms.numbers == number)[0]
        i, j, d, D = neighbor_list("ijdD", self.atoms, 6.0)
        pairs = np.flatnonzero(i == atom)
        pairs = pairs[d[pairs].argsort()]
        if len(pairs) == 0:
            raise Skipped(f"atom {atom} has no neighbour within 6 A")
        chosen = list(pairs[:2])
        for element in elements(self.atoms):
            chosen += list(pairs[self.atoms.numbers[j[pairs]] == element][:1])
        chosen = list(dict.fromkeys(chosen))
        cluster = self.atoms[[atom, *j[chosen]]]
        cluster.positions = [[0, 0, 0], *D[chosen]]
        if cluster.pbc.any():
            cluster.set_cell([2 * kReach + 10] * 3)
        direction = -D[chosen].sum(0) + 0.1 * self.random.standard_normal(3)
        return cluster, direction / np.linalg.norm(direction)

    def largest_jump(self, cluster, direction):
        """Return the largest jump of energy or forces while the first atom goes along a direction.

        The part of the way is halved whose middle is farthest from the mean of its ends, until all
        middles are near. In a short part, that is half a jump.
        """
        values = {}
        for x in np.arange(0, kReach + 0.1, 0.25):
            values[x] = self.at(cluster, x * direction)
        scale = max(abs(y[1:]).max() for y in values.values())
        bounds = np.full(1 + 3 * len(cluster), kJump * scale + kLeast)
        bounds[0] += kNoises * self.noise[self.energies[-1]]
        bounds[1:] += kNoises * self.noise["forces"]

        parts = []
        jumps = []

        def add(left, right):
            middle = (left + right) / 2
            values[middle] = self.at(cluster, middle * direction)
            change = 2 * abs(values[middle] - (values[left] + values[right]) / 2)
            worst = int(np.argmax(change / bounds))
            part = -change[worst] / bounds[worst], left, right, worst
            if right - left < 1e-8:
                jumps.append(part)
            else:
                heapq.heappush(parts, part)

        places = sorted(values)
        for left, right in zip(places[:-1], places[1:]):
            add(left, right)
        while -parts[0][0] > 0.5 and len(values) < kPoints:
            _, left, right, _ = heapq.heappop(parts)
            middle = (left + right) / 2
            add(left, middle)
            add(middle, right)

        relative, left, _, worst = min([*jumps, parts[0]])
        positions = np.concatenate([left * direction[None], cluster.positions[1:]])
        distances = np.linalg.norm(positions[1:] - positions[0], axis=1)
        what = "a force" if worst else "the energy"
        away = ", ".join(f"{x:.2f}" for x in distances)
        symbols = cluster.symbols
        message = f"eV{'/A' * bool(worst)}, jump of {what} as {symbols[0]} leaves {symbols[1:]}"
        if relative < -1:
            message += f", {away} A away"
        return -relative * bounds[worst], bounds[worst], message

    def at(self, cluster, position):
        """Return energy and forces [1 + 3 n] with the first atom at a position."""
        cluster = cluster.copy()
        cluster.positions[0] = position
        properties = self.properties(cluster, [self.energies[-1], "forces"])
        return np.concatenate([values.reshape(-1) for values in properties.values()])

    def drift(self):
        """Run dynamics with two time steps: half the step has a quarter of the error in energy."""
        masses = self.atoms.get_masses()[:, None]
        step = 0.5 * masses.min() ** 0.5
        momenta = np.sqrt(300 * units.kB * masses) * self.random.standard_normal((len(masses), 3))
        self.curves = {step / k: self.total_energies(momenta, step / k, 40 * k) for k in (1, 2)}
        coarse, fine = (np.std(energies) for energies in self.curves.values())
        bound = 0.5 * coarse + kNoises * self.noise[self.energies[-1]] + kLeast
        message = f"eV, total energy at steps of {step / 2:.2f} fs, at {step:.2f} fs {coarse:.1e}"
        return fine, bound, message

    def total_energies(self, momenta, step, count):
        """Return the total energy [count + 1] in dynamics, with a time step in fs."""
        atoms = self.atoms.copy()
        atoms.calc = self.calculator
        atoms.set_momenta(momenta)
        energies = []

        def measure():
            energies.append(self.energy(atoms) + atoms.get_kinetic_energy())

        dynamics = VelocityVerlet(atoms, step * units.fs)
        dynamics.attach(measure)
        dynamics.run(count)
        return np.array(energies)


# {name: the method of Checks}
kChecks = {
    "repeat": Checks.repeat,
    "sums": Checks.sums,
    "forces": Checks.forces,
    "stress": Checks.stress,
    "permutation": Checks.permutation,
    "rotation": Checks.rotation,
    "translation": Checks.translation,
    "wrapping": Checks.wrapping,
    "supercell": Checks.supercell,
    "vectors": Checks.other_vectors,
    "open cell": Checks.open_vectors,
    "small cell": Checks.small_cell,
    "cutoff": Checks.cutoff,
    "drift": Checks.drift,
}


def sentence(error):
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def ratio(value, bound):
    """Return a value over its bound; infinity for NaN."""
    return np.nan_to_num(value / bound, nan=np.inf)


def worst(results):
    """Return the tuple of a value, its bound and more whose value is largest for its bound."""
    return max(results, key=lambda result: ratio(*result[:2]))


def elements(atoms):
    """Return the atomic numbers of the first kElements elements of a structure."""
    return list(dict.fromkeys(atoms.numbers))[:kElements]


def moved(atoms, by):
    """Return a copy whose positions have moved by an array."""
    atoms = atoms.copy()
    atoms.positions += by
    return atoms


def doubled(atoms):
    """Return two cells side by side along the shortest periodic vector."""
    lengths = np.where(atoms.pbc, atoms.cell.lengths(), np.inf)
    counts = np.ones(3, int)
    counts[lengths.argmin()] = 2
    return atoms.repeat(counts)


def strained(atoms, strain):
    """Return a copy whose cell and positions are strained by a matrix [3, 3]."""
    atoms = atoms.copy()
    deformation = np.eye(3) + strain
    positions = atoms.positions @ deformation
    atoms.set_cell(atoms.cell.array @ deformation)
    atoms.positions = positions
    return atoms


def periodic_projection(atoms):
    """Return the projection [3, 3] onto the periodic vectors of a cell."""
    Q, _ = np.linalg.qr(atoms.cell.array[atoms.pbc].T)
    return Q @ Q.T


def mistake(stress, expected, volume):
    """Return what a wrong stress may be, or "" if it is like no known mistake."""
    shear = np.array([1, 1, 1, 2, 2, 2])
    candidates = {
        "has the opposite sign": -stress,
        "is not divided by the volume": stress / volume,
        "has half the shear": stress * shear,
        "has twice the shear": stress / shear,
    }
    for order in permutations(range(6)):
        names = [kVoigt[k] for k in np.argsort(order)]
        candidates[f"has the order {' '.join(names)}"] = stress[list(order)]
    for words, candidate in candidates.items():
        if abs(candidate - expected).max() < 0.1 * abs(stress - expected).max():
            return f": the stress {words}"
    return ""


def draw(curves, count, path):
    """Draw total energies of `count` atoms over the time, {time step: energies}, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for step, energies in curves.items():
        changes = (energies - energies[0]) / count * 1000
        axes.plot(step * np.arange(len(energies)), changes, label=f"steps of {step:.2f} fs")
    axes.set(xlabel="time (fs)", ylabel="change of the total energy (meV/atom)")
    axes.legend()
    figure.savefig(path)


def calculator_of(text):
    """Return the calculator that an argument of the command names.

    Args:
        text: module:name, file.py:name or a package of calcops.potentials. What is named is a
            calculator, or a class or function that returns one.

    Raises:
        ValueError: there is none.
    """
    if Path(text).suffix in (".pt2", ".pt"):
        from calcops.ase import CalcOps
        from calcops.potentials import load

        return CalcOps(load(text))
    place, _, name = text.rpartition(":")
    if not place:
        raise ValueError(f"expected module:name, file.py:name or model.pt2, got {text}")
    file = Path(place)
    is_file = file.suffix == ".py"
    sys.path.insert(0, str(file.parent.resolve() if is_file else Path().resolve()))
    try:
        if is_file:
            spec = importlib.util.spec_from_file_location(file.stem, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[file.stem] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        calculator = getattr(module, name)
        if isinstance(calculator, type) or not hasattr(calculator, "get_potential_energy"):
            calculator = calculator()
    except Exception as error:
        raise ValueError(
            f"expected a calculator of {text}, got {type(error).__name__}: {sentence(error)}"
        ) from error
    return calculator


def structure_of(path):
    """Return the Atoms of a file. Raise ValueError if ASE cannot read it."""
    try:
        return ase.io.read(path)
    except Exception as error:
        raise ValueError(
            f"expected a structure that ASE reads, got {path}, {type(error).__name__}: "
            f"{sentence(error)} (ASE knows formats by names such as .cif)"
        ) from error


def main():
    """Run the command. It exits with 1 if a check fails, with 2 if there is nothing to check."""
    parser = argparse.ArgumentParser(prog="calcops check", description=__doc__.splitlines()[0])
    parser.add_argument("calculator", help="module:name, file.py:name, or a package: model.pt2")
    parser.add_argument("structure", help="a file that ASE reads; the last frame counts")
    parser.add_argument("--only", nargs="+", choices=kChecks, help="run only these checks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moves")
    parser.add_argument("--plot", metavar="drift.png", help="plot the energy during dynamics")
    options = parser.parse_args()
    failed = []
    try:
        calculator = calculator_of(options.calculator)
        atoms = structure_of(options.structure)
        for result in run_checks(calculator, atoms, options.only, options.seed, options.plot):
            print(result, flush=True)
            failed += [result.name] * result.failed
    except (OSError, ValueError) as error:
        parser.exit(2, f"calcops check: {error}\n")
    if failed:
        parser.exit(1, f"calcops check: failed: {', '.join(failed)}\n")
