"""Verified bytes into the process."""

from __future__ import annotations

import ctypes
import os
import re

import torch

from . import cache, operators
from .diagnosis import report


class Library:
    """A loaded library: `path`, the file; `operators`, {name: torch.ops handle}; the handles also as attributes."""

    def __init__(self, generation: cache.Generation):
        self.path = generation.path
        self.digest = generation.manifest.digest
        self.operators = operators.handles(generation.manifest.operators)
        self._described = generation.manifest.operators

    def operators_of(self, *namespaces: str) -> dict[str, torch._ops.OpOverloadPacket]:
        """The operators of these namespaces only."""
        return operators.handles(self._described, namespaces)

    def __getattr__(self, name: str):
        if name in self.__dict__.get("operators", ()):
            return self.operators[name]
        raise AttributeError(f"{self!r} has no operator {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self.operators})

    def __repr__(self) -> str:
        return f"<calcops_jit library {self.path}: {', '.join(self.operators) or 'no operators'}>"


def link_in(fd: int, path: str) -> None:
    """Loads the open file `fd`. The descriptor must stay open: the loader takes a path that it has seen for the
    library that it has, and a closed number would be used again."""
    try:
        ctypes.CDLL(f"/proc/self/fd/{fd}")
    except OSError as error:
        message = str(error)
        if "failed to map segment" in message:  # the cache is mounted noexec
            copy = os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC)
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                os.write(copy, file.read())
            fd = copy
            try:
                ctypes.CDLL(f"/proc/self/fd/{fd}")
                return
            except OSError as again:
                message = str(again)
        raise _explain(path, message) from None


def _explain(path: str, message: str):
    what = f"cannot load {os.path.basename(path)}"
    detail = re.sub(r"^/proc/self/fd/\d+: ", "", message)
    if "undefined symbol" in message:
        return report(
            what, [detail], f"add the source that defines it (c++filt {message.split()[-1]} shows its name)"
        )
    return report(what, [detail], "python -m calcops_jit clean")
