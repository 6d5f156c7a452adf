"""Labelled frames from files: what ASE reads, and DeePMD-kit's folders of .npy.

    images = read(["water.extxyz", "deepmd/data"], {"energy": "dft_energy"})
    frames = frames_of(images, ["H", "O"])

Units are ASE's: eV, A, and for stress eV/A^3, positive under tension. A virial is in eV, and equals
-stress * volume.

Two kinds of labels are completed or dropped, as programs and published sets write them. The force
on the atom of a frame of one atom is zero, if it is absent. A stress of exactly zero, as of a
cluster, counts as not computed.
"""

import io
import os
import re
from itertools import chain
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian
from ase.data import atomic_numbers
from ase.db import connect
from ase.io.extxyz import key_val_str_to_dict
from ase.io.formats import UnknownFileTypeError, filetype, open_with_compression
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

# The columns of frames["weights"], by the label before _weight. A bare weight is of all labels.
kColumnsOf = {"energy": (0,), "forces": (1,), "stress": (2,), "virial": (2,)}
kAllColumns = (0, 1, 2)

# What an extended xyz file calls the cell and the columns of the atoms, by names in lower case.
# ASE changes names of species: CA, a carbon atom of proteins, to Ca. Under another name of the
# column it does not.
kStructure = {"lattice": "Lattice", "pbc": "pbc", "properties": "Properties"}
kSpecies = "names of species"
kColumns = {
    "species": kSpecies,
    "symbols": kSpecies,
    "pos": "pos",
    "positions": "pos",
    "z": "Z",
    "numbers": "Z",
}

# Python reads 1_0 as 10. With this character in place of _, it is no number.
kJoint = "\u203f"

# Arrays of DeePMD-kit that change the model or the loss.
kRefused = ("spin", "fparam", "aparam", "atom_pref", "numb_copy")

# Largest difference between the virial and -stress * volume in eV/atom, as in GPUMD.
kVirialTolerance = 1e-3


def read(paths, keys=None):
    """Return the frames [Atoms] of files and folders, in their order.

    Args:
        paths: files that ASE reads, and folders of DeePMD-kit.
        keys: the names in the files of the labels energy, forces, stress and virial, where they are
            not those of kLabels.

    Raises:
        ValueError: a path does not exist, cannot be read or has no frames, or a label is ambiguous.
    """
    all_images = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"expected a file or a folder of frames, got {path}")
        try:
            images = read_folder(path) if path.is_dir() else read_file(path)
        except UnknownFileTypeError:
            raise ValueError(f"expected a file of a format of ASE, got {path}") from None
        except Exception as error:  # of ASE's many formats
            reason = restored(str(error) or type(error).__name__)
            raise ValueError(f"cannot read {path}: {reason}") from None
        if not images:
            raise ValueError(f"expected frames, got none in {path}")
        for number, image in enumerate(images):
            image.info["source"] = f"{path}, frame {number}"
            relabel(image, keys or {})
        all_images += images
    return all_images


def read_file(path):
    """Return the frames of a file that ASE reads.

    Those of ASE's databases have the data and the key-value pairs of their row as their info.
    """
    kind = filetype(str(path))
    if kind == "extxyz":
        return read_extxyz(path)
    if kind not in ("db", "json"):
        return ase.io.read(path, ":")
    images = []
    for row in connect(str(path), serial=True).select():
        image = row.toatoms()
        image.info = {**row.data, **row.key_value_pairs}
        images.append(image)
    return images


def read_extxyz(path):
    """Return the frames of an extended xyz file, such as GPUMD's train.xyz.

    Raises:
        ValueError: a number, the cell, the periodicity or a chemical symbol is wrong.
    """
    with open_with_compression(path) as file:
        text = re.sub(r"_(?<=\d_)(?=\d)", kJoint, file.read())
    images = ase.io.read(io.StringIO(text), ":", format="extxyz", properties_parser=comment_of)
    for image in images:
        image.info = {restored(name): restored(value) for name, value in image.info.items()}
        if kSpecies in image.arrays:
            symbols = image.arrays.pop(kSpecies)
            unknown = sorted(set(symbols) - atomic_numbers.keys())
            if unknown:
                raise ValueError(f"expected chemical symbols, got {', '.join(unknown)}")
            image.symbols = symbols
    return images


def restored(value):
    """Return a text with its _, or a value that is no text."""
    return value.replace(kJoint, "_") if isinstance(value, str) else value


def comment_of(line):
    """Return the dict of a frame's second line. ASE's names of the structure may have any case.

    Raises:
        ValueError: the cell, the periodicity or the columns are wrong.
    """
    values = key_val_str_to_dict(line)
    comment = {kStructure.get(name.lower(), name): value for name, value in values.items()}
    if len(comment) < len(values):
        raise ValueError(f"expected one cell, pbc and Properties, got {', '.join(values)}")
    if "Lattice" in comment:
        lattice = numbers_of("Lattice", comment["Lattice"])
        if lattice.size != 9:
            raise ValueError(f"expected a Lattice of 9 numbers, got {lattice.size}")
        comment["Lattice"] = lattice.reshape(3, 3, order="F")
    periods = np.asarray(comment.get("pbc", True))
    if periods.shape not in ((), (3,)) or periods.dtype.kind not in "bi":
        raise ValueError(f"expected a pbc of three T or F, got {comment['pbc']}")
    columns = str(comment.get("Properties", "species:S:1:pos:R:3")).split(":")
    columns[::3] = [kColumns.get(name.lower(), name) for name in columns[::3]]
    columns[1::3] = [kind.upper() for kind in columns[1::3]]
    if "pos" not in columns or not {kSpecies, "Z"} & set(columns):
        raise ValueError(f"expected species and pos in Properties, got {comment['Properties']}")
    return comment | {"Properties": ":".join(columns)}


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
        label = kLabels.get(name.lower().removeprefix("ref_"))
        if label is None or label in chosen or value is None:
            continue
        if label in names and not is_same(labels[label], value):
            raise ValueError(
                f"expected one value of {label}, got those of {names[label]} and {name} "
                f"in {source_of(image)}; --{label}-key names the right one"
            )
        labels[label] = value
        names[label] = name
    stored = {**results, **image.info, **image.arrays}
    labels |= {label: stored[name] for label, name in keys.items() if name in stored}
    set_labels(image, labels)
    is_complete = {"energy", "forces"} <= labels.keys()  # else other_names lists the names
    if is_complete and not {"stress", "virial"} & (labels.keys() | chosen):
        advice = "--stress-key or --virial-key names it, or a name that no frame has"
        refuse_unread(image, "stress", ("stress", "virial"), advice)
    if not image.cell.any():
        refuse_unread(image, "cell", ("lattice", "cell", "box"), "its name is Lattice")


def source_of(image):
    """Return the file and the number of a frame, for messages."""
    return image.info.get("source", "a frame")


def is_same(first, second):
    """Return True if two values of a label are the same numbers, but for rounding."""
    first, second = np.ravel(first), np.ravel(second)
    is_numeric = first.dtype.kind in "iuf" and second.dtype.kind in "iuf"
    if not is_numeric or first.shape != second.shape:
        return False
    return np.allclose(first, second, rtol=1e-8, atol=1e-6)


def refuse_unread(image, label, words, advice):
    """Raise ValueError if a name in a frame without a label has one of the words."""
    names = [name for name in (*image.info, *image.arrays) if "weight" not in name.lower()]
    likely = sorted(name for name in names if any(word in name.lower() for word in words))
    if likely:
        raise ValueError(
            f"expected the {label} under a name that is read, got {', '.join(likely)} "
            f"in {source_of(image)}; {advice}"
        )


def set_labels(image, labels):
    """Give a frame a calculator that holds these labels.

    Its results are a plain dict, since ASE's own calculators take no virial.
    """
    image.calc = SinglePointCalculator(image)
    image.calc.results = labels


def read_folder(path):
    """Return the frames of all systems of DeePMD-kit in a folder, also of those behind links.

    A system that several links lead to is read once.
    """
    visited = set()
    systems = []
    for folder, subfolders, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            subfolders.clear()  # links may lead in a circle
            continue
        visited.add(real)
        if "type.raw" in files:
            systems.append(Path(folder))
    images = []
    for system in sorted(systems):
        images += read_system(system)
    return images


def read_system(folder):
    """Yield the frames of one system of DeePMD-kit: type.raw, type_map.raw, set.*/*.npy.

    In a system of mixed types, real_atom_types.npy has the types of each frame. A type of -1 is no
    atom.

    Raises:
        ValueError: a file is absent, has another number of rows, or cannot be used.
    """
    if not (folder / "type_map.raw").exists():
        raise ValueError(f"expected the elements of the types, got no {folder}/type_map.raw")
    parts = sorted(folder.glob("set.*"))
    if not parts:
        raise ValueError(f"expected {folder}/set.* with .npy, got none")
    names = np.array((folder / "type_map.raw").read_text().split())
    types = np.loadtxt(folder / "type.raw", dtype=int, ndmin=1)
    is_periodic = not (folder / "nopbc").exists()
    for part in parts:
        arrays = {path.stem: np.load(path) for path in part.glob("*.npy")}
        check_arrays(arrays, len(types), is_periodic, part)
        count = len(arrays["coord"])
        all_types = arrays.get("real_atom_types", np.broadcast_to(types, (count, len(types))))
        for number, types_of_frame in enumerate(all_types):
            is_atom = types_of_frame >= 0
            symbols = symbols_of(types_of_frame[is_atom], names, folder)
            cell = arrays["box"][number].reshape(3, 3) if is_periodic else None
            positions = arrays["coord"][number].reshape(-1, 3)[is_atom]
            atoms = Atoms(symbols, positions, cell=cell, pbc=is_periodic)
            labels = {}
            if "energy" in arrays:
                labels["energy"] = float(np.ravel(arrays["energy"])[number])
            if "force" in arrays:
                labels["forces"] = arrays["force"][number].reshape(-1, 3)[is_atom]
            if "virial" in arrays:
                labels["virial"] = arrays["virial"][number].reshape(3, 3)
            set_labels(atoms, labels)
            yield atoms


def check_arrays(arrays, natoms, is_periodic, folder):
    """Raise ValueError if the arrays of a set of DeePMD-kit cannot be used.

    Args:
        arrays: by their names.
        natoms: the number of atoms in type.raw.
        is_periodic: whether there must be cells.
        folder: the set, for messages.
    """
    for name in ("coord", "box") if is_periodic else ("coord",):
        if name not in arrays:
            raise ValueError(f"expected {folder}/{name}.npy, got none")
    for name in kRefused:
        if name in arrays:
            raise ValueError(f"expected no {name}, which this training cannot use, in {folder}")
    columns = {"real_atom_types": natoms, "energy": 1, "box": 9, "virial": 9}
    columns |= {"coord": 3 * natoms, "force": 3 * natoms}
    count = len(arrays["coord"])
    for name in columns.keys() & arrays.keys():
        shape = arrays[name].shape
        if shape[:1] != (count,) or arrays[name].size != count * columns[name]:
            raise ValueError(
                f"expected {name} [{count}, {columns[name]}], got {list(shape)} in {folder}"
            )


def symbols_of(types, names, folder):
    """Return the chemical symbols of types, which are indices of names.

    Raises:
        ValueError: a type has no name, or its name is no element.
    """
    if len(types) and types.max() >= len(names):
        raise ValueError(f"expected types below {len(names)}, got {types.max()} in {folder}")
    symbols = names[types]
    unknown = sorted(set(symbols) - atomic_numbers.keys())
    if unknown:
        raise ValueError(f"expected chemical symbols, got {', '.join(unknown)} in {folder}")
    return symbols


def elements_of(images):
    """Return the chemical symbols in the frames, by atomic number."""
    symbols = set()
    for image in images:
        symbols.update(image.symbols)
    return sorted(symbols, key=atomic_numbers.get)


def is_lone_atom(image):
    """Return True for a frame of one atom without neighbours, such as MACE's IsolatedAtom."""
    is_named = image.info.get("config_type") == "IsolatedAtom"
    return len(image) == 1 and (is_named or not image.pbc.any())


def labels_of(image):
    """Return energy, forces [n, 3] and virial [3, 3] of a frame; NaN for an absent stress.

    Raises:
        ValueError: energy or forces are absent, a label is not a number, or the atoms or the cell
            cannot be those of a frame.
    """
    results = dict(image.calc.results) if image.calc else {}
    source = source_of(image)
    check_structure(image, source)
    if len(image) == 1:
        results.setdefault("forces", np.zeros((1, 3)))
    for name in ("energy", "forces"):
        if name not in results:
            raise ValueError(
                f"expected energies and forces, got none of {name} in {source}{other_names(image)}"
            )
    energy = numbers_of("energy", results["energy"], source)
    if energy.size != 1:
        raise ValueError(f"expected an energy, got {energy.size} numbers in {source}")
    forces = numbers_of("forces", results["forces"], source)
    if forces.shape != (len(image), 3):
        raise ValueError(f"expected forces [{len(image)}, 3], got {list(forces.shape)} in {source}")
    check_fixed(image, forces, source)
    virial = virial_of(image, results, source)
    check_finite(source, energy, forces, 0.0 if virial is None else virial)
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


def check_fixed(image, forces, source):
    """Raise ValueError if all forces on fixed atoms are 0, as ASE's `get_forces` returns them."""
    free = np.ones_like(forces)
    for constraint in image.constraints:
        if isinstance(constraint, (FixAtoms, FixCartesian)):
            constraint.adjust_forces(image, free)
    is_fixed = free == 0
    if is_fixed.any() and forces.any() and not forces[is_fixed].any():
        raise ValueError(
            f"expected the forces on fixed atoms, got zeros in {source}; in ASE, "
            "get_forces(apply_constraint=False) returns them"
        )


def numbers_of(name, value, source="the second line of a frame"):
    """Return the numbers of a value as float64.

    Raises:
        ValueError: they are text, truth values or nothing.
    """
    numbers = np.array(value)
    if numbers.dtype.kind not in "iuf":
        words = restored(" ".join(str(value).split()))
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
        if label.any():
            full = voigt_6_to_full_3x3_stress(label.ravel()) if label.size == 6 else label
            tensors[name] = full.reshape(3, 3)
    if "stress" not in tensors:
        return tensors.get("virial")
    if image.cell.rank < 3:
        raise ValueError(f"expected a cell with a volume for the stress, got none in {source}")
    virial = -tensors["stress"] * image.get_volume()
    difference = np.abs(tensors.get("virial", virial) - virial).max() / len(image)
    if not difference <= kVirialTolerance:
        raise ValueError(
            f"expected a virial of -stress * volume, got {difference:.3g} eV/atom beside it "
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
    forces_weight and stress_weight or virial_weight, all with or without MACE's config_.

    Raises:
        ValueError: a name of a weight has another form, or its value is negative or no number.
    """
    source = source_of(image)
    given = {}
    for name in weight_names(image):
        label = name.lower().removeprefix("config_").removesuffix("weight").removesuffix("_")
        columns = kColumnsOf.get(kLabels.get(label)) if label else kAllColumns
        if columns is None:
            raise ValueError(
                "expected weights of the name weight, energy_weight, forces_weight or "
                f"stress_weight, got {name} in {source}"
            )
        weight = numbers_of(name, (image.info | image.arrays)[name], source)
        if weight.size != 1 or not 0 <= weight < np.inf:
            words = " ".join(str(weight).split())
            raise ValueError(f"expected a number from 0 on, got {name} {words:.60} in {source}")
        if given.setdefault(columns, weight) != weight:
            names = ", ".join(weight_names(image))
            raise ValueError(f"expected one weight of each label, got {names} in {source}")
    weights = np.ones(3)
    for columns, weight in given.items():
        weights[list(columns)] *= weight
    return weights


def weight_names(image):
    """Return the names in a frame that are those of weights."""
    return sorted(name for name in {*image.info, *image.arrays} if "weight" in name.lower())


def weights_in_words(images):
    """Return the range of the weights of frames and their names; "" if there are none."""
    names = sorted({name for image in images for name in weight_names(image)})
    if not names:
        return ""
    weights = np.array([weights_of(image) for image in images])
    return f"{weights.min():g} to {weights.max():g} ({', '.join(names)})"


def other_names(image):
    """Return the end of a sentence that lists what else a frame has: names for --energy-key."""
    usual = {"source", "numbers", "positions"}
    results = image.calc.results if image.calc else {}
    names = sorted({*image.info, *image.arrays, *results} - usual - kLabels.keys())
    if not names:
        return ""
    return f", which has {', '.join(names)}; --energy-key and --forces-key name the labels"


def frames_of(images, type_names):
    """Return the dict of frames that trainer.Data takes, padded to the largest one.

    types [F, n] int64, -1 where there is no atom; positions and force [F, n, 3]; cells and virial
    [F, 3, 3]; pbc [F, 3]; energy [F]; weights [F, 3] of energy, force and virial. The virial of a
    frame without stress is NaN.

    Raises:
        ValueError: an element is not one of `type_names`, or a label is wrong.
    """
    n = max(map(len, images))
    frames = {
        "types": torch.full((len(images), n), -1),
        "positions": torch.zeros(len(images), n, 3, dtype=torch.float64),
        "force": torch.zeros(len(images), n, 3, dtype=torch.float64),
        "cells": torch.zeros(len(images), 3, 3, dtype=torch.float64),
        "virial": torch.zeros(len(images), 3, 3, dtype=torch.float64),
        "pbc": torch.zeros(len(images), 3, dtype=torch.bool),
        "energy": torch.zeros(len(images), dtype=torch.float64),
        "weights": torch.ones(len(images), 3, dtype=torch.float64),
    }
    for b, image in enumerate(images):
        unknown = sorted(set(image.symbols) - set(type_names))
        if unknown:
            source = image.info.get("source", f"frame {b}")
            raise ValueError(
                f"expected {', '.join(type_names)}, got {', '.join(unknown)} in {source}"
            )
        energy, forces, virial = labels_of(image)
        count = len(image)
        types = [type_names.index(symbol) for symbol in image.symbols]
        frames["types"][b, :count] = torch.tensor(types)
        frames["positions"][b, :count] = torch.from_numpy(image.positions)
        frames["force"][b, :count] = torch.from_numpy(forces)
        frames["cells"][b] = torch.from_numpy(image.cell.array)
        frames["virial"][b] = torch.from_numpy(virial)
        frames["pbc"][b] = torch.from_numpy(image.pbc)
        frames["energy"][b] = energy
        frames["weights"][b] = torch.from_numpy(weights_of(image))
    return frames
