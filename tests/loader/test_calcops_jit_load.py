"""load() takes what torch.utils.cpp_extension.load takes, or says in a line what it does not."""

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
NOTHING = dict.fromkeys(
    (
        "extra_cflags",
        "extra_cuda_cflags",
        "extra_ldflags",
        "extra_include_paths",
        "with_cuda",
        "verbose",
    )
)


def request(sources, name="mine", torch_options=(), **options):
    return requests.foreign(name, sources, torch_options=dict(torch_options), **NOTHING | options)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.cpp"
    path.touch()
    return path


# ---- arguments -----------------------------------------------------------------------------------


def test_a_string_is_what_a_shell_would_take_it_for_and_a_path_is_a_path(
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
        given = request(
            sources,
            extra_cflags='-O2 "-DA=b c"',
            extra_cuda_cflags=("-lineinfo",),
            extra_ldflags="-L/x -ly",
            extra_include_paths=Path("my include") if sources is source else "my include",
        )
        assert given.facts == expected.facts
    assert request(source, extra_ldflags=[tmp_path / "libx.a"]).ldflags == (
        str(tmp_path / "libx.a"),
    )


@pytest.mark.parametrize(
    "argument", ["sources", "extra_cflags", "extra_ldflags", "extra_include_paths"]
)
@pytest.mark.parametrize("value", [3, [3], [b"-O2"], [None]])
def test_what_is_neither_is_refused(source, argument, value):
    options = {"sources": source, argument: value}
    with pytest.raises(TypeError, match=f"expected `{argument}` as strings or paths, got "):
        request(**options)


@pytest.mark.parametrize("name", ["a/b", "", "calcops", "unit-a", "a" * 201, "ä b", None])
def test_a_name_that_cannot_be_one_is_refused(source, name):
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
def test_torchs_other_options_are_taken_where_they_change_nothing(source, option, harmless, wrong):
    assert request(source, torch_options={option: harmless}).facts == request(source).facts
    told = f"calcops_jit.load: expected no `{option}`, got {wrong!r}; "
    with pytest.raises(ValueError, match="^" + re.escape(told) + "[^\n]+$"):
        request(source, torch_options={option: wrong})


def test_a_variable_that_is_no_shells_words_is_named(monkeypatch):
    monkeypatch.setenv("CALCOPS_CFLAGS", "-DA='b")
    told = """calcops_jit: expected CALCOPS_CFLAGS as a shell's words, got "-DA='b": No closing quotation"""
    with pytest.raises(ValueError, match="^" + re.escape(told) + "$"):
        requests.own()


def test_an_option_that_nobody_has_is_refused(source):
    with pytest.raises(TypeError, match="got an unknown argument `extra_cflag`"):
        request(source, torch_options={"extra_cflag": "-O2"})


# ---- what is said, and where ---------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
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


def test_build_and_why_know_a_library_of_load_by_its_name(checkout):
    def main(command, name):
        return checkout.run(MAIN, arguments=[command, name], cwd="/")

    before = main("why", "mine")
    assert (before.code, before.err) == (
        1,
        (
            f"no library `mine` in {checkout.cache}\n  there are: none\n"
            "  fix: calcops_jit.load('mine', ...) first\n"
        ),
    )
    assert checkout.run(LOAD, cwd=checkout.path).out == "2\n"
    (library,) = checkout.libraries()
    assert main("why", "mine").out == f"nothing changed: {library}\n"
    checkout.write("headers/answer.h", "#define ANSWER 2\n")
    why = main("why", "mine")
    assert (why.code, why.out) == (1, f"{checkout.path}/headers/answer.h changed\n")
    checkout.compiled()
    assert main("build", "mine").out.strip() in map(str, checkout.libraries())
    assert checkout.compiled() == 1
    assert (checkout.run(LOAD, cwd=checkout.path).out, checkout.compiled()) == ("3\n", 0)
    assert "there are: mine\n" in main("build", "other").err
    (checkout.path / "mine.cpp").unlink()
    assert (
        main("why", "mine").err
        == f"calcops_jit.load: expected `sources` that exist, got {checkout.path}/mine.cpp\n"
    )


def test_a_source_that_is_gone_is_named_by_reload_and_what_was_live_still_is(checkout):
    script = (
        f"{LOAD}os.unlink('mine.cpp')\ntry: calcops_jit.reload()\n"
        "except calcops_jit.BuildError as e: print(e)\n"
    )
    child = checkout.run(f"{script}print(ctypes.CDLL(mine.path).answer())", cwd=checkout.path)
    assert child.out == (
        f"2\ncannot build mine: a source is gone\n  the source {checkout.path}/mine.cpp is gone\n"
        f"  fix: restore {checkout.path}/mine.cpp, or load without it in a new process\n2\n"
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
def test_a_build_needs_no_output(checkout, preamble):
    """Closes them as a daemon does: nothing may be written to whoever has those descriptors now."""
    load = LOAD.replace("print(", "open('said', 'w').write('%d' % ")
    failing = (
        "try: calcops_jit.load('mine', 'wrong.cpp')\n"
        "except RuntimeError as e: open('told', 'w').write(str(e))"
    )
    checkout.write("wrong.cpp", "int f() {\n")
    checkout.run(f"import os, sys\n{preamble}\n{load}{failing}", cwd=checkout.path)
    assert (checkout.path / "said").read_text() == "2"
    assert (checkout.path / "told").read_text().startswith("cannot build mine: error at ")
    assert checkout.run(LOAD, cwd=checkout.path).err == ""


def outside(folder: Path, script: str, **environment) -> str:
    """What a process of its own prints: a locale is what the interpreter was started with."""
    (folder / "script.py").write_text(script, "utf-8")
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))
    } | environment
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "ascii", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["C", "ASCII"]
)
def test_neither_the_locale_nor_letters_of_any_encoding_matter(checkout, ascii):
    folder = checkout.path.rename(checkout.path.parent / "größe")
    # Which g++ quotes as it is.
    wrong = "open('mine.cpp', 'wb').write(b'int x = ; // gr\\xf6\\xdfe')\n"
    script = f"{LOAD}{wrong}try: calcops_jit.reload()\nexcept calcops_jit.BuildError as e: print(e)"
    variables = {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8:surrogateescape"} | ascii
    said = outside(folder, script, CALCOPS_CACHE=str(checkout.cache), **variables)
    assert said.splitlines()[:3] == [
        "2",
        f"cannot build mine: error at {folder}/mine.cpp:1:9",
        f"  {folder}/mine.cpp:1:9: error: expected primary-expression before ‘;’ token",
    ]


def test_from_a_zip_archive_it_says_that_it_must_be_unpacked(checkout, tmp_path):
    archive = tmp_path / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [
            checkout.path / "calcops_jit.py",
            *(checkout.path / "_calcops_jit").rglob("*.py"),
        ]:
            file.write(path, path.relative_to(checkout.path))
    child = checkout.run(f"import sys; sys.path[0] = {str(archive)!r}\nimport calcops_jit")
    assert child.err.splitlines()[-1].startswith(
        f"ImportError: calcops_jit: expected files, which a compiler can read, got {archive}"
    )
