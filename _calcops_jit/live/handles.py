"""torch.ops handles that have documentation and can be pickled and copied."""

from __future__ import annotations

import copyreg
import glob
import importlib
import inspect
import os
import re
from collections.abc import Iterable

import torch

from ..errors import report

_BLOCK = r"(?m)^[ \t]*/// (\w+::\w+)[ \t]*\n((?:[ \t]*///.*\n)*)"


def registered() -> set[str]:
    """Return the names of all operators of this process, `namespace::name[.overload]`."""
    return set(torch._C._dispatch_get_all_op_names())


def documentation(root: str) -> dict[str, str]:
    """Return {operator: text} from the `///` blocks in root/*/*.h and *.cpp.

    The first line of a block is `/// namespace::name`; the text follows.
    """
    texts = {}
    for source in sorted([*glob.glob(f"{root}/*/*.h"), *glob.glob(f"{root}/*/*.cpp")]):
        if not os.path.isfile(source):  # a folder, or a link to nothing
            continue
        with open(source, encoding="utf-8", errors="replace") as file:
            for name, block in re.findall(_BLOCK, file.read()):
                lines = [re.sub(r"^[ \t]*/// ?", "", line) for line in block.splitlines()]
                texts[name] = "\n".join(lines).strip()
    return texts


def live_schemas(name: str) -> list[str]:
    operator = packet(name)
    return [str(getattr(operator, overload)._schema) for overload in operator.overloads()]


def describe(schemas: dict[str, list[str]], texts: dict[str, str]) -> dict[str, str]:
    """Return {operator: schemas and documentation}."""
    described = {}
    for name, lines in sorted(schemas.items()):
        text = texts.get(name)
        described[name] = "\n".join([*lines, "", text] if text else lines)
    return described


def packet(name: str):
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


def missing(what: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an operator that does not exist. It lists the operators that do."""
    public = sorted(name for name in names if not name.startswith("_"))
    fix = "call one of these, or register it with TORCH_LIBRARY"
    return AttributeError(str(report(what, ["there are: " + ", ".join(public)], fix)))


def handles(described: dict[str, str], home) -> dict[str, torch._ops.OpOverloadPacket]:
    """Return {name: torch.ops handle} of the operators without a leading underscore.

    Of two operators with one name in two namespaces, the first has the name.

    Args:
        described: {operator: schemas and documentation}.
        home: the Library whose attributes they are when pickled; None: the module calcops_jit.
    """
    packets = {}
    for name, text in described.items():
        short = name.rpartition("::")[2]
        if short.startswith("_") or short in packets:
            continue
        packets[short] = packet(name)
        packets[short].__doc__ = text
        packets[short].__signature__ = _signature(packets[short])
        _homes[name] = home or _Package(), short
    return packets


def _signature(handle: torch._ops.OpOverloadPacket) -> inspect.Signature | None:
    """Return the schema's arguments for inspect.signature; None if overloads differ."""
    overloads = handle.overloads()
    if len(overloads) != 1:
        return None
    parameters = []
    for argument in getattr(handle, overloads[0])._schema.arguments:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if argument.kwarg_only:
            kind = inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty
        if argument.has_default_value():
            default = argument.default_value
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)


_homes: dict[str, tuple[object, str]] = {}


class _Package:
    """The module calcops_jit in a pickle. Unpickling imports it."""

    def __getattr__(self, name: str):  # copy.copy() takes the handle from here
        return getattr(importlib.import_module("calcops_jit"), name)

    def __reduce__(self):
        return importlib.import_module, ("calcops_jit",)


def _reduce(handle: torch._ops.OpOverloadPacket | torch._ops.OpOverload):
    if isinstance(handle, torch._ops.OpOverload):
        return getattr, (handle.overloadpacket, handle._overloadname)
    name = handle._qualified_op_name
    return (getattr, _homes[name]) if name in _homes else (packet, (name,))


# PyTorch's own handles cannot be pickled, and copy.copy() of one never returns.
for _kind in (
    torch._ops.OpOverloadPacket,
    torch._ops.OpOverload,
    *torch._ops.OpOverload.__subclasses__(),
):
    copyreg.pickle(_kind, _reduce)
