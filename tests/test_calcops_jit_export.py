"""An exported folder: imports without a compiler, refuses what it does not fit, and serves C++
hosts."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout import EVENTS, HERE, Child, spoil, the_zygote

from _calcops_jit import export, recipes, request

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
CALL = """
import torch, calcops_jit
list_neigh = torch.tensor([[[1, -1], [0, -1]]])
dE, Ri_d = torch.ones(1, 2, 2, 4, requires_grad=True), torch.arange(48.0).reshape(1, 2, 8, 3)
force = calcops_jit.force(list_neigh, dE, Ri_d)
force.square().sum().backward()
print(force[0, 0, 0].item(), dE.grad[0, 0, 0, 3].item())
"""
HOST = """
#include <calcops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <cstdio>
int main() {  // an atom and its ghost; g = sum_c 1 * 0.5 = 2 along each axis
  const at::Tensor list_neigh = at::ones({1, 1, 1}, at::kLong);
  const at::Tensor force = calcops::force(list_neigh, at::ones({1, 1, 1, 4}), at::full({1, 1, 4, 3}, 0.5), 1);
  std::printf("%g %g\\n", force.min().item<float>(), force.max().item<float>());
}
"""
# A kind of processor that is nearly everywhere, what the compiler may use there, and how what it
# may not begins; a kind that has more; words of /proc/cpuinfo that nearly nothing can be built
# with.
USUAL, HAS, LACKS, NEWEST, NEW, OLD = {
    "x86_64": (
        "x86-64-v3",
        "avx avx2 fma f16c bmi1 bmi2 abm movbe popcnt ssse3 sse4_2",
        "avx512",
        *("x86-64-v4", "avx512f", "sse sse2 sse4_1"),
    ),
    "aarch64": ("armv8-a", "asimd", "sve", *("neoverse-v1", "sve", "fp asimd")),
}[request.MACHINE]
BARE = {
    "PATH": "/nowhere",
    "HOME": "/nowhere",
    "TMPDIR": "/nowhere",
    "CXX": None,
    "CALCOPS_CACHE": None,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "here"
    command = [sys.executable, "-m", "calcops_jit", "export", folder]
    subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE)
    return folder.rename(folder.parent / "there")


class Folder:
    """The part of a checkout that Child uses."""

    def __init__(self, path: Path):
        self.path, self.cache = path, "/nowhere"

    def run(self, script: str = CALL, **environment) -> Child:
        return Child(the_zygote(), self, script, **(BARE | environment)).wait()


@pytest.fixture
def folder(original, tmp_path):
    return Folder(Path(shutil.copytree(original, tmp_path / "copy")))


def test_it_imports_without_compiler_home_or_a_writable_folder_within_a_fifth_of_a_second(original):
    script = f"""{EVENTS}
import time
start = time.process_time()  # other processes do not count
import calcops_jit
print(time.process_time() - start, events, "torch.utils.cpp_extension" in sys.modules, "_calcops_jit" in sys.modules)
"""
    children = [Folder(original).run(script) for _ in range(5)]
    assert [child.err for child in children] == [""] * 5
    assert {child.out.partition(" ")[2] for child in children} == {"[] False False\n"}
    fastest = min(float(child.out.partition(" ")[0]) for child in children)
    print(f"import of an exported folder: {fastest * 1e3:.1f} ms over import torch")
    assert fastest < 0.2


def test_its_operators_are_those_of_the_checkout(folder):
    assert folder.run().out == "96.0 -11520.0\n"
    names = "import calcops_jit as c; print(sorted(c.__all__), c.force.__doc__, c.library_path())"
    (there, (path,)) = (
        folder.run(names).out.rsplit(maxsplit=1)[0],
        folder.run(names).out.split()[-1:],
    )
    assert path == f"{folder.path}/lib/libcalcops.so"
    stub = ast.parse((folder.path / "calcops_jit.pyi").read_text())
    assert str(sorted(n.name for n in stub.body if isinstance(n, ast.FunctionDef))) in there
    here = (
        "import calcops_jit as c; n = [x for x in c.__all__ if hasattr(getattr(c, "
        "x), 'overloads')]\n"
    )
    here += "print(sorted([*n, 'library_path']), c.force.__doc__)"
    result = subprocess.run(
        [sys.executable, "-c", here], cwd=HERE, capture_output=True, text=True, check=True
    )
    assert there == result.stdout.rstrip()


@pytest.mark.parametrize(
    "about, words",
    [
        ({"torch": ["2.9.1", True]}, ["built for PyTorch 2.9.1", "fix: pip install torch==2.9.1"]),
        ({"torch": [torch.__version__.partition("+")[0], False]}, ["C++11 ABI: True"]),
        (
            {"instructions": [OLD.split()[1], "avx9000"]},
            ["this processor has no avx9000\n", f"--isa {export._LEAST}"],
        ),
        ({"cuda": "99.1"}, ["built for CUDA 99.1, PyTorch's is", "fix: CALCOPS_CUDA=0"]),
        ({"sha256": "0" * 64}, ["libcalcops.so is damaged", "copy the folder again"]),
    ],
)
def test_what_does_not_fit_is_refused_with_cause_evidence_and_one_command(folder, about, words):
    manifest = folder.path / "calcops.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | about))
    child = folder.run()
    assert child.code == 1 and child.out == ""
    message = child.err[child.err.index("ImportError: ") :]
    assert message.startswith(f"ImportError: cannot use the operators in {folder.path}\n")
    assert message.count("\n") == 3 and message.count("  fix: ") == 1
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is a CPU build")
@pytest.mark.parametrize("driver, refused", [(11040, True), (99000, False), (0, False)])
def test_a_driver_that_is_too_old_is_refused_and_none_at_all_is_not(
    folder, tmp_path, driver, refused
):
    fake = tmp_path / "libcuda.so.1"
    (tmp_path / "fake.c").write_text(
        f"int cuDriverGetVersion(int* v) {{ *v = {driver}; return 0; }}"
    )
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, tmp_path / "fake.c", "-o", fake], check=True)
    manifest = folder.path / "calcops.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"cuda": torch.version.cuda}))
    child = folder.run(f"import ctypes; ctypes.CDLL({str(fake)!r})\n{CALL}")
    if refused:
        assert f"built for CUDA {torch.version.cuda}, the driver runs CUDA 11\n" in child.err
    else:
        assert child.out == "96.0 -11520.0\n", child.err


@pytest.mark.parametrize("damage", ["truncated", "one byte", "gone", "folder", "fifo", "manifest"])
def test_a_damaged_folder_is_refused_and_never_loaded(folder, damage):
    if damage == "manifest":
        (folder.path / "calcops.json").write_text("{")
    else:
        spoil(folder.path / "lib/libcalcops.so", damage)
    child = folder.run()
    assert child.code == 1 and child.out == ""
    assert "ImportError: cannot use the operators in" in child.err and "fix: " in child.err


# ---- what is built -------------------------------------------------------------------------------


def test_isa_takes_the_place_of_native_and_the_manifest_says_what_the_compiler_may_use(
    checkout, tmp_path
):
    child = checkout.run(MAIN, arguments=["export", str(tmp_path / "out"), "--isa", USUAL])
    assert (child.code, child.out) == (0, f"{tmp_path}/out\n"), child.err
    compiled = [line for line in checkout.log.read_text().splitlines() if " -c " in line]
    assert compiled and all(f"-march={USUAL}" in line and "native" not in line for line in compiled)
    needed = set(json.loads((tmp_path / "out/calcops.json").read_text())["instructions"])
    assert needed >= set(HAS.split()) and not [name for name in needed if name.startswith(LACKS)]


def test_an_instruction_set_that_this_processor_lacks_is_refused_before_anything_is_built(
    checkout, tmp_path
):
    lacking = f"from _calcops_jit import request; request.isa = lambda: {OLD!r}\n"
    child = checkout.run(
        lacking + MAIN, arguments=["export", str(tmp_path / "out"), "--isa", NEWEST]
    )
    assert child.code == 1 and checkout.compiled() == 0
    assert (
        child.err.startswith(f"cannot export for {NEWEST}\n  this processor has no ")
        and NEW in child.err
    )
    child = checkout.run(MAIN, arguments=["export", str(tmp_path / "out"), "--isa", "i999"])
    assert child.code == 1 and "i999" in child.err and "fix: " in child.err


def test_every_instruction_set_of_this_processor_that_the_compiler_uses_is_one_of_the_kernels_words():
    instructions = export._instructions(recipes.own())
    here = request.isa().replace("_", "").split()
    assert HAS.split()[-1] in instructions and not [
        i for i in instructions if i.replace("_", "") not in here
    ]


def test_arch_asks_for_cuda_and_is_refused_without_nvcc(checkout, tmp_path):
    none = "from _calcops_jit import cuda; cuda.find_toolkit = lambda: ('', '')\n"
    child = checkout.run(
        none + MAIN, arguments=["export", str(tmp_path / "out"), "--arch", "8.0;9.0+PTX"]
    )
    assert (
        child.code == 1
        and "cannot build calcops for CUDA" in child.err
        and not (tmp_path / "out").exists()
    )


# ---- a C++ host; the README's, by pkg-config, is in test_calcops_jit_readme.py -------------------


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_a_cpp_host_is_built_by_cmake_without_torchs_own_package(folder, tmp_path):
    (tmp_path / "host.cpp").write_text(HOST)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(host CXX)\nfind_package(calcops REQUIRED)\n"
        "add_executable(host host.cpp)\ntarget_link_libraries(host PRIVATE calcops::calcops)\n"
    )
    configure = ["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={folder.path}"]
    subprocess.run(configure, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", "build"], cwd=tmp_path, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    host = subprocess.run(
        [tmp_path / "build/host"], env=environment, capture_output=True, text=True
    )
    assert host.stdout == "-2 2\n", host.stderr
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    configure = ["cmake", "-S", ".", "-B", "other", *configure[5:], f"-Dcalcops_TORCH={tmp_path}"]
    refused = subprocess.run(configure, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "built for PyTorch" in refused.stderr and "2.9.1+cpu" in refused.stderr
