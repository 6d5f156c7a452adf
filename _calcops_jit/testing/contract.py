"""The contracts of a loaded library, as its runtime has read them (describe.cpp)."""

from __future__ import annotations

import ctypes
import functools
import json
import keyword
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch

from ..library import Library

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass
class Line:
    """The clauses of a contract about one argument or result (contracts/README.md).

    Sums of sizes and limits are texts, such as "4K + 2" and "N >= 9". value() computes them.
    """

    shape_text: str
    whole: str  # the size K of `with K = T*M`, or ""
    parts: str  # T*M
    types: list[torch.dtype]
    group: str  # the argument whose dtype it has
    is_widened: bool  # `read as`
    is_constant: bool
    may_be_none: bool  # -1 is an entry
    below: str  # the upper bound of entries, or ""
    positions: list[str]
    limits: list[tuple[str, bool]]  # the latter: only on CUDA
    size: str  # the size that an int is, or ""
    bounds: list[tuple[str, float]]
    choices: list[str]

    def __post_init__(self) -> None:
        forms = re.findall(r"\[(.*?)\]", self.shape_text)
        self.shapes = [re.findall(r"[^, ][^,]*", form) for form in forms]
        self.has_leading = "..." in self.shape_text
        self.types = [getattr(torch, name) for name in self.types]
        self.bounds = [(sign, value(end, {})) for sign, end in self.bounds]
        if self.size:
            self.bounds.append((">=", 0))
            self.limits = [(f"{self.size} {sign} {end}", False) for sign, end in self.bounds]

    def form_of(self, shape: list[int]) -> list[tuple[str, int]] | None:
        """Return each dimension of the first shape in the contract that fits, and its length.

        The dimensions `...` are one, whose length is their product. Return None if no shape fits.
        """
        for form in self.shapes:
            count = len(shape) - len(form) + 1 if self.has_leading else 0
            lengths = [math.prod(shape[:count])] * self.has_leading + [*shape[count:]]
            pairs = list(zip(form, lengths, strict=False))
            if len(form) == len(lengths) and all(
                names_in(total) or value(total, {}) == length for total, length in pairs
            ):
                return pairs
        return None if self.shapes else []

    def numbers_near_bounds(self) -> list[float]:
        return [end + step for _, end in self.bounds for step in (0, 1, -1, 0.01, -0.01)]

    def allows(self, number: float) -> bool:
        return all(COMPARE[sign](number, end) for sign, end in self.bounds)


@dataclass
class Operator:
    """An operator of a library, with the lines of its arguments and results."""

    name: str  # with namespace
    arguments: dict[str, Line | None]  # a composition's argument may have no line
    results: list[Line]
    is_composition: bool
    has_check: bool
    has_vjp: bool
    has_jvp: bool
    devices: list[str]  # that have kernels
    has_openmp: bool

    def __post_init__(self) -> None:
        self.namespace, self.short = self.name.split("::")
        self.handle = handle_of(self.name)
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

    def sizes_of(self, arguments: dict, results: Iterable = ()) -> dict[str, int] | None:
        """Return the sizes of a call, or None if none fit its tensors and the limits of the CPU."""
        given = [(line, arguments[name]) for name, line in self.arguments.items() if line]
        sizes = {line.size: x for line, x in given if line.size and x is not None}
        given += zip(self.results, results, strict=False)
        zeros, facts = [], []
        for line, x in [(line, x) for line, x in given if torch.is_tensor(x)]:
            form = line.form_of(x.shape)
            if form is None:
                return None
            zeros += [f"{total} - {length}" for total, length in form]
            zeros += [f"{line.whole} - ({line.parts})"] if line.whole else []
            facts += [limit for limit, on_cuda in line.limits if not on_cuda]
        for zero in 2 * zeros:  # a size may be set behind its first use
            unknown = names_in(zero) - sizes.keys()
            if len(unknown) == 1:
                size = unknown.pop()
                start, after_one = (value(zero, sizes | {size: n}) for n in (0, 1))
                sizes |= {size: -start} if after_one - start == 1 else {}
        facts += [f"{zero} == 0" for zero in zeros]
        known = [fact for fact in facts if names_in(fact) <= sizes.keys()]
        return sizes if all(value(fact, sizes) for fact in known) else None

    def maker_of(self, argument: str) -> torch._ops.OpOverload | None:
        """Return the operator of an argument's name, which makes the argument from the others.

        So the argument `neighbor_index` is neighbor_index(list_neigh, nghost).
        """
        maker = getattr(getattr(torch.ops, self.namespace), argument, None)
        wanted = {x.name for x in maker.default._schema.arguments} if maker else {argument}
        return maker.default if wanted <= self.arguments.keys() - {argument} else None


def handle_of(name: str) -> torch._ops.OpOverload:
    return operator.attrgetter(name.replace("::", "."))(torch.ops).default


def operators_of(library: Library) -> list[Operator]:
    """Return the operators of a library that have a contract."""
    try:
        describe = ctypes.CDLL(library.path).calcops_jit_contracts
    except AttributeError:  # it has no contracts, and so no runtime
        return []

    def read(entry: dict) -> Line | dict:
        return Line(**entry) if "is_widened" in entry else entry

    describe.restype = ctypes.c_char_p
    contracts = json.loads(describe(), strict=False, object_hook=read)
    has_openmp = "-fopenmp" in library._request.cflags
    return [Operator(**entry, has_openmp=has_openmp) for entry in chain.from_iterable(contracts)]


# ---- sums and limits -----------------------------------------------------------------------------


@functools.cache
def _code(text: str):
    """Compile a text such as "4K < 2^40" as Python. The size `...` has the name _."""
    text = text.replace("...", "_").replace("^", "**")
    text = re.sub(r"\b(\d+)(?=[A-Za-z_])(?![eE][-+]?\d)", r"\1*", text)  # 4K, but not 1e-6
    text = re.sub(r"\w+", lambda name: name[0] + "_" * keyword.iskeyword(name[0]), text)
    return compile(text, "a contract", "eval")


def value(text: str, sizes: dict[str, int]) -> int:
    return eval(_code(text), {}, sizes)


def names_in(text: str) -> set[str]:
    return set(_code(text).co_names)
