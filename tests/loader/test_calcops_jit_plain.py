"""Quick linkers and precompiled headers give the result of the plain compiler's command."""

import ctypes
import os
import shutil

import pytest
from test_calcops_jit_inputs import ANSWER, Folder

from _calcops_jit.compile import precompiled
from _calcops_jit.request import Request


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_a_symbol_of_two_archives_is_taken_from_the_one_that_the_plain_compiler_takes(folder):
    """The archive `caller` needs value(). GNU ld takes it from the archive after `caller`, and lld
    from the first archive that has it."""
    parts = {
        "other": "int value() { return 1; } int other() { return value(); }",
        "late": "int value() { return 2; }",
        "caller": "int value(); int call() { return value(); }",
    }
    for name, text in parts.items():
        source = folder.put(f"parts/{name}.cpp", text)
        assert os.system(f"c++ -fPIC -c {source} -o {source}.o") == 0
        assert os.system(f"ar rc {folder.project}/lib{name}.a {source}.o") == 0
    source = folder.put("mine.cpp", "int call();\n" + ANSWER.format("return call();"))
    flags = [f"{folder.project}/lib{name}.a" for name in ("other", "caller", "late")]
    plain = f"c++ -shared -fPIC {source} {' '.join(flags)} -o {folder.project}/plain.so"
    assert os.system(plain) == 0

    expected = ctypes.CDLL(f"{folder.project}/plain.so").answer()
    assert folder.loaded(extra_ldflags=flags) == expected
    libraries = [f"-L{folder.project}", *(f"-l{name}" for name in ("other", "caller", "late"))]
    assert folder.loaded(extra_ldflags=libraries) == expected


@pytest.mark.parametrize("place", ["a flag", "the command", "a wrapper"])
def test_objects_for_link_time_optimisation_are_not_linked_empty(folder, place):
    folder.put("mine.cpp", ANSWER.format("return 7;"))
    wrapper = folder.put("g++-lto", f'#!/bin/sh\nexec {shutil.which("g++")} -flto "$@"\n')
    wrapper.chmod(0o755)
    command = {"a flag": "g++", "the command": "g++ -flto", "a wrapper": str(wrapper)}[place]
    options = {"extra_cflags": ["-flto"]} if place == "a flag" else {}
    assert folder.loaded(CXX=command, **options) == 7


def request(tmp_path, **options) -> Request:
    source = tmp_path / "mine.cpp"
    source.touch()
    return Request(name="mine", root=str(tmp_path), sources=(str(source),), cflags=(), **options)


@pytest.mark.parametrize(
    "path, is_stranger",
    [
        ("{torch}/include/torch/library.h", False),
        ("/usr/include/stdio.h", False),
        ("/usr/src/app/mine.h", True),
        ("/usr/local/include/mine.h", True),
        ("{root}/mine.h", True),
        ("/home/somebody/mine.h", True),
    ],
)
def test_a_preamble_holds_only_headers_of_pytorch_the_compiler_and_the_distribution(
    tmp_path, path, is_stranger
):
    mine = request(tmp_path)
    path = path.format(torch=mine.unfold("@torch"), root=tmp_path)
    assert (precompiled.strangers(mine, {path}) == {path}) == is_stranger


@pytest.mark.parametrize(
    "search", ["CPATH", "-isystem{}", "-idirafter{}", "--include-directory={}"]
)
def test_a_header_without_a_guard_is_not_precompiled_however_it_is_found(tmp_path, search):
    cache = tmp_path / "cache"
    cache.mkdir()
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "unguarded.h").write_text("static int once;\n")
    environment = dict(os.environ)
    if search == "CPATH":
        flags = ""
        environment["CPATH"] = str(headers)
    else:
        flags = search.format(headers)
    mine = request(tmp_path)
    vars(mine)["environment"] = environment  # a Request is frozen
    flags += f" -I{mine.unfold('@torch')}/include"
    text = "#include <torch/headeronly/version.h>\n"
    both = f"{text}#include <unguarded.h>\n"
    # _make() returns True if a header forbids the precompilation.
    assert precompiled._make(mine, str(cache), both, flags, environment)
    assert not list(cache.glob("*/*/unit.o"))
    assert not precompiled._make(mine, str(cache), text, flags, environment)
    assert len(list(cache.glob("*/*/unit.o"))) == 1


def test_the_background_process_does_not_recreate_a_removed_cache(tmp_path):
    cache = tmp_path / "cache"
    text = "#include <torch/headeronly/version.h>\n"
    # A build calls this in a process that goes on after the build.
    precompiled.make(request(tmp_path), str(cache), text, "", dict(os.environ))
    assert not cache.exists()
