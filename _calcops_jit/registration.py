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
import difflib
import os
import re
import sys
from collections.abc import Iterator

import torch

from .cache import Build, differences
from .inputs import Inputs
from .messages import BuildError, explain, report, say
from .request import Request, is_reserved, once

_taken: list[Registration] = []  # all that were committed in this process, the newest last
_with_fast_math: set[str] = set()  # names of libraries
# {path: state} of the shared libraries that were loaded because a library is linked with them.
_loaded: dict[str, str] = {}


@contextlib.contextmanager
def _held(path: str) -> Iterator[None]:
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
    before, states = _registered(), _states()
    registration = Registration(request, Build(path=product, manifest={}, inputs=inputs))
    # The library's other registrations are held.
    replaced = {name for name, state in _states().items() if states.get(name, state) != state}
    direct = {
        name for name in _registered() if name not in before or name.partition(" ")[0] in replaced
    }
    operators = registration._described()
    for name in {name.partition(".")[0] for name in direct if " " not in name} - operators.keys():
        if schemas := torch._C._jit_get_schemas_for_operator(name):
            operators[name] = "\n".join(map(str, schemas))
    for name in operators:
        _check_name(request.name, name)
    implemented = {re.split("[ .]", name)[0] for name in {*direct, *registration.impls}}
    extended = implemented - operators.keys()
    return {"operators": operators, "direct": sorted(direct), "extends": sorted(extended)}


def _check_name(library: str, name: str) -> None:
    """Check that torch.ops reaches an operator, and that it is not among PyTorch's."""
    namespace, _, short = name.partition("::")
    if is_reserved(namespace):
        what = f"cannot register {library}: `{namespace}` is no namespace for operators"
        evidence = f"{name} is in a namespace of PyTorch, or torch.ops cannot reach it"
        raise report(what, [evidence], "give the operator another namespace")
    if short in ("name", "_dir") or re.fullmatch("__.*__", short):
        what = f"cannot register {library}: an operator may not be called `{short}`"
        evidence = f"torch.ops.{namespace}.{short} is an attribute of PyTorch"
        raise report(what, [evidence], "give the operator another name")


def _registered() -> set[str]:
    """Return all "operator" and "operator dispatch_key" that are registered in this process."""
    names = set(torch._C._dispatch_get_all_op_names())
    for key in torch._C.DispatchKey.__members__:
        with contextlib.suppress(RuntimeError):  # some are no names of the dispatcher
            kernels = torch._C._dispatch_get_registrations_for_dispatch_key(key)
            names.update(f"{name} {key}" for name in kernels)
    return names


def _states() -> dict[str, str]:
    """Return {operator: a description of its kernels}. A kernel may have replaced another one."""
    states = {}
    for name in torch._C._dispatch_get_all_op_names():
        with contextlib.suppress(RuntimeError):  # PyTorch cannot read a name such as `is::f`
            states[name] = torch._C._dispatch_dump(name)
    return states


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


@contextlib.contextmanager
def _kept_denormals(name: str) -> Iterator[None]:
    """Undo what an initialiser of GCC's -ffast-math does to the arithmetic of this process."""
    denormal = 5e-324
    are_kept = denormal * 1 > 0
    yield
    if are_kept and denormal * 1 == 0:
        torch.set_flush_denormal(False)
        if name not in _with_fast_math:
            _with_fast_math.add(name)
            say(f"{name} is linked with -ffast-math, but the process keeps denormal numbers")


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
        self._direct = build.manifest.get("direct", [])
        self._extends = build.manifest.get("extends", [])
        self._missing: set[str] = set()  # operators of `defs` whose calls are errors now
        path = build.path
        if not _is_open(path):
            self.check_direct()
        linked = _linked(request, build.inputs)
        for file, state in linked.items():
            is_other = _is_open(os.path.basename(file)) and not _is_open(file)
            if is_other or _loaded.get(file, state) != state:
                what = f"cannot load {self.name}: this process has loaded another {file}"
                evidence = "one of this name was loaded before, perhaps before it was built again"
                raise report(what, [evidence], "restart Python")
        try:
            with _held(path), _kept_denormals(self.name):
                self._library = ctypes.CDLL(path)
        except OSError as error:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is gone") from None
            message = str(error).removeprefix(f"{path}: ")
            raise explain(f"cannot load {request.name}.so", message) from None
        _loaded.update(linked)
        torch.ops.loaded_libraries.add(path)

    def is_python_module(self) -> bool:
        """Return True if Python can import the library, as one with PYBIND11_MODULE."""
        return hasattr(self._library, f"PyInit_{self.name}")

    def check_direct(self) -> None:
        """Check what the library registers without the loader.

        A second registration would end the process. BuildError: this process has the first one.
        """
        names = self._direct and _registered().intersection(self._direct)
        if not names:
            return
        what = f"cannot load {self.name}: {min(names)} is registered in this process already"
        evidence = "it registers operators by RegisterOperators or STABLE_TORCH_LIBRARY"
        fix = "restart Python, or load only one library; those with TORCH_LIBRARY can be exchanged"
        raise report(what, [evidence], fix)

    @once
    def _steps(self) -> list[list[str]]:
        """Return the fields of each registration: its kind, a name, a schema or signature, tags."""
        return [line.split("\t") for line in self._call("steps").splitlines()]

    @once
    def defs(self) -> dict[str, str]:
        """Return {operator with overload: schema and tags}."""
        definitions = {}
        for kind, name, schema, *tags in self._steps:
            if kind == "def":
                definitions[name] = f"{schema} tags {tags[0]}" if tags[0] else schema
        return definitions

    @once
    def impls(self) -> dict[str, str]:
        """Return {"operator dispatch_key": C++ signature}. A fallback is " dispatch_key"."""
        return {name: signature for kind, name, signature, *_ in self._steps if kind == "impl"}

    def names(self) -> set[str]:
        """Return the keys of `defs` and of `impls`."""
        return self.defs.keys() | self.impls.keys()

    def short_names(self) -> set[str]:
        """Return the names of the operators, without namespaces and overloads."""
        return {name.partition("::")[2].partition(".")[0] for name in self.defs}

    def _described(self) -> dict[str, str]:
        """Return {operator: its schemas, and the documentation of its contract}."""
        lines: dict[str, list[str]] = {}
        for kind, name, schema, *_ in self._steps:  # the contracts are read now
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
                lines += [name, *_difference(known[name], self.defs[name])]
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
        for other in [*replaced, self]:
            other._open(self)
        for impl in {impl for old in earlier for impl in old.impls if impl not in self.impls}:
            _retire(impl, earlier)
        if earlier:
            self._close_missing(earlier, others)
        for old in earlier:
            old.live = False
            _forget_dispatch(old.names())
        if earlier or self._extends:
            _forget_dispatch(self.names())
        self.live = True
        _taken[:] = [*(other for other in _taken if other is not self), self]

    def _close_missing(self, earlier: list[Registration], others: list[Registration]) -> None:
        """Let calls of operators that `earlier` had, and nobody has now, raise an error."""
        known = set().union(*(other.defs for other in [*others, self]))
        known.update(*(old._missing for old in earlier))
        for old in earlier:
            for name in old.defs.keys() - known:
                error = f"{name}: no longer in library `{self.name}`"
                old._library.calcops_jit_close(name.encode(), error.encode())
                old._missing.add(name)
                known.add(name)

    def _open(self, newer: Registration) -> None:
        """Undo _close_missing() for the operators of a newer registration."""
        names = self._missing and self._missing & newer.defs.keys()
        for name in names:
            self._library.calcops_jit_retire(f"{name} missing".encode())
        self._missing = self._missing - names
        _forget_dispatch(names)  # a trace has called the kernel that was removed

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
        if "Custom class with name" in lines[0]:
            what = f"cannot register {self.name}: a TorchBind class cannot be exchanged"
            raise report(what, [lines[0].partition(" Ensure")[0]], "restart Python")
        if function == "steps":  # a restart would not help
            is_of_contract = re.search(": contract: |, which no contract names", lines[0])
            part = "contract" if is_of_contract else "registration"
            fix = f"correct the {part}"
            if ", which no contract names" in lines[0]:
                fix = "correct the kernel's name, or the contract"
            raise report(f"cannot register {self.name}: its {part} is refused", lines, fix)
        what = f"cannot register {self.name}, nothing was exchanged"
        raise report(what, lines, "correct the registration, or restart Python")


def _retire(impl: str, registrations: list[Registration]) -> None:
    """Remove a kernel or a fallback from PyTorch's dispatcher."""
    for old in registrations:
        if impl in old.impls:
            old._library.calcops_jit_retire(impl.encode())


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


def _difference(old: str, new: str) -> list[str]:
    """Return a line for each argument and result of a schema or signature that changed."""
    # Split at each comma, after `(` and `-> `, and before the `)` that ends a list.
    pieces = [re.split(r", |(?<=\()|(?=\)(?:$| ->))|(?<=-> )", text) for text in (old, new)]
    return [f"  {line}" for line in difflib.ndiff(*pieces) if line.startswith(("-", "+"))]
