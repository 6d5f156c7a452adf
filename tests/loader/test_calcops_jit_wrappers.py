"""ccache, sccache and flags about dependency files: an edit is compiled whatever answers for the
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
# Prints the answer of the library as it is built first, and after an edit of a source and one of a
# header.
EDITS = """
import ctypes, os, sys
import calcops_jit
def say(): print(ctypes.CDLL(calcops_jit.library_path()).answer(), flush=True)
def edit(file, old, new):
    with open(f"{sys.path[0]}/ops/tiny/{file}") as opened: text = opened.read()
    with open(f"{sys.path[0]}/ops/tiny/{file}", "w") as opened: opened.write(text.replace(old, new))
    calcops_jit.reload()
say()
edit("tiny.cpp", "ANSWER;", "10 * ANSWER;"), say()
edit("tiny.h", "ANSWER 1", "ANSWER 2"), say()
"""
WAYS = {
    "on PATH": lambda folder, wrapper: {"CXX": None},
    "in CXX": lambda folder, wrapper: {"CXX": f"{wrapper} {COMPILER}"},
    "behind env in CXX": lambda folder, wrapper: {"CXX": f"env {folder}/{wrapper} g++"},
    "behind the name c++": lambda folder, wrapper: (
        (folder / "c++").symlink_to(folder / wrapper) or {"CXX": None}
    ),
    "in a script": lambda folder, wrapper: script(
        folder / "g++", f'exec {wrapper} {COMPILER} "$@"'
    ),
}


def script(path: Path, text: str) -> dict[str, str]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return {"CXX": str(path)}


@pytest.fixture(params=["ccache", "sccache"])
def wrapper(request, tmp_path):
    """(its name, variables for it with a folder on PATH where it is)"""
    path = shutil.which(request.param) or shutil.which(
        request.param, path=sysconfig.get_path("scripts")
    )
    if path is None:
        pytest.skip(f"no {request.param} here; it is in the extra `test`")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / request.param).symlink_to(path)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        environment = {
            "SCCACHE_SERVER_PORT": str(port.getsockname()[1]),
            "SCCACHE_DIR": str(tmp_path / "theirs"),
        }
    environment |= {
        "CCACHE_DIR": str(tmp_path / "theirs"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    yield request.param, folder, dict(environment)
    if request.param == "sccache":  # a server outlives whoever started it
        subprocess.run([path, "--stop-server"], env=os.environ | environment, capture_output=True)


@pytest.mark.parametrize("way", WAYS)
def test_every_edit_is_compiled_with_a_wrapper(checkout, wrapper, way):
    name, folder, environment = wrapper
    environment |= WAYS[way](folder, name)
    child = checkout.run(EDITS, **environment)
    assert (child.code, child.out) == (0, "1\n10\n20\n"), child.err
    assert checkout.answer(**environment) == 20
    shutil.rmtree(checkout.cache)  # now the wrapper's cache is all there is
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 3\n")
    assert checkout.answer(**environment) == 30


FLAGS = {
    "-save-temps": "-save-temps -no-integrated-cpp",
    "of a Makefile": "-MMD -MP -MF {folder}/unit.d -MT tiny.o -MQ other.o",
    "of the kernel's Makefile": "-Wp,-MMD,{folder}/unit.d",
    "-MD": "-MD",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_system_header_is_tracked_with_flags(checkout, tmp_path, flags):
    checkout.write("include/value.h", "#define ANSWER 5\n")
    checkout.write(
        "ops/tiny/tiny.cpp",
        (
            '#include <value.h>\nextern "C" __attribute__((visibility("default"))) '
            "int answer() { return ANSWER; }\n"
        ),
    )
    options = {
        "CALCOPS_CFLAGS": f"{FLAGS[flags].format(folder=tmp_path)} -isystem {checkout.path}/include"
    }
    assert checkout.answer(**options) == 5
    assert checkout.compiled() == 1
    assert checkout.answer(**options) == 5
    assert checkout.compiled() == 0
    checkout.write("include/value.h", "#define ANSWER 6\n")
    assert checkout.answer(**options) == 6
    assert checkout.compiled() == 1


@pytest.mark.parametrize("variable", ["DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"])
def test_a_variable_about_dependency_files_does_not_hide_a_header(checkout, tmp_path, variable):
    options = {variable: f"{tmp_path}/dependencies tiny.o"}
    assert checkout.answer(**options) == 1
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer(**options) == 2


def test_a_unit_whose_compiler_does_not_name_its_source_is_an_error(checkout):
    lying = 'for word; do case $last in -MF) echo "tiny.o: $0" > $word;; esac; last=$word; done'
    options = script(checkout.path.parent / "lying-g++", f'{COMPILER} "$@" || exit; {lying}')
    child = checkout.run("import calcops_jit", **options)
    assert f"it read 1 files, but not {checkout.path}/ops/tiny/tiny.cpp" in child.err
    assert checkout.libraries() == []
    assert list(checkout.cache.glob("*/*/*.o")) == []


@pytest.mark.parametrize(
    "cc, host", [("ccache gcc", "gcc"), ("sccache /opt/gcc-14", "/opt/gcc-14"), ("gcc", "gcc")]
)
def test_nvcc_is_given_a_host_compiler_without_a_wrapper(monkeypatch, cc, host):
    """PyTorch passes what CC names to nvcc's -ccbin, which takes one word."""
    monkeypatch.setenv("CC", cc)
    request = Request(name="x", root="/", sources=(), cflags=())
    assert plan._environment(request, "/stage")["CC"] == host
