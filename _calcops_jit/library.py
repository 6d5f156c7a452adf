"""From a Request to a loaded library: found in the cache, or built there once however many processes ask."""

from __future__ import annotations

import os

from . import cache, inputs, loading, operators
from .diagnosis import report

_loaded: dict[str, loading.Library] = {}  # by name: operators are registered once in a process


def obtain(request: inputs.Request, build: bool = True) -> loading.Library | None:
    """The library for `request`. None only where it would have to be built and `build` is False."""
    reasons: list[str] = []
    found = cache.find(request, reasons)
    if found is None and build:
        return _build(request, reasons)
    return found and _load(request, found)


def _load(request: inputs.Request, generation: cache.Generation) -> loading.Library:
    if live := _live(request, generation.manifest.digest):
        os.close(generation.fd)
        return live
    loading.link_in(generation.fd, generation.path)
    _loaded[request.name] = loading.Library(generation)
    return _loaded[request.name]


def _live(request: inputs.Request, digest: str) -> loading.Library | None:
    live = _loaded.get(request.name)
    if live and live.digest != digest:
        raise _already_live(request.name, live)
    return live


def _already_live(name: str, live: loading.Library) -> Exception:
    return report(
        f"cannot load {name}: an earlier build is live in this process", [live.path], "restart Python"
    )


def _build(request: inputs.Request, reasons: list[str]) -> loading.Library:
    from .progress import Progress, say

    if live := _loaded.get(request.name):
        raise _already_live(request.name, live)
    if request.cuda.fatal:
        cause, _, remedy = request.cuda.reason.partition("; ")
        raise report(f"cannot build {request.name} for CUDA", [cause], remedy)
    try:
        slot, problem = cache.writable_slot(request)
    except OSError as error:
        raise report(
            f"cannot build {request.name}: no folder can be written",
            [str(error)],
            "set CALCOPS_CACHE to a folder that can be written",
        ) from None
    if problem:
        say(f"cannot write {problem}; using {slot} (set CALCOPS_CACHE to choose)")

    def waiting(holder):
        def state(_: float) -> str:
            who, seconds = holder()
            return f"waiting for {who}, which builds {request.name} ({seconds:.0f} s)"

        return Progress(state)

    with cache.locked(slot, waiting):
        if found := cache.find(request, reasons):  # somebody built it meanwhile
            return _load(request, found)
        if request.cuda.gpus and not request.cuda.build:
            say(
                f"{request.cuda.gpus[0]} is here, but {request.cuda.reason.replace(';', ':')}; building for the CPU"
            )
        try:
            return _compile(request, slot, reasons)
        except OSError as error:
            raise report(
                f"cannot build {request.name}: {error.strerror}",
                [str(error)],
                "set CALCOPS_CACHE to a folder with space that can be written",
            ) from None


def _compile(request: inputs.Request, slot: str, reasons: list[str]) -> loading.Library:
    from . import build
    from .progress import Progress, say

    title = f"building {request.name}"
    if reasons:  # why the newest library there does not fit
        title += f" ({reasons[0].rpartition('/')[2]})"
    for _ in range(3):
        with cache.staging(slot) as staging:
            with Progress(lambda seconds: f"{title} {build.done(staging)} {seconds:.0f} s") as progress:  # noqa: B023
                try:
                    built, closure = build.compile_library(request, slot, staging)
                except inputs.Changed:
                    continue  # a source was saved while it was compiled
                live = _publish(request, slot, staging, built, closure)
            say(f"built {request.name} in {progress.seconds():.1f} s")
            return live
    raise report(
        f"cannot build {request.name}",
        ["its sources changed while they were compiled, three times"],
        "wait until nothing writes to them",
    )


def _publish(
    request: inputs.Request, slot: str, staging: str, built: str, closure: inputs.Closure
) -> loading.Library:
    # Loaded before it is published: only then are its operators known, and what cannot be loaded is not kept. The
    # renames move the very file that is live here.
    before = operators.registered()
    fd, _ = cache.read_regular(built)
    loading.link_in(fd, f"{request.name}.so")
    described = operators.describe(operators.registered() - before, request.root)
    generation = cache.publish(slot, staging, built, request, described, closure)
    _loaded[request.name] = loading.Library(generation)
    return _loaded[request.name]
