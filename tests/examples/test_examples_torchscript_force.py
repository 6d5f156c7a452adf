"""examples/torchscript_force: archives and C++ hosts give the results of plain PyTorch, and each
documented build works."""

import io
import os
import re
import shutil
import sys

import pytest
import reference
import torch
from programs import ROOT, assert_needs_no_python, blocks, run

import calcops_jit  # noqa: F401 - the archives need its operators

# test_compat.py and test_force_pytorch.py have archives, and test_library.py a C++ host.
pytestmark = pytest.mark.long

FOLDER = ROOT / "examples" / "torchscript_force"
ARCHIVES = ["scripted", "traced", "CalcOps_cuda", "CalcOps_cpu"]


def make(build, *words):
    return run("make", "-C", FOLDER, f"PYTHON={sys.executable}", f"BUILD={build}", *words)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("torchscript_force")


@pytest.fixture(scope="module", params=reference.DEVICES)
def ran(request, build):
    return make(build, f"DEVICE={request.param}")


def numbers(lines):
    """Return {first word of a line: tensor of the rows} for the output of a host."""
    table = {}
    for line in filter(None, lines.splitlines()):
        name, *values = line.split()
        if name in ("energy", "force", "first", "second", "direct"):
            table.setdefault(name, []).append([float(value) for value in values])
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in table.items()}


def first_forces(lines):
    """Return the forces on the four atoms, from the first host of an output."""
    return numbers(lines)["force"][:4].tolist()


def expected(archive):
    """Return the numbers in plain PyTorch: derivatives by autograd, the force by the reference."""
    files = {"frame": ""}
    parameters = dict(torch.jit.load(archive, _extra_files=files).named_parameters())
    list_neigh, Ri, Ri_d, *nghost = torch.load(io.BytesIO(files["frame"]))
    Ri.requires_grad_()
    live = (list_neigh >= 0).flatten(2)[..., None]
    energy = (torch.tanh(Ri @ parameters["W"]) * parameters["w"] * live).sum((1, 2, 3))
    (dE,) = torch.autograd.grad(energy.sum(), Ri, create_graph=True)
    force = reference.force(list_neigh.flatten(2), dE, Ri_d, int(nghost[0]) if nghost else 0)
    (first,) = torch.autograd.grad(force.square().sum(), Ri, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), Ri)
    return {
        "energy": energy[None],
        "force": force[0],
        "first": torch.stack([first.sum(), first.norm()])[None],
        "second": torch.stack([second.sum(), second.norm()])[None],
        "direct": force[0, :1],
    }


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("name", ARCHIVES)
def test_python_and_cpp_give_the_energy_force_and_two_derivatives_of_plain_pytorch(
    ran, build, name
):
    section = re.search(rf"^== {name}\.pt.*\n((?:(?!==).*\n)*)", ran.stdout, re.MULTILINE)[1]
    in_python, in_cpp = section.split("energy")[1:]
    for host in ("energy" + in_python, "energy" + in_cpp):
        results = numbers(host)
        values = expected(build / f"{name}.pt")
        assert results.keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(results[key], value.detach(), rtol=1e-10, atol=1e-10)


def test_the_host_works_with_the_library_linked_or_opened_and_fails_without(ran, build):
    scripted, opened, neither = re.search(
        r"^== scripted.*?\n(.*?)^== traced.*?^== the library opened.*?\n(.*?)^== neither\n(.*)",
        ran.stdout,
        re.MULTILINE | re.DOTALL,
    ).groups()
    assert numbers(opened)["force"].tolist() == first_forces(scripted)
    assert "host: " not in neither
    assert "Unknown builtin op: CalcOps::calculateForce" in ran.stderr


def test_torchscript_refuses_a_function_of_python(ran):
    assert "refused: CalculateForce" in ran.stdout


def test_no_tool_prints_a_warning(ran):
    """PyTorch could warn of deprecated TorchScript, or of a missing GPU."""
    assert not re.search("warning|No CUDA", ran.stderr, re.IGNORECASE), ran.stderr


def test_the_readme_shows_what_is_printed(ran):
    (shown,) = blocks("examples/torchscript_force/README.md", "text")
    printed = (ran.stdout + ran.stderr).replace("on cuda,", "on cpu,")
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) > 15
    assert not [line for line in lines if line not in printed]


def test_the_host_needs_neither_python_nor_ld_library_path(ran, build):
    assert_needs_no_python(build / "host", build / "host_without")


def test_the_host_needs_the_linkers_no_as_needed_of_its_makefile(ran, build):
    """Ubuntu's g++ links with --as-needed by default, which drops the operators' library."""
    planned = make(build, "--dry-run", "-W", build / "host.o", build / "host").stdout
    (line,) = (line for line in planned.splitlines() if f"-o {build}/host " in line)
    assert "-Wl,--no-as-needed" in line
    line = line.replace("-Wl,--no-as-needed", "-Wl,--as-needed")
    line = line.replace(f"{build}/host ", f"{build}/dropped ")
    run("bash", "-c", line, cwd=FOLDER)
    assert "Unknown builtin op" in run(build / "dropped", build / "scripted.pt", fails=True).stderr


def test_cmake_builds_the_same_host_and_looks_for_no_cuda_toolkit(ran, build):
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    result = make(build, "cmake")
    section = r"^== scripted.*?\n(.*?)^== traced"
    scripted = re.search(section, ran.stdout, re.MULTILINE | re.DOTALL)[1]
    assert numbers(result.stdout)["force"].tolist() == first_forces(scripted)
    # If find_package(Torch) looked for a toolkit, CMake's cache would have this variable.
    assert "CUDA_TOOLKIT_ROOT_DIR" not in (build / "cmake" / "CMakeCache.txt").read_text()


def test_the_host_builds_from_an_exported_folder_with_pkg_config(ran, build):
    """pkg-config's flags preprocess the host, and its libraries link the compiled object."""
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed")
    run(sys.executable, "-m", "calcops_jit", "export", build / "calcops")
    cxx = os.environ.get("CXX", "g++")
    command = f"""
        {cxx} -std=c++20 -M host.cpp $(pkg-config --cflags calcops) | grep -q {build}/calcops/.*/calcops.h &&
        {cxx} {build}/host.o -o {build}/exported $(pkg-config --libs calcops)"""
    packages = f"{build}/calcops/lib/pkgconfig"
    run("bash", "-c", command, cwd=FOLDER, PKG_CONFIG_PATH=packages)
    result = run(build / "exported", build / "scripted.pt")
    assert numbers(result.stdout)["force"].tolist() == first_forces(ran.stdout)
