"""Draw results/potentials.png: forces beside those of the programs a model comes from, and times.

    python bench/potential_picture.py

Left: each component of the forces on the atoms of tests/packages, by calcops.nep and calcops.deepmd,
against the number that NEP_CPU or DeePMD-kit printed. Right: the times in the tables of calcops/nep,
calcops/deepmd and calcops/lammps, divided by those of the handwritten program beside them.
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
# {label: (function that reads a model, its folder, models)}
SOURCES = {
    "NEP_CPU": (nep.load, "nep_models", ["nep4.txt", "nep3_zbl.txt", "nep4_types.txt"]),
    "DeePMD-kit": (deepmd.load, "deepmd_models", ["silicon.pt", "pairs.pth", "compressed.pth"]),
}
COLORS = dict(zip(SOURCES, ["#20639b", "#d1603d"], strict=True))
LAMMPS = "LAMMPS's sw and lj/cut"


def forces(load, folder, names):
    """Return the components of our forces and of the forces that the other program printed."""
    numbers = json.loads((MODELS / folder / "numbers.json").read_text())
    ours, theirs = [], []
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()):
            model = load(MODELS / folder / name)
        for structure in numbers[Path(name).stem]:
            symbols = [model.type_names[t] for t in structure["types"]]
            cell = structure["cell"]
            atoms = Atoms(
                symbols, positions=structure["positions"], cell=cell, pbc=cell is not None
            )
            atoms.calc = CalcOps(model)
            ours.append(atoms.get_forces().ravel())
            theirs.append(np.ravel(structure["force"]))
    return np.concatenate(ours), np.concatenate(theirs)


def ratios():
    """Return {system: (our time / the other program's, the other program)}."""
    table = {}
    page = (ROOT / "calcops/lammps/README.md").read_text()
    for system, ratio in re.findall(r"^(\S.*?) +1 +[\d.]+ms +[\d.]+ms +([\d.]+)x", page, re.M):
        table[f"LAMMPS, {system}"] = float(ratio), LAMMPS
    page = (ROOT / "calcops/deepmd/README.md").read_text()
    rows = r"^ *\| (\d+ of \w+) \| 1 \| \d+ \| (\d+) \| \d+ \| (\d+) \|"
    for system, compressed, tabulated in re.findall(rows, page, re.M):
        table[f"compressed, {system}"] = int(tabulated) / int(compressed), "DeePMD-kit"
    page = (ROOT / "calcops/nep/README.md").read_text()
    for system, ours, theirs in re.findall(
        r"^ *\| (\w[\w ]*) \| \d+ \| ([\d.]+) \| ([\d.]+) \|", page, re.M
    ):
        table[f"NEP, {system}"] = float(ours) / float(theirs), "NEP_CPU"
    return table


def draw():
    """Write results/potentials.png."""
    from matplotlib import pyplot

    figure, (parity, times) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for name, source in SOURCES.items():
        ours, theirs = forces(*source)
        largest = np.abs(theirs).max()
        apart = np.abs(ours - theirs).max() / largest
        label = f"{name}: {len(ours)} components, apart by {apart:.0e} of the largest"
        parity.plot(
            theirs / largest, ours / largest, "o", color=COLORS[name], alpha=0.5,
            markeredgewidth=0, label=label,
        )  # fmt: skip
    parity.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=0)
    parity.set_xlabel("force by the other program / its largest")
    parity.set_ylabel("force by CalcOps / the same")
    parity.set_ylim(-1.1, 1.5)
    parity.legend(fontsize=8, loc="upper left", frameon=False)

    colors = COLORS | {LAMMPS: "#3caea3"}
    table = dict(reversed(ratios().items()))
    for name, color in colors.items():
        rows = {row: ratio for row, (ratio, other) in table.items() if other == name}
        times.barh(list(rows), list(rows.values()), color=color, label=name)
    for row, (ratio, _) in table.items():
        times.annotate(f" {ratio:.2f}", (ratio, row), va="center", fontsize=8)
    times.axvline(1, color="0.4", linewidth=1)
    times.set_xlabel("time / time of the other program, one thread")
    times.set_xlim(0, 4.2)
    times.tick_params(axis="y", labelsize=8)
    times.legend(fontsize=8, frameon=False, title="the other program", title_fontsize=8)
    for panel in (parity, times):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "bench/results/potentials.png", dpi=120)


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        draw()
