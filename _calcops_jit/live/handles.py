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
    """Return {operator: text} from the `///` blocks in root/*/*.h and root/*/*.cpp.

    The first line of a block is `/// namespace::name`. The text follows.
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
    """Return the schemas of an operator that is registered in this process."""
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
    """Return the handle of `namespace::name`. AttributeError: it has no schema."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


def missing(what: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an operator that does not exist. It lists the operators that do."""
    public = sorted(name for name in names if not name.startswith("_"))
    fix = "call one of these, or register it with TORCH_LIBRARY"
    return AttributeError(str(report(what, ["there are: " + ", ".join(public)], fix)))


def handles(described: dict[str, str], home) -> dict[str, torch._ops.OpOverloadPacket]:
    """Return {name without namespace: torch.ops handle}.

    Names with a leading underscore are left out. If operators of two namespaces have the same name,
    only the first is returned.

    Args:
        described: {operator: schemas and documentation}.
        home: a Library, or None for the module calcops_jit. Unpickling a handle reads it as an
            attribute of this object.
    """
    packets = {}
    for name, text in described.items():
        short = name.rpartition("::")[2]
        if short.startswith("_") or short in packets:
            continue
        handle = packet(name)
        handle.__doc__ = text
        handle.__signature__ = _signature(handle)
        packets[short] = handle
        _homes[name] = (home or _Package(), short)
    return packets


def _signature(handle: torch._ops.OpOverloadPacket) -> inspect.Signature | None:
    """Return the schema's arguments for inspect.signature; None if there are several overloads."""
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


_homes: dict[str, tuple[object, str]] = {}  # {operator: (Library or _Package, attribute's name)}


class _Package:
    """The module calcops_jit in a pickle. Unpickling it imports the module."""

    # Called by copy.copy() of a handle. Unpickling reads the attribute of the module itself.
    def __getattr__(self, name: str):
        return getattr(importlib.import_module("calcops_jit"), name)

    def __reduce__(self):
        return importlib.import_module, ("calcops_jit",)


def _reduce(handle: torch._ops.OpOverloadPacket | torch._ops.OpOverload):
    """Return (function, arguments) that give the handle when it is unpickled."""
    if isinstance(handle, torch._ops.OpOverload):
        return getattr, (handle.overloadpacket, handle._overloadname)
    name = handle._qualified_op_name
    if name in _homes:
        return getattr, _homes[name]
    return packet, (name,)


# PyTorch's own handles cannot be pickled, and copy.copy() of one never returns.
for _kind in (
    torch._ops.OpOverloadPacket,
    torch._ops.OpOverload,
    *torch._ops.OpOverload.__subclasses__(),
):
    copyreg.pickle(_kind, _reduce)
