"""ccache and sccache: every edit is compiled, even if a wrapper with a cache runs the compiler."""

import os
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

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
    "in CXX": lambda folder, wrapper: {"CXX": f"{wrapper} {COMPILER}"},
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


CASES = [("ccache", "behind the name c++"), ("sccache", "in CXX")]
for case in ("ccache", "in CXX"), ("sccache", "in a script"):
    CASES.append(pytest.param(*case, marks=pytest.mark.long))


@pytest.fixture
def wrapper(name, tmp_path):
    """Return the folder of the wrapper, and variables with that folder in PATH."""
    scripts = sysconfig.get_path("scripts")
    path = shutil.which(name) or shutil.which(name, path=scripts)
    if path is None:
        pytest.skip(f"no {name} here; it is in the extra `test`")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / name).symlink_to(path)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environment = {
        "SCCACHE_SERVER_PORT": str(port),
        "SCCACHE_DIR": str(tmp_path / "wrapper-cache"),
        "CCACHE_DIR": str(tmp_path / "wrapper-cache"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    yield folder, dict(environment)
    if name == "sccache":  # its server goes on after the compile that started it
        subprocess.run([path, "--stop-server"], env=os.environ | environment, capture_output=True)


@pytest.mark.parametrize("name, way", CASES)
def test_every_edit_is_compiled_behind_a_compiler_cache(checkout, wrapper, name, way):
    folder, environment = wrapper
    environment |= WAYS[way](folder, name)
    child = checkout.run(EDITS, **environment)
    assert (child.code, child.out) == (0, "1\n10\n20\n"), child.err
    assert checkout.answer(**environment) == 20
    for slot in checkout.cache.glob("*calcops*"):
        shutil.rmtree(slot)  # only the wrapper has this library now
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 3\n")
    assert checkout.answer(**environment) == 30
