"""A process in which kernels run, because they may crash."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

LIMIT = 120  # seconds of an answer

_fork = multiprocessing.get_context("fork")


class Crash(Exception):
    """The process has ended. The message says how."""


class Process:
    """A fork of this process, which calls a function. After a crash there is another one.

    It is forked at once, so that this process may use CUDA later.
    """

    def __init__(self, function: Callable[[bytes, str], Any]):
        self.seconds = 0.0  # of processor time
        self._function = function
        self._start()

    def _start(self) -> None:
        self._connection, end = _fork.Pipe()
        arguments = (self._function, self._connection, end)
        self._process = _fork.Process(target=_run, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads
            self._process.start()
        end.close()

    def ask(self, data: bytes, name: str) -> Any:
        """Return function(data, name), or a Crash. RuntimeError: a fork has no gradients."""
        begin = time.perf_counter()
        try:
            self._connection.send((data, name))
            answer, seconds = self._connection.recv()
        except (EOFError, OSError):
            answer, seconds = Crash(self._end()), time.perf_counter() - begin
            self._start()
        self.seconds += seconds
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def _end(self) -> str:
        """Return how the process has ended."""
        self._process.join()
        status = self._process.exitcode
        if status == -signal.SIGALRM:
            return f"the process has no result after {LIMIT} s"
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return f"the process ends {how}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _run(function: Callable, parent: Connection, connection: Connection) -> None:
    """Answer in a thread. It gets OpenMP threads of its own. Those of the parent do not exist."""
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # of pytest
    gc.freeze()  # what the parent has made is no garbage
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch.export names each dimension that has no freedom
    thread = threading.Thread(target=_answer, args=(function, connection))
    thread.start()
    thread.join()


def _answer(function: Callable, connection: Connection) -> None:
    torch.set_num_threads(1)  # waiting threads would take processor time
    problem = None
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        what = "calcops_jit.test: this process uses CUDA, so its forks have no gradients"
        problem = RuntimeError(f"{what}; use `python -m calcops_jit test`")
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            data, name = connection.recv()
            signal.alarm(LIMIT)
            begin = time.process_time()
            answer = problem or function(data, name)
            signal.alarm(0)
            connection.send((answer, time.process_time() - begin))
