"""Messages name the cause of a user's mistake and a fix, and the fix works."""

import os
import shutil

import pytest
import torch.utils.cpp_extension
from test_calcops_jit_inputs import ANSWER, Folder

SOURCE = ANSWER.format("return 1;")
CALLS_VALUE = "int value();\n" + ANSWER.format("return value();")
TWICE = "at::Tensor twice(const at::Tensor& x) { return x + x; }\n"
FRAGMENT = """
TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  m.def("twice(Tensor x) -> Tensor", [](at::Tensor x) { return x; });
}
"""
# A source without its header, and the line that includes it.
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


def build_error(folder, **options) -> str:
    """Return the text of the BuildError."""
    child = folder.load(**options)
    assert child.code != 0, child.err
    assert "BuildError: " in child.err, child.err
    return child.err.partition("BuildError: ")[2]


@pytest.mark.parametrize("kind", ["o", "a"])
def test_an_object_among_the_sources_is_refused_and_works_in_extra_ldflags(folder, kind):
    folder.put("mine.cpp", CALLS_VALUE)
    folder.archive(7)
    path = folder.project / {"o": "value.cpp.o", "a": "libvalue.a"}[kind]
    text = build_error(folder, sources=["mine.cpp", path.name])
    assert "an object is no source" in text
    assert f"extra_ldflags=['{path}']" in text
    assert folder.loaded(extra_ldflags=[str(path)]) == 7


def test_an_error_in_a_c_source_says_that_it_is_compiled_as_cpp(folder):
    folder.put("mine.cpp", 'extern "C" int value();\n' + ANSWER.format("return value();"))
    source = folder.put("value.c", "int value(void) { int *p = (void *)0; return p ? 1 : 7; }\n")
    text = build_error(folder, sources=["mine.cpp", "value.c"])
    assert "invalid conversion" in text
    assert f"compiled as C++; or cc -fPIC -c {source}" in text
    assert os.system(f"cd {folder.project} && cc -fPIC -c {source}") == 0
    assert folder.loaded(extra_ldflags=[f"{folder.project}/value.o"]) == 7


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("namespace", HEADERS)
def test_the_error_of_a_missing_include_of_pytorch_names_the_header(folder, namespace, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    source, include = HEADERS[namespace]
    folder.put("mine.cpp", source)
    text = build_error(folder, CXX=compiler)
    assert "not included" in text
    assert f"fix: begin the source with: {include}\n" in text

    # The compiler by itself accepts the fix.
    command = f"{compiler} -std=c++20 -fsyntax-only -DTORCH_EXTENSION_NAME=mine"
    command += f" -I{folder.path}/_calcops_jit/shadow"
    for path in torch.utils.cpp_extension.include_paths():
        command += f" -isystem {path}"
    folder.put("mine.cpp", f"{include}\n{source}")
    assert os.system(f"{command} {folder.project}/mine.cpp") == 0


@pytest.mark.parametrize(
    "flags", [["-fsyntax-only"], ["-E"], ["-S"], ["-o", "mine.o"], ["-omine.o"]], ids=str
)
def test_a_flag_for_another_output_is_refused(folder, flags):
    folder.put("mine.cpp", SOURCE)
    text = build_error(folder, extra_cflags=flags)
    assert f"a flag asks for another output\n  {flags[0]}: " in text
    assert f"fix: take out of extra_cflags: {flags[0]}\n" in text
    assert "fix: take out of extra_ldflags: -c\n" in build_error(folder, extra_ldflags=["-c"])


def test_a_library_that_registers_no_operators_is_reported(folder):
    folder.put("mine.cpp", "#include <calcops/operator.h>\n" + SOURCE)
    child = folder.load()
    assert child.out == "1\n"
    assert "calcops_jit: mine registers no operators: add TORCH_LIBRARY_FRAGMENT(" in child.err
    folder.put("mine.cpp", SOURCE)
    assert "registers no operators" not in folder.load().err


def test_a_kernel_without_a_schema_is_reported(folder):
    impl = 'TORCH_LIBRARY_IMPL(nobody, CPU, m) { m.impl("twice", TORCH_FN(twice)); }\n'
    includes = "#include <ATen/ATen.h>\n#include <torch/library.h>\n"
    folder.put("mine.cpp", f"{includes}{TWICE}{impl}{SOURCE}")
    child = folder.load()
    assert child.out == "1\n"
    warning = "calcops_jit: nobody::twice has a kernel in mine and no schema: "
    assert warning + 'm.def("twice(...) -> ...")\n' in child.err


def test_without_the_variable_path_the_error_names_path(folder):
    folder.put("mine.cpp", SOURCE)
    text = build_error(folder, PATH=None)
    assert "PATH is not set" in text
    assert "fix: export PATH=/usr/local/sbin:/usr/local/bin:" in text
    assert folder.loaded(PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") == 1


def test_the_fix_for_clang_with_flto_is_its_linker(folder):
    if shutil.which("clang++") is None or shutil.which("ld.lld") is None:
        pytest.skip("no clang++ and lld here")
    folder.put("mine.cpp", SOURCE)
    text = build_error(folder, extra_cflags=["-flto"], CXX="clang++")
    if "file format not recognized" not in text:
        pytest.skip("this linker has clang's plugin")
    assert "fix: pass extra_ldflags=['-fuse-ld=lld'], or take out of extra_cflags: -flto\n" in text
    assert folder.loaded(extra_cflags=["-flto"], extra_ldflags=["-fuse-ld=lld"], CXX="clang++") == 1


# Opens files until none can be opened, and then closes as many as the number in {}.
LEAVE_DESCRIPTORS = """
import os, resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
descriptors = []
try:
    while True:
        descriptors.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for fd in descriptors[:{}]:
    os.close(fd)
"""


@pytest.mark.parametrize("step", ["import", "warm", "build"])
def test_each_step_without_free_descriptors_names_ulimit(folder, step):
    folder.put("mine.cpp", SOURCE)
    call = 'calcops_jit.load("mine", ["mine.cpp"])'
    if step == "warm":
        assert folder.loaded() == 1
    # The step fails with one free descriptor, and needs at most eight.
    for free in range(1, 9):
        script = LEAVE_DESCRIPTORS.format(free)
        if step == "import":
            script += "import calcops_jit\ncalcops_jit.force"
        else:
            script = f"import calcops_jit\n{script}{call}"
        build = None if step == "import" else "0"
        child = folder.run(script, cwd=folder.project, CALCOPS_BUILD=build)
        if child.code == 0:
            break
        assert "fix: ulimit -n $(ulimit -H -n)" in child.err, child.err
        assert "c++" not in child.err, child.err
    assert free > 1


def test_a_library_on_a_noexec_disk_is_reported_with_the_cause(folder):
    folder.put("mine.cpp", SOURCE)
    script = """
from _calcops_jit.live import loading
def refuse(name, fd):
    raise OSError(f"{name}: failed to map segment from shared object")
loading._open = refuse
import calcops_jit
calcops_jit.load("mine", ["mine.cpp"])
"""
    child = folder.run(script, cwd=folder.project, CALCOPS_BUILD="0")
    assert "BuildError: cannot load mine.so: its folder may not be executed (noexec)" in child.err
    assert "fix: export CALCOPS_CACHE=<a folder that is not noexec>" in child.err
