"""Load verified bytes into the process, under a file name that a debugger can open."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re

from ..request import Request
from .registration import held


def link_in(path: str, fd: int, request: Request) -> ctypes.CDLL:
    """Load the open file `fd`, whose bytes were verified.

    It is loaded under the name `path` if that is still this file, because debuggers and profilers
    open a mapped file by its name. The descriptor stays open, since its lock marks the file as in
    use.

    BuildError: the library cannot be loaded.
    """
    try:
        if "$" not in path and _is_at(path, fd):  # dlopen would expand $ORIGIN
            # On a file system without locks, another process may replace the folder meanwhile.
            # Then the file is loaded by its descriptor.
            with contextlib.suppress(OSError):
                library = _open(path, fd)
                if _is_at(path, fd):  # as before dlopen, so dlopen read this file
                    return library
        return _open(_name_of(fd), fd)
    except OSError as error:
        message = re.sub(r"^/.*?(\.so|/fd/\d+): ", "", str(error))
    os.close(fd)  # the following import needs a descriptor, and the process may have no other
    from ..compile.diagnosis import explain

    raise explain(f"cannot load {request.name}.so", message, request)


# {name: identity of the file that was loaded under it}. glibc does not look at the disk again for a
# name under which it has loaded a file.
_loaded: dict[str, tuple[int, int]] = {}


def _is_at(path: str, fd: int) -> bool:
    """Return True if `path` leads to the open file `fd`, both on the disk and for glibc."""
    identity = _identity(fd)
    return _loaded.get(path, identity) == identity and _identity(path) == identity


def _identity(file: int | str) -> tuple[int, int]:
    """Return (device, inode) of a file; (0, 0) if there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(file)
        return status.st_dev, status.st_ino
    return 0, 0


def _name_of(fd: int) -> str:
    """Return a path in /proc that leads to an open file, under which no other file was loaded."""
    name = f"/proc/{os.getpid()}/fd/{fd}"
    if _loaded.get(name, _identity(fd)) == _identity(fd):
        return name
    # The process loaded another file from a descriptor with this number. A copy has another number.
    return _name_of(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, fd + 1))


def _open(name: str, fd: int) -> ctypes.CDLL:
    with held(name):
        library = ctypes.CDLL(name)
    _loaded[name] = _identity(fd)
    return library
