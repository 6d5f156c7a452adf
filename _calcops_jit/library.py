"""From a Request to a loaded library: found in the cache, or built there once however many processes ask."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable

from . import cache, inputs, loading, operators, places
from .diagnosis import BuildError, explain, old_driver, report

_loaded: list[loading.Live] = []
_one_at_a_time = threading.RLock()
# A thread that does not live on in a child may have it. (The standard library's own locks do the same.)
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)


def obtain(request: inputs.Request, build: bool = True) -> loading.Library | None:
    """The library for `request`. None only where it would have to be built and `build` is False."""
    with _one_at_a_time:
        reasons: list[str] = []
        try:
            found = cache.find(request, reasons)
        except OSError as error:
            raise report(f"cannot load {request.name}", [str(error)], "ulimit -n $(ulimit -H -n)") from None
        if found is None and build:
            return _build(request, reasons)
        return found and _load(request, found)


def reload(again: Callable[[inputs.Request], inputs.Request]) -> list[str]:
    """Exchanges every loaded library whose inputs changed; gives their names. Raises what failed first, at the end."""
    with _one_at_a_time:
        before = [(live, live.digest) for live in _loaded]
        failure = None
        for live, _ in before:
            try:
                obtain(again(live.request))
            except BuildError as error:
                failure = failure or error
        if failure:
            raise failure
        return [live.request.name for live, digest in before if live.digest != digest]


def project_files() -> set[str]:
    """The own files of the loaded libraries, and the folders in which new ones would be found."""
    found = set()
    for live in list(_loaded):
        request = live.request
        found |= {request.root, *map(os.path.dirname, request.sources), *live.closure.own_files(request)}
    return found


def _live(request: inputs.Request) -> loading.Live:
    """The one that `request` is a generation of. A library is its name and where it comes from."""
    for live in _loaded:
        if live.request.name == request.name and _origin(live.request) & _origin(request):
            return live
    return loading.Live(request)


def _origin(request: inputs.Request) -> set[str]:
    """Where a library comes from: its folder and its files, also by names that led elsewhere before a link changed."""
    return {request.root, *request.sources, *(request.given[0] if request.given else ())}


def _load(request: inputs.Request, generation: cache.Generation) -> loading.Library:
    live = _live(request)
    return _exchange(live, request, generation, live.bring_in(request, generation))


def _exchange(live, request, generation, registration) -> loading.Library:
    live.exchange(request, generation, registration)
    if live not in _loaded:
        _loaded.append(live)
    return live.library


def _build(request: inputs.Request, reasons: list[str]) -> loading.Library:
    from .progress import Progress, say

    if request.cuda.fatal:
        cause, _, remedy = request.cuda.reason.partition("; ")
        raise report(f"cannot build {request.name} for CUDA", [cause], remedy)
    for problem in places.unreadable():
        say(problem)
    try:
        slot, problem = cache.writable_slot(request)
    except OSError as error:
        raise explain(f"cannot build {request.name}", f"no folder can be written: {error}", request) from None
    if problem:
        say(f"cannot write {problem}; using {slot} (set CALCOPS_CACHE to choose)")

    def waiting(holder):
        text = f"{{}}, which builds {request.name} ({{:.0f}} s)"
        return Progress("waiting for", lambda _: (text.format(*holder()), 0.0))

    try:
        with cache.locked(slot, waiting):
            if found := cache.find(request, reasons):  # somebody built it meanwhile
                return _load(request, found)
            if request.cuda.gpus and not request.cuda.build:
                reason = request.cuda.reason.replace(";", ":")
                say(f"{request.cuda.gpus[0]} is here, but {reason}; building for the CPU")
            if request.cuda.build and (problem := old_driver()):
                say(explain("what is built for CUDA cannot run here", problem, request))
            return _compile(request, slot, reasons)
    except OSError as error:
        raise explain(f"cannot build {request.name}", str(error), request) from None


def _compile(request: inputs.Request, slot: str, reasons: list[str]) -> loading.Library:
    from . import build, usage
    from .eta import Eta
    from .progress import Progress, say

    limit = usage.bound()  # a wrong one is refused before the build
    title = f"building {request.name}"
    if why := reasons or cache.other_facts(request):  # the newest library there does not fit
        title += f" ({why[0].rpartition('/')[2] if reasons else why[0].partition(':')[0]})"
    alone = False
    for _ in range(3):
        with cache.staging(slot) as staging:
            eta = Eta(request, slot, staging)
            with Progress(title, eta.state) as progress:
                try:
                    built, closure = build.compile_library(request, slot, staging, alone)
                except inputs.Changed:
                    continue  # a source was saved while it was compiled
                except build.OutOfMemory:
                    alone = True
                    say("a compiler was killed, most likely for lack of memory: trying again with one at a time")
                    continue
                first = _live(request) not in _loaded
                library = _publish(request, slot, staging, built, closure)
                eta.learn()
                progress.outcome = f"built {request.name} in {progress.seconds():.1f} s"
            if first:  # a reload is not to wait for it
                usage.prune(limit)
            return library
    evidence = "its sources changed while they were compiled, three times"
    raise report(f"cannot build {request.name}", [evidence], "wait until nothing writes to them")


def _publish(request: inputs.Request, slot: str, staging: str, built: str, closure: inputs.Closure) -> loading.Library:
    # It is loaded from where it will stay, before anybody finds it there: what cannot be loaded is not kept, and what
    # it registers is only known then.
    from . import trial

    live = _live(request)
    generation = cache.place(slot, staging, built, request, closure)
    try:
        at_once = live.at_once
        if not live.knows(generation.manifest.digest):
            at_once = trial.registered_at_once(request.name, lambda: live.bring_in(request, generation))
        registration = live.bring_in(request, generation)
        schemas = registration.schemas | {name: operators.live_schemas(name) for name in at_once}
        cache.complete(generation, operators.describe(schemas, request.root))
        return _exchange(live, request, generation, registration)
    except BaseException:
        shutil.rmtree(os.path.dirname(generation.path), ignore_errors=True)
        raise
