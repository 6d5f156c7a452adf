"""A child process for what must not happen in this one.

A build changes environment variables, which other threads would see. A library's static
initialiser may end the process. The child is a fork, because a new Python would import PyTorch for
two seconds, and because an initialiser may need the libraries that are loaded here.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import locale
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from importlib import _bootstrap
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

from .messages import BuildError

# The program may have handlers for these, or ignore them.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
# Another thread may hold the lock of dlopen during a fork, so a child cannot look it up.
_prctl = ctypes.CDLL(None).prctl


class Ended(Exception):
    """The child ended before it answered. The message says how."""


class Child:
    """A context in which a forked process calls a function.

    At the context's end, and if this process ends in any way, the child is ended.
    """

    def __init__(self, function: Callable, log: str):
        """`log` is the path of a file for what the child prints."""
        self._function = function
        self._log = log
        self._pid = 0

    def __enter__(self) -> Child:
        open(self._log, "wb").close()
        # In a daemon, the first two may get the numbers of standard streams, to which others write.
        self._connection, there = [Pipe(), Pipe(), Pipe()][-1]
        for end in self._connection, there:  # gevent makes sockets that do not block
            os.set_blocking(end.fileno(), True)
        parent = os.getpid()
        try:
            # Ctrl-C could raise KeyboardInterrupt in the child, too, which would then go on as a
            # second process of the program. _run() unblocks the signals.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                with warnings.catch_warnings():
                    # Python warns that another thread may hold a lock, which the child never gets.
                    warnings.simplefilter("ignore")
                    self._pid = os.fork()
                if self._pid == 0:
                    self._connection.close()
                    _run(self._function, there, self._log, parent)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.setpgid(self._pid, self._pid)  # whichever process is quicker
            there.close()
            with contextlib.suppress(BrokenPipeError):  # result() says how the child ended
                self._connection.send("begin")
        except BaseException:  # Ctrl-C, perhaps before the pid is stored
            self._end()
            raise
        return self

    def result(self, meanwhile: Callable[[], None] = lambda: None):
        """Return what the function returns. It is pickled, so it is plain.

        `meanwhile` is called several times a second. BuildError: the function raised it. Ended: the
        child ended otherwise.
        """
        # A process that the child has started may hold the pipe open after the child's end.
        is_ended = False
        while not self._connection.poll(0 if is_ended else _POLL_S):
            if is_ended:
                raise self._ended()
            is_ended = self._is_ended()
            meanwhile()
        try:
            is_error, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if is_error:
            raise BuildError(answer)
        return answer

    def _is_ended(self) -> bool:
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._pid, options) is not None
        except ChildProcessError:  # another thread waits for every child
            return True

    def _ended(self) -> BaseException:
        """Return how the child ended. The stop button of a notebook may end a child that begins."""
        status = self._end()
        if status == -signal.SIGINT:
            return KeyboardInterrupt()
        name = signal.Signals(-status).name if status < 0 else ""
        return Ended(f"ends the process {f'by {name}' if name else f'({status})'}")

    def __exit__(self, *exception) -> None:
        self._end()

    def _end(self) -> int:
        """End the child and the processes of its group. Return its exit status."""
        self._connection.close()
        if self._pid == 0:
            return 0
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGTERM)
        status = 0
        with contextlib.suppress(ChildProcessError):  # another thread waits for every child
            try:
                status = os.waitpid(self._pid, 0)[1]
            except KeyboardInterrupt:  # leave no zombie, and end a child that ignores SIGTERM
                with contextlib.suppress(OSError):  # it has been waited for already
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                raise
        self._pid = 0
        return os.waitstatus_to_exitcode(status)


def _run(function: Callable, there: Connection, log: str, parent: int) -> NoReturn:
    """Call a function in this child, and send what it returns."""
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # also while C++ code holds Python's lock
        os.setpgid(0, 0)  # Ctrl-C interrupts only the parent
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # asyncio's, by which the program would see this child's signals
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if os.getppid() != parent:  # it has ended already
            os._exit(0)
        _forget_imports()
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # in which torch reads the sources
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.umask(os.umask(0o022) | 0o022)  # no one else may write the objects
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A child of this child replaces these objects, which must not close its standard output.
        stream = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        sys.stdout = sys.stderr = stream
        there.recv()  # EOFError: the parent was interrupted
        try:
            there.send((False, function()))
        except BuildError as error:
            there.send((True, str(error)))
        except Exception:
            there.send((True, traceback.format_exc()))
    finally:
        os._exit(0)


def _forget_imports() -> None:
    """Release the import locks of other threads, which do not exist in this child.

    What these threads had imported in part is imported anew, if this child needs it.
    """
    locks = getattr(_bootstrap, "_module_locks", {})  # another Python may have other names
    for name, reference in list(locks.items()):
        owner = getattr(reference(), "owner", None)
        if owner in (None, threading.get_ident()):
            continue
        del locks[name]
        for module in list(sys.modules):
            if f"{module}.".startswith(f"{name}."):
                del sys.modules[module]


def end_with_compilers() -> None:
    """Let a signal that ends this child end the compilers that it starts, too."""

    def end(number: int, frame) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.killpg(0, number)

    signal.signal(signal.SIGTERM, end)
