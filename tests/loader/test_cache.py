"""The cache on disk: damaged files, full disks, folders that cannot be written, files of others."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import is_message, spoil

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and change users")
OTHER_USER = 54321
ANSWER = """
import calcops_jit, ctypes
try:
    print(ctypes.CDLL(calcops_jit.library_path()).answer())
except calcops_jit.BuildError as error:
    print(error)
"""


def answer(checkout, script: str = ANSWER, **options) -> str:
    """Return what an import prints. It must end without an error and without a traceback."""
    child = checkout.run(script, **options)
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        *("truncated", "one byte", "fifo"),
        *(
            pytest.param(d, marks=pytest.mark.long)
            for d in "empty folder loop gone foreign".split()
        ),
    ],
)
def test_a_damaged_library_is_rebuilt_and_never_loaded(checkout, damage):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    (library,) = checkout.libraries()
    spoil(library, damage)
    child = checkout.run()
    assert (child.out, "built calcops" in child.err) == ("1\n", True), child.err
    child = checkout.run()
    assert (child.out, child.err) == ("1\n", "")


def test_a_manifest_with_a_changed_byte_is_refused(checkout):
    assert checkout.answer() == 1
    manifest = checkout.libraries()[0].with_name("manifest")
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"operators": {', b'"operators":{ '))
    assert manifest.read_bytes() != text
    assert "damaged" in checkout.main("why").out


@pytest.mark.parametrize(
    "is_each", [False, pytest.param(True, marks=pytest.mark.long)], ids=["all", "each"]
)
def test_damage_of_the_files_of_the_cache_is_survived_by_the_next_build(checkout, is_each):
    """All files are damaged together, or each one for itself."""
    assert checkout.answer() == 1
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    for kind in "truncated", "one byte", "gone", "empty", "folder", "fifo":
        shutil.copytree(pristine, checkout.cache)
        files = checkout.files()
        assert len(files) >= 9
        for damaged in [[file] for file in files] if is_each else [files]:
            for path in damaged:
                spoil(path, kind)
            for value in 2, 1:
                checkout.write("ops/tiny/tiny.h", f"#define ANSWER {value}\n")
                text = answer(checkout)
                is_refused = kind in ("folder", "fifo") and is_message(text)
                assert text == f"{value}\n" or is_refused, (damaged, kind, text)
            child = checkout.run(ANSWER)
            is_sound = child.out == "1\n" and "built" not in child.err
            assert is_sound or is_refused, (damaged, kind, child.err)
            remove(checkout.cache)
            shutil.copytree(pristine, checkout.cache)
        remove(checkout.cache)


# ---- full disks ----------------------------------------------------------------------------------

# Makes write number `number` into `folder` fail, as on a full disk. A write makes a file, a folder
# or a link, or renames one.
FULL_DISK = """
import errno, os, sys
writes = 0
def full(event, arguments):
    global writes
    if event not in ("open", "os.mkdir", "os.rename", "os.symlink"):
        return
    if event == "open" and not (arguments[2] or 0) & os.O_CREAT:
        return
    if str(arguments[0]).startswith({folder!r}):
        writes += 1
        if writes == {number}:
            raise OSError(errno.ENOSPC, "No space left on device", arguments[0])
sys.addaudithook(full)
"""


def test_a_full_disk_at_any_write_of_the_loader_is_survived(checkout):
    """Every fourth write fails, in a build of its own."""
    number = 1
    has_failed = True
    while has_failed:
        full_disk = FULL_DISK.format(folder=str(checkout.cache), number=number)
        *lines, writes = answer(checkout, full_disk + ANSWER + "print(writes)").splitlines()
        writes = int(writes)
        text = "\n".join(lines) + "\n"
        assert text == "1\n" or (is_message(text) and "full" in text), text
        assert answer(checkout) == "1\n"
        remove(checkout.cache)
        has_failed = writes >= number
        number += 4
    assert number >= 9


@pytest.fixture
def mounted(checkout):
    """Return a checkout whose cache is a file system of its own."""
    checkout.cache.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(checkout.cache)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield checkout
    subprocess.run(["umount", "-l", str(checkout.cache)], check=True)


@as_root
def test_a_noexec_cache_is_an_error_and_a_read_only_cache_is_used(mounted):
    def remount(option):
        subprocess.run(["mount", "-o", f"remount,{option}", str(mounted.cache)], check=True)

    remount("noexec")
    text = answer(mounted)
    assert is_message(text)
    assert "noexec" in text
    remount("exec")
    assert answer(mounted) == "1\n"
    remount("ro")
    mounted.compiled()
    assert answer(mounted) == "1\n"
    assert mounted.compiled() == 0
    mounted.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    text = answer(mounted)
    assert is_message(text)
    assert "Read-only file system" in text


# ---- places --------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(checkout):
    text = answer(checkout, CALCOPS_CACHE="/dev/null/cache")
    assert is_message(text)
    assert "fix: export CALCOPS_CACHE=" in text


def test_the_cache_folder_follows_the_variables_and_the_home_folder(checkout, tmp_path):
    def folder(**variables):
        variables = {"CALCOPS_CACHE": None, "XDG_CACHE_HOME": None, "HOME": tmp_path} | variables
        return checkout.main("where", cwd=tmp_path, **variables).out.split()[1].rstrip(",")

    assert folder() == f"{tmp_path}/.cache/calcops"
    assert folder(XDG_CACHE_HOME="/x") == "/x/calcops"
    assert folder(XDG_CACHE_HOME="relative") == f"{tmp_path}/.cache/calcops"
    assert folder(CALCOPS_CACHE="here") == f"{tmp_path}/here"
    assert folder(CALCOPS_CACHE="~/here") == f"{tmp_path}/here"


def test_a_relative_cache_in_a_folder_that_is_gone_is_an_error(checkout, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    script = f"import os, signal; signal.alarm(20); os.rmdir({str(folder)!r}); import calcops_jit"
    child = checkout.run(script, cwd=folder, CALCOPS_CACHE="relative")
    assert child.code == 1
    assert "FileNotFoundError" in child.err


# ---- other users ---------------------------------------------------------------------------------


def test_a_library_that_its_group_may_write_is_rebuilt(checkout):
    assert answer(checkout) == "1\n"
    for path in [checkout.cache, *checkout.cache.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o020)
    checkout.log.unlink()
    assert answer(checkout) == "1\n"
    assert checkout.log.exists()
    child = checkout.run(ANSWER)
    assert (child.out, child.err) == ("1\n", "")


def test_with_any_umask_a_library_is_loaded_again_and_nobody_else_can_write_its_files(checkout):
    for mask in 0o000, 0o077:
        remove(checkout.cache)
        script = f"import os; os.umask({mask})\n" + ANSWER
        assert answer(checkout, script) == "1\n"
        checkout.compiled()
        assert answer(checkout, script) == "1\n"
        assert checkout.compiled() == 0
        modes = {path: path.stat().st_mode for path in checkout.cache.rglob("*")}
        assert not [path for path, mode in modes.items() if mode & 0o022]
    for path in [checkout.cache, *checkout.cache.iterdir()]:
        assert not path.is_dir() or path.stat().st_mode & 0o077 == 0


@as_root
def test_a_library_of_another_user_is_not_loaded(checkout):
    """Another user could put code into the process."""
    assert answer(checkout) == "1\n"
    for path in checkout.cache.rglob("calcops-*/*/*"):
        os.chown(path, OTHER_USER, OTHER_USER)
    checkout.log.unlink()
    assert answer(checkout) == "1\n"
    assert checkout.log.exists()
