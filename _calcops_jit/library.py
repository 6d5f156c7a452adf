"""Find or build a library, load it, and exchange it after an edit."""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.compiler.config
from torch._subclasses.fake_tensor import FakeTensorMode

from . import cache, request
from .cache import Build
from .inputs import TORCH, digest, state_of
from .messages import BuildError, notebook_shell, report, say
from .registration import Registration
from .request import Request


class Library:
    """A loaded library and its operators, which are torch.ops handles.

    Every operator is an attribute, and also in the dictionary `operators`. `path` is the path of
    the shared library, and so is os.fspath(library). An operator named `path` or `operators` hides
    the attribute of that name.

    reload() changes a Library in place: its handles stay, and call the new kernels. A copy is the
    same object. A Library is pickled as the arguments of its load(), and a handle with its Library.
    """

    path: str
    operators: dict[str, torch._ops.OpOverloadPacket]

    # Names of operators have no leading underscore.
    def __init__(self, wanted: Request):
        self._request = wanted
        self._build: Build | None = None  # whose kernels are called
        self._registrations: dict[str, Registration] = {}  # {digest of a build: ...}
        self._operators: dict[str, torch._ops.OpOverloadPacket] = {}
        self._paths: set[str] = set()  # of all builds

    def _exchange(self, wanted: Request, build: Build) -> None:
        """Load a build and register its operators, in place of the present one.

        BuildError: the registration is refused, and nothing has changed.
        """
        new = self._registrations.get(build.digest)
        if new is None:
            new = Registration(wanted, build)
            if refusal := new.refusal(list(self._registrations.values())):
                raise refusal
        if not new.live:
            new.take([old for old in self._registrations.values() if old is not new])
        self._registrations[build.digest] = new
        self._paths.add(build.path)
        self._request = wanted
        self._build = build
        old_names = {*self._operators}
        self._operators = _handles(build.manifest["operators"])
        vars(self).update({"path": build.path, "operators": self._operators})
        vars(self).update(self._operators)
        for name in old_names - {"path", "operators", *self._operators}:
            vars(self).pop(name, None)

    def __fspath__(self) -> str:
        return self._build.path

    def __copy__(self) -> Library:
        return self

    def __deepcopy__(self, memo: dict) -> Library:
        return self

    def __reduce__(self):
        return _unpickled, (self._request.asked,)

    def __getattr__(self, name: str):
        if name.startswith("_"):  # copy looks for methods of such names
            raise AttributeError(name)
        raise missing(f"no operator `{name}` in {self._build.path}", self._operators)

    def __repr__(self) -> str:
        operators = ", ".join(self._operators) or "no operators"
        return f"<calcops_jit library {self._build.path}: {operators}>"


_loaded: list[Library] = []
_one_at_a_time = threading.RLock()
# Another thread may hold the lock during a fork. That thread does not exist in the child, so it
# would never release the child's copy.
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)


def obtain(wanted: Request, may_build: bool = True) -> Library | None:
    """Load the library for a request. Build it if it is neither in the cache nor prebuilt.

    Return None if it is not built and `may_build` is False. The loaded library of these arguments
    is exchanged.
    """
    with _exchanges():
        library = _find_loaded(wanted)
        if not _load(library, wanted, may_build):
            return None
        manifest = library._build.manifest
        if notebook_shell() and not manifest["operators"] and not manifest.get("extends"):
            say(f"{wanted.name} registers no operator")
        return library


@contextlib.contextmanager
def _exchanges() -> Iterator[Callable[[], list[str]]]:
    """Let one thread load libraries. Yield a function that names those that were exchanged."""
    before: dict[Library, str] = {}

    def changed() -> list[str]:
        return [
            library._request.name
            for library, digest in before.items()
            if library._build.digest != digest
        ]

    try:
        with _one_at_a_time:
            before |= {library: library._build.digest for library in _loaded}
            yield changed
    finally:
        added = [library for library in _loaded if library not in before]
        extend_others = any(library._build.manifest.get("extends") for library in added)
        # Without the lock: it waits for a compilation in another thread, which may call load().
        if changed() or extend_others:
            _forget_traces()


def _load(library: Library, wanted: Request, may_build: bool) -> bool:
    """Load a library from the cache, or a prebuilt one, or build it.

    Return False if it is not built and `may_build` is False.
    """
    while not _load_once(library, wanted, may_build):
        if not may_build:
            return False
    if library not in _loaded:
        _loaded.append(library)
    return True


def _load_once(library: Library, wanted: Request, may_build: bool) -> bool:
    """Load a library. Return False if it is not built, or if its file has gone meanwhile."""
    reasons: list[str] = []
    build = cache.find(wanted, reasons)
    if build is None and _take_prebuilt(library, wanted):
        return True
    if build is None and may_build:
        from .build import built

        build = built(wanted, reasons)
    if build:
        if wanted.name != "calcops":
            cache.remember(wanted)
        with contextlib.suppress(FileNotFoundError):  # another process has emptied the cache
            library._exchange(wanted, build)
            return True
    return False


def _take_prebuilt(library: Library, wanted: Request) -> bool:
    """Load the prebuilt library for this machine. Return False if none works."""
    if not os.path.isdir(f"{wanted.root}/prebuilt"):
        return False
    from . import prebuilt

    reasons: list[str] = []
    build = prebuilt.find(wanted, reasons)
    try:
        if build:
            library._exchange(wanted, build)
            return True
    except BuildError as error:
        if not str(error).startswith(f"cannot load {wanted.name}.so"):
            raise
        # This system's C library may be too old for it.
        reasons.append(" ".join(line.strip() for line in str(error).splitlines()[:2]))
    if reasons:
        say(f"the prebuilt {wanted.name} does not fit: {reasons[0]}")
    return False


def _find_loaded(wanted: Request) -> Library:
    """Return the loaded library that has the arguments of a request, or a new one.

    The sources may be given by other paths.
    """
    if wanted.is_cell:
        return _cell(wanted.name) or Library(wanted)
    for library in _loaded:
        loaded = library._request
        have_equal_arguments = _arguments(loaded) == _arguments(wanted)
        have_equal_folders = _folders(loaded) & _folders(wanted)
        if have_equal_arguments and have_equal_folders and _spellings(loaded) & _spellings(wanted):
            return library
    return Library(wanted)


def _cell(name: str) -> Library | None:
    """Return the library of the notebook's cells of a name, which replace each other."""
    for library in _loaded:
        if library._request.is_cell and library._request.name == name:
            return library
    return None


def _arguments(wanted: Request) -> dict:
    """Return the arguments of load() besides the sources, the include paths and `check`."""
    ldflags = [_followed(flag) for flag in wanted.asked["extra_ldflags"]]
    others = {"extra_ldflags": ldflags, "extra_include_paths": (), "sources": (), "check": False}
    return wanted.asked | others


def _folders(wanted: Request) -> set[tuple[str, ...]]:
    """Return a library's include paths as given and by the real paths. A link may have moved."""
    return {wanted.include_paths, tuple(wanted.asked["extra_include_paths"])}


def _spellings(wanted: Request) -> set[tuple[str, ...]]:
    """Return a library's sources by the given paths and by the real paths."""
    return {wanted.sources, tuple(wanted.asked["sources"])}


def _followed(flag: str) -> str:
    """Return a flag. If it is the path of an earlier build of a Library, return the present one."""
    for library in _loaded:
        if flag in library._paths:
            return library._build.path
    return flag


def reload() -> list[str]:
    """Exchange every loaded library whose inputs changed. Return their names.

    A library stays as it is if all its sources are gone, as temporary ones are.
    If some fail, the others are exchanged, and then the first error is raised. It is a BuildError,
    or a ValueError for an environment variable such as CXX with an unclosed quotation mark.
    """
    with _exchanges() as changed:
        failure = None
        for library in _loaded:
            existing = filter(os.path.exists, library._request.asked["sources"])
            if not request.files_of([*existing]):
                continue
            try:
                _load(library, request.again(library._request, _followed), may_build=True)
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure
        return changed()


def watch(seconds: float, reload: Callable[[], list[str]]) -> Callable[[], None]:
    """Start a thread that calls `reload` when a library's file changes.

    Return the function that stops the thread.
    """
    stop = threading.Event()
    arguments = (stop, seconds, reload)
    thread = threading.Thread(target=_watch, args=arguments, name="calcops watch", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def _watch(stop: threading.Event, seconds: float, reload: Callable[[], list[str]]) -> None:
    tried = None  # the first check reloads, because files may have been saved before it
    while not stop.wait(seconds):
        try:
            now = [_state(library) for library in list(_loaded)]
            if now == tried:
                continue
            tried = now  # also if the reload fails: the same files would fail again
            changed = reload()
            if changed:
                say(f"reloaded {', '.join(changed)}")
        except Exception as error:  # the next save may remove the cause
            if not stop.is_set():
                say(str(error) or type(error).__name__)


def _state(library: Library) -> tuple:
    """Return a value that changes when a file of a library changes, appears or disappears."""
    paths = set().union(*_spellings(library._request))
    folders = {library._request.root, *library._request.include_paths, *map(os.path.dirname, paths)}
    for folder in filter(os.path.isdir, library._request.asked["sources"]):
        folders.update(place for place, _, _ in os.walk(folder))  # a new one may have sources
    inputs = library._build.inputs
    files = {*paths, *map(library._request.unfold, inputs.files)}
    names = {folder: sorted(os.listdir(folder)) for folder in folders if os.path.isdir(folder)}
    return inputs.appeared(library._request), names, {path: state_of(path) for path in files}


# ---- torch.compile -------------------------------------------------------------------------------


def _forget_traces() -> None:
    """Make torch.compile trace again what it has traced with operators that were exchanged.

    Their kernels are called by name, but their formulas, compositions, shapes and dtypes are part
    of a trace. A CUDA graph has recorded the kernels, too.
    """
    FakeTensorMode.cache_clear()
    if "torch._dynamo" in sys.modules:
        if threading.current_thread() is threading.main_thread():
            torch.compiler.reset()
        else:
            _reset_later()


def _reset_later() -> None:
    """Let the main thread reset the compiler, between two of its bytecodes."""
    ctypes.pythonapi.Py_AddPendingCall(_reset_in_main_thread, os.getpid())


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)
def _reset_in_main_thread(pid: int) -> int:
    """Reset the compiler as soon as the main thread is not in a function of PyTorch.

    A reset frees what a compiled function reads while it is called, and would end the process. A
    forked process may have a lock of its parent, and also its parent's pending calls.
    """
    if pid != os.getpid():
        return 0
    frame = sys._getframe().f_back
    while frame and not frame.f_code.co_filename.startswith((f"{TORCH}/", f"{request.LOADER}/")):
        frame = frame.f_back
    if frame:
        again = threading.Timer(0.01, _reset_later)
        again.daemon = True
        again.start()
    else:
        torch.compiler.reset()
    return 0


def _tag_of_compile_caches(config) -> str:
    """Return PyTorch's tag for the keys of its compile caches: the user's, and a digest.

    These caches know an operator only by its name. The digest is that of all loaded libraries.
    """
    tag = config.__getattr__("cache_key_tag").partition("calcops_jit:")[0]
    libraries = sorted(library._build.digest for library in _loaded)
    return f"{tag}calcops_jit:{digest(''.join(libraries).encode())}" if libraries else tag


# A property, since the value of torch.compiler.config.cache_key_tag is that of one thread, and the
# user may set it at any time.
type(torch.compiler.config).cache_key_tag = property(_tag_of_compile_caches)


# ---- torch.ops handles ---------------------------------------------------------------------------


def _packet(name: str):
    """Return the handle of `namespace::name`. AttributeError: it has no schema."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


def missing(what: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an operator that does not exist. It lists the operators that do."""
    public = sorted(name for name in names if not name.startswith("_"))
    fix = "call one of these, or register it with TORCH_LIBRARY or a contract"
    return AttributeError(str(report(what, [f"there are: {', '.join(public) or 'none'}"], fix)))


def _handles(described: dict[str, str]) -> dict[str, torch._ops.OpOverloadPacket]:
    """Return {name without namespace: torch.ops handle} of a library.

    Names with a leading underscore are left out. If operators of two namespaces have the same name,
    only the first is returned. `described` is {operator: schemas and documentation}.
    """
    packets = {}
    for name, text in described.items():
        short = name.rpartition("::")[2]
        if not short.startswith("_") and short not in packets:
            packets[short] = _packet(name)
            _document(packets[short], text)
    return packets


def _document(handle: torch._ops.OpOverloadPacket, text: str) -> None:
    """Let help() and IPython's `?` show an operator, and not PyTorch's class of all operators."""

    def call(*arguments, **options):
        return handle(*arguments, **options)

    handle.__doc__ = text
    with contextlib.suppress(ValueError):  # a name such as `lambda` is a Python keyword
        handle.__signature__ = call.__signature__ = _signature(handle)
    handle.__call__ = call  # for IPython, which shows the signature of __call__ if it differs


# IPython would show the text of typing.Generic, from which the class inherits.
torch._ops.OpOverloadPacket.__doc__ = ""


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


# ---- pickle --------------------------------------------------------------------------------------


class _Unavailable:
    """What a Library or a handle becomes in a process that cannot load it. Its use raises why.

    If unpickling raised an error, a worker of a multiprocessing.Pool would end, and the Pool would
    wait for ever.
    """

    def __init__(self, reason: str):
        self._reason = reason

    def __call__(self, *arguments, **options):
        raise BuildError(self._reason)

    def __getattr__(self, name: str):
        if name.startswith("_"):  # pickle looks for methods of such names
            raise AttributeError(name)
        raise BuildError(self._reason)


def _unpickled(asked: dict, name: str = "", overload: str = ""):
    """Return the library of these arguments, or its handle. A loaded one keeps its `check`."""
    try:
        # The project's operators may be in another folder there.
        is_own = asked["name"] == "calcops"
        wanted = request.own() if is_own else request.request_for(**asked)
        library = _find_loaded(wanted)
        if library in _loaded:
            wanted = request.again(library._request, _followed)
        library = obtain(wanted)
        packet = _packet(name) if name else library
        return getattr(packet, overload) if overload else packet
    except Exception as error:
        return _Unavailable(f"cannot unpickle {name or asked['name']}: {error}")


def _reduced(handle) -> tuple:
    """Return how to unpickle a handle: with its library, which another process may lack."""
    is_overload = isinstance(handle, torch._ops.OpOverload)
    name = (handle._overloadpacket if is_overload else handle)._qualified_op_name
    for library in _loaded:
        if name in library._build.manifest["operators"]:
            overload = handle._overloadname if is_overload else ""
            return _unpickled, (library._request.asked, name, overload)
    # copy.copy() of PyTorch's own packets never returns.
    return handle.__reduce_ex__(2) if is_overload else (_packet, (name,))


copyreg.pickle(torch._ops.OpOverloadPacket, _reduced)
copyreg.pickle(torch._ops.OpOverload, _reduced)
