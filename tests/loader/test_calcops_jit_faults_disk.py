"""Full disks, damaged caches and missing permissions: an import builds in another folder, or prints
a message of at most 12 lines."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from checkout import BUILDING, LOADED, Checkout, the_zygote

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and change users")
OTHER_USER = 54321  # without a passwd entry
ANSWER = f"""
import calcops_jit
try:
    calcops_jit.library_path()
    {LOADED}
    print(loaded.answer())
except calcops_jit.BuildError as error:
    print(error)
"""
# Makes write number `number` into `folder` fail, as on a full disk. A write opens a file, makes a
# folder or a link, or renames.
FULL_DISK = """
import errno, os, sys
writes = 0
def full(event, arguments):
    global writes
    if event not in ("open", "os.mkdir", "os.rename", "os.symlink"):
        return
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    if str(arguments[0]).startswith({folder!r}):
        writes += 1
        if writes == {number}:
            raise OSError(errno.ENOSPC, "No space left on device", arguments[0])
sys.addaudithook(full)
"""


@pytest.fixture
def checkout():
    """Return a checkout in a folder that every user may read. pytest's folders are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "aside").mkdir()
    (folder / "aside").chmod(0o1777)
    yield Checkout(the_zygote(BUILDING), folder)
    shutil.rmtree(folder)


def answer(checkout, script: str = ANSWER, **options) -> str:
    """Return what an import prints. It must end without an error and without a traceback."""
    options.setdefault("TMPDIR", checkout.path.parent / "aside")
    child = checkout.run(script, **options)
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out


def is_message(text: str) -> bool:
    is_short = len(text.splitlines()) <= 12
    return text.startswith("cannot build calcops") and is_short and "\n  fix: " in text


@pytest.fixture
def mounted(checkout):
    """Return a checkout whose cache is a file system of its own."""
    checkout.cache.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(checkout.cache)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield checkout
    subprocess.run(["umount", "-l", str(checkout.cache)], check=True)


def test_a_full_disk_at_any_write_of_the_loader_is_survived(checkout):
    results = set()
    number = 0
    writes = 0
    while writes >= number:  # the last build had a write of this number, which failed
        number += 1
        full_disk = FULL_DISK.format(folder=str(checkout.cache), number=number)
        *lines, writes = answer(checkout, full_disk + ANSWER + "print(writes)").splitlines()
        writes = int(writes)
        text = "\n".join(lines) + "\n"
        assert text == "1\n" or is_message(text), text
        results.add("1" if text == "1\n" else re.search(r": (the disk is full)\n", text)[1])
        assert answer(checkout) == "1\n"
        shutil.rmtree(checkout.cache, ignore_errors=True)
        shutil.rmtree(checkout.path.parent / "aside" / f"calcops-{os.getuid()}", ignore_errors=True)
    assert number >= 10
    assert results == {"1", "the disk is full"}


@as_root
@pytest.mark.parametrize("free", [0, 4, 8, 16, 24, 32, 64])
def test_a_disk_that_fills_up_during_the_build_is_survived(mounted, free):
    """The compiler fills the disk up to `free` KiB."""
    fill = mounted.cache / "fill"
    mounted.compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*)\n'
        f"  dd if=/dev/zero of={fill} bs=4k 2> /dev/null; truncate -s -{free}k {fill};; esac\n"
        f'exec {shutil.which("c++")} "$@"\n'
    )
    text = answer(mounted)
    if free == 0 or text != "1\n":
        assert is_message(text), text
        assert "the disk is full" in text, text
    fill.unlink()
    assert answer(mounted, CXX=shutil.which("c++")) == "1\n"


@as_root
def test_without_space_in_the_cache_another_folder_is_used_with_one_warning(mounted):
    with open(mounted.cache / "fill", "wb") as file:
        file.write(bytes(6 << 20))
    child = mounted.run(ANSWER, TMPDIR=mounted.path.parent / "aside")
    assert child.out == "1\n"
    assert child.err.startswith(
        f"calcops_jit: cannot write {mounted.cache}: No space left on device; using "
    )


@as_root
def test_a_noexec_cache_is_an_error_and_a_read_only_cache_is_used(mounted):
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
def test_a_folder_fifo_loop_or_foreign_file_in_place_of_a_cache_file_is_survived(
    checkout, artefact
):
    assert answer(checkout) == "1\n"
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    for kind in ("folder", "fifo", "loop", "foreign"):
        shutil.copytree(pristine, checkout.cache)
        for library in checkout.cache.glob("calcops-*/*/*.so"):
            library.unlink()  # so that there is something to build
        paths = checkout.cache.glob(artefact) if artefact else [checkout.cache]
        (path,) = [path for path in paths if path.is_dir() or not artefact.endswith("/")]
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
        assert text == "1\n" or is_message(text), (kind, text)
        remove(checkout.cache)
        remove(checkout.path.parent / "aside" / f"calcops-{os.getuid()}")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- other users ---------------------------------------------------------------------------------


def test_a_library_that_its_group_may_write_is_rebuilt(checkout):
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    for path in [checkout.cache, *checkout.cache.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o020)
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 0


def test_a_library_built_with_a_group_writable_umask_is_loaded_again(checkout):
    script = "import os; os.umask(0o002)\n" + ANSWER
    assert answer(checkout, script) == "1\n"
    assert checkout.compiled() == 1
    assert answer(checkout, script) == "1\n"
    assert checkout.compiled() == 0


@as_root
def test_a_library_of_another_user_is_loaded_only_from_a_named_cache(checkout):
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1
    for path in [checkout.cache, *checkout.cache.rglob("*")]:
        os.chown(path, OTHER_USER, OTHER_USER)
    assert answer(checkout) == "1\n"
    assert checkout.compiled() == 1

    # CALCOPS_CACHE_READONLY may name a cache of another user.
    for path in checkout.cache.glob("calcops-*/*/*"):
        os.chown(path, OTHER_USER, OTHER_USER)
    shared = {
        "CALCOPS_CACHE": checkout.path.parent / "other",
        "CALCOPS_CACHE_READONLY": checkout.cache,
    }
    assert answer(checkout, **shared) == "1\n"
    assert checkout.compiled() == 0


def run_as_other_user(checkout, script: str = ANSWER, **options) -> tuple[str, str]:
    """Run the script as a user without a passwd entry. Return its output and its errors.

    Python may lie where only root can read. So root first imports the modules of a build, and
    Python's headers are hidden from the build.
    """
    become_other_user = f"""
import os, sysconfig, _calcops_jit.compile.compiler, _calcops_jit.progress
sysconfig.get_config_vars()
sysconfig.get_path = lambda *_, **__: '/nowhere'
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
"""
    aside = checkout.path.parent / "aside"
    options.setdefault("CALCOPS_CACHE", aside / "own")
    child = checkout.run(become_other_user + script, TMPDIR=aside, **options)
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out, child.err


@as_root
def test_other_users_can_use_a_cache_and_an_unreadable_one_is_named(checkout):
    assert answer(checkout) == "1\n"
    checkout.compiled()
    checkout.compiler.chmod(0o755)
    shared = {"CALCOPS_CACHE_READONLY": checkout.cache}
    before = {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")}
    assert run_as_other_user(checkout, **shared) == ("1\n", "")
    assert checkout.compiled() == 0
    checkout.cache.chmod(0o700)
    out, err = run_as_other_user(checkout, CXX=shutil.which("c++"), **shared)
    assert out == "1\n"
    assert err.splitlines()[0] == (
        f"calcops_jit: cannot read {checkout.cache}: Permission denied "
        "(CALCOPS_CACHE_READONLY lists it)"
    )

    checkout.cache.chmod(0o755)
    for slot in checkout.cache.glob("*-*"):
        slot.chmod(0o700)
    shutil.rmtree(checkout.path.parent / "aside" / "own")
    out, err = run_as_other_user(checkout, CXX=shutil.which("c++"), **shared)
    assert out == "1\n"
    assert re.match(rf"calcops_jit: cannot read {checkout.cache}/\S+: Permission denied", err)
    assert {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")} == before


@as_root
def test_a_umask_keeps_a_cache_private(checkout):
    script = "import os; os.umask(0o077)\n" + ANSWER
    assert answer(checkout, script) == "1\n"
    for path in [checkout.cache, *checkout.cache.iterdir()]:
        assert not path.is_dir() or path.stat().st_mode & 0o077 == 0


@as_root
def test_a_user_without_home_and_passwd_entry_builds_in_a_private_folder(checkout):
    options = {
        "HOME": None,
        "CALCOPS_CACHE": None,
        "XDG_CACHE_HOME": None,
        "CXX": shutil.which("c++"),
    }
    out, err = run_as_other_user(checkout, **options)
    folder = checkout.path.parent / "aside" / f"calcops-{OTHER_USER}"
    assert out == "1\n"
    assert folder.stat().st_uid == OTHER_USER
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run_as_other_user(checkout, **options) == ("1\n", "")


@as_root
def test_a_cache_of_another_user_is_not_changed_and_a_warning_names_it(checkout):
    assert answer(checkout) == "1\n"
    out, err = run_as_other_user(checkout, CALCOPS_CACHE=checkout.cache, CXX=shutil.which("c++"))
    assert out == "1\n"
    assert f"cannot write {checkout.cache}: Permission denied; using " in err


@as_root
def test_an_unreadable_source_is_named_in_the_error(checkout):
    source = checkout.path / "ops/tiny/tiny.cpp"
    source.chmod(0o600)
    out, err = run_as_other_user(
        checkout, CALCOPS_CACHE=checkout.path.parent / "aside" / "c", CXX=shutil.which("c++")
    )
    assert is_message(out)
    assert f"fix: chmod u+rX {source}" in out
