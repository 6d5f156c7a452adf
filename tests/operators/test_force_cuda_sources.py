"""The CUDA sources, without a GPU: no atomic operation on floats, no warnings of nvcc."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils import cpp_extension

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"
NVCC = shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin") or shutil.which("nvcc")
INTEGERS = {
    "unsigned",
    "unsigned int",
    "unsigned long long",
    "uint32_t",
    "uint64_t",
    "int",
    "int32_t",
}


@pytest.mark.parametrize("source", sorted(OPS.glob("*/*.cu")), ids=lambda path: path.name)
def test_no_atomic_touches_a_float(source):
    text = re.sub(r"//.*", "", source.read_text())
    calls = re.findall(r"\batomic\w*\(([^,]*),", text)
    calls += re.findall(r"\batomic_ref\b.*|\bred\.\w+.*", text)
    for call in calls:  # for example "work.counts + row", whose target is `counts`
        target = re.findall(r"\w+", call.split("+")[0])[-1]
        types = re.findall(rf"([\w ]+?)\s*\*\s*{target}\b", text)
        assert types, call
        assert {type.strip().removeprefix("const ") for type in types} <= INTEGERS, (call, types)


@pytest.mark.long  # a foreign program
@pytest.mark.skipif(NVCC is None, reason="no nvcc in torch's CUDA_HOME or on PATH")
@pytest.mark.parametrize("source", sorted(OPS.glob("*/*.cu")), ids=lambda path: path.name)
def test_nvcc_makes_no_atomic_of_floats_and_gives_no_warning(tmp_path, source):
    """nvcc compiles here as C++17, the oldest standard that PyTorch uses.

    test_cuda.py compiles with the standard of the installed PyTorch.
    """
    ptx = tmp_path / "out.ptx"
    command = [
        NVCC,
        "-ptx",
        "-std=c++17",
        "-arch=compute_80",
        "-Werror",
        "all-warnings",
        "-I",
        str(OPS),
    ]
    # LD_PRELOAD holds a sanitizer in some runs of the tests; nvcc runs without it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run(
        [*command, str(source), "-o", str(ptx)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", ptx.read_text(), re.MULTILINE)
    assert not [name for name in atomics if re.search(r"\.b?f(16|32|64)", name)], set(atomics)
    # Shows that the pattern matches: a source with atomics has some in its PTX.
    assert bool(atomics) == ("atomic" in source.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_sanitizer_says_so_and_skips():
    command = [sys.executable, ROOT / "bench" / "gpu_check.py", "sanitize"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0
    assert run.stdout == "gpu_check: skipped, no GPU is visible to PyTorch\n"
