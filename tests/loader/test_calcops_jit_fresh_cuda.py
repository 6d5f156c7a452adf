"""Changes that must cause a rebuild of CUDA sources and changes that must not. A script in place of
nvcc compiles .cu files as C++ and keeps a log."""

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
unknown = ("-gencode", "--expt", "-D__CUDA", "-arch")
words = [word for word in sys.argv[1:] if not word.startswith(unknown)]
if "--list-gpu-arch" in words:
    sys.exit(print("compute_80\\ncompute_90"))
with open({log!r}, "a") as log:
    print(*words, file=log)
flags = [w for w in words if w.startswith(("-I", "-D", "-O", "-std")) and w != "-D"]
for i, word in enumerate(words):
    if word == "-isystem":
        flags += ["-isystem", words[i + 1]]
source = words[words.index("-c") + 1]
target = words[words.index("-o") + 1]
depend = words[words.index("-MF" if "-MF" in words else "--dependency-output") + 1]
command = ["{compiler}", "-x", "c++", "-fPIC", "-MD", "-MF", depend, "-MT", target, *flags]
sys.exit(subprocess.call([*command, "-c", source, "-o", target]))
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
        compiler = shutil.which("c++")
        major = torch.version.cuda.partition(".")[0]
        files = {
            self.nvcc: NVCC.format(python=sys.executable, log=str(self.log), compiler=compiler),
            self.value: "#define VALUE 1\n",
            self.home / "include/cuda.h": f"#define CUDA_VERSION {major}000\n",
        }
        for path, text in files.items():
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


# {change: (function, answer afterwards, number of units that are compiled)}. The function changes
# files of the checkout or returns environment variables.
CHANGES = {
    "a .cu file": (
        lambda b: b.write("ops/tiny/tiny.cu", SOURCE.replace("VALUE;", "VALUE + 1;")),
        2,
        1,
    ),
    "a header of CUDA": (lambda b: b.value.write_text("#define VALUE 3\n"), 3, 1),
    "another nvcc at the same path": (
        lambda b: b.nvcc.write_text(b.nvcc.read_text() + "# 13.9\n"),
        1,
        2,
    ),
    "the architectures": (lambda b: {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, 1, 2),
    "NVCC_APPEND_FLAGS": (lambda b: {"NVCC_APPEND_FLAGS": "-lineinfo"}, 1, 2),
    "NVCC_PREPEND_FLAGS": (lambda b: {"NVCC_PREPEND_FLAGS": "-lineinfo"}, 1, 2),
    "flags for C++, which nvcc does not get": (lambda b: {"CALCOPS_CFLAGS": "-DX"}, 1, 1),
    "the host compiler": (lambda b: {"CC": shutil.which("gcc")}, 1, 2),
}
NO_CHANGES = {
    "the time of nvcc": lambda b: b.nvcc.touch(),
    "a header of CUDA, written again": lambda b: b.value.write_text(b.value.read_text()),
    "the folder of the toolkit": lambda b: {"CUDA_HOME": b.home.rename(b.home.with_name("moved"))},
    "a new file of the toolkit": lambda b: (b.home / "include/lonely.h").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_of_cuda_causes_a_rebuild(built, change):
    make_change, answer, units = CHANGES[change]
    result = make_change(built)
    options = result if isinstance(result, dict) else {}
    assert built.answer(**options) == answer
    assert built.compiled() == units
    assert built.answer(**options) == answer
    assert built.compiled() == 0


@pytest.mark.parametrize("change", NO_CHANGES)
def test_no_compiler_starts_after_a_change_of_the_toolkit_that_is_no_input(built, change):
    result = NO_CHANGES[change](built)
    options = result if isinstance(result, dict) else {}
    assert built.answer(**options) == 1
    assert not built.log.exists()


def test_the_host_compiler_of_nvcc_is_an_input(built):
    """nvcc ignores CXX. It runs NVCC_CCBIN or the first gcc of PATH."""
    gcc = built.path / "bin" / "gcc"
    gcc.parent.mkdir()
    script = f'#!/bin/sh\nexec {shutil.which("gcc")} "$@"\n'
    gcc.write_text(script)
    gcc.chmod(0o755)
    path = f"{gcc.parent}:{os.environ['PATH']}"
    for environment in {"PATH": path}, {"NVCC_CCBIN": gcc}, {"NVCC_CCBIN": gcc.parent}:
        gcc.write_text(script)
        built.answer(**environment)
        built.compiled()
        assert built.answer(**environment) == 1
        assert not built.log.exists()
        gcc.write_text(script + "# another version\n")
        assert built.answer(**environment) == 1
        assert built.compiled() > 0


@pytest.mark.parametrize("variable", ["PATH", "NVCC_CCBIN"])
def test_another_host_compiler_causes_a_rebuild(built, variable):
    gcc = built.path / "bin" / "gcc"
    gcc.parent.mkdir()
    gcc.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} "$@"\n')
    gcc.chmod(0o755)
    values = {"PATH": f"{gcc.parent}:{os.environ['PATH']}", "NVCC_CCBIN": gcc}
    environment = {variable: values[variable]}
    assert built.answer(**environment) == 1
    assert built.compiled() == 2


# ---- without an nvcc: the key, and the files of the toolkit --------------------------------------

REQUEST = Request(
    name="x",
    root="/r",
    sources=("/r/a.cu",),
    cflags=(),
    cuda=cuda.Choice(build=True, home="/cuda", version="13.0", arches="8.0", gpus=("H200",)),
)


@pytest.mark.parametrize(
    "environment, compiler",
    [
        ({"CXX": "g++-13"}, "gcc"),
        ({"NVCC_CCBIN": "g++-13"}, "g++-13"),
        ({"CC": "gcc-12", "NVCC_CCBIN": "g++-13"}, "gcc-12"),
    ],
)
def test_the_host_compiler_is_cc_then_nvcc_ccbin_then_gcc(environment, compiler):
    request = REQUEST.but()
    request.environment = environment
    assert request.host_compiler == compiler


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
def test_other_gpus_architectures_or_toolkits_have_other_keys(change):
    other = REQUEST.but(cuda=cuda.Choice(**vars(REQUEST.cuda) | change))
    assert other.slot != REQUEST.slot


def test_another_nvcc_or_cuda_header_at_the_same_path_is_noticed(tmp_path):
    for name in ("bin/nvcc", "include/cuda.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("one")
        (tmp_path / name).chmod(0o755)
    request = REQUEST.but(cuda=cuda.Choice(**vars(REQUEST.cuda) | {"home": str(tmp_path)}))
    inputs = {*request.tools, str(tmp_path / "include/cuda.h")}
    for name in ("bin/nvcc", "include/cuda.h"):
        before = recording.Before(str(tmp_path), inputs)
        closure = recording.Recorder(request, [], before).closure(set(), inputs)
        closure.check(request)
        (tmp_path / name).write_text("two")
        with pytest.raises(Changed, match=f"{name} changed"):
            closure.check(request)


def test_a_header_of_torch_is_in_the_closure(tmp_path):
    header = Path(torch.__file__).parent / "include/torch/library.h"
    inputs = {str(header), *REQUEST.tools}
    before = recording.Before(str(tmp_path), inputs)
    closure = recording.Recorder(REQUEST, [], before).closure(set(), inputs)
    # Give the closure another digest of the header. Without stamps, it compares the contents.
    digest = file_digest(str(header))
    closure.digests = closure.digests.replace(digest, "0" * len(digest))
    closure.stamps = bytearray(len(closure.stamps))
    with pytest.raises(Changed, match="torch/library.h changed"):
        closure.check(REQUEST)
