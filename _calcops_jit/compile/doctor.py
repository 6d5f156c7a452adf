"""`python -m calcops_jit doctor`: whether a build would succeed on this machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from .. import cuda, requests
from ..cache import folders, store
from ..request import MACHINE, Request, isa, processor_flag
from ..ship import prebuilt
from . import compiler, diagnosis, jobs


class Finding(SimpleNamespace):
    """One requirement of a build, and whether it is met."""

    what: str
    verdict: str  # "ok", "note" (builds succeed with restrictions), or "fail" (no build succeeds)
    evidence: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    """Yield a finding for each requirement."""
    yield _supported("Python", sys.version.split()[0], (3, 11), (3, 14))
    yield _supported("PyTorch", torch.__version__, (2, 10), (2, 15))
    yield _processor()
    try:
        request = requests.own()
    except ValueError as error:
        yield Finding(what="CUDA", verdict="fail", evidence=str(error), fix="unset CALCOPS_CUDA")
        return
    yield from _tools(request)
    yield _cuda(request)
    yield _cache()
    for problem in folders.unreadable():
        yield Finding(
            what="shared cache",
            verdict="note",
            evidence=problem,
            fix="chmod -R go+rX it, or take it out of CALCOPS_CACHE_READONLY",
        )
    yield Finding(what="compilers at once", verdict="ok", evidence=str(jobs.number()))
    yield _operators(request)


def _tools(request: Request) -> Iterator[Finding]:
    """Yield the problems that a build would have. If none prevents it, yield the tools, too."""
    ninja = compiler.find_ninja()
    failures = list(diagnosis.foresee(request, ninja))
    notes = [diagnosis.old_driver(request)]
    if not diagnosis.has_headers(request):
        notes.append(
            diagnosis.no_headers("sources with torch/extension.h include Python.h", request)
        )
    for problem in [*failures, *filter(None, notes)]:
        verdict = "fail" if problem in failures else "note"
        yield Finding(
            what=problem.cause, verdict=verdict, evidence=problem.evidence, fix=problem.fix
        )
    if not failures:
        version = diagnosis.answer(request, *request.compiler, "--version")
        yield Finding(what="C++ compiler", verdict="ok", evidence=version.partition("\n")[0])
        yield Finding(what="ninja", verdict="ok", evidence=ninja)


def _cuda(request: Request) -> Finding:
    choice = request.cuda
    if choice.build:
        evidence = f"{choice.home}, CUDA {choice.version}, for {cuda.arch_list(choice)}"
        return Finding(what="CUDA", verdict="ok", evidence=evidence)
    verdict = "fail" if choice.fatal else "note"
    return Finding(what="CUDA", verdict=verdict, evidence=choice.reason, fix=choice.fix)


def _operators(request: Request) -> Finding:
    reasons: list[str] = []
    library = store.find(request, reasons) or prebuilt.find(request, reasons)
    if library:
        return Finding(what="operators", verdict="ok", evidence=library.path)
    evidence = reasons[0] if reasons else "not built yet"
    fix = "python -m calcops_jit build"
    return Finding(what="operators", verdict="note", evidence=evidence, fix=fix)


def _supported(
    what: str, version: str, oldest: tuple[int, int], newest: tuple[int, int]
) -> Finding:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if oldest <= numbers <= newest:
        return Finding(what=what, verdict="ok", evidence=version)
    return Finding(
        what=what,
        verdict="note",
        evidence=version,
        fix="use {} {}.{} to {}.{}, with which this is tested".format(what, *oldest, *newest),
    )


def _processor() -> Finding:
    if isa():
        return Finding(what="processor", verdict="ok", evidence=f"{MACHINE}, {processor_flag()}")
    evidence = f"{MACHINE}; /proc/cpuinfo lists no extensions, as in some emulators, "
    evidence += f"so {processor_flag()} builds for any {MACHINE}"
    fix = f"export CALCOPS_CFLAGS={processor_flag('<its name>')}"
    return Finding(what="processor", verdict="note", evidence=evidence, fix=fix)


def _cache() -> Finding:
    folder = folders.own()[0]
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return Finding(
            what="cache",
            verdict="note",
            evidence=f"cannot write {folder}",
            fix="export CALCOPS_CACHE=<a folder of your own>",
        )
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return Finding(
            what="cache",
            verdict="fail",
            evidence=f"{folder} is mounted noexec",
            fix="export CALCOPS_CACHE=<a folder that is not noexec>",
        )
    free = shutil.disk_usage(folder).free
    fix = "export CALCOPS_CACHE=<a folder with space>" if free < 500e6 else ""
    evidence = f"{folders.own()[0]}, {free / 1e9:.1f} GB free"
    return Finding(what="cache", verdict="note" if fix else "ok", evidence=evidence, fix=fix)
