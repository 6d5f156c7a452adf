"""Draw the figure of docs/how_it_hangs_together.md, for light and for dark pages.

python bench/whole_picture.py
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs"
# {who provides a box: its colour on a light and on a dark page}
COLORS = {
    "you": ("#6a737d", "#9aa4ae"),
    "calcops": ("#20639b", "#6cb2eb"),
    "ops, calcops/ops": ("#c0502d", "#f0926f"),
    "calcops_jit, contracts": ("#1f8a70", "#5fcfb0"),
}
YOU, PACKAGES, OPERATORS, LOADER = COLORS
PAGES = {"light": ("white", "#24292f"), "dark": ("#0d1117", "#e6edf3")}

# (who, left, bottom, width, height, heading, lines)
BOXES = [
    (PACKAGES, 0, 33, 19, 13, "neighbours", "edges of a graph\nor a padded list,\nwith ghost atoms"),
    (PACKAGES, 27, 33, 21, 13, "energy in PyTorch", "your own, or a file of\nNEP, Deep Potential,\nMACE, SevenNet"),
    (OPERATORS, 56, 33, 21, 13, "edge_force_virial", "or force_virial: forces,\nvirial, per-atom virial;\nany derivatives"),
    (PACKAGES, 85, 33, 15, 13, "host", "ASE, LAMMPS,\ntorch-sim,\na C++ program"),
    (YOU, 0, 6, 19, 13, "source", "a contract in text,\na kernel in C++ or\nCUDA: ours or yours"),
    (LOADER, 27, 6, 21, 13, "loader", "compiles what has\nchanged, in a child\nprocess"),
    (LOADER, 56, 6, 21, 13, "cache", "a build, named by\nits contents, with\nits manifest"),
    (LOADER, 85, 6, 15, 13, "torch.ops", "a handle for\nPython, compile,\nexport, C++"),
]  # fmt: skip
# (from, to, label, where the label is)
ARROWS = [
    ((19, 39.5), (27, 39.5), "", None),
    ((48, 39.5), (56, 39.5), r"$\partial E / \partial \mathbf{r}_{ij}$", (52, 41)),
    ((77, 39.5), (85, 39.5), "", None),
    ((19, 12.5), (27, 12.5), "", None),
    ((48, 12.5), (56, 12.5), "", None),
    ((77, 12.5), (85, 12.5), "load", (81, 14)),
]
TITLES = [
    (0, 50.5, "A call: from an energy to forces in any host"),
    (0, 23.5, "A library: from a source to an operator"),
]


def draw(page):
    """Write docs/whole_<page>.png."""
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    background, ink = PAGES[page]
    shade = list(PAGES).index(page)
    figure = pyplot.figure(figsize=(10, 5.3), facecolor=background)
    axes = figure.add_axes([0.01, 0, 0.98, 1])
    axes.set(xlim=(-0.5, 100.5), ylim=(-3, 54))
    axes.axis("off")

    for who, left, bottom, width, height, heading, lines in BOXES:
        color = COLORS[who][shade]
        style = "round,pad=0,rounding_size=1"
        box = FancyBboxPatch(
            (left, bottom), width, height, style, facecolor="none", edgecolor=color, linewidth=1.6
        )
        axes.add_patch(box)
        middle = left + width / 2
        axes.text(middle, bottom + height - 1.3, heading, color=color, weight="bold", fontsize=11,
                  ha="center", va="top")  # fmt: skip
        axes.text(middle, bottom + height - 4.6, lines, color=ink, fontsize=9.5, ha="center", va="top",
                  linespacing=1.25)  # fmt: skip

    def arrow(begin, end, color=ink):
        axes.add_patch(
            FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=14, color=color,
                            linewidth=1.3, shrinkA=2, shrinkB=2)
        )  # fmt: skip

    for begin, end, label, place in ARROWS:
        arrow(begin, end)
        if label:
            axes.text(*place, label, color=ink, fontsize=9.5, ha="center", style="italic")
    # A handle is what a model calls.
    color = COLORS[LOADER][shade]
    axes.plot([92.5, 92.5, 66.5], [19.6, 27, 27], color=color, linewidth=1.3)
    arrow((66.5, 27), (66.5, 33), color=color)
    axes.text(
        68, 28, "operators loaded by import calcops_jit", color=ink, fontsize=9.5, style="italic"
    )
    # An edit of the source.
    axes.plot([9.5, 9.5, 92.5], [5.6, 2.4, 2.4], color=color, linewidth=1.3)
    arrow((92.5, 2.4), (92.5, 6), color=color)
    axes.text(50, 0.2, "edit and reload(): every caller uses the new kernels, in the same process",
              color=ink, fontsize=9.5, ha="center", va="center", style="italic")  # fmt: skip

    for x, y, title in TITLES:
        axes.text(x, y, title, color=ink, fontsize=12, weight="bold")
    for (who, colors), x in zip(COLORS.items(), (50, 56.5, 65.5, 81), strict=True):
        axes.plot(x, 51.2, "s", color=colors[shade], markersize=7)
        axes.text(x + 1.3, 51.2, who, color=ink, fontsize=9.5, va="center")
    figure.savefig(FOLDER / f"whole_{page}.png", dpi=160, facecolor=background)


if __name__ == "__main__":
    for page in PAGES:
        draw(page)
