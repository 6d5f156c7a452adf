"""Each mistake of a caller is told by its cause, and the fix that is named works."""

import os
import shutil

import pytest
from test_calcops_jit_inputs import ANSWER, Folder

SOURCE = ANSWER.format("return 1;")
NEEDS = "int value();\n" + ANSWER.format("return value();")
TWICE = "at::Tensor twice(const at::Tensor& x) { return x + x; }\n"
FRAGMENT = """
TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) { m.def("twice(Tensor x) -> Tensor", [](at::Tensor x) { return x; }); }
"""
HEADERS = {
    "at": (TWICE, "#include <ATen/ATen.h>"),
    "TORCH_LIBRARY": (FRAGMENT, "#include <torch/library.h>"),
    "torch": (
        "torch::Tensor twice(const torch::Tensor& x) { return x + x; }\n",
        "#include <torch/types.h>",
    ),
    "calcops": ("calcops::View<float, 1> view;\n", "#include <calcops/operator.h>"),
}


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def refused(folder, **options) -> str:
    """The BuildError's text."""
    child = folder.load(**options)
    assert child.code != 0 and "BuildError: " in child.err, child.err
    return child.err.partition("BuildError: ")[2]


@pytest.mark.parametrize("kind", ["o", "a"])
def test_an_object_among_the_sources_belongs_to_the_linkers_flags(folder, kind):
    folder.put("mine.cpp", NEEDS)
    folder.archive(7)
    path = folder.own / {"o": "value.cpp.o", "a": "libvalue.a"}[kind]
    text = refused(folder, sources=["mine.cpp", path.name])
    assert "an object is no source" in text and f"extra_ldflags=['{path}']" in text
    assert folder.loaded(extra_ldflags=[str(path)]) == 7


def test_c_is_compiled_as_cpp_and_an_error_says_so(folder):
    folder.put("mine.cpp", 'extern "C" int value();\n' + ANSWER.format("return value();"))
    source = folder.put("value.c", "int value(void) { int *p = (void *)0; return p ? 1 : 7; }\n")
    text = refused(folder, sources=["mine.cpp", "value.c"])
    assert "invalid conversion" in text and f"compiled as C++; or cc -fPIC -c {source}" in text
    assert os.system(f"cd {folder.own} && cc -fPIC -c {source}") == 0
    assert folder.loaded(extra_ldflags=[f"{folder.own}/value.o"]) == 7


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("what", HEADERS)
def test_a_missing_header_of_pytorch_is_named(folder, what, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    source, include = HEADERS[what]
    folder.put("mine.cpp", source)
    text = refused(folder, CXX=compiler)
    assert "not included" in text and f"fix: begin the source with: {include}\n" in text
    command = (
        f"{compiler} -std=c++20 -fsyntax-only -DTORCH_EXTENSION_NAME=mine "
        f"-I{folder.path}/_calcops_jit/shadow"
    )
    import torch.utils.cpp_extension

    for path in torch.utils.cpp_extension.include_paths():
        command += f" -isystem {path}"
    folder.put("mine.cpp", f"{include}\n{source}")
    assert os.system(f"{command} {folder.own}/mine.cpp") == 0


@pytest.mark.parametrize(
    "flags", [["-fsyntax-only"], ["-E"], ["-S"], ["-o", "mine.o"], ["-omine.o"]], ids=str
)
def test_a_flag_that_asks_for_another_output_is_refused(folder, flags):
    folder.put("mine.cpp", SOURCE)
    text = refused(folder, extra_cflags=flags)
    assert f"a flag asks for another output\n  {flags[0]}: " in text
    assert f"fix: take out of extra_cflags: {flags[0]}\n" in text
    assert "fix: take out of extra_ldflags: -c\n" in refused(folder, extra_ldflags=["-c"])


def test_what_offers_operators_and_registers_none_is_told(folder):
    folder.put("mine.cpp", "#include <calcops/operator.h>\n" + SOURCE)
    child = folder.load()
    assert (
        child.out == "1\n"
        and "calcops_jit: mine registers no operators: add TORCH_LIBRARY_FRAGMENT(" in child.err
    )
    folder.put("mine.cpp", SOURCE)
    assert "registers no operators" not in folder.load().err


def test_a_kernel_without_a_schema_is_told(folder):
    impl = 'TORCH_LIBRARY_IMPL(nobody, CPU, m) { m.impl("twice", TORCH_FN(twice)); }\n'
    folder.put(
        "mine.cpp", f"#include <ATen/ATen.h>\n#include <torch/library.h>\n{TWICE}{impl}{SOURCE}"
    )
    child = folder.load()
    line = (
        "calcops_jit: nobody::twice has a kernel in mine and no schema: "
        'm.def("twice(...) -> ...")\n'
    )
    assert child.out == "1\n" and line in child.err


def test_without_path_it_is_path_that_is_missing(folder):
    folder.put("mine.cpp", SOURCE)
    text = refused(folder, PATH=None)
    assert "PATH is not set" in text and "fix: export PATH=/usr/local/sbin:/usr/local/bin:" in text
    assert folder.loaded(PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") == 1


def test_clangs_objects_for_link_time_optimisation_need_its_linker(folder):
    if shutil.which("clang++") is None or shutil.which("ld.lld") is None:
        pytest.skip("no clang++ and lld here")
    folder.put("mine.cpp", SOURCE)
    text = refused(folder, extra_cflags=["-flto"], CXX="clang++")
    if "file format not recognized" not in text:
        pytest.skip("this linker has clang's plugin")
    assert "fix: pass extra_ldflags=['-fuse-ld=lld'], or take out of extra_cflags: -flto\n" in text
    assert folder.loaded(extra_cflags=["-flto"], extra_ldflags=["-fuse-ld=lld"], CXX="clang++") == 1


LEFT = """
import os, resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
taken = []
try:
    while True: taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
for fd in taken[:{}]: os.close(fd)
"""


@pytest.mark.parametrize("step", ["import", "warm", "build"])
def test_without_a_descriptor_each_step_says_so(folder, step):
    folder.put("mine.cpp", SOURCE)
    call = 'calcops_jit.load("mine", ["mine.cpp"])'
    if step == "warm":
        assert folder.loaded() == 1
    for left in range(1, 9):
        script = LEFT.format(left)
        if step == "import":
            script += "import calcops_jit\ncalcops_jit.force"
        else:
            script = f"import calcops_jit\n{script}{call}"
        child = folder.run(script, cwd=folder.own, CALCOPS_BUILD="0" if step != "import" else None)
        if child.code == 0:
            break
        assert "fix: ulimit -n $(ulimit -H -n)" in child.err and "c++" not in child.err, child.err
    assert left > 1


def test_where_nothing_may_be_executed_the_cause_is_told(folder):
    folder.put("mine.cpp", SOURCE)
    script = """
from _calcops_jit.live import loading
def refuse(name, fd): raise OSError(f"{name}: failed to map segment from shared object")
loading._open = refuse
import calcops_jit
calcops_jit.load("mine", ["mine.cpp"])
"""
    child = folder.run(script, cwd=folder.own, CALCOPS_BUILD="0")
    assert "BuildError: cannot load mine.so: its folder may not be executed (noexec)" in child.err
    assert "fix: export CALCOPS_CACHE=<a folder that is not noexec>" in child.err
