"""All that a GPU must show, in one command and without installing anything.

    make gpu-check PYTHON=python3

Builds for the GPU that is here, runs the CUDA tests, compute-sanitizer over the tests of every CUDA
kernel, and the benchmarks of tests/bench/bench_*_cuda.py; all add what they find to results.json
($OUT, else here). Needs PyTorch with CUDA, nvcc, ninja and pytest. With the argument `sanitize`
(make sanitize-gpu) only compute-sanitizer, and nothing without a GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent

# The tests of every kernel at its boundaries, which the emulation of tests/operators/cuda_on_cpu runs too.
KERNELS = [
    "-q",
    "-p",
    "no:cacheprovider",
    *map(str, sorted((ROOT / "tests").rglob("test_*_cuda_kernels.py"))),
]


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
    """Kernels of ops/ that the tests which the sanitizer watches do not run."""
    names = {
        name
        for source in ROOT.glob("ops/*/*.cu")
        for name in re.findall(
            r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)", source.read_text()
        )
    }
    record = (
        "import pytest\nfrom torch.profiler import ProfilerActivity, profile\n"
        f"with profile(activities=[ProfilerActivity.CUDA]) as record: pytest.main({KERNELS!r})\n"
        "print(*{event.name for event in record.events()}, sep='\\n')"
    )
    seen = run(sys.executable, "-c", record).stdout
    return sorted(name for name in names if not re.search(rf"\b{name}\b", seen))


def sanitize():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{home}/bin"
    )
    if tool is None:
        return {"passed": False, "summary": "no compute-sanitizer on PATH or in CUDA_HOME/bin"}
    # PyTorch's caching allocator would hide accesses between two tensors of one segment.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CALCOPS_KERNEL_RUNS": "1"}
    missed = never_run()
    found = {
        "coverage": {"passed": not missed, "summary": f"never run: {', '.join(missed) or 'none'}"}
    }

    def watch(check):
        options = [
            "--tool",
            check,
            "--target-processes",
            "application-only",
            "--error-exitcode",
            "9",
        ]
        return run(tool, *options, sys.executable, "-m", "pytest", *KERNELS, env=environment)

    checks = ("memcheck", "racecheck", "initcheck", "synccheck")
    with ThreadPoolExecutor() as pool:
        for check, result in zip(checks, pool.map(watch, checks), strict=True):
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", result.stdout)
            found[check] = {
                "passed": result.returncode == 0,
                "summary": summary[-1] if summary else "no summary",
            }
    return {"passed": all(f["passed"] for f in found.values()), **found}


def main():
    only_sanitize = sys.argv[1:] == ["sanitize"]
    if not torch.cuda.is_available():
        why = "no GPU is visible to PyTorch"
        sys.exit(print(f"gpu_check: skipped, {why}") if only_sanitize else f"gpu_check: {why}")
    build = run(sys.executable, "-m", "calcops_jit", "build")
    results = {"build": {"passed": build.returncode == 0}}
    for part in (
        ([sanitize] if only_sanitize else [tests, sanitize]) if build.returncode == 0 else ()
    ):
        results[part.__name__] = part()
    path = Path(os.environ.get("OUT", ROOT)) / "results.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    failed = [part for part, found in results.items() if not found["passed"]]
    for bench in (
        sorted((ROOT / "tests" / "bench").glob("bench_*_cuda.py")) if not only_sanitize else ()
    ):
        if subprocess.run([sys.executable, bench], cwd=ROOT).returncode:
            failed.append(bench.name)
    print(path, f"failed: {', '.join(failed)}" if failed else "all passed", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
