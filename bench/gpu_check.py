"""Run all checks on a GPU by one command, without installing anything, part by part.

    make gpu-check PYTHON=python3
    python bench/gpu_check.py [--seconds 225] [--parts build,kernels,bench,memcheck]
    python bench/gpu_check.py sanitize                              (make sanitize-gpu)

gpu_parts.py has the parts in their order, with their limits. At its limit, the programs of a part
are killed, and the next part begins. A part may also use the seconds that earlier parts have left.
`--seconds` is a limit for all parts together, and `--parts` chooses some. `sanitize` chooses those
of compute-sanitizer and what they need. Without a GPU it does nothing; other parts are an error.

results.json in $OUT or in build/gpu_check begins with the machine: date, GPU, driver, PyTorch and
commit. It is written after each program. What the program printed is appended to gpu_check.log
there. If gpu_check.py is killed, only the results of the running programs are lost. The exit code
is 0 if all parts have passed. What this Python or this machine lacks, such as PyTorch with CUDA,
nvcc, ninja or pytest, is named in a line each. README.md has the commands for fifteen minutes.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gpu_results
from gpu_parts import PARTS, ROOT, toolkit_program, workers

SANITIZE = "build", "kernels", "memcheck", "racecheck", "synccheck", "initcheck"

kNoGpu = "no GPU is visible to PyTorch"
kMostBytes = 20_000_000  # of the output of a program that are read


def missing():
    """Yield what the checks need and do not find, in a line each."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        yield f"expected Python 3.11 to 3.14, got {sys.version.split()[0]}: {sys.executable}"
    for module, name in {"pytest": "pytest", "numpy": "NumPy", "setuptools": "setuptools"}.items():
        if importlib.util.find_spec(module) is None:
            yield f"{name} is not installed for {sys.executable}: pip install {module}"
    if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        yield "ninja, which runs the compilers, is neither installed nor on PATH: pip install ninja"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        yield "no C++ compiler is on PATH: install GCC 11 or newer, or set CXX"
    if toolkit_program("compute-sanitizer") is None:
        yield "compute-sanitizer of the CUDA toolkit is neither on PATH nor in CUDA_HOME/bin"
    yield from missing_of_torch()


def missing_of_torch():
    """Yield what PyTorch lacks, and what it lacks of a CUDA toolkit and a GPU, in a line each."""
    if importlib.util.find_spec("torch") is None:
        yield (
            f"PyTorch is not installed for {sys.executable}: make venv, or name a Python that has "
            "it, make gpu-check PYTHON=/path/to/python3"
        )
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield f"PyTorch cannot be imported: {error}"
        return

    if torch.version.cuda is None:
        yield f"PyTorch {torch.__version__} is a build without CUDA: install one with CUDA"
        return
    from _calcops_jit.cuda import find_toolkit

    home, other_version = find_toolkit()
    if not home:
        of_other = f", only that of CUDA {other_version}" if other_version else ""
        yield (
            f"no nvcc for PyTorch's CUDA {torch.version.cuda} is on PATH or in CUDA_HOME/bin"
            f"{of_other}: make cuda installs it in .venv"
        )
    if not torch.cuda.is_available():
        yield kNoGpu


def kill_group(process):
    """Kill a program and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_part(file):
    """Return the text of a file, or its end behind a line that says so.

    judge_sanitizer takes this line for a record, so that a report of which a part was not read is
    never a good one.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - kMostBytes))
    text = file.read().decode(errors="replace")
    return text if size <= kMostBytes else f"========= the end of {size} bytes\n{text}"


def judged(job, code, output):
    """Return whether a program has passed, and a summary. `code` is None if it was killed."""
    try:
        result = job.judge(code, output)
    except Exception as error:  # the program has printed something else than is expected
        result = {"passed": False, "summary": f"{type(error).__name__}: {error}"}
    lacks = [path.name for path in job.files if not path.exists()]
    if lacks:
        result |= {"passed": False, "summary": f"no {', '.join(lacks)}; {result['summary']}"}
    if code is None:
        result["summary"] = f"at the limit: {result['summary']}"
    return result | {"summary": result["summary"][:500], "exit code": code}


class Run:
    """The results so far, and the programs that run."""

    def __init__(self, begin, seconds):
        self.begin = begin
        self.end = begin + seconds
        self.parts = {}
        self.results = {"machine": gpu_results.describe(), "parts": self.parts}
        self.deadline = time.monotonic()
        self.processes = set()
        self.lock = threading.RLock()
        self.path = gpu_results.folder() / "results.json"
        self.log = self.path.with_name("gpu_check.log")
        self.log.write_text("")

    def seconds(self):
        return round(time.monotonic() - self.begin, 1)

    def print(self, text):
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"[{self.seconds():6.1f} s] {text}"[:200], flush=True)

    def write(self, to_log=""):
        """Write the results, and append to the log. If that fails, the next parts run all the same."""
        try:
            with self.lock:
                gpu_results.write_json(self.path, self.results)
                with open(self.log, "a") as log:
                    log.write(to_log)
        except OSError as error:
            self.print(f"cannot write the results: {error}")

    def run_part(self, name):
        """Run the programs of a part until its limit."""
        limit = PARTS[name].limit * max(1, 16 / len(os.sched_getaffinity(0)))
        self.deadline = min(self.deadline + limit, self.end)
        left = self.deadline - time.monotonic()
        if left <= 0:
            return self.finish(name, "not run", "no time left")
        jobs = PARTS[name].jobs(left)
        if jobs is None:
            return self.finish(name, "skipped", f"{name} is neither on PATH nor in CUDA_HOME/bin")
        jobs = list(jobs)
        self.parts[name] = {"state": "running", "jobs": {}}
        self.write()
        with ThreadPoolExecutor(workers()) as pool:
            passed = list(pool.map(functools.partial(self.run_job, name), jobs))
        state = "passed" if passed and all(passed) else "failed"
        return self.finish(name, state, f"{sum(passed)} of {len(passed)} programs passed")

    def finish(self, name, state, summary):
        """Write how a part has ended."""
        result = self.parts.setdefault(name, {"jobs": {}})
        result |= {"state": state, "summary": summary, "ended at": self.seconds()}
        self.write()
        self.print(f"{name}: {state}, {summary}")

    def run_job(self, part, job):
        """Run a program, and write how it ended. Return True if it passed."""
        begin = time.monotonic()
        command = list(map(str, job.command))
        for path in job.files:
            path.unlink(missing_ok=True)
        code, output = self.execute(command, os.environ | job.variables)
        if job.report and job.report.exists():
            with open(job.report, "rb") as file:
                output += "\n" + last_part(file)
        result = judged(job, code, output)
        result["seconds"] = round(time.monotonic() - begin, 1)
        ending = f"{result['seconds']} s, exit code {code}: {result['summary']}"
        shown = " ".join(command)[:500]
        with self.lock:
            self.parts[part]["jobs"][job.name] = result
            self.write(f"\n+ {part} {job.name}: {shown}\n{output[-300_000:]}\n= {ending}\n")
        state = "passed" if result["passed"] else "FAILED"
        self.print(f"  {part} {job.name}: {state}, {result['summary']}")
        return result["passed"]

    def execute(self, command, environment):
        """Return the exit code of a program, None if it was killed at the limit, and its output."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return None, "no time left"
        with tempfile.TemporaryFile() as output:
            try:
                process = self.start(command, environment, output)
            except OSError as error:
                return 127, str(error)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                code = None
            # Nobody waits for the end of it, because a program that waits for a driver may not end.
            kill_group(process)
            self.processes.discard(process)
            return code, last_part(output)

    def start(self, command, environment, output):
        """Start a program in a process group of its own, so that all of it can be killed."""
        with self.lock:  # stop() kills every program that has started
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            self.processes.add(process)
        return process

    def stop(self, number, frame):
        """Kill the running programs, and say in the results which part they belonged to."""
        with self.lock:
            for process in list(self.processes):
                kill_group(process)
            for result in self.parts.values():
                if result["state"] == "running":
                    result["state"] = f"ended by {signal.Signals(number).name}"
            self.write()
            os._exit(128 + number)


def set_environment():
    """Let all programs share one build and one folder, and write their output at once."""
    import torch

    os.environ["CALCOPS_CUDA"] = "1"  # also where the loader does not find the GPU
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}+PTX"
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ["OUT"] = str(gpu_results.folder().resolve())  # the programs run in another folder


def check(run, parts):
    """Run the parts. Return 0 if all have passed, else 1."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, run.stop)
    run.write()
    run.print("machine: " + ", ".join(str(value) for value in run.results["machine"].values()))
    for part in parts:
        if run.parts.get("build", {"state": "passed"})["state"] == "passed":
            run.run_part(part)
        else:
            run.finish(part, "not run", "the build failed")
    states = {part: run.parts[part]["state"] for part in parts}
    skipped = [part for part, state in states.items() if state == "skipped"]
    failed = [part for part, state in states.items() if state not in ("passed", "skipped")]
    with contextlib.suppress(OSError):
        print(run.path)
        print(f"failed: {', '.join(failed)}" if failed else "all passed", end="")
        print(f"; skipped: {', '.join(skipped)}" if skipped else "")
    return 1 if failed else 0


def chosen_parts(text):
    names = text.split(",")
    unknown = set(names) - {"machine", *PARTS}  # the machine is always described
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PARTS)}, got {min(unknown)}")
    return names


def positive(text):
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return float(text)


def main():
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", choices=["sanitize"])
    parser.add_argument("--seconds", type=positive, default=1e9, help="a limit for all parts")
    parser.add_argument("--parts", type=chosen_parts, help=",".join(PARTS))
    options = parser.parse_args()
    if options.only and options.parts:
        parser.error("expected `sanitize` or --parts, got both")
    lacks = list(missing())
    if options.only and kNoGpu in lacks:
        print(f"gpu_check: skipped, {kNoGpu}")
        return 0
    if lacks:
        print(*(f"gpu_check: {line}" for line in lacks), sep="\n", file=sys.stderr)
        return 1
    set_environment()
    chosen = SANITIZE if options.only else options.parts or PARTS
    return check(Run(begin, options.seconds), [part for part in PARTS if part in chosen])


if __name__ == "__main__":
    sys.exit(main())
