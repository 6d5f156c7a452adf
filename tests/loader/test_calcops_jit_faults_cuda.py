"""Faults of an installed CUDA toolkit, and shared libraries that are missing at load."""

import os
import shutil
import subprocess

import pytest
import torch
from test_calcops_jit_faults import NVCC_13

from _calcops_jit import cuda
from _calcops_jit.compile import diagnosis
from _calcops_jit.request import Request


@pytest.mark.skipif(cuda.find_toolkit()[0] == "", reason="no nvcc for this PyTorch")
def test_faults_of_a_real_nvcc_are_foreseen_with_the_causes_of_its_messages(tmp_path, monkeypatch):
    home, version = cuda.find_toolkit()
    # A host compiler that says it is GCC 99, which nvcc refuses.
    host = tmp_path / "gcc-99"
    host.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} -U__GNUC__ -D__GNUC__=99 "$@"\n')
    host.chmod(0o755)
    source = tmp_path / "a.cu"
    source.write_text("__global__ void kernel() {}\n")
    monkeypatch.setenv("CC", str(host))
    choice = cuda.Choice(build=True, home=home, version=version, arches="3.5;8.0")
    request = Request(name="x", root=str(tmp_path), sources=(str(source),), cflags=(), cuda=choice)
    foreseen = [problem.cause for problem in diagnosis.foresee(request, "ninja")]
    assert foreseen == [
        "this nvcc does not know the GPU architecture",
        "the C++ compiler is too new for this nvcc",
    ]
    nvcc = [f"{home}/bin/nvcc", "-c", str(source), "-o", str(tmp_path / "a.o")]
    for option, cause in zip((["-arch=sm_35"], ["-ccbin", str(host)]), foreseen):
        result = subprocess.run([*nvcc, *option], capture_output=True, text=True)
        assert result.returncode != 0
        assert diagnosis.judge(result.stdout + result.stderr, request).cause == cause


def test_the_nvcc_of_the_pip_package_is_found(tmp_path, monkeypatch):
    home = tmp_path / "nvidia/cu13"
    files = {"bin/nvcc": NVCC_13, "include/cuda_runtime_api.h": "#define CUDART_VERSION 13020\n"}
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(text)
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.2")

    def access(path, mode, real=os.access):
        return str(tmp_path) in path and real(path, mode)

    # The toolkits of this machine are hidden.
    monkeypatch.setattr(os, "access", access)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert cuda.find_toolkit() == (str(home), "13.2")


@pytest.mark.parametrize(
    "error",
    [
        "version `GLIBCXX_3.4.32' not found (required by mine.so)",
        "libx.so.1: cannot open shared object file: No such file or directory",
    ],
)
def test_the_fix_of_a_missing_shared_library_is_a_command(error):
    request = Request(name="mine", root="/r", sources=("/r/mine.cpp",), cflags=())
    message = str(diagnosis.explain("cannot load mine.so", error, request))
    assert "  fix: export LD_" in message
    assert error in message
