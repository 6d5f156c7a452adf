"""Processes that use, clean and prune the cache at once, and processes that end during a build. The
cache stays intact, and nothing is left behind."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import HERE, LOADED, in_cache, stages, wait_for

from _calcops_jit.cache import locks

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
ANSWER = f"import calcops_jit; {LOADED}; print(loaded.answer())\n"


# ---- folders that belong to one process ----------------------------------------------------------


def test_removing_a_folder_kills_only_the_processes_that_its_build_started(tmp_path):
    folder = locks.make(str(tmp_path), "stage")
    variables = {
        "a compiler": {locks.MARK: folder},
        "a user": {},
        "another build": {locks.MARK: f"{folder}0"},
    }
    processes = {
        name: subprocess.Popen(["sleep", "60"], cwd=folder, env=os.environ | mark)
        for name, mark in variables.items()
    }
    mark = {locks.MARK: folder}
    processes["in another folder"] = subprocess.Popen(
        ["sleep", "60"], cwd=tmp_path, env=os.environ | mark
    )
    for process in processes.values():
        command = Path(f"/proc/{process.pid}/cmdline")
        wait_for(lambda command=command: b"sleep" in command.read_bytes())
    locks.remove(folder)
    assert processes.pop("a compiler").wait(30) == -9
    for process in processes.values():
        assert process.poll() is None
    assert not os.path.exists(folder)
    for process in processes.values():
        process.kill()
        process.wait()


def test_removing_a_folder_kills_a_process_that_starts_during_the_removal(tmp_path, monkeypatch):
    """A build may start a compiler while its interpreter ends and removes the folder."""
    folder = locks.make(str(tmp_path), "stage")
    processes = []

    def start_and_remove(path, **options):
        environment = os.environ | {locks.MARK: path}
        processes.append(subprocess.Popen(["sleep", "60"], cwd=path, env=environment))
        rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", start_and_remove)
    locks.remove(folder)
    assert [process.wait(30) for process in processes] == [-9]
    assert not os.path.exists(folder)


CHILD_EXITS_FIRST = """
os.fork() or sys.exit()
os.wait()
assert os.path.isdir(folder)
"""


@pytest.mark.parametrize(
    "end, is_left",
    [
        ("", False),
        ("sys.exit(3)", False),
        ("raise ZeroDivisionError", False),
        (CHILD_EXITS_FIRST, False),
        ("os._exit(0)", True),
        ("os.kill(os.getpid(), 15)", True),
        ("os.kill(os.getpid(), 9)", True),
    ],
)
def test_a_folder_is_removed_with_its_process_or_by_the_next_one(tmp_path, end, is_left):
    script = f"""
import os, sys
from _calcops_jit.cache import locks
folder = locks.make({str(tmp_path)!r}, 'x')
{end}
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=HERE)
    assert len(list(tmp_path.iterdir())) == is_left
    new_folder = locks.make(str(tmp_path), "x")
    assert [str(path) for path in tmp_path.iterdir()] == [new_folder]
    locks.remove(new_folder)


def test_a_folder_is_removed_although_a_child_of_its_dead_owner_lives(tmp_path):
    script = """
import os, sys, time
from _calcops_jit.cache import locks
locks.make(sys.argv[1], 'x')
child = os.fork()
if child:
    print(child, flush=True)
    os._exit(0)
os.closerange(0, 3)
time.sleep(60)
"""
    command = [sys.executable, "-c", script, tmp_path]
    owner = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    child = int(owner.stdout)
    assert len(list(tmp_path.iterdir())) == 1
    locks.sweep(str(tmp_path), "x")
    os.kill(child, 9)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_owner_lives_in_another_container_stays(tmp_path):
    """The process is invisible from this container, but its lock is not."""
    folder = tmp_path / f"x.{os.uname().nodename}.4194304999.1.abcdef"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    locks.sweep(str(tmp_path), "x")
    assert folder.exists()
    os.close(fd)
    locks.sweep(str(tmp_path), "x")
    assert not folder.exists()


def test_without_a_writable_cache_each_process_builds_once_and_leaves_nothing(checkout, tmp_path):
    (tmp_path / f"calcops-{os.getuid()}").touch()
    script = f"""
import tempfile
tempfile.tempdir = {str(tmp_path)!r}
{ANSWER}
print(calcops_jit.reload())
import atexit
atexit._run_exitfuncs()  # a child of the zygote exits without them
"""
    for _ in range(2):
        child = checkout.run(script, CALCOPS_CACHE="/dev/null/cache", TMPDIR=tmp_path)
        assert (child.code, child.out) == (0, "1\n[]\n"), child.err
        assert checkout.compiled() == 1  # reload() compiles nothing
    assert not list(tmp_path.glob("calcops-*.*"))


@pytest.mark.parametrize(
    "moment", ["--version", " -c "], ids=["before ninja starts", "while a compiler runs"]
)
def test_an_interpreter_that_ends_while_a_thread_builds_ends_the_build(checkout, moment):
    assert checkout.answer() == 1
    checkout.compiled()
    checkout.slow.touch()
    script = f"""
import calcops_jit, time
from pathlib import Path
end = calcops_jit.watch(0.05)
Path({str(checkout.path / "ops/tiny/tiny.h")!r}).write_text('#define ANSWER 2')
log = Path({str(checkout.log)!r})
while not (log.exists() and {moment!r} in log.read_text()):
    time.sleep(0.01)
print('end')
"""
    # Not a child of the zygote, because such a child skips the end of the interpreter.
    command = [sys.executable, "-c", script]
    environment = os.environ | {"CALCOPS_CACHE": str(checkout.cache), "CXX": str(checkout.compiler)}
    child = subprocess.run(
        command, cwd=checkout.path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (child.returncode, child.stdout) == (0, "end\n"), child.stderr
    assert "Error" not in child.stderr, child.stderr
    assert "cannot build" not in child.stderr, child.stderr
    assert stages(checkout) == []
    assert in_cache(checkout) == []


# ---- cleaning and pruning while other processes work ---------------------------------------------


def test_clean_keeps_libraries_that_are_built_or_in_use(checkout):
    user = checkout.start(f"{ANSWER}import sys, time; sys.stdout.flush(); time.sleep(600)")
    wait_for(lambda: user.out or user.err.count("Error"), 120)
    (used,) = checkout.libraries()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    checkout.compiled()
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    clean = checkout.run(MAIN, arguments=["clean"])
    assert clean.code == 0
    assert "but 1 that a process has or builds" in clean.err
    checkout.slow.unlink()
    assert builder.wait().out == "2\n"
    assert builder.code == 0
    assert used.exists()
    assert len(checkout.libraries()) == 2
    clean = checkout.run(MAIN, arguments=["clean"])
    assert checkout.libraries() == [used]
    user.kill()
    user.wait()
    clean = checkout.run(MAIN, arguments=["clean"])
    assert clean.err.endswith(f"removed the libraries in {checkout.cache}\n")
    assert [path.name for path in checkout.cache.iterdir()] == []


def test_clean_removes_only_entries_of_the_cache(checkout):
    assert checkout.answer() == 1
    foreign_folder = checkout.cache / "data-0123456789abcdef/notes"
    foreign_folder.mkdir(parents=True)
    checkout.run(MAIN, arguments=["clean"])
    assert sorted(path.name for path in checkout.cache.iterdir()) == ["data-0123456789abcdef"]
    assert foreign_folder.exists()


def test_imports_work_while_other_processes_clean_and_prune(checkout):
    cleaning = """
from _calcops_jit.cache import bounds
for _ in range(200):
    bounds.prune(0)
    list(bounds.clean())
"""
    cleaners = [checkout.start(cleaning) for _ in range(2)]
    children = []
    for _ in range(4):
        children += [checkout.start(ANSWER) for _ in range(3)]
        time.sleep(0.3)
    for child in children:
        child.wait()
        assert (child.code, child.out) == (0, "1\n"), child.err
    assert [cleaner.wait().err for cleaner in cleaners] == ["", ""]
    for child in children:
        assert "cannot" not in child.err


# ---- relative folders ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["here", "~/here"])
def test_a_relative_or_tilde_cache_stays_the_same_after_chdir(checkout, tmp_path, name):
    (tmp_path / "home").mkdir()
    script = """
import calcops_jit, os
os.chdir('/')
print(calcops_jit.reload())
from _calcops_jit.cache import folders
cache = folders.own()[0]
print(cache, calcops_jit.library_path().startswith(cache))
"""
    child = checkout.run(script, CALCOPS_CACHE=name, HOME=tmp_path / "home")
    folder = tmp_path / name.replace("~", "home")
    assert (child.code, child.out) == (0, f"[]\n{folder} True\n"), child.err
    assert checkout.compiled() == 1


def test_a_relative_xdg_cache_home_is_ignored(checkout, tmp_path):
    script = "from _calcops_jit.cache import folders; print(folders.own()[0])"
    child = checkout.run(script, CALCOPS_CACHE=None, XDG_CACHE_HOME="relative", HOME=tmp_path)
    assert child.out == f"{tmp_path}/.cache/calcops\n"
