"""Times of the loader: builds, warm imports, and from an edit to a call.

    make bench
    python bench/bench_loader.py                   this tree
    python bench/bench_loader.py --before REV      this tree and a commit, in turns
    ... --before REV --same-operators                    both with the ops/ of that commit

--same-operators compares the loaders alone. Every figure is the least of some rounds, with the
median in brackets. An edit adds a comment. Its time goes from the end of `import torch` to the
return of the first call.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PARTS = ("calcops_jit.py", "_calcops_jit", "contracts", "ops", "calcops")
EDITED = (
    "force/force_cpu.cpp",
    "force/force_math.h",
    "force/force.cpp",
    "warp_perspective/warp_perspective.cpp",
)

FOREIGN = """\
#include <torch/extension.h>
at::Tensor twice(const at::Tensor& x) { return x.mul(2); }
TORCH_LIBRARY(foreign, m) { m.def("twice(Tensor x) -> Tensor", &twice); }
"""
CELL = """\
#include <ATen/core/Tensor.h>
#include <torch/library.h>
at::Tensor twice(const at::Tensor& x) { return x.mul(2); }
TORCH_LIBRARY_FRAGMENT(cell, m) { m.def("twice(Tensor x) -> Tensor", &twice); }
"""

# Prints the seconds of a script after `import torch`.
TIMED = "import time, torch\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)\n"
CALL = (
    "import calcops_jit\n"
    "calcops_jit.force(torch.zeros(1, 2, 1, dtype=torch.int32), torch.ones(1, 2, 1, 4), "
    "torch.ones(1, 2, 4, 3))"
)
IMPORT = "import calcops_jit\nfor name in dir(calcops_jit): getattr(calcops_jit, name)"
MODELS = "import calcops_jit, calcops.nep"
# Prints the memory of the largest process among the compilers of a script, in MB.
LARGEST = """\
import torch, resource
{}
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3)
"""
CONTRACT = """\
#include <calcops/operator.h>
const calcops::Contract contract(R"(
twice(Tensor x) -> Tensor y
x  [N]; float32.
y  [N]; like x.
)");
void twice(calcops::View<const float, 1> x, calcops::View<float, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
const calcops::Kernel cpu("twice", twice);
"""
LOAD = "import calcops_jit\ncalcops_jit.load('{0}', ['{0}.cpp']).twice(torch.ones(1))"
# Prints for each of three edits the seconds of reload(), those without ninja, and those of a
# reload() without an edit. ninja is a script that logs when it began and ended.
RELOADS = """
import time, torch, calcops_jit
from pathlib import Path
kernel = Path("ops/force/force_cpu.cpp")
text = kernel.read_text()
for i in range(3):
    kernel.write_text(text + f'extern "C" int edited_{i}() {{ return {i}; }}\\n')
    Path("ninja.log").write_text("")
    start = time.perf_counter()
    assert calcops_jit.reload() == ["calcops"]
    wall = time.perf_counter() - start
    runs = [line.split() for line in Path("ninja.log").read_text().splitlines()]
    inner = sum(float(end) - float(begin) for begin, end in runs)
    idle = []
    for _ in range(5):
        start = time.perf_counter()
        calcops_jit.reload()
        idle.append(time.perf_counter() - start)
        time.sleep(1.1)
    print(wall, wall - inner, min(idle))
"""
NINJA = """#!/bin/sh
begin=$(date +%s.%N)
"{ninja}" "$@"
code=$?
echo $begin $(date +%s.%N) >> "{log}"
exit $code
"""
# A load of PyTorch as its documentation shows it: torch/extension.h in every source, default flags.
PLAIN = """
import os, shutil
from torch.utils import cpp_extension
shutil.rmtree("plain", ignore_errors=True)
os.makedirs("plain")
names = [f"plain{i}" for i in range(5)]
for i, name in enumerate(names):
    block = 'TORCH_LIBRARY(plain, m)' if i == 0 else 'TORCH_LIBRARY_FRAGMENT(plain, m)'
    lines = [
        "#include <torch/extension.h>",
        f"static at::Tensor f(at::Tensor x) {{ return x.mul({i}); }}",
        f'{block} {{ m.def("f{i}(Tensor x) -> Tensor", &f); }}',
    ]
    open(f"plain/{name}.cpp", "w").write("\\n".join(lines) + "\\n")
sources = [f"plain/{name}.cpp" for name in names]
cpp_extension.load("plain", sources, build_directory="plain", is_python_module=False)
"""


def listed(commit: str, part: str) -> bool:
    """Return True if a commit has a file or folder of this name."""
    command = ["git", "ls-tree", "--name-only", commit, part]
    return bool(subprocess.run(command, cwd=HERE, check=True, capture_output=True).stdout)


class Tree:
    """A copy of the loader of one commit and the operators of another, with its own cache.

    An empty `revision` or `operators` stands for the files of this tree.
    """

    def __init__(self, folder: Path, revision: str, operators: str):
        self.folder = folder
        self.revision = revision
        folder.mkdir()
        for part in PARTS:
            commit = operators if part in ("ops", "calcops") else revision
            if commit and not listed(commit, part):
                continue  # older commits have no contracts/
            if commit:
                archive = subprocess.run(
                    ["git", "archive", commit, part], cwd=HERE, check=True, capture_output=True
                )
                subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
            elif part.endswith(".py"):
                shutil.copy(HERE / part, folder)
            else:
                shutil.copytree(
                    HERE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
                )
        (folder / "foreign.cpp").write_text(FOREIGN)
        (folder / "cell.cpp").write_text(CELL)
        (folder / "contract.cpp").write_text(CONTRACT)
        (folder / "bin").mkdir()
        ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        wrapper = folder / "bin/ninja"
        wrapper.write_text(NINJA.format(ninja=ninja, log=folder / "ninja.log"))
        wrapper.chmod(0o755)

    def run(self, script: str, **environment: str) -> list[list[float]]:
        """Return the numbers of each line that a script prints."""
        settings = {"CALCOPS_CACHE": f"{self.folder}/cache", "PYTHONPATH": str(self.folder)}
        environment = os.environ | settings | environment
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", script]
        result = subprocess.run(
            command, env=environment, cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True
        )
        return [[float(word) for word in line.split()] for line in result.stdout.splitlines()]

    def timed(self, script: str, **environment: str) -> float:
        """Return the seconds of a script after `import torch`."""
        return self.run(TIMED.format(script), **environment)[-1][0]

    def edit(self, file: str) -> None:
        """Append a comment to a file."""
        path = self.folder / file
        path.write_text(f"{path.read_text()}// {time.time_ns()}\n")


def cold_measures() -> Iterator[tuple[str, str, int, callable]]:
    """Yield the measures of measures() that begin with an empty cache."""

    def without_cache(measure, *arguments, **environment):
        def measured(tree):
            shutil.rmtree(tree.folder / "cache", ignore_errors=True)
            return measure(tree, *arguments, **environment)

        return measured

    def largest(tree):
        return tree.run(LARGEST.format(CALL))[-1][0]

    load = LOAD.format("contract")
    first_cell = without_cache(Tree.timed, load, CALCOPS_BUILD="0")
    yield "a contract: first load without operators", "s", 3, first_cell
    yield "largest process of a cold build", "MB", 1, without_cache(largest)
    yield "torch's load of five units", "s", 3, without_cache(Tree.timed, PLAIN)
    yield "cold build", "s", 3, without_cache(Tree.timed, CALL)

    def models(tree):
        for entry in tree.folder.glob("cache/calcops_models-*"):
            shutil.rmtree(entry)
        return tree.timed(MODELS)

    yield "then import calcops.nep", "s", 3, models


def measures(rounds: int) -> Iterator[tuple[str, str, int, callable]]:
    """Yield the name, the unit, the rounds, and a function of a Tree that returns seconds. A
    measure comes after those that it needs."""

    yield from cold_measures()
    yield "warm import", "ms", 5 * rounds, lambda tree: tree.timed(IMPORT)

    def edited(file, **environment):
        def measure(tree):
            tree.edit(f"ops/{file}")
            return tree.timed(CALL, **environment)

        return f"{Path(file).name} edited to called", "s", rounds, measure

    yield from map(edited, EDITED)
    sources = (("cell", CELL, "a cell's source"), ("foreign", FOREIGN, "torch/extension.h"))
    for name, text, title in sources:
        load = LOAD.format(name)
        yield f"{title}: first load", "s", 1, lambda tree, load=load: tree.timed(load)
        yield f"{title}: warm load", "ms", 5 * rounds, lambda tree, load=load: tree.timed(load)

        def edit_and_load(tree, name=name, load=load):
            tree.edit(f"{name}.cpp")
            return tree.timed(load)

        yield f"{title}: edited to called", "s", rounds, edit_and_load

        def load_another(tree, name=name, text=text):
            new = f"{name}_{time.time_ns()}"
            (tree.folder / f"{new}.cpp").write_text(text.replace(name, new))
            return tree.timed(LOAD.format(new))

        yield f"{title}: first load of another", "s", rounds, load_another

    if shutil.which("nvcc"):
        one = {"CALCOPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
        yield "for CUDA, one architecture: first load", "s", 1, lambda tree: tree.timed(CALL, **one)
        for file in "force/force.cu", "warp_perspective/warp_perspective.cu":
            yield edited(file, **one)


def table(names: list[str], rows: list[tuple[str, str, list[list[float]]]]) -> None:
    header = "".join(f"{name:>20}" for name in names)
    print(f"{'':44}{header}" + ("     ratio" if len(names) > 1 else ""))
    for name, unit, columns in rows:
        scale = 1e3 if unit == "ms" else 1
        cells = ""
        for column in columns:
            cells += f"{min(column) * scale:10.2f} ({statistics.median(column) * scale:6.2f})"
        ratio = f"  {min(columns[-1]) / min(columns[0]):8.2f}" if len(columns) > 1 else ""
        print(f"{name + ', ' + unit:44}{cells}{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="", help="a commit to compare with")
    parser.add_argument(
        "--same-operators", action="store_true", help="both trees have the operators of --before"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each edit; five times as many warm imports"
    )
    parser.add_argument("--only", default="", help="what the names of the measures must contain")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        revisions = [options.before, ""] if options.before else [""]
        trees = []
        for revision in revisions:
            operators = options.before if options.same_operators else revision
            trees.append(Tree(Path(folder, revision or "now"), revision, operators))
        names = [tree.revision or "now" for tree in trees]
        print(
            f"{len(os.sched_getaffinity(0))} processors, "
            f"load {os.getloadavg()[0]:.1f}; least (median)"
        )
        rows = []
        for name, unit, rounds, measure in measures(options.rounds):
            is_needed = name == "cold build" or name.endswith("first load")
            if not is_needed and options.only not in name:
                continue
            if rounds > options.rounds:
                # The loader reads files again that were written less than two seconds ago.
                for _ in range(2):
                    time.sleep(2.5)
                    for tree in trees:
                        measure(tree)
            turns = [[measure(tree) for tree in trees] for _ in range(rounds)]
            columns = list(zip(*turns))
            rows.append((name, unit, columns))
            print(name, [min(column) for column in columns], file=sys.stderr, flush=True)
        if options.only in "reload":
            columns = []
            for tree in trees:
                lines = tree.run(RELOADS, PATH=f"{tree.folder}/bin:{os.environ['PATH']}")
                columns.append(list(zip(*lines)))
            of_edits, beyond_tools, without_edits = zip(*columns)
            rows.append(("reload() of an edit", "s", list(of_edits)))
            rows.append(("  beyond compiler and linker", "ms", list(beyond_tools)))
            rows.append(("reload() without a change", "ms", list(without_edits)))
        table(names, rows)


if __name__ == "__main__":
    main()
