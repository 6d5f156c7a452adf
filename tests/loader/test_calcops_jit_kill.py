"""Kill-proof: many processes import at once, some or all are killed at a random moment, others come
later."""

import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from checkout import BUILDING, CALL, Checkout, in_cache, stages, the_zygote, wait_for

PROCESSES = 16
LATER = 3
HANGS_S = 120.0  # far more than a build takes on a machine that is busy with other things
FAULTS = (
    "hangs",
    "torn loads",
    "double compiles",
    "not one library",
    "orphaned folders",
    "orphaned compilers",
)


def keep_a_log_of_finished_compiles(checkout, seconds: float) -> Path:
    """A compiler that takes so much longer than the real one; a finished one leaves its builder's
    folder in the log."""
    log = checkout.path.parent / "finished.log"
    compiler = shutil.which("c++")
    checkout.compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) sleep {seconds}; {compiler} "$@" && '
        f"pwd >> {log}; exit;; esac\n"
        f'exec {compiler} "$@"\n'
    )
    return log


def ended(child) -> bool:
    """It is a zombie until its parent is asked to wait for it."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def one_round(checkout, log: Path, number: int, chance: random.Random, moment: float) -> Counter:
    """A new key; nobody hangs, nobody loads anything but the new library, and one compile of it
    succeeds."""
    faults = Counter()
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {number}\n")
    log.unlink(missing_ok=True)
    before = set(checkout.libraries())
    children = [checkout.start() for _ in range(PROCESSES)]
    time.sleep(chance.uniform(0, moment))
    victims = (
        children
        if chance.random() < 0.3
        else chance.sample(children, chance.randint(1, PROCESSES - 1))
    )
    for victim in victims:
        victim.kill()  # safe even if it has ended: its pid stays its own until it is reaped
    children = [*children, *(checkout.start() for _ in range(LATER))]
    end = time.monotonic() + HANGS_S
    for child in children:
        while not ended(child) and time.monotonic() < end:
            time.sleep(0.01)
        if not ended(child):
            faults["hangs"] += 1
            child.kill()
        child.wait()
        right = (child.code, child.out) == (0, f"{number}\n")
        killed = child in victims and (child.code, child.out) in ((-9, ""), (-9, f"{number}\n"))
        faults["torn loads"] += not (right or killed)
        if not (right or killed):
            print(child.code, child.out, child.err)
    # A compile was in vain only where its builder was killed before it had published the library.
    finished = re.findall(
        r"/stage\.[^/]*\.(\d+)\.\d+\.[0-9a-f]+$",
        log.read_text() if log.exists() else "",
        re.MULTILINE,
    )
    killed = {str(child.pid) for child in victims if "built calcops" not in child.err}
    faults["double compiles"] += sum(builder not in killed for builder in finished[:-1])
    faults["not one library"] += len(set(checkout.libraries()) - before) != 1
    faults["orphaned folders"] += len(stages(checkout))
    try:
        wait_for(lambda: in_cache(checkout) == [], 5)
    except AssertionError:
        faults["orphaned compilers"] += 1
    return faults


def rounds(checkout, count: int, seconds: float, moment: float) -> None:
    log = keep_a_log_of_finished_compiles(checkout, seconds)
    seed = time.time_ns()
    chance, faults, start = random.Random(seed), Counter(), time.monotonic()
    for number in range(1, count + 1):
        faults += one_round(checkout, log, number, chance, moment)
        if number % 50 == 0 or number == count:
            figures = ", ".join(f"{faults[fault]} {fault}" for fault in FAULTS)
            each = (time.monotonic() - start) / number
            print(f"\nseed {seed}, {number} rounds, {each:.1f} s each: {figures}", flush=True)
    assert not faults


def test_one_round_of_killing_importers_with_the_real_compiler(checkout):
    source = checkout.path / "ops/tiny/tiny.cpp"
    source.write_text("#include <ATen/core/Tensor.h>\n" + source.read_text())
    rounds(checkout, 1, seconds=0, moment=5)


@pytest.mark.long
def test_500_rounds_of_killing_importers(tmp_path):
    # The importers have what torch's builds import as well, so they are killed in a build and not
    # while importing.
    zygote = the_zygote(BUILDING)
    rounds(Checkout(zygote, tmp_path), 500, seconds=1, moment=2)


def test_where_flock_does_not_exclude_a_double_build_is_harmless(checkout):
    log = keep_a_log_of_finished_compiles(checkout, seconds=1)
    script = f"import fcntl; fcntl.flock = lambda *_: None\n{CALL}"
    children = [checkout.start(script) for _ in range(6)]
    wait_for(lambda: len(stages(checkout)) >= 2)
    children[0].kill()
    for child in children:
        child.wait()
    assert [(child.code, child.out, "Error" in child.err) for child in children[1:]] == [
        (0, "1\n", False)
    ] * 5
    assert len(log.read_text().splitlines()) >= 2  # they did build at the same time
    log.unlink()
    assert checkout.answer() == 1
    assert not log.exists()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer() == 2
    assert stages(checkout) == []  # the killed one's, too
