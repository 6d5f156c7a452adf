"""Many processes import at once, some or all of them are killed at a random moment, and others
import afterwards."""

import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from checkout import BUILDING, CALL, Checkout, in_cache, stages, the_zygote, wait_for

PROCESSES = 16
LATER_PROCESSES = 3
TIMEOUT_S = 120.0  # far more than a build takes on a busy machine
FAULTS = (
    "hangs",
    "torn loads",
    "double compiles",
    "not one library",
    "orphaned folders",
    "orphaned compilers",
)


def log_finished_compiles(checkout, seconds: float) -> Path:
    """Make the compiler `seconds` slower, and let it write its working folder into a log at its
    end. Return the log."""
    log = checkout.path.parent / "finished.log"
    compiler = shutil.which("c++")
    checkout.compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) sleep {seconds}; {compiler} "$@" && '
        f"pwd >> {log}; exit;; esac\n"
        f'exec {compiler} "$@"\n'
    )
    return log


def is_ended(child) -> bool:
    """Return True if the process is a zombie, as it is from its end until Child.wait()."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def one_round(checkout, log: Path, number: int, chance: random.Random, moment: float) -> Counter:
    """Kill some importers of a new library. Return the number of faults of each kind: processes
    that hang, load another library, compile twice, or leave something behind."""
    faults = Counter()
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {number}\n")
    log.unlink(missing_ok=True)
    before = set(checkout.libraries())
    children = [checkout.start() for _ in range(PROCESSES)]
    time.sleep(chance.uniform(0, moment))
    if chance.random() < 0.3:
        victims = children
    else:
        victims = chance.sample(children, chance.randint(1, PROCESSES - 1))
    for victim in victims:
        victim.kill()  # the pid of an ended child stays its own until wait()
    children = [*children, *(checkout.start() for _ in range(LATER_PROCESSES))]
    end = time.monotonic() + TIMEOUT_S
    for child in children:
        while not is_ended(child) and time.monotonic() < end:
            time.sleep(0.01)
        if not is_ended(child):
            faults["hangs"] += 1
            child.kill()
        child.wait()
        is_correct = (child.code, child.out) == (0, f"{number}\n")
        is_killed = child in victims and child.code == -9 and child.out in ("", f"{number}\n")
        if not (is_correct or is_killed):
            faults["torn loads"] += 1
            print(child.code, child.out, child.err)

    # Only a builder that was killed before it published the library may have compiled in vain.
    folders = log.read_text() if log.exists() else ""
    builders = re.findall(r"/stage\.[^/]*\.(\d+)\.\d+\.[0-9a-f]+$", folders, re.MULTILINE)
    killed = {str(child.pid) for child in victims if "built calcops" not in child.err}
    faults["double compiles"] += sum(builder not in killed for builder in builders[:-1])
    faults["not one library"] += len(set(checkout.libraries()) - before) != 1
    faults["orphaned folders"] += len(stages(checkout))
    try:
        wait_for(lambda: in_cache(checkout) == [], 5)
    except AssertionError:
        faults["orphaned compilers"] += 1
    return faults


def rounds(checkout, count: int, seconds: float, moment: float) -> None:
    log = log_finished_compiles(checkout, seconds)
    seed = time.time_ns()
    chance = random.Random(seed)
    faults = Counter()
    start = time.monotonic()
    for number in range(1, count + 1):
        faults += one_round(checkout, log, number, chance, moment)
        if number % 50 == 0 or number == count:
            figures = ", ".join(f"{faults[fault]} {fault}" for fault in FAULTS)
            each = (time.monotonic() - start) / number
            print(f"\nseed {seed}, {number} rounds, {each:.1f} s each: {figures}", flush=True)
    assert not faults


def test_killed_importers_leave_nothing_behind_with_the_real_compiler(checkout):
    source = checkout.path / "ops/tiny/tiny.cpp"
    source.write_text("#include <ATen/core/Tensor.h>\n" + source.read_text())
    rounds(checkout, 1, seconds=0, moment=5)


@pytest.mark.long
def test_killed_importers_leave_nothing_behind_in_500_rounds(tmp_path):
    # The modules of a build are imported before the fork, so the processes are killed during a
    # build and not while they import.
    zygote = the_zygote(BUILDING)
    rounds(Checkout(zygote, tmp_path), 500, seconds=1, moment=2)


def test_two_builds_at_once_are_harmless_if_flock_does_not_exclude(checkout):
    log = log_finished_compiles(checkout, seconds=1)
    script = f"import fcntl; fcntl.flock = lambda *_: None\n{CALL}"
    children = [checkout.start(script) for _ in range(6)]
    wait_for(lambda: len(stages(checkout)) >= 2)
    children[0].kill()
    for child in children:
        child.wait()
    for child in children[1:]:
        assert (child.code, child.out) == (0, "1\n"), child.err
        assert "Error" not in child.err
    assert len(log.read_text().splitlines()) >= 2  # at least two processes did build
    log.unlink()
    assert checkout.answer() == 1
    assert not log.exists()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer() == 2
    assert stages(checkout) == []  # the folder of the killed process is removed, too


# Without locks, other processes replace a generation's folder at any moment. These scripts choose
# the worst moments.
PUBLISHED_BY_OTHERS_MEANWHILE = """
import os
rename = os.rename
rivals = [1, 2, 3]
def contested(source, target):
    if rivals and os.path.basename(source).startswith("complete."):
        os.makedirs(target)
        open(f"{target}/manifest.{rivals.pop()}", "w").close()
    rename(source, target)
os.rename = contested
"""
AWAY_DURING_DLOPEN = """
import ctypes, os
dlopen = ctypes.CDLL
away = []
def contested(name, *arguments):
    folder = os.path.dirname(name)
    if not folder.startswith(os.environ["CALCOPS_CACHE"]):
        return dlopen(name, *arguments)
    os.rename(folder, f"{folder}.away")
    away.append(name)
    try:
        return dlopen(name, *arguments)
    finally:
        os.rename(f"{folder}.away", folder)
ctypes.CDLL = contested
import calcops_jit
ctypes.CDLL = dlopen
assert away
"""


@pytest.mark.parametrize("contest", [PUBLISHED_BY_OTHERS_MEANWHILE, AWAY_DURING_DLOPEN])
def test_a_folder_that_others_replace_while_it_is_published_or_loaded_is_harmless(
    checkout, contest
):
    child = checkout.run(f"{contest}\n{CALL}")
    assert (child.code, child.out) == (0, "1\n"), child.err
    assert checkout.answer() == 1
    assert stages(checkout) == []
