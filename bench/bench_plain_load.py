"""calcops_jit.load and torch.utils.cpp_extension.load, with one source in the same situations.

    python bench/bench_plain_load.py [--only WORD]

Each row is a situation of a user, measured in a new process, with one source of five lines.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 60.0  # how long a process may wait for one that was killed

SOURCE = """\
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <answer.h>
at::Tensor scaled(const at::Tensor& x) { return x.mul(ANSWER); }
TORCH_LIBRARY_FRAGMENT(bench, m) { m.def("scaled(Tensor x) -> Tensor", &scaled); }
"""
CELL = SOURCE.replace("#include <answer.h>\n", "").replace("bench,", "NAMESPACE,")
CONTRACT_CELL = """\
#include <calcops/operator.h>
const calcops::Contract contract(R"(
scaled(Tensor x) -> Tensor y
x  []; int64.
y  []; like x.
)");
void scaled(calcops::View<const int64_t, 0> x, calcops::View<int64_t, 0> y) { y() = ANSWER * x(); }
const calcops::Kernel cpu("scaled", scaled);
"""

LOAD = {
    "plain": (
        "from torch.utils import cpp_extension\n"
        "load = lambda: cpp_extension.load('bench', ['op.cpp'], extra_cflags=FLAGS, "
        "is_python_module=False)\n"
    ),
    "ours": (
        "import calcops_jit\n"
        "load = lambda: calcops_jit.load('bench', ['op.cpp'], extra_cflags=FLAGS)\n"
    ),
}
CALL = "print(int(torch.ops.bench.scaled(torch.tensor(1))))"
# Prints the seconds of `load` with the import of its module, and the answer of the operator.
ONCE = f"""
start = time.perf_counter()
{{load}}
load()
print(time.perf_counter() - start)
{CALL}
"""
PLAIN_CELL = """
from torch.utils.cpp_extension import load_inline
start = time.perf_counter()
source = CELL.replace("ANSWER", "{i}").replace("NAMESPACE", "cell{i}")
load_inline("cell{i}", [source], is_python_module=False)
assert int(torch.ops.cell{i}.scaled(torch.tensor(1))) == {i}
print(time.perf_counter() - start)
"""
OUR_CELL = """
shell.run_line_magic("load_ext", "calcops_jit")
start = time.perf_counter()
source = {cell}.replace("ANSWER", "{i}").replace("NAMESPACE", "cell")
shell.run_cell_magic("operator", "cell", source)
assert int(torch.ops.cell.scaled(torch.tensor(1))) == {i}
print("took", time.perf_counter() - start)
"""


class Side:
    """One of the two loaders, with a folder for its source and its builds."""

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.folder = folder / name
        (self.folder / "system").mkdir(parents=True)
        (self.folder / "early").mkdir()
        self.edit("op.cpp", SOURCE)
        self.edit("system/answer.h", "#define ANSWER 1\n")
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "CALCOPS_BUILD": "0",  # CalcOps' own operators are not built
            "CALCOPS_CACHE": str(self.folder / "cache"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "cache"),
        }
        # With this variable the modules of both loaders would be compiled at each import.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def edit(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)

    def start(self, script: str) -> subprocess.Popen:
        flags = [f"-isystem{self.folder}/{name}" for name in ("early", "system")]
        preamble = f"""
import time, torch
FLAGS = {flags}
CELL = {CELL!r}
CONTRACT_CELL = {CONTRACT_CELL!r}
"""
        command = [sys.executable, "-c", preamble + script.replace("{load}", LOAD[self.name])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, start_new_session=True, **pipes
        )

    def run(self, script: str) -> list[str]:
        """Return the lines that a new process prints."""
        output, _ = self.start(script).communicate()
        return output.splitlines()

    def once(self) -> tuple[float, int]:
        """Return the seconds of a load in a new process, and the answer of the operator."""
        *_, seconds, answer = self.run(ONCE)
        return float(seconds), int(answer)


def cold(side: Side) -> str:
    seconds, answer = side.once()
    assert answer == 1
    return f"{seconds:.1f} s"


def warm(side: Side) -> str:
    side.once()
    time.sleep(2.5)  # calcops_jit reads files again that were written less than two seconds ago
    side.once()
    return f"{statistics.median(side.once()[0] for _ in range(9)) * 1e3:.0f} ms"


def edited(side: Side, added: int = 1) -> str:
    side.edit("op.cpp", SOURCE.replace("ANSWER", f"(ANSWER + {added})"))
    seconds, answer = side.once()
    assert answer == 1 + added
    side.edit("op.cpp", SOURCE)
    side.once()
    return f"{seconds:.1f} s"


def new_header(side: Side) -> str:
    side.edit("early/answer.h", "#define ANSWER 3\n")
    answer = side.once()[1]
    (side.folder / "early/answer.h").unlink()
    side.once()
    return "the new code runs" if answer == 3 else "**the old code runs**, silently"


def edited_live(side: Side) -> str:
    """Return the time of a second load in the process that edits the source."""
    second_load = "calcops_jit.reload()" if side.name == "ours" else "load()"
    script = f"""
import pathlib
{{load}}
load()
source = pathlib.Path('op.cpp')
source.write_text(source.read_text().replace('ANSWER', '(ANSWER + 2)'))
start = time.perf_counter()
{second_load}
{CALL}
print(time.perf_counter() - start)
"""
    child = side.start(script)
    lines = child.communicate()[0].splitlines()
    side.edit("op.cpp", SOURCE)
    if child.returncode < 0:
        return f"**{signal.Signals(-child.returncode).name}**: the process dies"
    assert lines[-2] == "3"
    return f"{float(lines[-1]):.1f} s"


def cell(side: Side) -> str:
    """Run a notebook cell with one operator, and edit and run it twice. Return the time of the last
    run."""
    side.run("import torch.utils.cpp_extension")
    if side.name == "plain":
        lines = side.run("".join(PLAIN_CELL.replace("{i}", str(i)) for i in range(3)))
        return f"{float(lines[-1]):.1f} s, and needs a new name"
    return our_cell(side, "CELL")


def our_cell(side: Side, source: str) -> str:
    shell = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
"""
    cell = OUR_CELL.replace("{cell}", source)
    first, second, third = (cell.replace("{i}", str(i)) for i in range(3))
    lines = side.run(shell + first + second + third)
    return f"{float(lines[-1].removeprefix('took ')):.1f} s"


def contract_cell(side: Side) -> str:
    """Return the time of the same operator without PyTorch's headers."""
    return "-" if side.name == "plain" else our_cell(side, "CONTRACT_CELL")


def killed(side: Side) -> str:
    """Kill a build while the compiler runs. Return the time of the next process."""
    side.edit("op.cpp", SOURCE + "// for a killed build\n")
    child = side.start(ONCE)
    processes = ["ps", "-s", str(child.pid), "-o", "comm="]
    while b"cc1plus" not in subprocess.run(processes, capture_output=True).stdout:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    start = time.perf_counter()
    child = side.start(ONCE)
    try:
        child.communicate(timeout=TIMEOUT_S)
        return f"{time.perf_counter() - start:.1f} s"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        for lock in side.folder.rglob("lock"):
            lock.unlink()
        return f"**waits**, still after {TIMEOUT_S:.0f} s"
    finally:
        side.edit("op.cpp", SOURCE)
        side.once()


def damaged(side: Side) -> str:
    side.once()
    library = [path for path in side.folder.rglob("bench.so") if path.stat().st_size > 0][-1]
    os.truncate(library, library.stat().st_size // 2)
    child = side.start(ONCE)
    lines = child.communicate()[0].splitlines()
    if child.returncode < 0:
        library.unlink()
        return f"**{signal.Signals(-child.returncode).name}**: the process dies"
    return "built again" if child.returncode == 0 else f"`{lines[-1][:80]}`"


ROWS = {
    "first build": cold,
    "`load` of a built library, not counting `import torch`": warm,
    "source edited, new process": edited,
    "source edited, same process": edited_live,
    "notebook cell edited again": cell,
    "that cell without PyTorch's headers, edited again": contract_cell,
    "next process after a build was killed": killed,
    "library truncated (disk was full)": damaged,
    "new header in an earlier folder of the include path": new_header,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose function's name contains this")
    options = parser.parse_args()
    print("| | `torch.utils.cpp_extension.load` | `calcops_jit.load` |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, Path(folder)) for name in LOAD]
        for row, measure in ROWS.items():
            if options.only in measure.__name__:
                cells = [measure(side) for side in sides]
                print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
