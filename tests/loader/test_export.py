"""An exported folder: its files, the processors and GPUs that it is built for, and a C++ program
that finds it by CMake. test_readme.py has the README's program, which uses pkg-config."""

import os
import shutil
import subprocess
import sys

import pytest
from checkout import HERE

HOST = """
#include <calcops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <cstdio>
int main() {  // An atom and its ghost. The force is +-2 along each axis: 4 terms of 1 * 0.5.
  const at::Tensor list_neigh = at::ones({1, 1, 1}, at::kLong);
  const at::Tensor dE = at::ones({1, 1, 1, 4});
  const at::Tensor Ri_d = at::full({1, 1, 4, 3}, 0.5);
  const at::Tensor force = calcops::force(list_neigh, dE, Ri_d, 1);
  c10::Dispatcher::singleton().findSchemaOrThrow("calcops_models::density", "");
  std::printf("%g %g\\n", force.min().item<float>(), force.max().item<float>());
}
"""
# Nearly every processor has these instructions.
COMMON_ISA = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}[os.uname().machine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return an exported folder. It was moved after the export."""
    exported = tmp_path_factory.mktemp("export") / "exported"
    subprocess.run([sys.executable, "-c", "import calcops.ops"], cwd=HERE, check=True)
    command = [sys.executable, "-m", "calcops_jit", "export", exported, "calcops_models"]
    subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE)
    return exported.rename(exported.parent / "moved")


def test_export_writes_library_header_and_files_for_cmake_and_pkg_config(folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "include/calcops.h",
        "lib/cmake/calcops/calcops-config.cmake",
        "lib/libcalcops.so",
        "lib/libcalcops_models.so",
        "lib/pkgconfig/calcops.pc",
    }


def test_torch_loads_the_exported_library_without_loader_and_compiler(folder):
    script = """
import torch
torch.ops.load_library('lib/libcalcops.so')
torch.ops.load_library('lib/libcalcops_models.so')
list_neigh = torch.ones(1, 1, 1, dtype=int)
dE = torch.ones(1, 1, 1, 4)
Ri_d = torch.full((1, 1, 4, 3), 0.5)
print(torch.ops.calcops.force(list_neigh, dE, Ri_d, 1).tolist())
print(torch.ops.calcops_models.matrix_product(dE[0, 0], dE[0, 0].mT).tolist())
"""
    command = [sys.executable, "-c", script]
    environment = {"PATH": "/nowhere", "HOME": "/nowhere"}
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    force = "[[[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]]]"
    assert child.stdout == f"{force}\n[[4.0]]\n", child.stderr


# ---- a C++ program -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_builds_a_cpp_host_without_the_cmake_package_of_torch(folder, tmp_path):
    (tmp_path / "host.cpp").write_text(HOST)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(host CXX)\n"
        "find_package(calcops REQUIRED)\n"
        "add_executable(host host.cpp)\n"
        "target_link_libraries(host PRIVATE calcops::calcops_models)\n"
    )
    prefix = f"-DCMAKE_PREFIX_PATH={folder}"
    configure = ["cmake", "-S", ".", "-B", "build", prefix]
    subprocess.run(configure, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", "build"], cwd=tmp_path, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    host = subprocess.run(
        [tmp_path / "build/host"], env=environment, capture_output=True, text=True
    )
    assert host.stdout == "-2 2\n", host.stderr

    # CMake refuses a PyTorch of another version.
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    configure = ["cmake", "-S", ".", "-B", "other", prefix, f"-Dcalcops_TORCH={tmp_path}"]
    refused = subprocess.run(configure, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "built for PyTorch" in refused.stderr
    assert "2.9.1+cpu" in refused.stderr
