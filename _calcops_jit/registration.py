"""What a library registers with PyTorch: looked at first, then taken as a whole or not at all.

The other half is shadow/torch/library.h, which every source is compiled with: it keeps the blocks of a library until
they are asked for here, so a newer generation of a library can take the place of an older one in a running process.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cached_property

from .diagnosis import BuildError, report

SHADOW = os.path.join(os.path.dirname(os.path.realpath(__file__)), "shadow")


class Registration:
    """Of one generation. It is only asked what it holds when there is something to compare it with."""

    def __init__(self, name: str, library: ctypes.CDLL):
        self._name, self._library = name, library
        self._registers = hasattr(library, "calcops_jit_steps")  # a source includes torch/library.h
        if self._registers:
            library.calcops_jit_steps.restype = library.calcops_jit_commit.restype = ctypes.c_char_p

    @cached_property
    def _steps(self) -> list[list[str]]:
        return [line.split("\t") for line in self._ask("steps").splitlines()] if self._registers else []

    @cached_property
    def defs(self) -> dict[str, str]:
        """{operator with overload: schema and tags}"""
        defs = [step[1:] for step in self._steps if step[0] == "def"]
        return {schema.partition("(")[0]: f"{schema} tags {tags}".removesuffix(" tags ") for schema, tags in defs}

    @cached_property
    def impls(self) -> dict[str, str]:
        """{"operator key": C++ signature}"""
        return {f"{step[1]} {step[2]}": step[3] for step in self._steps if step[0] != "def"}

    @property
    def schemas(self) -> dict[str, list[str]]:
        """{operator: its schemas}"""
        found: dict[str, list[str]] = {}
        for name, schema in self.defs.items():
            found.setdefault(name.partition(".")[0], []).append(schema.partition(" tags ")[0])
        return found

    def refusal(self, earlier: list[Registration]) -> BuildError | None:
        """Why this cannot take the place of `earlier`, whose schemas and C++ signatures callers rely on."""
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
        what = f"cannot reload {self._name}: a signature changed, so nothing was exchanged"
        return report(what, lines, "restart Python, or give the operator another name")

    def take(self, earlier: list[Registration]) -> None:
        """Makes it live: every call from now on reaches its kernels. BuildError: nothing has changed."""
        if not self._registers:
            return
        self._ask("commit")
        if not earlier:
            return
        gone = {impl for old in earlier for impl in old.impls} - self.impls.keys()
        for old in earlier:
            for impl in gone & old.impls.keys():
                old._library.calcops_jit_retire(impl.encode())

    def _ask(self, what: str) -> str:
        answer = getattr(self._library, f"calcops_jit_{what}")().decode(errors="replace")
        if answer.startswith("error\t"):
            lines = answer.removeprefix("error\t").strip().splitlines()
            what = f"cannot register {self._name}, nothing was exchanged"
            raise report(what, lines, "correct the registration, or restart Python")
        return answer


def _operator(impl: str, how: str) -> tuple[str, bool]:
    """PyTorch wants one C++ signature of all kernels of an operator, or two: one with SymInt."""
    return impl.partition(" ")[0], how.startswith("SymInt ")


def _difference(old: str, new: str) -> list[str]:
    import difflib  # not needed where nothing is wrong

    pieces = (re.split(r", |(?<=\()|(?=\)(?:$| ->))|(?<=-> )", text) for text in (old, new))
    return [f"  {line}" for line in difflib.ndiff(*pieces) if line.startswith(("-", "+"))]
