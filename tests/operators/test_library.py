"""The operators' library as a whole: warnings, documentation, C++ programs, a new operator, CUDA
sources."""

import os
import re
import shutil
import sys
from pathlib import Path

import calcops.ops
import pytest
import torch
from programs import LIBRARIES, ROOT, blocks, run
from test_layout import name
from torch.utils import cpp_extension

import calcops_jit
from _calcops_jit import cuda as toolkit


def test_every_unit_compiles_without_a_warning():
    """Only units that changed since the last run are compiled. The cache has the others.

    This is a build for the CPU. test_cuda_on_cpu.py compiles the CUDA kernels with warnings.
    """
    # With a larger heap, GCC collects garbage less often and compiles faster.
    flags = "-O0 -Wextra -Werror --param=ggc-min-heapsize=1048576"
    run(sys.executable, "-c", "import calcops.ops", CALCOPS_CUDA="0", CALCOPS_CFLAGS=flags)


@pytest.mark.long
def test_the_runtime_compiles_without_a_warning():
    """CALCOPS_CFLAGS does not reach it, since all libraries share its object file."""
    torch_headers = Path(torch.__file__).parent / "include"
    folders = [ROOT / "_calcops_jit" / "shadow", ROOT / "contracts" / "include"]
    options = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DAT_PER_OPERATOR_HEADERS"]
    options += [
        f"-std={'c++20' if torch.__version__ >= '2.13' else 'c++17'}",
        *(f"-I{path}" for path in folders),
    ]
    options += ["-isystem", torch_headers, "-isystem", torch_headers / "torch/csrc/api/include"]
    run(os.environ.get("CXX", "g++"), *options, ROOT / "contracts" / "runtime" / "runtime.cpp")


def test_the_operator_of_the_readme_builds_and_has_every_derivative(tmp_path):
    (tmp_path / "weighted_sum").mkdir()
    source = blocks("ops/README.md", "cpp")[0]
    (tmp_path / "weighted_sum" / "weighted_sum.cpp").write_text(source)
    assert len(source.splitlines()) <= 80
    if toolkit.find_toolkit()[0]:
        kernels = blocks("ops/README.md", "cuda")[0]
        (tmp_path / "weighted_sum" / "weighted_sum.cu").write_text(kernels)
    script = """
import sys, torch
from torch.autograd import gradcheck, gradgradcheck
import calcops_jit
from pathlib import Path
sources = [*Path(sys.argv[1]).glob("*/*.cpp"), *Path(sys.argv[1]).glob("*/*.cu")]
flags = ["-fopenmp", "-Wall"]
calcops_jit.load("weighted", sources, flags, extra_ldflags=flags, extra_include_paths=sys.argv[1])
weighted_sum = torch.ops.weighted.weighted_sum
x, weights = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
assert torch.equal(weighted_sum(x, weights), (x * weights).sum(1))
assert gradcheck(weighted_sum, (x, weights), check_forward_ad=True, check_batched_grad=True)
assert gradgradcheck(weighted_sum, (x, weights), check_fwd_over_rev=True)
assert set(torch.library.opcheck(weighted_sum, (x, weights)).values()) == {"SUCCESS"}
mapped = torch.vmap(weighted_sum, (None, 0))(x, torch.stack([weights, 2 * weights]))
assert torch.equal(mapped, torch.stack([weighted_sum(x, weights), 2 * weighted_sum(x, weights)]))
try:
    weighted_sum(x, weights[1:])
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    done = run(sys.executable, "-c", script, tmp_path, CALCOPS_BUILD="0")
    expected = "weighted::weighted_sum: expected `weights` of shape [N, K] = [3, 4], got [2, 4]"
    assert done.stdout.splitlines()[-1] == expected


def test_generated_documentation_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import generate_docs

    assert [name(path) for path in generate_docs.stale()] == [], "make docs"


@pytest.mark.parametrize("page", ["ops/README.md", "calcops/ops/README.md"])
def test_a_reference_page_describes_an_argument_once_in_the_same_words(page):
    text = (ROOT / page).read_text().partition("## Reference")[2].partition("### `calculate")[0]
    text = re.sub(r"^Returns\n(.+\n)+", "", text, flags=re.MULTILINE)
    entries = re.findall(r"^\w+  +(?:\[|\d+ to ).+(?:\n .+)*", text, re.MULTILINE)
    descriptions = [" ".join(entry.split()) for entry in entries]
    assert len(descriptions) > 10
    assert len(set(descriptions)) == len(descriptions)


def test_every_operator_is_documented():
    public = [getattr(calcops_jit, name) for name in calcops_jit.__all__]
    operators = [x for x in public if isinstance(x, torch._ops.OpOverloadPacket)]
    operators += calcops.ops.library.operators.values()
    assert len(operators) > 10
    for operator in operators:
        schema, _, text = operator.__doc__.partition("\n\n")
        assert schema == str(operator.default._schema)
        names = [argument.name for argument in operator.default._schema.arguments]
        missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{operator} says nothing about {missing}"


@pytest.mark.parametrize("library", [calcops_jit.library_path(), calcops.ops.library.path])
def test_a_library_needs_no_python_and_finds_torch_by_its_rpath(library):
    dynamic = run("readelf", "-d", library).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    allowed = (
        r"lib(torch|torch_cpu|torch_cuda|c10|c10_cuda|cudart"
        r"|c|m|stdc\+\+|gcc_s|gomp|pthread|dl)\.so|ld-linux"
    )
    assert needed
    assert not [library for library in needed if not re.match(allowed, library)]
    rpaths = []
    for value in re.findall(r"\(R(?:UN)?PATH\).*\[(.+)\]", dynamic):
        rpaths += value.split(":")
    assert all(os.path.isabs(path) for path in rpaths)
    assert any((Path(path) / "libc10.so").exists() for path in rpaths)


def test_a_cpp_host_calls_the_operators_through_the_generated_header(tmp_path):
    (tmp_path / "host.cpp").write_text("""
        #include <calcops.h>
        #include <dlfcn.h>

        #include <ATen/ops/arange.h>
        #include <ATen/ops/eye.h>
        #include <ATen/ops/full.h>
        #include <ATen/ops/ones.h>
        #include <iostream>

        int main(int, char** argv) {
          if (!dlopen(argv[1], RTLD_NOW)) return 1;
          // Two atoms are each other's neighbours. A pair's force is 4 * 1 * 0.5 = 2 along each axis.
          auto list_neigh = at::arange(1, -1, -1).view({1, 2, 1});
          auto dE = at::ones({1, 2, 1, 4}), Ri_d = at::full({1, 2, 4, 3}, 0.5), Rij = at::ones({1, 2, 1, 3});
          auto [force, virial, atom_virial] = calcops::force_virial(list_neigh, dE, Ri_d, Rij);
          auto neighbours = CalcOps::calculateForce(list_neigh, dE, Ri_d, at::full({1, 2, 3}, 7.0f));
          auto image = calcops::warp_perspective(at::arange(12).view({3, 4}).to(at::kFloat), at::eye(3), {2, 5});
          std::cout << force.abs().max().item<float>() << ' ' << virial[0][0][1].item<float>() << ' '
                    << atom_virial.size(1) << ' ' << neighbours[0][0][0][0].item<float>() << ' '
                    << image.size(1) << ' ' << image[1][3].item<float>() << std::endl;
        }""")
    torch_folder = Path(torch.__file__).parent
    standard = "c++20" if torch.__version__ >= "2.13" else "c++17"
    command = [os.environ.get("CXX", "g++"), f"-std={standard}", "-DAT_PER_OPERATOR_HEADERS"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / '_calcops_jit/include'}", "-isystem", f"{torch_folder}/include"]
    command += ["host.cpp", "-o", "host", f"-L{torch_folder}/lib"]
    command += [f"-Wl,-rpath,{torch_folder}/lib", "-ltorch_cpu", "-lc10", "-ldl"]
    run(*command, cwd=tmp_path)
    result = run(tmp_path / "host", calcops_jit.library_path())
    # The forces of both pairs cancel. calculateForce adds the neighbours' part, 2, to 7.
    assert result.stdout.split() == ["0", "4", "2", "9", "5", "7"], result.stderr


# ---- CUDA sources, without a GPU -----------------------------------------------------------------


CUDA_SOURCES = sorted(path for library in LIBRARIES for path in library.glob("*/*.cu"))
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


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_no_atomic_touches_a_float(source):
    text = re.sub(r"//.*", "", source.read_text())
    for alias, type in re.findall(r"using (\w+) = ([\w ]+);", text):
        text = re.sub(rf"\b{alias}\b", type, text)
    calls = re.findall(r"\batomic\w*\(([^,]*),", text)
    calls += re.findall(r"\batomic_ref\b.*|\bred\.\w+.*", text)
    for call in calls:  # for example "work.counts + row", whose target is `counts`
        target = re.findall(r"\w+", call.split("+")[0])[-1]
        types = re.findall(rf"([\w ]+?)\s*\*\s*{target}\b", text)
        types += re.findall(rf"^ *(?:__shared__ )?([\w ]+)&? {target}(?:;| =)", text, re.MULTILINE)
        assert types, call
        assert {type.strip().removeprefix("const ") for type in types} <= INTEGERS, (call, types)


@pytest.mark.long  # a foreign program
@pytest.mark.skipif(NVCC is None, reason="no nvcc in torch's CUDA_HOME or on PATH")
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_nvcc_makes_no_atomic_of_floats_and_gives_no_warning(tmp_path, source):
    """nvcc compiles here as C++17, the oldest standard that PyTorch uses.

    test_cuda.py compiles with the standard of the installed PyTorch.
    """
    ptx = tmp_path / "out.ptx"
    options = "-ptx -std=c++17 -arch=compute_80 -Werror all-warnings".split()
    # LD_PRELOAD holds a sanitizer in some runs of the tests; nvcc runs without it.
    folders = ["-I", source.parents[1], "-I", ROOT / "contracts/include"]
    run(NVCC, *options, *folders, source, "-o", ptx, LD_PRELOAD="")
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", ptx.read_text(), re.MULTILINE)
    assert not [name for name in atomics if re.search(r"\.b?f(16|32|64)", name)], set(atomics)
    # Shows that the pattern matches: a source with atomics has some in its PTX.
    assert bool(atomics) == ("atomic" in source.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_sanitizer_says_so_and_skips():
    printed = run(sys.executable, ROOT / "bench" / "gpu_check.py", "sanitize").stdout
    assert printed == "gpu_check: skipped, no GPU is visible to PyTorch\n"
