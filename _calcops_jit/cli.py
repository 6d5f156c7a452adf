"""The commands `python -m calcops_jit build`, where, why, doctor, export, cache and clean."""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import __version__, build, cache, cuda, diagnosis, library, request, toolchain
from .errors import BuildError, report
from .inputs import digest, state_of
from .options import request_for
from .progress import say
from .request import CONTRACTS, LOADER, MACHINE, Request


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m calcops_jit", description="The operators' build and its cache."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    parsers = {}
    for function in (_build, _where, _why, _doctor, _export, _cache, _clean):
        name = function.__name__.removeprefix("_")
        parsers[name] = commands.add_parser(name, help=function.__doc__)
        parsers[name].set_defaults(function=function)
    parsers["where"].add_argument("--key", action="store_true", help="only the key for a CI cache")
    parsers["where"].add_argument("--cache", action="store_true", help="only the cache folder")
    for name in ("build", "why"):
        help_text = "a library that calcops_jit.load has built, instead of the operators"
        parsers[name].add_argument("name", nargs="?", help=help_text)
    parsers["doctor"].add_argument("--json", action="store_true", help="for programs")
    export = parsers["export"]
    export.add_argument("folder")
    export.add_argument(
        "--arch", help="build for these GPUs: as TORCH_CUDA_ARCH_LIST, such as '8.0;9.0+PTX'"
    )
    export.add_argument(
        "--isa",
        default="native",
        help="the processors, as the compiler's -march, on ARM -mcpu; default: this one",
    )
    options = parser.parse_args(arguments)
    try:
        return options.function(options) or 0
    except (BuildError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1


def _build(options: argparse.Namespace) -> None:
    """build the operators if need be, and print the library's path"""
    wanted = _request(options)
    # A wheel's library is for several processors. The user wants one for exactly this processor.
    found = cache.find(wanted) or build.built(wanted, [])
    print(found.path)


def _request(options: argparse.Namespace) -> Request:
    """Return the Request of the operators, or of the last build of a library of `load`."""
    if options.name in (None, "calcops"):
        return request.own()
    for manifest in cache.newest(options.name):
        return request_for(**manifest["asked"])
    names = {os.path.basename(slot)[:-17] for slot in cache.slots()} - {"calcops", "runtime"}
    what = f"no library `{options.name}` in {cache.folders()[0]}"
    evidence = f"there are: {', '.join(sorted(names)) or 'none'}"
    raise report(what, [evidence], f"calcops_jit.load({options.name!r}, ...) first")


def _where(options: argparse.Namespace) -> None:
    """print the cache folder and the library; builds nothing"""
    wanted = request.own()
    if options.key:
        print(_key(wanted))
    elif options.cache:
        print(cache.folders()[0])
    else:
        found = _find(wanted, [])
        choice = wanted.cuda
        print(f"cache    {cache.folders()[0]}")
        print(f"library  {found.path if found else 'not built yet: python -m calcops_jit build'}")
        reason = f"{choice.reason}; {choice.fix}"
        print(f"CUDA     {f'built with {choice.home}' if choice.build else reason}")
        print(f"key      {_key(wanted)}")


def _find(wanted: Request, reasons: list[str]) -> cache.Generation | None:
    return cache.find(wanted, reasons) or library.find_in_wheel(wanted, reasons)


def _key(wanted: Request) -> str:
    """Return a key for a CI cache. Equal sources on equal machines have equal keys."""
    contents = [wanted.slot, *map(state_of, wanted.programs)]
    for root in (wanted.root, LOADER, CONTRACTS):
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path.endswith((".h", ".cuh", ".cpp", ".cu", ".map")):
                contents += [wanted.fold(path), state_of(path)]
    return f"calcops-{digest(' '.join(contents).encode())[:20]}"


def _why(options: argparse.Namespace) -> int:
    """name the input that changed since the last build; 1 if there is one"""
    wanted = _request(options)
    reasons: list[str] = []
    found = _find(wanted, reasons)
    if found:
        print(f"nothing changed: {found.path}")
        return 0
    last = next(cache.newest(wanted.name), None)
    if not reasons and last:
        reasons = cache.differences(last["facts"], wanted.facts)
    print(reasons[0] if reasons else "it was never built")
    return 1


def _doctor(options: argparse.Namespace) -> int:
    """check whether a build would succeed here; 1 if it would fail"""
    findings = list(_findings())
    if options.json:
        keys = ("what", "verdict", "evidence", "fix")
        print(json.dumps([dict(zip(keys, finding)) for finding in findings], indent=2))
    else:
        for what, verdict, evidence, fix in findings:
            print(f"{verdict:4}  {what:17}  {evidence}")
            if fix:
                print(f"      fix: {fix}")
    return any(verdict == "fail" for _, verdict, _, _ in findings)


def _findings() -> Iterator[tuple[str, str, str, str]]:
    """Yield (what is required, verdict, evidence, fix).

    The verdict is "ok", "note" (builds succeed with restrictions), or "fail" (no build succeeds).
    """
    for what, version, oldest, newest in (
        ("Python", sys.version.split()[0], (3, 11), (3, 14)),
        ("PyTorch", torch.__version__, (2, 10), (2, 15)),
    ):
        is_tested = oldest <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= newest
        fix = "use {} {}.{} to {}.{}, with which this is tested".format(what, *oldest, *newest)
        yield what, "ok" if is_tested else "note", version, "" if is_tested else fix
    yield "processor", "ok", f"{MACHINE}, {request.processor_flag()}", ""
    try:
        wanted = request.own()
    except ValueError as error:
        yield "CUDA", "fail", str(error), "unset CALCOPS_CUDA"
        return
    problems = list(diagnosis.foresee(wanted))
    for cause, evidence, fix in problems:
        yield cause, "fail", evidence, fix
    if not problems:
        yield "C++ compiler", "ok", toolchain.version(wanted).partition("\n")[0], ""
        yield "ninja", "ok", toolchain.find_ninja(wanted), ""
    choice = wanted.cuda
    if choice.build:
        evidence = f"{choice.home}, CUDA {choice.version}, for {cuda.arch_list(choice)}"
        yield "CUDA", "ok", evidence, ""
    else:
        yield "CUDA", "fail" if choice.fatal else "note", choice.reason, choice.fix
    yield _cache_finding()
    yield "compilers at once", "ok", str(toolchain.jobs(wanted)), ""
    reasons: list[str] = []
    found = _find(wanted, reasons)
    if found:
        yield "operators", "ok", found.path, ""
    else:
        evidence = reasons[0] if reasons else "not built yet"
        yield "operators", "note", evidence, "python -m calcops_jit build"


def _cache_finding() -> tuple[str, str, str, str]:
    folder = cache.folders()[0]
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        fix = "export CALCOPS_CACHE=<a folder of your own>"
        return "cache", "note", f"cannot write {folder}", fix
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        fix = "export CALCOPS_CACHE=<a folder that is not noexec>"
        return "cache", "fail", f"{folder} is mounted noexec", fix
    free = shutil.disk_usage(folder).free
    fix = "export CALCOPS_CACHE=<a folder with space>" if free < 500e6 else ""
    evidence = f"{cache.folders()[0]}, {free / 1e9:.1f} GB free"
    return "cache", "note" if fix else "ok", evidence, fix


def _export(options: argparse.Namespace) -> None:
    """write a folder with the built operators, for C++ programs"""
    if options.arch:  # cuda.choose() reads these variables
        os.environ |= {"CALCOPS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": options.arch}
    wanted = request.own(options.isa)
    release = torch.__version__.partition("+")[0]
    libraries = "-ltorch_cpu -lc10"
    if wanted.cuda.build:
        libraries = f"-ltorch_cuda {libraries}"
    words = {
        "version": __version__,
        "release": release,
        "torch": os.path.dirname(torch.__file__),
        "standard": "20" if tuple(map(int, release.split(".")[:2])) >= (2, 13) else "17",
        "libraries": libraries,
    }
    templates = {
        "include/calcops.h": "include/calcops.h",
        "lib/pkgconfig/calcops.pc": "templates/calcops.pc",
        "lib/cmake/calcops/calcops-config.cmake": "templates/calcops-config.cmake",
    }
    found = cache.find(wanted) or build.built(wanted, [])
    files = {"lib/libcalcops.so": Path(found.path).read_bytes()}
    for target, template in templates.items():
        text = Path(LOADER, template).read_text()
        files[target] = re.sub("@(\\w+)@", lambda match: words[match[1]], text).encode()
    for name, content in files.items():
        path = Path(options.folder).absolute() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cache.write_whole(str(path), content)
    print(os.path.abspath(options.folder))


def _cache(options: argparse.Namespace) -> None:
    """list the libraries in the cache: size, last use"""
    for slot in cache.slots():
        for path in cache.generations(slot):
            size = sum(file.stat().st_size for file in os.scandir(path)) / 1e6
            used = time.localtime(os.path.getmtime(f"{path}/manifest"))
            print(f"{size:9.2f} MB  {time.strftime('%Y-%m-%d', used)}  {path}")
    for folder in filter(os.path.isdir, cache.folders()):
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.lstat().st_size for path in files) / 1e6
        print(f"{size:9.2f} MB with the objects of builds in {folder}")


def _clean(options: argparse.Namespace) -> None:
    """empty the cache"""
    busy = cache.clean()
    exception = f", but {len(busy)} in which a process builds" if busy else ""
    say(f"removed the libraries in {cache.folders()[0]}{exception}")
