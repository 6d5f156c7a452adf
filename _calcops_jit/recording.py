"""Which inputs a build has: the files that compilers and linker read, and the absent ones."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import subprocess
import sysconfig

import torch

from .inputs import TORCH, Inputs, program_states, state_of
from .request import HEADERS, SHADOW, Request
from .toolchain import find_ninja

# Headers of the C library, and folders of the compiler below the folder where it is installed.
_OF_SYSTEM = re.compile(r"/usr/include/(?:[^/]+|[^/]+-linux-gnu/.+)")
_OF_COMPILER = re.compile(r"/lib/(?:gcc|clang)/|/[^/]+-linux-gnu/")
_LINKED = re.compile(r"\.(?:a|o|so[.\d]*)$")
_TESTED = re.compile(rb"__has_(?:include(?:_next)?|embed)\b\s*\(\s*[<\"]([^>\"\n]+)[>\"]")


def inputs_of_build(
    request: Request, folder: str, before: dict[str, str], read: set[str], archive: str
) -> Inputs:
    """Return the inputs of the objects in a folder and of the link.

    If a file may have changed or appeared during the build, Inputs.check() refuses the inputs: its
    state is then "changed", or it is among the absent files.

    Args:
        request: what was built.
        folder: where; the file .unfinished in it was made when the build began.
        before: {file: its state before the build} of the files that were known then. The others are
            judged by the clock of the disk.
        read: the files that the compilers have read.
        archive: the path of the runtime, whose own inputs count.
    """
    start = os.stat(f"{folder}/.unfinished").st_ctime_ns
    read = {f"{SHADOW}/hidden.map", *read, *_linked(folder), *files_in_flags(request)}
    read = {path for path in read if path != archive and not path.startswith(f"{folder}/")}
    headers = {path for path in read if has_version(path, request) and path.startswith(TORCH)}
    states = {path: state_of(path) for path in read if not has_version(path, request)}
    for path, now in states.items():
        if path in before:
            has_changed = before[path] != now
        else:
            has_changed = now and os.stat(path).st_ctime_ns >= start
        if has_changed:
            states[path] = "changed"
    own = {path for path in states if not _LINKED.search(path)}
    folders = {*map(os.path.dirname, own), *_searched(request)}
    tested = _tested(own)
    names = tested | _names({*own, *headers} - {*request.sources}, folders)
    absent = set()
    for name in names:
        for searched in folders:
            path = f"{searched}/{name}"
            missing = _first_missing(searched, name)
            if missing:
                absent.add(missing)
            elif path not in states and os.stat(path).st_ctime_ns >= start:
                absent.add(path)  # it appeared after a compiler may have looked for it
            elif name in tested:
                states.setdefault(path, state_of(path))
    return Inputs(
        files={request.fold(path): state for path, state in sorted(states.items())},
        absent=sorted(map(request.fold, absent)),
        programs=program_states(request),
    )


def has_version(path: str, request: Request) -> bool:
    """Return True if a file comes with PyTorch, Python, CUDA, the compiler or the system."""
    if request.fold(path) != path:
        return False
    home = request.cuda.home
    is_of_cuda = bool(home) and path.startswith((f"{home}/", f"{os.path.realpath(home)}/"))
    if is_of_cuda or path.startswith(_versioned()) or _OF_SYSTEM.fullmatch(path):
        return True
    # A user's folder may have such a name, too.
    prefixes = [os.path.dirname(os.path.dirname(program)) for program in request.programs]
    return any(
        path.startswith(prefix) and _OF_COMPILER.match(path, len(prefix)) for prefix in prefixes
    )


@functools.cache
def _versioned() -> tuple[str, ...]:
    """Return the folders of software that is known by its version."""
    site = os.path.dirname(torch.__file__)
    python = sysconfig.get_path("include", "posix_prefix")
    system = "/lib /lib64 /usr/lib /usr/lib64 /usr/include/c++ /usr/include/linux".split()
    folders = [TORCH, site, f"{os.path.dirname(site)}/nvidia", python, *system]
    return tuple(f"{folder}/" for folder in folders)


def dependencies(request: Request, folder: str) -> dict[str, list[str]]:
    """Return {object: the files that were read for it} of the objects in a folder of builds."""
    command = [find_ninja(request), "-t", "deps"]
    output = subprocess.run(command, cwd=folder, capture_output=True).stdout
    found = {}
    for block in os.fsdecode(output).split("\n\n"):
        first, *files = block.strip("\n").split("\n")
        target = first.partition(": #deps")[0]
        if target and os.path.exists(f"{folder}/{target}"):
            found[target] = [os.path.join(folder, file[4:]) for file in files]
    return found


def _linked(folder: str) -> set[str]:
    """Return the files that the linker read."""
    with contextlib.suppress(OSError), open(f"{folder}/link.d", errors="replace") as file:
        names = re.findall(r"^ +(/.+?)(?: \\)?$", file.read(), re.MULTILINE)
        # lld escapes spaces, and GNU ld does not.
        names += [re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in names]
        return set(filter(os.path.isfile, names))
    return set()


def files_in_flags(request: Request, with_linker: bool = True) -> set[str]:
    """Return the files that flags name, such as @file."""
    words = _words_of_compilers(request)
    if with_linker:
        words += request.ldflags
    return set(filter(os.path.isfile, re.findall(r"/[^\s,='\"]+", " ".join(words))))


def _words_of_compilers(request: Request) -> list[str]:
    """Return the words of the compilers' flags, and after each @file those in it."""
    words = []
    waiting = [*request.compiler[1:], *request.cflags, *request.cuda_cflags]
    while waiting:
        for word in shlex.split(waiting.pop(0)):
            words.append(word)
            if word.startswith("@") and os.path.isfile(word[1:]) and words.count(word) == 1:
                with open(word[1:], errors="replace") as file:
                    waiting[:0] = file.read().split()
    return words


def _searched(request: Request) -> list[str]:
    """Return the folders without version in which the compilers may look for headers.

    These are all folders that flags name, in whatever form: -I/x, -I /x, -isystem, -Wp,-I,/x.
    """
    folders = list(request.include_paths[len(HEADERS) :])
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += request.environment.get(variable, "").split(":")
    for word in ",".join(_words_of_compilers(request)).split(","):
        folders.append(word[word.find("/") :].rstrip("/"))
    folders = [path for path in folders if path.startswith("/") and not os.path.isfile(path)]
    return [path for path in folders if not has_version(path, request)]


def _names(headers: set[str], folders: set[str]) -> set[str]:
    """Return the names by which a source can include headers."""
    include = f"{TORCH}/include"
    names = set()
    for folder in [*folders, include, f"{include}/torch/csrc/api/include"]:
        prefix = f"{folder}/"
        names.update(path.removeprefix(prefix) for path in headers if path.startswith(prefix))
    return names


def _tested(paths: set[str]) -> set[str]:
    """Return the names that __has_include tests in files."""
    names: set[str] = set()
    for path in filter(os.path.isfile, paths):
        with open(path, "rb") as file:
            names.update(map(os.fsdecode, _TESTED.findall(file.read())))
    return names


def _first_missing(folder: str, name: str) -> str:
    """Return the first path on the way from `folder` to `name` that is absent; "" if none is.

    If a folder has the name, return it with a slash at its end.
    """
    path = folder
    for part in name.split("/"):
        path = f"{path}/{part}"
        if not os.path.exists(path):
            return path
    return f"{path}/" if os.path.isdir(path) else ""
