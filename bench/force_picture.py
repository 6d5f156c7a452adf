"""Draw the table of results/force.md: the times divided by those of the memory traffic.

python bench/force_picture.py
"""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
# Columns of the table, and the titles of their panels.
PANELS = {
    "of read": "force_virial\nover reading its inputs",
    "backward of dE": "backward of dE\nover reading and writing",
    "of all": "backward of all inputs\nover reading and writing",
}


def split_row(line):
    """Return the cells of a row of the table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_rows():
    """Return the rows of the table as dictionaries of text."""
    text = (RESULTS / "force.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [split_row(line) for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def draw():
    """Write results/force.png with a dot for each row of the table."""
    from matplotlib import pyplot

    rows = table_rows()
    groups = sorted({(row["type"], row["threads"]) for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(
        1, 3, figsize=(9, 2.9), sharex=True, sharey=True, layout="constrained"
    )
    for panel, (column, title) in zip(axes, PANELS.items(), strict=True):
        for height, group in enumerate(groups):
            members = [row for row in rows if (row["type"], row["threads"]) == group]
            ratios = [float(row[column].rstrip("x")) for row in members]
            panel.plot(
                ratios, [height] * len(ratios), "o", color="#20639b", alpha=0.5, markeredgewidth=0
            )
            dots = panel.lines[0]
        bound = panel.axvline(1, color="0.6", linewidth=1)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0, None)
    axes[0].set_ylim(-0.6, len(groups) - 0.4)
    words = {"1": "1 thread", "2": "2 threads"}
    labels = [f"{dtype}, {words[threads]}" for dtype, threads in groups]
    axes[0].set_yticks(range(len(groups)), labels)
    figure.supxlabel("time / time of the memory traffic", fontsize=10)
    words = "a list and its threads: a row of force.md", "the memory traffic alone"
    figure.legend([dots, bound], words, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(RESULTS / "force.png", dpi=130)


if __name__ == "__main__":
    draw()
