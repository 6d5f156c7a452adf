"""One line that tells what is being done: redrawn on a terminal and in a notebook, now and then in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_REDRAW_S = 0.2
_LOG_S = 10.0


class Progress:
    """`with Progress(state):` prints what state(seconds) says, at once and from then on until the block is left.

    A state of "" prints nothing: a lock that is had at once needs no word about waiting."""

    def __init__(self, state: Callable[[float], str]):
        self._state = state
        self._stream = sys.stderr
        self._redraws = self._stream is not None and (
            self._stream.isatty() or type(self._stream).__module__.startswith("ipykernel")
        )
        self._width = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calcops progress", daemon=True)

    def __enter__(self) -> Progress:
        self.start = time.monotonic()
        if self._stream is not None:
            self._show(self._state(0.0))
            self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        if self._stream is not None:
            self._thread.join()
            if self._redraws and self._width:
                self._write("\r" + " " * self._width + "\r")

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_REDRAW_S):
            if self._redraws or not self._width or time.monotonic() - last >= _LOG_S:
                last = time.monotonic()
                self._show(self._state(self.seconds()))

    def _show(self, text: str) -> None:
        if not text:
            return
        text = f"calcops_jit: {text}"
        self._write("\r" + text.ljust(self._width) if self._redraws else text + "\n")
        self._width = len(text)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed stream must not fail a build
            self._stop.set()


def say(text: str) -> None:
    """One line that stays."""
    if sys.stderr is not None:
        print(f"calcops_jit: {text}", file=sys.stderr, flush=True)
