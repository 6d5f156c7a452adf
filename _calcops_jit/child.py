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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

from .messages import BuildError

# The program may have handlers for these, or ignore them.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_parent = 0  # the pid of this child's parent


class Ended(Exception):
    """The child ended before it answered. The message says how."""


def answers(steps: Callable[[], Iterator], log: str, is_shown: bool = False) -> Iterator:
    """Run a generator in a child process, which begins now. Return an iterator over its values.

    As soon as the iterator is closed, or this process has ended in any way, the child and the
    processes that it started are ended.

    Args:
        steps: makes the generator. Its values are pickled, so they are plain.
        log: path of the file for what the child prints.
        is_shown: print that here, too, at the end.

    Raises:
        BuildError: from the iterator: the generator raised it.
        Ended: from the iterator: the child ended otherwise.
    """
    open(log, "wb").close()
    # In a daemon, the first two may get the numbers of standard streams, to which others write.
    here, there = [Pipe(), Pipe(), Pipe()][-1]
    with warnings.catch_warnings():
        # Python warns that another thread may hold a lock, which nobody releases in the child.
        warnings.simplefilter("ignore")
        parent = os.getpid()
        pid = os.fork()
    if pid == 0:
        here.close()
        _run(steps, there, log, parent)
    there.close()
    return _received(here, pid, log if is_shown else "")


def _received(here: Connection, pid: int, shown_log: str) -> Iterator:
    """Yield what a child sends."""
    status = 0
    try:
        while True:
            is_error, answer = here.recv()
            if is_error:
                raise BuildError(answer)
            yield answer
    except EOFError:
        pass  # the child has ended
    finally:
        here.close()
        # The child's thread cannot run while a static initialiser holds Python's lock.
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):  # another thread waits for every child
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if shown_log:
            with contextlib.suppress(OSError, ValueError), open(shown_log, errors="replace") as log:
                print(log.read(), end="", flush=True)
    if status < 0:
        raise Ended(f"ends the process by {signal.Signals(-status).name}")
    raise Ended(f"ends the process ({status})")


def _run(steps: Callable[[], Iterator], there: Connection, log: str, parent: int) -> NoReturn:
    """Run a generator in this child, and send what it yields."""
    global _parent
    _parent = parent
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # in which torch reads the sources
        os.setpgid(0, 0)  # Ctrl-C interrupts only the parent
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.umask(os.umask(0o022) | 0o022)  # no one else may write the objects
        faulthandler.disable()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", errors="replace")
        threading.Thread(target=_end_with, args=(there,), daemon=True).start()
        try:
            for answer in steps():
                there.send((False, answer))
        except BuildError as error:
            there.send((True, str(error)))
        except Exception:
            there.send((True, traceback.format_exc()))
    finally:
        os._exit(0)


def end_with_parent() -> None:
    """Let the kernel end this child with its parent, also while C++ code holds Python's lock.

    Call this when no compiler runs, because a compiler would not be ended.
    """
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
    if os.getppid() != _parent:  # it has ended already
        os._exit(0)


def _end_with(connection: Connection) -> None:
    """Wait until the parent closes the connection or ends. Then end this child and all of its."""
    connection.poll(None)
    os.killpg(0, signal.SIGTERM)
