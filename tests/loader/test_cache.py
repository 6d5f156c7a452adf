"""The cache on disk: damaged files, full disks, folders that cannot be written, other users."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from checkout import Checkout, is_message, spoil

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount and change users")
OTHER_USER = 54321  # without a passwd entry
ANSWER = """
import calcops_jit, ctypes
try:
    print(ctypes.CDLL(calcops_jit.library_path()).answer())
except calcops_jit.BuildError as error:
    print(error)
"""


@pytest.fixture
def checkout():
    """Return a checkout in a folder that every user may read. pytest's folders are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "aside").mkdir()
    (folder / "aside").chmod(0o1777)
    yield Checkout(folder)
    shutil.rmtree(folder)


def answer(checkout, script: str = ANSWER, **options) -> str:
    """Return what an import prints. It must end without an error and without a traceback."""
    options.setdefault("TMPDIR", checkout.path.parent / "aside")
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


KINDS = ["truncated", "one byte", "gone", "empty", "folder", "fifo", "foreign"]


def test_damage_of_any_file_of_the_cache_is_survived_by_the_next_build(checkout):
    """Each file is damaged for itself, in one way after the other, and then all files together."""
    assert checkout.answer() == 1
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    shutil.copytree(pristine, checkout.cache)
    files = checkout.files()
    damages = [([file], KINDS[i % 4]) for i, file in enumerate(files)]
    damages += [(files, kind) for kind in KINDS]
    assert len(damages) >= 9
    for damaged, kind in damages:
        for path in damaged:
            spoil(path, kind)
        for value in 2, 1:
            checkout.write("ops/tiny/tiny.h", f"#define ANSWER {value}\n")
            text = answer(checkout)
            is_refused = kind in ("folder", "fifo") and is_message(text)
            assert text == f"{value}\n" or is_refused, (damaged, kind, text)
        child = checkout.run(ANSWER, TMPDIR=checkout.path.parent / "aside")
        assert is_refused or (child.out, "built" in child.err) == ("1\n", False), (damaged, kind)
        remove(checkout.cache)
        shutil.copytree(pristine, checkout.cache)
        remove(checkout.path.parent / "aside" / f"calcops-{os.getuid()}")


# ---- full disks ----------------------------------------------------------------------------------

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


def test_a_full_disk_at_any_write_of_the_loader_is_survived(checkout):
    """Every fourth write fails, in a build of its own."""
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    results = set()
    number = 1
    has_failed = True
    while has_failed:
        shutil.copytree(pristine, checkout.cache)
        full_disk = FULL_DISK.format(folder=str(checkout.cache), number=number)
        *lines, writes = answer(checkout, full_disk + ANSWER + "print(writes)").splitlines()
        writes = int(writes)
        text = "\n".join(lines) + "\n"
        assert text == "1\n" or (is_message(text) and "full" in text), text
        results.add(text == "1\n")
        assert answer(checkout) == "1\n"
        remove(checkout.cache)
        remove(checkout.path.parent / "aside" / f"calcops-{os.getuid()}")
        has_failed = writes >= number
        number += 4
    assert number >= 9


@pytest.fixture
def mounted(checkout):
    """Return a checkout whose cache is a file system of its own."""
    pristine = checkout.cache.rename(checkout.path.parent / "pristine")
    checkout.cache.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(checkout.cache)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    shutil.copytree(pristine, checkout.cache, dirs_exist_ok=True)
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


def test_a_library_built_with_any_umask_is_loaded_again_and_the_umask_may_keep_it_private(checkout):
    for mask in 0o002, 0o077:
        remove(checkout.cache)
        script = f"import os; os.umask({mask})\n" + ANSWER
        assert answer(checkout, script) == "1\n"
        checkout.compiled()
        assert answer(checkout, script) == "1\n"
        assert checkout.compiled() == 0
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


def run_as_other_user(checkout, script: str = ANSWER, **options) -> tuple[str, str]:
    """Run the script as a user without a passwd entry. Return its output and its errors.

    Python may lie where only root can read. So root first builds something in another folder, which
    imports all modules, and Python's headers are hidden from the build.
    """
    become_other_user = f"""
import os, sysconfig
sysconfig.get_config_vars()
variables = dict(os.environ)
os.environ["CALCOPS_CACHE"] = {str(checkout.path.parent / "warm-up")!r}
os.environ["CALCOPS_BUILD"] = "0"
import calcops_jit, torch
calcops_jit.load("warm_up", {str(checkout.put("warm_up.cpp", "int warm_up;"))!r})
for module in [name for name in __import__("sys").modules if name.startswith("calcops_jit")]:
    del __import__("sys").modules[module]
os.environ.clear()
os.environ.update(variables)
sysconfig.get_path = lambda *_, **__: '/nowhere'
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
"""
    aside = checkout.path.parent / "aside"
    options.setdefault("CALCOPS_CACHE", aside / "own")
    options.setdefault("CXX", shutil.which("c++"))
    child = checkout.run(become_other_user + script, TMPDIR=aside, **options)
    assert child.code == 0, child.err
    assert "Traceback" not in child.err, child.err
    return child.out, re.sub(
        r"calcops_jit: built? \S*warm_up.*\n|calcops_jit: building warm_up.*\n", "", child.err
    )


@as_root
def test_a_cache_of_another_user_is_not_changed_and_an_error_names_it(checkout):
    assert answer(checkout) == "1\n"
    before = {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")}
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    out, _ = run_as_other_user(checkout, CALCOPS_CACHE=checkout.cache)
    assert is_message(out)
    assert re.search(rf"Permission denied: '{checkout.cache}", out)
    assert {path: path.stat().st_mtime_ns for path in checkout.cache.rglob("*")} == before
