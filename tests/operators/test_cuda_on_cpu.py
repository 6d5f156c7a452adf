"""Run every CUDA kernel of the operators and the examples in an emulation on the CPU, and check
that each barrier in a kernel is missed if it is removed. bench/mutations.txt has other faults.

This needs neither a GPU nor nvcc; see tests/operators/cuda_on_cpu/README.md.
"""

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "cuda_on_cpu"))

import rewrite  # noqa: E402

# One warning is off, because an example omits initialisers of members that are zero. With a larger
# heap, GCC collects garbage less often and compiles faster.
FLAGS = "-O1 -Wextra -Wno-missing-field-initializers -Werror --param=ggc-min-heapsize=1048576"


CONTRACT = TESTS / "test_cuda_by_contract.py"


def files():
    """Return the test files that run in the emulation."""
    return *sorted(TESTS.parent.rglob("test_*_cuda_kernels.py")), CONTRACT


def files_with_kernels_of(source):
    """Return the tests of the kernels of a CUDA source, or of kernels that use launch.h."""
    operator = "edge_force" if source == rewrite.LAUNCH else source.stem
    kernels = TESTS / f"test_{operator}_cuda_kernels.py"
    by_contract = f"{CONTRACT}::test_{operator}"
    return (kernels, by_contract) if kernels.exists() else (by_contract,)


def update(folder, source):
    """Make the files of `folder` those of `source`. Files that are equal already stay as they are."""
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in folder.rglob("*"):
        if path.suffix != ".pyc" and path.is_file() and path.relative_to(folder) not in names:
            path.unlink()
    for name in names:
        content = (source / name).read_bytes()
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Emulation:
    """A checkout with emulated kernels, in which as many processes run tests as there are CPUs.

    The checkout stays in build/, so that the loader compiles only what has changed.
    """

    folder = rewrite.ROOT / "build" / "cuda_on_cpu"

    def __init__(self, results):
        self.results = results
        self.runs = {}
        self.pool = ThreadPoolExecutor(os.cpu_count())
        rewrite.write_checkout(results / "new")
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            update(self.folder, results / "new")
            built = self.python("-c", "import calcops.ops")
        assert built.returncode == 0, built.stdout

    def start(self, tests, fault):
        """Return the future of run(tests, fault), which is started once.

        `tests` are files. `fault` is the number of a removed barrier, or 0 for none.
        """
        if (tests, fault) not in self.runs:
            self.runs[tests, fault] = self.pool.submit(self.run, tests, fault)
        return self.runs[tests, fault]

    def python(self, *arguments, **environment):
        emulation = {
            "PYTHONPATH": str(self.folder),
            "CALCOPS_CUDA": "0",
            "CALCOPS_CFLAGS": FLAGS,
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, *map(str, arguments)]
        environment = os.environ | emulation | environment
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.run(command, cwd=self.folder, env=environment, **pipes)

    def run(self, tests, fault):
        """Return the finished process of pytest, and the names of the kernels that ran."""
        kernels = self.results / f"{Path(tests[0]).name}.{fault}"
        options = ["-q", "-s", "-p", "no:cacheprovider"]
        if fault:
            options.append("-x")  # one failed test shows the fault
        emulated = {"CALCOPS_EMULATED": str(kernels), "CALCOPS_EMULATED_FAULT": str(fault)}
        process = self.python("-m", "pytest", *options, *tests, **emulated)
        names = kernels.read_text().split() if kernels.exists() else []
        return process, names


@pytest.fixture(scope="module")
def emulation(request, tmp_path_factory):
    emulation = Emulation(tmp_path_factory.mktemp("cuda_on_cpu"))
    for item in request.session.items:  # start all selected runs at once
        if item.module is request.module and "callspec" in vars(item):
            emulation.start(*item.callspec.params["run"])
    yield emulation
    emulation.pool.shutdown(cancel_futures=True)


def test_the_kernels_pass_their_tests_in_any_order_of_blocks_and_threads(emulation):
    """One process runs all files, because it takes seconds to import PyTorch."""
    process, _ = emulation.start(files(), 0).result()
    assert process.returncode == 0, process.stdout[-5000:]


def test_every_kernel_runs(emulation):
    kernels = set()
    for path in rewrite.sources():
        kernels |= set(rewrite.kernels(path.read_text()))
    _, kernels_that_ran = emulation.start(files(), 0).result()
    kernels -= set(kernels_that_ran)
    assert not kernels, "a test of kernels has to run these"


def is_ordered_by_a_vote(path, line):
    """Return True for the two barriers that the emulation can do without.

    All lanes meet in a vote after each of them. The barrier only orders accesses to memory, which
    are always in order on the CPU.
    """
    if path.name != "force.cu":
        return False
    return "all lanes have read" in path.read_text().splitlines()[line - 1]


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [
        (files_with_kernels_of(path), number)
        for number, (path, line) in enumerate(rewrite.barriers(), rewrite.FIRST_BARRIER)
        if not is_ordered_by_a_vote(path, line)
    ],
    ids=lambda run: f"{Path(run[0][0]).stem} {run[1]}",
)
def test_results_differ_if_any_single_barrier_is_removed(emulation, run):
    process, _ = emulation.start(*run).result()
    assert process.returncode == 1, process.stdout[-5000:]
    assert "Tensor-likes are not" in process.stdout, process.stdout[-5000:]


def test_source_text_that_cannot_be_emulated_is_refused():
    for text in (
        "extern __shared__ double x[];",
        'asm("trap;");',
        "cooperative_groups::this_grid();",
    ):
        with pytest.raises(ValueError, match="cuda_on_cpu: cannot emulate"):
            rewrite.emulated(f"#include <cstdint>\n{text}\n")
