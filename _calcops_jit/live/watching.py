"""Reload on save."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from ..cache import locks
from ..cache.closure import stamp_of
from ..progress import say
from . import library


def _reload_on_change(
    stop: threading.Event, seconds: float, reload: Callable[[], list[str]]
) -> None:
    old_stamps = None  # the first check reloads, too, because files may have been saved before it
    while not stop.wait(seconds):
        try:
            stamps = {path: stamp_of(path) for path in library.project_files()}
            if stamps == old_stamps:
                continue
            old_stamps = stamps  # also if the reload fails: the same files would fail again
            changed = reload()
            if changed:
                say(f"reloaded {', '.join(changed)}")
        except Exception as error:  # the next save may remove the cause
            if not stop.is_set():
                say(str(error) or type(error).__name__)


def start(seconds: float, reload: Callable[[], list[str]]) -> Callable[[], None]:
    """Start a thread that calls `reload` when a library's file changes.

    Return the function that stops the thread.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=_reload_on_change, args=(stop, seconds, reload), name="calcops watch", daemon=True
    )
    thread.start()

    def end() -> None:
        atexit.unregister(abandon)
        stop.set()
        thread.join()

    @atexit.register
    def abandon() -> None:
        """Kill the compilers and stop the thread, so that an exit does not wait for a build."""
        stop.set()
        for _ in range(100):
            locks.remove_all()
            thread.join(0.1)
            if not thread.is_alive():
                break

    return end
