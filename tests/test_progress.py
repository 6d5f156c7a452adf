"""What is told while a build goes on, and how long it says that it will take."""

import heapq
import io
import math
import os
import random
import re
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from checkout import wait_for

from _calcops_jit import progress, remaining_time
from _calcops_jit.progress import Progress
from _calcops_jit.remaining_time import RemainingTime

# ---- one line ---------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


def last_line(screen: Screen) -> str:
    """What a terminal shows: a return, then text over the old."""
    line = ""
    for piece in screen.getvalue().rpartition("\n")[2].split("\r"):
        line = piece + line[len(piece) :]
    return line.rstrip()


def test_progress_redraws_one_line_on_a_terminal_and_leaves_it_empty(monkeypatch):
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    steps = iter([("[0/2]", 0.0), ("[1/2] " + 99 * "long", 0.5)])
    with Progress("building x", lambda seconds: next(steps, ("[2/2]", 0.9))):
        wait_for(lambda: last_line(screen) == "calcops_jit: building x [2/2]")
    assert screen.getvalue().startswith("\rcalcops_jit: building x [0/2] ") and "longlong" in screen.getvalue()
    assert max(map(len, screen.getvalue().split("\r"))) < shutil.get_terminal_size().columns
    assert "\n" not in screen.getvalue() and last_line(screen) == ""


def test_the_outcome_stays_on_a_terminal_and_a_failure_leaves_nothing(monkeypatch):
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress("building x", lambda seconds: ("", 0.5)) as shown:
        shown.outcome = "built x"
    assert screen.getvalue().endswith("\n") and screen.getvalue().count("\n") == 1
    assert screen.getvalue().rstrip().rpartition("\r")[2] == "calcops_jit: built x"
    with pytest.raises(ZeroDivisionError), Progress("building y", lambda seconds: ("", 0.5)):
        1 / 0  # noqa: B018
    assert last_line(screen) == ""


def test_a_notebook_has_one_output_a_bar_and_then_the_outcome(monkeypatch):
    display = pytest.importorskip("IPython.display")
    outputs, stream = [], type("Stream", (Screen,), {"__module__": "ipykernel.iostream"})(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(
        display, "display", lambda data, **_: SimpleNamespace(update=lambda data, raw: outputs.append(data))
    )
    with Progress("building x", lambda seconds: ("a<b.cpp", 0.25)) as shown:
        shown.outcome = "built x"
    assert outputs[0] == {
        "text/plain": "building x a<b.cpp",
        "text/html": "<progress value='0.250'></progress> building x a&lt;b.cpp",
    }
    assert outputs[-1] == {"text/plain": "built x"} and stream.getvalue() == ""


def test_progress_in_a_log_is_lines_now_and_then(monkeypatch):
    screen = Screen(terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "_LOG_S", 0.3)
    start = time.monotonic()
    with Progress("x", lambda seconds: (f"at {seconds:.0f} s", 0.0)) as shown:
        wait_for(lambda: screen.getvalue().count("\n") >= 3)
        shown.outcome = "done"
    *told, outcome = screen.getvalue().splitlines()
    assert len(told) <= 1 + (time.monotonic() - start) / 0.3
    assert all(line.startswith("calcops_jit: x at ") for line in told)
    assert outcome == "calcops_jit: done"


def test_a_closed_or_missing_stream_does_not_fail_a_build(monkeypatch):
    closed, closes = Screen(terminal=True), Screen(terminal=True)
    closed.close()
    del closed.isatty  # a closed file raises here, too
    for stream in (closed, closes, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("x", lambda seconds: ("", 0.0)) as shown:
            closes.close()
            time.sleep(0.3)
            if stream is not closed:
                shown.outcome = "done"


def test_a_warm_import_does_without_progress_and_a_build_without_ipython(checkout):
    modules = "'_calcops_jit.progress', '_calcops_jit.remaining_time', 'IPython'"
    script = f"import calcops_jit, sys; print([name for name in ({modules}) if name in sys.modules])"
    assert checkout.run(script).out == "['_calcops_jit.progress', '_calcops_jit.remaining_time']\n"
    assert checkout.run(script).out == "[]\n"


# ---- the time that is left --------------------------------------------------------------------------------------


class Staging:
    """ninja's files of a build whose units take as long as they are told, `jobs` at a time, and then `rest`."""

    def __init__(self, slot, units: list[float], rest: float, jobs: int):
        self.path, self.end = slot / "stage", []
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        builds = [f"build unit{i}.cpp.o: compile\n" for i in range(len(units))]
        builds.append(f"build stage: link {' '.join(f'unit{i}.cpp.o' for i in range(len(units)))}\njobs = {jobs}\n")
        (self.path / "build.ninja").write_text("".join(builds))
        self.log, free = [], [0.0] * jobs
        for i, seconds in enumerate(units):
            start = heapq.heappop(free)
            heapq.heappush(free, start + seconds)
            self.log.append((start, start + seconds, f"unit{i}.cpp.o"))
        self.log.append((max(free), max(free) + rest / 2, "stage"))  # and then the library is loaded
        self.seconds = max(free) + rest

    def at(self, seconds: float) -> None:
        lines = [f"{s * 1e3:.0f}\t{e * 1e3:.0f}\t0\t{target}\tabc\n" for s, e, target in self.log if e <= seconds]
        (self.path / ".ninja_log").write_text("# ninja log v7\n" + "".join(lines))
        began = time.time() - seconds
        os.utime(self.path / "build.ninja", (began, began))


def request_of(*flags: str) -> SimpleNamespace:
    return SimpleNamespace(name="x", facts={"C++ flags": list(flags)})


def taught(tmp_path, monkeypatch, units: list[float], rest: float, jobs: int) -> Staging:
    """A build that was learnt from."""
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    staging = Staging(tmp_path / "slot", units, rest, jobs)
    staging.at(staging.seconds)
    RemainingTime(request_of(), str(tmp_path / "slot"), str(staging.path)).learn()
    return staging


def shown(tmp_path, staging: Staging, step: float = 0.5) -> list[tuple[float, int | None]]:
    """[(seconds, seconds that it said were left)] until it is built."""
    estimate, said, at = RemainingTime(request_of(), str(tmp_path / "slot"), str(staging.path)), [], 0.0
    while at < staging.seconds:
        staging.at(at)
        text, part = estimate.state(at)
        assert 0 <= part <= 1
        left = re.search(r" (\d+) s, (\d+) s left$", text)
        said.append((at, int(left[2]) if left else None))
        at += step
    return said


@pytest.mark.parametrize(("units", "jobs"), [([6], 2), ([6, 1, 20, 3], 1), ([6, 1, 20, 3], 2), ([5] * 7, 4)])
def test_a_build_that_goes_as_the_last_one_ends_when_it_said_from_its_first_moment(tmp_path, monkeypatch, units, jobs):
    staging = taught(tmp_path, monkeypatch, units, 6.0, jobs)
    for at, left in shown(tmp_path, Staging(tmp_path / "slot", units, 6.0, jobs)):
        assert abs(at + left - staging.seconds) <= 1.0 + 0.1 * max(units)  # what runs may still be late


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.3])
def test_the_time_that_is_left_never_more_than_doubles_and_the_end_is_right_within_a_factor_of_two(
    tmp_path, monkeypatch, speed
):
    """Units are 20 % off what they took before, and the machine is slower or faster than it was."""
    chance, off, silent, total = random.Random(1), 0, 0, 0
    for _ in range(30):
        jobs = chance.choice([1, 2, 4, 16])
        units = [chance.choice([0.7, 3, 6, 20]) * chance.uniform(0.7, 1.4) for _ in range(chance.randint(1, 8))]
        taught(tmp_path, monkeypatch, units, 1.0, jobs)
        noisy = [seconds * speed * math.exp(chance.gauss(0, 0.2)) for seconds in units]
        staging = Staging(tmp_path / "slot", noisy, speed, jobs)
        least = math.inf
        for at, left in shown(tmp_path, staging, step=1.0):
            total += 1
            silent += left is None
            if left is not None:
                assert left <= 2 * least
                least = min(least, left)
                off += not 0.5 <= staging.seconds / (at + left) <= 2
    assert off <= 0.05 * total and silent <= 0.05 * total, (off, silent, total)


def test_an_estimate_that_was_wrong_is_not_told_any_more(tmp_path, monkeypatch):
    taught(tmp_path, monkeypatch, [5, 5], 1.0, 1)
    said = shown(tmp_path, Staging(tmp_path / "slot", [5, 200], 1.0, 1))
    assert said[0][1] == 11
    assert said[-1] == (205.5, None) and max(left for _, left in said if left) == 11


def test_nothing_is_said_of_units_or_flags_that_were_never_built(tmp_path, monkeypatch):
    slot = str(tmp_path / "slot")
    staging = taught(tmp_path, monkeypatch, [5, 5], 1.0, 1)
    staging.at(6.0)
    assert RemainingTime(request_of(), slot, str(staging.path)).state(6.0)[0] == "[1/3] unit1.cpp 6 s, 5 s left"
    assert RemainingTime(request_of("-O0"), slot, str(staging.path)).state(6.0) == ("[1/3] unit1.cpp 6 s", 1 / 3)
    staging = Staging(tmp_path / "slot", [5, 5, 5], 1.0, 1)
    staging.at(6.0)
    assert RemainingTime(request_of(), slot, str(staging.path)).state(6.0)[0] == "[1/4] unit1.cpp 6 s"
    shutil.rmtree(staging.path)
    assert RemainingTime(request_of(), slot, str(staging.path)).state(0.0) == ("[0/?] 0 s", 0.0)


def test_what_was_learnt_is_replaced_and_bounded_and_may_be_damaged(tmp_path, monkeypatch):
    history = tmp_path / "seconds"
    taught(tmp_path, monkeypatch, [5, 5], 1.0, 1)
    taught(tmp_path, monkeypatch, [7, 5], 1.0, 1)
    assert sorted(end - start for start, end in remaining_time._read(str(history)).values()) == [1.0, 5.0, 7.0]
    monkeypatch.setattr(remaining_time, "_KEPT", 4)
    taught(tmp_path, monkeypatch, [1, 1, 1, 1, 1], 1.0, 1)
    assert len(history.read_text().splitlines()) == 4
    for damage in (b"\xff\0\n1\t2\n", b"9" * 5000 + b"\t1\t0\tx\t0\n", b"{}"):
        history.write_bytes(damage)
        assert remaining_time._read(str(history)) == {}
    history.unlink()
    os.mkfifo(history)
    assert remaining_time._read(str(history)) == {}
    taught(tmp_path, monkeypatch, [5, 5], 1.0, 1)
    assert len(remaining_time._read(str(history))) == 3


# What is said on a terminal of 100 columns, with the moments at which it was.
_ON_A_TERMINAL = r"""
import fcntl, os, struct, sys, termios, threading, time
master, slave = os.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
os.dup2(slave, 2)
def copy():
    while piece := os.read(master, 65536).decode(errors="replace"):
        for line in filter(str.strip, piece.replace("\n", "\r").split("\r")):
            print(f"{time.monotonic():.2f} {len(line)} {line}")
threading.Thread(target=copy, daemon=True).start()
import calcops_jit
time.sleep(0.5)
"""


def test_a_real_build_on_a_terminal_says_from_its_start_what_the_last_one_took(checkout):
    units = {"one": 1.0, "two": 2.5, "three": 1.5}
    sleeps = "".join(f'*" -c "*/{unit}.cpp*) sleep {seconds};; ' for unit, seconds in units.items())
    checkout.compiler.write_text(f'#!/bin/sh\ncase "$*" in {sleeps}esac\nexec {shutil.which("c++")} "$@"\n')

    def build(number: int) -> tuple[list[list[str]], float]:
        for unit in units:
            checkout.write(f"ops/tiny/{unit}.cpp", f"int {unit}() {{ return {number}; }}\n")
        child = checkout.run(_ON_A_TERMINAL)
        lines = [line.split(" ", 2) for line in child.out.splitlines()]
        assert child.code == 0 and all(int(length) <= 100 for _, length, _ in lines), child.out + child.err
        took = re.search(r"built calcops in ([\d.]+) s", lines[-1][2])
        return lines, float(took[1])

    first, took_first = build(1)
    assert not [line for line in first if "left" in line[2]]
    second, took_second = build(2)
    left = [re.search(r" (\d+) s, (\d+) s left$", line.rstrip()) for _, _, line in second]
    left = [(int(match[1]), int(match[2])) for match in left if match]
    print(f"built in {took_first:.1f} s, then in {took_second:.1f} s; said (seconds, seconds left): {left}")
    # two jobs: "one" and "three" beside "two", so 2.5 s at least; a busy machine may be slow before ninja starts
    assert 3 <= sum(left[0]) and left[0][1] <= took_first + 1
    least = math.inf
    for _, seconds in left:
        assert seconds <= 2 * least
        least = min(least, seconds)
