"""Run every CUDA kernel of the operators and the examples in an emulation on the CPU, and check
that the emulation finds faults that are put into the kernels.

This needs neither a GPU nor nvcc; see tests/operators/cuda_on_cpu/README.md.
"""

import fcntl
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "cuda_on_cpu"))

import rewrite  # noqa: E402

FORCE = "ops/force/force.cu"
WARP = "ops/warp_perspective/warp_perspective.cu"
EDGE = "ops/edge_force/edge_force.cu"
# One warning is off, because an example omits initialisers of members that are zero. With a larger
# heap, GCC collects garbage less often and compiles faster.
FLAGS = "-O1 -Wextra -Wno-missing-field-initializers -Werror --param=ggc-min-heapsize=1048576"
# {fault: ((file, code, code with the fault), test that must fail, its output)}. FAULT is 1 in the
# run for this fault, and 0 in all others.
FAULTS = {
    "a removed __syncwarp": (
        (FORCE, "  __syncwarp();\n  return list;", "  if (!FAULT) __syncwarp();\n  return list;"),
        "test_force_cuda_kernels.py::test_forces_and_virials_are_those_of_the_cpu",
        "Tensor-likes are not equal|Tensor-likes are not close",
    ),
    "a launch on the default stream": (
        (FORCE, "  config.stream = stream;", "  if (!FAULT) config.stream = stream;"),
        "test_force_cuda_kernels.py::test_forces_and_virials_are_those_of_the_cpu",
        "cuda_on_cpu: .*: work is queued on another stream than the current one",
    ),
    "a workspace that is one number short": (
        (
            FORCE,
            "take(slots, unsorted * frame_slots);",
            "take(slots, unsorted * frame_slots - FAULT);",
        ),
        "test_force_cuda_kernels.py::test_results_are_those_of_the_cpu_if_all_slots_name_one_atom",
        (
            "cuda_on_cpu: (fill_rows|sum_rows), block .*: (touches memory 0 bytes "
            "beyond|has written beside)"
        ),
    ),
    "a read beyond the end of an input": (
        (FORCE, "next = s + 8 < in.neighbors ?", "next = s + 8 < in.neighbors + FAULT ?"),
        "test_force_cuda_kernels.py::test_gradients_are_those_of_the_cpu",
        r"cuda_on_cpu: backward_rows, block \d+, thread \d+: (touches memory|has)",
    ),
    "a shuffle that some lanes do not come to": (
        (
            FORCE,
            "if constexpr (kVirial) sum_of_four_lanes(e);",
            "if (kVirial && (!FAULT || is_live)) sum_of_four_lanes(e);",
        ),
        "test_force_cuda_kernels.py::test_gradients_are_those_of_the_cpu",
        (
            "cuda_on_cpu: backward_rows, .*: (waits for ever at a barrier|meets the "
            "others at another kind of barrier)"
        ),
    ),
    "a sum in the order of arrival": (
        (
            FORCE,
            "if (!error) error = launch(sort_rows",
            "if (!error && !FAULT) error = launch(sort_rows",
        ),
        "test_force_cuda_kernels.py::test_results_are_those_of_the_cpu_if_all_slots_name_one_atom",
        "Tensor-likes are not equal",
    ),
    "a virial that is summed after it was rounded": (
        (
            EDGE,
            "exact[9 * atom + 3 * a + b] = sum[a][b];",
            "exact[9 * atom + 3 * a + b] = FAULT ? double(Real(sum[a][b])) : sum[a][b];",
        ),
        "test_edge_force_cuda_kernels.py::test_virials_that_cancel_are_summed_before_they_are_rounded",
        "Tensor-likes are not close",
    ),
    "an edge with two wrong ends that stays finite": (
        (
            EDGE,
            "const int64_t atom = names_atom ? entries[k] : 0;",
            "if (FAULT && !names_atom) continue;\n"
            "      const int64_t atom = names_atom ? entries[k] : 0;",
        ),
        "test_edge_force_cuda_kernels.py::test_an_edge_with_two_wrong_ends_makes_the_first_atom_nan",
        "assert ",
    ),
    "a frame that counts where nothing depends on it": (
        (
            EDGE,
            "const bool lacks_frame = is_live && upstream.virial &&",
            "const bool lacks_frame = is_live && (FAULT || upstream.virial) &&",
        ),
        "test_edge_force_cuda_kernels.py::test_the_frame_of_an_atom_counts_only_where_the_virial_has_a_gradient",
        "Tensor-likes are not close",
    ),
    "a place for a tap of weight zero": (
        (
            WARP,
            "return weight != 0 && index >= begin",
            "return (weight != 0 || FAULT) && index >= begin",
        ),
        "test_warp_perspective_cuda_kernels.py::test_a_tap_of_weight_zero_takes_no_part_in_the_gradient",
        "assert",
    ),
    "sum_of_block without its first barrier": (
        (
            EDGE,
            "  x = sum_of_lanes(x);\n  __syncthreads();",
            "  x = sum_of_lanes(x);\n  if (!FAULT) __syncthreads();",
        ),
        "test_edge_force_cuda_kernels.py::test_forces_virials_and_gradients_are_those_of_the_cpu",
        "Tensor-likes are not (equal|close)",
    ),
    "sum_virial without the barrier before the ticket": (
        (
            FORCE,
            "  }\n  __syncthreads();\n  if (thread == 0) {\n    __threadfence();",
            "  }\n  if (!FAULT) __syncthreads();\n  if (thread == 0) {\n    __threadfence();",
        ),
        "test_force_cuda_kernels.py::test_the_virial_of_several_blocks_has_the_same_bits_in_any_order_of_them",
        "Tensor-likes are not (equal|close)",
    ),
    "a write beyond the end of the result": (
        (
            WARP,
            "v >= sizes.out_height) return;\n    if (!has",
            "v >= sizes.out_height + FAULT) return;\n    if (!has",
        ),
        "test_warp_perspective_cuda_kernels.py::test_kernels_agree_with_the_cpu_in_random_calls",
        "cuda_on_cpu: forward_kernel, block .*: (touches memory|has written beside a tensor)",
    ),
}


def files():
    """Return the test files that run in the emulation.

    They are the tests of kernels. An operator without such tests has all its tests run.
    """
    paths = sorted(TESTS.parent.rglob("test_*_cuda_kernels.py"))
    operators = {path.stem for path in rewrite.sources() if path.parent.parent.name == "ops"}
    for operator in sorted(operators):
        if not list(TESTS.glob(f"test_{operator}*_cuda_kernels.py")):
            paths += sorted(TESTS.glob(f"test_{operator}*.py"))
    return tuple(paths)


def in_its_folder(test):
    """Return the path of `file.py` or `file.py::test`."""
    (file,) = TESTS.parent.rglob(test.partition("::")[0])
    return file.parent / test


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
        rewrite.write_checkout(results / "new", [fault for fault, _, _ in FAULTS.values()])
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            update(self.folder, results / "new")
            built = self.python("-c", "import calcops_jit; calcops_jit.library_path()")
        assert built.returncode == 0, built.stdout

    def start(self, tests, fault):
        """Return the future of run(tests, fault), which is started once.

        `tests` are files, or single tests of files. `fault` is its number, or 0 for none.
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
    assert not kernels, "a test in test_<operator>_cuda_kernels.py has to run these"


@pytest.mark.long
@pytest.mark.parametrize(
    "run, output",
    [
        (((in_its_folder(test),), number), output)
        for number, (_, test, output) in enumerate(FAULTS.values(), 1)
    ],
    ids=FAULTS,
)
def test_a_fault_is_found(emulation, run, output):
    process, _ = emulation.start(*run).result()
    assert process.returncode != 0
    assert re.search(output, process.stdout), process.stdout[-5000:]


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
        ((in_its_folder(f"test_{path.stem}_cuda_kernels.py"),), number)
        for number, (path, line) in enumerate(rewrite.barriers(), rewrite.FIRST_BARRIER)
        if not is_ordered_by_a_vote(path, line)
    ],
    ids=lambda run: f"{run[0][0].stem} {run[1]}",
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
