"""The progress that a build prints."""

import io
import re
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from checkout import wait_for

from _calcops_jit import progress
from _calcops_jit.progress import Progress

# ---- the class Progress --------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


def last_line(screen: Screen) -> str:
    """Return the last line of a terminal. Text after a carriage return overwrites the line."""
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
    assert screen.getvalue().startswith("\rcalcops_jit: building x [0/2] ")
    assert "longlong" in screen.getvalue()
    assert max(map(len, screen.getvalue().split("\r"))) < shutil.get_terminal_size().columns
    assert "\n" not in screen.getvalue()
    assert last_line(screen) == ""


def test_the_outcome_stays_on_a_terminal_and_a_failure_leaves_nothing(monkeypatch):
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress("building x", lambda seconds: ("", 0.5)) as build:
        build.outcome = "built x"
    assert screen.getvalue().endswith("\n")
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().rstrip().rpartition("\r")[2] == "calcops_jit: built x"
    with pytest.raises(ZeroDivisionError), Progress("building y", lambda seconds: ("", 0.5)):
        1 / 0  # noqa: B018
    assert last_line(screen) == ""


def test_progress_in_a_notebook_is_a_bar_that_becomes_the_outcome(monkeypatch):
    display = pytest.importorskip("IPython.display")
    outputs = []
    # Progress recognises a notebook's stream by the module of its class.
    stream = type("Stream", (Screen,), {"__module__": "ipykernel.iostream"})(terminal=False)
    handle = SimpleNamespace(update=lambda data, raw: outputs.append(data))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(display, "display", lambda data, **_: handle)
    with Progress("building x", lambda seconds: ("a<b.cpp", 0.25)) as build:
        build.outcome = "built x"
    assert outputs[0] == {
        "text/plain": "building x a<b.cpp",
        "text/html": "<progress value='0.250'></progress> building x a&lt;b.cpp",
    }
    assert outputs[-1] == {"text/plain": "built x"}
    assert stream.getvalue() == ""


def test_progress_in_a_log_is_a_line_in_each_interval(monkeypatch):
    screen = Screen(terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "_LOG_S", 0.3)
    start = time.monotonic()
    with Progress("x", lambda seconds: (f"at {seconds:.0f} s", 0.0)) as build:
        wait_for(lambda: screen.getvalue().count("\n") >= 3)
        build.outcome = "done"
    *lines, outcome = screen.getvalue().splitlines()
    assert len(lines) <= 1 + (time.monotonic() - start) / 0.3
    assert all(line.startswith("calcops_jit: x at ") for line in lines)
    assert outcome == "calcops_jit: done"


def test_a_closed_or_missing_stream_does_not_fail_a_build(monkeypatch):
    closed = Screen(terminal=True)
    closed.close()
    del closed.isatty  # isatty() of a closed file is an error, too
    closed_during_build = Screen(terminal=True)
    for stream in (closed, closed_during_build, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("x", lambda seconds: ("", 0.0)) as build:
            closed_during_build.close()
            time.sleep(0.3)
            if stream is not closed:  # the end with an outcome and the end without one
                build.outcome = "done"


def test_a_warm_import_does_not_load_progress_and_a_build_not_ipython(checkout):
    modules = "'_calcops_jit.progress', 'IPython'"
    script = f"""
import calcops_jit, sys
print([name for name in ({modules}) if name in sys.modules])
"""
    assert checkout.run(script).out == "['_calcops_jit.progress']\n"
    assert checkout.run(script).out == "[]\n"


# ---- a build -------------------------------------------------------------------------------------

# Imports with stderr on a terminal of 100 columns. Prints each line of the terminal after the time
# and the length of the line.
_ON_A_TERMINAL = r"""
import fcntl, os, struct, sys, termios, threading, time
master, slave = os.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
os.dup2(slave, 2)
def copy():
    while piece := os.read(master, 65536).decode(errors="replace"):
        for line in piece.replace("\n", "\r").split("\r"):
            if line.strip():
                print(f"{time.monotonic():.2f} {len(line)} {line}")
threading.Thread(target=copy, daemon=True).start()
import calcops_jit
time.sleep(0.5)
"""


def test_a_build_on_a_terminal_names_each_unit_with_its_number(checkout):
    compiler = shutil.which("c++")
    checkout.compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *"-c "*|*" -shared "*) sleep 1;; esac\nexec {compiler} "$@"\n'
    )
    for unit in "one", "two":
        checkout.write(f"ops/tiny/{unit}.cpp", f"int {unit}() {{ return 1; }}\n")
    child = checkout.run(_ON_A_TERMINAL, MAX_JOBS="1")
    lines = [line.split(" ", 2) for line in child.out.splitlines()]
    assert child.code == 0, child.out + child.err
    assert all(int(length) <= 100 for _, length, _ in lines), child.out + child.err
    assert re.fullmatch(r"calcops_jit: built calcops in [\d.]+ s", lines.pop()[2].rstrip())
    texts = [re.sub(r" \d+ s$", "", line.rstrip()) for _, _, line in lines]
    # Each state once, without the lines before ninja has counted its steps.
    texts = [text for text in dict.fromkeys(texts) if "[" in text and "?" not in text]
    states = ["[0/4] one.cpp", "[1/4] tiny.cpp", "[2/4] two.cpp", "[3/4] linking"]
    assert texts[:4] == [f"calcops_jit: building calcops {state}" for state in states]
