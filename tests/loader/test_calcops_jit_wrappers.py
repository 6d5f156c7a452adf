"""ccache, sccache and flags of dependency files: every edit is compiled, even if a wrapper runs the
compiler."""

import os
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from _calcops_jit.compile import plan
from _calcops_jit.request import Request

COMPILER = shutil.which("c++")
# Prints the answer of the library after its first build, after an edit of a source, and after an
# edit of a header.
EDITS = """
import ctypes, os, sys
import calcops_jit
from pathlib import Path
def print_answer():
    print(ctypes.CDLL(calcops_jit.library_path()).answer(), flush=True)
def edit(file, old, new):
    path = Path(sys.path[0], "ops/tiny", file)
    path.write_text(path.read_text().replace(old, new))
    calcops_jit.reload()
print_answer()
edit("tiny.cpp", "ANSWER;", "10 * ANSWER;")
print_answer()
edit("tiny.h", "ANSWER 1", "ANSWER 2")
print_answer()
"""
# How the wrapper takes the place of the compiler. Each function returns variables.
WAYS = {
    "on PATH": lambda folder, wrapper: {"CXX": None},
    "in CXX": lambda folder, wrapper: {"CXX": f"{wrapper} {COMPILER}"},
    "behind env in CXX": lambda folder, wrapper: {"CXX": f"env {folder}/{wrapper} g++"},
    "behind the name c++": lambda folder, wrapper: link_as_cxx(folder, wrapper),
    "in a script": lambda folder, wrapper: script(
        folder / "g++", f'exec {wrapper} {COMPILER} "$@"'
    ),
}


def link_as_cxx(folder: Path, wrapper: str) -> dict[str, str | None]:
    (folder / "c++").symlink_to(folder / wrapper)
    return {"CXX": None}


def script(path: Path, text: str) -> dict[str, str]:
    """Write a shell script. Return the variable that makes it the compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return {"CXX": str(path)}


@pytest.fixture(params=["ccache", "sccache"])
def wrapper(request, tmp_path):
    """Return the name of the wrapper, its folder, and variables with that folder in PATH."""
    scripts = sysconfig.get_path("scripts")
    path = shutil.which(request.param) or shutil.which(request.param, path=scripts)
    if path is None:
        pytest.skip(f"no {request.param} here; it is in the extra `test`")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / request.param).symlink_to(path)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {
        "SCCACHE_SERVER_PORT": str(port),
        "SCCACHE_DIR": str(tmp_path / "wrapper-cache"),
        "CCACHE_DIR": str(tmp_path / "wrapper-cache"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    yield request.param, folder, dict(environment)
    if request.param == "sccache":  # its server goes on after the compile that started it
        subprocess.run([path, "--stop-server"], env=os.environ | environment, capture_output=True)


@pytest.mark.parametrize("way", WAYS)
def test_every_edit_is_compiled_behind_a_compiler_cache(checkout, wrapper, way):
    name, folder, environment = wrapper
    environment |= WAYS[way](folder, name)
    child = checkout.run(EDITS, **environment)
    assert (child.code, child.out) == (0, "1\n10\n20\n"), child.err
    assert checkout.answer(**environment) == 20
    shutil.rmtree(checkout.cache)  # only the wrapper has a cache now
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 3\n")
    assert checkout.answer(**environment) == 30


FLAGS = {
    "-save-temps": "-save-temps -no-integrated-cpp",
    "of a Makefile": "-MMD -MP -MF {folder}/unit.d -MT tiny.o -MQ other.o",
    "of the kernel's Makefile": "-Wp,-MMD,{folder}/unit.d",
    "-MD": "-MD",
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_system_header_is_an_input_despite_flags_of_dependency_files(checkout, tmp_path, name):
    checkout.write("include/value.h", "#define ANSWER 5\n")
    checkout.write(
        "ops/tiny/tiny.cpp",
        "#include <value.h>\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n',
    )
    flags = FLAGS[name].format(folder=tmp_path)
    options = {"CALCOPS_CFLAGS": f"{flags} -isystem {checkout.path}/include"}
    assert checkout.answer(**options) == 5
    assert checkout.compiled() == 1
    assert checkout.answer(**options) == 5
    assert checkout.compiled() == 0
    checkout.write("include/value.h", "#define ANSWER 6\n")
    assert checkout.answer(**options) == 6
    assert checkout.compiled() == 1


@pytest.mark.parametrize("variable", ["DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"])
def test_a_header_is_an_input_despite_variables_of_dependency_files(checkout, tmp_path, variable):
    options = {variable: f"{tmp_path}/dependencies tiny.o"}
    assert checkout.answer(**options) == 1
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer(**options) == 2


def test_a_dependency_file_without_the_source_is_an_error(checkout):
    # After the compile, the dependency file (-MF) names only the compiler.
    rewrite = 'for word; do case $last in -MF) echo "tiny.o: $0" > $word;; esac; last=$word; done'
    options = script(checkout.path.parent / "wrong-g++", f'{COMPILER} "$@" || exit; {rewrite}')
    child = checkout.run("import calcops_jit", **options)
    assert f"it read 1 files, but not {checkout.path}/ops/tiny/tiny.cpp" in child.err
    assert checkout.libraries() == []
    assert list(checkout.cache.glob("*/*/*.o")) == []


@pytest.mark.parametrize(
    "cc, host", [("ccache gcc", "gcc"), ("sccache /opt/gcc-14", "/opt/gcc-14"), ("gcc", "gcc")]
)
def test_nvcc_gets_the_host_compiler_without_its_wrapper(monkeypatch, cc, host):
    """PyTorch passes CC to -ccbin of nvcc, which takes one word."""
    monkeypatch.setenv("CC", cc)
    request = Request(name="x", root="/", sources=(), cflags=())
    assert plan._environment(request, "/stage")["CC"] == host
