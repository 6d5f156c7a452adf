"""torch.ops handles that have documentation and can be copied."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Iterable

import torch

from .messages import report


def packet(name: str):
    """Return the handle of `namespace::name`. AttributeError: it has no schema."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


def missing(what: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an operator that does not exist. It lists the operators that do."""
    public = sorted(name for name in names if not name.startswith("_"))
    fix = "call one of these, or register it with TORCH_LIBRARY"
    return AttributeError(str(report(what, ["there are: " + ", ".join(public)], fix)))


def handles(described: dict[str, str]) -> dict[str, torch._ops.OpOverloadPacket]:
    """Return {name without namespace: torch.ops handle} of a library.

    Names with a leading underscore are left out. If operators of two namespaces have the same name,
    only the first is returned. `described` is {operator: schemas and documentation}.
    """
    packets = {}
    for name, text in described.items():
        short = name.rpartition("::")[2]
        if not short.startswith("_") and short not in packets:
            packets[short] = packet(name)
            packets[short].__doc__ = text
            packets[short].__signature__ = _signature(packets[short])
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


# copy.copy() of PyTorch's own handles never returns.
copyreg.pickle(torch._ops.OpOverloadPacket, lambda handle: (packet, (handle._qualified_op_name,)))
