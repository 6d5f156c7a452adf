"""What a step costs in LAMMPS's benchmarks, by its own pair styles and by the same as models.

make -C examples/lammps bench
make -C examples/lammps bench-messages         a model that passes messages one, two and three times

README.md shows what the first one prints and says what it means.
"""

import argparse
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--lammps", type=Path, required=True, help="environment with lammps[mpi]")
parser.add_argument("--plugin", required=True)
parser.add_argument("--models", type=Path, required=True, help="folder of silicon.pt2 and lj.pt2")
parser.add_argument(
    "--messages", action="store_true", help="only messages1.pt2, messages2.pt2 and messages3.pt2"
)
parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
parser.add_argument("--steps", type=int, default=40)
parser.add_argument(
    "--times", type=int, default=2, help="each is run so often, in turns; the fastest counts"
)
options = parser.parse_args()
lammps, plugin, models = (
    Path(path).absolute() for path in (options.lammps, options.plugin, options.models)
)

# The timers of `compute pair`, as in pair_calcops.cpp.
kTimers = ("rows", "pairs", "model", "operators", "add")
# Pages of the first rank's own: what a run took stays with the process.
kMemory = "shell 'grep RssAnon /proc/$PPID/status'\n"
# A script below LAMMPS's bench, what to change in it, its atoms, the model and the names in
# pair_coeff.
kSystems = {
    "lj/cut": ("in.lj", {}, 32000, "lj.pt2", "X"),
    "sw, 32,000": ("POTENTIALS/in.sw", {"1.0 bin": "2.0 bin"}, 32000, "silicon.pt2", "Si"),
    "sw, 8,000": (
        "POTENTIALS/in.sw",
        {"1.0 bin": "2.0 bin", "20 0 20 0 10": "10 0 10 0 10"},
        8000,
        "silicon.pt2",
        "Si",
    ),
}
kMessages = {
    f"{atoms:,}, layers: {layers}": (*kSystems[f"sw, {atoms:,}"][:3], f"messages{layers}.pt2", "Si")
    for atoms in (8000, 32000)
    for layers in (1, 2, 3)
}


def run(system, ranks, ours):
    """Seconds a step of each part, ghosts a rank, and bytes added to the first rank."""
    file, changes, atoms, model, names = (kSystems | kMessages)[system]
    path = next(lammps.glob("lib/python3*/site-packages/lammps/share/lammps/bench")) / file
    script = re.sub(r"(?m)^run.*", f"run {options.steps}", path.read_text())
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    output = "thermo 1000000\nthermo_modify norm no format float %.17g\n"
    if ours:
        own = r"pair_style.*\npair_coeff.*\n"
        style = f"pair_style calcops {models / model}\npair_coeff * * {names}\n"
        if layers := re.fullmatch(r"messages(\d+)\.pt2?", model):
            style += f"comm_modify cutoff {5 * int(layers[1]) + 2}\n"  # cutoffs and skin
        script = f"plugin load {plugin}\n" + re.sub(own, style, script)
        output = "compute t all pair calcops\nthermo_style custom step c_t[*]\n" + output
    script = script.replace("run ", output + kMemory + "run ") + kMemory
    with tempfile.NamedTemporaryFile("w", suffix=".in") as written:
        written.write(script)
        written.flush()
        program = [lammps / "bin" / "mpiexec", "-n", str(ranks), lammps / "bin" / "lmp"]
        printed = subprocess.run(
            [*program, "-log", "none", "-in", written.name],
            cwd=path.parent,  # where the parameters of silicon are
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    parts = {
        name: float(seconds) / options.steps
        for name, seconds in re.findall(
            r"^(Pair|Neigh|Comm) +\|[^|]*\| *([-+.\de]+)", printed, re.MULTILINE
        )
    }
    parts["step"] = float(re.search(r"Loop time of (\S+)", printed)[1]) / options.steps
    if ours:
        first, last = (
            [float(x) for x in line.split()[1:]]
            for line in re.findall(rf"^ +(?:0|{options.steps}) .*", printed, re.MULTILINE)
        )
        count = len(kTimers)  # then, where messages pass, the number of rows
        parts |= {
            name: (b - a) / ranks / options.steps
            for name, a, b in zip(kTimers, first[:count], last[:count], strict=True)
        }
        parts["rows of an atom"] = last[count] / atoms if len(last) > count else 1.0
    ghosts = float(re.search(r"Nghost: +(\S+)", printed)[1])
    before, after = (
        1024 * int(kilobytes) for kilobytes in re.findall(r"RssAnon:\s+(\d+)", printed)
    )
    return parts, ghosts, after - before


def print_scale(seconds, memory):
    """What a step of silicon on many ranks comes to, by arithmetic.

    seconds, memory  of an atom, as measured on one rank
    """
    density, reach = 8 / 5.43**3, 3.77 + 2.0  # atoms in a cubic Angstrom; cutoff and skin
    latency, bandwidth = 2e-6, 1e9  # of a message, and of a rank in bytes a second: assumed
    print(
        "\n  ranks        atoms  atoms/rank  ghosts/atom  MB/rank  "
        "messages     model   network  GB/rank  imbalance"
    )
    for ranks, atoms in (1, 32_000), (2, 32_000), (4, 32_000), (100, 10**7), (10_000, 10**9):
        own = atoms / ranks
        ghosts = (1 + 2 * reach / (own / density) ** (1 / 3)) ** 3 - 1
        # Positions out, forces back; six neighbours.
        sent, messages = (48 * ghosts * own, 12) if ranks > 1 else (0, 0)
        network = sent / bandwidth + messages * latency
        # The fullest of many ranks, if atoms lay as independent as those of an ideal gas.
        imbalance = math.sqrt(2 * math.log(ranks) / own)
        held = 0.2e9 + (memory + 130 * ghosts) * own
        cells = f"{ranks:7} {atoms:12} {own:11.0f} {ghosts:12.2f} {sent / 1e6:8.1f} {messages:9}"
        times = f"{1e3 * seconds * own:6.1f} ms {1e3 * network:6.2f} ms"
        print(f"{cells} {times} {held / 1e9:8.2f} {100 * imbalance:9.1f}%")


if options.messages:
    print("silicon             ranks  a step   ghosts/atom  rows/atom")
    for system, (_, _, atoms, _, _) in kMessages.items():
        for ranks in options.ranks:
            runs = [run(system, ranks, ours=True) for _ in range(options.times)]
            parts, ghosts, _ = min(runs, key=lambda found: found[0]["step"])
            sizes = f"{ghosts * ranks / atoms:10.2f} {parts['rows of an atom']:10.2f}"
            print(f"{system:19} {ranks:5} {1e3 * parts['step']:6.0f}ms {sizes}", flush=True)
    raise SystemExit

print(
    "system      ranks   LAMMPS  calcops  ratio   model (operators)  list  "
    "pairs, add  waiting  kB/atom  ghosts/atom"
)
of_an_atom = None
for system, (_, _, atoms, _, _) in kSystems.items():
    for ranks in options.ranks:
        runs = [
            (run(system, ranks, ours=False), run(system, ranks, ours=True))
            for _ in range(options.times)
        ]
        own, _, _ = min((own for own, _ in runs), key=lambda found: found[0]["step"])
        ours, ghosts, memory = min((ours for _, ours in runs), key=lambda found: found[0]["step"])
        shares = [
            ours["model"],
            ours["operators"],
            ours["rows"] + ours["Neigh"],
            ours["pairs"] + ours["add"],
            ours["Comm"],
        ]
        model, operators, rows, pairs, waiting = (
            f"{100 * share / ours['step']:.1f}%" for share in shares
        )
        times = (
            f"{1e3 * own['step']:6.1f}ms {1e3 * ours['step']:6.1f}ms  "
            f"{ours['step'] / own['step']:4.2f}x"
        )
        sizes = f"{memory * ranks / atoms / 1000:8.1f} {ghosts * ranks / atoms:12.2f}"
        print(
            f"{system:11} {ranks:5} {times} {model:>7} ({operators:>6}) "
            f"{rows:>8} {pairs:>10} {waiting:>9} {sizes}"
        )
        if system == "sw, 32,000" and ranks == 1:
            of_an_atom = ours["step"] / atoms, memory / atoms
if of_an_atom:
    print_scale(*of_an_atom)
