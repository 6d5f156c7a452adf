"""Time a step of LAMMPS's benchmarks by its own pair styles and by models of the same potentials.

    python bench/bench_lammps.py
    python bench/bench_lammps.py --messages    a model that passes messages 1, 2, 3 times

It first makes the plugin and the models in build/lammps, in some minutes. `make lammps` makes the
environment with LAMMPS. calcops/lammps/README.md shows what both print, and says what it means.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import lammps_models

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/lammps"
# The timers of `compute pair`, as in pair_calcops.cpp.
kTimers = ("rows", "pairs", "model", "operators", "add")
# The memory of a run is the growth of RssAnon, since the process keeps the pages that the run took.
kMemory = "shell 'grep RssAnon /proc/$PPID/status'\n"


class System(NamedTuple):
    """A benchmark: a script in LAMMPS's folder `bench`, changes in it, and the model for it."""

    script: str
    changes: dict[str, str]
    atoms: int
    model: str
    names: str  # in pair_coeff


# "Relative" is the time of calcops divided by LAMMPS's. What follows are shares of a step of calcops,
# then numbers of an atom.
HEAD = ["system", "ranks", "LAMMPS, ms", "calcops, ms", "relative", "relative, 10 steps"]
HEAD += ["model", "operators", "list", "pairs, add", "waiting", "kB", "ghosts"]
kSkin = {"1.0 bin": "2.0 bin"}
kSystems = {
    "lj/cut": System("in.lj", {}, 32000, "lj.pt2", "X"),
    "sw, 32,000": System("POTENTIALS/in.sw", kSkin, 32000, "silicon.pt2", "Si"),
    "sw, 8,000": System(
        "POTENTIALS/in.sw", kSkin | {"20 0 20 0 10": "10 0 10 0 10"}, 8000, "silicon.pt2", "Si"
    ),
}


def message_systems():
    """Return the benchmarks of silicon with the message-passing models of lammps_models.py."""
    systems = {}
    for atoms in (8000, 32000):
        for layers in (1, 2, 3):
            silicon = kSystems[f"sw, {atoms:,}"]
            systems[f"{atoms:,}, layers: {layers}"] = silicon._replace(
                model=f"messages{layers}.pt2"
            )
    return systems


def arguments():
    """Return the options of the command, with absolute paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lammps", type=Path, default=BUILD / "environment")
    parser.add_argument(
        "--messages",
        action="store_true",
        help="only messages1.pt2, messages2.pt2 and messages3.pt2",
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--times", type=int, default=2, help="runs of each, in turns; the fastest counts"
    )
    options = parser.parse_args()
    options.lammps = options.lammps.absolute()
    return options


def script_of(system, path, ours, options):
    """Return the script of a benchmark, for LAMMPS's pair style or for the model (`ours`)."""
    script = re.sub(r"(?m)^run.*", f"run {options.steps}", path.read_text())
    for old, new in system.changes.items():
        assert old in script
        script = script.replace(old, new)
    output = "thermo 1000000\nthermo_modify norm no format float %.17g\n"
    if ours:
        their_style = r"pair_style.*\npair_coeff.*\n"
        style = f"pair_style calcops {BUILD / system.model}\n"
        style += f"pair_coeff * * {system.names}\n"
        layers = re.fullmatch(r"messages(\d+)\.pt2?", system.model)
        if layers:
            style += f"comm_modify cutoff {5 * int(layers[1]) + 2}\n"  # cutoffs and skin
        script = f"plugin load {BUILD / 'calcopsplugin.so'}\n" + re.sub(their_style, style, script)
        output = "compute t all pair calcops\nthermo_style custom step c_t[*]\n" + output
    return script.replace("run ", output + kMemory + "run ") + kMemory


def output_of(script, folder, ranks, options):
    """Run a script in a folder, and return what LAMMPS prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write(script)
        file.flush()
        binaries = options.lammps / "bin"
        program = [binaries / "mpiexec", "-n", str(ranks), binaries / "lmp"]
        return subprocess.run(
            [*program, "-log", "none", "-in", file.name],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


def run(system, ranks, ours, options):
    """Run a benchmark.

    Returns:
        {part of a step: seconds; "rows of an atom": a number, for a model}, the number of ghosts of
        a rank, and the bytes that the run took on the first rank.
    """
    # The folder of the script has the parameters of silicon, too.
    bench = next(options.lammps.glob("lib/python3*/site-packages/lammps/share/lammps/bench"))
    path = bench / system.script
    script = script_of(system, path, ours, options)
    printed = output_of(script, path.parent, ranks, options)

    parts = {}
    pattern = r"^(Pair|Neigh|Comm) +\|[^|]*\| *([-+.\de]+)"
    for name, seconds in re.findall(pattern, printed, re.MULTILINE):
        parts[name] = float(seconds) / options.steps
    parts["step"] = float(re.search(r"Loop time of (\S+)", printed)[1]) / options.steps
    if ours:
        # The numbers of `compute pair` before the first step and after the last one.
        first, last = re.findall(rf"^ +(?:0|{options.steps}) .*", printed, re.MULTILINE)
        before = [float(word) for word in first.split()[1:]]
        after = [float(word) for word in last.split()[1:]]
        count = len(kTimers)
        for name, start, end in zip(kTimers, before[:count], after[:count], strict=True):
            parts[name] = (end - start) / ranks / options.steps
        # A model that passes messages has one more number: its rows.
        parts["rows of an atom"] = after[count] / system.atoms if len(after) > count else 1.0
    ghosts = float(re.search(r"Nghost: +(\S+)", printed)[1])
    kilobytes = [int(number) for number in re.findall(r"RssAnon:\s+(\d+)", printed)]
    at_start, at_end = kilobytes
    return parts, ghosts, 1024 * (at_end - at_start)


def fastest(runs):
    """Return the run with the least time of a step."""
    return min(runs, key=lambda run: run[0]["step"])


def print_messages(options):
    """Print the times of message-passing models."""
    print(
        "| silicon | ranks | a step, ms | ghosts of an atom | rows of an atom |\n|---|---|---|---|---|"
    )
    for name, system in message_systems().items():
        for ranks in options.ranks:
            runs = [run(system, ranks, True, options) for _ in range(options.times)]
            parts, ghosts, _ = fastest(runs)
            sizes = f"{ghosts * ranks / system.atoms:.2f} | {parts['rows of an atom']:.2f}"
            print(f"| {name} | {ranks} | {1e3 * parts['step']:.0f} | {sizes} |", flush=True)


def fastest_of_both(system, ranks, options):
    """Return the fastest runs by LAMMPS's pair style and by the model, which take turns."""
    their_runs = []
    our_runs = []
    for _ in range(options.times):
        their_runs.append(run(system, ranks, False, options))
        our_runs.append(run(system, ranks, True, options))
    return fastest(their_runs), fastest(our_runs)


def print_potentials(options):
    """Print the times of LAMMPS's pair styles and of the models of the same potentials."""
    few_steps = argparse.Namespace(**vars(options) | {"steps": 10})
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name, system in kSystems.items():
        for ranks in options.ranks:
            (first, _, _), (own_first, _, _) = fastest_of_both(system, ranks, few_steps)
            (theirs, _, _), (ours, ghosts, memory) = fastest_of_both(system, ranks, options)
            step = ours["step"]
            cells = [name, str(ranks), f"{1e3 * theirs['step']:.1f}", f"{1e3 * step:.1f}"]
            cells += [f"{step / theirs['step']:.2f}", f"{own_first['step'] / first['step']:.2f}"]
            for parts in (["model"], ["operators"], ["rows", "Neigh"], ["pairs", "add"], ["Comm"]):
                cells.append(f"{sum(ours[part] for part in parts) / step:.2f}")
            cells.append(f"{memory * ranks / system.atoms / 1000:.1f}")
            cells.append(f"{ghosts * ranks / system.atoms:.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)


def main():
    """Run the script."""
    options = arguments()
    make = ["make", "-s", "-C", ROOT / "calcops/lammps", f"LAMMPS={options.lammps}"]
    subprocess.run([*make, f"PYTHON={sys.executable}", f"BUILD={BUILD}"], check=True)
    systems = message_systems() if options.messages else kSystems
    for model in {system.model for system in systems.values()}:
        lammps_models.write(BUILD / model)
    print_messages(options) if options.messages else print_potentials(options)


if __name__ == "__main__":
    main()
