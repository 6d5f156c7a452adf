"""Builds: operators in Python, load, errors, the choice of CUDA, and CalcOps' own library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkout import HERE

from _calcops_jit import cuda, requests
from _calcops_jit.live import handles

OPERATOR = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {
at::Tensor twice(const at::Tensor& x) { return x.mul(2); }
}  // namespace

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  m.def("twice(Tensor x) -> Tensor", &twice);
  m.def("_twice_backward(Tensor x) -> Tensor", &twice);
}
#ifdef CALCOPS_NO_CUDA
extern "C" __attribute__((visibility("default"))) const char* reason() { return CALCOPS_NO_CUDA; }
#endif
"""
HEADER = """
/// calcops::twice
/// Twice its argument.
///
///     x  any shape
constexpr int kTwo = 2;
/// calcops::other
/// Another operator.
"""


# ---- operators in Python -------------------------------------------------------------------------


def test_an_operator_is_the_torch_ops_handle_documented_by_its_header(checkout):
    shutil.rmtree(checkout.path / "ops")
    checkout.write("ops/twice/twice.cpp", OPERATOR)
    header = checkout.write("ops/twice/twice.h", HEADER)
    script = """
import calcops_jit, torch, pydoc, ctypes
print(calcops_jit.twice is torch.ops.calcops.twice)
print(calcops_jit.twice(torch.ones(2)).tolist())
print([name for name in dir(calcops_jit) if not name.startswith('__')])
print(calcops_jit.twice.__doc__)
assert 'Twice its argument.' in pydoc.render_doc(calcops_jit.twice)
assert 'twice' in pydoc.render_doc(calcops_jit)
reason = ctypes.CDLL(calcops_jit.library_path()).reason
reason.restype = ctypes.c_char_p
print(reason().decode())
calcops_jit.thrice
"""
    expected = (
        "True\n"
        "[2.0, 2.0]\n"
        "['BuildError', 'Library', 'library_path', 'load', 'reload', 'twice', 'watch']\n"
        "calcops::twice(Tensor x) -> Tensor\n"
        "\n"
        "Twice its argument.\n"
        "\n"
        "    x  any shape\n"
        "CALCOPS_CUDA=0 was set; unset CALCOPS_CUDA\n"
    )
    cold = checkout.run(script, CALCOPS_CUDA="0")
    assert cold.out == expected, cold.err
    error = "AttributeError: module 'calcops_jit' has no attribute 'thrice'\n  there are: "
    assert error in cold.err

    # No unit includes the header, so nothing is compiled. The text comes from the manifest.
    header.unlink()
    warm = checkout.run(script, CALCOPS_CUDA="0")
    assert warm.out == expected
    assert "building" not in warm.err


def test_load_returns_the_operators_of_a_source_and_accepts_torchs_options(checkout, tmp_path):
    include = checkout.write("include/value.h", "#define VALUE 2\n").parent
    source = tmp_path / "mine.cpp"
    source.write_text(
        '#include <torch/library.h>\n#include "value.h"\n'
        "int64_t scaled(int64_t x) { return x * VALUE * FACTOR; }\n"
        'TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("scaled", &scaled); }\n'
    )
    script = f"""
import calcops_jit, torch
options = dict(extra_cflags=['-DFACTOR=5'], extra_include_paths=[{str(include)!r}])
mine = calcops_jit.load('mine', ['mine.cpp'], **options)
assert calcops_jit.load('mine', 'mine.cpp', **options) is mine
print(mine.scaled(3), torch.ops.mine.scaled(4))
print(list(mine.operators), mine.path.endswith('/mine.so'))
"""
    child = checkout.run(script, cwd=tmp_path, CALCOPS_BUILD="0")
    assert (child.code, child.out) == (0, "30 40\n['scaled'] True\n"), child.err
    checkout.compiled()
    again = checkout.run(script, cwd=tmp_path, CALCOPS_BUILD="0")
    assert (again.out, again.err) == (child.out, "")
    assert checkout.compiled() == 0


def test_sources_of_one_basename_do_not_overwrite_each_others_object(checkout):
    checkout.write("ops/tiny/same.cpp", "int first() { return 10; }\n")
    checkout.write("ops/other/other.h", "#define SECOND 20\n")
    checkout.write("ops/other/same.cpp", '#include "other.h"\nint second() { return SECOND; }\n')
    checkout.write(
        "ops/tiny/tiny.cpp",
        "int first();\n"
        "int second();\n"
        'extern "C" __attribute__((visibility("default")))\n'
        "int answer() { return first() + second(); }\n",
    )
    assert checkout.answer() == 30
    checkout.write("ops/other/other.h", "#define SECOND 21\n")
    assert checkout.answer() == 31


def test_ninja_beside_python_is_found_without_path(checkout):
    folder = Path(shutil.which("c++")).parent
    if (folder / "ninja").exists():
        # PATH must have a compiler and no ninja.
        folder = checkout.path.parent / "bin"
        folder.mkdir()
        for tool in ("c++", "sh", "ld", "as", "sleep"):
            (folder / tool).symlink_to(shutil.which(tool))
    assert checkout.answer(PATH=folder, CXX="c++") == 1


@pytest.mark.parametrize("words", ["env {}", "{} -m64", "env '{}' -DQUOTED='a b'"])
def test_cxx_may_have_several_words(checkout, words):
    words = words.format(checkout.compiler)
    assert checkout.answer(CXX=words) == 1
    assert checkout.compiled() == 1
    assert checkout.answer(CXX=words) == 1
    assert checkout.compiled() == 0
    with open(checkout.compiler, "a") as script:
        script.write("# a new release\n")
    assert checkout.answer(CXX=words) == 1
    assert checkout.compiled() == 1


# ---- errors --------------------------------------------------------------------------------------


def error_lines(checkout, **environment) -> list[str]:
    """Return the lines of the BuildError, without the one that names the log."""
    script = """
import calcops_jit
try:
    calcops_jit.anything
except calcops_jit.BuildError as error:
    print(error)
"""
    child = checkout.run(script, **environment)
    assert child.code == 0, child.err
    lines = child.out.splitlines()
    assert child.err.endswith(child.out)  # the import prints the message, too
    assert 2 <= len(lines) <= 12
    assert lines[0].startswith("cannot build calcops")
    if lines[-1].startswith("  log: "):
        assert Path(lines.pop().removeprefix("  log: ")).read_text()
    return lines


def test_a_compile_error_names_file_line_and_remedy(checkout):
    source = checkout.write("ops/tiny/tiny.cpp", "int f() {\n  return undeclared;\n}\n")
    lines = error_lines(checkout)
    assert lines[0] == f"cannot build calcops: error at {source}:2:10"
    assert lines[1].startswith(f"  {source}:2:10: error: ")
    assert "undeclared" in lines[1]
    assert "return undeclared;" in lines[2]
    assert lines[-1] == f"  fix: correct {source}:2:10"


def test_an_undefined_function_is_reported_before_the_library_is_kept(checkout):
    checkout.write(
        "ops/tiny/tiny.cpp",
        "int missing_one();\n"
        'extern "C" __attribute__((visibility("default")))\n'
        "int answer() { return missing_one(); }\n",
    )
    child = checkout.run("import calcops_jit")
    assert child.err.splitlines()[-3:] == [
        "calcops_jit: cannot load calcops.so: a function is declared but nowhere defined",
        "  undefined symbol: _Z11missing_onev",
        "  fix: c++filt _Z11missing_onev; add its source, or its library in extra_ldflags",
    ]
    assert checkout.libraries() == []


def test_a_missing_nvcc_is_an_error_if_calcops_cuda_is_1(checkout):
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is a CPU build")
    script = """
import _calcops_jit.cuda as cuda
cuda.find_toolkit = lambda: ('', '')
import calcops_jit
"""
    child = checkout.run(script, CALCOPS_CUDA="1")
    # The checkout of the test has no Makefile. With one, the fix is `make cuda`.
    assert child.err == (
        "calcops_jit: cannot build calcops for CUDA\n"
        "  no nvcc was found\n"
        f"  fix: pip install 'cuda-toolkit[nvcc]=={torch.version.cuda}.*'\n"
    )


def test_load_works_although_the_operators_of_calcops_fail_to_build(checkout, tmp_path):
    checkout.write("ops/tiny/tiny.cpp", "#error broken\n")
    source = tmp_path / "other.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 6; }\n'
    )
    script = f"""
import calcops_jit, ctypes
other = calcops_jit.load('other', {str(source)!r})
print(ctypes.CDLL(other.path).answer())
"""
    child = checkout.run(script)
    assert (child.code, child.out) == (0, "6\n")
    assert "error: #error broken" in child.err


# ---- the choice of CUDA --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "toolkit", "environment", "expected"),
    [
        ((), "13.0", {}, "no GPU was visible; CALCOPS_CUDA=1 python -m calcops_jit build"),
        ((), "13.0", {"CALCOPS_CUDA": "1"}, "8.0;9.0+PTX"),
        ((), "13.0", {"CALCOPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}, "9.0"),
        ((), "13.0", {"TORCH_CUDA_ARCH_LIST": "8.6"}, "8.6"),
        (
            (),
            "13.0",
            {"TORCH_CUDA_ARCH_LIST": "native"},
            "no GPU was visible; CALCOPS_CUDA=1 python -m calcops_jit build",
        ),
        (("H200",), "13.0", {}, "8.0;9.0+PTX"),
        (("H200",), "13.0", {"CALCOPS_CUDA": "0"}, "CALCOPS_CUDA=0 was set; unset CALCOPS_CUDA"),
        (("H200",), "", {}, "no nvcc was found; make cuda"),
        (("H200",), "11.8", {}, "nvcc is CUDA 11.8, torch is CUDA 13.2; make cuda"),
    ],
)
def test_cuda_is_built_for_a_visible_gpu_or_on_request(
    monkeypatch, gpus, toolkit, environment, expected
):
    for name in ("CALCOPS_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(cuda, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(cuda, "gpu_capabilities", lambda: ["8.0", "9.0"])
    home = "/cuda" if toolkit == "13.0" else ""
    monkeypatch.setattr(cuda, "find_toolkit", lambda: (home, toolkit))
    choice = cuda.choose()
    if choice.build:
        assert cuda.arch_list(choice) == expected
    else:
        assert f"{choice.reason}; {choice.fix}" == expected


def test_a_cpu_build_of_torch_never_builds_cuda(monkeypatch):
    monkeypatch.setenv("CALCOPS_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", None)
    choice = cuda.choose()
    assert not choice.build
    assert choice.fatal
    assert choice.fix.startswith("pip install")


def test_hidden_gpus_are_not_visible(monkeypatch):
    for devices in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert cuda.visible_gpus() == ()


def test_a_value_of_calcops_cuda_other_than_0_or_1_is_refused(monkeypatch):
    monkeypatch.setenv("CALCOPS_CUDA", "yes")
    with pytest.raises(ValueError, match="^calcops_jit: expected CALCOPS_CUDA 0 or 1, got 'yes'$"):
        cuda.choose()


# ---- documentation -------------------------------------------------------------------------------


def test_documentation_is_the_block_that_starts_with_the_operators_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.h").write_text(HEADER)
    assert handles.documentation(str(tmp_path)) == {
        "calcops::twice": "Twice its argument.\n\n    x  any shape",
        "calcops::other": "Another operator.",
    }


# ---- CalcOps' own library ------------------------------------------------------------------------


@pytest.mark.skipif(cuda.find_toolkit()[0] == "", reason="no nvcc for this PyTorch")
def test_the_cuda_operators_compile_and_link_for_sm_80_and_sm_90():
    environment = os.environ | {"CALCOPS_CUDA": "1"}
    environment.pop("TORCH_CUDA_ARCH_LIST", None)
    command = [sys.executable, "-m", "calcops_jit", "build"]
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    image = Path(result.stdout.strip()).read_bytes()
    for architecture in (b"sm_80", b"sm_90"):
        assert architecture in image


def test_every_unit_under_ops_is_built():
    units = {Path(source) for source in requests.own().sources}
    assert {unit for unit in units if unit.suffix != ".cu"} == set((HERE / "ops").rglob("*.cpp"))
