"""calcops_jit.load accepts the arguments of torch.utils.cpp_extension.load, or refuses one with a
message of one line."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkout import BUILDING, Checkout, the_zygote

from _calcops_jit import requests

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
SOURCE = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER + MORE; }
"""
DEFAULT_OPTIONS = {
    "extra_cflags": None,
    "extra_cuda_cflags": None,
    "extra_ldflags": None,
    "extra_include_paths": None,
    "with_cuda": None,
    "verbose": None,
}


def request(sources, name="mine", torch_options=(), **options):
    options = DEFAULT_OPTIONS | options
    return requests.foreign(name, sources, torch_options=dict(torch_options), **options)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.cpp"
    path.touch()
    return path


# ---- arguments -----------------------------------------------------------------------------------


def test_flags_in_a_string_are_split_like_a_shell_and_paths_are_kept_whole(
    source, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    expected = request(
        [str(source)],
        extra_cflags=["-O2", "-DA=b c"],
        extra_cuda_cflags=["-lineinfo"],
        extra_ldflags=["-L/x", "-ly"],
        extra_include_paths=[str(tmp_path / "my include")],
    )
    for sources in (source, Path("mine.cpp"), "mine.cpp", (source,), [os.fspath(source)]):
        actual = request(
            sources,
            extra_cflags='-O2 "-DA=b c"',
            extra_cuda_cflags=("-lineinfo",),
            extra_ldflags="-L/x -ly",
            extra_include_paths=Path("my include") if sources is source else "my include",
        )
        assert actual.facts == expected.facts
    library = tmp_path / "libx.a"
    assert request(source, extra_ldflags=[library]).ldflags == (str(library),)


@pytest.mark.parametrize(
    "argument", ["sources", "extra_cflags", "extra_ldflags", "extra_include_paths"]
)
@pytest.mark.parametrize("value", [3, [3], [b"-O2"], [None]])
def test_an_argument_that_is_neither_string_nor_path_is_refused(source, argument, value):
    options = {"sources": source, argument: value}
    with pytest.raises(TypeError, match=f"expected `{argument}` as strings or paths, got "):
        request(**options)


@pytest.mark.parametrize("name", ["a/b", "", "calcops", "unit-a", "a" * 201, "ä b", None])
def test_an_invalid_library_name_is_refused(source, name):
    with pytest.raises(
        ValueError, match="expected `name` of letters, digits and _ . -, at most 200, not 'calcops'"
    ):
        request(source, name)


@pytest.mark.parametrize(
    "option, harmless, wrong",
    [
        ("build_directory", None, "build"),
        ("is_python_module", False, True),
        ("is_standalone", False, True),
        ("keep_intermediates", False, "no"),
        ("with_sycl", None, True),
        ("extra_sycl_cflags", [], ["-O2"]),
    ],
)
def test_options_of_torch_are_accepted_only_with_values_that_change_nothing(
    source, option, harmless, wrong
):
    assert request(source, torch_options={option: harmless}).facts == request(source).facts
    message = f"calcops_jit.load: expected no `{option}`, got {wrong!r}; "
    with pytest.raises(ValueError, match="^" + re.escape(message) + "[^\n]+$"):
        request(source, torch_options={option: wrong})


def test_an_environment_variable_with_an_open_quote_is_named_in_the_error(monkeypatch):
    monkeypatch.setenv("CALCOPS_CFLAGS", "-DA='b")
    message = (
        "calcops_jit: expected CALCOPS_CFLAGS as a shell's words, "
        'got "-DA=\'b": No closing quotation'
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        requests.own()


def test_an_unknown_option_is_refused(source):
    with pytest.raises(TypeError, match="got an unknown argument `extra_cflag`"):
        request(source, torch_options={"extra_cflag": "-O2"})


# ---- messages ------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    # BUILDING imports the modules of a build before the fork, so that each child builds at once.
    checkout = Checkout(the_zygote(BUILDING), tmp_path)
    checkout.write("mine.cpp", SOURCE)
    checkout.write("headers/answer.h", "#define ANSWER 1\n")
    return checkout


LOAD = """
import ctypes, os
os.environ["CALCOPS_BUILD"] = "0"
import calcops_jit
mine = calcops_jit.load("mine", "mine.cpp", extra_cflags="-DMORE=1", extra_include_paths="headers")
print(ctypes.CDLL(mine.path).answer())
"""


def test_build_and_why_accept_the_name_of_a_library_of_load(checkout):
    def main(command, name):
        return checkout.run(MAIN, arguments=[command, name], cwd="/")

    why = main("why", "mine")
    assert why.code == 1
    assert why.err == (
        f"no library `mine` in {checkout.cache}\n"
        "  there are: none\n"
        "  fix: calcops_jit.load('mine', ...) first\n"
    )

    assert checkout.run(LOAD, cwd=checkout.path).out == "2\n"
    (library,) = checkout.libraries()
    assert main("why", "mine").out == f"nothing changed: {library}\n"

    checkout.write("headers/answer.h", "#define ANSWER 2\n")
    why = main("why", "mine")
    assert why.code == 1
    assert why.out == f"{checkout.path}/headers/answer.h changed\n"

    checkout.compiled()  # resets the count
    assert main("build", "mine").out.strip() in map(str, checkout.libraries())
    assert checkout.compiled() == 1
    assert checkout.run(LOAD, cwd=checkout.path).out == "3\n"
    assert checkout.compiled() == 0
    assert "there are: mine\n" in main("build", "other").err

    (checkout.path / "mine.cpp").unlink()
    message = f"calcops_jit.load: expected `sources` that exist, got {checkout.path}/mine.cpp\n"
    assert main("why", "mine").err == message


def test_reload_names_a_deleted_source_and_keeps_the_loaded_library(checkout):
    script = """
os.unlink("mine.cpp")
try:
    calcops_jit.reload()
except calcops_jit.BuildError as error:
    print(error)
print(ctypes.CDLL(mine.path).answer())
"""
    child = checkout.run(LOAD + script, cwd=checkout.path)
    assert child.out == (
        "2\n"
        "cannot build mine: a source is gone\n"
        f"  the source {checkout.path}/mine.cpp is gone\n"
        f"  fix: restore {checkout.path}/mine.cpp, or load without it in a new process\n"
        "2\n"
    ), child.err


@pytest.mark.parametrize(
    "preamble",
    [
        "sys.stderr = sys.stdout = None",
        "sys.stderr.close(); sys.stdout.close()",
        "os.close(0); os.close(1); os.close(2)",
    ],
    ids=["none", "closed", "descriptors"],
)
def test_a_build_works_with_closed_standard_streams(checkout, preamble):
    """A daemon closes its standard streams, and their descriptors may then belong to other files:
    the build must not write to them."""
    load = LOAD.replace("print(", "open('answer', 'w').write('%d' % ")
    failing_load = """
try:
    calcops_jit.load("mine", "wrong.cpp")
except RuntimeError as error:
    open("error", "w").write(str(error))
"""
    checkout.write("wrong.cpp", "int f() {\n")
    checkout.run(f"import os, sys\n{preamble}\n{load}{failing_load}", cwd=checkout.path)
    assert (checkout.path / "answer").read_text() == "2"
    assert (checkout.path / "error").read_text().startswith("cannot build mine: error at ")
    # The library is in the cache, so this load prints nothing.
    assert checkout.run(LOAD, cwd=checkout.path).err == ""


def output_of_new_process(folder: Path, script: str, **variables) -> str:
    """Return what a new interpreter prints. A forked child would keep the locale that its parent
    was started with."""
    (folder / "script.py").write_text(script, "utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "PYTHON"))
    }
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "encoding_variables", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["C", "ASCII"]
)
def test_a_build_works_in_any_locale_with_any_letters(checkout, encoding_variables):
    folder = checkout.path.rename(checkout.path.parent / "größe")
    # The comment is Latin-1. g++ quotes these bytes unchanged in its message.
    script = """
open("mine.cpp", "wb").write(b"int x = ; // gr\\xf6\\xdfe")
try:
    calcops_jit.reload()
except calcops_jit.BuildError as error:
    print(error)
"""
    variables = {
        "CALCOPS_CACHE": str(checkout.cache),
        "LC_ALL": "C",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
    }
    output = output_of_new_process(folder, LOAD + script, **variables, **encoding_variables)
    assert output.splitlines()[:3] == [
        "2",
        f"cannot build mine: error at {folder}/mine.cpp:1:9",
        f"  {folder}/mine.cpp:1:9: error: expected primary-expression before ‘;’ token",
    ]


def test_an_import_from_a_zip_archive_is_refused_with_the_path_of_the_archive(checkout, tmp_path):
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in checkout.path.rglob("*.py"):
            file.write(path, path.relative_to(checkout.path))
    child = checkout.run(f"import sys; sys.path[0] = {str(archive)!r}\nimport calcops_jit")
    assert child.err.splitlines()[-1].startswith(
        f"ImportError: calcops_jit: expected files, which a compiler can read, got {archive}"
    )
