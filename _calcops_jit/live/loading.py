"""Verified bytes into the process, under a name that a debugger can open."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re

from ..request import Request
from .registration import held


def link_in(path: str, fd: int, request: Request) -> ctypes.CDLL:
    """Loads the open file `fd`, whose bytes were verified; under the name `path` if the file is
    still there, because debuggers and profilers open what is mapped by its name.

    The descriptor stays open: its lock says that the file is in use. BuildError: the library cannot
    be loaded.
    """
    try:
        if "$" not in path and _lies_at(path, fd):  # dlopen would expand $ORIGIN
            library = _open(path, fd)
            if _lies_at(path, fd):  # before and after, so it was this file
                return library
        return _open(_name_of(fd), fd)
    except OSError as error:
        message = re.sub(r"^/.*?(\.so|/fd/\d+): ", "", str(error))
    os.close(fd)  # it may be the last one that this process can have, and the import needs one
    from ..compile.diagnosis import explain

    raise explain(f"cannot load {request.name}.so", message, request)


# {name: the file that glibc has for it}. For a name that it has seen, glibc does not look at the
# disk again.
_seen: dict[str, tuple[int, int]] = {}


def _lies_at(path: str, fd: int) -> bool:
    return _seen.get(path, _identity(fd)) == _identity(fd) == _identity(path)


def _identity(file: int | str) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = os.stat(file)
        return status.st_dev, status.st_ino
    return 0, 0


def _name_of(fd: int) -> str:
    """Return a name for a descriptor that glibc has not seen for another file."""
    name = f"/proc/{os.getpid()}/fd/{fd}"
    if _seen.get(name, _identity(fd)) == _identity(fd):
        return name
    return _name_of(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, fd + 1))


def _open(name: str, fd: int) -> ctypes.CDLL:
    with held(name):
        library = ctypes.CDLL(name)
    _seen[name] = _identity(fd)
    return library
