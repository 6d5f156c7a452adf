"""The pictures that bench_force.py draws of its rows."""

# Of one pair: g, the sums of R4 (x) g and of the centre; e and the products that give the gradients.
FLOP = {"force_virial": 21 + 24 + 3, "backward of dE": 27 + 20, "backward of all": 27 + 20 + 12 + 21 + 15}


def draw_roofline(rows, machine, path):
    import matplotlib.pyplot as plt  # optional

    figure, panels = plt.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    markers = {"force_virial": "o", "backward of dE": "^", "backward of all": "s"}
    peers = {"deepmd-kit": "v", "torch": "x", "torch.compile": "+"}
    for panel, threads in zip(panels, (1, 2), strict=True):
        here = [row for row in rows if row["threads"] == threads]
        rates = [(r["bytes"]["force_virial"]) / r["read"] / 1e6 for r in here]
        intensity = [0.1, 1.2]
        panel.fill_between(
            intensity,
            [min(rates) * x for x in intensity],
            [max(rates) * x for x in intensity],
            color="0.85",
            label=f"roof: reading once, {min(rates):.0f} to {max(rates):.0f} GB/s",
        )
        for name, marker in (markers | peers).items():
            work = name if name in markers else "force_virial"
            points = [
                (r["pairs"] * FLOP[work] / r["bytes"][work], r["pairs"] * FLOP[work] / r[name] / 1e6)
                for r in here
                if name in r
            ]
            if points:
                panel.scatter(*zip(*points, strict=True), marker=marker, label=name, zorder=3)
        title = f"{threads} thread{'s' * (threads > 1)}"
        panel.set(xscale="log", yscale="log", xlabel="flop a byte that must move", title=title)
        panel.set_ylim(0.02, 30 * max(rates))  # room for the legend
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8, ncols=2, loc="upper center")
    panels[0].set_ylabel("Gflop/s")
    figure.suptitle(machine, fontsize=9)
    figure.savefig(path, dpi=90)


def draw_growth(rows, machine, path):
    import matplotlib.pyplot as plt  # optional

    figure, (time_panel, memory_panel) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    pairs = [row["pairs"] for row in rows]
    for name in ("read", "read + write all"):
        time_panel.plot(pairs, [row[name] for row in rows], "--", color="0.5" if name == "read" else "0.7", label=name)
    for name in rows[0]["peak"]:
        time_panel.plot(pairs, [row[name] for row in rows], "o-", markersize=4, label=name)
        peaks = [row["peak"][name] / 1e6 for row in rows]
        memory_panel.plot(pairs, [max(x, 1e-3) for x in peaks], "o-", markersize=4, label=name)
    memory_panel.plot(pairs, [row["inputs"] / 4e6 for row in rows], "k--", label="a quarter of the inputs")
    time_panel.set(title="time, ms", xlabel="pairs", xscale="log", yscale="log")
    memory_panel.set(title="peak above inputs and outputs, MB", xlabel="pairs", xscale="log", yscale="log")
    for panel in (time_panel, memory_panel):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(machine + ", 1 thread, float64, a third empty", fontsize=9)
    figure.savefig(path, dpi=90)
