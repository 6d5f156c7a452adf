"""python -m calcops_jit build | where | why | doctor | clean"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from . import cache, library, recipes
from .diagnosis import BuildError
from .progress import say


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calcops_jit", description="The operators' build and its cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("build", help="build the operators if need be, and print the library's path")
    where = commands.add_parser("where", help="print the cache folder and the library; builds nothing")
    where.add_argument("--key", action="store_true", help="print only the key for a CI cache")
    where.add_argument("--cache", action="store_true", help="print only the cache folder")
    commands.add_parser("why", help="name the inputs that changed since the last build; 1 if there are any")
    doctor = commands.add_parser("doctor", help="judge what a build would find here; 1 if it would fail")
    doctor.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("clean", help="remove every library from the cache")
    options = parser.parse_args(arguments)
    try:
        return globals()[f"_{options.command}"](options)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1


def _build(options: argparse.Namespace) -> int:
    print(library.obtain(recipes.own()).path)
    return 0


def _where(options: argparse.Namespace) -> int:
    request = recipes.own()
    if options.key:
        print(recipes.key(request))
    elif options.cache:
        print(cache.folders()[0])
    else:
        found = cache.find(request)
        print(f"cache    {cache.folders()[0]}")
        print(f"library  {found.path if found else 'not built yet: python -m calcops_jit build'}")
        print(f"CUDA     {'built with ' + request.cuda.home if request.cuda.build else request.cuda.reason}")
        print(f"key      {recipes.key(request)}")
    return 0


def _why(options: argparse.Namespace) -> int:
    request, reasons = recipes.own(), []
    if found := cache.find(request, reasons):
        print(f"nothing changed: {found.path}")
        return 0
    print("\n".join(reasons[:1] or cache.other_facts(request) or ["it was never built"]))
    return 1


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    findings = list(doctor.examine())
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:4}  {finding.what:17}  {finding.evidence}")
            if finding.fix:
                print(f"      fix: {finding.fix}")
    return any(finding.verdict == "fail" for finding in findings)


def _clean(options: argparse.Namespace) -> int:
    for folder in cache.folders():
        if os.path.isdir(folder):
            for slot in cache.slots(folder):
                shutil.rmtree(slot, ignore_errors=True)
            say(f"removed the libraries in {folder}")
    return 0
