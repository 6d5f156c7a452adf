"""Never stale, never spurious, for CUDA: a stand-in for nvcc compiles .cu files as C++ and keeps a
log."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkout import BUILDING, CALL, Checkout, the_zygote

from _calcops_jit import cuda
from _calcops_jit.cache.closure import Changed, file_digest
from _calcops_jit.compile import recording
from _calcops_jit.request import Request

NVCC = """#!{python}
import subprocess, sys
words = [w for w in sys.argv[1:] if not w.startswith(("-gencode", "--expt", "-D__CUDA", "-arch"))]
if "--list-gpu-arch" in words:
    sys.exit(print("compute_80\\ncompute_90"))
with open({log!r}, "a") as log:
    print(*words, file=log)
kept = [w for w in words if w.startswith(("-I", "-D", "-O", "-std")) and w != "-D"]
system = [part for i, w in enumerate(words) if w == "-isystem" for part in ("-isystem", words[i + 1])]
source, target = words[words.index("-c") + 1], words[words.index("-o") + 1]
depend = words[words.index("-MF" if "-MF" in words else "--dependency-output") + 1]
sys.exit(subprocess.call(["{compiler}", "-x", "c++", "-fPIC", "-MD", "-MF", depend, "-MT", target, *kept, *system,
                          "-c", source, "-o", target]))
"""
SOURCE = """
#include <value.h>
extern "C" __attribute__((visibility("default"))) int answer() { return VALUE; }
"""


class CudaCheckout(Checkout):
    def __init__(self, folder):
        super().__init__(the_zygote(BUILDING), folder)
        self.home = folder / "toolkit"
        self.nvcc = self.home / "bin/nvcc"
        self.value = self.home / "include/value.h"
        for path, text in {
            self.nvcc: NVCC.format(
                python=sys.executable, log=str(self.log), compiler=shutil.which("c++")
            ),
            self.value: "#define VALUE 1\n",
            self.home
            / "include/cuda.h": f"#define CUDA_VERSION {torch.version.cuda.partition('.')[0]}000\n",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.nvcc.chmod(0o755)
        self.write("ops/tiny/tiny.cpp", "int host;\n")
        self.write("ops/tiny/tiny.cu", SOURCE)
        self.options = {"CALCOPS_CUDA": "1", "CUDA_HOME": self.home, "TORCH_CUDA_ARCH_LIST": "8.0"}

    def start(self, script=CALL, **options):
        return super().start(script, **{**self.options, **options})


@pytest.fixture
def built(tmp_path):
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is a CPU build")
    built = CudaCheckout(tmp_path)
    assert built.answer() == 1
    assert built.compiled() == 2
    return built


CHANGES = {
    "a .cu file": (
        lambda b: b.write("ops/tiny/tiny.cu", SOURCE.replace("VALUE;", "VALUE + 1;")),
        2,
        1,
    ),
    "a header of CUDA": (lambda b: b.value.write_text("#define VALUE 3\n"), 3, 1),
    "nvcc behind its path": (lambda b: b.nvcc.write_text(b.nvcc.read_text() + "# 13.9\n"), 1, 2),
    "the architectures": (lambda b: {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, 1, 2),
    "NVCC_APPEND_FLAGS": (lambda b: {"NVCC_APPEND_FLAGS": "-lineinfo"}, 1, 2),
    "NVCC_PREPEND_FLAGS": (lambda b: {"NVCC_PREPEND_FLAGS": "-lineinfo"}, 1, 2),
    "flags for C++, which nvcc does not get": (lambda b: {"CALCOPS_CFLAGS": "-DX"}, 1, 1),
    "the host compiler": (lambda b: {"CC": shutil.which("gcc")}, 1, 2),
}
NO_CHANGES = {
    "nvcc touched": lambda b: b.nvcc.touch(),
    "its header written anew": lambda b: b.value.write_text(b.value.read_text()),
    "the toolkit moved": lambda b: {"CUDA_HOME": b.home.rename(b.home.with_name("moved"))},
    "a new file of the toolkit": lambda b: (b.home / "include/lonely.h").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_rebuilds_after_a_change_of(built, change):
    do, answer, units = CHANGES[change]
    done = do(built)
    options = done if isinstance(done, dict) else {}
    assert built.answer(**options) == answer
    assert built.compiled() == units
    assert built.answer(**options) == answer
    assert built.compiled() == 0


@pytest.mark.parametrize("change", NO_CHANGES)
def test_no_compiler_is_started_after(built, change):
    done = NO_CHANGES[change](built)
    options = done if isinstance(done, dict) else {}
    assert (built.answer(**options), built.log.exists()) == (1, False)


def test_nvccs_host_compiler_is_an_input(built):
    """nvcc runs the gcc that is first on PATH, or NVCC_CCBIN, whatever CXX is."""
    gcc = built.path / "bin" / "gcc"
    gcc.parent.mkdir()
    script = f'#!/bin/sh\nexec {shutil.which("gcc")} "$@"\n'
    gcc.write_text(script)
    gcc.chmod(0o755)
    first = {"PATH": f"{gcc.parent}:{os.environ['PATH']}"}
    for named in first, {"NVCC_CCBIN": gcc}, {"NVCC_CCBIN": gcc.parent}:
        gcc.write_text(script)
        built.answer(**named)
        built.compiled()
        assert (built.answer(**named), built.log.exists()) == (1, False)
        gcc.write_text(script + "# another version\n")
        assert built.compiled() > 0 == True
        assert built.answer(**named) == 1


@pytest.mark.parametrize("named", ["PATH", "NVCC_CCBIN"])
def test_another_host_compiler_builds_anew(built, named):
    gcc = built.path / "bin" / "gcc"
    gcc.parent.mkdir()
    gcc.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} "$@"\n')
    gcc.chmod(0o755)
    environment = (
        {"PATH": f"{gcc.parent}:{os.environ['PATH']}"} if named == "PATH" else {"NVCC_CCBIN": gcc}
    )
    assert built.answer(**environment) == 1
    assert built.compiled() == 2


# ---- without an nvcc: what is in the key, and the toolkit's files --------------------------------

REQUEST = Request(
    name="x",
    root="/r",
    sources=("/r/a.cu",),
    cflags=(),
    cuda=cuda.Choice(build=True, home="/cuda", version="13.0", arches="8.0", gpus=("H200",)),
)


@pytest.mark.parametrize("field", ["cflags", "cuda_cflags", "ldflags", "include_paths", "sources"])
def test_each_list_of_flags_is_in_the_key(field):
    other = REQUEST.but(**{field: (*getattr(REQUEST, field), "-another")})
    assert other.slot != REQUEST.slot


@pytest.mark.parametrize(
    "change",
    [
        {"arches": "9.0"},
        {"arches": "", "gpus": ("A100",)},
        {"arches": "", "gpus": ("A100", "H200")},
        {"version": "13.1"},
    ],
)
def test_another_gpu_set_architecture_or_toolkit_is_another_key(change):
    other = REQUEST.but(cuda=cuda.Choice(**vars(REQUEST.cuda) | change))
    assert other.slot != REQUEST.slot


def test_an_nvcc_or_a_header_of_cuda_that_was_swapped_behind_its_path_is_seen(tmp_path):
    for name in ("bin/nvcc", "include/cuda.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("one")
        (tmp_path / name).chmod(0o755)
    request = REQUEST.but(cuda=cuda.Choice(**vars(REQUEST.cuda) | {"home": str(tmp_path)}))
    read = {*request.tools, str(tmp_path / "include/cuda.h")}
    for name in ("bin/nvcc", "include/cuda.h"):
        closure = recording.Recorder(request, [], recording.Before(str(tmp_path), read)).closure(
            set(), read
        )
        closure.check(request)
        (tmp_path / name).write_text("two")
        with pytest.raises(Changed, match=f"{name} changed"):
            closure.check(request)


def test_a_header_of_torch_is_in_the_closure(tmp_path):
    header = Path(torch.__file__).parent / "include/torch/library.h"
    read = {str(header), *REQUEST.tools}
    closure = recording.Recorder(REQUEST, [], recording.Before(str(tmp_path), read)).closure(
        set(), read
    )
    digest = file_digest(str(header))
    closure.digests = closure.digests.replace(digest, "0" * len(digest))
    closure.stamps = bytearray(len(closure.stamps))
    with pytest.raises(Changed, match="torch/library.h changed"):
        closure.check(REQUEST)
