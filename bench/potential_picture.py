"""Draw results/potentials.png: forces beside those of the programs a model comes from, and times.

    python bench/potential_picture.py

Left: the largest difference between the forces of a model in tests/packages, by calcops.nep or
calcops.deepmd, and those that NEP_CPU or DeePMD-kit printed, relative to the largest force. Right: the
times in the tables of calcops/nep, calcops/deepmd and calcops/lammps, divided by those of the other
program beside them.
"""

import contextlib
import io
import json
import re
import warnings
from pathlib import Path

import numpy as np
from ase import Atoms
from calcops import deepmd, nep
from calcops.ase import CalcOps

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests/packages"
# {program: (function that reads a model, its folder, {label: model})}
SOURCES = {
    "NEP_CPU": (
        nep.load,
        "nep_models",
        {
            "NEP4": "nep4.txt",
            "NEP3 with ZBL": "nep3_zbl.txt",
            "NEP4, cutoffs of types": "nep4_types.txt",
        },
    ),
    "DeePMD-kit": (
        deepmd.load,
        "deepmd_models",
        {
            "se_e2_a, silicon": "silicon.pt",
            "se_e2_a, water": "pairs.pth",
            "se_e2_a, compressed": "compressed.pth",
        },
    ),
}
COLORS = dict(zip(SOURCES, ["#20639b", "#d1603d"], strict=True))
LAMMPS = "LAMMPS's sw and lj/cut"
NEP = "NEP_CPU (left), nep-adapters (right)"


def difference(load, folder, name):
    """Return the largest difference of our forces from the printed ones, of the largest force."""
    numbers = json.loads((MODELS / folder / "numbers.json").read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        model = load(MODELS / folder / name)
    ours, theirs = [], []
    for structure in numbers[Path(name).stem]:
        symbols = [model.type_names[t] for t in structure["types"]]
        cell = structure["cell"]
        atoms = Atoms(symbols, positions=structure["positions"], cell=cell, pbc=cell is not None)
        atoms.calc = CalcOps(model)
        ours.append(atoms.get_forces().ravel())
        theirs.append(np.ravel(structure["force"]))
    theirs = np.concatenate(theirs)
    return np.abs(np.concatenate(ours) - theirs).max() / np.abs(theirs).max()


def ratios():
    """Return {system: (our time / the other program's, the other program)}."""
    table = {}
    page = (ROOT / "calcops/lammps/README.md").read_text()
    for system, ratio in re.findall(r"^(\S.*?) +1 +[\d.]+ms +[\d.]+ms +([\d.]+)x", page, re.M):
        style, _, atoms = system.partition(", ")
        label = {"sw": f"Stillinger-Weber, {atoms} atoms", "lj/cut": "Lennard-Jones"}[style]
        table[label] = float(ratio), LAMMPS
    page = (ROOT / "calcops/deepmd/README.md").read_text()
    rows = r"^ *\| (\d+) of (\w+) \| 1 \| \d+ \| (\d+) \| \d+ \| (\d+) \|"
    for atoms, system, compressed, tabulated in re.findall(rows, page, re.M):
        label = f"Deep Potential, tables, {system}, {int(atoms):,} atoms"
        table[label] = int(tabulated) / int(compressed), "DeePMD-kit"
    page = (ROOT / "calcops/nep/README.md").read_text()
    rows = r"^ *\| (\w[\w ]*) \| \d+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|"
    for system, ratio in re.findall(rows, page, re.M):
        table[f"NEP in ASE, {system}"] = float(ratio), NEP
    return table


def draw():
    """Write results/potentials.png."""
    from matplotlib import pyplot

    figure, (errors, times) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for program, (load, folder, models) in reversed(SOURCES.items()):
        for label, name in reversed(models.items()):
            apart = difference(load, folder, name)
            errors.plot(apart, label, "o", color=COLORS[program])
            errors.annotate(f"  {apart:.0e}", (apart, label), va="center", fontsize=8)
    errors.set_xscale("log")
    errors.set_xlim(1e-17, 1e-9)
    errors.axvline(np.finfo(float).eps, color="0.4", linewidth=1)
    errors.annotate(" rounding", (np.finfo(float).eps, 5), va="center", fontsize=8, color="0.4")
    errors.set_xlabel("largest force difference / largest force")

    colors = {NEP: COLORS["NEP_CPU"], "DeePMD-kit": COLORS["DeePMD-kit"], LAMMPS: "#3caea3"}
    table = dict(reversed(ratios().items()))
    for program, color in colors.items():
        rows = {row: ratio for row, (ratio, other) in table.items() if other == program}
        times.plot(list(rows.values()), list(rows), "o", color=color, label=f"beside {program}")
    for row, (ratio, _) in table.items():
        times.annotate(f"  {ratio:.2f}", (ratio, row), va="center", fontsize=8)
    times.set_xscale("log")
    times.set_xlim(0.05, 12)
    times.set_xticks([0.1, 0.5, 1, 5], ["0.1", "0.5", "1", "5"])
    times.axvline(1, color="0.4", linewidth=1)
    times.annotate(" same time", (1, 0), va="center", fontsize=8, color="0.4")
    times.set_xlabel("time of CalcOps / of the other program")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    for panel in (errors, times):
        panel.tick_params(axis="y", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.9")
    figure.savefig(ROOT / "bench/results/potentials.png", dpi=120)


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        draw()
