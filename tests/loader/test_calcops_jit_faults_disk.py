"""No artefact and no disk can crash the importer: it builds aside, or says why not on one
screen."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from checkout import BUILDING, LOADED, Checkout, the_zygote

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, and be somebody else")
ANYBODY = 54321  # no passwd entry
ANSWER = f"""
import calcops_jit
try:
    calcops_jit.library_path()
    {LOADED}
    print(loaded.answer())
except calcops_jit.BuildError as error: print(error)
"""
# The n-th file that is opened for writing, folder that is made or rename in the cache finds the
# disk full.
FULL = """
import errno, os, sys
writes = 0
def full(event, arguments):
    global writes
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    if event in ("open", "os.mkdir", "os.rename", "os.symlink") and str(arguments[0]).startswith({folder!r}):
        writes += 1
        if writes == {number}:
            raise OSError(errno.ENOSPC, "No space left on device", arguments[0])
sys.addaudithook(full)
"""


@pytest.fixture
def checkout():
    """A folder that everybody may read; pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "aside").mkdir()
    (folder / "aside").chmod(0o1777)
    yield Checkout(the_zygote(BUILDING), folder)
    shutil.rmtree(folder)


def answer(checkout, script: str = ANSWER, **options) -> str:
    """What the importer prints: it ends by itself, and without a traceback."""
    options.setdefault("TMPDIR", checkout.path.parent / "aside")
    child = checkout.run(script, **options)
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out


def is_one_screen(text: str) -> bool:
    return (
        text.startswith("cannot build calcops")
        and len(text.splitlines()) <= 12
        and "\n  fix: " in text
    )


@pytest.fixture
def mounted(checkout):
    """The cache as a file system of its own."""
    checkout.cache.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(checkout.cache)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield checkout
    subprocess.run(["umount", "-l", str(checkout.cache)], check=True)


def test_a_full_disk_at_any_write_of_the_loader_is_survived(checkout):
    results, number, writes = set(), 0, 0
    while writes >= number:  # write number `number` was reached, and failed
        number += 1
        script = FULL.format(folder=str(checkout.cache), number=number) + ANSWER + "print(writes)"
        *lines, writes = answer(checkout, script).splitlines()
        text, writes = "\n".join(lines) + "\n", int(writes)
        assert text == "1\n" or is_one_screen(text), text
        results.add(text == "1\n" or re.search(r": (the disk is full)\n", text)[1])
        assert answer(checkout) == "1\n"
        shutil.rmtree(checkout.cache, ignore_errors=True)
        shutil.rmtree(checkout.path.parent / "aside" / f"calcops-{os.getuid()}", ignore_errors=True)
    assert number >= 10
    assert results == {True, "the disk is full"}


@as_root
@pytest.mark.parametrize("left", [0, 4, 8, 16, 24, 32, 64])
def test_a_disk_that_fills_up_during_the_build_is_survived(mounted, left):
    fill = mounted.cache / "fill"
    mounted.compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*)\n'
        f"  dd if=/dev/zero of={fill} bs=4k 2> /dev/null; truncate -s -{left}k {fill};; esac\n"
        f'exec {shutil.which("c++")} "$@"\n'
    )
    text = answer(mounted)
    assert text == "1\n" or (is_one_screen(text) and "the disk is full" in text), text
    assert text != "1\n" or left > 0
    fill.unlink()
    assert answer(mounted, CXX=shutil.which("c++")) == "1\n"


@as_root
def test_where_there_is_no_space_at_the_start_it_is_built_aside_with_a_line(mounted):
    with open(mounted.cache / "fill", "wb") as file:
        file.write(bytes(6 << 20))
    child = mounted.run(ANSWER, TMPDIR=mounted.path.parent / "aside")
    assert child.out == "1\n"
    assert child.err.startswith(
        f"calcops_jit: cannot write {mounted.cache}: No space left on device; using "
    )


@as_root
def test_a_cache_that_is_mounted_noexec_is_told_and_one_that_is_read_only_serves(mounted):
    def remount(option):
        subprocess.run(["mount", "-o", f"remount,{option}", str(mounted.cache)], check=True)

    remount("noexec")
    assert "its folder may not be executed (noexec)" in answer(mounted)
    remount("exec")
    assert answer(mounted) == "1\n"
    remount("ro")
    mounted.compiled()
    assert answer(mounted) == "1\n"
    assert mounted.compiled() == 0
    mounted.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    child = mounted.run(ANSWER, TMPDIR=mounted.path.parent / "aside")
    assert child.out == "2\n"
    assert "Read-only file system; using " in child.err


@pytest.mark.parametrize(
    "artefact",
    [
        "",
        "calcops-*",
        "calcops-*/*/",
        "calcops-*/*/manifest",
        "calcops-*/lock",
        "unit-*",
        "unit-*/*/",
    ],
)
def test_whatever_takes_the_place_of_an_artefact_is_survived(checkout, artefact):
    assert answer(checkout) == "1\n"
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    for kind in ("folder", "fifo", "loop", "foreign"):
        shutil.copytree(pristine, checkout.cache)
        for library in checkout.cache.glob("calcops-*/*/*.so"):
            library.unlink()  # so that there is something to build
        found = checkout.cache.glob(artefact) if artefact else [checkout.cache]
        (path,) = [path for path in found if path.is_dir() or not artefact.endswith("/")]
        remove(path)
        if kind == "folder":
            path.mkdir()
            (path / "stage.something").mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path)
        else:
            path.write_bytes(Path("/bin/sh").read_bytes())
        text = answer(checkout)
        assert text == "1\n" or is_one_screen(text), (kind, text)
        remove(checkout.cache)
        remove(checkout.path.parent / "aside" / f"calcops-{os.getuid()}")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- whose bytes they are ------------------------------------------------------------------------


def test_what_a_group_may_write_is_not_loaded_but_built_anew(checkout):
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    for path in [checkout.cache, *checkout.cache.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o020)
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 0


def test_a_umask_that_lets_the_group_write_does_no_harm(checkout):
    script = "import os; os.umask(0o002)\n" + ANSWER
    assert answer(checkout, script) == "1\n"
    assert checkout.compiled() == 1
    assert answer(checkout, script) == "1\n"
    assert checkout.compiled() == 0


@as_root
def test_what_belongs_to_somebody_else_is_not_loaded(checkout):
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    for path in [checkout.cache, *checkout.cache.rglob("*")]:
        os.chown(path, ANYBODY, ANYBODY)
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    for path in checkout.cache.glob("calcops-*/*/*"):
        os.chown(path, ANYBODY, ANYBODY)
    shared = {
        "CALCOPS_CACHE": checkout.path.parent / "other",
        "CALCOPS_CACHE_READONLY": checkout.cache,
    }
    assert answer(checkout, **shared) == "1\n"
    assert checkout.compiled() == 0  # it was named


def as_anybody(checkout, script: str = ANSWER, **options) -> tuple[str, str]:
    """Imports as a user without a passwd entry; what a build imports comes first, while root can
    read it."""
    imports = (
        "import os, sysconfig, _calcops_jit.compile.compiler, _calcops_jit.progress\n"
        "sysconfig.get_config_vars()\n"
        # Python's headers may be where only root can read.
        "sysconfig.get_path = lambda *_, **__: '/nowhere'\n"
    )
    become = f"os.setgroups([]); os.setgid({ANYBODY}); os.setuid({ANYBODY})\n"
    options.setdefault("CALCOPS_CACHE", checkout.path.parent / "aside" / "own")
    child = checkout.run(
        imports + become + script, TMPDIR=checkout.path.parent / "aside", **options
    )
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out, child.err


@as_root
def test_a_cache_is_for_all_users_as_it_is_built_and_an_unreadable_one_is_named(checkout):
    assert answer(checkout) == "1\n"
    checkout.compiled()
    checkout.compiler.chmod(0o755)
    shared = {"CALCOPS_CACHE_READONLY": checkout.cache}
    before = {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")}
    assert as_anybody(checkout, **shared) == ("1\n", "")
    assert checkout.compiled() == 0
    checkout.cache.chmod(0o700)
    out, err = as_anybody(checkout, CXX=shutil.which("c++"), **shared)
    told = (
        f"calcops_jit: cannot read {checkout.cache}: Permission denied "
        "(CALCOPS_CACHE_READONLY lists it)"
    )
    assert (out, err.splitlines()[0]) == ("1\n", told)
    checkout.cache.chmod(0o755)
    for slot in checkout.cache.glob("*-*"):
        slot.chmod(0o700)
    shutil.rmtree(checkout.path.parent / "aside" / "own")
    out, err = as_anybody(checkout, CXX=shutil.which("c++"), **shared)
    assert out == "1\n"
    assert re.match(rf"calcops_jit: cannot read {checkout.cache}/\S+: Permission denied", err)
    assert {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")} == before


@as_root
def test_a_umask_keeps_a_cache_private(checkout):
    script = "import os; os.umask(0o077)\n" + ANSWER
    assert answer(checkout, script) == "1\n"
    assert {
        path.stat().st_mode & 0o077
        for path in [checkout.cache, *checkout.cache.iterdir()]
        if path.is_dir()
    } == {0}


@as_root
def test_without_home_and_passwd_entry_it_is_built_in_a_private_folder(checkout):
    options = {
        "HOME": None,
        "CALCOPS_CACHE": None,
        "XDG_CACHE_HOME": None,
        "CXX": shutil.which("c++"),
    }
    out, err = as_anybody(checkout, **options)
    folder = checkout.path.parent / "aside" / f"calcops-{ANYBODY}"
    assert out == "1\n"
    assert folder.stat().st_uid == ANYBODY
    assert folder.stat().st_mode & 0o777 == 0o700
    assert as_anybody(checkout, **options) == ("1\n", "")


@as_root
def test_a_cache_of_somebody_else_is_left_alone_and_a_line_says_so(checkout):
    assert answer(checkout) == "1\n"
    out, err = as_anybody(checkout, CALCOPS_CACHE=checkout.cache, CXX=shutil.which("c++"))
    assert out == "1\n"
    assert f"cannot write {checkout.cache}: Permission denied; using " in err


@as_root
def test_a_source_that_may_not_be_read_is_named(checkout):
    source = checkout.path / "ops/tiny/tiny.cpp"
    source.chmod(0o600)
    out, err = as_anybody(
        checkout, CALCOPS_CACHE=checkout.path.parent / "aside" / "c", CXX=shutil.which("c++")
    )
    assert is_one_screen(out)
    assert f"fix: chmod u+rX {source}" in out
