"""Finds the smallest call of an operator for which a check fails, within a time.

Each operator is tested in a process of its own, because its kernels may crash. If they do, the
search is repeated with a process for each call, so that hypothesis can shrink the crash.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import re
import resource
import signal
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from . import broken, derivatives, transforms  # noqa: F401  they register their checks
from .checks import CHECKS, RARE, SLOW, Call, Failure, Refused, Unchecked
from .contract import Operator
from .draws import calls, made, written

FEW = 3  # calls have a rare check
FOR_SHRINKING = 15.0  # processor seconds

_processes = multiprocessing.get_context("fork")


@dataclass
class Search:
    """What is tested of an operator, and how."""

    op: Operator
    checks: list[str]
    seconds: float
    seed: int = 0
    adjust: Callable | None = None
    reference: Callable | None = None
    first: bool = False  # stop at the first failure
    pinned: str = ""  # the only check that is run, with a process for each call


@dataclass
class Found:
    """A failed check, and the smallest call that fails."""

    check: str
    message: str
    arguments: dict[str, str]  # as Python
    seconds: float  # until it was found


@dataclass
class Report:
    """What a search has found and seen."""

    found: list[Found] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)  # of valid calls (""), and of checks
    discarded: Counter = field(default_factory=Counter)  # refusals
    unchecked: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))


class Progress(ctypes.Structure):
    """What the process of a search writes into memory that it shares."""

    _fields_ = [
        ("check", ctypes.c_char * 32),
        ("calls", ctypes.c_long),
        ("seconds", ctypes.c_double),
    ]


def run(search: Search, show: Callable[[Found | Progress], None]) -> Report:
    """Run a search. Call `show` with each Found, and several times a second with the Progress.

    A crash ends the search, because further ones would have the same cause.
    """
    found: list[Found] = []
    reports: list[Report] = []
    progress = _processes.RawValue(Progress)

    def receive(message: Found | Report | None) -> None:
        if isinstance(message, RuntimeError):
            raise message
        if isinstance(message, Report):
            reports.append(message)
            return
        found.extend([message] if message else [])
        show(message or progress)

    crash = in_fork(lambda send: _Search(search, send, progress).run(), receive, search.seconds)
    if crash or not reports:
        crash = crash or "the process ends"
        report = Report(counts=Counter({"": progress.calls}))
        name, seconds, count = progress.check.decode(), progress.seconds, len(found)
        pinned = replace(search, pinned=name)
        in_fork(lambda send: _Search(pinned, send, progress).run(), receive, search.seconds)
        if len(found) == count:
            message = f"{crash} in call {report.counts['']}, and no call alone repeats it"
            receive(Found(name, message, {}, seconds))
    else:
        report = reports[0]
    return replace(report, found=found)


def in_fork(function: Callable[[Callable], None], receive: Callable, seconds: float) -> str:
    """Call function(send) in a fork, and receive(message) for what it sends.

    receive(None) is called while there is no message. The function runs in a thread, which gets
    OpenMP threads of its own: those of this process do not exist in a fork. A function that takes
    a minute more processor time than `seconds` is ended.

    Returns:
        How the process has ended, or "" if it was as it should.
    """
    receiver, sender = _processes.Pipe(duplex=False)

    def target() -> None:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds + 4 * FOR_SHRINKING), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # of pytest
        gc.freeze()  # hypothesis collects garbage, which would visit what the parent has made
        thread = threading.Thread(target=function, args=(sender.send,))
        thread.start()
        thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads
        process = _processes.Process(target=target)
        process.start()
    sender.close()
    try:
        while process.is_alive() or receiver.poll():
            receive(receiver.recv() if receiver.poll(0.2) else None)
    except EOFError:
        process.join()
    finally:
        if process.is_alive():
            process.kill()
    code = process.exitcode
    if code < 0:
        return f"the process ends by {signal.Signals(-code).name}"
    return f"the process ends with exit status {code}" if code else ""


def outcome(search: Search, call: Call, name: str) -> Exception | None:
    """Run a check on a call. Return what it raises. A Failure has the name of the check, too."""
    call.reference = search.reference
    try:
        if name != "memory":  # which calls under protection first
            _ = call.results  # the call may be refused
        CHECKS[name](call)
    except (Refused, Unchecked) as reason:
        return reason
    except Failure as failure:
        is_refused = str(failure).startswith("a call that the contract allows is refused")
        return Failure("call" if is_refused else name, str(failure))
    except Exception as error:
        message = " ".join(str(error).split())[:400]
        # A composition may read a tensor, which has no numbers under a transform.
        refusal = re.search(r"[\w:]+: expected `\w+` .*|\.item\(\)", str(error))
        if call.op.is_composition and refusal:
            return Unchecked(refusal[0])
        return Failure(name, f"{type(error).__name__}: {message}")
    return None


def outcome_in_fork(search: Search, arguments: dict, name: str) -> Exception | None:
    """Make a call and run a check on it in a fork. A signal that ends it is a Failure."""

    def run_check(send: Callable) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the C library says of a crash
        send([outcome(search, Call(search.op, made(arguments)), name)])

    messages: list[Any] = []
    crash = in_fork(run_check, messages.append, 60)
    outcomes = [message for message in messages if message]
    if outcomes and not crash:
        return outcomes[0][0]
    what = crash or "the process ends"
    return Failure(name, f"{what}, as it uses memory beyond a tensor" if name == "memory" else what)


class OutOfTime(BaseException):
    """Ends hypothesis's search."""


class _Search:
    """The search in its process."""

    def __init__(self, search: Search, send: Callable[[Any], None], progress: Progress):
        self.search = search
        self.send = send
        self.progress = progress
        self.report = Report()
        self.checks = list(search.checks)
        self.slow = [name for name in SLOW if name in self.checks] or [""]
        self.smallest: Found | None = None
        self.deadline = search.seconds

    def run(self) -> None:
        """Look for one failure after another until the time is used up."""
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # torch.export names each dimension that has no freedom
        torch.set_num_threads(1)  # waiting threads would take processor time
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            what = "a fork has no backward pass once PyTorch's threads for devices run"
            self.send(RuntimeError(f"{what}; use `python -m calcops_jit test`"))
            return
        seed, end = self.search.seed, self.search.seconds
        while self.checks and not self._is_over():
            self.smallest = None
            self.deadline = end
            try:
                self._draw(seed)
            except OutOfTime:
                pass
            except Exception as error:  # also Failure, and what hypothesis says of random kernels
                message = f"no call can be made: {type(error).__name__}: {error}"
                self.smallest = self.smallest or Found("call", message, {}, _seconds())
            if not self.smallest:
                break
            self.send(self.smallest)
            end += _seconds() - self.smallest.seconds  # shrinking costs no time
            self.deadline = end
            self._leave_out(self.smallest.check)
            seed += 1
        if not self.report.counts[""] and not self.smallest:
            reasons = [reason for reason, _ in self.report.discarded.most_common(1)]
            what = "no call was valid, so `adjust` has to make valid ones" if reasons else "no call"
            self.send(Found("call", ": ".join([what, *reasons]), {}, _seconds()))
        self.send(self.report)

    def _is_over(self) -> bool:
        """Return whether the time is used up. However short it is, a call is made."""
        has_tried = self.report.counts[""] or self.smallest or self.progress.calls >= 100
        return bool(has_tried) and _seconds() > self.deadline

    def _leave_out(self, failed: str) -> None:
        """Leave out a check that failed, and those that would fail for the same reason."""
        self.checks.remove(failed)
        if failed == "written":  # the others compare numbers that change from call to call
            self.checks = [name for name in self.checks if name in ("memory", "broken")]
        if failed == "call" or self.search.first or self.search.pinned:
            self.checks.clear()

    def _draw(self, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=10**6,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(calls(self.search.op, self.search.adjust), st.sampled_from(self.slow))
        def test(arguments: dict, slow: str) -> None:
            self.progress.seconds = _seconds()
            if self._is_over():
                raise OutOfTime
            self._check(arguments, slow)

        test()

    def _check(self, arguments: dict, slow: str) -> None:
        """Run the checks of a call. Raise Failure for the first that fails."""
        self.progress.calls += 1
        call = None if self.search.pinned else Call(self.search.op, made(arguments))
        for name in self._names(slow):
            self.progress.check = name.encode()
            error = (
                outcome(self.search, call, name)
                if call
                else outcome_in_fork(self.search, arguments, name)
            )
            if isinstance(error, Unchecked):
                self.report.unchecked[name][str(error)] += 1
            elif isinstance(error, Refused):
                self.report.discarded[str(error)[:150]] += 1
                return
            elif error:
                self._fail(*error.args, arguments)
            else:
                self.report.counts[name] += 1
        self.report.counts[""] += 1

    def _names(self, slow: str) -> list[str]:
        """Return the checks of this call."""
        if self.smallest:  # it is shrunk
            return [self.smallest.check]
        counts = self.report.counts
        names = [name for name in self.checks if name not in SLOW and name not in RARE]
        names.sort(key=lambda name: name != "memory")  # others might not survive what it finds
        names += [slow] if slow in self.checks else []
        if counts[""] % 20 == 7:
            names += [name for name in RARE if name in self.checks and counts[name] < FEW]
        return [name for name in names if self.search.pinned in ("", name)]

    def _fail(self, name: str, message: str, arguments: dict) -> None:
        seconds = self.smallest.seconds if self.smallest else _seconds()
        if not self.smallest:
            self.deadline = seconds + FOR_SHRINKING
        self.smallest = Found(name, message, written(arguments), seconds)
        raise Failure(name, message)


def _seconds() -> float:
    """Return the processor seconds of this process and of its children."""
    return sum(os.times()[:4])
