"""What a library registers with PyTorch: collected, compared with what is there, and committed as a
whole or not at all.

The other half is shadow/torch/library.h, with which every source is compiled, and
runtime/registry.cpp, to which the blocks of TORCH_LIBRARY go. Because of this, a newer generation
of a library can replace an older one in a running process, and one library cannot replace
operators of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from functools import cached_property

import torch

from ..errors import BuildError, report

_taken: list[Registration] = []  # all that ever registered something, the newest last


@contextlib.contextmanager
def held(path: str) -> Iterator[None]:
    """Tells a library that is loaded from `path` meanwhile to leave its registration to us, by an
    operator in the dispatcher, which it can look up.
    """
    mark = torch._C._dispatch_library("FRAGMENT", "calcops_jit", "")
    mark.define(f"holds.p{os.fsencode(path).hex()}() -> ()")
    try:
        yield
    finally:
        del mark


class Registration:
    """What one generation of a library registers. The library is asked only if there is something
    to compare that with.
    """

    live = False

    def __init__(self, name: str, place: str, library: ctypes.CDLL):
        self.name, self.place, self._library = name, place, library
        self._registers = hasattr(library, "calcops_jit_steps")  # it is linked with registry.cpp
        self._has_contracts = hasattr(library, "calcops_jit_documentation")  # and with contract.cpp
        for function in ["steps", "commit"] * self._registers + [
            "documentation"
        ] * self._has_contracts:
            getattr(library, f"calcops_jit_{function}").restype = ctypes.c_char_p

    @cached_property
    def _steps(self) -> list[list[str]]:
        return (
            [line.split("\t") for line in self._ask("steps").splitlines()]
            if self._registers
            else []
        )

    @cached_property
    def defs(self) -> dict[str, str]:
        """{operator with overload: schema and tags}"""
        found = {}
        for kind, name, schema, *tags in self._steps:
            if kind == "def":
                found[name] = f"{schema} tags {tags[0]}" if tags[0] else schema
        return found

    @cached_property
    def impls(self) -> dict[str, str]:
        """{"operator key": C++ signature}; a fallback is " key"."""
        return {name: how for kind, name, how, *_ in self._steps if kind == "impl"}

    def documentation(self) -> dict[str, str]:
        """Returns {operator: text} of the operators that have a contract."""
        texts = {}
        for entry in self._ask("documentation").split("\x1e")[:-1] if self._has_contracts else ():
            name, _, text = entry.partition("\n")
            texts[name] = text.strip()
        return texts

    @property
    def schemas(self) -> dict[str, list[str]]:
        """{operator: its schemas}"""
        found: dict[str, list[str]] = {}
        for kind, name, schema, *_ in self._steps:
            if kind == "def":
                found.setdefault(name.partition(".")[0], []).append(schema)
        return found

    def names(self) -> set[str]:
        return self.defs.keys() | self.impls.keys()

    def refusal(self, earlier: list[Registration]) -> BuildError | None:
        """Return why this cannot replace `earlier`, whose schemas and C++ signatures have
        callers.
        """
        changes: dict[str, tuple[str, str]] = {}
        for old in earlier:
            for name, schema in old.defs.items():
                if self.defs.get(name, schema) != schema:
                    changes[name] = schema, self.defs[name]
            live = {_operator(impl, how): how for impl, how in old.impls.items() if how}
            for impl, how in self.impls.items():
                if how and live.get(_operator(impl, how), how) != how:
                    changes[f"{impl.partition(' ')[0]} in C++"] = live[_operator(impl, how)], how
        if not changes:
            return None
        lines = [line for name, change in changes.items() for line in [name, *_difference(*change)]]
        what = f"cannot reload {self.name}: a signature changed, so nothing was exchanged"
        return report(what, lines, "restart Python, or give the operator another name")

    def take(self, earlier: list[Registration]) -> None:
        """Register everything. Every later call reaches the new kernels.

        Raises BuildError and changes nothing if that is refused.
        """
        if self._registers:
            if twin := next(
                (
                    other
                    for other in _taken
                    if other.live and other._is(self) and other not in earlier
                ),
                None,
            ):
                raise self._owned_by(twin, min(self.names(), default="it"))
            again = [self] if self in _taken else []
            mine = {name for old in [*earlier, *again] for name in old.names()}
            for fallback in (
                [impl for impl in mine & self.impls.keys() if impl[0] == " "] if mine else ()
            ):
                _retire(fallback, earlier)  # PyTorch takes only one at a time
            if there := self._commit(mine):
                self._commit(mine | self._free(there))
            for impl in (
                {impl for old in earlier for impl in old.impls} - self.impls.keys()
                if earlier
                else ()
            ):
                _retire(impl, earlier)
        for old in earlier:
            old.live = False
        self.live = True
        _taken[:] = [*(other for other in _taken if other is not self), self]

    def _commit(self, mine: set[str]) -> dict[str, str]:
        """Register everything, unless names are not in `mine`: {such a name: its origin}."""
        answer = self._ask("commit", "\n".join(sorted(mine)).encode())
        return dict(line.split("\t") for line in answer.splitlines()[1:])

    def _free(self, there: dict[str, str]) -> set[str]:
        """Return the names in `there`. Raises BuildError if another library has one of them."""
        for name, where in sorted(there.items()):
            known = [other for other in reversed(_taken) if name in other.names()]
            if owner := next((other for other in known if other.live), None):
                raise self._owned_by(owner, name, where)
            if known:
                continue  # it is left from an older generation
            if name in self.impls and name.partition(" ")[0] not in ["", *self.defs]:
                from ..progress import say

                say(f"{self.name} takes the place of {name}, {where}")
                continue
            raise self._owned_by(None, name, where)
        return set(there)

    def _owned_by(self, owner: Registration | None, name: str, where: str = "") -> BuildError:
        evidence = [f"{owner.name} of {owner.place} has it"] if owner else []
        evidence += [where] if where else []
        evidence.append(f"{self.name} of {self.place} would take its place")
        what = f"cannot load {self.name}: {name} is there already"
        return report(what, evidence, "load only one of the two, or give one another namespace")

    def _is(self, other: Registration) -> bool:
        """Whether both are one file, which glibc maps only once."""
        return other is not self and other._library._handle == self._library._handle

    def _ask(self, what: str, *arguments: bytes) -> str:
        answer = getattr(self._library, f"calcops_jit_{what}")(*arguments).decode(errors="replace")
        if answer.startswith("error\t"):
            lines = answer.removeprefix("error\t").strip().splitlines()
            what = f"cannot register {self.name}, nothing was exchanged"
            if "Custom class with name" in lines[0]:
                what = f"cannot register {self.name}: a TorchBind class cannot be exchanged"
                raise report(what, [lines[0].partition(" Ensure")[0]], "restart Python")
            raise report(what, lines, "correct the registration, or restart Python")
        return answer


def _retire(impl: str, registrations: list[Registration]) -> None:
    for old in registrations:
        if impl in old.impls:
            old._library.calcops_jit_retire(impl.encode())


def _operator(impl: str, how: str) -> tuple[str, bool]:
    """Return what has one C++ signature: an operator, once with SymInt and once without."""
    return impl.partition(" ")[0], how.startswith("SymInt ")


def _difference(old: str, new: str) -> list[str]:
    import difflib  # needed only for an error

    pieces = (re.split(r", |(?<=\()|(?=\)(?:$| ->))|(?<=-> )", text) for text in (old, new))
    return [f"  {line}" for line in difflib.ndiff(*pieces) if line.startswith(("-", "+"))]
