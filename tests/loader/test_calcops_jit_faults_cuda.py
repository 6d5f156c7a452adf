"""Faults of CUDA toolkits that are really here, and libraries that the process lacks."""

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
def test_a_real_nvcc_is_asked_what_it_knows_and_its_own_words_have_the_same_cause(
    tmp_path, monkeypatch
):
    home, version = cuda.find_toolkit()
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
        said = subprocess.run([*nvcc, *option], capture_output=True, text=True)
        assert said.returncode != 0
        assert diagnosis.judge(said.stdout + said.stderr, request).cause == cause


def test_nvcc_of_the_wheel_counts_as_an_nvcc(tmp_path, monkeypatch):
    home = tmp_path / "nvidia/cu13"
    for name, text in {
        "bin/nvcc": NVCC_13,
        "include/cuda_runtime_api.h": "#define CUDART_VERSION 13020\n",
    }.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(text)
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(
        os, "access", lambda path, mode, real=os.access: str(tmp_path) in path and real(path, mode)
    )
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert cuda.find_toolkit() == (str(home), "13.2")


@pytest.mark.parametrize(
    "words",
    [
        "version `GLIBCXX_3.4.32' not found (required by mine.so)",
        "libx.so.1: cannot open shared object file: No such file or directory",
    ],
)
def test_a_library_that_the_process_cannot_give_has_a_command(words):
    request = Request(name="mine", root="/r", sources=("/r/mine.cpp",), cflags=())
    message = str(diagnosis.explain("cannot load mine.so", words, request))
    assert "  fix: export LD_" in message
    assert words in message
