"""What a good operator promises: its results. derivatives.py and transforms.py have more checks.

A check is a function of a Call. It raises Failure if a promise is broken, and Unchecked if it can
say nothing about this call.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch

from .contract import Operator

CHANGES = 12  # of a call by rounding, which show what that does to results

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
    """A call that the contract allows. `function` has its arguments."""

    def __init__(self, op: Operator, arguments: dict, reference: Callable | None = None):
        self.op = op
        self.arguments = arguments
        self.reference = reference
        self.function: Callable[[dict], Results] = op
        self.tensors = {name: x for name, x in arguments.items() if torch.is_tensor(x)}
        self.floats = {name: x for name, x in self.tensors.items() if x.is_floating_point()}

    @property
    def random(self) -> random.Random:
        """New random numbers, which the shapes decide, so that a failure is repeated."""
        return random.Random(repr([list(x.shape) for x in self.tensors.values()]))

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
        return Call(self.op, self.arguments | changes, self.reference)

    def is_constant(self, name: str) -> bool:
        line = self.op.arguments[name]
        return line is not None and line.is_constant

    def converted(self, dtype: torch.dtype) -> Call | None:
        """Return the call with another floating dtype, or None if the contract has no such one."""
        changes = {}
        for name, x in self.floats.items():
            line = self.op.arguments[name]
            if not line or dtype in line.types:
                changes[name] = x.to(dtype)
            elif len(line.types) > 1 and not line.is_widened:
                return None
        return self.changed(changes) if changes else None

    def expect_close(
        self,
        got: Results,
        function: Callable[[Call], Results],
        what: str,
        inexact: Iterable[str] | None = None,
        epsilon: float = 0.0,
        roundings: Results | None = None,
    ) -> None:
        """Raise Failure unless results are those of function(self), but for rounding.

        Each term of a sum may have a rounding. The largest number of the result and the arguments
        sets the scale, because terms may cancel. What the function returns for arguments that
        differ by a rounding shows how much that matters, also at a tie or a kink.

        Args:
            got: the results.
            function: what returns the expected ones.
            what: it says of which circumstances the results are.
            inexact: the arguments to be changed. By default, they are all.
            epsilon: the relative change. By default, it is that of the argument's dtype.
            roundings: a further difference that is allowed for each number of a result.
        """
        expected = function(self)
        terms = max((x.numel() for x in self.tensors.values()), default=0)
        allowed, spread = {}, dict.fromkeys(expected, 0.0)
        names = [*self.floats] if inexact is None else inexact
        for name, x in expected.items():
            y = got[name]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                one, other = (f"{z.dtype} {list(z.shape)}" for z in (y, x))
                raise Failure(f"{name} {what} is {one}, expected {other}")
            eps = epsilon or (torch.finfo(x.dtype).eps if x.is_floating_point() else 0)
            count = max(84 if eps > 1e-12 else 2**16, terms)  # no fault is that small in float64
            allowed[name] = count * eps * max(1.0, *map(largest, [x, *self.floats.values()]))
            allowed[name] += (roundings or {}).get(name, 0)
        for seed in range(CHANGES + 1):
            is_right = {
                name: distance(got[name], x) <= allowed[name] + spread[name]
                for name, x in expected.items()
            }
            if all(x.all() for x in is_right.values()):
                return
            for name, x in function(self.rounded(seed, names, epsilon)).items():
                distances = [0.0, *distance(x, expected[name]).flatten().tolist()]
                factor = 16 if x.is_floating_point() else 1
                spread[name] = max(spread[name], factor * max(distances))
        for name, x in expected.items():
            expect(is_right[name], got[name], x, f"{name} {what}")

    def rounded(self, seed: int, names: Iterable[str], epsilon: float = 0.0) -> Call:
        """Return the call with numbers that differ by a rounding."""
        generator = torch.Generator().manual_seed(seed)
        changes = {}
        for name in names:
            x = self.tensors[name]
            normal = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            factor = 1 + (epsilon or torch.finfo(x.dtype).eps) * normal
            changes[name] = (x.double() * factor).to(x.dtype)
        return self.changed(changes)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return |x - y|, which is zero for two NaN, and infinite for one."""
    x, y = x.detach().double(), y.detach().double()
    is_same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(is_same, 0, (x - y).abs()).nan_to_num(torch.inf)


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
    numbers = x.detach().double()
    finite = numbers[numbers.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


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
    """A call that the contract allows has results of the contract's shapes and dtypes."""
    results = call.results.values()
    if not call.op.is_composition or len(results) != len(call.op.results):
        return  # the runtime itself makes the results of a kernel
    if call.op.sizes_of(call.arguments, results) is None:
        shapes = ", ".join(f"{name} {[*x.shape]}" for name, x in call.results.items())
        raise Failure(f"the results do not fit the contract: {shapes}")
    for line, (name, x) in zip(call.op.results, call.results.items(), strict=True):
        like = call.tensors.get(line.group)
        types = line.types if like is None or line.is_widened else [like.dtype]
        if x.dtype not in types:
            raise Failure(f"{name} is {x.dtype}, in the contract {types[0]}")


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
    if not call.reference:
        raise Unchecked("no reference")
    has_integers = not all(x.is_floating_point() for x in call.results.values())
    # Arguments in float64 are exact, except where rounding to an integer decides.
    inexact = [name for name, x in call.floats.items() if has_integers or x.dtype != torch.float64]
    call.expect_close(call.results, _reference_results, "is not the reference's", inexact)


def _reference_results(call: Call) -> Results:
    exact = call.converted(torch.float64) or call
    try:
        expected = call.reference(**exact.arguments)
    except Exception as error:
        raise Failure(f"`reference` raises {type(error).__name__}: {error}") from None
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    types = [type(x).__name__ for x in expected]
    if len(types) != len(call.results) or not all(map(torch.is_tensor, expected)):
        what = f"{', '.join(types)}, expected {len(call.results)} tensors"
        raise Failure(f"`reference` returns {what}")
    if not any(y.isfinite().any() for y in expected):
        raise Unchecked("the reference has no finite number")
    pairs = zip(call.results.items(), expected, strict=True)
    return {name: torch.where(y.isfinite(), y.to(x.dtype), x) for (name, x), y in pairs}
