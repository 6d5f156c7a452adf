"""What a good operator promises: its results. derivatives.py and transforms.py have more checks.

A check is a function of a Call. It raises Failure if a promise is broken, and Unchecked if it can
say nothing about this call.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from .contract import Operator, sizes_in, value

EPSILON = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}
EPSILON[torch.float64] = 2.0**-52

Results = dict[str, torch.Tensor]


class Failure(Exception):
    """A promise is broken. The message says what was expected and what came."""


class Refused(Exception):
    """A Check in C++, or an operator that a composition calls, refuses the call."""


class Unchecked(Exception):
    """A check can say nothing about this call. The message says why."""


CHECKS: dict[str, Callable[[Call], None]] = {}
SLOW: list[str] = []  # a call has one of them
RARE: list[str] = []  # only a few calls have them


def check(kind: list[str] | None = None) -> Callable:
    """Register the function check_NAME as the check NAME."""

    def register(function: Callable) -> Callable:
        name = function.__name__.removeprefix("check_")
        CHECKS[name] = function
        if kind is not None:
            kind.append(name)
        return function

    return register


class Call:
    """A call that the contract allows. `function`, by default the operator, has its arguments."""

    def __init__(self, op: Operator, arguments: dict, function: Callable | None = None):
        self.op = op
        self.arguments = arguments
        self.function = function or op
        self.tensors = {name: x for name, x in arguments.items() if torch.is_tensor(x)}
        self.floats = {name: x for name, x in self.tensors.items() if x.is_floating_point()}
        # The shapes decide these random numbers, so that a failure is repeated.
        self.random = random.Random(repr([list(x.shape) for x in self.tensors.values()]))

    @cached_property
    def results(self) -> Results:
        """The results. An operator may refuse a call only if it has checks of its own."""
        try:
            return self.run()
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            has_own_checks = self.op.has_check or self.op.is_composition
            if has_own_checks and re.match(r"[\w:]+: expected `\w+` ", line):
                raise Refused(line) from None
            raise Failure(f"a call that the contract allows is refused: {line}") from None

    def run(self, **changes) -> Results:
        return self.function(self.arguments | changes)

    def changed(self, changes: dict) -> Call:
        return Call(self.op, self.arguments | changes, self.function)

    def is_constant(self, name: str) -> bool:
        line = self.op.arguments[name]
        return line is not None and line.is_constant

    def converted(self, dtype: torch.dtype) -> Call | None:
        """Return the call with another floating dtype, or None if the contract has no such one."""
        changes = {}
        for name, x in self.floats.items():
            line = self.op.arguments[name]
            if not line or str(dtype)[6:] in line.types:
                changes[name] = x.to(dtype)
            elif len(line.types) > 1 and not line.is_widened:
                return None
        return self.changed(changes) if changes else None

    def expect_close(
        self, got: Results, expected: Results, what: str, roundings: float = 64
    ) -> None:
        """Raise Failure unless results differ by rounding.

        The largest number of the result and the arguments sets the scale, because the terms of a
        sum may cancel.
        """
        for name, x in expected.items():
            y = got[name]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                one, other = (f"{z.dtype} {list(z.shape)}" for z in (y, x))
                raise Failure(f"{name} {what} is {one}, expected {other}")
            is_right = x == y
            if x.is_floating_point():
                atol = roundings * EPSILON[x.dtype] * max(map(largest, [x, *self.floats.values()]))
                is_right = torch.isclose(y.double(), x.double(), 0, atol, equal_nan=True)
            expect(is_right, y, x, f"{name} {what}")


def expect_same(got: Results, expected: Results, what: str) -> None:
    """Raise Failure unless results are the same bits."""
    for name, x in expected.items():
        one, other = (_bits(y).view(-1, x.element_size()) for y in (got[name], x))
        expect(~(one != other).any(1), got[name], x, f"{name} {what}")


def expect(is_right: torch.Tensor, got: torch.Tensor, x: torch.Tensor, what: str) -> None:
    if not is_right.all():
        place = int((~is_right.reshape(-1)).nonzero()[0])
        one, other = (y.reshape(-1)[place].item() for y in (got, x))
        raise Failure(f"{what}: element {place} is {one!r}, expected {other!r}")


def largest(x: torch.Tensor) -> float:
    finite = x.detach()[x.isfinite()].abs().double()
    return finite.max().item() if finite.numel() else 0.0


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@contextlib.contextmanager
def error_naming(op: Operator, names: set[str], what: str) -> Iterator[None]:
    """Raise Failure unless the context raises an error with an operator and an argument."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        named = re.match(r"\w+::\w+: .*?`(\w+)`", line)
        if named and names & set(re.findall(r"`(\w+)`", line)):
            return
        raise Failure(f"{what}: the error does not name operator and argument: {line}") from None
    raise Failure(f"{what}: it is no error")


# ---- the results of a call -----------------------------------------------------------------------


@check()
def check_call(call: Call) -> None:
    """A call that the contract allows has the results of the contract."""
    sizes = call.op.sizes_of(call.arguments)
    if not call.op.is_composition or len(call.op.results) != len(call.results):
        return  # the runtime itself makes the results of a kernel
    for line, (name, x) in zip(call.op.results, call.results.items(), strict=True):
        for form in line.shapes[:1]:  # none: any shape
            if line.has_leading or not all(sizes_in(total) <= sizes.keys() for total in form):
                continue
            shape = [value(total, sizes) for total in form]
            if shape != [*x.shape]:
                raise Failure(f"{name} has shape {[*x.shape]}, in the contract {shape}")


@check()
def check_meta(call: Call) -> None:
    """Shapes and dtypes are those that meta tensors give."""
    on_meta = call.run(**{name: x.to("meta") for name, x in call.tensors.items()})
    for name, x in call.results.items():
        one, other = (f"{y.dtype} {list(y.shape)}" for y in (x, on_meta[name]))
        if one != other:
            raise Failure(f"{name} is {one}, and {other} of meta tensors")


@check()
def check_reference(call: Call) -> None:
    """The values are those of the user's own function, where these are finite."""
    exact = call.converted(torch.float64) or call
    try:
        expected = call.reference(**exact.arguments)
    except Exception as error:
        raise Failure(f"`reference` raises {type(error).__name__}: {error}") from None
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    if len(expected) != len(call.results):
        what = f"{len(expected)} results, expected {len(call.results)}"
        raise Failure(f"`reference` returns {what}")
    for (name, x), y in zip(call.results.items(), expected, strict=True):
        roundings = 2**16 if x.dtype == torch.float64 else 84
        finite = torch.where(y.isfinite(), y.to(x.dtype), x)
        call.expect_close({name: x}, {name: finite}, "is not the reference's", roundings)
