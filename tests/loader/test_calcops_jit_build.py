"""The loader's builds: operators as a user sees them, `load`, errors, the choice for CUDA, the real
library."""

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


# ---- operators as a user sees them ---------------------------------------------------------------


def test_an_operator_is_its_torch_ops_handle_with_its_header_as_documentation(checkout):
    shutil.rmtree(checkout.path / "ops")
    checkout.write("ops/twice/twice.cpp", OPERATOR)
    header = checkout.write("ops/twice/twice.h", HEADER)
    script = """
import calcops_jit, torch, pydoc, ctypes
print(calcops_jit.twice is torch.ops.calcops.twice, calcops_jit.twice(torch.ones(2)).tolist())
print([n for n in dir(calcops_jit) if not n.startswith('__')])
print(calcops_jit.twice.__doc__)
assert 'Twice its argument.' in pydoc.render_doc(calcops_jit.twice)
assert 'twice' in pydoc.render_doc(calcops_jit)
reason = ctypes.CDLL(calcops_jit.library_path()).reason; reason.restype = ctypes.c_char_p
print(reason().decode())
calcops_jit.thrice
"""
    expected = (
        "True [2.0, 2.0]\n"
        "['BuildError', 'Library', 'library_path', 'load', 'reload', 'twice', 'watch']\n"
        "calcops::twice(Tensor x) -> Tensor\n\nTwice its argument.\n\n    x  any shape\n"
        "CALCOPS_CUDA=0 was set; unset CALCOPS_CUDA\n"
    )
    cold = checkout.run(script, CALCOPS_CUDA="0")
    assert cold.out == expected, cold.err
    assert (
        "AttributeError: module 'calcops_jit' has no attribute 'thrice'\n  there are: " in cold.err
    )
    header.unlink()  # no unit includes it: the text comes from the manifest
    warm = checkout.run(script, CALCOPS_CUDA="0")
    assert warm.out == expected
    assert "building" not in warm.err


def test_load_gives_the_operators_of_any_source_and_takes_torchs_options(checkout, tmp_path):
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
print(mine.scaled(3), torch.ops.mine.scaled(4), list(mine.operators), mine.path.endswith('/mine.so'))
"""
    child = checkout.run(script, cwd=tmp_path, CALCOPS_BUILD="0")
    assert (child.code, child.out) == (0, "30 40 ['scaled'] True\n"), child.err
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
        "int first(); int second();\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return '
        "first() + second(); }\n",
    )
    assert checkout.answer() == 30
    checkout.write("ops/other/other.h", "#define SECOND 21\n")
    assert checkout.answer() == 31


def test_ninja_is_found_when_only_python_is_called(checkout):
    compiler = Path(shutil.which("c++")).parent
    path = compiler if not (compiler / "ninja").exists() else None
    if path is None:  # where ninja is installed beside the compiler, show the compiler alone
        path = checkout.path.parent / "bin"
        path.mkdir()
        for tool in ("c++", "sh", "ld", "as", "sleep"):
            (path / tool).symlink_to(shutil.which(tool))
    assert checkout.answer(PATH=path, CXX="c++") == 1


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


def failure(checkout, **environment) -> list[str]:
    child = checkout.run(
        (
            """
import calcops_jit
try: calcops_jit.anything
except calcops_jit.BuildError as error: print(error)
"""
        ),
        **environment,
    )
    assert child.code == 0, child.err
    lines = child.out.splitlines()
    assert child.err.endswith(child.out)  # said once at the import, too
    assert 2 <= len(lines) <= 12
    assert lines[0].startswith("cannot build calcops")
    if lines[-1].startswith("  log: "):
        assert Path(lines.pop().removeprefix("  log: ")).read_text()
    return lines


def test_a_compile_error_names_file_line_and_remedy(checkout):
    source = checkout.write("ops/tiny/tiny.cpp", "int f() {\n  return undeclared;\n}\n")
    lines = failure(checkout)
    assert lines[0] == f"cannot build calcops: error at {source}:2:10"
    assert lines[1].startswith(f"  {source}:2:10: error: ")
    assert "undeclared" in lines[1]
    assert "return undeclared;" in lines[2]
    assert lines[-1] == f"  fix: correct {source}:2:10"


def test_an_undefined_function_is_found_before_the_library_is_kept(checkout):
    checkout.write(
        "ops/tiny/tiny.cpp",
        "int missing_one();\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return '
        "missing_one(); }\n",
    )
    child = checkout.run("import calcops_jit")
    assert child.err.splitlines()[-3:] == [
        "calcops_jit: cannot load calcops.so: a function is declared but nowhere defined",
        "  undefined symbol: _Z11missing_onev",
        "  fix: c++filt _Z11missing_onev; add its source, or its library in extra_ldflags",
    ]
    assert checkout.libraries() == []


def test_nvcc_that_was_asked_for_and_is_missing_is_an_error(checkout):
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is a CPU build")
    script = (
        "import _calcops_jit.cuda as cuda; cuda.find_toolkit = lambda: ('', '')\nimport calcops_jit"
    )
    child = checkout.run(script, CALCOPS_CUDA="1")
    # What `make cuda` does where there is a Makefile.
    fix = f"pip install 'cuda-toolkit[nvcc]=={torch.version.cuda}.*'"
    assert (
        child.err
        == f"calcops_jit: cannot build calcops for CUDA\n  no nvcc was found\n  fix: {fix}\n"
    )


def test_load_works_although_the_own_operators_cannot_be_built(checkout, tmp_path):
    checkout.write("ops/tiny/tiny.cpp", "#error broken\n")
    source = tmp_path / "other.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 6; }\n'
    )
    child = checkout.run(
        f"""
import calcops_jit, ctypes
print(ctypes.CDLL(calcops_jit.load('other', {str(source)!r}).path).answer())
"""
    )
    assert (child.code, child.out) == (0, "6\n")
    assert "error: #error broken" in child.err


# ---- the choice for CUDA -------------------------------------------------------------------------


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
def test_cuda_is_built_for_a_gpu_or_when_asked(monkeypatch, gpus, toolkit, environment, expected):
    for name in ("CALCOPS_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(cuda, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(cuda, "gpu_capabilities", lambda: ["8.0", "9.0"])
    monkeypatch.setattr(
        cuda, "find_toolkit", lambda: ("/cuda", toolkit) if toolkit == "13.0" else ("", toolkit)
    )
    choice = cuda.choose()
    assert (
        cuda.arch_list(choice) if choice.build else f"{choice.reason}; {choice.fix}"
    ) == expected


def test_a_cpu_build_of_torch_never_builds_cuda(monkeypatch):
    monkeypatch.setenv("CALCOPS_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", None)
    choice = cuda.choose()
    assert not choice.build
    assert choice.fatal
    assert choice.fix.startswith("pip install")


def test_hidden_gpus_are_not_visible(monkeypatch):
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert cuda.visible_gpus() == ()


def test_a_wrong_switch_is_refused(monkeypatch):
    monkeypatch.setenv("CALCOPS_CUDA", "yes")
    with pytest.raises(ValueError, match="^calcops_jit: expected CALCOPS_CUDA 0 or 1, got 'yes'$"):
        cuda.choose()


# ---- the parts -----------------------------------------------------------------------------------


def test_documentation_is_the_block_that_starts_with_the_operators_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.h").write_text(HEADER)
    assert handles.documentation(str(tmp_path)) == {
        "calcops::twice": "Twice its argument.\n\n    x  any shape",
        "calcops::other": "Another operator.",
    }


# ---- the real library ----------------------------------------------------------------------------


@pytest.mark.skipif(cuda.find_toolkit()[0] == "", reason="no nvcc for this PyTorch")
def test_the_cuda_operators_compile_and_link_for_sm_80_and_sm_90():
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_CUDA_ARCH_LIST"} | {
        "CALCOPS_CUDA": "1"
    }
    command = [sys.executable, "-m", "calcops_jit", "build"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    image = Path(done.stdout.strip()).read_bytes()
    for architecture in (b"sm_80", b"sm_90"):
        assert architecture in image


def test_every_unit_under_ops_is_built():
    units = {Path(s).relative_to(HERE / "ops").as_posix() for s in requests.own().sources}
    there = {p.relative_to(HERE / "ops").as_posix() for p in (HERE / "ops").rglob("*.cpp")}
    assert there <= units
    assert not {u for u in units - there if not u.endswith(".cu")}
