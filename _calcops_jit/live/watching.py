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
    before = None  # so that files that were saved earlier count, too
    while not stop.wait(seconds):
        try:
            now = {path: stamp_of(path) for path in library.project_files()}
            if now == before:
                continue
            before = now  # also if it fails: the same files would fail again
            changed = reload()
            if changed:
                say(f"reloaded {', '.join(changed)}")
        except Exception as error:  # whatever it is, the next save may end it
            if not stop.is_set():
                say(str(error) or type(error).__name__)


def start(seconds: float, reload: Callable[[], list[str]]) -> Callable[[], None]:
    """Start a thread that calls `reload` when the libraries' files change. Return what ends it."""
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
        """End the build and the thread, so that an exiting interpreter does not wait for a
        compiler.
        """
        stop.set()
        for _ in range(100):
            locks.remove_all()
            thread.join(0.1)
            if not thread.is_alive():
                break

    return end
