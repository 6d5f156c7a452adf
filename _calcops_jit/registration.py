"""What a library registers with PyTorch.

The registrations are collected, compared with those of other libraries, and committed as a whole or
not at all. So a newer build of a library can replace an older one in a running process, but no
library can replace operators or kernels of others.

The C++ part is shadow/torch/library.h, with which every source is compiled. It passes the
TORCH_LIBRARY blocks to contracts/runtime/registry.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator

import torch

from .cache import Build, differences
from .inputs import Inputs
from .messages import BuildError, explain, report
from .request import Request, is_reserved, once

_taken: list[Registration] = []  # all that were committed in this process, the newest last
# {path: state} of the shared libraries that were loaded because a library is linked with them.
_loaded: dict[str, str] = {}


@contextlib.contextmanager
def _delayed(path: str) -> Iterator[None]:
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


def described(request: Request, product: str, inputs: Inputs) -> dict:
    """Load a new library. Return what it registers, for its manifest."""
    for file in _linked(request, inputs):  # their operators are not those of this library
        with contextlib.suppress(OSError):
            ctypes.CDLL(file)
    before = set(torch._C._dispatch_get_all_op_names())
    registration = Registration(request, Build(path=product, manifest={}, inputs=inputs))
    at_once = set(torch._C._dispatch_get_all_op_names()) - before
    operators = registration._described()
    for name in {name.partition(".")[0] for name in at_once}:
        if schemas := torch._C._jit_get_schemas_for_operator(name):
            operators[name] = "\n".join(map(str, schemas))
    for name in operators:
        _check_name(request.name, name)
    with open(product, "rb") as file:
        is_direct = bool(at_once) or b"aoti_torch_library_" in file.read()
    extended = {re.split("[ .]", name)[0] for name in registration.impls} - operators.keys()
    return {
        "operators": operators,
        "direct": is_direct,  # it registers operators or kernels as soon as it is loaded
        "extends": is_direct or bool(extended),  # it has kernels for other libraries' operators
    }


def _check_name(library: str, name: str) -> None:
    """Check that torch.ops reaches an operator, and that it is not among PyTorch's."""
    namespace, _, short = name.partition("::")
    if is_reserved(namespace) or short in ("name", "_dir") or re.fullmatch("__.*__", short):
        what = f"cannot register {library}: torch.ops has no place for an operator `{name}`"
        evidence = "its namespace or its name is one of PyTorch, or a word of Python"
        raise report(what, [evidence], "give the operator another namespace and name")


def _linked(request: Request, inputs: Inputs) -> dict[str, str]:
    """Return {path: state} of the shared libraries with which a library was linked."""
    states = {request.unfold(path): state for path, state in inputs.files.items()}
    return {path: states[path] for path in states if re.search(r"\.so[.\d]*$", path)}


def _is_open(path: str) -> bool:
    """Return True if this process has loaded a library from `path`."""
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


class Registration:
    """What one build of a library registers.

    The library lists its registrations only when they are compared or committed.
    """

    live = False  # True while its kernels are called

    def __init__(self, request: Request, build: Build):
        """Load the library of a build, without registering its operators.

        BuildError: it cannot be loaded. FileNotFoundError: it is gone.
        """
        self.name = request.name
        self.place = request.root
        self._asked = request.asked or {}
        self._extends = build.manifest.get("extends", False)
        path = build.path
        if build.manifest.get("direct") and not _is_open(path):
            self._check_direct(build.manifest["operators"])
        linked = _linked(request, build.inputs)
        for file, state in linked.items():
            is_other = _is_open(os.path.basename(file)) and not _is_open(file)
            if is_other or _loaded.get(file, state) != state:
                what = f"cannot load {self.name}: this process has loaded another {file}"
                evidence = "one of this name was loaded before, perhaps before it was built again"
                raise report(what, [evidence], "restart Python")
        try:
            with _delayed(path):
                self._library = ctypes.CDLL(path)
        except OSError as error:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is gone") from None
            message = str(error).removeprefix(f"{path}: ")
            raise explain(f"cannot load {request.name}.so", message) from None
        _loaded.update(linked)
        torch.ops.loaded_libraries.add(path)

    def _check_direct(self, operators: dict[str, str]) -> None:
        """Check that nobody has registered the operators of a library that registers directly.

        A second registration would end the process, or could not be undone.
        """
        names = [name for name in operators if torch._C._jit_get_schemas_for_operator(name)]
        if names or self.name in {other.name for other in _taken}:
            what = f"cannot load {self.name}: this process has loaded a library with its operators"
            evidence = "RegisterOperators and STABLE_TORCH_LIBRARY register only once in a process"
            raise report(what, [evidence], "restart Python, or register them by TORCH_LIBRARY")

    @once
    def _lines(self) -> list[list[str]]:
        """Return the fields of each registration: its kind, a name, a schema or signature, tags."""
        return [line.split("\t") for line in self._call("steps").splitlines()]

    @once
    def defs(self) -> dict[str, str]:
        """Return {operator with overload: schema and tags}."""
        definitions = {}
        for kind, name, schema, *tags in self._lines:
            if kind == "def":
                definitions[name] = f"{schema} tags {tags[0]}" if tags[0] else schema
        return definitions

    @once
    def impls(self) -> dict[str, str]:
        """Return {"operator dispatch_key": C++ signature}. A fallback is " dispatch_key"."""
        return {name: signature for kind, name, signature, *_ in self._lines if kind == "impl"}

    def names(self) -> set[str]:
        """Return the keys of `defs` and of `impls`."""
        return self.defs.keys() | self.impls.keys()

    def _described(self) -> dict[str, str]:
        """Return {operator: its schemas, and the documentation of its contract}."""
        lines: dict[str, list[str]] = {}
        for kind, name, schema, *_ in self._lines:  # the contracts are read now
            if kind == "def":
                lines.setdefault(name.partition(".")[0], []).append(schema)
        for entry in self._call("documentation").split("\x1e")[:-1]:
            name, _, text = entry.partition("\n")
            lines[name] += ["", text.strip()]
        return {name: "\n".join(block) for name, block in sorted(lines.items())}

    def refusal(self, earlier: list[Registration]) -> BuildError | None:
        """Return the error if a schema differs from that in `earlier`."""
        lines: list[str] = []
        known: dict[str, str] = {}  # a name has the same schema in all of `earlier`
        for old in earlier:
            known |= old.defs
        for name in sorted(known.keys() & self.defs.keys()):
            if known[name] != self.defs[name]:
                lines += [f"- {known[name]}", f"+ {self.defs[name]}"]
        if not lines:
            return None
        what = f"cannot reload {self.name}: a schema changed, so nothing was exchanged"
        return report(what, lines, "restart Python, or give the operator another name")

    def take(self, earlier: list[Registration]) -> None:
        """Register everything, in place of `earlier`. Every later call reaches the new kernels.

        BuildError: the registration is refused, and nothing has changed.
        """
        others = [other for other in _taken if other.live and other not in [*earlier, self]]
        for other in others:  # glibc maps a file only once
            if other._library._handle == self._library._handle and self.names():
                raise self._clash(min(self.names()), [other], "")
        replaced = [other for other in {*_taken, *earlier} if other not in others]
        names = set().union(*(other.names() for other in replaced))
        if names:  # else this library lists nothing
            names = names & self.names() - set().union(*(other.names() for other in others))
        # It registers everything, or nothing if another name is registered already. Without any
        # text, a library that has registered itself stays as it is. One that returns does not.
        mine = "\n".join(sorted(names)) + "\n" * (self in _taken)
        answer = self._call("commit", mine.encode())
        for line in answer.splitlines()[1:]:
            name, origin = line.split("\t")
            raise self._clash(name, [other for other in others if name in other.names()], origin)
        for old in earlier:
            for impl in old.impls.keys() - self.impls.keys():
                old._library.calcops_jit_retire(impl.encode())
        for old in earlier:
            old.live = False
            _forget_dispatch(old.names())
        if earlier or self._extends:
            _forget_dispatch(self.names())
        self.live = True
        _taken[:] = [*(other for other in _taken if other is not self), self]

    def _clash(self, name: str, owners: list[Registration], origin: str) -> BuildError:
        evidence = [f"{owner.name} of {owner.place} has it" for owner in owners]
        if origin and not owners:  # else it may be an earlier library that had the same schema
            evidence.append(origin)
        evidence.append(f"{self.name} of {self.place} would take its place")
        what = f"cannot load {self.name}: {name} is there already"
        fix = "load only one of the two, or give one another namespace"
        for owner in owners:
            if (owner.name, owner.place) == (self.name, self.place):  # other arguments of load()
                evidence = differences(owner._asked, self._asked)
                fix = "restart Python, or give one of the two another name and namespace"
        return report(what, evidence, fix)

    def _call(self, function: str, *arguments: bytes) -> str:
        """Call a function of the runtime. BuildError: it failed."""
        call = getattr(self._library, f"calcops_jit_{function}", None)
        if call is None:  # a library that registers nothing is linked without the runtime
            return ""
        call.restype = ctypes.c_char_p
        answer = call(*arguments).decode(errors="replace")
        if not answer.startswith("error\t"):
            return answer
        lines = answer.removeprefix("error\t").strip().splitlines()
        fix = "restart Python, or correct the registration"
        if function == "steps" and "Custom class with name" not in lines[0]:
            fix = "correct the contract or the registration"  # a restart would not help
        raise report(f"cannot register {self.name}, nothing was exchanged", lines, fix)


def _forget_dispatch(names: set[str]) -> None:
    """Make Python find overloads and kernels of operators again.

    It calls kernels under make_fx, for example. A name is "namespace::operator.overload", perhaps
    with " dispatch_key".
    """
    for name in {name.partition(" ")[0] for name in names}:
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        with contextlib.suppress(KeyError):  # Python has not called it
            overloads = vars(getattr(torch.ops, namespace))[packet]
            _find_overloads(overloads)
            handle = vars(overloads)[overload or "default"]
            handle._dispatch_cache.clear()
            # It has all compositions. Another thread may be importing it.
            inductor = sys.modules.get("torch._inductor.decomposition")
            getattr(inductor, "decompositions", {}).pop(handle, None)


def _find_overloads(handle: torch._ops.OpOverloadPacket) -> None:
    """Let a handle know the overloads of its operator, which PyTorch lists only once."""
    call, names = torch._ops._get_packet(handle._qualified_op_name, handle.__module__)
    if names != handle._overload_names:  # otherwise the handle keeps its hash, which is that of _op
        handle._op = call
        handle._overload_names = names
