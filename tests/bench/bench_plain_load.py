"""calcops_jit.load beside torch.utils.cpp_extension.load: one source, the same situations. Run: make bench

Each row is what a user meets in a process of their own; `--readme` puts the table and results/loaders.png, the bars of
its times, into README.md.
"""

import argparse
import datetime
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0  # how long a process may wait for one that was killed

SOURCE = """\
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <answer.h>
at::Tensor scaled(const at::Tensor& x) { return x.mul(ANSWER); }
TORCH_LIBRARY_FRAGMENT(bench, m) { m.def("scaled(Tensor x) -> Tensor", &scaled); }
"""
CELL = SOURCE.replace("#include <answer.h>\n", "").replace("bench,", "NAMESPACE,")
MISTAKE = SOURCE.replace("x.mul(ANSWER)", "x.mul(ANSWER")

LOAD = {
    "plain": "from torch.utils import cpp_extension\n"
    "load = lambda: cpp_extension.load('bench', ['op.cpp'], extra_cflags=FLAGS, is_python_module=False)\n",
    "ours": "import calcops_jit\nload = lambda: calcops_jit.load('bench', ['op.cpp'], extra_cflags=FLAGS)\n",
}
CALL = "print(int(torch.ops.bench.scaled(torch.tensor(1))))"
# Seconds of `load` and of the module it comes from, and what the operator answers.
ONCE = f"start = time.perf_counter()\n{{load}}\nload()\nprint(time.perf_counter() - start)\n{CALL}\n"
# What an error looks like to the user: a traceback's last part, and what was printed.
FAILING = "{load}\ntry:\n    load()\nexcept Exception as error:\n    print(error)\n"
PLAIN_CELL = """
from torch.utils.cpp_extension import load_inline
start = time.perf_counter()
load_inline("cell{i}", [CELL.replace("ANSWER", "{i}").replace("NAMESPACE", "cell{i}")], is_python_module=False)
assert int(torch.ops.cell{i}.scaled(torch.tensor(1))) == {i}
print(time.perf_counter() - start)
"""
OUR_CELL = """
shell.run_line_magic("load_ext", "calcops_jit")
start = time.perf_counter()
shell.run_cell_magic("operator", "cell", CELL.replace("ANSWER", "{i}").replace("NAMESPACE", "cell"))
assert int(torch.ops.cell.scaled(torch.tensor(1))) == {i}
print("took", time.perf_counter() - start)
"""
# Waits until so many preambles have been compiled in the background.
WAIT = """
import glob, time
end = time.time() + 60
while len(glob.glob("cache/unit-preamble.*/*/manifest")) < {count} and time.time() < end:
    time.sleep(0.2)
"""


class Side:
    """One of the two loaders, with a folder for its source and its builds."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder / name
        (self.folder / "system").mkdir(parents=True)
        self.edit("op.cpp", SOURCE)
        self.edit("system/answer.h", "#define ANSWER 1\n")
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "CALCOPS_BUILD": "0",  # the project's own operators
            "CALCOPS_CACHE": str(self.folder / "cache"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "cache"),
        }

    def edit(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)

    def start(self, script: str) -> subprocess.Popen:
        flags = ["-isystem", str(self.folder / "system")]
        preamble = f"import time, torch\nFLAGS = {flags}\nCELL = {CELL!r}\n"
        command = [sys.executable, "-c", preamble + script.replace("{load}", LOAD[self.name])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, start_new_session=True, **pipes)

    def run(self, script: str) -> list[str]:
        said, _ = self.start(script).communicate()
        return said.splitlines()

    def once(self) -> tuple[float, int]:
        """(seconds, what the operator answers)"""
        *_, seconds, answer = self.run(ONCE)
        return float(seconds), int(answer)


def cold(side: Side) -> str:
    seconds, answer = side.once()
    assert answer == 1
    return f"{seconds:.1f} s"


def warm(side: Side) -> str:
    side.once()
    time.sleep(2.5)  # a file that was just written is looked into, not only at
    side.once()
    return f"{statistics.median(side.once()[0] for _ in range(9)) * 1e3:.0f} ms"


def edited(side: Side, added: int = 1) -> str:
    side.edit("op.cpp", SOURCE.replace("ANSWER", f"(ANSWER + {added})"))
    seconds, answer = side.once()
    assert answer == 1 + added
    side.edit("op.cpp", SOURCE)
    side.once()
    return f"{seconds:.1f} s"


def edited_again(side: Side) -> str:
    """An edit for which the headers have been compiled ahead."""
    if side.name == "ours":
        side.run(WAIT.replace("{count}", "1"))
    return edited(side, 3)


def edited_header(side: Side) -> str:
    side.edit("system/answer.h", "#define ANSWER 3\n")
    answer = side.once()[1]
    side.edit("system/answer.h", "#define ANSWER 1\n")
    return "new code runs" if answer == 3 else "**the old code runs**, silently"


def edited_live(side: Side) -> str:
    """An edit while the process goes on: the loader is simply asked again."""
    again = "calcops_jit.reload()" if side.name == "ours" else "load()"
    child = side.start(
        "import pathlib\n{load}\nload()\nsource = pathlib.Path('op.cpp')\n"
        "source.write_text(source.read_text().replace('ANSWER', '(ANSWER + 2)'))\nstart = time.perf_counter()\n"
        f"{again}\n{CALL}\nprint(time.perf_counter() - start)\n"
    )
    said = child.communicate()[0].splitlines()
    side.edit("op.cpp", SOURCE)
    if child.returncode < 0:
        return f"**{signal.Signals(-child.returncode).name}**: the process dies"
    assert said[-2] == "3"
    return f"{float(said[-1]):.1f} s, under every live handle"


def cell(side: Side) -> str:
    """A notebook cell with one operator: run, edited and run again, and edited once more."""
    side.run("import torch.utils.cpp_extension")
    if side.name == "plain":
        said = side.run("".join(PLAIN_CELL.replace("{i}", str(i)) for i in range(3)))
        return f"{float(said[-1]):.1f} s, under another name each time"
    shell = "from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
    first, second, third = (OUR_CELL.replace("{i}", str(i)) for i in range(3))
    said = side.run(shell + first + second + WAIT.replace("{count}", "2") + third)
    return f"{float(said[-1].removeprefix('took ')):.1f} s"


def two(side: Side) -> str:
    side.edit("op.cpp", SOURCE + "// for two\n")
    children = [side.start(ONCE), side.start(ONCE)]
    answers = [child.communicate()[0].splitlines()[-1] for child in children]
    side.edit("op.cpp", SOURCE)
    return "one builds, one waits" if answers == ["1", "1"] else f"{answers}"


def killed(side: Side) -> str:
    """The builder is killed while the compiler runs, and another process wants the library."""
    side.edit("op.cpp", SOURCE + "// for a killed build\n")
    child = side.start(ONCE)
    while (
        "cc1plus"
        not in subprocess.run(["ps", "-s", str(child.pid), "-o", "comm="], capture_output=True, text=True).stdout
    ):
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    start, child = time.perf_counter(), side.start(ONCE)
    try:
        child.communicate(timeout=PATIENCE_S)
        return f"the next import builds, {time.perf_counter() - start:.1f} s"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        for lock in side.folder.rglob("lock"):
            lock.unlink()
        return f"**the next import waits**, still after {PATIENCE_S:.0f} s"
    finally:
        side.edit("op.cpp", SOURCE)
        side.once()


def damaged(side: Side) -> str:
    side.once()
    (library,) = [path for path in side.folder.rglob("bench.so") if path.stat().st_size > 0][-1:]
    os.truncate(library, library.stat().st_size // 2)
    child = side.start(ONCE)
    said = child.communicate()[0].splitlines()
    if child.returncode < 0:
        library.unlink()
        return f"**{signal.Signals(-child.returncode).name}**: the process dies"
    return "built again" if child.returncode == 0 else f"`{said[-1][:80]}`"


def mistake(side: Side) -> str:
    """A forgotten parenthesis."""
    side.edit("op.cpp", MISTAKE)
    said = [line for line in side.run(FAILING) if line.strip()]
    side.edit("op.cpp", SOURCE)
    first = next(i for i, line in enumerate(said) if re.search(r"op\.cpp:\d+", line) and "error" in line)
    return f"{len(said)} lines; the mistake is named in line {first + 1}"


ROWS = {
    "first build": cold,
    "`load` of what is built, beyond `import torch`": warm,
    "source edited, new process": edited,
    "source edited again": edited_again,
    "source edited, same process": edited_live,
    "notebook cell edited again": cell,
    "header under `-isystem` edited": edited_header,
    "two processes at once": two,
    "build killed (SIGKILL)": killed,
    "library truncated (disk was full)": damaged,
    "a forgotten parenthesis": mistake,
}


def draw(rows: list[tuple[str, list[str]]]) -> None:
    """Bars of the rows in which both loaders come to an end after some seconds."""
    from matplotlib import pyplot

    seconds = {row: [re.match(r"([\d.]+) (m?s)", cell) for cell in cells] for row, cells in rows}
    seconds = {
        row: [float(m[1]) / (1e3 if m[2] == "ms" else 1) for m in cells] for row, cells in seconds.items() if all(cells)
    }
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.6 * len(seconds)), layout="constrained")
    for i, (label, colour) in enumerate(
        (("torch.utils.cpp_extension.load", "#b0b7c3"), ("calcops_jit.load", "#d1495b"))
    ):
        at = [row + 0.38 * (i - 0.5) for row in range(len(seconds))]
        bars = axes.barh(at, [cells[i] for cells in seconds.values()], 0.36, label=label, color=colour)
        axes.bar_label(bars, [f"{cells[i]:.2g} s" for cells in seconds.values()], padding=3)
    axes.set_yticks(range(len(seconds)), [row.replace("`", "").replace(", ", ",\n") for row in seconds])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    figure.savefig(ROOT / "tests/bench/results/loaders.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--only", default="", help="rows whose function's name contains this")
    options = parser.parse_args()
    today = datetime.date.today()
    lines = ["| | `torch.utils.cpp_extension.load` | `calcops_jit.load` |", "|---|---|---|"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, Path(folder)) for name in LOAD]
        for row, measure in ROWS.items():
            if options.only in measure.__name__:
                rows.append((row, [measure(side) for side in sides]))
                lines.append(f"| {row} | {' | '.join(rows[-1][1])} |")
                print(lines[-1], flush=True)
    about = f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, one source of five lines, {today}"
    if options.readme:
        readme = ROOT / "README.md"
        before, _, rest = readme.read_text().partition("<!-- loaders -->")
        draw(rows)
        picture = "![seconds of both loaders](tests/bench/results/loaders.png)"
        table = "\n".join([*lines, "", picture, "", f"({about}; `tests/bench/bench_plain_load.py`)"])
        readme.write_text(f"{before}<!-- loaders -->\n{table}\n<!-- /{rest.partition('<!-- /')[2]}")
    print(about)


if __name__ == "__main__":
    main()
