"""Headers compiled ahead, so that a source that is edited again and again does not parse PyTorch's each time.

What a source includes first, its *preamble*, is compiled by GCC after the first edit of the source, in a background
process of lowest priority that outlives this one. The result is kept like an object, with a closure: it is used as long
as every header behind it is what it was.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys

import torch

from . import cache, cache_size, closure, compiler_reads, places, staging, toolchain
from .closure import Changed
from .errors import BuildError
from .request import CUDA_SUFFIXES, RUNTIME, SHADOW, Request

_ROOM = 2 << 30  # bytes that must be free on the disk for another one
_COMMENT = rb"//[^\n]*|/\*.*?\*/"
_INCLUDE = rb"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>[ \t]*$"
_PYTORCH = re.compile(r"(?:torch|ATen|c10)/")
# With these, GCC does not take a precompiled header, or takes one that is not the same.
_UNFIT = re.compile(r"(?<!\S)-(?:include|imacros|save-temps|no-integrated-cpp|fplugin|fmodules)")
# A process of its own session, whose parent need not wait for it.
_BACKGROUND = """
import os, pickle, sys
if os.fork(): os._exit(0)
os.setsid()
sys.path[:0] = sys.argv[1:]
import _calcops_jit.precompiled as precompiled
precompiled.make(*pickle.load(sys.stdin.buffer))
"""


def preamble(text: bytes, folders: list[str]) -> str:
    """The lines `#include <...>` with which a source begins, up to the first header in `folders`, the project's, which
    may have no include guard. "" if none is PyTorch's."""
    names: list[str] = []
    for line in re.sub(_COMMENT, b" ", text, flags=re.DOTALL).splitlines():
        if not line.strip():
            continue
        found = re.match(_INCLUDE, line)
        name = os.fsdecode(found[1]) if found else ""
        if not found or any(os.path.isfile(f"{folder}/{name}") for folder in folders):
            break
        names.append(name)
    return "".join(f"#include <{name}>\n" for name in names) if any(map(_PYTORCH.match, names)) else ""


def _unit(request: Request, text: str) -> Request:
    """The Request under which a precompiled preamble is kept; libraries with the same flags share it."""
    unit = request.unit(f"preamble.{closure.digest(text.encode())[:16]}.h")
    unit.cflags = tuple(flag for flag in unit.cflags if not flag.startswith("-DTORCH_EXTENSION_NAME="))
    return unit


class Preambles:
    """The precompiled headers that one build uses, and the one that it misses."""

    def __init__(self, request: Request, folder: str, sources: dict[str, bool]):
        """Puts them into the private folder of a build.

        sources   {source to compile: whether it was compiled before and then edited}"""
        self.used: dict[str, str] = {}  # {source: header}
        self._missing = ""
        self._held: list[int] = []
        if _UNFIT.search(" ".join(request.cflags)) or not toolchain.is_gnu(request):
            return
        folders = [path for path in compiler_reads.project_folders(request) if path != SHADOW]
        for source, edited in sources.items():
            if source == RUNTIME or source.endswith(CUDA_SUFFIXES):
                continue
            with open(source, "rb") as file:
                text = preamble(file.read(), folders)
            if not text:
                continue
            unit = _unit(request, text)
            name = unit.sources[0]
            if name in self.used.values():  # finding it means hashing some hundreds of MB
                self.used[source] = name
            elif found := cache.find(unit):
                self._held.append(found.fd)
                self.used[source] = name
                _write(f"{folder}/{name}", text)
                os.symlink(found.path, f"{folder}/{name}.gch")
            elif edited:
                self._missing = self._missing or text

    def start(self, request: Request, slot: str, cflags: str, environment: dict[str, str], jobs: int) -> None:
        """Starts the background process for the missing header, given a second processor and room on the disk.

        slot   of the library
        cflags   of its units"""
        if not self._missing or jobs < 2 or shutil.disk_usage(slot).free < _ROOM:
            return
        program = os.path.basename(os.path.realpath(sys.executable or ""))
        if not program.startswith("python") or places.is_last_resort(os.path.dirname(slot)):
            return  # a program that embeds Python would be started; a private folder goes with this process
        paths = [os.path.dirname(os.path.dirname(os.path.abspath(file))) for file in (__file__, torch.__file__)]
        options = {"cwd": "/", "env": environment, "stdin": subprocess.PIPE}
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (
            contextlib.suppress(OSError),
            subprocess.Popen([sys.executable, "-c", _BACKGROUND, *paths], **options) as p,
        ):
            p.communicate(pickle.dumps((request, os.path.dirname(slot), self._missing, cflags, environment)))

    def close(self) -> None:
        """Lets others remove what was used."""
        for fd in self._held:
            os.close(fd)


def make(request: Request, folder: str, text: str, cflags: str, environment: dict[str, str]) -> None:
    """Precompiles a preamble into the cache `folder`, unless another process is doing so."""
    os.nice(19)
    unit = _unit(request, text)
    slot = cache.slot_path(folder, unit)
    with staging.locked_if_free(slot) as free, contextlib.suppress(Changed, BuildError):
        if not free or cache.find(unit):
            return
        with staging.stage(slot) as stage:
            name = unit.sources[0]
            _write(f"{stage}/{name}", text)
            named = compiler_reads.named(request, cflags)
            before = compiler_reads.Before(stage, set(named))
            flags = re.sub(r"(?<!\S)-DTORCH_EXTENSION_NAME=\S+", "", cflags).replace("$$", "$")
            command = f'"$@" {flags} -MD -MF {name}.o.d -x c++-header {name} -o {name}.o'
            options = {"cwd": stage, "env": environment | {staging.MARK: stage}, "stdin": subprocess.DEVNULL}
            if subprocess.run(["sh", "-c", command, "sh", *request.compiler], **options).returncode:
                return
            recorder = compiler_reads.Recorder(unit, toolchain.search(unit, cflags), before)
            read, told = compiler_reads.of_unit(unit, stage, f"{stage}/{name}", f"{name}.o")
            others = named | toolchain.tools(request, cflags, "cc1plus", "as")
            cache.publish(slot, stage, f"{stage}/{name}.o", unit, recorder.closure(read, others, told))
    cache_size.prune_preambles(cache_size.entries(folder))


def _write(path: str, text: str) -> None:
    with open(path, "wb") as file:
        file.write(os.fsencode(text))
