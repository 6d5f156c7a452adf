"""The libraries of this process: found in the cache or built there, loaded, and exchanged."""

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
    """A loaded library. Its operators, torch.ops handles, are attributes and in the dictionary
    `operators`; `path` is its file, and so is os.fspath(library). (Operators named `path` or
    `operators` take precedence as attributes.)

    reload() changes it in place: the handles stay, and call the new kernels. A copy is the same
    object; unpickling one loads its sources.
    """

    path: str
    operators: dict[str, torch._ops.OpOverloadPacket]

    def __init__(self, request: Request):
        self._request = request

    def _show(self, path: str, operators: dict[str, torch._ops.OpOverloadPacket]) -> None:
        for name in [name for name in vars(self) if not name.startswith("_")]:
            delattr(self, name)
        self._path = path
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
        if name.startswith("__"):  # copy and pickle ask for such
            raise AttributeError(name)
        raise handles.missing(f"no operator `{name}` in {self._path}", self._operators)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._operators})

    def __repr__(self) -> str:
        return f"<calcops_jit library {self._path}: {', '.join(self._operators) or 'no operators'}>"


def _load_again(request: Request) -> Library:
    """Unpickles a Library."""
    from .. import requests

    return obtain(requests.again(request))


class Live:
    """A library of this process: the generation whose kernels are called, and those before it."""

    digest = ""

    def __init__(self, request: Request):
        self.request = request
        self.library = Library(request)
        self._generations: dict[str, Registration] = {}  # {digest: each that was ever called}
        self._described: dict[str, str] = {}

    @property
    def at_once(self) -> set[str]:
        """Operators that the library registered while it was loaded. They cannot be exchanged."""
        if not self.digest:
            return set()
        return self._described.keys() - self._generations[self.digest].schemas

    def knows(self, digest: str) -> bool:
        return digest in self._generations

    def link(self, request: Request, generation: store.Generation) -> Registration:
        """Load a generation into the process, where nothing calls it yet.

        BuildError: it cannot replace the present one.
        """
        if registration := self._generations.get(generation.manifest.digest):
            os.close(generation.fd)
            return registration
        if self.at_once:
            evidence = f"{min(self.at_once)} was registered without torch/library.h, "
            evidence += "by STABLE_TORCH_LIBRARY perhaps"
            raise report(f"cannot reload {request.name}", [evidence], "restart Python")
        library = loading.link_in(generation.path, generation.fd, request)
        registration = Registration(request.name, request.root, library)
        if refusal := registration.refusal(list(self._generations.values())):
            raise refusal
        return registration

    def exchange(self, request: Request, generation: store.Generation, new: Registration) -> None:
        """Make a generation the one that is called. BuildError: nothing has changed."""
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
        self.library._show(generation.path, handles.handles(self._described, home))


_loaded: list[Live] = []
_one_at_a_time = threading.RLock()
# In a forked child, the thread that holds it may not exist. (The standard library's locks do the
# same.)
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)


def obtain(request: Request, build: bool = True) -> Library | None:
    """Load the library for a request, building it if need be; None if not built and `build` is
    False.
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
            except BuildError as error:  # the C library here may be too old for it
                if not build or _live(request) in _loaded:
                    raise
                refusals = [" ".join(map(str.strip, str(error).splitlines()[:2]))]
        if not build:
            return None
        if refusals and (library := _with_objects(request)):
            return library
        for why in refusals:
            from ..progress import say

            say(
                f"building {request.name} from its sources; "
                f"what the wheel brings does not fit: {why}"
            )
        try:
            return _build(request, reasons)
        except KeyboardInterrupt as stop:
            # Who pressed Ctrl-C needs no traceback.
            raise stop.with_traceback(None) from None


def _with_objects(request: Request) -> Library | None:
    """Load a library of the objects that a wheel brings, and of what depends on this PyTorch."""
    from ..ship import prebuilt

    mixed = prebuilt.with_objects(request)
    try:
        return mixed and obtain(mixed)
    except BuildError:  # a linker that is too old for them
        return None


def _find(
    request: Request, reasons: list[str], refusals: list[str]
) -> tuple[store.Generation | None, store.Generation | None]:
    """Return (the cache's generation for a request or None, else a wheel's or None).

    Args:
        request: what to find.
        reasons: gets why generations in the cache do not fit.
        refusals: gets why the wheel's does not fit.
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
        say(f"{problem}: {request.name} is what another one built")
    return cached, None


def reload(again: Callable[[Request], Request]) -> list[str]:
    """Exchange every loaded library whose inputs changed. Return their names.

    `again` returns a request in the present environment.

    If some fail, the others are exchanged, and the first error is raised: a BuildError, or another
    one, such as that of a CXX without its closing quotation mark.
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
    """The loaded libraries' own files, and the folders in which new ones would be found."""
    paths = set()
    for live in list(_loaded):
        request = live.request
        paths.add(request.root)
        paths.update(map(os.path.dirname, request.sources))
        paths.update(live.closure.own_files(request))
    return paths


def _live(request: Request) -> Live:
    """Return the loaded library of a request, or a new one. Name and place of the sources identify
    it.
    """
    for live in _loaded:
        if live.request.name == request.name and _origin(live.request) & _origin(request):
            return live
    return Live(request)


def _origin(request: Request) -> set[str]:
    """Return what identifies a library: its folder and sources, also by given names, which may be
    links.
    """
    return {request.root, *request.sources, *(request.given[0] if request.given else ())}


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
    from ..progress import Progress, say

    if request.cuda.fatal:
        raise report(
            f"cannot build {request.name} for CUDA", [request.cuda.reason], request.cuda.fix
        )
    for problem in folders.unreadable():
        say(problem)
    try:
        slot, problem = store.writable_slot(request)
    except OSError as error:
        raise explain(
            f"cannot build {request.name}", f"no folder can be written: {error}", request
        ) from None
    if problem:
        say(f"cannot write {problem}; using {slot} (set CALCOPS_CACHE to choose)")

    def waiting(holder):
        text = f"{{}}, which builds {request.name} ({{:.0f}} s)"
        return Progress("waiting for", lambda _: (text.format(*holder()), 0.0))

    try:
        with locks.locked(slot, waiting):
            if generation := store.find(request, reasons):  # somebody built it meanwhile
                return _load(request, generation)
            if request.cuda.gpus and not request.cuda.build:
                reason = f"{request.cuda.reason}: {request.cuda.fix}"
                say(f"{request.cuda.gpus[0]} is here, but {reason}; building for the CPU")
            if request.cuda.build and (old := old_driver(request)):
                say(str(old.error("what is built for CUDA cannot run here")))
            return compile_and(_publish, request, slot, reasons)
    except OSError as error:
        raise explain(f"cannot build {request.name}", str(error), request) from None


def compile_and(publish: Callable, request: Request, slot: str, reasons: Sequence[str] = ()):
    """Compile a library in a private folder of its slot.

    Return the result of publish(request, slot, folder, built, closure).
    """
    from ..cache import bounds, locks
    from ..compile import compiler
    from ..progress import Progress, say

    limit = bounds.bound()  # a wrong one is refused before the build
    title = f"building {request.name}"
    if reasons:  # why the last build does not fit
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
                first = _live(request) not in _loaded
                published = publish(request, slot, folder, built, closure)
                progress.outcome = f"built {request.name} in {progress.seconds():.1f} s"
            if first:  # a reload is not to wait for it
                bounds.prune(limit)
            return published
    evidence = "its sources changed while they were compiled, three times"
    raise report(f"cannot build {request.name}", [evidence], "wait until nothing writes to them")


def _publish(request: Request, slot: str, folder: str, built: str, closure: Closure) -> Library:
    # It is loaded from where it will stay, before anybody else finds it: a library that cannot be
    # loaded is not kept, and only a loaded one shows which operators it registers.
    from . import trial

    live = _live(request)
    generation = store.place(slot, folder, built, request, closure)
    try:
        at_once = live.at_once
        if not live.knows(generation.manifest.digest):
            at_once = trial.registered_at_once(request.name, lambda: live.link(request, generation))
        registration = live.link(request, generation)
        schemas = registration.schemas | {name: handles.live_schemas(name) for name in at_once}
        texts = handles.documentation(request.root) | registration.documentation()
        store.complete(generation, handles.describe(schemas, texts))
        exchanged = _exchange(live, request, generation, registration)
    except BaseException:
        shutil.rmtree(os.path.dirname(generation.path), ignore_errors=True)
        raise
    _warn_of_missing(request, registration, at_once)
    return exchanged


def _warn_of_missing(request: Request, registration: Registration, at_once: set[str]) -> None:
    """Print a line for each operator that the sources seem to offer and nobody can call."""
    from ..progress import say

    operators = {name.partition(" ")[0].partition(".")[0] for name in registration.impls}
    for name in sorted(operators - {""}):
        try:
            handles.packet(name)
        except AttributeError:
            say(
                f"{name} has a kernel in {request.name} and no schema: "
                f'm.def("{name.partition("::")[2]}(...) -> ...")'
            )
    if registration.names() or at_once:
        return
    include = re.compile(r"#\s*include\s*<(?:torch|ATen|calcops)/")
    if any(include.search(text_of(source)) for source in request.sources):
        how = "TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) does, or a calcops::Contract"
        say(f"{request.name} registers no operators: {how}")
