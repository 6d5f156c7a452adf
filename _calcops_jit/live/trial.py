"""A child process loads a fresh build first: a crash of an initialiser ends only the child."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import resource
import select
import signal
import tempfile
import warnings
from collections.abc import Callable
from typing import NoReturn

import torch

from ..errors import BuildError, report
from . import handles
from .registration import Registration

_LIMIT_S = 60.0


def load_in_child(name: str, load: Callable[[], Registration]) -> set[str]:
    """Load a library in a child process. Return the operators that it registers while it loads.

    The child is a fork of this process, since an initialiser may need the libraries that are loaded
    here. The child has only one thread, so nothing but the library registers operators.

    BuildError: the library cannot be loaded.
    """
    with tempfile.TemporaryFile() as output:
        try:
            answer, status = _in_child(lambda: _load(load), output.fileno())
        except OSError:  # no memory, or no process, is left for a child
            answer = _load(load)
            status = 0
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if not answer and torch.cuda.is_initialized() and any("CUDA" in line for line in lines):
        answer = _load(load)  # a child cannot use its parent's CUDA
    if not answer:
        what = f"cannot load {name}: a static initialiser {_end(status)}"
        raise report(what, lines[-8:], "do what may fail in a function that is called later")
    if "error" in answer:
        raise BuildError(answer["error"])
    return set(answer["operators"])


def _load(load: Callable[[], Registration]) -> dict:
    """Return {"operators": the names that the library registers while it is loaded}."""
    before = handles.registered()
    registration = load()
    new = handles.registered() - before
    registration.names()  # runs its TORCH_LIBRARY blocks, which may throw
    return {"operators": sorted({name.partition(".")[0] for name in new})}


def _end(status: int | None) -> str:
    """Return how the child ended, in words. A status of None means that it was killed."""
    if status is None:
        return f"does not end within {_LIMIT_S:.0f} s"
    if status < 0:
        return f"ends the process by {signal.Signals(-status).name}"
    return f"ends the process ({status})"


def _in_child(function: Callable[[], dict], output: int) -> tuple[dict, int | None]:
    """Return (the function's result or {}, the exit status or None if the child was killed)."""
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", buffering=0) as reading, open(write_fd, "wb", buffering=0) as writing:
        with warnings.catch_warnings():
            # Python warns that another thread may hold a lock, which nobody releases in the child.
            # A child that waits for one is killed after the time limit.
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            _answer(function, output, writing)
        writing.close()
        answer = b""
        ended = False
        watched = [reading]
        with contextlib.suppress(OSError):  # on an old kernel, only the pipe's end is noticed
            watched.append(os.pidfd_open(child))
        try:
            # A daemon that the library started may keep the pipe open. So the end of the child
            # counts as well as the end of the pipe.
            while not ended and (ready := select.select(watched, [], [], _LIMIT_S)[0]):
                piece = reading.read(65536) if reading in ready else b""
                answer += piece
                ended = not piece  # the pipe has ended, or it is empty and the child has ended
        finally:
            for fd in watched[1:]:
                os.close(fd)
            if not ended:
                os.kill(child, signal.SIGKILL)
            status = 0
            with contextlib.suppress(ChildProcessError):  # another thread may wait for every child
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(answer or b"{}"), status if ended else None


def _answer(function: Callable[[], dict], output: int, writing: io.RawIOBase) -> NoReturn:
    """Write a function's result to `writing`, and what it prints to `output`. End the process."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # In a daemon these two may have the numbers of standard streams.
        output = fcntl.fcntl(output, fcntl.F_DUPFD_CLOEXEC, 3)
        pipe = fcntl.fcntl(writing.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            answer = function()
        except BuildError as error:
            answer = {"error": str(error)}
        with open(pipe, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)
