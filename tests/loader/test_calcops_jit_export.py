"""An exported folder: what it is built for, and C++ programs that find it by CMake. The README's
program, by pkg-config, is in test_readme.py."""

import os
import shutil
import subprocess
import sys

import pytest
from checkout import HERE

from _calcops_jit import request

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
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
# A kind of processor that is nearly everywhere.
USUAL = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}[request.MACHINE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported folder that was moved."""
    made = tmp_path_factory.mktemp("export") / "here"
    command = [sys.executable, "-m", "calcops_jit", "export", made]
    subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE)
    return made.rename(made.parent / "there")


def test_it_holds_the_library_its_header_and_what_cmake_and_pkg_config_read(folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "include/calcops.h",
        "lib/cmake/calcops/calcops-config.cmake",
        "lib/libcalcops.so",
        "lib/pkgconfig/calcops.pc",
    }


def test_python_takes_the_library_without_the_loader_and_without_a_compiler(folder):
    script = (
        "import torch; torch.ops.load_library('lib/libcalcops.so')\n"
        "print(torch.ops.calcops.force(torch.ones(1, 1, 1, dtype=int), torch.ones(1, 1, 1, 4), "
        "torch.full((1, 1, 4, 3), 0.5), 1).tolist())"
    )
    bare = {"PATH": "/nowhere", "HOME": "/nowhere"}
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=bare, capture_output=True, text=True
    )
    assert child.stdout == "[[[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]]]\n", child.stderr


# ---- what is built -------------------------------------------------------------------------------


def test_isa_takes_the_place_of_native_and_a_wrong_one_is_refused(checkout, tmp_path):
    out = str(tmp_path / "out")
    child = checkout.run(MAIN, arguments=["export", out, "--isa", USUAL])
    assert (child.code, child.out) == (0, f"{out}\n"), child.err
    compiled = [line for line in checkout.log.read_text().splitlines() if " -c " in line]
    assert compiled
    assert all(f"-march={USUAL}" in line and "native" not in line for line in compiled)
    child = checkout.run(MAIN, arguments=["export", out, "--isa", "i999"])
    assert child.code == 1
    assert "i999" in child.err
    assert "fix: " in child.err


def test_arch_asks_for_cuda_and_is_refused_without_nvcc(checkout, tmp_path):
    none = "from _calcops_jit import cuda; cuda.find_toolkit = lambda: ('', '')\n"
    child = checkout.run(
        none + MAIN, arguments=["export", str(tmp_path / "out"), "--arch", "8.0;9.0+PTX"]
    )
    assert child.code == 1
    assert "cannot build calcops for CUDA" in child.err
    assert not (tmp_path / "out").exists()


# ---- a C++ program -------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_a_cpp_host_is_built_by_cmake_without_torchs_own_package(folder, tmp_path):
    (tmp_path / "host.cpp").write_text(HOST)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(host CXX)\nfind_package(calcops REQUIRED)\n"
        "add_executable(host host.cpp)\ntarget_link_libraries(host PRIVATE calcops::calcops)\n"
    )
    configure = ["cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={folder}"]
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
    assert "built for PyTorch" in refused.stderr
    assert "2.9.1+cpu" in refused.stderr
