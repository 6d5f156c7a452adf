"""What a step costs: LAMMPS's bench/in.lj (32,000 atoms) by lj/cut and by the same potential as a model.

make -C examples/lammps bench                  README.md shows what is printed and says what it means
"""

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--lammps", type=Path, required=True, help="environment with lammps[mpi]")
parser.add_argument("--plugin", required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()

kTimers = ("rows", "vectors", "model", "operators", "add")  # of `compute pair`, as in pair_calcops.cpp
kAtoms = 32000
# Pages of the first rank's own: what a run took stays with the process.
kMemory = "shell 'grep RssAnon /proc/$PPID/status'\n"


def run(ranks, ours):
    """Seconds a step of each part, ghosts a rank, and bytes that the run added to the first rank."""
    script = next(options.lammps.glob("lib/python3*/site-packages/lammps/share/lammps/bench/in.lj")).read_text()
    script = script.replace("100\n", f"{options.steps}\n")
    output = "thermo_modify norm no format float %.17g\n"
    if ours:
        own = r"pair_style.*\npair_coeff.*\n"
        script = f"plugin load {options.plugin}\n" + re.sub(
            own, f"pair_style calcops {options.model}\npair_coeff * * X\n", script
        )
        output = "compute t all pair calcops\nthermo_style custom step c_t[*]\n" + output
    script = script.replace("run  ", output + kMemory + "run  ") + kMemory
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write(script)
        file.flush()
        program = [options.lammps / "bin" / "mpiexec", "-n", str(ranks), options.lammps / "bin" / "lmp"]
        printed = subprocess.run(
            [*program, "-log", "none", "-in", file.name],
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    parts = {
        name: float(seconds) / options.steps
        for name, seconds in re.findall(r"^(Pair|Neigh|Comm) +\|[^|]*\| *([-+.\de]+)", printed, re.MULTILINE)
    }
    parts["step"] = float(re.search(r"Loop time of (\S+)", printed)[1]) / options.steps
    if ours:
        first, last = (
            [float(x) for x in line.split()[1:]]
            for line in re.findall(rf"^ +(?:0|{options.steps}) .*", printed, re.MULTILINE)
        )
        parts |= {name: (b - a) / ranks / options.steps for name, a, b in zip(kTimers, first, last, strict=True)}
    ghosts = float(re.search(r"Nghost: +(\S+)", printed)[1])
    before, after = (1024 * int(kilobytes) for kilobytes in re.findall(r"RssAnon:\s+(\d+)", printed))
    return parts, ghosts, after - before


print("ranks   lj/cut  calcops   model (operators)   list  Rij, add  communication   else  kB/atom  ghosts/atom")
for ranks in options.ranks:
    own, _, _ = run(ranks, ours=False)
    ours, ghosts, memory = run(ranks, ours=True)
    shares = [ours["model"], ours["rows"] + ours["Neigh"], ours["vectors"] + ours["add"], ours["Comm"]]
    shares.append(ours["step"] - sum(shares))
    model, rows, vectors, communication, rest = (f"{100 * share / ours['step']:.1f}%" for share in shares)
    operators = f"({100 * ours['operators'] / ours['step']:.1f}%)"
    times = f"{1e3 * own['step']:6.1f}ms {1e3 * ours['step']:6.0f}ms"
    sizes = f"{memory * ranks / kAtoms / 1000:8.1f} {ghosts * ranks / kAtoms:12.2f}"
    print(f"{ranks:5} {times} {model:>7} {operators:>11} {rows:>6} {vectors:>9} {communication:>14} {rest:>6} {sizes}")
