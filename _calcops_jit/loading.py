"""Verified bytes into the process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re

import torch

from . import cache, inputs, operators
from .diagnosis import explain, report
from .registration import Registration


class Library:
    """A loaded library: `path`, the file; `operators`, {name: torch.ops handle}; the handles also as attributes.

    reload() changes it in place: the handles stay, what they call is new."""

    digest = ""

    def __init__(self):
        self.operators: dict[str, torch._ops.OpOverloadPacket] = {}
        self._generations: dict[str, Registration] = {}  # by digest, all that were ever live

    def bring_in(self, request: inputs.Request, fd: int, digest: str) -> Registration:
        """The code of `fd` into this process, where nothing calls it yet. BuildError: it cannot be exchanged for."""
        if registration := self._generations.get(digest):
            os.close(fd)
            return registration
        if self._generations and (at_once := self._described.keys() - self._generations[self.digest].schemas):
            evidence = f"{sorted(at_once)[0]} was registered without torch/library.h"
            raise report(f"cannot reload {request.name}", [evidence], "restart Python")
        registration = Registration(request.name, link_in(fd, request))
        if refusal := registration.refusal(list(self._generations.values())):
            raise refusal
        return registration

    def exchange(self, request: inputs.Request, generation: cache.Generation, new: Registration) -> None:
        """From now on the generation is the one that is called. BuildError: nothing has changed."""
        if generation.manifest.digest != self.digest:
            new.take([old for old in self._generations.values() if old is not new])
        self.request, self.path, self.digest = request, generation.path, generation.manifest.digest
        self.closure = generation.manifest.closure
        self._generations[self.digest] = new
        self._described = generation.manifest.operators
        self.operators = operators.handles(self._described)

    def __getattr__(self, name: str):
        if name in self.__dict__.get("operators", ()):
            return self.operators[name]
        raise operators.missing(f"no operator `{name}` in {self.path}", self.operators)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self.operators})

    def __repr__(self) -> str:
        return f"<calcops_jit library {self.path}: {', '.join(self.operators) or 'no operators'}>"


def link_in(fd: int, request: inputs.Request) -> ctypes.CDLL:
    """Loads the open file `fd`. The descriptor must stay open: the loader takes a path that it has seen for the
    library that it has, and a closed number would be used again. And its lock says that the file is in use."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        return ctypes.CDLL(f"/proc/self/fd/{fd}")
    except OSError as error:
        message = re.sub(r"^/proc/self/fd/\d+: ", "", str(error))
    if "failed to map segment" in message and not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
        copy = os.memfd_create(request.name, os.MFD_CLOEXEC)  # the cache is mounted noexec
        os.sendfile(copy, fd, 0, os.fstat(fd).st_size)
        return link_in(copy, request)
    raise explain(f"cannot load {request.name}.so", message, request)
