"""Operators as a user sees them: torch.ops handles with the documentation of their header."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable

import torch

from .diagnosis import report

_BLOCK = r"(?m)^[ \t]*/// (\w+::\w+)[ \t]*\n((?:[ \t]*///.*\n)*)"


def registered() -> set[str]:
    """Every operator that this process knows, as `namespace::name[.overload]`."""
    return set(torch._C._dispatch_get_all_op_names())


def documentation(root: str) -> dict[str, str]:
    """The `///` block of each operator in root/*/*.h and *.cpp: a first line `/// namespace::name`, then the text."""
    texts = {}
    for source in sorted([*glob.glob(f"{root}/*/*.h"), *glob.glob(f"{root}/*/*.cpp")]):
        with open(source, encoding="utf-8", errors="replace") as file:
            for name, block in re.findall(_BLOCK, file.read()):
                lines = [re.sub(r"^[ \t]*/// ?", "", line) for line in block.splitlines()]
                texts[name] = "\n".join(lines).strip()
    return texts


def live_schemas(name: str) -> list[str]:
    operator = packet(name)
    return [str(getattr(operator, overload)._schema) for overload in operator.overloads()]


def describe(schemas: dict[str, list[str]], root: str) -> dict[str, str]:
    """{operator: schemas and documentation}"""
    texts = documentation(root)
    return {
        name: "\n".join([*lines, "", texts[name]] if texts.get(name) else lines)
        for name, lines in sorted(schemas.items())
    }


def packet(name: str):
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


def missing(what: str, there: Iterable[str]) -> AttributeError:
    """There is no operator of this name: says which there are."""
    evidence = "there are: " + ", ".join(sorted(name for name in there if not name.startswith("_")))
    return AttributeError(str(report(what, [evidence], "call one of these, or register it with TORCH_LIBRARY")))


def handles(described: dict[str, str]) -> dict[str, torch._ops.OpOverloadPacket]:
    """{name: torch.ops handle} of the operators without leading underscore; of two of a name, the first namespace's."""
    found = {}
    for name, text in described.items():
        short = name.rpartition("::")[2]
        if not short.startswith("_") and short not in found:
            found[short] = packet(name)
            found[short].__doc__ = text
    return found
