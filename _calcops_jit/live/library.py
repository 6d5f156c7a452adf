"""Find or build a library, load it, and exchange it after an edit."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence

import torch

from ..cache import folders, store
from ..cache.closure import Changed, Closure, text_of
from ..errors import BuildError, report
from ..request import Request
from . import handles, loading
from .registration import Registration


class Library:
    """A loaded library and its operators, which are torch.ops handles.

    Every operator is an attribute, and also in the dictionary `operators`. `path` is the path of
    the shared library, and so is os.fspath(library). An operator named `path` or `operators` hides
    the attribute of that name.

    reload() changes a Library in place: its handles stay, and call the new kernels. A copy is the
    same object. Unpickling a Library loads the library from its sources.
    """

    path: str
    operators: dict[str, torch._ops.OpOverloadPacket]

    def __init__(self, request: Request):
        self._request = request

    def _set_operators(self, path: str, operators: dict[str, torch._ops.OpOverloadPacket]) -> None:
        public_names = [name for name in vars(self) if not name.startswith("_")]
        for name in public_names:
            delattr(self, name)
        self._path = path  # an operator may hide the public attributes
        self._operators = operators
        vars(self).update({"path": path, "operators": operators} | operators)

    def __fspath__(self) -> str:
        return self._path

    def __copy__(self) -> Library:
        return self

    def __deepcopy__(self, memo: dict) -> Library:
        return self

    def __reduce__(self):
        return _load_again, (self._request.but(),)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # copy and pickle look for methods of such names
            raise AttributeError(name)
        raise handles.missing(f"no operator `{name}` in {self._path}", self._operators)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._operators})

    def __repr__(self) -> str:
        return f"<calcops_jit library {self._path}: {', '.join(self._operators) or 'no operators'}>"


def _load_again(request: Request) -> Library:
    """Return the Library of a pickled request."""
    from .. import requests

    return obtain(requests.again(request))


class Live:
    """A library of this process: the generation whose kernels are called, and older ones."""

    digest = ""  # of the present generation

    def __init__(self, request: Request):
        self.request = request
        self.library = Library(request)
        self._generations: dict[str, Registration] = {}  # {digest: generation that was exchanged}
        self._described: dict[str, str] = {}  # {operator: schemas and documentation}

    @property
    def permanent_operators(self) -> set[str]:
        """Return the operators that were registered without the loader. None can be exchanged."""
        if not self.digest:
            return set()
        return self._described.keys() - self._generations[self.digest].schemas

    def has_generation(self, digest: str) -> bool:
        """Return True if the generation with this digest was registered in this process."""
        return digest in self._generations

    def link(self, request: Request, generation: store.Generation) -> Registration:
        """Load a generation into the process without registering its operators.

        BuildError: the generation cannot replace the present one.
        """
        if registration := self._generations.get(generation.manifest.digest):
            os.close(generation.fd)
            return registration
        permanent = self.permanent_operators
        if permanent:
            evidence = f"{min(permanent)} was registered without torch/library.h, "
            evidence += "by STABLE_TORCH_LIBRARY perhaps"
            raise report(f"cannot reload {request.name}", [evidence], "restart Python")
        library = loading.link_in(generation.path, generation.fd, request)
        registration = Registration(request.name, request.root, library)
        if refusal := registration.refusal(list(self._generations.values())):
            raise refusal
        return registration

    def exchange(self, request: Request, generation: store.Generation, new: Registration) -> None:
        """Register a generation's operators, so that its kernels are called.

        BuildError: the registration is refused, and nothing has changed.
        """
        manifest = generation.manifest
        if manifest.digest != self.digest:
            new.take([old for old in self._generations.values() if old is not new])
        self.request = request
        self.digest = manifest.digest
        self.closure = manifest.closure
        self._described = manifest.operators
        self._generations[self.digest] = new
        self.library._request = request
        home = self.library if request.kind == "foreign" else None
        self.library._set_operators(generation.path, handles.handles(self._described, home))


_loaded: list[Live] = []
_one_at_a_time = threading.RLock()
# Another thread may hold the lock during a fork. That thread does not exist in the child, so it
# would never release the child's copy. (The standard library frees its locks the same way.)
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)


def obtain(request: Request, build: bool = True) -> Library | None:
    """Load the library for a request. Build it if neither the cache nor a wheel has it.

    Return None if it is not built and `build` is False.
    """
    with _one_at_a_time:
        reasons: list[str] = []
        refusals: list[str] = []
        cached, prebuilt = _find(request, reasons, refusals)
        if cached:
            return _load(request, cached)
        if prebuilt:
            try:
                return _load(request, prebuilt)
            except BuildError as error:  # this system's C library may be too old for it
                if not build or _live(request) in _loaded:
                    raise
                lines = str(error).splitlines()[:2]
                refusals = [" ".join(line.strip() for line in lines)]
        if not build:
            return None
        if refusals:
            if library := _with_objects(request):
                return library
            from ..progress import say

            say(
                f"building {request.name} from its sources; "
                f"what the wheel brings does not fit: {refusals[0]}"
            )
        try:
            return _build(request, reasons)
        except KeyboardInterrupt as interrupt:
            # A user who pressed Ctrl-C needs no traceback.
            raise interrupt.with_traceback(None) from None


def _with_objects(request: Request) -> Library | None:
    """Return the library of a wheel's objects and one unit compiled here; None if it fails."""
    from ..ship import prebuilt

    of_objects = prebuilt.with_objects(request)
    try:
        return of_objects and obtain(of_objects)
    except BuildError:  # this system's linker may be too old for the objects
        return None


def _find(
    request: Request, reasons: list[str], refusals: list[str]
) -> tuple[store.Generation | None, store.Generation | None]:
    """Return (generation in the cache, generation in a wheel). At least one is None.

    If a generation does not fit, the reason is appended: to `reasons` for one in the cache, to
    `refusals` for one in a wheel.
    """
    try:
        cached = store.find(request, reasons)
        if not cached:
            from ..ship import prebuilt

            return None, prebuilt.find(request, refusals)
    except OSError as error:
        fix = "ulimit -n $(ulimit -H -n)"
        raise report(f"cannot load {request.name}", [str(error)], fix) from None
    if not request.tools and request.environment.get("CXX"):
        from ..progress import say

        problem = f"CXX={request.environment['CXX']} is no compiler here"
        say(f"{problem}; {request.name} was built by another compiler")
    return cached, None


def reload(again: Callable[[Request], Request]) -> list[str]:
    """Exchange every loaded library whose inputs changed. Return their names.

    If some fail, the others are exchanged, and then the first error is raised. It is a BuildError,
    or a ValueError for an environment variable such as CXX with an unclosed quotation mark.
    again(request) returns the request in the present environment.
    """
    with _one_at_a_time:
        before = [(live, live.digest) for live in _loaded]
        failure = None
        for live, _ in before:
            try:
                obtain(again(live.request))
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure
        return [live.request.name for live, digest in before if live.digest != digest]


def project_files() -> set[str]:
    """Return the paths of the loaded libraries' sources and headers, and the sources' folders."""
    paths = set()
    for live in list(_loaded):
        request = live.request
        paths.add(request.root)
        paths.update(map(os.path.dirname, request.sources))
        paths.update(live.closure.own_files(request))
    return paths


def _live(request: Request) -> Live:
    """Return the loaded library that has the name and a path of a request, or a new one."""
    for live in _loaded:
        if live.request.name == request.name and _paths(live.request) & _paths(request):
            return live
    return Live(request)


def _paths(request: Request) -> set[str]:
    """Return a library's folder, and its sources by the given paths and by the real paths."""
    given = request.given[0] if request.given else ()
    return {request.root, *request.sources, *given}


def _load(request: Request, generation: store.Generation) -> Library:
    live = _live(request)
    return _exchange(live, request, generation, live.link(request, generation))


def _exchange(live, request, generation, registration) -> Library:
    live.exchange(request, generation, registration)
    if live not in _loaded:
        _loaded.append(live)
    return live.library


def _build(request: Request, reasons: list[str]) -> Library:
    from ..cache import locks
    from ..compile.diagnosis import explain, old_driver
    from ..progress import say

    failure = f"cannot build {request.name}"
    if request.cuda.fatal:
        raise report(f"{failure} for CUDA", [request.cuda.reason], request.cuda.fix)
    for unreadable in folders.unreadable():
        say(unreadable)
    try:
        slot, problem = store.writable_slot(request)
    except OSError as error:
        raise explain(failure, f"no folder can be written: {error}", request) from None
    if problem:
        say(f"cannot write {problem}; using {slot} (set CALCOPS_CACHE to choose)")

    try:
        with locks.locked(slot, lambda holder: _waiting(request.name, holder)):
            if generation := store.find(request, reasons):  # another process built it meanwhile
                return _load(request, generation)
            if request.cuda.gpus and not request.cuda.build:
                reason = f"{request.cuda.reason}: {request.cuda.fix}"
                say(f"{request.cuda.gpus[0]} is here, but {reason}; building for the CPU")
            if request.cuda.build and (old := old_driver(request)):
                say(str(old.error("what is built for CUDA cannot run here")))
            return compile_and_publish(_publish, request, slot, reasons)
    except OSError as error:
        raise explain(failure, str(error), request) from None


def _waiting(name: str, holder: Callable[[], tuple[str, float]]):
    """Return a Progress that shows which process builds a library."""
    from ..progress import Progress

    def state(_: float) -> tuple[str, float]:
        process, seconds = holder()
        return f"{process}, which builds {name} ({seconds:.0f} s)", 0.0

    return Progress("waiting for", state)


def compile_and_publish(publish: Callable, request: Request, slot: str, reasons: Sequence = ()):
    """Compile a library in a private folder. Return publish(request, slot, folder, built, closure).

    `built` is the library's path in `folder`, which is removed afterwards. `reasons` say why the
    last build does not fit; the first is shown while the compilers run.
    """
    from ..cache import bounds, locks
    from ..compile import compiler
    from ..progress import Progress, say

    limit = bounds.bound()  # before the build, so that an invalid size is refused at once
    title = f"building {request.name}"
    if reasons:
        title += f" ({reasons[0].rpartition('/')[2]})"
    elif other_facts := store.other_facts(request):
        title += f" ({other_facts[0].partition(':')[0]})"
    alone = False
    for _ in range(3):
        with locks.stage(slot) as folder:
            with Progress(title, lambda seconds: compiler.progress(folder, seconds)) as progress:
                try:
                    built, closure = compiler.build(request, slot, folder, alone)
                except Changed:
                    continue  # a source was saved while it was compiled
                except compiler.OutOfMemory:
                    alone = True
                    say(
                        "a compiler was killed, most likely for lack of memory: "
                        "trying again with one at a time"
                    )
                    continue
                is_reload = _live(request) in _loaded
                published = publish(request, slot, folder, built, closure)
                progress.outcome = f"built {request.name} in {progress.seconds():.1f} s"
            if not is_reload:  # a reload must be quick
                bounds.prune(limit)
            return published
    evidence = "its sources changed again and again while they were compiled"
    raise report(f"cannot build {request.name}", [evidence], "wait until nothing writes to them")


def _publish(request: Request, slot: str, folder: str, built: str, closure: Closure) -> Library:
    """Load a new library, and put it into the cache if it can be loaded.

    It is loaded from its final place. store.find() finds it only later, when it has a manifest,
    because the manifest lists the operators that it registers.
    """
    from . import trial

    live = _live(request)
    generation = store.place(slot, folder, built, request, closure)
    try:
        permanent = live.permanent_operators
        if not live.has_generation(generation.manifest.digest):
            permanent = trial.load_in_child(request.name, lambda: live.link(request, generation))
        registration = live.link(request, generation)
        schemas = registration.schemas | {name: handles.live_schemas(name) for name in permanent}
        texts = handles.documentation(request.root) | registration.documentation()
        store.complete(generation, handles.describe(schemas, texts))
        exchanged = _exchange(live, request, generation, registration)
    except BaseException:
        shutil.rmtree(os.path.dirname(generation.path), ignore_errors=True)
        raise
    _warn_of_missing(request, registration, permanent)
    return exchanged


def _warn_of_missing(request: Request, registration: Registration, permanent: set[str]) -> None:
    """Print a line for each kernel without a schema, or one if the library has no operators."""
    from ..progress import say

    operators = {re.split("[ .]", key)[0] for key in registration.impls}  # "name.overload CPU"
    for name in sorted(operators - {""}):  # "" for a fallback
        try:
            handles.packet(name)
        except AttributeError:
            say(
                f"{name} has a kernel in {request.name} and no schema: "
                f'm.def("{name.partition("::")[2]}(...) -> ...")'
            )
    if registration.names() or permanent:
        return
    include = re.compile(r"#\s*include\s*<(?:torch|ATen|calcops)/")
    if any(include.search(text_of(source)) for source in request.sources):
        how = "add TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) or a calcops::Contract"
        say(f"{request.name} registers no operators: {how}")
