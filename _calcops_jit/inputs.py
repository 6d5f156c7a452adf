"""Whether the files that a build has read are still the same.

One rule: PyTorch, Python, CUDA, the compiler and the system are known by their versions, which are
facts of a request. Every other file is compared by its content at every check. These are the
project's sources and headers, which are few and small. No clock is read.
"""

from __future__ import annotations

import hashlib
import os
import stat
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .request import Request

TORCH = os.path.realpath(os.path.dirname(torch.__file__))
# A larger file, such as a compiler or a library, is known by its size and time.
_LARGE = 1_000_000


class Changed(Exception):
    """An input of a build is not what it was. The message says which."""


class Inputs(SimpleNamespace):
    """The inputs of a build: what it has read. The paths are folded (Request.fold)."""

    files: dict[str, str]  # {file: its state}
    # If one of these appears, a compiler may read it in place of another file. One that ends with a
    # slash is a folder; a file of this name may appear in its place.
    absent: list[str]
    programs: list[str]  # the states of the compilers

    def check(self, request: Request) -> None:
        """Compare everything with the disk. Changed: something differs."""
        for path in self.changed_files(request):
            raise Changed(f"{path} {'changed' if os.path.exists(path) else 'is gone'}")
        self.check_others(request)

    def changed_files(self, request: Request) -> list[str]:
        """Return the files that are not the same."""
        states = {request.unfold(path): state for path, state in self.files.items()}
        return [path for path, state in states.items() if state_of(path) != state]

    def check_others(self, request: Request) -> None:
        """Compare everything but the files with the disk. Changed: something differs."""
        now = program_states(request)
        # A library that is built already is used without a compiler, too.
        if now and self.programs and now != self.programs:
            pairs = zip(request.programs, zip(now, self.programs))
            changed = [path for path, (state, old) in pairs if state != old]
            raise Changed(f"{(changed or request.programs)[0]} is another compiler")
        for path in map(request.unfold, self.absent):
            if os.path.exists(path) != path.endswith("/"):
                raise Changed(f"{path} is new")

    def merged(self, other: Inputs) -> Inputs:
        """Return the inputs of a library that is linked with an archive, whose are `other`."""
        files = self.files | other.files
        absent = sorted({*self.absent, *other.absent})
        return Inputs(files=files, absent=absent, programs=self.programs)


def program_states(request: Request) -> list[str]:
    """Return the states of the compilers."""
    return list(map(state_of, request.programs))


def state_of(path: str) -> str:
    """Return a file's digest; its size and time if it is large; "" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        return digest_of_open(fd)
    finally:
        os.close(fd)


def digest_of_open(fd: int) -> str:
    """Return the digest of the rest of an open file."""
    total = hashlib.sha256()
    while piece := os.read(fd, 1 << 16):  # which fits a processor's cache
        total.update(piece)
    return total.hexdigest()[:32]


def digest(data: bytes) -> str:
    """Return half of a SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]
