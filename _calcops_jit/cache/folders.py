"""Which folders are caches."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile

_of_this_process: list[str] = []  # the folder made by last_resort()
os.register_at_fork(after_in_child=_of_this_process.clear)


def own() -> list[str]:
    """Return the user's cache folders: the chosen one, then fallbacks.

    Libraries are searched in all of them, and built in the first that can be written.
    """
    caches = []
    chosen = os.environ.get("CALCOPS_CACHE")
    if chosen:
        caches.append(_absolute(chosen))
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
        if os.path.isabs(base):  # "~" is not expanded without HOME and a passwd entry
            caches.append(os.path.join(base, "calcops"))
    # Another user may have made a folder of that name in /tmp.
    if not os.path.lexists(fallback()) or is_ours(os.lstat(fallback())):
        caches.append(fallback())
    return caches + _of_this_process


def last_resort() -> str:
    """Make a cache folder for this process alone, and return it.

    FileNotFoundError: no folder can be written.
    """
    from . import locks

    _of_this_process[:] = [locks.make(tempfile.gettempdir(), f"calcops-{os.getuid()}")]
    return _of_this_process[0]


def is_last_resort(folder: str) -> bool:
    return folder in _of_this_process


def fallback() -> str:
    """Return a temporary folder of this user, which nobody else may read."""
    # tempfile.gettempdir() would write a file, to test the folder.
    return os.path.join(_absolute(os.environ.get("TMPDIR") or "/tmp"), f"calcops-{os.getuid()}")


def shared() -> list[str]:
    """Return the read-only caches, such as an administrator's. They are searched last."""
    variable = os.environ.get("CALCOPS_CACHE_READONLY", "")
    return [_absolute(folder) for folder in variable.split(":") if folder]


@functools.cache
def _absolute(path: str) -> str:
    """Return the absolute path of an environment variable's folder.

    It is remembered, so that it stays the same after a chdir.
    """
    return os.path.abspath(os.path.expanduser(path))


def is_ours(status: os.stat_result) -> bool:
    """Return True if only this user and root can have written a file."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def slots(folder: str) -> list[str]:
    """Return the slots in a cache folder. Everything else in it is left alone."""
    is_slot = re.compile("-[0-9a-f]{16}$").search
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if entry.is_dir() and is_slot(entry.name)]
    return []


def unreadable() -> list[str]:
    """Return why folders in CALCOPS_CACHE_READONLY cannot be read."""
    problems = []
    for folder in shared():
        try:
            os.listdir(folder)
            for slot in slots(folder):
                os.listdir(slot)
        except OSError as error:
            problems.append(
                f"cannot read {error.filename}: {error.strerror} (CALCOPS_CACHE_READONLY lists it)"
            )
    return problems
