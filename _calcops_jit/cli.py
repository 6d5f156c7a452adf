"""The commands of `python -m calcops_jit`."""

from __future__ import annotations

import argparse
import glob
import os
import re
import runpy
import sys
from pathlib import Path

import torch

from . import __version__, build, cache, cuda, prebuilt, request
from .inputs import digest, state_of
from .messages import BuildError, report, say
from .request import CONTRACTS, LOADER, Request


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m calcops_jit", description="The operators' build and its cache."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    parsers = {}
    for function in (_build, _test, _where, _why, _export, _prebuild, _clean):
        name = function.__name__.removeprefix("_")
        parsers[name] = commands.add_parser(name, help=function.__doc__)
        parsers[name].set_defaults(function=function)
    help_text = "only the key for a CI cache, which also depends on the sources in these folders"
    parsers["where"].add_argument("--key", nargs="*", metavar="FOLDER", help=help_text)
    help_text = "a library that calcops_jit.load has built, instead of the operators"
    for name in ("build", "where", "why", "prebuild"):
        parsers[name].add_argument("name", nargs="?", help=help_text)
    parsers["clean"].add_argument("name", nargs="?", help="one library, instead of all")
    parsers["export"].add_argument("folder")
    help_text = "another library that calcops_jit.load has built"
    parsers["export"].add_argument("name", nargs="*", help=help_text)
    _add_options_of_test(parsers["test"])
    options = parser.parse_args(arguments)
    try:
        status = options.function(options) or 0
        sys.stdout.flush()
        return status
    except (BuildError, ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _build(options: argparse.Namespace) -> None:
    """build the operators if needed, and print the library's path"""
    # A prebuilt library is for many processors. The user wants one for exactly this processor.
    print(_built(request_named(options.name)).path)


def _built(wanted: Request) -> cache.Build:
    return cache.find(wanted) or build.built(wanted, [])


def request_named(name: str | None) -> Request:
    """Return the Request of the operators, or of a library that was loaded by `load`.

    Libraries of other folders may have the same name. Then it is the one below this folder
    that has the shortest way to it.
    """
    if name in (None, "calcops"):
        return request.own()
    here = f"{os.getcwd()}/"
    known = cache.remembered(name)
    existing = [one for one in known if all(map(os.path.exists, one["sources"]))]
    below = [one for one in existing if all(path.startswith(here) for path in one["sources"])]
    candidates = below or existing or known[:1]
    if not candidates:
        entries = filter(cache.builds, cache.entries())
        names = {os.path.basename(entry)[:-17] for entry in entries} - {"calcops", "runtime"}
        what = f"no library `{name}` in {cache.folder()}"
        evidence = f"there are: {', '.join(sorted(names)) or 'none'}"
        fix = f"calcops_jit.load({name!r}, ...) first"
        raise report(what, [evidence], f"{fix}; if it is prebuilt, CALCOPS_CFLAGS=-march=native")
    if below:
        depth = min(one["sources"][0].count("/") for one in below)
        candidates = [one for one in below if one["sources"][0].count("/") == depth]
    sources = dict.fromkeys(one["sources"][0] for one in candidates)
    if len(sources) > 1:
        what = f"cannot choose one of several libraries `{name}`"
        raise report(what, list(sources), "cd to the folder of one")
    return request.request_for(**candidates[0])


# Options of `test` that are the options extra_... of load.
_EXTRA = "cflags", "cuda-cflags", "ldflags", "include-paths"


def _add_options_of_test(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = "sources, or the name of a library that calcops_jit.load has built"
    add("library", nargs="+", help=help_text)
    help_text = "names or patterns, with commas; default: those without a leading underscore"
    add("--operators", default="[!_]*", help=help_text)
    add("--seconds", type=float, default=60, help="processor seconds for each operator")
    add("--only", default="", metavar="CHECKS", help="names of checks, with commas")
    add("--seed", type=int, default=0, help="seed of the draws; the same seed repeats them")
    help_text = "a Python file with the dictionaries `reference` or `adjust` of calcops_jit.test"
    add("--cases", metavar="FILE", help=help_text)
    for name in _EXTRA:
        add(f"--{name}", action="append", default=[], help="as for calcops_jit.load, with extra_")


def _test(options: argparse.Namespace) -> int:
    """draw calls from contracts and check what operators promise; exit status 1 if a check fails"""
    from . import testing

    if options.cases:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.cases)))
    cases = runpy.run_path(options.cases) if options.cases else {}
    names = ("operators", "seconds", "only", "seed")
    settings = {name: getattr(options, name) for name in names}
    for name in (option.replace("-", "_") for option in _EXTRA):
        if getattr(options, name):
            settings[f"extra_{name}"] = getattr(options, name)
    functions = {name: cases.get(name) for name in ("reference", "adjust")}
    library = options.library[0] if len(options.library) == 1 else options.library
    return 0 if testing.test(library, **settings, **functions) else 1


def _where(options: argparse.Namespace) -> None:
    """print the cache folder and the library; builds nothing"""
    wanted = request_named(options.name)
    if options.key is not None:
        print(_key(wanted, options.key))
    else:
        found = _find(wanted, [])
        choice = wanted.cuda
        print(f"cache    {cache.folder()}")
        command = f"python -m calcops_jit build {options.name or ''}".rstrip()
        print(f"library  {found.path if found else f'not built yet: {command}'}")
        if choice.build:
            print(f"CUDA     {choice.home}, CUDA {choice.version}, for {cuda.arch_list(choice)}")
        else:
            reason = f", because {choice.reason}; {choice.fix}" if choice.reason else ""
            print(f"CUDA     none{reason}")
        print(f"key      {_key(wanted, [])}")


def _find(wanted: Request, reasons: list[str]) -> cache.Build | None:
    return cache.find(wanted, reasons) or prebuilt.find(wanted, reasons)


def _key(wanted: Request, folders: list[str]) -> str:
    """Return a key for a CI cache. Equal sources on equal machines have equal keys."""
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"calcops_jit where --key: expected a folder, got {folder}")
    contents = [wanted.entry, *map(state_of, wanted.programs)]
    for root in (wanted.root, LOADER, CONTRACTS, *folders):
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path.endswith((".h", ".hpp", ".cuh", ".map", *request.SOURCES)):
                contents += [os.path.relpath(path, root), state_of(path)]
    return f"calcops-{digest(' '.join(contents).encode())[:20]}"


def _why(options: argparse.Namespace) -> int:
    """name the input that changed since the last build; exit status 1 if there is one"""
    wanted = request_named(options.name)
    reasons: list[str] = []
    found = _find(wanted, reasons)
    if found:
        print(f"nothing changed: {found.path}")
        return 0
    last = cache.newest(wanted.name)
    if not reasons and last:
        reasons = cache.differences(last["facts"], wanted.facts)
    print(reasons[0] if reasons else "it was never built")
    return 1


def _export(options: argparse.Namespace) -> None:
    """write a folder with the built operators, for C++ programs"""
    wanted = request.own()
    release = torch.__version__.partition("+")[0]
    libraries = "-ltorch -ltorch_cpu -lc10"  # a package of AOTInductor needs libtorch.so
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
    libraries = [wanted, *map(request_named, options.name)]
    files = {f"lib/lib{each.name}.so": Path(_built(each).path).read_bytes() for each in libraries}
    words["names"] = " ".join(each.name for each in libraries)
    for target, template in templates.items():
        text = Path(LOADER, template).read_text()
        files[target] = re.sub("@(\\w+)@", lambda match: words[match[1]], text).encode()
    for name, content in files.items():
        path = Path(options.folder).absolute() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cache.write_whole(str(path), content)
    print(os.path.abspath(options.folder))


def _prebuild(options: argparse.Namespace) -> None:
    """put a library for machines without a compiler next to its sources"""
    print(prebuilt.write(request_named(options.name)))


def _clean(options: argparse.Namespace) -> None:
    """empty the cache"""
    removed, left = cache.clean(options.name)
    in_use = f", {left} in use or not removable" if left else ""
    say(f"libraries in {cache.folder()}: {removed} removed{in_use}")
