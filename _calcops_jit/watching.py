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
            if (now := {path: inputs.stamp_of(path) for path in library.project_files()}) != before:
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
