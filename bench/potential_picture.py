"""Draw results/potentials.png: times of potentials, compared with those of other programs.

    python bench/potential_picture.py

Left: a step of dynamics in ASE by the number of atoms. Right: a step in LAMMPS on one rank, relative
to other programs. Both are drawn from the results in the pages of calcops.nep, deepmd and lammps.
"""

import hashlib

import results

PICTURE = results.ROOT / "bench" / "results" / "potentials.png"
OURS = "#20639b"
# {the other program: its colour, in both panels}
COLORS = {
    "nep-adapters": "#d1603d",
    "NEP_CPU": "#8e5ea2",
    "DeePMD-kit, compressed": "#3caea3",
    "LAMMPS": "#6a737d",
    "EMT of ASE": "#b08900",
}


def table(name):
    """Return the rows of a result, each a list of the cells, with the head first."""
    (result,) = (result for result in results.results() if result.name == name)
    lines = [line for line in result.body.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def source():
    """Return the digest of the tables, which the picture holds."""
    tables = [table(name) for name in ("nep-sizes", "nep-lammps", "deepmd-lammps", "lammps")]
    return hashlib.sha256(repr(tables).encode()).hexdigest()[:8]


def columns(name):
    """Return {title of a column: its cells}. Of columns with the same title, the last counts."""
    head, *rows = table(name)
    return dict(zip(head, zip(*rows, strict=True), strict=True))


def relative_times():
    """Return {(potential, the other program): our time divided by the other's, in LAMMPS}."""
    found = {}
    nep = columns("nep-lammps")
    for model, ours, *others in zip(
        nep["model"], nep["CalcOps, us"], nep["nep-adapters, us"], nep["NEP_CPU, us"], strict=True
    ):
        for program, theirs in zip(("nep-adapters", "NEP_CPU"), others, strict=True):
            if theirs != "refused":
                found[f"NEP, {model}", program] = float(ours) / float(theirs)
    deepmd = columns("deepmd-lammps")
    for atoms, ranks, ours, theirs in zip(
        deepmd["atoms"],
        deepmd["ranks"],
        deepmd["tabulated, ms"],
        deepmd["compressed .pb, ms"],
        strict=True,
    ):
        if ranks == "1":
            count, _, substance = atoms.partition(" of ")
            label = f"Deep Potential, {int(count):,} atoms of {substance}"
            found[label, "DeePMD-kit, compressed"] = float(ours) / float(theirs)
    lammps = columns("lammps")
    names = {"lj/cut": "Lennard-Jones, 32,000 atoms"}
    for system, ranks, relative in zip(
        lammps["system"], lammps["ranks"], lammps["relative"], strict=True
    ):
        if ranks == "1":
            label = names.get(system, system.replace("sw", "Stillinger-Weber") + " atoms")
            found[label, "LAMMPS"] = float(relative)
    return found


def draw_sizes(panel):
    """Draw the time of a step by the number of atoms."""
    sizes = columns("nep-sizes")
    atoms = [int(cell) for cell in sizes["atoms"]]
    lines = {
        "EMT, ms": ("EMT of ASE", COLORS["EMT of ASE"]),
        "nep-adapters, ms": ("nep-adapters", COLORS["nep-adapters"]),
        "CalcOps, ms": ("CalcOps", OURS),
    }
    for column, (label, color) in lines.items():
        times = [1e3 * float(cell) / n for cell, n in zip(sizes[column], atoms, strict=True)]
        panel.plot(atoms, times, "o-", color=color, markersize=4)
        panel.annotate(f"  {label}", (atoms[-1], times[-1]), color=color, va="center", fontsize=9)
    largest = float(sizes["CalcOps / nep-adapters"][-1])
    panel.set_title(
        f"A NEP step takes {largest:.2f} of nep-adapters' time\nat {atoms[-1]:,} atoms (16 metals, ASE)",
        fontsize=10,
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(atoms, [f"{n:,}" for n in atoms])
    panel.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    panel.minorticks_off()
    panel.set_xlim(None, 8 * atoms[-1])
    panel.set_xlabel("atoms of copper")
    panel.set_ylabel("µs per atom and step, one thread")
    panel.grid(color="0.92")


def draw_relative_times(panel):
    """Draw our times divided by those of other programs."""
    found = relative_times()
    labels = list(dict.fromkeys(label for label, _ in found))[::-1]
    for program, color in COLORS.items():
        chosen = {label: time for (label, other), time in found.items() if other == program}
        if chosen:
            heights = [labels.index(label) for label in chosen]
            panel.plot(chosen.values(), heights, "o", color=color, label=f"relative to {program}")
    panel.axvline(1, color="0.4", linewidth=1)
    panel.annotate(" same time", (1, len(labels) - 1), va="center", fontsize=8, color="0.4")
    panel.set_xscale("log")
    panel.set_xlim(0.03, 6)
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    faster = sum(time < 1 for time in found.values())
    panel.set_title(
        f"In LAMMPS, CalcOps is faster in {faster} of {len(found)} comparisons", fontsize=10
    )
    panel.set_xlabel("time relative to the other program: smaller is better")
    panel.grid(axis="y", color="0.92")


def draw():
    """Write results/potentials.png."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(1, 1.15)
    )
    draw_sizes(panels[0])
    draw_relative_times(panels[1])
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    figure.savefig(PICTURE, dpi=130, metadata={"Source": source()})


if __name__ == "__main__":
    draw()
