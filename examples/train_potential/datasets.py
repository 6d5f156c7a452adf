"""Labelled frames from files: what ASE reads, and DeePMD-kit's folders of .npy.

    images = read(["water.extxyz", "deepmd/data"])
    frames = frames_of(images, ["H", "O"])

Units are ASE's: eV, A, and for stress eV/A^3, positive under tension. DeePMD-kit's virial is in eV,
and virial = -stress * volume.
"""

from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress, voigt_6_to_full_3x3_stress


def read(paths):
    """Return the frames [Atoms] of files and of folders of DeePMD-kit, in their order.

    Raises ValueError if there are none, or if a file cannot be read.
    """
    images = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"expected a file or a folder of frames, got {path}")
        folders = sorted(file.parent for file in path.rglob("type.raw")) if path.is_dir() else []
        try:
            if path.is_dir():
                found = [image for folder in folders for image in read_deepmd(folder)]
            else:
                found = ase.io.read(path, ":")
        except Exception as error:  # of ASE's many formats
            raise ValueError(f"cannot read {path}: {error or type(error).__name__}") from None
        if not found:
            raise ValueError(f"expected frames, got none in {path}")
        for number, image in enumerate(found):
            image.info["source"] = f"{path}, frame {number}"
        images += found
    return images


def read_deepmd(folder):
    """Yield the frames of one system of DeePMD-kit: type.raw, type_map.raw, set.*/*.npy."""
    types = np.loadtxt(folder / "type.raw", dtype=int, ndmin=1)
    names = (folder / "type_map.raw").read_text().split()
    symbols = [names[t] for t in types]
    is_periodic = not (folder / "nopbc").exists()
    for part in sorted(folder.glob("set.*")):
        arrays = {path.stem: np.load(path) for path in part.glob("*.npy")}
        for number, positions in enumerate(arrays["coord"]):
            cell = arrays["box"][number].reshape(3, 3) if is_periodic else None
            atoms = Atoms(symbols, positions.reshape(-1, 3), cell=cell, pbc=is_periodic)
            labels = {}
            if "energy" in arrays:
                labels["energy"] = float(np.ravel(arrays["energy"])[number])
            if "force" in arrays:
                labels["forces"] = arrays["force"][number].reshape(-1, 3)
            if "virial" in arrays:
                stress = -arrays["virial"][number].reshape(3, 3) / atoms.get_volume()
                labels["stress"] = full_3x3_to_voigt_6_stress(stress)
            atoms.calc = SinglePointCalculator(atoms, **labels)
            yield atoms


def elements_of(images):
    """Return the chemical symbols in the frames, by atomic number."""
    return sorted(set().union(*(image.symbols for image in images)), key=atomic_numbers.get)


def labels_of(image):
    """Return energy, forces [n,3] and virial [3,3] of a frame; NaN for an absent stress.

    Raises ValueError if energy or forces are absent, or if a label is no number.
    """
    results = image.calc.results if image.calc else {}
    source = image.info.get("source", "a frame")
    for name in ("energy", "forces"):
        if name not in results:
            raise ValueError(f"expected energies and forces, got none of {name} in {source}")
    forces = np.asarray(results["forces"], float)
    virial = np.full((3, 3), np.nan)
    if "stress" in results:
        stress = np.asarray(results["stress"], float)
        full = stress if stress.shape == (3, 3) else voigt_6_to_full_3x3_stress(stress)
        virial = -full * image.get_volume()
    labels = [results["energy"], forces, virial if "stress" in results else 0.0, image.positions]
    if not all(np.isfinite(label).all() for label in labels):
        raise ValueError(f"expected numbers, got NaN or infinity in {source}")
    return float(results["energy"]), forces, virial


def frames_of(images, type_names):
    """Return the dict of frames that trainer.Data takes, padded to the largest one.

    types [F,n] int64, -1 where there is no atom; positions, force [F,n,3]; cells, virial [F,3,3];
    pbc [F,3]; energy [F]. The virial of a frame without stress is NaN.
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
