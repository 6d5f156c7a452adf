"""Labelled frames from files: what ASE reads, and DeePMD-kit's folders of .npy.

    images = read(["water.extxyz", "deepmd/data"], {"energy": "REF_energy"})
    frames = frames_of(images, ["H", "O"])

Units are ASE's: eV, A, and for stress eV/A^3, positive under tension. A virial is in eV, and equals
-stress * volume.

Two kinds of labels are completed or dropped, as programs and published sets write them. The force
on the atom of a frame of one atom is zero, if it is absent. A stress of exactly zero, as of a
cluster, counts as not computed.
"""

import os
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers
from ase.db import connect
from ase.io.formats import filetype
from ase.stress import voigt_6_to_full_3x3_stress


def read(paths, keys=None):
    """Return the frames [Atoms] of files and folders, in their order.

    Args:
        paths: files that ASE reads, and folders of DeePMD-kit.
        keys: the names in the files of the labels energy, forces, stress and virial, where they are
            not those of ASE.

    Raises:
        ValueError: a path does not exist, cannot be read or has no frames.
    """
    all_images = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"expected a file or a folder of frames, got {path}")
        try:
            images = read_folder(path) if path.is_dir() else read_file(path)
            if keys:
                for image in images:
                    relabel(image, keys)
        except Exception as error:  # of ASE's many formats
            raise ValueError(f"cannot read {path}: {error or type(error).__name__}") from None
        if not images:
            raise ValueError(f"expected frames, got none in {path}")
        for number, image in enumerate(images):
            image.info["source"] = f"{path}, frame {number}"
        all_images += images
    return all_images


def read_file(path):
    """Return the frames of a file that ASE reads.

    Those of ASE's databases have the data and the key-value pairs of their row as their info.
    """
    if filetype(str(path)) not in ("db", "json"):
        return ase.io.read(path, ":")
    images = []
    for row in connect(str(path), serial=True).select():
        image = row.toatoms()
        image.info = {**row.data, **row.key_value_pairs}
        images.append(image)
    return images


def relabel(image, keys):
    """Replace the labels of a frame by those of other names: {"forces": "REF_forces"}.

    A frame without such a name has no such label.
    """
    labels = dict(image.calc.results) if image.calc else {}
    stored = labels | image.info | image.arrays
    if "virial" in keys:
        labels.pop("stress", None)
    for label, name in keys.items():
        labels.pop(label, None)
        if name in stored:
            labels[label] = np.asarray(stored[name], float)
    set_labels(image, labels)


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
    """
    names = np.array((folder / "type_map.raw").read_text().split())
    is_periodic = not (folder / "nopbc").exists()
    for part in sorted(folder.glob("set.*")):
        arrays = {path.stem: np.load(path) for path in part.glob("*.npy")}
        count = len(arrays["coord"])
        if "real_atom_types" in arrays:
            all_types = arrays["real_atom_types"]
        else:
            types = np.loadtxt(folder / "type.raw", dtype=int, ndmin=1)
            all_types = np.broadcast_to(types, (count, len(types)))
        for number, types in enumerate(all_types):
            is_atom = types >= 0
            cell = arrays["box"][number].reshape(3, 3) if is_periodic else None
            positions = arrays["coord"][number].reshape(-1, 3)[is_atom]
            atoms = Atoms(names[types[is_atom]], positions, cell=cell, pbc=is_periodic)
            labels = {}
            if "energy" in arrays:
                labels["energy"] = float(np.ravel(arrays["energy"])[number])
            if "force" in arrays:
                labels["forces"] = arrays["force"][number].reshape(-1, 3)[is_atom]
            if "virial" in arrays:
                labels["virial"] = arrays["virial"][number].reshape(3, 3)
            set_labels(atoms, labels)
            yield atoms


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
        ValueError: energy or forces are absent, a label is not a number, or there is no atom or no
            cell where the frame is periodic.
    """
    results = dict(image.calc.results) if image.calc else {}
    source = image.info.get("source", "a frame")
    if len(image) == 0:
        raise ValueError(f"expected atoms, got none in {source}")
    periods = image.cell.array[image.pbc]
    if len(periods) and np.linalg.matrix_rank(periods) < len(periods):
        raise ValueError(
            "expected independent cell vectors in periodic directions, "
            f"got {periods.tolist()} in {source}"
        )
    if len(image) == 1:
        results.setdefault("forces", np.zeros((1, 3)))
    for name in ("energy", "forces"):
        if name not in results:
            raise ValueError(
                f"expected energies and forces, got none of {name} in {source}{other_names(image)}"
            )
    energy = np.asarray(results["energy"], float)
    if energy.size != 1:
        raise ValueError(f"expected an energy, got {energy.size} numbers in {source}")
    forces = np.array(results["forces"], float)
    if forces.shape != (len(image), 3):
        raise ValueError(f"expected forces [{len(image)}, 3], got {list(forces.shape)} in {source}")
    virial = virial_of(image, results, source)
    for label in (energy, forces, 0.0 if virial is None else virial, image.positions):
        if not np.isfinite(label).all():
            raise ValueError(f"expected numbers, got NaN or infinity in {source}")
    return energy.item(), forces, np.full((3, 3), np.nan) if virial is None else virial


def virial_of(image, results, source):
    """Return the virial [3, 3] of a frame; None if it has no label of virial or stress.

    Raises:
        ValueError: the label has another number of components.
    """
    name = "virial" if "virial" in results else "stress"
    if name not in results:
        return None
    label = np.array(results[name], float)
    if label.size not in (6, 9):
        raise ValueError(f"expected a {name} of 6 or 9 numbers, got {label.size} in {source}")
    if has_zero_stress(image):
        return None
    full = voigt_6_to_full_3x3_stress(label.ravel()) if label.size == 6 else label.reshape(3, 3)
    if name == "virial":
        return full
    if image.cell.rank < 3:
        raise ValueError(f"expected a cell with a volume for the stress, got none in {source}")
    return -full * image.get_volume()


def has_zero_stress(image):
    """Return True if a frame has a stress or virial of exactly 0, which counts as no label."""
    results = image.calc.results if image.calc else {}
    labels = [np.asarray(results[name]) for name in ("virial", "stress") if name in results]
    return bool(labels) and not labels[0].any()


def other_names(image):
    """Return the end of a sentence that lists what else a frame has: names for --energy-key."""
    usual = {"source", "numbers", "positions"}
    results = image.calc.results if image.calc else {}
    names = sorted({*image.info, *image.arrays, *results} - usual)
    if not names:
        return ""
    return f", which has {', '.join(names)}; --energy-key and --forces-key name the labels"


def frames_of(images, type_names):
    """Return the dict of frames that trainer.Data takes, padded to the largest one.

    types [F, n] int64, -1 where there is no atom; positions and force [F, n, 3]; cells and virial
    [F, 3, 3]; pbc [F, 3]; energy [F]. The virial of a frame without stress is NaN.

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
    return frames
