"""Reload on save."""

from __future__ import annotations

import threading
from collections.abc import Callable

from . import inputs, library
from .diagnosis import BuildError
from .progress import say


def start(seconds: float, reload: Callable[[], list[str]]) -> Callable[[], None]:
    """Calls `reload` in a thread of its own after each change to the loaded libraries' own files."""
    stop = threading.Event()

    def run() -> None:
        before = None  # what was saved before this counts as well
        while not stop.wait(seconds):
            now = _state()
            if now != before:
                before = now  # also after a failure: the same files would fail again
                try:
                    if changed := reload():
                        say(f"reloaded {', '.join(changed)}")
                except BuildError as error:
                    say(str(error))

    thread = threading.Thread(target=run, name="calcops watch", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def _state() -> list[tuple[str, list[int] | None]]:
    return [(path, inputs.stamp_of(path)) for path in sorted(library.project_files())]
