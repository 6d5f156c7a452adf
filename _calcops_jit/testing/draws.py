"""Valid calls of an operator, drawn from its contract by hypothesis, which shrinks them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from .contract import COMPARE, Line, Operator, bare, holds, sizes_in, value

# A draw is shrunk towards the first choice of each list.
USUAL = [1, 2, 3]
SPECIAL = [1, 2, 3, 0, 4, 5, 7, 8, 9, 15, 16, 17, 33]  # around the lengths of vectors
LARGE = [65, 257, 1023, 4099, 20011]  # for loops in threads
VALUES = ["count", "normal", "normal", "same", "ties", "zeros"]
ENTRIES = ["cyclic", "random", "random", "random", "last", "first", "none"]
LAYOUTS = ["contiguous", "transposed", "every second", "offset", "expanded"]
MOST = 60_000  # numbers of a tensor
INTEGERS = [1, 2, 3, 0, -1, 7]
FLOATS = [1.0, 0.5, 2.5, 0.0, -1.5]


@dataclass
class Tensor:
    """A tensor to be made.

    `values` is the kind of its random numbers, or a list or tensor that is expanded to the shape,
    or a function that returns one from the call's other arguments.
    """

    shape: list[int]
    dtype: torch.dtype
    values: Any = "count"
    layout: str = "contiguous"
    entries: tuple[int, int] | None = None  # the lowest one, and the one above the highest
    seed: int = 0

    def __repr__(self) -> str:
        values = f'"{self.values}"' if isinstance(self.values, str) else repr(self.values)
        text = f"{self.shape}, {self.dtype}, {values}"
        text += f', "{self.layout}"' if self.layout != "contiguous" else ""
        if isinstance(self.values, str):
            text += f", entries={self.entries}, seed={self.seed}"
        return re.sub(r"\b(inf|nan)\b", r'float("\1")', f"calcops_jit.Tensor({text})")


def made(arguments: dict) -> dict:
    """Return a call's arguments, in which each Tensor is made."""
    result = dict(arguments)
    later = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor) and callable(x.values):
            later[name] = x
        elif isinstance(x, Tensor):
            result[name] = _tensor(x, x.values)
    for name, x in later.items():
        result[name] = _tensor(x, x.values(result))
    return result


def written(arguments: dict) -> dict[str, str]:
    """Return a call's arguments as Python. A tensor has its numbers if they are few."""
    tensors = made(arguments)
    result = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            has_kind = isinstance(x.values, str)
            if not has_kind or 0 < tensors[name].numel() <= 64:
                x = Tensor(x.shape, x.dtype, tensors[name].tolist(), x.layout)
        result[name] = f'"{x}"' if isinstance(x, str) else repr(x)
    return result


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same numbers in another layout; of "expanded", the first row of them."""
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "every second" and x.dim():
        return torch.repeat_interleave(x, 2, -1)[..., ::2]
    if layout == "expanded" and x.dim():
        return x[:1].expand(x.shape)
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def _tensor(spec: Tensor, values: Any) -> torch.Tensor:
    if isinstance(values, str):
        make = _entries if spec.entries else _numbers
        x = make(spec, math.prod(spec.shape)).view(spec.shape)
        return laid(x.to(spec.dtype), spec.layout)
    x = torch.as_tensor(values).to(spec.dtype).expand(spec.shape).contiguous()
    y = laid(x, spec.layout)
    return y if torch.equal(x.nan_to_num(), y.nan_to_num()) else x  # "expanded" changes others


def _entries(spec: Tensor, count: int) -> torch.Tensor:
    low, end = spec.entries
    first = min(max(low, 0), end - 1)
    if spec.values == "random":
        generator = torch.Generator().manual_seed(spec.seed)
        return torch.randint(low, max(end, low + 1), (count,), generator=generator)
    if spec.values == "cyclic":
        return first + torch.arange(count) % max(end - first, 1)
    return torch.full((count,), {"last": end - 1, "first": first}.get(spec.values, low))


def _numbers(spec: Tensor, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spec.seed)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    numbers = {
        "count": 1 + torch.arange(count, dtype=torch.float64) % 64,
        "same": torch.full_like(normal, 0.1),
        "ties": (2 * normal).round() / 2,
        "zeros": 0 * normal,
    }.get(spec.values, normal)
    if spec.dtype == torch.bool:
        return numbers > 0
    if spec.dtype.is_floating_point:
        return numbers
    limits = torch.iinfo(spec.dtype)
    return (7 * numbers).round().clamp(limits.min, min(limits.max, 2**15))


# ---- strategies ----------------------------------------------------------------------------------


@st.composite
def calls(draw, op: Operator, adjust: Callable | None = None) -> dict:
    """Draw the arguments of a call that the contract allows."""

    def choose(options):
        return draw(st.sampled_from(list(options)))

    given = {name: line for name, line in op.arguments.items() if _is_given(op, name, choose)}
    lines = [line for line in given.values() if line]
    forms = {name: choose(line.shapes) for name, line in given.items() if line and line.shapes}
    sizes = _sizes(op, lines, list(forms.values()), choose)
    dtypes = {line.group: choose(line.types) for line in lines if line.types}
    leading = _leading(sizes.get(op.leading), choose)
    seed = draw(st.integers(0, 2**16))
    arguments = dict.fromkeys(op.arguments)
    for number, (name, line) in enumerate(given.items()):
        if not line or not line.types:
            arguments[name] = _plain(op, name, sizes, draw)
            continue
        shape = [value(total, sizes) for total in forms.get(name, [])]
        if name not in forms:  # any shape
            shape = [choose(SPECIAL) for _ in range(choose(range(5)))]
        shape[: line.has_leading] = leading if line.has_leading else []
        x = Tensor(shape, getattr(torch, dtypes[line.group]), layout=choose(LAYOUTS))
        x.seed = seed + number
        x.values = choose(ENTRIES if line.below else VALUES)
        if line.below:
            x.entries = (-1 if line.may_be_none else 0, value(line.below, sizes))
            assume(x.entries[0] < x.entries[1] or 0 in shape)
        maker = op.maker_of(name)
        if maker:
            names = [argument.name for argument in maker._schema.arguments]
            x.values = lambda others, f=maker, names=names: f(*map(others.get, names))
        arguments[name] = x
    if adjust:
        adjust(arguments, choose)
    for x in arguments.values():
        if isinstance(x, Tensor):
            assume(min(x.shape, default=0) >= 0 and math.prod(x.shape) <= MOST)
    return arguments


def _is_given(op: Operator, name: str, choose: Callable) -> bool:
    """Draw whether an optional argument is given. Nothing is known of one without a line."""
    if not str(op.schema[name].type).startswith("Optional"):
        return True
    return op.arguments[name] is not None and choose([False, True])


def _sizes(op: Operator, lines: list[Line], forms: list, choose: Callable) -> dict[int, int]:
    """Draw the sizes. Two of them may be special ones, such as 0, 17 or a limit."""
    results = [line.shapes[0] for line in op.results if line.shapes]
    totals = [total for form in forms + results for total in form]
    totals += [total for line in lines for total in (line.parts, line.below)]
    of_lines = {size for line in lines for size in (line.size, line.whole)}
    ordered = sorted(set().union(of_lines, *map(sizes_in, totals)) - {-1})
    special = {choose(ordered), choose(ordered)} if ordered and choose([False, True]) else set()
    is_large = choose([False] * 9 + [True])
    sizes = {}
    for size in ordered:
        candidates = (LARGE if is_large else SPECIAL) if size in special else USUAL
        is_large = is_large and size not in special  # one of them
        sizes[size] = choose(_allowed(candidates, size, lines))
    for line in lines:
        if line.whole >= 0 and any(sizes_in(line.parts) & sizes_in(total) for total in totals):
            sizes[line.whole] = value(line.parts, sizes)
    assume(all(holds(limit, sizes) for line in lines for limit in line.limits))
    for form in results:
        lengths = [value(total, sizes) for total in form]
        assume(min(lengths, default=0) >= 0 and math.prod(lengths) <= MOST)
    return sizes


def _allowed(candidates: list[int], size: int, lines: list[Line]) -> list[int]:
    """Return the candidates that the limits of this size alone allow."""
    low, high, step = 0, 2**62, 1
    bounds = [bound for line in lines if line.size == size for bound in line.bounds]
    for limit in (limit for line in lines for limit in line.limits):
        if bare(limit["sum"]) == size and limit["divisor"]:
            step = limit["divisor"]
        elif bare(limit["sum"]) == size and not limit["on_cuda"] and not sizes_in(limit["bound"]):
            bounds.append((limit["compare"], value(limit["bound"], {})))
    for sign, number in bounds:
        if sign[0] == ">":
            low = max(low, number + (sign == ">"))
        else:
            high = min(high, number - (sign == "<"))
    low = math.ceil(low / step) * step
    allowed = [step * n for n in candidates if low <= step * n <= high]
    if low > 1 or not allowed:
        allowed = [low + step * n for n in range(4) if low + step * n <= high] + allowed
    if high <= 64 and candidates is not USUAL:
        allowed.append(high - high % step)
    assume(allowed)
    return allowed


def _leading(product: int | None, choose: Callable) -> list[int]:
    """Draw the dimensions `...` that have a product."""
    if product is None:
        return []
    ways = [[product], [1, product], [product, 1, 1]] + [[]] * (product == 1)
    return choose(ways + [[product // n, n] for n in (2, 3) if product % n == 0])


def _plain(op: Operator, name: str, sizes: dict, draw: Callable) -> Any:
    """Draw a number, a string or a list."""
    line, argument = op.arguments[name], op.schema[name]
    kind = re.sub(r"Optional\[(.*)\]", r"\1", str(argument.type))
    bounds = line.bounds if line else []
    if line and line.size >= 0:
        return sizes[line.size]
    choices = [argument.default_value] if argument.has_default_value() else []
    if kind == "bool":
        choices += [True, False]
    elif kind == "str":
        choices += line.choices if line else []
    elif kind in ("int", "float"):
        near = [end + step for _, end in bounds for step in (0, 1, -1, 0.01, -0.01)]
        near = [int(x) for x in near if x == int(x)] if kind == "int" else near
        numbers = [*(FLOATS if kind == "float" else INTEGERS), *near]
        choices += [x for x in numbers if all(COMPARE[sign](x, end) for sign, end in bounds)]
    elif kind.startswith("List"):
        numbers = {"List[float]": FLOATS, "List[bool]": [True, False]}.get(kind, [1, 2, 3, 0, -1])
        length = argument.N or draw(st.sampled_from([1, 2, 3, 0]))
        choices.append([draw(st.sampled_from(numbers)) for _ in range(length)])
    assume(choices)  # otherwise nothing is known of such an argument
    return draw(st.sampled_from(choices))
