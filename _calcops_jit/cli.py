"""The commands `python -m calcops_jit build`, where, why, doctor, export, cache and clean."""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import time

from . import requests
from .cache import folders, store
from .cache.closure import digest, file_digest
from .errors import BuildError, report
from .live import library
from .progress import say
from .request import SHADOW, Request
from .ship import prebuilt


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m calcops_jit", description="The operators' build and its cache."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    build = commands.add_parser(
        "build", help="build the operators if need be, and print the library's path"
    )
    where = commands.add_parser(
        "where", help="print the cache folder and the library; builds nothing"
    )
    where.add_argument("--key", action="store_true", help="print only the key for a CI cache")
    where.add_argument("--cache", action="store_true", help="print only the cache folder")
    why = commands.add_parser(
        "why", help="name the inputs that changed since the last build; 1 if there are any"
    )
    for command in (build, why):
        command.add_argument(
            "name",
            nargs="?",
            help="a library that calcops_jit.load has built, instead of the operators",
        )
    doctor = commands.add_parser(
        "doctor", help="check whether a build would succeed here; 1 if it would fail"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    export = commands.add_parser(
        "export", help="write a folder with the built operators, for C++ programs"
    )
    export.add_argument("folder")
    export.add_argument(
        "--arch", help="build for these GPUs: as TORCH_CUDA_ARCH_LIST, such as '8.0;9.0+PTX'"
    )
    export.add_argument(
        "--isa",
        default="native",
        help="the processors, as the compiler's -march, on ARM -mcpu; default: this one",
    )
    cache = commands.add_parser(
        "cache", help="list the libraries in the cache: size, last use, whether a process uses it"
    )
    cache.add_argument("action", nargs="?", choices=["list"])
    commands.add_parser("clean", help="remove every library that no process uses from the cache")
    options = parser.parse_args(arguments)
    function = globals()[f"_{options.command}"]  # _build, _where and so on
    try:
        return function(options) or 0
    except (BuildError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1


def _build(options: argparse.Namespace) -> None:
    # A wheel's library is for several processors. The user wants one for exactly this processor.
    print(library.obtain(_request(options).but(prebuilt=False)).path)


def _request(options: argparse.Namespace) -> Request:
    """Return the Request of the operators, or of the last build of a library of `load`."""
    if options.name in (None, "calcops"):
        return requests.own()
    for manifest in store.newest(options.name):
        if manifest.asked:
            return requests.foreign(*manifest.asked)
    names = set()
    for folder in folders.own():
        for slot in folders.slots(folder):
            name = os.path.basename(slot)[:-17]  # without "-" and the 16 digits of request.slot
            if name != "calcops" and not name.startswith("unit-"):
                names.add(name)
    what = f"no library `{options.name}` in {folders.own()[0]}"
    evidence = f"there are: {', '.join(sorted(names)) or 'none'}"
    raise report(what, [evidence], f"calcops_jit.load({options.name!r}, ...) first")


def _key(request: Request) -> str:
    """Return a key for a CI cache. Equal sources on equal machines have equal keys."""
    contents = []
    for root in (request.root, SHADOW):
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path.endswith((".h", ".cuh", ".cpp", ".cu")):
                contents += [request.fold(path), file_digest(path)]
    contents += [file_digest(tool) for tool in request.tools]
    return f"{request.name}-{digest(' '.join([request.slot, *contents]).encode())[:20]}"


def _where(options: argparse.Namespace) -> None:
    request = requests.own()
    if options.key:
        print(_key(request))
    elif options.cache:
        print(folders.own()[0])
    else:
        built = store.find(request) or prebuilt.find(request, [])
        path = built.path if built else "not built yet: python -m calcops_jit build"
        cuda = f"{request.cuda.reason}; {request.cuda.fix}"
        if request.cuda.build:
            cuda = f"built with {request.cuda.home}"
        print(f"cache    {folders.own()[0]}")
        print(f"library  {path}")
        print(f"CUDA     {cuda}")
        print(f"key      {_key(request)}")


def _why(options: argparse.Namespace) -> int:
    request = _request(options)
    reasons: list[str] = []
    built = store.find(request, reasons) or prebuilt.find(request, reasons)
    if built:
        print(f"nothing changed: {built.path}")
        return 0
    lines = reasons[:1] or store.other_facts(request)
    print("\n".join(lines or ["it was never built"]))
    return 1


def _doctor(options: argparse.Namespace) -> int:
    from .compile import doctor

    findings = list(doctor.examine())
    if options.json:
        # vars() has no attribute that still has its default.
        print(json.dumps([{"fix": ""} | vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:4}  {finding.what:17}  {finding.evidence}")
            if finding.fix:
                print(f"      fix: {finding.fix}")
    return any(finding.verdict == "fail" for finding in findings)


def _export(options: argparse.Namespace) -> None:
    from .ship import export

    if options.arch:  # cuda.choose() reads these variables
        os.environ |= {"CALCOPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": options.arch}
    export.write(os.path.abspath(options.folder), options.isa)
    print(os.path.abspath(options.folder))


def _cache(options: argparse.Namespace) -> None:
    from .cache import bounds

    for folder in filter(os.path.isdir, [*folders.own(), *folders.shared()]):
        entries = bounds.entries(folder)
        for entry in entries:
            used = time.strftime("%Y-%m-%d", time.localtime(entry.used))
            state = "in use" if store.in_use(entry.path) else ""
            print(f"{entry.size / 1e6:9.2f} MB  {used}  {state:6}  {entry.path}")
        size = sum(entry.size for entry in entries) / 1e6
        print(f"{size:9.2f} MB in {len(entries)} libraries and objects in {folder}")


def _clean(options: argparse.Namespace) -> None:
    from .cache import bounds

    for folder, slots in bounds.clean():
        exception = f", but {len(slots)} that a process has or builds" if slots else ""
        say(f"removed the libraries in {folder}{exception}")
