"""Reload on save."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from . import inputs, library, private
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
                    if not stop.is_set():
                        say(str(error))

    thread = threading.Thread(target=run, name="calcops watch", daemon=True)
    thread.start()

    def end() -> None:
        atexit.unregister(abandon)
        stop.set()
        thread.join()

    @atexit.register
    def abandon() -> None:
        """An interpreter that ends does not wait for a build, but for the thread to notice that it was ended."""
        stop.set()
        for _ in range(100):
            private.remove_all()
            thread.join(0.1)
            if not thread.is_alive():
                break

    return end
