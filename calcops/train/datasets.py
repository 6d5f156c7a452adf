"""Labelled frames from files: what ASE reads, and DeePMD-kit's folders of .npy.

    images = read(["water.extxyz", "deepmd/data"], {"energy": "dft_energy"})
    frames = frames_of(images, ["H", "O"])

labels.py has the names and the units of the labels.
"""

import io
import os
import re
from itertools import islice
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.data import atomic_numbers
from ase.db import connect
from ase.io.extxyz import key_val_str_to_dict
from ase.io.formats import UnknownFileTypeError, filetype, open_with_compression
from calcops.train.labels import (
    kLabels,
    labels_of,
    names_of,
    numbers_of,
    relabel,
    set_labels,
    weights_of,
)

# What an extended xyz file calls the cell and the columns of the atoms, by names in lower case.
# ASE changes names of species: CA, a carbon atom of proteins, to Ca. Under another name of the
# column it does not.
kStructure = {"lattice": "Lattice", "pbc": "pbc", "periodic": "pbc", "properties": "Properties"}
kSpecies = "names of species"
kColumns = {
    "species": kSpecies,
    "symbols": kSpecies,
    "pos": "pos",
    "positions": "pos",
    "z": "Z",
    "numbers": "Z",
}

kXyzName = re.compile(r"\.(ext)?xyz(\.gz|\.bz2|\.xz)?$", re.IGNORECASE)

# The second line of a frame: what stands between delimiters or behind a backslash, and a name with
# its value. A value with one of the last names has swallowed it.
kQuoted = re.compile(r"""\\.|"(\\.|[^"\\])*"|'(\\.|[^'\\])*'|\{(\\.|[^}\\])*\}|\[(\\.|[^]\\])*\]""")
kPair = re.compile(r"([^\s=]+)((?:\s*=\s*[^\s=]*)*)")
kSwallowed = re.compile(r"(lattice|pbc|properties|energy|virial|stress|weight)\s*=", re.IGNORECASE)

# Python reads 1_0 as 10. With this character in place of _, it is no number.
kJoint = "\u203f"

# Arrays of DeePMD-kit that change the model or the loss, and words of labels under other names.
kRefused = (
    *("spin", "fparam", "aparam", "atom_pref", "numb_copy"),
    *("energy", "force", "virial", "stress", "weight", "cell", "box"),
)


def read(paths, keys=None, has_all_keys=True):
    """Return the frames [Atoms] of files and folders, in their order.

    Args:
        paths: files that ASE reads, and folders of DeePMD-kit.
        keys: the names in the files of the labels energy, forces, stress and virial, where they are
            not those of kLabels, in any case. The name none is that of no label.
        has_all_keys: False if the frames may lack a name of `keys`.

    Raises:
        ValueError: a path does not exist, cannot be read or has no frames, a label is ambiguous, or
            no frame has a name of `keys`.
    """
    keys = keys or {}
    names = set()
    all_images = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"expected a file or a folder of frames, got {path}")
        try:
            images = read_folder(path) if path.is_dir() else read_file(path)
        except UnknownFileTypeError:
            raise ValueError(f"expected a file of a format of ASE, got {path}") from None
        except Exception as error:  # of ASE's many formats
            reason = str(error) or type(error).__name__
            raise ValueError(f"cannot read {path}: {reason}") from None
        if not images:
            raise ValueError(f"expected frames, got none in {path}")
        for number, image in enumerate(images):
            names |= {name.lower() for name in names_of(image)}
            image.info["source"] = f"{path}, frame {number}"
            relabel(image, keys)
        all_images += images
    for label, name in keys.items():
        if kLabels.get(name.lower(), label) != label:
            raise ValueError(f"expected a name of the {label}, got {name}")
        if has_all_keys and name.lower() not in names | {"none"}:
            others = ", ".join(sorted(names))
            raise ValueError(f"expected {name}, the name of the {label}, in a frame, got {others}")
    return all_images


def read_file(path):
    """Return the frames of a file that ASE reads.

    Those of ASE's databases have the data and the key-value pairs of their row as their info.
    """
    # ASE reads OUTCAR.xyz as an OUTCAR.
    kind = "extxyz" if kXyzName.search(path.name) else filetype(str(path))
    if kind == "extxyz":
        return read_extxyz(path)
    if kind not in ("db", "json"):
        return ase.io.read(path, ":", do_not_split_by_at_sign=True)
    images = []
    for row in connect(str(path), serial=True).select():
        image = row.toatoms()
        image.info = {**row.data, **row.key_value_pairs}
        images.append(image)
    return images


def read_extxyz(path):
    """Return the frames of an extended xyz file, such as GPUMD's train.xyz.

    Raises:
        ValueError: a frame cannot be read.
    """
    images = []
    with open_with_compression(path) as file:
        for line in file:
            count = line.removeprefix("\ufeff").strip()
            try:
                if count:  # ASE ends the file at a blank line
                    images.append(read_frame(count, file))
            except Exception as error:  # of ASE, too
                reason = str(error).replace(kJoint, "_")
                raise ValueError(f"frame {len(images)}: {reason}") from None
    return images


def read_frame(count, lines):
    """Return a frame of an extended xyz file from its first line and an iterator of the others.

    Raises:
        ValueError: the number of atoms, the second line, a number or a chemical symbol is wrong.
    """
    if not count.isdecimal():
        raise ValueError(f"expected a number of atoms, got {count:.60}")
    structure, info = comment_of(next(lines, "").strip())
    rows = list(islice(lines, int(count)))
    if not all(map(str.strip, rows)):
        raise ValueError(f"expected {count} atoms, got an empty line")
    atoms = "".join(rows)
    atoms = re.sub(r"(?<=\d)_(?=\d)", kJoint, atoms)
    text = io.StringIO(f"{count}\nstructure\n{atoms}")
    image = ase.io.read(text, format="extxyz", properties_parser=lambda _: structure)
    image.info = info
    if kSpecies in image.arrays:
        symbols = image.arrays.pop(kSpecies)
        unknown = sorted(set(symbols) - atomic_numbers.keys())
        if unknown:
            raise ValueError(f"expected chemical symbols, got {', '.join(unknown)}")
        image.symbols = symbols
    return image


def comment_of(line):
    """Return cell, pbc and columns in a frame's second line, by ASE's names, and the other values.

    Raises:
        ValueError: the cell, the periodicity or the columns are wrong, or a name is ambiguous.
    """
    comment = pairs_of(line)
    structure = {name: comment.pop(name) for name in {*kStructure.values()} & comment.keys()}
    if "Lattice" in structure:
        lattice = numbers_of("Lattice", structure["Lattice"])
        if lattice.size != 9:
            raise ValueError(f"expected a Lattice of 9 numbers, got {lattice.size}")
        structure["Lattice"] = lattice.reshape(3, 3, order="F")
    elif {"a", "b", "c"} <= comment.keys():
        raise ValueError("expected a Lattice, got a, b and c")
    periods = np.asarray(structure.get("pbc", True))
    if periods.shape not in ((), (3,)) or not {*periods.ravel().tolist()} <= {False, True}:
        raise ValueError(f"expected a pbc of three T or F, got {structure['pbc']}")
    columns = str(structure.get("Properties", "species:S:1:pos:R:3")).split(":")
    columns[::3] = [kColumns.get(name.lower(), name) for name in columns[::3]]
    columns[1::3] = [kind.upper() for kind in columns[1::3]]
    if "pos" not in columns or not {kSpecies, "Z"} & set(columns):
        raise ValueError(f"expected species and pos in Properties, got {structure['Properties']}")
    return structure | {"Properties": ":".join(columns)}, comment


def pairs_of(line):
    """Return the values in a frame's second line by their names.

    Raises:
        ValueError: a delimiter is not closed, a value has swallowed others, or a name has several.
    """
    bare = kQuoted.sub(lambda match: "x" * len(match[0]), line)
    lone = re.search(r"""["'{[]""", bare)
    if lone:
        text = line[lone.start() :]
        raise ValueError(f"expected an end of {text:.60}; a lone {lone[0]} is written \\{lone[0]}")
    comment = {}
    names = {}
    for pair in kPair.finditer(bare):
        name, text = (line[slice(*pair.span(group))] for group in (1, 2))
        if kSwallowed.search(text):
            words = "which has others; a quote that is no delimiter needs a backslash"
            raise ValueError(f"expected one value, got {name}{text:.60}, {words}")
        value = key_val_str_to_dict(f"value{text}")["value"]
        if isinstance(value, (np.generic, np.ndarray)) and re.search(r"\d_\d", text):
            value = text.strip(" =\"'")  # Python reads 1_0 as 10
        name = kStructure.get(name.lower(), name)
        first = comment.setdefault(names.setdefault(name.lower(), name), value)
        if first is not value and not np.array_equal(first, value):
            raise ValueError(f"expected one value of {name}, got {first} and {value}")
    return comment


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
    columns = {"real_atom_types": natoms, "energy": 1, "box": 9, "virial": 9}
    columns |= {"coord": 3 * natoms, "force": 3 * natoms}
    for name in sorted(arrays.keys() - columns.keys()):
        if any(word in name.lower() for word in kRefused):
            raise ValueError(f"expected no {name}, which this training cannot use, in {folder}")
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


def frames_of(images, type_names):
    """Return the dict of frames that trainer.Data takes, padded to the largest one.

    types [F, n] int64, -1 where there is no atom; positions and force [F, n, 3]; cells and virial
    [F, 3, 3]; pbc [F, 3]; energy [F]; weights [F, 3] of energy, force and virial. The virial of a
    frame without stress is NaN, and so is a label whose weight is 0.

    Raises:
        ValueError: an element is not one of `type_names`, a label is wrong, or all weights are 0.
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
        weights = weights_of(image)
        energy, forces, virial = labels_of(image, weights)
        count = len(image)
        types = [type_names.index(symbol) for symbol in image.symbols]
        frames["types"][b, :count] = torch.tensor(types)
        frames["positions"][b, :count] = torch.from_numpy(image.positions)
        frames["force"][b, :count] = torch.from_numpy(forces)
        frames["cells"][b] = torch.from_numpy(image.cell.array)
        frames["virial"][b] = torch.from_numpy(virial)
        frames["pbc"][b] = torch.from_numpy(image.pbc)
        frames["energy"][b] = energy
        frames["weights"][b] = torch.from_numpy(weights)
    if not frames["weights"].any():
        raise ValueError("expected a weight above 0, got 0 in all frames")
    return frames
