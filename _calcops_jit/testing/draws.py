"""Valid calls of an operator, drawn from its contract by hypothesis, which shrinks them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from .contract import Line, Operator, handle_of, names_in, value

# A draw is shrunk towards the first choice of each list.
SIZES = 36 * [1, 2, 3]
SIZES += 4 * [0, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64, 128]  # around the lengths of vectors
SIZES += [65, 257, 1023, 4099, 20011]  # for loops in threads
VALUES = ["count", "normal", "normal", "same", "ties", "zeros"]
LAYOUTS = ["contiguous", "transposed", "every second", "offset", "expanded"]
MOST = 32_000  # numbers of a tensor; PyTorch's own sums of more depend on threads
NUMBERS = {"int": [1, 2, 3, 0, -1, 7], "float": [1.0, 0.5, 2.5, 0.0, -1.5], "bool": [True, False]}


@dataclass(slots=True)
class Tensor:
    """A tensor to be made.

    `values` is the kind of its random numbers, or a list or tensor that is expanded to the shape,
    or an operator, such as "mine::index", which makes it from the call's other arguments.
    """

    shape: list[int]
    dtype: torch.dtype
    values: Any = "count"
    layout: str = "contiguous"
    entries: tuple[int, int] | None = None  # the lowest one, and the one above the highest
    seed: int = 0

    @property
    def has_maker(self) -> bool:
        return isinstance(self.values, str) and "::" in self.values

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
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    for name, x in sorted(tensors.items(), key=lambda item: item[1].has_maker):
        values = x.values
        if x.has_maker:
            maker = handle_of(values)
            values = maker(*(result[argument.name] for argument in maker._schema.arguments))
        result[name] = _tensor(x, values)
    return result


def written(arguments: dict) -> dict[str, str]:
    """Return a call's arguments as Python. A tensor has its numbers if they are few."""
    tensors = made(arguments)
    result = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            has_kind = isinstance(x.values, str) and not x.has_maker
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
    is_drawn = isinstance(values, str)
    x = _numbers(spec) if is_drawn else torch.as_tensor(values)
    x = x.to(spec.dtype).expand(spec.shape).contiguous()
    y = laid(x, spec.layout)
    # The layout "expanded" changes numbers.
    return y if is_drawn or torch.equal(x.nan_to_num(), y.nan_to_num()) else x


def _numbers(spec: Tensor) -> torch.Tensor:
    """Return numbers of a kind. Entries and other integers are multiples of them."""
    generator = torch.Generator().manual_seed(spec.seed)
    normal = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    count = torch.arange(normal.numel(), dtype=torch.float64).view(spec.shape)
    numbers = {
        "normal": normal,
        "count": 1 + count % 64,
        "ties": (2 * normal).round() / 2,
        "zeros": 0 * normal,
        "same": 0 * normal + 0.1,
    }[spec.values]
    if spec.entries:
        low, end = spec.entries
        return low + (997 * numbers).round() % max(end - low, 1)
    if spec.dtype == torch.bool:
        return numbers > 0
    if spec.dtype.is_floating_point:
        return numbers
    limits = torch.iinfo(spec.dtype)
    return (7 * numbers).round().clamp(limits.min, limits.max)


# ---- strategies ----------------------------------------------------------------------------------


@st.composite
def calls(draw, op: Operator, adjust: Callable | None = None) -> dict:
    """Draw the arguments of a call that the contract allows."""

    def choose(options: Iterable) -> Any:
        options = list(options)
        assume(options)
        return draw(st.sampled_from(options))

    given = _given(op, choose)
    lines = [line for line in given.values() if line]
    limits = [limit for line in lines for limit in line.limits]
    limits = [text for text, on_cuda in limits if not on_cuda or "cuda" in op.devices]
    sizes = _Sizes(lines, limits, choose)
    n = sizes["_"]
    leading = choose([[n], [1, n], [2, n], [n, 1, 1], []])
    sizes["_"] = math.prod(leading)
    dtypes = {line.group: choose(line.types) for line in lines if line.types}
    seed = draw(st.integers(0, 2**16))
    arguments = dict.fromkeys(op.arguments)
    for number, (name, line) in enumerate(given.items()):
        if not line or not line.types:
            arguments[name] = _plain(op, name, sizes, choose)
            continue
        shape = [value(total, sizes) for total in choose(line.shapes or [[]])]
        if not line.shapes:  # any shape
            shape = [choose(SIZES) for _ in range(choose(range(5)))]
        shape[: line.has_leading] = leading * line.has_leading
        maker = op.maker_of(name)
        values = maker.name() if maker else choose(VALUES)
        x = Tensor(shape, dtypes[line.group], values, choose(LAYOUTS), seed=seed + number)
        if line.below:
            x.entries = (-1 if line.may_be_none else 0, value(line.below, sizes))
            assume(x.entries[0] < x.entries[1] or 0 in shape)
        arguments[name] = x
    assume(all(value(limit, sizes) for limit in limits))
    if adjust:
        adjust(arguments, choose)
    shapes = [x.shape for x in arguments.values() if isinstance(x, Tensor)]
    for line in op.results:
        shapes += [[value(total, sizes) for total in form] for form in line.shapes[:1]]
    assume(all(min(shape, default=0) >= 0 and math.prod(shape) <= MOST for shape in shapes))
    return arguments


def _given(op: Operator, choose: Callable) -> dict[str, Line | None]:
    """Draw which arguments are given. Nothing is known of an optional one without a line."""
    given = {}
    for name, line in op.arguments.items():
        is_optional = str(op.schema[name].type).startswith("Optional")
        if not is_optional or (line and choose([False, True])):
            given[name] = line
    return given


class _Sizes(dict):
    """The sizes of a call. Each is drawn where it is used first."""

    def __init__(self, lines: list[Line], limits: list[str], choose: Callable):
        self.products = {line.whole: line.parts for line in lines}
        self.limits = limits
        self.choose = choose

    def __missing__(self, size: str) -> int:
        if size in self.products:
            self[size] = value(self.products[size], self)
        else:
            number = self.choose(SIZES)
            own = tuple(limit for limit in self.limits if names_in(limit) == {size})
            allowed = _allowed(size, own)
            others = [limit for limit in self.limits if names_in(limit) <= {size, *self}]
            allowed = [0] if not number else allowed[min(number, len(allowed)) - 1 :]
            fitting = (n for n in allowed if all(value(x, {**self, size: n}) for x in others))
            number = next(fitting, None)
            assume(number is not None)
            self[size] = number
        return self[size]


@functools.cache
def _allowed(size: str, limits: tuple[str, ...]) -> list[int]:
    """Return the positive numbers that limits allow. Without limits, the third one is 3."""
    return [n for n in range(1, MOST + 1) if all(value(limit, {size: n}) for limit in limits)]


def _plain(op: Operator, name: str, sizes: dict, choose: Callable) -> Any:
    """Draw a number, a string or a list."""
    line, argument = op.arguments[name], op.schema[name]
    if line and line.size:
        return sizes[line.size]
    default = [argument.default_value] if argument.has_default_value() else []
    kind = str(argument.type)
    numbers = NUMBERS.get(re.findall(r"\w+", kind)[-1], [])
    if "List" in kind:
        length = argument.N or choose([1, 2, 3, 0])
        return choose([*default, [choose(numbers) for _ in range(length)]])
    if line:
        near = [type(numbers[0])(x) for x in line.numbers_near_bounds()]
        numbers = line.choices + [x for x in numbers + near if line.allows(x)]
    return choose(default + numbers)
