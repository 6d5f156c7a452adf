"""The contracts of a loaded library, as its runtime has read them (describe.cpp)."""

from __future__ import annotations

import ctypes
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A sum of products [factor, size, ...]. A size is a number. `...` is the size `Operator.leading`.
Sum = list[list[int]]

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass
class Line:
    """The clauses of a contract about one argument or result (contracts/README.md)."""

    shapes: list[list[Sum]]
    has_leading: bool
    whole: int  # the size K of `with K = T*M`, or -1
    parts: Sum  # T*M
    types: list[str]
    group: str  # the argument whose dtype it has
    is_widened: bool  # `read as`
    is_constant: bool
    may_be_none: bool  # -1 is an entry
    below: Sum  # the upper bound of entries; [] if it has none
    positions: list[str]
    limits: list[dict]
    size: int  # the size that an int is, or -1
    bounds: list[tuple[str, float]]
    choices: list[str]

    def form_of(self, shape: Sequence[int]) -> list[tuple[Sum, int]]:
        """Return each dimension of the first shape in the contract that fits, and its length.

        The dimensions `...` are one, whose length is their product.
        """
        for form in self.shapes:
            count = len(shape) - len(form) + 1 if self.has_leading else 0
            lengths = [math.prod(shape[:count])] * self.has_leading + [*shape[max(0, count) :]]
            pairs = list(zip(form, lengths, strict=False))
            if len(form) == len(lengths) and all(
                sizes_in(total) or value(total, {}) == length for total, length in pairs
            ):
                return pairs
        return []


@dataclass
class Operator:
    """An operator of a library, with the lines of its arguments and results."""

    name: str  # with namespace
    arguments: dict[str, Line | None]  # a composition's argument may have no line
    results: list[Line]
    leading: int  # the size `...`, or -1
    is_composition: bool
    has_check: bool
    has_vjp: bool
    has_jvp: bool
    devices: list[str]  # that have kernels

    def __post_init__(self) -> None:
        self.namespace, self.short = self.name.split("::")
        self.handle = getattr(getattr(torch.ops, self.namespace), self.short).default
        self.schema = {argument.name: argument for argument in self.handle._schema.arguments}
        self.has_derivatives = self.has_vjp or self.is_composition

    def __call__(self, arguments: dict) -> dict[str, torch.Tensor]:
        """Return the results that the call computes."""
        results = self.handle(**arguments)
        results = [results] if torch.is_tensor(results) else results
        names = [result.name for result in self.handle._schema.returns] + [""] * len(results)
        return {
            f"`{name}`" if name else f"result {i}": x
            for i, (name, x) in enumerate(zip(names, results, strict=False))
            if x is not None
        }

    def sizes_of(self, arguments: dict) -> dict[int, int]:
        """Return the sizes of a valid call, as the runtime finds them."""
        given = [(line, arguments[name]) for name, line in self.arguments.items() if line]
        sizes = {line.size: x for line, x in given if line.size >= 0 and x is not None}
        for line, x in given:
            for total, length in line.form_of(x.shape) if torch.is_tensor(x) else ():
                unknown = sizes_in(total) - sizes.keys()
                if len(unknown) == 1:
                    size = unknown.pop()
                    sizes[size] = length - value(total, sizes | {size: 0})
            if torch.is_tensor(x) and line.whole >= 0 and sizes_in(line.parts) <= sizes.keys():
                sizes.setdefault(line.whole, value(line.parts, sizes))
        return sizes

    def maker_of(self, argument: str) -> torch._ops.OpOverload | None:
        """Return the operator of an argument's name, which makes the argument from the others.

        So the argument `neighbor_index` is neighbor_index(list_neigh, nghost).
        """
        packet = getattr(getattr(torch.ops, self.namespace), argument, None)
        names = {wanted.name for wanted in packet.default._schema.arguments} if packet else {"no"}
        return packet.default if names <= self.arguments.keys() - {argument} else None


def operators_of(path: str) -> list[Operator]:
    """Return the operators with a contract of the library at a path."""
    try:
        describe = ctypes.CDLL(path).calcops_jit_contracts
    except AttributeError:  # it has no contracts, and so no runtime
        return []
    describe.restype = ctypes.c_char_p
    contracts = json.loads(describe(), strict=False, object_hook=_line_or_dictionary)
    return [Operator(**entry) for contract in contracts for entry in contract]


def _line_or_dictionary(entry: dict) -> Line | dict:
    return Line(**entry) if "shapes" in entry else entry


# ---- sums ----------------------------------------------------------------------------------------


def value(total: Sum, sizes: dict[int, int]) -> int:
    return sum(factor * math.prod(sizes[size] for size in product) for factor, *product in total)


def sizes_in(total: Sum) -> set[int]:
    return {size for _, *product in total for size in product}


def bare(total: Sum) -> int:
    """Return the size that a sum is, or -1."""
    return total[0][1] if len(total) == 1 and total[0][0] == 1 and len(total[0]) == 2 else -1


def holds(limit: dict, sizes: dict[int, int]) -> bool:
    """Return whether a call on the CPU may have these sizes."""
    total = value(limit["sum"], sizes)
    if limit["divisor"]:
        return total % limit["divisor"] == 0
    return limit["on_cuda"] or COMPARE[limit["compare"]](total, value(limit["bound"], sizes))
