"""What a build would find here, judged before it is tried: python -m calcops_jit doctor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from typing import NamedTuple

import torch

from . import build, cache, cuda, diagnosis, inputs, recipes

_ENOUGH_BYTES = 500_000_000


class Finding(NamedTuple):
    """`verdict` is ok, note (works, with less) or fail."""

    what: str
    verdict: str
    evidence: str
    fix: str = ""


def examine() -> list[Finding]:
    return [_python(), _torch(), *_tools(), _headers(), _cuda(), _cache(), _jobs(), _library()]


def _python() -> Finding:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 14)
    fix = "" if supported else "use Python 3.11 to 3.14"
    return Finding("Python", "ok" if supported else "note", sys.version.split()[0], fix)


def _torch() -> Finding:
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    supported = (2, 10) <= release <= (2, 15)
    evidence = (
        f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}"
    )
    return Finding(
        "PyTorch", "ok" if supported else "note", evidence, "" if supported else "tested: 2.10 to 2.15"
    )


def _tools() -> list[Finding]:
    words, ninja = inputs.compiler_words(), build.find_ninja()
    if problem := diagnosis.missing_tools("operators", words, ninja):
        title, evidence, fix = str(problem).splitlines()
        return [Finding(title.partition(": ")[2], "fail", evidence.strip(), fix.partition("fix: ")[2])]
    version = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    if version.returncode != 0:
        return [
            Finding("C++ compiler", "fail", version.stderr.strip()[:200], "set CXX to a compiler that runs")
        ]
    return [
        Finding("C++ compiler", "ok", f"{shutil.which(words[0])}: {version.stdout.partition(chr(10))[0]}"),
        Finding("ninja", "ok", ninja),
    ]


def _headers() -> Finding:
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if os.path.exists(header):
        return Finding("Python headers", "ok", header)
    cause, remedy = next(
        (cause, remedy) for _, cause, remedy in diagnosis.CAUSES if cause.startswith("Python's")
    )
    return Finding("Python headers", "note", f"{cause}; sources with torch/extension.h need them", remedy)


def _cuda() -> Finding:
    try:
        choice = cuda.choose()
    except ValueError as error:
        return Finding("CUDA", "fail", str(error), "CALCOPS_CUDA=1 or CALCOPS_CUDA=0, or unset it")
    if choice.build:
        return Finding("CUDA", "ok", f"{choice.home}, CUDA {choice.version}, for {cuda.arch_list(choice)}")
    cause, _, fix = choice.reason.partition("; ")
    return Finding("CUDA", "fail" if choice.fatal else "note", cause, fix)


def _cache() -> Finding:
    folder = cache.folders()[0]
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return Finding("cache", "note", f"cannot write {folder}", "set CALCOPS_CACHE to a folder of your own")
    free = shutil.disk_usage(folder).free
    problem = "set CALCOPS_CACHE to a folder with space" if free < _ENOUGH_BYTES else ""
    noexec = ", noexec: libraries are loaded from memory" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""
    evidence = f"{cache.folders()[0]}, {free / 1e9:.1f} GB free{noexec}"
    return Finding("cache", "note" if problem else "ok", evidence, problem)


def _jobs() -> Finding:
    return Finding("compilers at once", "ok", os.environ.get("MAX_JOBS") or str(build.jobs()))


def _library() -> Finding:
    reasons: list[str] = []
    try:
        if found := cache.find(recipes.own(), reasons):
            return Finding("operators", "ok", found.path)
    except ValueError as error:
        reasons = [str(error)]
    return Finding("operators", "note", (reasons or ["not built yet"])[0], "python -m calcops_jit build")
