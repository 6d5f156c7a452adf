"""Labels and weights of frames: which names of a file are read, and what their values must be.

    relabel(image, {"energy": "dft_energy"})
    energy, forces, virial = labels_of(image)

Units are ASE's: eV, A, and for stress eV/A^3, positive under tension. A virial is in eV, and equals
-stress * volume. Of both, the symmetric part is read.

Two kinds of labels are completed or dropped, as programs and published sets write them. The force
on the atom of a frame of one atom is zero, if it is absent. A stress of exactly zero, as of a
cluster, counts as not computed.
"""

import re
from itertools import chain

import numpy as np
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixCom, FixSymmetry
from ase.stress import voigt_6_to_full_3x3_stress

# The labels, by their names in files: in lower case, without the REF_ of MACE.
kLabels = {
    "energy": "energy",
    "force": "forces",
    "forces": "forces",
    "stress": "stress",
    "virial": "virial",
    "virials": "virial",
}

# Names of weights, and the columns of frames["weights"] by their label. None is of all labels.
kWeight = re.compile(r"(?:config_)?(energy|forces?|stress|virials?)?_?weights?", re.IGNORECASE)
kColumnsOf = {None: [0, 1, 2], "energy": [0], "forces": [1], "virial": [2]}

# Largest difference between the virial and -stress * volume in eV/atom, as in GPUMD.
kVirialTolerance = 1e-3


def relabel(image, keys):
    """Give a frame its labels under ASE's names, with a calculator that holds them.

    Args:
        image: the frame.
        keys: the names of labels: {"forces": "dft_forces"}. A frame without such a name has no
            such label. With a name of the stress or the virial, the other one is not read.

    Raises:
        ValueError: a label or a cell has several values, or only names that are not read.
    """
    results = dict(image.calc.results) if image.calc else {}
    chosen = set(keys)
    if chosen & {"stress", "virial"}:
        chosen |= {"stress", "virial"}
    labels = {name: value for name, value in results.items() if name not in kLabels}
    names = {}
    for name, value in chain(results.items(), image.info.items(), image.arrays.items()):
        if value is None:
            continue
        meant = [label for label, key in keys.items() if key.lower() == name.lower()]
        usual = kLabels.get(name.lower().removeprefix("ref_"))
        if usual and usual not in chosen:
            meant.append(usual)
        for label in meant:
            if label in names and not is_same(label, labels[label], value):
                raise ValueError(
                    f"expected one value of {label}, got those of {names[label]} and {name} "
                    f"in {source_of(image)}; --{label}-key names the right one"
                )
            labels[label] = value
            names[label] = name
    for name in ("energy", "stress"):  # ASE cannot write both these and the calculator's
        image.info.pop(name, None)
    set_labels(image, labels)
    is_complete = {"energy", "forces"} <= labels.keys()  # else other_names lists the names
    if is_complete and not {"stress", "virial"} & (labels.keys() | chosen):
        advice = "--stress-key or --virial-key names it, or is none"
        refuse_unread(image, "stress", {"stress", "virial", "virials"}, advice)
    if not image.cell.any():
        refuse_unread(image, "cell", {"lattice", "cell", "box", "abc"}, "its name is Lattice")


def set_labels(image, labels):
    """Give a frame a calculator that holds these labels.

    Its results are a plain dict, since ASE's own calculators take no virial.
    """
    image.calc = SinglePointCalculator(image)
    image.calc.results = labels


def source_of(image):
    """Return the file and the number of a frame, for messages."""
    return image.info.get("source", "a frame")


def names_of(image):
    """Return the names of what a frame has beside its atoms, as they are in its file."""
    results = image.calc.results if image.calc else {}
    return {*results, *image.info, *image.arrays} - {"source", "numbers", "positions"}


def is_same(label, first, second):
    """Return True if two values of a label are the same numbers, but for rounding."""
    first, second = np.ravel(first), np.ravel(second)
    if label in ("stress", "virial"):
        first, second = tensor_of(first), tensor_of(second)
    is_numeric = first.dtype.kind in "iuf" and second.dtype.kind in "iuf"
    if not is_numeric or first.shape != second.shape:
        return False
    return np.allclose(first, second, rtol=1e-8, atol=1e-6, equal_nan=True)


def tensor_of(numbers):
    """Return 6 numbers in the order of Voigt, or 9, as a symmetric tensor; others as given."""
    if numbers.size == 6:
        return voigt_6_to_full_3x3_stress(numbers.ravel())
    if numbers.size != 9 or numbers.dtype.kind not in "iuf":
        return numbers
    full = numbers.reshape(3, 3)
    return (full + full.T) / 2


def refuse_unread(image, label, words, advice):
    """Raise ValueError if a frame has 3, 6 or 9 numbers with one of the words in their name."""
    likely = []
    for name, value in sorted(image.info.items()):
        has_word = not words.isdisjoint(re.split("[^a-z]", name.lower()))
        if has_word and np.asarray(value, dtype=object).size in (3, 6, 9):
            likely.append(name)
    if likely:
        raise ValueError(
            f"expected the {label} under a name that is read, got {', '.join(likely)} "
            f"in {source_of(image)}; {advice}"
        )


def labels_of(image, weights):
    """Return energy, forces [n, 3] and virial [3, 3] of a frame; NaN for what is no label.

    That is an absent stress, and what has a weight of 0 in `weights` [3] of the three.

    Raises:
        ValueError: energy or forces are absent, a label is not a number, or the atoms or the cell
            cannot be those of a frame.
    """
    results = dict(image.calc.results) if image.calc else {}
    source = source_of(image)
    check_structure(image, source)
    if len(image) == 1:
        results.setdefault("forces", np.zeros((1, 3)))
    labels = {"energy": np.full(1, np.nan), "forces": np.full((len(image), 3), np.nan)}
    for name, weight in zip([*labels], weights[:2], strict=True):
        if weight == 0:
            continue
        if name not in results:
            raise ValueError(
                f"expected energies and forces, got none of {name} in {source}{other_names(image)}"
            )
        labels[name] = numbers_of(name, results[name], source)
        check_finite(source, labels[name])
    energy, forces = labels.values()
    if energy.size != 1:
        raise ValueError(f"expected an energy, got {energy.size} numbers in {source}")
    if forces.shape != (len(image), 3):
        raise ValueError(f"expected forces [{len(image)}, 3], got {list(forces.shape)} in {source}")
    if weights[1]:
        check_constraints(image, forces, source)
    virial = virial_of(image, results, source) if weights[2] else None
    return energy.item(), forces, np.full((3, 3), np.nan) if virial is None else virial


def check_structure(image, source):
    """Raise ValueError if there is no atom, no element or place of it, or no periodic cell."""
    if len(image) == 0:
        raise ValueError(f"expected atoms, got none in {source}")
    if not image.numbers.all():
        raise ValueError(f"expected elements, got X in {source}")
    check_finite(source, image.positions, image.cell.array)
    periods = image.cell.array[image.pbc]
    if len(periods) and np.linalg.matrix_rank(periods) < len(periods):
        raise ValueError(
            "expected independent cell vectors in periodic directions, "
            f"got {periods.tolist()} in {source}"
        )


def check_finite(source, *arrays):
    """Raise ValueError if a number in the arrays is NaN or infinite."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(f"expected numbers, got NaN or infinity in {source}")


def check_constraints(image, forces, source):
    """Raise ValueError if constraints leave the forces as they are, but would change others.

    The forces are then those that ASE's `get_forces` returns by default.
    """
    others = np.random.default_rng(0).standard_normal(forces.shape)
    is_changed = []
    for given in (forces, others):
        adjusted = given.copy()
        for constraint in image.constraints:
            if type(constraint) not in (FixCom, FixSymmetry):  # which all right forces meet
                constraint.adjust_forces(image, adjusted)
        is_changed.append(np.abs(adjusted - given).max() > 1e-6 * np.abs(given).max())
    if forces.any() and is_changed == [False, True]:
        raise ValueError(
            f"expected the forces without constraints, got those with them in {source}; in ASE, "
            "get_forces(apply_constraint=False) returns them"
        )


def numbers_of(name, value, source="the second line"):
    """Return the numbers of a value as float64.

    Raises:
        ValueError: they are text, truth values or nothing.
    """
    numbers = np.array(value)
    if numbers.dtype.kind not in "iuf":
        words = " ".join(str(value).split())
        raise ValueError(f"expected numbers of {name}, got {words:.60} in {source}")
    return numbers.astype(float)


def virial_of(image, results, source):
    """Return the virial [3, 3] of a frame; None if it has no label of virial or stress.

    Raises:
        ValueError: a label has another number of components, or the two labels differ.
    """
    tensors = {}
    for name, sizes in (("virial", (9,)), ("stress", (6, 9))):
        if name not in results:
            continue
        label = numbers_of(name, results[name], source)
        if label.size not in sizes:
            words = " or ".join(map(str, sizes))
            raise ValueError(f"expected a {name} of {words} numbers, got {label.size} in {source}")
        check_finite(source, label)
        if label.any():
            tensors[name] = tensor_of(label)
    if "stress" not in tensors:
        return tensors.get("virial")
    if not image.cell.volume > 1e-12 * image.cell.lengths().prod():
        raise ValueError(f"expected a cell with a volume for the stress, got none in {source}")
    virial = -tensors["stress"] * image.get_volume()
    difference = np.abs(tensors.get("virial", virial) - virial).max() / len(image)
    if not difference <= kVirialTolerance:
        raise ValueError(
            f"expected a virial of -stress * volume, got one {difference:.3g} eV/atom off "
            f"in {source}; --stress-key or --virial-key names the right one"
        )
    return tensors.get("virial", virial)


def has_zero_stress(image):
    """Return True if a frame has a stress or virial of exactly 0, which counts as no label."""
    results = image.calc.results if image.calc else {}
    labels = [np.asarray(results[name]) for name in ("virial", "stress") if name in results]
    return bool(labels) and not any(label.any() for label in labels)


def weights_of(image):
    """Return the weights [3] of a frame's squared errors of energy, force and virial.

    They are 1, times the number under `weight` in all three, and times those under energy_weight,
    forces_weight and stress_weight or virial_weight, all with or without MACE's config_. If there
    are both of stress_weight and virial_weight, that of the label in the frame is used.

    Raises:
        ValueError: a weight is negative or no number, or a label has several.
    """
    source = source_of(image)
    given = {}
    for name in weight_names(image):
        label = kLabels.get((kWeight.fullmatch(name)[1] or "").lower())
        weight = numbers_of(name, (image.info | image.arrays)[name], source)
        if weight.size != 1 or not 0 <= weight < np.inf:
            words = " ".join(str(weight).split())
            raise ValueError(f"expected a number from 0 on, got {name} {words:.60} in {source}")
        given.setdefault(label, set()).add(weight.item())
    results = image.calc.results if image.calc else {}
    for label in ("stress", "virial"):
        if {"stress", "virial"} <= given.keys() and label not in results:
            del given[label]
    if "stress" in given:
        given.setdefault("virial", set()).update(given.pop("stress"))
    weights = np.ones(3)
    for label, values in given.items():
        if len(values) > 1:
            names = ", ".join(weight_names(image))
            raise ValueError(f"expected one weight of each label, got {names} in {source}")
        weights[kColumnsOf[label]] *= values.pop()
    return weights


def weight_names(image):
    """Return the names in a frame that are those of weights."""
    return sorted(name for name in {*image.info, *image.arrays} if kWeight.fullmatch(name))


def weights_in_words(images):
    """Return the range of the weights of frames and their names; "" if there are none."""
    names = sorted({name for image in images for name in weight_names(image)})
    if not names:
        return ""
    weights = np.array([weights_of(image) for image in images])
    return f"{weights.min():g} to {weights.max():g} ({', '.join(names)})"


def other_names(image):
    """Return the end of a sentence that lists what else a frame has: names for --energy-key."""
    names = sorted(names_of(image) - kLabels.keys())
    if not names:
        return ""
    return f", which has {', '.join(names)}; --energy-key and --forces-key name the labels"
