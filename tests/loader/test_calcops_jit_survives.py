"""What other processes do at once, and how processes end: the cache stays whole, and nothing is
left behind."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import LOADED, in_cache, stages, wait_for

from _calcops_jit.cache import locks

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
ANSWER = f"import calcops_jit; {LOADED}; print(loaded.answer())\n"


# ---- folders of one process ----------------------------------------------------------------------


def test_only_what_a_build_started_in_its_folder_is_ended_with_it(tmp_path):
    folder = locks.make(str(tmp_path), "stage")
    variables = {
        "a compiler": {locks.MARK: folder},
        "a user": {},
        "another build": {locks.MARK: f"{folder}0"},
    }
    running = {
        who: subprocess.Popen(["sleep", "60"], cwd=folder, env=os.environ | marked)
        for who, marked in variables.items()
    }
    elsewhere = subprocess.Popen(
        ["sleep", "60"], cwd=tmp_path, env=os.environ | {locks.MARK: folder}
    )
    wait_for(
        lambda: all(
            b"sleep" in Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in running.values()
        )
    )
    locks.remove(folder)
    assert running["a compiler"].wait(30) == -9
    assert [running["a user"].poll(), running["another build"].poll(), elsewhere.poll()] == [
        None
    ] * 3
    assert not os.path.exists(folder)
    for process in (*running.values(), elsewhere):
        process.kill()
        process.wait()


def test_what_a_build_starts_while_its_folder_is_removed_is_ended_too(tmp_path, monkeypatch):
    """Starts a process during the removal, as a build may while its interpreter ends."""
    folder, late = locks.make(str(tmp_path), "stage"), []

    def start_and_remove(path, **options):
        late.append(
            subprocess.Popen(["sleep", "60"], cwd=path, env=os.environ | {locks.MARK: path})
        )
        rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", start_and_remove)
    locks.remove(folder)
    assert [process.wait(30) for process in late] == [-9]
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    "end, left",
    [
        ("", False),
        ("sys.exit(3)", False),
        ("raise ZeroDivisionError", False),
        ("os.fork() or sys.exit(); os.wait(); assert os.path.isdir(folder)", False),  # the child's
        ("os._exit(0)", True),
        ("os.kill(os.getpid(), 15)", True),
        ("os.kill(os.getpid(), 9)", True),
    ],
)
def test_a_folder_of_one_process_goes_with_it_or_with_the_next(tmp_path, end, left):
    script = f"""
import os, sys
from _calcops_jit.cache import locks
folder = locks.make({str(tmp_path)!r}, 'x')
{end}
"""
    subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=Path(__file__).parents[2]
    )
    assert len(list(tmp_path.iterdir())) == left
    mine = locks.make(str(tmp_path), "x")
    assert [str(path) for path in tmp_path.iterdir()] == [mine]
    locks.remove(mine)


def test_a_folder_goes_although_a_child_of_its_dead_owner_lives(tmp_path):
    script = """
import os, sys, time
from _calcops_jit.cache import locks
locks.make(sys.argv[1], 'x')
if child := os.fork(): print(child, flush=True), os._exit(0)
os.closerange(0, 3), time.sleep(60)
"""
    command = [sys.executable, "-c", script, tmp_path]
    child = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    ).stdout
    assert len(list(tmp_path.iterdir())) == 1
    locks.sweep(str(tmp_path), "x")
    os.kill(int(child), 9)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_owner_lives_in_another_container_stays(tmp_path):
    """Its process is invisible from here; its lock is not."""
    folder = tmp_path / f"x.{os.uname().nodename}.4194304999.1.abcdef"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    locks.sweep(str(tmp_path), "x")
    assert folder.exists()
    os.close(fd)
    locks.sweep(str(tmp_path), "x")
    assert not folder.exists()


def test_where_no_cache_can_be_written_nothing_is_left_and_nothing_is_built_twice(
    checkout, tmp_path
):
    (tmp_path / f"calcops-{os.getuid()}").touch()
    script = f"""
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
{ANSWER}print(calcops_jit.reload())
"""
    script += "import atexit; atexit._run_exitfuncs()"  # a child of the zygote exits without them
    for built in (1, 1):
        child = checkout.run(script, CALCOPS_CACHE="/dev/null/cache", TMPDIR=tmp_path)
        assert (child.code, child.out) == (0, "1\n[]\n"), child.err
        assert checkout.compiled() == built
    assert not list(tmp_path.glob("calcops-*.*"))


@pytest.mark.parametrize(
    "moment", ["--version", " -c "], ids=["before ninja starts", "while a compiler runs"]
)
def test_an_interpreter_that_ends_while_a_thread_builds_takes_the_build_along(checkout, moment):
    assert checkout.answer() == 1
    checkout.compiled()
    checkout.slow.touch()
    script = f"""
import calcops_jit, time
from pathlib import Path
end = calcops_jit.watch(0.05)
Path({str(checkout.path / "ops/tiny/tiny.h")!r}).write_text('#define ANSWER 2')
log = Path({str(checkout.log)!r})
while not (log.exists() and {moment!r} in log.read_text()): time.sleep(0.01)
print('over')
"""
    command = [sys.executable, "-c", script]  # the zygote's children skip the end
    environment = os.environ | {"CALCOPS_CACHE": str(checkout.cache), "CXX": str(checkout.compiler)}
    child = subprocess.run(
        command, cwd=checkout.path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (child.returncode, child.stdout, "Error" in child.stderr) == (0, "over\n", False), (
        child.stderr
    )
    assert "cannot build" not in child.stderr
    assert stages(checkout) == []
    assert in_cache(checkout) == []


# ---- cleaning up while others work ---------------------------------------------------------------


def test_clean_leaves_what_is_built_and_what_is_in_use(checkout):
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
    assert checkout.run(MAIN, arguments=["clean"]).err.endswith(
        f"removed the libraries in {checkout.cache}\n"
    )
    assert [path.name for path in checkout.cache.iterdir()] == []


def test_clean_removes_nothing_but_what_is_the_caches(checkout):
    assert checkout.answer() == 1
    theirs = checkout.cache / "data-0123456789abcdef/notes"
    theirs.mkdir(parents=True)
    checkout.run(MAIN, arguments=["clean"])
    assert sorted(path.name for path in checkout.cache.iterdir()) == ["data-0123456789abcdef"]
    assert theirs.exists()


def test_imports_and_cleaners_and_pruners_at_once_do_not_disturb_each_other(checkout):
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
    assert [(child.wait().code, child.out) for child in children] == [(0, "1\n")] * 12, [
        c.err for c in children
    ]
    assert [cleaner.wait().err for cleaner in cleaners] == ["", ""]
    assert not [child.err for child in children if "cannot" in child.err]


# ---- one folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["here", "~/here"])
def test_a_relative_cache_and_one_in_the_home_folder_are_one_folder(checkout, tmp_path, named):
    (tmp_path / "home").mkdir()
    script = """
import calcops_jit, os
os.chdir('/')
print(calcops_jit.reload())
from _calcops_jit.cache import folders
"""
    script += "print(folders.own()[0], calcops_jit.library_path().startswith(folders.own()[0]))"
    child = checkout.run(script, CALCOPS_CACHE=named, HOME=tmp_path / "home")
    folder = tmp_path / named.replace("~", "home")
    assert (child.code, child.out) == (0, f"[]\n{folder} True\n"), child.err
    assert checkout.compiled() == 1


def test_a_relative_xdg_folder_does_not_count(checkout, tmp_path):
    script = "from _calcops_jit.cache import folders; print(folders.own()[0])"
    child = checkout.run(script, CALCOPS_CACHE=None, XDG_CACHE_HOME="relative", HOME=tmp_path)
    assert child.out == f"{tmp_path}/.cache/calcops\n"
