"""A line of progress. It is redrawn on a terminal and in a notebook, and repeated in a log."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable

_REDRAW_S = 0.2
_LOG_S = 10.0


class Progress:
    """A context that shows the title and the state of a task. At its end it shows `outcome`.

    state(seconds), with the time since the beginning, returns a text and the finished fraction, 0
    to 1.
    """

    outcome = ""

    def __init__(self, title: str, state: Callable[[float], tuple[str, float]]):
        self._title = title
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calcops progress", daemon=True)

    def __enter__(self) -> Progress:
        self.start = time.monotonic()
        self._terminal = False
        self._output = None  # of a notebook's cell
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not fail a build
            self._terminal = sys.stderr is not None and sys.stderr.isatty()
            if type(sys.stderr).__module__.startswith("ipykernel"):
                from IPython.display import display

                self._output = display({"text/plain": ""}, raw=True, display_id=True)
        self._update()
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        self._show(self.outcome, None)

    def seconds(self) -> float:
        """Return the time since the context was entered."""
        return time.monotonic() - self.start

    def _run(self) -> None:
        while not self._stop.wait(_REDRAW_S if self._terminal or self._output else _LOG_S):
            self._update()

    def _update(self) -> None:
        text, fraction = self._state(self.seconds())
        self._show(f"{self._title} {text}", fraction)

    def _show(self, text: str, fraction: float | None) -> None:
        """Replace the line that is shown. With `fraction` None, this is the last line."""
        with contextlib.suppress(OSError, ValueError):
            # The bar is HTML. A widget would need ipywidgets, and a saved notebook would lack it.
            if self._output:
                shown = {"text/plain": text}
                if fraction is not None:
                    from html import escape  # slow to import, and rarely needed

                    bar = f"<progress value='{fraction:.3f}'></progress> {escape(text)}"
                    shown["text/html"] = bar
                self._output.update(shown, raw=True)
            elif self._terminal:
                width = shutil.get_terminal_size().columns - 1
                line = f"calcops_jit: {text}"[:width] if text else ""
                end = ""
                if fraction is None:
                    end = "\n" if text else "\r"  # without an outcome, the line becomes empty
                print("\r" + line.ljust(width), end=end, file=sys.stderr, flush=True)
            elif text:
                say(text)


def say(text: str) -> None:
    """Print a line on stderr. It is never redrawn."""
    if sys.stderr is not None:  # print(file=None) would write to sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not fail a build
            print(f"calcops_jit: {text}", file=sys.stderr, flush=True)
