"""Headers compiled ahead, so that a source that is edited again and again does not parse PyTorch's
each time.

What a source includes first, its *preamble*, is compiled by GCC after the first edit of the source,
in a background process of lowest priority that outlives this one. The result is kept like an
object, with a closure: it is used as long as every header behind it is what it was.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import shutil
import subprocess
import sys

import torch

from ..cache import bounds, closure, folders, locks, store
from ..cache.closure import Changed
from ..errors import BuildError
from ..request import CUDA_SUFFIXES, RUNTIMES, SHADOW, Request
from . import dependency_files, expected_inputs, recording, toolchain

_ROOM = 2 << 30  # bytes that must be free on the disk for another one
_COMMENT = rb"//[^\n]*|/\*.*?\*/"
_CONTINUED = rb"(?:\\|\?\?/)[ \t]*\r?\n"  # the next line belongs to this one, also in a comment
_INCLUDE = rb"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>[ \t]*$"
_PYTORCH = re.compile(r"<(?:torch|ATen|c10)/")
# With these, GCC does not take a precompiled header, or takes one that is not the same.
_UNFIT = re.compile(r"(?<!\S)-(?:include|imacros|save-temps|no-integrated-cpp|fplugin|fmodules)")
# A process of its own session, whose parent need not wait for it.
_BACKGROUND = """
import os, pickle, sys
if os.fork(): os._exit(0)
os.setsid()
sys.path[:0] = sys.argv[1:]
from _calcops_jit.compile import precompiled
precompiled.make(*pickle.load(sys.stdin.buffer))
"""


def preamble(text: bytes, folders: list[str]) -> str:
    """The lines `#include <...>` with which a source begins, up to the first header in `folders`,
    the project's, which may have no include guard. "" if none is PyTorch's.
    """
    names: list[str] = []
    first, *continued = re.split(_CONTINUED, text, maxsplit=1)
    if continued:
        first = first.rpartition(b"\n")[0]
    for line in re.sub(_COMMENT, b" ", first, flags=re.DOTALL).splitlines():
        if not line.strip():
            continue
        found = re.match(_INCLUDE, line)
        name = os.fsdecode(found[1]) if found else ""
        if not found or any(os.path.isfile(f"{folder}/{name}") for folder in folders):
            break
        names.append(name)
    return _worthwhile("".join(f"#include <{name}>\n" for name in names))


def _worthwhile(text: str) -> str:
    """The preamble, if it has a header of PyTorch's."""
    return text if re.search(_PYTORCH, text) else ""


def _shorter(text: str) -> str:
    """The preamble without its last line."""
    return _worthwhile("".join(text.splitlines(keepends=True)[:-1]))


def strangers(request: Request, read: set[str]) -> set[str]:
    """The headers that are neither PyTorch's nor the loader's, the compiler's and the
    distribution's. They may have no include guard, and two checkouts may have different ones of
    one name.
    """
    path = request.environment.get("PATH", os.defpath)
    word = [word for word in request.compiler if not word.startswith("-")][-1]
    compiler = shutil.which(word, path=path)
    if not compiler:  # the word belongs to a flag
        return read
    folders = [f"{request.unfold('@torch')}/include", request.unfold("@python")]
    folders += _compilers_folders(compiler, path)
    allowed = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    own, loaders = f"{request.root}/", f"{SHADOW}/"  # which a project may lie around
    real = {header: os.path.realpath(header) for header in read}
    return {
        header
        for header in read
        if not real[header].startswith(loaders)
        and (real[header].startswith(own) or not real[header].startswith(allowed))
    }


@functools.cache
def _compilers_folders(compiler: str, path: str) -> list[str]:
    """The folders that a compiler searches by itself: without anybody's flags and variables."""
    options = {"cwd": "/", "env": {"PATH": path, "LC_ALL": "C.UTF-8"}, "stdin": subprocess.DEVNULL}
    command = [compiler, "-E", "-v", "-x", "c++", os.devnull]
    said = subprocess.run(command, capture_output=True, **options).stderr
    listed = re.search(r"search starts here:\n(.*)End of search list", os.fsdecode(said), re.DOTALL)
    found = (
        [os.path.realpath(line.strip()) for line in listed[1].splitlines() if line[:1] == " "]
        if listed
        else []
    )
    # Whose headers are anybody's.
    return [folder for folder in found if folder != "/usr/local/include"]


def _unit(request: Request, text: str) -> Request:
    """Return the Request of a precompiled preamble. Libraries with the same flags share it."""
    unit = request.unit(f"preamble.{closure.digest(text.encode())[:16]}.h")
    unit.cflags = tuple(
        flag for flag in unit.cflags if not flag.startswith("-DTORCH_EXTENSION_NAME=")
    )
    return unit


class Preambles:
    """The precompiled headers that one build uses, and the one that it misses."""

    def __init__(self, request: Request, folder: str, sources: dict[str, bool]):
        """Puts them into the private folder of a build.

        sources   {source to compile: whether it was compiled before and then edited}
        """
        self.used: dict[str, str] = {}  # {source: header}
        self._missing = ""
        self._held: list[int] = []
        if _UNFIT.search(" ".join(request.cflags)) or not toolchain.is_gnu(request):
            return
        folders = [path for path in expected_inputs.project_folders(request) if path != SHADOW]
        for source, edited in sources.items():
            if source in RUNTIMES or source.endswith(CUDA_SUFFIXES):
                continue
            with open(source, "rb") as file:
                text = preamble(file.read(), folders)
            if not text:
                continue
            if not self._use(request, folder, source, text) and edited:
                self._missing = self._missing or text
            while source not in self.used and (text := _shorter(text)):
                self._use(request, folder, source, text)

    def _use(self, request: Request, folder: str, source: str, text: str) -> bool:
        """Has a source use a precompiled preamble. False: there is none."""
        unit = _unit(request, text)
        name = unit.sources[0]
        if name not in self.used.values():  # finding it means hashing some hundreds of MB
            found = store.find(unit)
            if not found:
                return False
            self._held.append(found.fd)
            _write(f"{folder}/{name}", text)
            os.symlink(found.path, f"{folder}/{name}.gch")
        self.used[source] = name
        return True

    def start(
        self, request: Request, slot: str, cflags: str, environment: dict[str, str], jobs: int
    ) -> None:
        """Starts the background process for the missing header, given a second processor and room
        on the disk.

        slot   of the library
        cflags   of its units
        """
        if not self._missing or jobs < 2 or shutil.disk_usage(slot).free < _ROOM:
            return
        program = os.path.basename(os.path.realpath(sys.executable or ""))
        if not program.startswith("python") or folders.is_last_resort(os.path.dirname(slot)):
            # A program that embeds Python would be started; a private folder goes with this
            # process.
            return
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = [os.path.dirname(package), os.path.dirname(os.path.dirname(torch.__file__))]
        options = {"cwd": "/", "env": environment, "stdin": subprocess.PIPE}
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (
            contextlib.suppress(OSError),
            subprocess.Popen([sys.executable, "-c", _BACKGROUND, *paths], **options) as p,
        ):
            p.communicate(
                pickle.dumps((request, os.path.dirname(slot), self._missing, cflags, environment))
            )

    def close(self) -> None:
        """Lets others remove what was used."""
        for fd in self._held:
            os.close(fd)


def make(
    request: Request, folder: str, text: str, cflags: str, environment: dict[str, str]
) -> None:
    """Precompiles the part of a preamble that has no header of the project into the cache `folder`,
    unless another process is doing so, or somebody removed the folder.
    """
    os.nice(19)
    while text and _make(request, folder, text, cflags, environment):
        text = _shorter(text)


def _make(
    request: Request, folder: str, text: str, cflags: str, environment: dict[str, str]
) -> bool:
    """Precompiles a preamble. True: it has a header of the project."""
    unit = _unit(request, text)
    slot = store.slot_path(folder, unit)
    try:
        os.mkdir(slot, 0o755)
    except FileExistsError:
        pass
    except FileNotFoundError:
        return False
    with locks.locked_if_free(slot) as free, contextlib.suppress(Changed, BuildError):
        if not free or store.find(unit):
            return False
        with locks.stage(slot) as stage:
            name = unit.sources[0]
            _write(f"{stage}/{name}", text)
            named = expected_inputs.in_flags(request, cflags)
            before = recording.Before(stage, set(named))
            flags = re.sub(r"(?<!\S)-DTORCH_EXTENSION_NAME=\S+", "", cflags).replace("$$", "$")
            options = {
                "cwd": stage,
                "env": environment | {locks.MARK: stage},
                "stdin": subprocess.DEVNULL,
            }
            # The headers are known before they are compiled, which takes much longer.
            for step in (
                f"-E -MD -MF {name}.o.d -MT {name}.o -o {os.devnull}",
                f"-MD -MF {name}.o.d -o {name}.o",
            ):
                command = f'"$@" {flags} -x c++-header {name} {step}'
                if subprocess.run(
                    ["sh", "-c", command, "sh", *request.compiler], **options
                ).returncode:
                    return False
                read, told = dependency_files.of_unit(unit, stage, f"{stage}/{name}", f"{name}.o")
                if strangers(request, read):
                    return True
            recorder = recording.Recorder(unit, toolchain.search(unit, cflags), before)
            others = named | toolchain.tools(request, cflags, "cc1plus", "as")
            unrun = toolchain.unrun(request, cflags, "cc1plus", "as")
            store.publish(
                slot, stage, f"{stage}/{name}.o", unit, recorder.closure(read, others, told, unrun)
            )
    if os.path.isdir(folder):
        bounds.prune_preambles(bounds.entries(folder))
    return False


def _write(path: str, text: str) -> None:
    with open(path, "wb") as file:
        file.write(os.fsencode(text))
