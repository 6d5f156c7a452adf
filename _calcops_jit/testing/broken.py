"""Calls that break one clause of the contract. Each is an error that names the argument."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks import Call, check, error_naming
from .contract import value

DTYPES = [torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.bool]
AT_ONCE = 6  # ways in which one call is broken

# What is wrong, a value for the argument, and other arguments that the error may name instead.
Way = tuple[str, object, set[str]]


@check()
def check_broken(call: Call) -> None:
    """A call that breaks a clause is an error that names the operator and the argument."""
    ways = [(name, *way) for name in call.arguments for way in _ways(call, name)]
    for name, what, changed, others in call.random.sample(ways, min(len(ways), AT_ONCE)):
        with error_naming(call.op, {name} | others, f"`{name}` {what}"):
            call.run(**{name: changed})


def _ways(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    if not line or x is None or call.op.maker_of(name):
        return
    if line.types:
        yield from _dtypes(call, name)
        yield from _shapes(call, name)
        yield from _entries(call, name)
    elif line.choices:
        yield "is an unknown string", "no such string", set()
    for number in map(type(x), line.numbers_near_bounds()):
        if not line.allows(number):
            yield f"is {number}", number, set()


def _dtypes(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    lines = {other: call.op.arguments[other] for other in call.tensors}
    group = {other for other, its in lines.items() if its and its.group == line.group}
    for dtype in DTYPES:
        if dtype != x.dtype and (len(group) > 1 or dtype not in line.types):
            yield f"is {dtype}", x.to(dtype), group
    if len(call.tensors) > 1:
        yield "is on another device", x.to("meta"), set(call.tensors)


def _shapes(call: Call, name: str) -> Iterator[Way]:
    """Change the shape so that no sizes fit it, or that one breaks a limit."""
    x, line = call.arguments[name], call.op.arguments[name]
    shapes = [[1, *x.shape], [x.numel()]]
    for d, length in enumerate(x.shape):
        n = call.random.choice([abs(length - 1), length + 1, 0, *range(1, 12)])
        shapes.append([*x.shape[:d], n, *x.shape[d + 1 :]])
    for shape in shapes:
        changed = x.new_zeros(shape)
        if call.op.sizes_of(call.arguments | {name: changed}) is None:
            others = set(call.arguments) if line.form_of(shape) else set()
            yield f"has shape {shape}", changed, others


def _entries(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    if not line.below or not x.numel() or call.op.is_composition:
        return  # a composition leaves the entries to the operators that it calls
    end = value(line.below, call.op.sizes_of(call.arguments))
    limits = torch.iinfo(x.dtype)
    place = call.random.randrange(x.numel())
    for entry in [end, end + 1, limits.max, -2, limits.min, -1]:
        if limits.min <= entry <= limits.max and not (entry == -1 and line.may_be_none):
            changed = x.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[place] = entry
            yield f"has the entry {entry}", changed, set()
