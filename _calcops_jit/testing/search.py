"""Finds the smallest call of an operator for which a check fails, within a time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis

from . import broken, derivatives, transforms  # noqa: F401  they register their checks
from .checks import CHECKS, RARE, SLOW, Call, Failure, Refused, Unchecked
from .contract import Operator
from .draws import MOST, calls, made, written
from .process import Crash, Process

FEW = 3  # calls have a rare check
FOR_SHRINKING = 15.0  # processor seconds


@dataclass
class Found:
    """A failed check, and the smallest call that fails."""

    check: str
    message: str
    seconds: float  # until it was found
    data: bytes = b""  # the call
    arguments: dict[str, str] = field(default_factory=dict)  # as Python


class OutOfTime(BaseException):
    """Ends hypothesis's search."""


@dataclass
class Search:
    """A search for a call of an operator for which a check fails. The first failure ends it."""

    op: Operator
    checks: list[str]  # in the order in which they are done
    seconds: float
    seed: int = 0
    adjust: Callable | None = None
    reference: Callable | None = None

    found: Found | None = None
    counts: Counter = field(default_factory=Counter)  # of checks; each valid call has `call`
    discarded: Counter = field(default_factory=Counter)  # refusals
    unchecked: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    tries: int = 0

    def run(self, process: Process, show: Callable[[float], None]) -> None:
        """Search until the time is used up. Call `show` with the seconds that are left."""
        self._process, self._show = process, show
        self._begin, self._end = self._now(), self._now() + self.seconds
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for seed in itertools.count(self.seed):  # hypothesis ends after many refused draws
                    self._draw(seed)
        except OutOfTime:
            pass
        except Exception as error:  # also Failure, and what hypothesis says of random kernels
            message = f"no call can be made: {type(error).__name__}: {error}"
            self.found = self.found or Found("call", message, self._now() - self._begin)
        if self.found and self.found.data:
            texts = process.ask(self.found.data, "")
            arguments = pickle.loads(self.found.data)[1]
            is_crash = isinstance(texts, Crash)  # in the operator that makes an argument
            self.found.arguments = {n: repr(x) for n, x in arguments.items()} if is_crash else texts
        elif not self.counts["call"] and not self.found:
            reasons = [reason for reason, _ in self.discarded.most_common(1)]
            what = "no call was valid, so `adjust` has to make valid ones"
            what = what if reasons else f"no tensors of up to {MOST} numbers were valid"
            self.found = Found("call", ": ".join([what, *reasons]), self._now() - self._begin)

    def reason_of(self, check: str) -> str:
        """Return why a check was not done."""
        reasons = [reason for reason, _ in self.unchecked[check].most_common(1)]
        failure = [f"after the failure of {self.found.check}"] if self.found else []
        return [*reasons, *failure, "no time"][0]

    def _now(self) -> float:
        """Return the processor seconds of both processes."""
        return time.process_time() + self._process.seconds

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
        @hypothesis.given(calls(self.op, self.adjust))
        def test(arguments: dict) -> None:
            left = self._end - self._now()
            # However short the time is, a call is made.
            if left < 0 and (self.counts["call"] or self.found or self.tries >= 100):
                raise OutOfTime
            self.tries += 1
            self._show(left)
            self._check(pickle.dumps((self.op.name, arguments)))

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            test()
        if self._now() > self._end:
            raise OutOfTime

    def _check(self, data: bytes) -> None:
        """Run the checks of a call. Raise Failure for the first that fails."""
        for name in self._names():
            error = self._process.ask(data, name)
            if isinstance(error, Unchecked):
                self.unchecked[name][str(error)] += 1
            elif isinstance(error, Refused):
                self.discarded[str(error)[:150]] += 1
                return
            elif error:
                self._fail(name, error, data)
            else:
                self.counts[name] += 1

    def _names(self) -> list[str]:
        """Return the checks of this call: all quick ones, and the slow one that was done least."""
        if self.found:  # it is shrunk
            return [self.found.check]
        done = {name: self.counts[name] + self.unchecked[name].total() for name in self.checks}
        slow = sorted(self.checks, key=lambda name: (name not in SLOW, done[name]))[:1]
        rare = [name for name in RARE if done["call"] % 20 == 7 and done.get(name, FEW) < FEW]
        left_out = {*SLOW, *RARE} - {*slow, *rare}
        return [name for name in self.checks if name not in left_out]

    def _fail(self, name: str, error: Exception, data: bytes) -> None:
        message = " ".join(str(error).split())
        if name == "memory" and "SIGSEGV" in message:
            message += ", as it uses memory beyond a tensor"
        if not self.found:
            self._end = self._now() + FOR_SHRINKING
            self.found = Found(name, message, self._now() - self._begin)
        self.found.message, self.found.data = message, data
        raise Failure(message)


def outcomes_of(searches: list[Search]) -> Callable[[bytes, str], Exception | dict | None]:
    """Return the function of a Process that runs a check on a call. It returns what that raises.

    Without a check, it returns the arguments as Python.
    """
    known = {search.op.name: search for search in searches}

    @functools.lru_cache(1)
    def call_of(data: bytes) -> Call:
        name, arguments = pickle.loads(data)
        return Call(known[name].op, made(arguments), known[name].reference)

    def outcome(data: bytes, name: str) -> Exception | dict | None:
        if not name:
            return written(pickle.loads(data)[1])
        try:
            call = call_of(data)
        except Exception as error:
            return Refused(f"{type(error).__name__}: {error}")
        try:
            CHECKS[name](call)
        except (Failure, Refused, Unchecked) as reason:
            return reason
        except Exception as error:
            return _judged(call, error)
        return None

    return outcome


def _judged(call: Call, error: Exception) -> Exception:
    """Return what an error of PyTorch means."""
    message = str(error)[:400]
    # A composition may read a tensor, which has no numbers under a transform.
    refusal = re.search(r"[\w:]+: expected `\w+` .*|\.item\(\)", str(error))
    if call.op.is_composition and refusal:
        return Unchecked(refusal[0])
    return Failure(f"{type(error).__name__}: {message}")
