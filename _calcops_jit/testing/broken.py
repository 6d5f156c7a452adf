"""Calls that break one clause of the contract. Each is an error that names the argument."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks import Call, check, error_naming
from .contract import bare, holds, sizes_in, value

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
    if not line or call.op.maker_of(name):
        return
    if torch.is_tensor(x) and line.types:
        yield from _dtypes(call, name)
        if line.form_of(x.shape):
            yield from _shapes(call, name)
            yield from _entries(call, name)
    elif isinstance(x, str) and line.choices:
        yield "is an unknown string", "no such string", set()
    elif isinstance(x, (int, float)) and not isinstance(x, bool):
        for sign, number in line.bounds:
            step = max(1, 1e-3 * abs(number)) if isinstance(x, int) else 1e-3 * max(1, abs(number))
            wrong = number + {"<": 0, "<=": step, ">": 0, ">=": -step}[sign]
            yield f"is {wrong}, not {sign} {number}", type(x)(wrong), set()
        if line.size >= 0 and not line.bounds:
            yield "is negative", -1, set()


def _dtypes(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    lines = {other: call.op.arguments[other] for other in call.tensors}
    group = {other for other, its in lines.items() if its and its.group == line.group}
    for dtype in DTYPES:
        if dtype != x.dtype and (len(group) > 1 or str(dtype)[6:] not in line.types):
            yield f"is {dtype}", x.to(dtype), group
    if len(call.tensors) > 1:
        yield "is on another device", x.to("meta"), set(call.tensors)


def _shapes(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    ranks = {len(form) for form in line.shapes}
    for changed in (x.unsqueeze(0), x.flatten()):
        if changed.dim() not in ranks and not line.has_leading:
            yield f"has shape {list(changed.shape)}", changed, set()
    form, sizes = line.form_of(x.shape), call.op.sizes_of(call.arguments)
    for d in range(-len(form) + line.has_leading, 0) if len(line.shapes) == 1 else ():
        total, length = form[d]
        size = bare(total)
        is_free = any(_uses(call, each) < 2 for each in sizes_in(total))
        for n in (length - 1, length + 1, 0, *range(1, 12)):
            breaks = [x for x in line.limits if n >= 0 and not holds(x, sizes | {size: n})]
            is_broken = breaks and not breaks[0]["on_cuda"] if is_free else n == length + 1
            if is_broken and (size >= 0 or not is_free):
                shape = [*x.shape]
                shape[d] = n
                what = f"has shape {shape}" + "".join(f", not {x['text']}" for x in breaks)
                yield what, x.new_zeros(shape), set(call.arguments)


def _uses(call: Call, size: int) -> int:
    """Return how often a size occurs in the arguments of a call."""
    count = 0
    for name, x in call.arguments.items():
        line = call.op.arguments[name]
        if line and x is not None:
            form = line.form_of(x.shape) if torch.is_tensor(x) else []
            count += sum(size in sizes_in(total) for total, _ in form)
            count += size in (line.size, line.whole, *sizes_in(line.parts))
    return count


def _entries(call: Call, name: str) -> Iterator[Way]:
    x, line = call.arguments[name], call.op.arguments[name]
    if not line.below or not x.numel() or call.op.is_composition:
        return  # a composition leaves the entries to the operators that it calls
    end = value(line.below, call.op.sizes_of(call.arguments))
    limits = torch.iinfo(x.dtype)
    wrong = [end, end + 1, limits.max, -2, limits.min] + [-1] * (not line.may_be_none)
    place = call.random.randrange(x.numel())
    for entry in wrong:
        if limits.min <= entry <= limits.max:
            changed = x.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[place] = entry
            yield f"has the entry {entry}", changed, set()
