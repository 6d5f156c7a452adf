"""bench/gpu_check.py says what a fresh clone lacks, a line each and without a traceback. It runs,
kills and judges its parts. The GPU and the programs are stubs here."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from programs import ROOT, run

CHECK = ROOT / "bench" / "gpu_check.py"
sys.path.append(str(CHECK.parent))

import gpu_parts  # noqa: E402

# ---- what is missing -----------------------------------------------------------------------------


def lines(*folders):
    """Return what gpu_check.py prints in a Python that has only the packages in these folders."""
    path = ":".join(map(str, (ROOT, *folders)))
    variables = {"PYTHONPATH": path, "PATH": "/nowhere", "CUDA_HOME": "/nowhere"}
    printed = run(sys.executable, "-S", CHECK, fails=True, **variables).stderr
    assert all(line.startswith("gpu_check: ") for line in printed.splitlines()), printed
    return printed


def test_a_python_without_packages_is_told_each_of_them():
    printed = lines()
    for name in ("pytest", "NumPy", "ninja", "C++ compiler", "compute-sanitizer", "PyTorch"):
        assert printed.count(name) >= 1, printed
    assert "make venv, or name a Python that has it, make gpu-check PYTHON=" in printed


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "class version: cuda = None\n__version__ = '2.15.0+cpu'",
            "PyTorch 2.15.0+cpu is a build without CUDA",
        ),
        ("raise OSError('libcudart.so: not found')", "cannot be imported: libcudart.so: not found"),
    ],
)
def test_a_pytorch_that_cannot_use_a_gpu_is_named(source, message, tmp_path):
    (tmp_path / "torch.py").write_text(source)
    assert message in lines(tmp_path)


def test_the_packages_of_the_checkout_are_importable_without_an_installation(tmp_path):
    program = "import calcops.potentials, calcops.graph; print(calcops.potentials.__file__)"
    path = f"{ROOT}:{sysconfig.get_path('purelib')}"
    printed = run(sys.executable, "-S", "-c", program, cwd=tmp_path, PYTHONPATH=path).stdout
    assert printed == f"{ROOT}/calcops/potentials/__init__.py\n"


# ---- parts, limits and kills ---------------------------------------------------------------------

TORCH = """
__version__ = "2.11.0"
class version: cuda = "13.0"
class cuda:
    is_available = lambda: True
    get_device_name = lambda: "Stub GPU"
    get_device_capability = lambda: (9, 0)
"""
# Runs gpu_check.py with a stub in the place of Python, and with limits that hold for any machine.
DRIVER = f"""
import os, sys
sys.path.insert(0, {str(CHECK.parent)!r})
import gpu_check
sys.executable = os.environ["STUB"]
share = min(1, len(os.sched_getaffinity(0)) / 16)
for name, part in gpu_check.PARTS.items():
    seconds = float(os.environ.get("LIMIT_" + name, 30))
    gpu_check.PARTS[name] = part._replace(limit=seconds * share)
sys.exit(gpu_check.main())
"""
PASSED = "tests/test_x.py::test_a PASSED   [100%]\n===== 1 passed in 0.10s =====\n"
# Stands for Python: $1 and so on are those of `python -m pytest ...` or `python bench/...`.
PYTHON = """
case "$*" in
  *cuda_kernels.py*) cat "$FAKE/kernels" ;;
  *pytest*) cat "$FAKE/passed" ;;
  *bench_kernels_cuda*) echo "{}" > "$OUT/kernels.json"; echo "75 cases, 0 failed, 0 skipped for" ;;
  *bench_force_cuda*) echo "{}" > "$OUT/force_cuda.json" ;;
esac
"""
NCU = """
while [ "$1" != --log-file ]; do shift; done
echo '"0","1","python","void calcops::ops::force::sum_rows<4>()"' > "$2"
"""
SANITIZER = """
while [ "$1" != --log-file ]; do shift; done
printf '========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors\\n' > "$2"
cat "$FAKE/passed"
"""
# Starts another program, writes the process ids of both, and hangs.
HANGS = """
sleep 60 &
echo $$ $! > "$FAKE/pids.new" && mv "$FAKE/pids.new" "$FAKE/pids"
wait
"""


def ran_kernels():
    """Return what PROFILED prints of all kernels of all operators."""
    lines = []
    for path in (path for library in gpu_parts.LIBRARIES for path in library.iterdir()):
        for name in gpu_parts.kernel_names(path.name):
            scope = f"calcops::ops::{path.name}::(anonymous namespace)"
            lines.append(f"ran: void {scope}::{name}<float, int>(float*)\n")
    return "".join(lines) + "ran: void (anonymous namespace)::identity_kernel<float>(float*)\n"


class FakeMachine:
    """A folder with programs that stand for Python, compute-sanitizer and others."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "torch.py").write_text(TORCH)
        (folder / "passed").write_text(PASSED)
        (folder / "kernels").write_text(PASSED + ran_kernels())
        for name in ("pytest", "numpy", "setuptools", "ninja"):
            (folder / f"{name}.py").write_text("")
        (folder / "bin").mkdir()
        for name in ("c++", "nvcc"):
            self.program(name, "")
        self.program("ncu", NCU)
        self.program("nvidia-smi", "echo 580.159.04")
        self.program("compute-sanitizer", SANITIZER)
        self.program("python", PYTHON)

    def program(self, name, script):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def python(self, pattern, script):
        """Let the stub of Python run a script if its arguments match the pattern."""
        self.program("python", f'case "$*" in {pattern})\n{script}\nexit ;; esac\n{PYTHON}')

    def start(self, *options, **variables):
        environment = {
            "FAKE": self.folder,
            "STUB": self.folder / "bin" / "python",
            "OUT": self.folder / "out",
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CUDA_HOME": self.folder,
            "PYTHONPATH": f"{self.folder}:{ROOT}",
        }
        environment = os.environ | {key: str(x) for key, x in (environment | variables).items()}
        command = [sys.executable, "-c", DRIVER, *options]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return subprocess.Popen(command, env=environment, **pipes)

    def check(self, *options, **variables):
        """Return the exit code, the results, and what was printed."""
        process = self.start(*options, **variables)
        printed, _ = process.communicate(timeout=50)
        return process.returncode, self.results(), printed

    def results(self):
        return json.loads((self.folder / "out" / "results.json").read_text())

    def states(self):
        return {name: part["state"] for name, part in self.results()["parts"].items()}

    def pids(self):
        """Return the process ids of a program that hangs, once it has written them."""
        path = self.folder / "pids"
        end = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def fake(tmp_path):
    return FakeMachine(tmp_path)


def is_running(pid):
    """Return True for a process that has not ended, even if its parent has not asked for that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end_of(pids):
    end = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < end, "a program still runs"
        time.sleep(0.01)


def test_all_parts_run_in_their_order_and_the_results_name_the_machine(fake):
    code, results, printed = fake.check()
    assert code == 0, printed
    order = "build kernels bench memcheck tests racecheck synccheck initcheck ncu force"
    assert list(results["parts"]) == order.split()
    assert set(fake.states().values()) == {"passed"}
    machine = results["machine"]
    assert (machine["gpu"], machine["torch"]) == ("Stub GPU", "2.11.0")
    assert machine["driver"] == "580.159.04"
    assert re.match(r"\d{4}-\d\d-\d\dT", machine["date"])
    assert re.match(r"[0-9a-f]{40}|unknown: ", machine["commit"])
    log = (fake.folder / "out" / "gpu_check.log").read_text()
    assert log.count("\n+ ") == sum(len(part["jobs"]) for part in results["parts"].values())


def test_a_copy_without_git_says_so(monkeypatch, tmp_path):
    import gpu_results

    monkeypatch.setattr(gpu_results, "ROOT", tmp_path)
    assert gpu_results.commit() == "unknown: this copy has no .git"


def test_all_programs_have_the_variables_of_one_build_and_one_folder(fake):
    script = 'echo "$CALCOPS_CUDA $TORCH_CUDA_ARCH_LIST $OUT" >> "$FAKE/seen"'
    fake.program("python", script + PYTHON)
    fake.program("compute-sanitizer", script + SANITIZER)
    fake.check(CALCOPS_CUDA="0", TORCH_CUDA_ARCH_LIST="", OUT=os.path.relpath(fake.folder / "out"))
    assert set((fake.folder / "seen").read_text().splitlines()) == {f"1 9.0+PTX {fake.folder}/out"}


def test_a_part_that_hangs_is_killed_with_all_that_it_started_and_the_next_part_runs(fake):
    fake.python("*bench_kernels_cuda*", HANGS)
    code, results, printed = fake.check("--parts", "bench,memcheck", LIMIT_bench=1)
    assert code == 1
    assert fake.states() == {"bench": "failed", "memcheck": "passed"}, printed
    assert "at the limit" in results["parts"]["bench"]["jobs"]["bench_kernels_cuda"]["summary"]
    wait_for_the_end_of(fake.pids())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_loses_the_running_part_only(fake, number):
    fake.python("*bench_kernels_cuda*", HANGS)
    process = fake.start("--parts", "build,kernels,bench,memcheck")
    pids = fake.pids()
    process.send_signal(number)
    process.communicate(timeout=10)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    state = "running" if killed else f"ended by {number.name}"
    assert fake.states() == {"build": "passed", "kernels": "passed", "bench": state}
    if killed:  # nobody is there to do it
        os.killpg(pids[0], signal.SIGKILL)
    wait_for_the_end_of(pids)


def test_of_a_killed_part_the_programs_that_had_ended_are_kept(fake):
    fake.python("*test_force_cuda_kernels*", HANGS)
    process = fake.start("--parts", "kernels")
    pids = fake.pids()
    end = time.monotonic() + 30
    while not fake.results()["parts"]["kernels"]["jobs"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.communicate()
    os.killpg(pids[0], signal.SIGKILL)
    assert all(job["passed"] for job in fake.results()["parts"]["kernels"]["jobs"].values())


def test_the_seconds_are_a_limit_for_all_parts_together(fake):
    fake.python("*bench_kernels_cuda*", HANGS)
    begin = time.monotonic()
    code, _, printed = fake.check("--seconds", "2", "--parts", "machine,bench,memcheck,ncu")
    assert time.monotonic() - begin < 10
    assert code == 1
    assert fake.states() == {"bench": "failed", "memcheck": "not run", "ncu": "not run"}, printed


def test_after_a_failed_build_nothing_runs(fake):
    fake.python("*library_path*", "echo error; exit 1")
    code, _, printed = fake.check("--parts", "build,kernels,bench")
    assert code == 1
    assert fake.states() == {"build": "failed", "kernels": "not run", "bench": "not run"}, printed


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$", "exec /nowhere"])
def test_a_program_that_fails_is_an_error_at_the_end(fake, script):
    fake.python("*bench_force_cuda*", script)
    code, _, printed = fake.check("--parts", "force,ncu")
    assert code == 1
    assert fake.states() == {"ncu": "passed", "force": "failed"}
    assert printed.endswith("failed: force\n")


def test_a_tool_that_cannot_start_or_runs_no_test_has_not_passed(fake):
    fake.program("compute-sanitizer", "echo '========= Error: Device not supported'; exit 255")
    code, results, _ = fake.check("--parts", "memcheck")
    assert code == 1
    assert all(not job["passed"] for job in results["parts"]["memcheck"]["jobs"].values())
    (fake.folder / "bin" / "compute-sanitizer").write_text("#!/nowhere/sh\n")
    assert fake.check("--parts", "memcheck")[0] == 1
    assert fake.states() == {"memcheck": "failed"}
    (fake.folder / "passed").write_text(PASSED.replace("PASSED", "SKIPPED (no GPU)"))
    fake.program("compute-sanitizer", SANITIZER)
    assert fake.check("--parts", "memcheck")[0] == 1


def test_without_ncu_its_part_is_skipped_and_named(fake):
    (fake.folder / "bin" / "ncu").unlink()
    code, _, printed = fake.check("--parts", "ncu", PATH=fake.folder / "bin")
    assert code == 0
    assert printed.endswith("all passed; skipped: ncu\n")
    assert fake.states() == {"ncu": "skipped"}


@pytest.mark.parametrize(
    "script",
    [
        "echo PyTorch sees no GPU",
        'echo "{}" > "$OUT/kernels.json"; echo "75 cases, 0 failed, 74 skipped for lack of time"',
        'echo "{}" > "$OUT/kernels.json"; echo "0 cases, 0 failed, 0 skipped for lack of time"',
    ],
)
def test_a_benchmark_that_measures_nothing_has_not_passed(fake, script):
    assert fake.check("--parts", "bench")[0] == 0
    fake.python("*bench_kernels_cuda*", script)
    assert fake.check("--parts", "bench")[0] == 1
    assert (fake.folder / "out" / "kernels.json").exists() == ("kernels.json" in script)


def test_a_program_that_writes_no_results_has_not_passed(fake):
    assert fake.check("--parts", "force")[0] == 0
    fake.python("*bench_force_cuda*", "exit 0")
    code, results, _ = fake.check("--parts", "force")
    assert code == 1
    summary = results["parts"]["force"]["jobs"]["bench_force_cuda"]["summary"]
    assert summary.startswith("no force_cuda.json")


def test_ncu_without_counters_has_not_passed(fake):
    fake.program("ncu", NCU.replace("calcops", "at"))
    assert fake.check("--parts", "ncu")[0] == 1


LONG_REPORT = """
while [ "$1" != --log-file ]; do shift; done
(yes | head -c 30000000; printf '\\n========= ERROR SUMMARY: 0 errors\\n') > "$2"
cat "$FAKE/passed"
"""


def test_of_a_long_output_the_end_is_kept_and_a_long_report_is_not_good(fake):
    fake.python("*bench_kernels_cuda*", "yes | head -c 30000000; echo; echo no case")
    fake.program("compute-sanitizer", LONG_REPORT)
    code, results, _ = fake.check("--parts", "bench,memcheck")
    assert code == 1
    assert results["parts"]["bench"]["jobs"]["bench_kernels_cuda"]["summary"].endswith("no case")
    summary = results["parts"]["memcheck"]["jobs"]["force"]["summary"]
    assert summary == "1 records; 1 passed"
    assert (fake.folder / "out" / "results.json").stat().st_size < 100_000


def test_a_folder_that_is_removed_does_not_stop_the_next_parts(fake):
    fake.python("*bench_kernels_cuda*", 'rm -r "$OUT"')
    process = fake.start("--parts", "bench,memcheck")
    printed, _ = process.communicate(timeout=50)
    assert "cannot write the results" in printed
    assert "memcheck: passed" in printed
    assert process.returncode == 1


def test_a_process_of_tests_that_ends_early_has_not_passed():
    assert gpu_parts.judge_tests(0, PASSED)["passed"]
    assert not gpu_parts.judge_tests(0, PASSED.partition("\n")[0])["passed"]


def test_options_that_contradict_themselves_are_refused(fake):
    for options in (["--seconds", "nan"], ["--seconds", "0"], ["sanitize", "--parts", "bench"]):
        process = fake.start(*options)
        assert "expected" in process.communicate()[0]
        assert process.returncode == 2


def test_the_page_has_the_parts_in_their_order_with_their_limits():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (CHECK.parent / "README.md").read_text(), re.M)
    assert rows == [(name, str(part.limit)) for name, part in gpu_parts.PARTS.items()]


def test_without_a_gpu_sanitize_says_so_and_all_parts_are_an_error(fake):
    (fake.folder / "torch.py").write_text(TORCH.replace("True", "False"))
    for options, code in (["sanitize"], 0), ([], 1):
        process = fake.start(*options)
        assert "no GPU is visible to PyTorch" in process.communicate()[0]
        assert process.returncode == code


# ---- how outputs are judged ----------------------------------------------------------------------

OURS = """\
========= Invalid __global__ read of size 4 bytes
=========     at void calcops::ops::force::(anonymous namespace)::force_rows<float>(float*)+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========\x20
"""
OF_CUB = """\
========= Uninitialized __global__ memory read of size 8 bytes
=========     at void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<long>(long*)+0x2a0
=========     by thread (3,0,0) in block (0,0,0)
=========\x20
"""
OF_TORCH = OF_CUB.replace("at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", "at::native::copy")
# An output that is copied to the host, but was not written as a whole. It names no kernel.
OF_COPY = """\
========= Host API memory access error at host access to 0x7f of size 8 bytes
=========     Uninitialized access at 0x7f on access by cudaMemcpy source
=========\x20
"""
INTERNAL = "========= Internal Sanitizer Error: Errors might go undetected\n"
NOT_PRINTED = "========= ERROR SUMMARY: 500 errors were not printed. Use --print-limit option\n"
SUMMARY = "========= COMPUTE-SANITIZER\n{}========= ERROR SUMMARY: {} errors\n"


@pytest.mark.parametrize(
    "tool, code, report, records, passed",
    [
        ("memcheck", 0, SUMMARY.format("", 0), [], True),
        ("memcheck", 9, SUMMARY.format(OURS, 1), [OURS], False),
        ("memcheck", 0, SUMMARY.format("", 7), [], False),
        ("initcheck", 9, SUMMARY.format("", 7), [], False),
        ("initcheck", 9, SUMMARY.format(OF_TORCH, 1), [OF_TORCH], False),
        ("memcheck", 9, SUMMARY.format(OF_CUB, 1), [OF_CUB], False),
        ("initcheck", 9, SUMMARY.format(OURS, 1), [OURS], False),
        ("initcheck", 9, SUMMARY.format(OF_CUB + OF_CUB, 2), [], True),
        ("initcheck", 9, SUMMARY.format(OF_CUB + OURS, 2), [OURS], False),
        ("initcheck", 9, SUMMARY.format(OF_CUB + OF_COPY, 2), [OF_COPY], False),
        ("initcheck", 9, SUMMARY.format(OF_CUB, 1) + NOT_PRINTED, [], False),
        ("initcheck", 9, SUMMARY.format(OF_CUB + INTERNAL, 1), [INTERNAL], False),
        ("initcheck", 1, SUMMARY.format(OF_CUB, 1), [], False),
        ("initcheck", 0, "========= COMPUTE-SANITIZER\n", [], False),
        ("initcheck", None, SUMMARY.format("", 0), [], False),
        ("racecheck", 0, "========= RACECHECK SUMMARY: 0 hazards displayed\n", [], True),
        ("racecheck", 9, "========= RACECHECK SUMMARY: 1 hazard displayed\n", [], False),
    ],
)
def test_a_record_of_our_kernels_fails_and_one_of_pytorch_fails_except_in_initcheck(
    tool, code, report, records, passed
):
    result = gpu_parts.judge_sanitizer(tool, code, f"{PASSED}\n{report}")
    assert result["passed"] == passed
    assert result["records"] == records


def test_outcomes_are_counted_with_and_without_xdist_even_if_pytest_was_killed():
    output = (
        "tests/a.py::test_a[1 x 2] PASSED          [ 20%]\n"
        "tests/a.py::test_b FAILED                 [ 40%]\n"
        "tests/a.py::test_c SKIPPED (no PASSED)    [ 60%]\n"
        "[gw0] [ 80%] PASSED tests/a.py::test_d[x y] \n"
        "[gw1] [100%] ERROR tests/a.py::test_e[x y] \n"
    )
    result = gpu_parts.judge_tests(None, output)
    assert result["summary"] == "2 passed, 1 failed, 1 skipped, 1 error"
    assert result["failed"] == ["tests/a.py::test_b", "tests/a.py::test_e[x y]"]
    assert not result["passed"]
    assert not gpu_parts.judge_tests(0, "collected 0 items\n")["passed"]


def test_a_kernel_that_never_ran_is_named_with_its_operator(fake):
    missed = re.compile(r"ran: .*density.*::backward_kernel.*\n")
    kernels = fake.folder / "kernels"
    assert missed.search(kernels.read_text())
    kernels.write_text(missed.sub("", kernels.read_text()))
    code, results, _ = fake.check("--parts", "kernels")
    assert code == 1
    jobs = results["parts"]["kernels"]["jobs"]
    assert jobs["density"]["summary"].endswith("never run: density: backward_kernel")
    assert [name for name, job in jobs.items() if not job["passed"]] == ["density"]


def test_racecheck_takes_tests_that_exist_of_every_operator_that_shares_memory():
    jobs = {job.name: job.command for job in gpu_parts.PARTS["racecheck"].jobs(60)}
    for source in (path for library in gpu_parts.LIBRARIES for path in library.glob("*/*.cu")):
        assert (source.stem in jobs) == ("__shared__" in source.read_text())
    tests = [word for command in jobs.values() for word in command if "::" in str(word)]
    assert tests
    for file, _, name in (test.partition("::") for test in tests):
        assert f"def {name}(" in Path(file).read_text()
    ports = [command[command.index("--port") + 1] for command in jobs.values()]
    assert len(set(ports)) == len(ports)


# ---- which tests and cases there are -------------------------------------------------------------

OPTIONAL = """
    IPython ase cv2 expecttest h5py ipykernel joblib matplotlib mypy nbclient nbformat scipy skimage
    tqdm vesin yaml
""".split()
# A plugin: these packages cannot be imported, PyTorch sees a GPU, and the tests are printed.
PLUGIN = f"""
import functools, inspect, json, sys, torch
source = functools.cache(inspect.getsource)
class Blocked:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Blocked())
torch.cuda.is_available = lambda: True
def pytest_collection_finish(session):
    for item in session.items:
        is_marked = item.get_closest_marker("gpu") is not None
        print("item:", json.dumps([item.nodeid, is_marked, source(item.function)]))
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Return [name, has the marker `gpu`, source] of each test, without optional packages."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "without_optional.py").write_text(PLUGIN)
    options = "-p without_optional -p no:cacheprovider --collect-only -q".split()
    command = "-m", "pytest", *options, ROOT / "tests"
    path = f"{folder}:{ROOT}"
    printed = run(sys.executable, *command, PYTHONPATH=path).stdout
    return [json.loads(line) for line in re.findall(r"^item: (.*)$", printed, re.MULTILINE)]


def test_without_optional_packages_the_tests_are_collected(collected):
    assert len(collected) > 3000


def test_the_marker_gpu_is_on_the_tests_that_compute_on_a_gpu_and_no_others(collected):
    others = (
        "test_with_an_index_a_call_launches_at_most_two_kernels",
        "TestOnAGpu",
        "test_a_gpu_gives_the_results_of_the_cpu",
        "test_the_kernel_runs_on_the_current_stream",
        "test_a_cuda_tensor_is_refused",
    )
    for name, is_marked, source in collected:
        file, _, test = name.partition("::")
        expected = file.endswith(("_cuda_kernels.py", "test_force_cuda.py"))
        expected |= bool(re.search(r"[\[-]cuda[\]-]", test))
        expected |= test.partition("[")[0].partition("::")[0] in others
        assert is_marked == expected, name
        uses_cuda = re.search(r"\.cuda\(\)|device=\"cuda\"|torch\.cuda\._sleep", source)
        assert is_marked or not uses_cuda, name
    for other in others:
        assert any(other in name for name, _, _ in collected), other


def test_every_case_of_the_benchmark_runs(tmp_path):
    program = CHECK.with_name("bench_kernels_cuda.py")
    run(sys.executable, program, "--rehearse", OUT=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'bench'}")
    results = json.loads((tmp_path / "kernels.json").read_text())
    rows = results["cases"]
    operators = "force edge_force warp density environment_spline tabulated_sum matrix_product "
    operators += "density_net near_pairs screened_repulsion "
    for operator in (operators + "neighbor_index edge_order").split():
        assert any(name.startswith(operator) for name in rows), operator
    assert all(set(row) == {"MB"} for row in rows.values())
    page = CHECK.with_name("results") / "cuda_predictions.md"
    predicted = re.findall(r"^\| (.*?) \| \d+ \| \d+ / \d+ \|", page.read_text(), re.MULTILINE)
    assert len(predicted) > 20
    assert set(predicted) <= set(rows)

    results["machine"]["gpu"] = "NVIDIA H200"
    for us, name in zip(
        (70, 400), ("force float64 sorted, index", "density float32, harmonics 1, functions 8")
    ):
        rows[name] |= {"us": us, "copy us": 43, "of copy": 43 / us}
    (tmp_path / "kernels.json").write_text(json.dumps(results))
    printed = run(sys.executable, program, "--table", tmp_path / "kernels.json").stdout
    assert printed.count("\n| ") == len(rows) + 1
    assert "| 43 | 70 | 61% | 62-75 | confirmed |" in printed
    assert "| 43 | 400 | 11% | 150-300 | **refuted** |" in printed
