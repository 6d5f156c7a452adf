"""The CUDA sources without a GPU: no atomics of floats, no warnings of nvcc."""

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
    calls = re.findall(r"\batomic\w*\(([^,]*),", text) + re.findall(
        r"\batomic_ref\b.*|\bred\.\w+.*", text
    )
    for call in calls:
        target = re.findall(r"\w+", call.split("+")[0])[-1]
        types = re.findall(rf"([\w ]+?)\s*\*\s*{target}\b", text)
        assert types and {type.strip().removeprefix("const ") for type in types} <= INTEGERS, (
            call,
            types,
        )


@pytest.mark.skipif(NVCC is None, reason="no nvcc in torch's CUDA_HOME or on PATH")
@pytest.mark.parametrize("source", sorted(OPS.glob("*/*.cu")), ids=lambda path: path.name)
def test_the_compiler_makes_no_atomic_of_floats_and_warns_of_nothing(tmp_path, source):
    """In the older standard: test_calcops_jit_build.py builds all for two architectures in the
    newer, and loads it."""
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
    # Not under a sanitizer.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    said = subprocess.run(
        [*command, str(source), "-o", str(ptx)], capture_output=True, text=True, env=environment
    )
    assert said.returncode == 0, said.stdout + said.stderr
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", ptx.read_text(), re.MULTILINE)
    assert not [name for name in atomics if re.search(r"\.b?f(16|32|64)", name)], set(atomics)
    assert bool(atomics) == ("atomic" in source.read_text())  # the pattern finds what there is


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_sanitizer_says_so_and_skips():
    command = [sys.executable, ROOT / "tests" / "bench" / "gpu_check.py", "sanitize"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (
        run.returncode == 0 and run.stdout == "gpu_check: skipped, no GPU is visible to PyTorch\n"
    )
