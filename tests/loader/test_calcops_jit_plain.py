"""Shortcuts of a build give what the compiler alone would: of quick linkers and of headers compiled
ahead."""

import os
import shutil

import pytest
from test_calcops_jit_inputs import ANSWER, Folder

from _calcops_jit.compile import precompiled
from _calcops_jit.request import Request


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_two_archives_that_define_one_symbol_are_linked_as_by_the_compiler_alone(folder):
    """GNU ld takes `value` from the archive after the one that asks for it, lld from the first that
    has it."""
    os.makedirs(folder.project / "parts")
    parts = {
        "other": "int value() { return 1; } int other() { return value(); }",
        "late": "int value() { return 2; }",
    }
    parts["ask"] = "int value(); int ask() { return value(); }"
    for name, text in parts.items():
        source = folder.put(f"parts/{name}.cpp", text)
        assert (
            os.system(
                f"c++ -fPIC -c {source} -o {source}.o && ar rc {folder.project}/lib{name}.a {source}.o"
            )
            == 0
        )
    folder.put("mine.cpp", "int ask();\n" + ANSWER.format("return ask();"))
    flags = [f"{folder.project}/lib{name}.a" for name in ("other", "ask", "late")]
    plain = f"c++ -shared -fPIC {folder.project}/mine.cpp {' '.join(flags)} -o {folder.project}/plain.so"
    assert os.system(plain) == 0
    import ctypes

    expected = ctypes.CDLL(f"{folder.project}/plain.so").answer()
    assert folder.loaded(extra_ldflags=flags) == expected
    libraries = [f"-L{folder.project}", *(f"-l{name}" for name in ("other", "ask", "late"))]
    assert folder.loaded(extra_ldflags=libraries) == expected


@pytest.mark.parametrize("how", ["a flag", "the command", "a wrapper"])
def test_objects_for_link_time_optimisation_are_not_linked_empty(folder, how):
    folder.put("mine.cpp", ANSWER.format("return 7;"))
    wrapper = folder.put("g++-lto", f'#!/bin/sh\nexec {shutil.which("g++")} -flto "$@"\n')
    wrapper.chmod(0o755)
    command = {"a flag": "g++", "the command": "g++ -flto", "a wrapper": str(wrapper)}[how]
    options = {"extra_cflags": ["-flto"]} if how == "a flag" else {}
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
        ("{dir}/mine.h", True),
        ("/home/somebody/mine.h", True),
    ],
)
def test_preamble_holds_headers_of_pytorch_the_compiler_and_the_distribution(
    tmp_path, path, is_stranger
):
    mine = request(tmp_path)
    path = path.format(torch=mine.unfold("@torch"), root=tmp_path)
    assert (precompiled.strangers(mine, {path}) == {path}) == is_stranger


@pytest.mark.parametrize("how", ["CPATH", "-isystem{}", "-idirafter{}", "--include-directory={}"])
def test_header_without_a_guard_ends_a_preamble_however_it_is_found(tmp_path, how):
    cache = tmp_path / "cache"
    cache.mkdir()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "unguarded.h").write_text("static int once;\n")
    environment = dict(os.environ)
    flags = how.format(theirs) if how != "CPATH" else ""
    if how == "CPATH":
        environment["CPATH"] = str(theirs)
    mine = request(tmp_path)
    vars(mine)["environment"] = environment
    torch_headers = f"-I{mine.unfold('@torch')}/include"
    text = "#include <torch/headeronly/version.h>\n"
    both = f"{text}#include <unguarded.h>\n"
    assert precompiled._make(mine, str(cache), both, f"{flags} {torch_headers}", environment)
    assert not list(cache.glob("*/*/unit.o"))
    assert not precompiled._make(mine, str(cache), text, f"{flags} {torch_headers}", environment)
    assert len(list(cache.glob("*/*/unit.o"))) == 1


def test_background_process_does_not_make_a_removed_cache_anew(tmp_path):
    cache = tmp_path / "cache"
    precompiled.make(
        request(tmp_path),
        str(cache),
        "#include <torch/headeronly/version.h>\n",
        "",
        dict(os.environ),
    )
    assert not cache.exists()
