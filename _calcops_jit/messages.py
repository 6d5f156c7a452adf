"""What the loader prints: errors, lines on stderr, and the progress of a build."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable

_MAX_LINES = 12
_REDRAW_S = 0.2
_LOG_S = 10.0


class BuildError(RuntimeError):
    """A library could not be built or loaded. The message says why, in at most twelve lines."""

    __module__ = "calcops_jit"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"BuildError: {self}"]


def report(what: str, evidence: list[str], fix: str, log: str = "") -> BuildError:
    """Return a BuildError.

    Args:
        what: what failed.
        evidence: lines that show the cause.
        fix: a command or an action that removes the cause.
        log: path of a file with all output.
    """
    last_lines = [f"  fix: {fix}"]
    if log:
        last_lines.append(f"  log: {log}")
    max_evidence_lines = _MAX_LINES - 1 - len(last_lines)
    lines = [f"  {line.rstrip()[:200]}" for line in evidence[:max_evidence_lines]]
    return BuildError("\n".join([what, *lines, *last_lines]))


def say(text: str) -> None:
    """Print a line on stderr. It is never redrawn."""
    _print(f"calcops_jit: {text}\n")


def _print(text: str) -> None:
    if sys.stderr is not None:  # print(file=None) would write to sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not fail a build
            print(text, end="", file=sys.stderr, flush=True)


class Progress:
    """A context that shows the title and the state of a task. At its end it shows `outcome`.

    The line is redrawn on a terminal and in a notebook's cell, and repeated in a log.
    """

    outcome = ""

    def __init__(self, title: str, state: Callable[[], str]):
        self._title = title
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calcops progress", daemon=True)
        self._terminal = False
        self._cell = None
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a closed stream
            self._terminal = sys.stderr.isatty()
        if type(sys.stderr).__module__.startswith("ipykernel"):
            from IPython.display import display

            self._cell = display({"text/plain": ""}, raw=True, display_id=True)
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        self._show(self.outcome, "\n" if self.outcome else "\r")

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._start

    def _run(self) -> None:
        while True:
            self._show(f"{self._title} {self._state()} {self.seconds():.0f} s")
            if self._stop.wait(_REDRAW_S if self._terminal or self._cell else _LOG_S):
                return

    def _show(self, text: str, end: str = "") -> None:
        if self._cell:
            self._cell.update({"text/plain": text}, raw=True)
        elif self._terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"calcops_jit: {text}" if text else ""
            _print("\r" + line[:width].ljust(width) + end)
        elif text:
            say(text)
