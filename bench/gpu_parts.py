"""The parts of gpu_check.py, which the table PARTS at the end lists with their limits.

A function makes the programs of a part, and another one decides whether a program has passed.
"""

import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gpu_results

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "ops", ROOT / "calcops" / "ops"  # the folders of the operators' folders

# The tests of every kernel at its boundaries.
KERNEL_TESTS = sorted((ROOT / "tests").rglob("test_*_cuda_kernels.py"))

# For racecheck and synccheck: tests that run every kernel whose threads share memory. All tests of
# warp_perspective would launch thousands of others. Some operators and the example share none.
SHARING_TESTS = {
    "warp_perspective": (
        "test_kernels_agree_with_the_cpu_in_random_calls",
        "test_motions_are_those_of_the_cpu",
        "test_kernels_agree_with_the_cpu_for_an_image_repeated_many_times",
        "test_results_are_those_of_the_cpu_for_many_images_of_several_tiles",
        "test_kernels_agree_with_the_cpu_for_any_number_of_channels",
    ),
    "near_pairs": (),
    "screened_repulsion": (),
    "examples_identity_conv": (),
}

COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "lts__t_sectors_op_read.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_fp64.sum",
    "sm__inst_executed.avg.per_cycle_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)


class Part(NamedTuple):
    """`jobs` takes the seconds that the part has, and returns or yields its jobs.

    `limit` is in seconds on 16 processors. Fewer processors get more time in proportion.
    """

    limit: float
    jobs: Callable


class Job(NamedTuple):
    """A program of a part. `judge` takes its exit code, None if it was killed, and its output, and
    returns {"passed": ..., "summary": ...}."""

    name: str
    command: list
    judge: Callable
    variables: dict = {}
    files: tuple[Path, ...] = ()  # that it must write; those of an earlier run are removed
    report: Path | None = None  # a file whose text is appended to the output


def workers():
    """Return how many programs run at once. Each has threads and a CUDA context of its own."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def toolkit_program(name):
    """Return the path of a program of the CUDA toolkit, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name, path=f"{os.environ['PATH']}:{home}/bin")


def by_exit_code(code, output):
    lines = output.strip().splitlines()
    return {"passed": code == 0, "summary": lines[-1] if lines else "printed nothing"}


BUILD = """
import calcops.ops, calcops_jit
print(calcops_jit.library_path(), calcops.ops.library.path)
"""


def build(seconds):
    return [Job("build", [sys.executable, "-c", BUILD], by_exit_code)]


def judge_cases(code, output):
    """Judge bench_kernels_cuda.py, which has passed if it has measured all cases."""
    found = re.search(r"^[1-9]\d* cases, 0 failed, 0 skipped", output, re.MULTILINE)
    return by_exit_code(code, output) | {"passed": code == 0 and bool(found)}


def bench(seconds):
    command = [sys.executable, "bench/bench_kernels_cuda.py", "--seconds", max(1, seconds - 10)]
    files = (gpu_results.folder() / "kernels.json",)
    return [Job("bench_kernels_cuda", command, judge_cases, files=files)]


def force(seconds):
    command = [sys.executable, "bench/bench_force_cuda.py"]
    files = (gpu_results.folder() / "force_cuda.json",)
    return [Job("bench_force_cuda", command, by_exit_code, files=files)]


def judge_counters(code, output):
    """Judge ncu, whose exit code is also 0 if it may not read the counters."""
    rows = len(re.findall('^"\\d+",.*calcops::', output, re.MULTILINE))
    return {"passed": code == 0 and rows > 0, "summary": f"the counters of {rows} kernels"}


def ncu(seconds):
    """Read the hardware's counters for each kernel of each case of bench_kernels_cuda.py.

    Return None without ncu.
    """
    program = toolkit_program("ncu")
    if program is None:
        return None
    path = gpu_results.folder() / "ncu.csv"
    options = ["--profile-from-start", "off", "--clock-control", "none", "--nvtx"]
    options += ["--kernel-name-base", "demangled", "--kernel-name", "regex:calcops"]
    options += ["--metrics", ",".join(COUNTERS), "--csv", "--page", "raw", "--log-file", path]
    command = [sys.executable, "bench/bench_kernels_cuda.py", "--once"]
    command += ["--seconds", max(1, seconds - 20)]
    return [Job("ncu", [program, *options, *command], judge_counters, files=(path,), report=path)]


# ---- tests ---------------------------------------------------------------------------------------

PYTEST_OPTIONS = ["-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]


def judge_tests(code, output):
    """Count the tests in the lines of `pytest -v`, which are there even if it was killed."""
    counts = Counter()
    failed = []
    for line in output.splitlines():
        match = re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b.*%\]|%\] (\w+) ", line)
        if match:
            outcome = match[1] or match[2]
            counts[outcome] += 1
            if outcome in ("FAILED", "ERROR"):
                failed.append(re.search(r"\S+::.*?(?= +FAILED| +ERROR|\s*$)", line)[0])
    if not counts:
        last_line = by_exit_code(code, output)["summary"]
        return {"passed": False, "summary": f"no test ended: {last_line}"}
    summary = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items())
    has_ended = re.search(r"^=+ .*\d passed.* in \d.*=+ *$", output, re.MULTILINE)
    passed = code == 0 and bool(has_ended) and counts["PASSED"] > 0 and not failed
    return {"passed": passed, "summary": summary, "failed": failed[:50]}


def operator_of(path):
    return path.stem.removeprefix("test_").removesuffix("_cuda_kernels")


# Runs pytest, and prints the names of the kernels that the GPU ran. Where the profiler does not
# support the GPU, it prints none.
PROFILED = """
import contextlib, sys, pytest
from torch.profiler import ProfilerActivity, profile, supported_activities
cuda = ProfilerActivity.CUDA
record = profile(activities=[cuda]) if cuda in supported_activities() else None
with record or contextlib.nullcontext():
    code = pytest.main(sys.argv[1:])
names = {event.name for event in record.events()} if record else set()
print(*("ran: " + name for name in sorted(names)), sep="\\n")
sys.exit(code)
"""


def kernel_names(operator):
    """Return the names of an operator's kernels, which other operators may have, too."""
    example = ROOT / "examples" / operator.removeprefix("examples_")
    folders = [*(library / operator for library in LIBRARIES), example]
    sources = [source for folder in folders for source in folder.glob("*.cu")]
    text = "".join(source.read_text() for source in sources)
    kernel = r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)"
    return sorted(set(re.findall(kernel, text)))


def never_run(operator, output):
    """Return the kernels of an operator that are not in the output of PROFILED."""
    names = "\n".join(re.findall(r"^ran: (.*)$", output, re.MULTILINE))
    scope = "" if operator.startswith("examples_") else rf"\bcalcops::ops::{operator}::\S*( \S+)?::"
    return [
        f"{operator}: {name}"
        for name in kernel_names(operator)
        if not re.search(rf"{scope}\b{name}\b", names)
    ]


def kernels(seconds):
    """Run the tests of every kernel, and check that they run every kernel."""

    def judge(operator, code, output):
        result = judge_tests(code, output)
        missed = never_run(operator, output)
        if not re.search("^ran: ", output, re.MULTILINE):
            missed = ["unknown, the profiler saw no kernels"]
        if result["passed"] and missed:
            summary = f"{result['summary']}; never run: {', '.join(missed)}"
            result |= {"passed": False, "summary": summary}
        return result

    for path in KERNEL_TESTS:
        operator = operator_of(path)
        command = [sys.executable, "-c", PROFILED, *PYTEST_OPTIONS, path]
        yield Job(operator, command, functools.partial(judge, operator))


def tests(seconds):
    """Run the other tests that need a GPU."""
    ignored = [f"--ignore={path}" for path in KERNEL_TESTS]
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, "tests", *ignored]
    command += ["-m", "gpu and not long"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", workers(), "--dist", "worksteal"]
    return [Job("tests", command, judge_tests)]


# ---- compute-sanitizer ---------------------------------------------------------------------------

# A record is a line of what was found, then indented lines of where it was.
RECORD = re.compile(
    r"^========= (?! |COMPUTE-SANITIZER|\w+ SUMMARY).*\n(?:=========(?:  .*| ?)\n)*", re.MULTILINE
)
# What initcheck also finds: PyTorch's sort reads memory by design that nothing has written.
OF_CUB = re.compile(r"========= Uninitialized __global__ .*\n=========  +at .*\bcub::")
# identity_kernel is the kernel of an example.
OWN_KERNELS = "calcops", "identity_kernel"


def judge_sanitizer(tool, code, output):
    """Judge the tests, then the report. It must have a summary, and a record of each error."""
    result = judge_tests(code if code != 9 else 0, output)
    records = RECORD.findall(output)
    summaries = re.findall(r"^========= \w+ SUMMARY: (\d+)(.*)", output, re.MULTILINE)
    lacks = "no report" if not summaries else ""
    if summaries and int(summaries[0][0]) > len(records):
        lacks = f"{summaries[0][0]} errors, of which {len(records)} were printed"
    if any(re.search("not printed|skipped", text) for _, text in summaries):
        lacks = "some errors were not printed"
    if tool == "initcheck":
        records = [record for record in records if not OF_CUB.match(record)]
    passed = result["passed"] and not records and not lacks and (code == 0 or tool == "initcheck")
    summary = f"{lacks or f'{len(records)} records'}; {result['summary']}"
    return result | {"passed": passed, "summary": summary, "records": records[:5]}


@functools.cache
def report_folder():
    return tempfile.mkdtemp(prefix="gpu_check-")


def sanitize(tool, seconds):
    """Run compute-sanitizer over the tests of each operator."""
    # PyTorch's caching allocator puts tensors side by side, so an access beyond the end of one of
    # them would not be found.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CALCOPS_KERNEL_RUNS": "1"}
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
    # The names of host functions would make every record one of ours.
    options += ["--show-backtrace", "device", "--print-limit", "0"]  # 0: all
    if tool != "initcheck":  # which has to see what PyTorch's kernels write
        for name in OWN_KERNELS:
            options += ["--kernel-name", f"kernel_substring={name}"]
    for number, path in enumerate(KERNEL_TESTS):
        selected = selected_tests(tool, path)
        if not selected:
            continue
        operator = operator_of(path)
        report = Path(report_folder(), f"{tool}-{operator}")
        # By default, all of them would use the same ten ports.
        options_of_job = ["--port", 49152 + 10 * number, "--log-file", report]
        command = [toolkit_program("compute-sanitizer"), *options, *options_of_job]
        command += [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *selected]
        judge = functools.partial(judge_sanitizer, tool)
        yield Job(operator, command, judge, variables, report=report)


def selected_tests(tool, path):
    """Return the arguments of pytest for the tests of a file in which a tool can find something."""
    names = SHARING_TESTS.get(operator_of(path))
    if names is None or tool not in ("racecheck", "synccheck"):
        return [path]
    return [f"{path}::{name}" for name in names]


# The parts in their order. The first four take 210 s at most, and the next five 430 s.
PARTS = {
    "build": Part(60, build),
    "kernels": Part(40, kernels),
    "bench": Part(55, bench),
    "memcheck": Part(55, functools.partial(sanitize, "memcheck")),
    "tests": Part(125, tests),
    "racecheck": Part(80, functools.partial(sanitize, "racecheck")),
    "synccheck": Part(60, functools.partial(sanitize, "synccheck")),
    "initcheck": Part(85, functools.partial(sanitize, "initcheck")),
    "ncu": Part(80, ncu),
    "force": Part(200, force),
}
