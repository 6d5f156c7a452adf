"""Verified bytes into the process, under a name that a debugger can open."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re

import torch

from . import cache, inputs, operators
from .diagnosis import explain, report
from .registration import Registration, held


class Library:
    """A loaded library. Its operators, torch.ops handles, are its attributes and in `operators`, {name: handle};
    `path` is its file, and so is os.fspath(library). Operators that are called `path` or `operators` come first.

    reload() changes it in place: the handles stay, what they call is new. A copy is the library itself; one that was
    pickled loads its sources where it is unpickled."""

    path: str
    operators: dict[str, torch._ops.OpOverloadPacket]

    def __init__(self, request: inputs.Request):
        self._request = request

    def _show(self, path: str, handles: dict[str, torch._ops.OpOverloadPacket]) -> None:
        for name in [name for name in vars(self) if not name.startswith("_")]:
            delattr(self, name)
        self._path, self._operators = path, handles
        vars(self).update({"path": path, "operators": handles} | handles)

    def __fspath__(self) -> str:
        return self._path

    def __copy__(self) -> Library:
        return self

    def __deepcopy__(self, memo: dict) -> Library:
        return self

    def __reduce__(self):
        return _anew, (self._request.but(),)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # copy, pickle and others ask
            raise AttributeError(name)
        raise operators.missing(f"no operator `{name}` in {self._path}", self._operators)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._operators})

    def __repr__(self) -> str:
        return f"<calcops_jit library {self._path}: {', '.join(self._operators) or 'no operators'}>"


def _anew(request: inputs.Request) -> Library:
    from . import library, recipes

    return library.obtain(recipes.again(request))


class Live:
    """A library of this process: the generation that is called, and those before it."""

    digest = ""

    def __init__(self, request: inputs.Request):
        self.request, self.library = request, Library(request)
        self._generations: dict[str, Registration] = {}  # by digest, all that were ever called
        self._described: dict[str, str] = {}

    @property
    def at_once(self) -> set[str]:
        """Operators that the library registered by itself when it was loaded: they cannot be exchanged."""
        return self._described.keys() - self._generations[self.digest].schemas if self.digest else set()

    def knows(self, digest: str) -> bool:
        return digest in self._generations

    def bring_in(self, request: inputs.Request, generation: cache.Generation) -> Registration:
        """The code of `generation` into this process, where nothing calls it yet. BuildError: nothing ever can."""
        if registration := self._generations.get(generation.manifest.digest):
            os.close(generation.fd)
            return registration
        if at_once := self.at_once:
            evidence = f"{sorted(at_once)[0]} was registered without torch/library.h, by STABLE_TORCH_LIBRARY perhaps"
            raise report(f"cannot reload {request.name}", [evidence], "restart Python")
        library = link_in(generation.path, generation.fd, request)
        registration = Registration(request.name, request.root, library)
        if refusal := registration.refusal(list(self._generations.values())):
            raise refusal
        return registration

    def exchange(self, request: inputs.Request, generation: cache.Generation, new: Registration) -> None:
        """From now on the generation is the one that is called. BuildError: nothing has changed."""
        if generation.manifest.digest != self.digest:
            new.take([old for old in self._generations.values() if old is not new])
        self.request, self.digest = request, generation.manifest.digest
        self.closure, self._described = generation.manifest.closure, generation.manifest.operators
        self._generations[self.digest] = new
        self.library._request = request
        self.library._show(generation.path, operators.handles(self._described, request.python and self.library))


# glibc takes a name that it has seen for the library that it has, whatever lies there now.
_mapped: dict[str, tuple[int, int]] = {}


def link_in(path: str, fd: int, request: inputs.Request) -> ctypes.CDLL:
    """Loads the open file `fd`, whose bytes were verified, under the name `path` if that is where it lies.

    Debuggers and profilers open what is mapped by its name, in processes of their own. The descriptor stays open: its
    lock says that the file is in use."""
    try:
        if "$" not in path and _lies_at(path, fd):  # dlopen would replace $ORIGIN
            library = _open(path, fd)
            if _lies_at(path, fd):  # now as before, so it was this one
                return library
        return _open(_name_of(fd), fd)
    except OSError as error:
        message = re.sub(r"^/.*?(\.so|/fd/\d+): ", "", str(error))
    if "failed to map segment" in message:  # the cache is mounted noexec
        copy = os.memfd_create(request.name, os.MFD_CLOEXEC)
        os.sendfile(copy, fd, 0, os.fstat(fd).st_size)
        with contextlib.suppress(OSError):  # and memory may not be executed either
            return _open(_name_of(copy), copy)
        os.close(copy)
    os.close(fd)  # it may have been the last one that this process can have
    raise explain(f"cannot load {request.name}.so", message, request)


# glibc gives the library that it has for a name that it has seen, whatever lies there now.
_seen: dict[str, tuple[int, int]] = {}


def _lies_at(path: str, fd: int) -> bool:
    return _seen.get(path, _identity(fd)) == _identity(fd) == _identity(path)


def _identity(file: int | str) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = os.stat(file)
        return status.st_dev, status.st_ino
    return 0, 0


def _name_of(fd: int) -> str:
    """A name of the descriptor, for any process; of another with the same file where this one's has been seen."""
    name = f"/proc/{os.getpid()}/fd/{fd}"
    if _seen.get(name, _identity(fd)) == _identity(fd):
        return name
    return _name_of(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, fd + 1))


def _open(name: str, fd: int) -> ctypes.CDLL:
    with held(name):
        library = ctypes.CDLL(name)
    _seen[name] = _identity(fd)
    return library
