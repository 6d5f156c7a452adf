"""Builds for CUDA: the choice, its reasons, and what causes a rebuild. A script takes the place of
nvcc and compiles .cu files as C++; GPUs and drivers are simulated by the files that name them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout import CALL, HERE, MAIN, Checkout, with_file

NVCC = """#!{python}
import subprocess, sys
unknown = ("-gencode", "--expt", "-D__CUDA", "-arch", "--generate-dep", "--dependency-output")
words = [word for word in sys.argv[1:] if not word.startswith(unknown)]
if "--list-gpu-arch" in words:
    sys.exit(print("compute_80\\ncompute_90"))
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
flags = [w for w in words if w.startswith(("-I", "-D", "-O", "-std")) and w != "-D"]
for i, word in enumerate(words):
    if word == "-isystem":
        flags += ["-isystem", words[i + 1]]
source = words[words.index("-c") + 1]
target = words[words.index("-o") + 1]
option = "-MF" if "-MF" in sys.argv else "--dependency-output"
depend = sys.argv[sys.argv.index(option) + 1]
command = ["{compiler}", "-x", "c++", "-fPIC", "-MD", "-MF", depend, "-MT", target, *flags]
sys.exit(subprocess.call([*command, "-c", source, "-o", target]))
"""
SOURCE = """
#include "tiny/value.h"
extern "C" __attribute__((visibility("default"))) int answer() { return VALUE; }
"""
# Makes this machine look as if it had these GPUs, hides its CUDA toolkits, and makes PyTorch look
# like a build for CUDA 13.2.
_MACHINE = """
import glob, os, torch
torch.version.cuda = "13.2"
def found(pattern, real=glob.glob, **options):
    if pattern.startswith("/dev/nvidia"):
        return {devices!r}
    return {gpus!r} if pattern.startswith("/proc/driver/nvidia") else real(pattern, **options)
glob.glob = found
def access(path, mode, real=os.access):
    is_hidden = str(path).endswith("bin/nvcc") and {home!r} not in str(path)
    return real(path, mode) and not is_hidden
os.access = access
"""


def machine(names: tuple[str, ...], home: Path | str) -> str:
    """Return the begin of a script that runs on a machine with these GPUs and this toolkit.

    A GPU without a name is one of a container that lacks /proc/driver/nvidia.
    """
    devices = [f"/dev/nvidia{i}" for i in range(len(names))]
    gpus = [f"/proc/driver/nvidia/gpus/{i}/information" for i, name in enumerate(names) if name]
    files = [with_file(gpu, f"Model: \t\t {name}\n") for gpu, name in zip(gpus, names)]
    return "".join(files) + _MACHINE.format(devices=devices, gpus=gpus, home=str(home))


class CudaCheckout(Checkout):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self.home = folder / "toolkit"
        self.bin = folder / "bin"
        self.toolkit("13.2")
        self.tool("nvidia-smi", "echo 8.0; echo 9.0")
        self.write("ops/tiny/tiny.cpp", "int host;\n")
        self.write("ops/tiny/tiny.cu", SOURCE)
        self.write("ops/tiny/value.h", "#define VALUE 1\n")
        self.options = {"CALCOPS_CUDA": "1", "CUDA_HOME": self.home, "TORCH_CUDA_ARCH_LIST": "8.0"}
        self.options["PATH"] = f"{self.bin}:{os.environ['PATH']}"

    def tool(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def toolkit(self, version: str) -> None:
        """Write the toolkit again, with another version."""
        major, minor = version.split(".")
        number = f"{int(major) * 1000 + int(minor) * 10}"
        files = {
            "bin/nvcc": NVCC.format(
                python=sys.executable, log=str(self.log), compiler=shutil.which("c++")
            ),
            "include/cuda.h": f"#define CUDA_VERSION {number}\n",
            "include/cuda_runtime_api.h": f"#define CUDART_VERSION {number}\n",
        }
        for name, text in files.items():
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_text(text)
        (self.home / "bin/nvcc").chmod(0o755)

    def start(self, script=CALL, gpus=(), **options):
        script = machine(gpus, self.home) + script
        return super().start(script, **{**self.options, **options})

    def choice(self, **options) -> str:
        """Return the line of the command `where` about CUDA."""
        child = self.run(MAIN, arguments=["where"], **options)
        assert child.code == 0, child.err
        (line,) = [line for line in child.out.splitlines() if line.startswith("CUDA ")]
        return line


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    built = CudaCheckout(tmp_path_factory.mktemp("cuda"))
    assert built.answer() == 1
    assert built.compiled() == 2
    return built


# ---- the choice ----------------------------------------------------------------------------------

NONE = {"CALCOPS_CUDA": None, "TORCH_CUDA_ARCH_LIST": None}
ALL_ARCHES = "8.0;9.0+PTX"


@pytest.mark.parametrize(
    "gpus, variables, words",
    [
        ((), {}, "no GPU was visible; CALCOPS_CUDA=1 python -m calcops_jit build"),
        ((), {"CALCOPS_CUDA": "1"}, ALL_ARCHES),
        ((), {"CALCOPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}, "9.0"),
        ((), {"TORCH_CUDA_ARCH_LIST": "8.0"}, "8.0"),
        ((), {"TORCH_CUDA_ARCH_LIST": "native"}, "no GPU was visible"),
        (("H200",), {}, ALL_ARCHES),
        (("",), {}, ALL_ARCHES),
        (("",), {"CUDA_VISIBLE_DEVICES": ""}, "no GPU was visible"),
        (("H200",), {"CUDA_VISIBLE_DEVICES": ""}, "no GPU was visible"),
        (("H200",), {"CUDA_VISIBLE_DEVICES": "-1"}, "no GPU was visible"),
        (("H200",), {"CALCOPS_CUDA": "0"}, "CALCOPS_CUDA=0 was set; unset CALCOPS_CUDA"),
        (
            ("H200",),
            {"CUDA_HOME": "/nowhere"},
            "no nvcc was found; pip install 'cuda-toolkit[nvcc]==13.2.*'",
        ),
    ],
)
def test_cuda_is_built_for_a_visible_gpu_or_on_request(built, gpus, variables, words):
    finding = built.choice(gpus=gpus, **(NONE | variables))
    assert words in finding
    is_built = str(built.home) in finding
    assert is_built == ("8." in words or "9.0" in words)


def test_the_key_of_gpus_without_names_does_not_depend_on_nvidia_smi(built):
    """Another machine with the same cache could have an older GPU."""
    built.tool("nvidia-smi", "echo 7.5")
    assert ALL_ARCHES in built.choice(gpus=("",), **NONE)
    assert "7.5+PTX" in built.choice(gpus=("H200",), **NONE)
    built.tool("nvidia-smi", "echo 8.0; echo 9.0")


def test_a_toolkit_of_another_major_version_is_not_used(built):
    built.toolkit("11.8")
    finding = built.choice(gpus=("H200",), **NONE)
    assert "nvcc is CUDA 11.8, torch is CUDA 13.2" in finding
    child = built.run("import calcops_jit")  # CALCOPS_CUDA=1
    assert "cannot build calcops" in child.err
    assert "nvcc is CUDA 11.8, torch is CUDA 13.2" in child.err
    assert "-m pip install" in child.err
    built.toolkit("13.2")


def test_a_cpu_build_of_torch_never_builds_cuda(built):
    script = "import torch; torch.version.cuda = None; import calcops_jit"
    child = built.run(script)
    assert "this PyTorch is not for CUDA" in child.err
    assert "install a PyTorch for CUDA" in child.err


def test_a_value_of_calcops_cuda_other_than_0_or_1_is_refused(built):
    child = built.run("import calcops_jit", CALCOPS_CUDA="yes")
    assert "expected CALCOPS_CUDA 0 or 1, got 'yes'" in child.err.splitlines()[-1]


def test_the_nvcc_of_the_pip_package_is_found(built, tmp_path):
    home = tmp_path / "nvidia/cu13"
    shutil.copytree(built.home, home)
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    there = f"import torch; torch.__file__ = {str(tmp_path / 'torch/__init__.py')!r}\n"
    options = built.options | {"CUDA_HOME": None}
    child = Checkout.start(
        built, machine((), home) + there + MAIN, arguments=["where"], **options
    ).wait()
    assert str(home) in child.out, child.err


def test_a_gpu_without_nvcc_is_named_in_one_line_and_the_reason_is_in_the_library(built):
    """The CUDA key of a CPU build throws this reason. The sources get it as a macro."""
    built.write(
        "ops/tiny/tiny.cpp",
        'extern "C" __attribute__((visibility("default"))) const char* reason() '
        "{ return CALCOPS_NO_CUDA; }\n",
    )
    script = """
import calcops_jit, ctypes
reason = ctypes.CDLL(calcops_jit.library_path()).reason
reason.restype = ctypes.c_char_p
print(reason().decode())
"""
    child = built.run(script, gpus=("H200",), CUDA_HOME="/nowhere", **NONE)
    assert child.out.startswith("no nvcc was found; ")
    (line,) = [line for line in child.err.splitlines() if "H200" in line]
    assert "no nvcc was found" in line
    built.write("ops/tiny/tiny.cpp", "int host;\n")


# ---- freshness -----------------------------------------------------------------------------------

# {change: (function, answer afterwards)}. The function changes files of the checkout or returns
# environment variables.
CHANGES = {
    "a .cu file": (
        lambda b: b.write("ops/tiny/tiny.cu", SOURCE.replace("VALUE;", "VALUE + 1;")),
        2,
    ),
    "a header": (lambda b: b.write("ops/tiny/value.h", "#define VALUE 3\n"), 3),
    "the version of the toolkit": (lambda b: b.toolkit("13.3"), 1),
    "the architectures": (lambda b: {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, 1),
    "NVCC_APPEND_FLAGS": (lambda b: {"NVCC_APPEND_FLAGS": "-lineinfo"}, 1),
    "flags for C++": (lambda b: {"CALCOPS_CFLAGS": "-DX"}, 1),
    "the host compiler": (lambda b: {"CC": shutil.which("gcc")}, 1),
    "gcc": (lambda b: b.tool("gcc", "exec gcc-of-the-system"), 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_of_cuda_causes_a_rebuild(built, change):
    make_change, answer = CHANGES[change]
    assert built.answer() == 1
    built.compiled()
    result = make_change(built)
    options = result if isinstance(result, dict) else {}
    assert built.answer(**options) == answer
    assert 1 <= built.compiled() <= 2
    assert built.answer(**options) == answer
    assert built.compiled() == 0
    built.write("ops/tiny/tiny.cu", SOURCE)
    built.write("ops/tiny/value.h", "#define VALUE 1\n")
    built.toolkit("13.2")
    (built.bin / "gcc").unlink(missing_ok=True)


def test_a_host_compiler_other_than_gcc_does_not_get_a_flag_of_gcc(built):
    clang = built.tool("my-clang", "echo clang version 14.0.6")
    built.compiled()
    for compiler, is_gcc in ((None, True), (clang, False)):
        assert built.answer(CC=compiler, CALCOPS_CFLAGS=f"-DGCC={is_gcc}") == 1
        (command,) = [line for line in built.commands() if "tiny.cu" in line]
        assert "-fvisibility=hidden" in command
        assert ("-fno-gnu-unique" in command) == is_gcc


def test_flags_for_nvcc_are_an_input(built):
    source = built.put("mine.cu", SOURCE.replace('#include "tiny/value.h"', ""))
    script = f"""
import calcops_jit, ctypes
for value in 4, 5:
    flags = f"-DVALUE={{value}}"
    library = calcops_jit.load("mine", {str(source)!r}, extra_cuda_cflags=flags)
    print(ctypes.CDLL(library.path).answer())
"""
    assert built.run(script, CALCOPS_BUILD="0").out == "4\n5\n"


def test_variables_of_torch_do_not_hide_a_header_or_the_compiler(built):
    variables = {"TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1", "PYTORCH_NVCC": "/bin/false"}
    built.write("ops/tiny/value.h", "#define VALUE 6\n")
    assert built.answer(**variables) == 6
    built.write("ops/tiny/value.h", "#define VALUE 7\n")
    assert built.answer(**variables) == 7
    built.write("ops/tiny/value.h", "#define VALUE 1\n")


def test_the_toolkit_may_move_and_get_new_times(built):
    assert built.answer() == 1
    built.compiled()
    (built.home / "bin/nvcc").touch()
    (built.home / "include/lonely.h").touch()
    assert built.answer() == 1
    moved = shutil.move(built.home, built.home.with_name("toolkit moved"))
    assert built.answer(CUDA_HOME=moved) == 1
    assert built.compiled() == 0
    shutil.move(moved, built.home)


# ---- the real nvcc -------------------------------------------------------------------------------


@pytest.mark.long
def test_the_cuda_operators_compile_and_link_for_sm_80_and_sm_90():
    environment = os.environ | {"CALCOPS_CUDA": "1"}
    environment.pop("TORCH_CUDA_ARCH_LIST", None)
    command = [sys.executable, "-m", "calcops_jit", "build"]
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if "for CUDA" in result.stderr and result.returncode:
        pytest.skip(f"no nvcc for this PyTorch, {torch.version.cuda}")
    assert result.returncode == 0, result.stderr
    image = Path(result.stdout.strip()).read_bytes()
    for architecture in (b"sm_80", b"sm_90"):
        assert architecture in image
