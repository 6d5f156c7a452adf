"""Run all checks on a GPU by one command, without installing anything.

    make gpu-check PYTHON=python3

Builds for the GPU of this machine, runs the CUDA tests, compute-sanitizer over the tests of every
CUDA kernel, and the benchmarks bench/bench_*_cuda.py. All write their results into
results.json in $OUT or in this repository. Says in a line each what this Python or this machine
lacks for that, such as PyTorch with CUDA, nvcc, ninja, pytest or a GPU. The argument `sanitize`
(make sanitize-gpu) runs only compute-sanitizer, and nothing without a GPU.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

kNoGpu = "no GPU is visible to PyTorch"

# Arguments of pytest for the tests of every kernel at its boundaries.
KERNELS = [
    "-q",
    "-p",
    "no:cacheprovider",
    *map(str, sorted((ROOT / "tests").rglob("test_*_cuda_kernels.py"))),
]


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
    if compute_sanitizer() is None:
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


def compute_sanitizer():
    """Return the path of compute-sanitizer, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{home}/bin")


def run(*command, **options):
    print("+", *command[:6], flush=True)
    result = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    print(result.stdout[-6000:], flush=True)
    return result


def tests():
    result = run(sys.executable, "-m", "pytest", "-q", "tests", "-k", "cuda", "-m", "not long")
    return {"passed": result.returncode == 0, "summary": result.stdout.strip().splitlines()[-1]}


def never_run():
    """Return the kernels of ops/ that the tests of compute-sanitizer do not run."""
    kernel = r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)"
    names = set()
    for source in ROOT.glob("ops/*/*.cu"):
        names |= set(re.findall(kernel, source.read_text()))
    script = f"""
import pytest
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CUDA]) as record:
    pytest.main({KERNELS!r})
print(*{{event.name for event in record.events()}}, sep="\\n")
"""
    events = run(sys.executable, "-c", script).stdout
    return sorted(name for name in names if not re.search(rf"\b{name}\b", events))


def sanitize():
    tool = compute_sanitizer()
    # PyTorch's caching allocator puts tensors side by side, so an access beyond the end of one of
    # them would not be found.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CALCOPS_KERNEL_RUNS": "1"}
    missed = never_run()
    results = {
        "coverage": {"passed": not missed, "summary": f"never run: {', '.join(missed) or 'none'}"}
    }

    def watch(check):
        options = ["--tool", check, "--target-processes", "application-only"]
        options += ["--error-exitcode", "9"]
        return run(tool, *options, sys.executable, "-m", "pytest", *KERNELS, env=environment)

    checks = ("memcheck", "racecheck", "initcheck", "synccheck")
    with ThreadPoolExecutor() as pool:
        for check, result in zip(checks, pool.map(watch, checks), strict=True):
            summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", result.stdout)
            results[check] = {
                "passed": result.returncode == 0,
                "summary": summaries[-1] if summaries else "no summary",
            }
    return {"passed": all(result["passed"] for result in results.values()), **results}


def main():
    only_sanitize = sys.argv[1:] == ["sanitize"]
    lacks = list(missing())
    if only_sanitize and kNoGpu in lacks:
        print(f"gpu_check: skipped, {kNoGpu}")
        return 0
    if lacks:
        print(*(f"gpu_check: {line}" for line in lacks), sep="\n", file=sys.stderr)
        return 1
    os.environ["PYTHONPATH"] = str(ROOT)
    return check(only_sanitize)


def check(only_sanitize):
    build = run(sys.executable, "-m", "calcops_jit", "build")
    results = {"build": {"passed": build.returncode == 0}}
    parts = [sanitize] if only_sanitize else [tests, sanitize]
    if build.returncode == 0:
        for part in parts:
            results[part.__name__] = part()
    path = Path(os.environ.get("OUT", ROOT)) / "results.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    failed = [part for part, result in results.items() if not result["passed"]]
    if not only_sanitize:
        for bench in sorted((ROOT / "bench").glob("bench_*_cuda.py")):
            if subprocess.run([sys.executable, bench], cwd=ROOT).returncode:
                failed.append(bench.name)
    print(path, f"failed: {', '.join(failed)}" if failed else "all passed", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
