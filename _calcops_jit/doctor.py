"""What a build would find here, judged before it is tried: python -m calcops_jit doctor."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import build, cache, cuda, diagnosis, inputs, places, recipes


class Finding(NamedTuple):
    """`verdict` is ok, note (works, with less) or fail."""

    what: str
    verdict: str
    evidence: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    yield _supported("Python", sys.version.split()[0], (3, 11), (3, 14))
    yield _supported("PyTorch", torch.__version__, (2, 10), (2, 15))
    try:
        request = recipes.own()
    except ValueError as error:
        yield Finding("CUDA", "fail", str(error), "unset CALCOPS_CUDA")
        return
    ninja = build.find_ninja()
    failures = list(diagnosis.foresee(request, ninja))
    notes = [diagnosis.old_driver()]
    if not diagnosis.has_headers(request):
        notes.append("Python.h: No such file; sources with torch/extension.h include it")
    for problem in [*failures, *filter(None, notes)]:
        cause, evidence, fix = diagnosis.judge(problem, request)
        yield Finding(cause, "fail" if problem in failures else "note", evidence, fix)
    if not failures:
        version = diagnosis.answer(*inputs.compiler_words(), "--version")
        yield Finding("C++ compiler", "ok", version.partition("\n")[0])
        yield Finding("ninja", "ok", ninja)
    if request.cuda.build:
        found = f"{request.cuda.home}, CUDA {request.cuda.version}, for {cuda.arch_list(request.cuda)}"
        yield Finding("CUDA", "ok", found)
    else:
        cause, _, fix = request.cuda.reason.partition("; ")
        yield Finding("CUDA", "fail" if request.cuda.fatal else "note", cause, fix)
    yield _cache()
    for problem in places.unreadable():
        yield Finding("shared cache", "note", problem, "chmod -R go+rX it, or take it out of CALCOPS_CACHE_READONLY")
    yield Finding("compilers at once", "ok", os.environ.get("MAX_JOBS") or str(build.jobs()))
    if library := cache.find(request, reasons := []):
        yield Finding("operators", "ok", library.path)
    else:
        yield Finding("operators", "note", [*reasons, "not built yet"][0], "python -m calcops_jit build")


def _supported(what: str, version: str, oldest: tuple[int, int], newest: tuple[int, int]) -> Finding:
    if oldest <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= newest:
        return Finding(what, "ok", version)
    return Finding(
        what, "note", version, "use {} {}.{} to {}.{}, with which this is tested".format(what, *oldest, *newest)
    )


def _cache() -> Finding:
    folder = places.folders()[0]
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return Finding("cache", "note", f"cannot write {folder}", "export CALCOPS_CACHE=<a folder of your own>")
    free = shutil.disk_usage(folder).free
    noexec = ", noexec: libraries are loaded from memory" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""
    fix = "export CALCOPS_CACHE=<a folder with space>" if free < 500e6 else ""
    evidence = f"{places.folders()[0]}, {free / 1e9:.1f} GB free{noexec}"
    return Finding("cache", "note" if fix else "ok", evidence, fix)
