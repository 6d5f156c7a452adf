"""What a library registers with PyTorch.

The registrations are collected, compared with those of other libraries, and committed as a whole or
not at all. So a newer generation of a library can replace an older one in a running process, but no
library can replace operators of another. It can replace kernels that other code registered, such as
PyTorch's.

The C++ part is shadow/torch/library.h, with which every source is compiled. It passes the
TORCH_LIBRARY blocks to runtime/registry.cpp.
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

_taken: list[Registration] = []  # all that were committed in this process, the newest last


@contextlib.contextmanager
def held(path: str) -> Iterator[None]:
    """Prevent a library that is loaded from `path` in this context from registering its operators.

    In this context, the dispatcher has an operator that is named after `path`. The library looks
    that operator up when it is loaded.
    """
    fragment = torch._C._dispatch_library("FRAGMENT", "calcops_jit", "")
    fragment.define(f"holds.p{os.fsencode(path).hex()}() -> ()")
    try:
        yield
    finally:
        del fragment  # which removes the operator


class Registration:
    """What one generation of a library registers.

    The library lists its registrations only when they are compared or committed.
    """

    live = False  # True while its kernels are called

    def __init__(self, name: str, place: str, library: ctypes.CDLL):
        """`place` is the folder of the sources."""
        self.name = name
        self.place = place
        self._library = library
        # True if the library is linked with registry.cpp.
        self._registers = hasattr(library, "calcops_jit_steps")
        # True if it is linked with contract.cpp, too.
        self._has_contracts = hasattr(library, "calcops_jit_documentation")
        for function in ("steps", "commit", "documentation"):
            if hasattr(library, f"calcops_jit_{function}"):
                getattr(library, f"calcops_jit_{function}").restype = ctypes.c_char_p

    @cached_property
    def _steps(self) -> list[list[str]]:
        """Return the fields of each registration: its kind, a name, a schema or signature, tags."""
        if not self._registers:
            return []
        return [line.split("\t") for line in self._call("steps").splitlines()]

    @cached_property
    def defs(self) -> dict[str, str]:
        """Return {operator with overload: schema and tags}."""
        definitions = {}
        for kind, name, schema, *tags in self._steps:
            if kind == "def":
                definitions[name] = f"{schema} tags {tags[0]}" if tags[0] else schema
        return definitions

    @cached_property
    def impls(self) -> dict[str, str]:
        """Return {"operator dispatch_key": C++ signature}. A fallback is " dispatch_key"."""
        return {name: signature for kind, name, signature, *_ in self._steps if kind == "impl"}

    def documentation(self) -> dict[str, str]:
        """Return {operator: text} of the operators that have a contract."""
        if not self._has_contracts:
            return {}
        texts = {}
        for entry in self._call("documentation").split("\x1e")[:-1]:
            name, _, text = entry.partition("\n")
            texts[name] = text.strip()
        return texts

    @property
    def schemas(self) -> dict[str, list[str]]:
        """Return {operator: its schemas}."""
        schemas: dict[str, list[str]] = {}
        for kind, name, schema, *_ in self._steps:
            if kind == "def":
                schemas.setdefault(name.partition(".")[0], []).append(schema)
        return schemas

    def names(self) -> set[str]:
        """Return the keys of `defs` and of `impls`."""
        return self.defs.keys() | self.impls.keys()

    def refusal(self, earlier: list[Registration]) -> BuildError | None:
        """Return the error if a schema or C++ signature differs from that in `earlier`."""
        changes: dict[str, tuple[str, str]] = {}  # {what changed: (old text, new text)}
        for old in earlier:
            for name, schema in old.defs.items():  # a schema that is gone is no change
                if self.defs.get(name, schema) != schema:
                    changes[name] = schema, self.defs[name]
            # Boxed kernels have no C++ signature.
            old_impls = {impl: text for impl, text in old.impls.items() if text}
            old_signatures = {_operator(impl, text): text for impl, text in old_impls.items()}
            for impl, signature in self.impls.items():
                old_signature = old_signatures.get(_operator(impl, signature), signature)
                if signature and old_signature != signature:
                    changes[f"{impl.partition(' ')[0]} in C++"] = old_signature, signature
        if not changes:
            return None
        lines = []
        for name, (old_text, new_text) in changes.items():
            lines += [name, *_difference(old_text, new_text)]
        what = f"cannot reload {self.name}: a signature changed, so nothing was exchanged"
        return report(what, lines, "restart Python, or give the operator another name")

    def take(self, earlier: list[Registration]) -> None:
        """Register everything, in place of `earlier`. Every later call reaches the new kernels.

        BuildError: the registration is refused, and nothing has changed.
        """
        if self._registers:
            self._register(earlier)
        for old in earlier:
            old.live = False
        self.live = True
        _taken[:] = [*(other for other in _taken if other is not self), self]

    def _register(self, earlier: list[Registration]) -> None:
        for other in _taken:
            if other.live and other._is_same_file(self) and other not in earlier:
                raise self._owned_by(other, min(self.names(), default="it"))
        own_generations = [*earlier, self] if self in _taken else earlier
        own_names: set[str] = set()
        for generation in own_generations:
            own_names |= generation.names()
        if own_names:  # else there is nothing to compare with, and the library lists nothing
            for impl in own_names.intersection(self.impls):
                if impl[0] == " ":  # a fallback, of which PyTorch takes only one at a time
                    _retire(impl, earlier)
        refused = self._commit(own_names)
        if refused:
            self._commit(own_names | self._free(refused))
        old_impls = {impl for old in earlier for impl in old.impls}
        for impl in old_impls:
            if impl not in self.impls:
                _retire(impl, earlier)

    def _commit(self, own_names: set[str]) -> dict[str, str]:
        """Register everything, or nothing if a name is registered already and not in `own_names`.

        Return {such a name: where it was registered}.
        """
        answer = self._call("commit", "\n".join(sorted(own_names)).encode())
        return dict(line.split("\t") for line in answer.splitlines()[1:])

    def _free(self, registered: dict[str, str]) -> set[str]:
        """Return the names in `registered`, all of which may be registered again.

        `registered` is {name: where it was registered}. BuildError: another library has one.
        """
        for name, origin in sorted(registered.items()):
            owners = [other for other in reversed(_taken) if name in other.names()]
            for owner in owners:
                if owner.live:
                    raise self._owned_by(owner, name, origin)
            if owners:
                continue  # only older generations registered it
            # The kernel of an operator that this library does not define may be replaced.
            operator = name.partition(" ")[0]  # "" for a fallback
            if name in self.impls and operator and operator not in self.defs:
                from ..progress import say

                say(f"{self.name} takes the place of {name}, {origin}")
                continue
            raise self._owned_by(None, name, origin)
        return set(registered)

    def _owned_by(self, owner: Registration | None, name: str, origin: str = "") -> BuildError:
        evidence = [f"{owner.name} of {owner.place} has it"] if owner else []
        evidence += [origin] if origin else []
        evidence.append(f"{self.name} of {self.place} would take its place")
        what = f"cannot load {self.name}: {name} is there already"
        return report(what, evidence, "load only one of the two, or give one another namespace")

    def _is_same_file(self, other: Registration) -> bool:
        """Return True if both are of one file, which glibc maps only once."""
        return other is not self and other._library._handle == self._library._handle

    def _call(self, function: str, *arguments: bytes) -> str:
        """Call a function of runtime/registry.cpp or contract.cpp. BuildError: it failed."""
        call = getattr(self._library, f"calcops_jit_{function}")
        answer = call(*arguments).decode(errors="replace")
        if not answer.startswith("error\t"):
            return answer
        lines = answer.removeprefix("error\t").strip().splitlines()
        if "Custom class with name" in lines[0]:
            what = f"cannot register {self.name}: a TorchBind class cannot be exchanged"
            raise report(what, [lines[0].partition(" Ensure")[0]], "restart Python")
        what = f"cannot register {self.name}, nothing was exchanged"
        raise report(what, lines, "correct the registration, or restart Python")


def _retire(impl: str, registrations: list[Registration]) -> None:
    """Remove a kernel or a fallback from PyTorch's dispatcher."""
    for old in registrations:
        if impl in old.impls:
            old._library.calcops_jit_retire(impl.encode())


def _operator(impl: str, signature: str) -> tuple[str, bool]:
    """Return (operator, whether the signature has SymInt).

    All kernels for which this is the same must have the same C++ signature.
    """
    return impl.partition(" ")[0], signature.startswith("SymInt ")


def _difference(old: str, new: str) -> list[str]:
    """Return a line for each argument and result of a schema or signature that changed."""
    import difflib  # needed only for an error

    # Split at each comma, after `(` and `-> `, and before the `)` that ends a list.
    pieces = [re.split(r", |(?<=\()|(?=\)(?:$| ->))|(?<=-> )", text) for text in (old, new)]
    return [f"  {line}" for line in difflib.ndiff(*pieces) if line.startswith(("-", "+"))]
