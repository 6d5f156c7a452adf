"""Precompiled headers: a source that is edited again and again parses PyTorch's headers only once.

The `#include <...>` lines with which a source begins are its *preamble*. After the first edit of
the source, a background process compiles the preamble with GCC. The process has the lowest priority
and outlives this one. The result is cached like an object. It is used until one of its headers
changes.
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

_ROOM = 2 << 30  # bytes that must be free on the disk for another precompiled header
_COMMENT = rb"//[^\n]*|/\*.*?\*/"
# The end of a line that goes on in the next one, also in a comment: a backslash or its trigraph.
_CONTINUED = rb"(?:\\|\?\?/)[ \t]*\r?\n"
_INCLUDE = rb"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>[ \t]*$"
_PYTORCH = re.compile(r"<(?:torch|ATen|c10)/")
# With these flags, GCC ignores a precompiled header, or the compiled source would be different.
_UNFIT = re.compile(r"(?<!\S)-(?:include|imacros|save-temps|no-integrated-cpp|fplugin|fmodules)")
# The parent ends at once, so that nobody waits for it. The child goes on in a session of its own.
_BACKGROUND = """
import os, pickle, sys
if os.fork(): os._exit(0)
os.setsid()
sys.path[:0] = sys.argv[1:]
from _calcops_jit.compile import precompiled
precompiled.make(*pickle.load(sys.stdin.buffer))
"""


def preamble(text: bytes, folders: list[str]) -> str:
    """Return the `#include <...>` lines with which a source begins; "" if none is PyTorch's.

    They end before the first header in `folders`, which are the project's. Its headers may have no
    include guards.
    """
    names: list[str] = []
    continuation = re.search(_CONTINUED, text)
    plain = text
    if continuation:  # only the lines before the one that goes on in the next line
        plain = text[: continuation.start()].rpartition(b"\n")[0]
    for line in re.sub(_COMMENT, b" ", plain, flags=re.DOTALL).splitlines():
        if not line.strip():
            continue
        include = re.match(_INCLUDE, line)
        if not include:
            break
        name = os.fsdecode(include[1])
        if any(os.path.isfile(f"{folder}/{name}") for folder in folders):
            break
        names.append(name)
    return _worthwhile("".join(f"#include <{name}>\n" for name in names))


def _worthwhile(text: str) -> str:
    """Return a preamble if it has a header of PyTorch's, else ""."""
    return text if re.search(_PYTORCH, text) else ""


def _shorter(text: str) -> str:
    """Return a preamble without its last line; "" if no header of PyTorch's is left."""
    return _worthwhile("".join(text.splitlines(keepends=True)[:-1]))


def strangers(request: Request, read: set[str]) -> set[str]:
    """Return the headers that must not be precompiled.

    The headers of PyTorch, the loader, the compiler and the distribution may be precompiled. Others
    may have no include guards, or other contents in another checkout.
    """
    path = request.environment.get("PATH", os.defpath)
    words = [word for word in request.compiler if not word.startswith("-")]
    compiler = shutil.which(words[-1], path=path)
    if not compiler:  # the last word is the value of a flag
        return read
    folders = [f"{request.unfold('@torch')}/include", request.unfold("@python")]
    folders += _compilers_folders(compiler, path)
    allowed = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    headers = set()
    for header in read:
        path = os.path.realpath(header)
        if path.startswith(f"{SHADOW}/"):  # it may be below the project's root
            continue
        if path.startswith(f"{request.root}/") or not path.startswith(allowed):
            headers.add(header)
    return headers


@functools.cache
def _compilers_folders(compiler: str, path: str) -> list[str]:
    """Return the folders that a compiler searches without flags and environment variables."""
    options = {"cwd": "/", "env": {"PATH": path, "LC_ALL": "C.UTF-8"}, "stdin": subprocess.DEVNULL}
    command = [compiler, "-E", "-v", "-x", "c++", os.devnull]
    output = os.fsdecode(subprocess.run(command, capture_output=True, **options).stderr)
    folders = [os.path.realpath(folder) for folder in toolchain.searched_folders(output)]
    # /usr/local/include may have any project's headers.
    return [folder for folder in folders if folder != "/usr/local/include"]


def _unit(request: Request, text: str) -> Request:
    """Return the Request of a precompiled preamble.

    Libraries of other names share the preamble if their other flags are the same.
    """
    unit = request.unit(f"preamble.{closure.digest(text.encode())[:16]}.h")
    unit.cflags = tuple(
        flag for flag in unit.cflags if not flag.startswith("-DTORCH_EXTENSION_NAME=")
    )
    return unit


class Preambles:
    """The precompiled headers that one build uses, and one that a later build should have."""

    def __init__(self, request: Request, folder: str, sources: dict[str, bool]):
        """Link the precompiled headers into the private folder of a build.

        `sources` is {source to compile: whether it was compiled before and then edited}.
        """
        self.used: dict[str, str] = {}  # {source: header}
        self._missing = ""  # the preamble to precompile
        self._locks: list[int] = []  # descriptors of the headers in use
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
            # The cache may have the preamble of another source, which begins with fewer lines.
            text = _shorter(text)
            while text and source not in self.used:
                self._use(request, folder, source, text)
                text = _shorter(text)

    def _use(self, request: Request, folder: str, source: str, text: str) -> bool:
        """Make a source use a precompiled preamble. Return False if the cache has none."""
        unit = _unit(request, text)
        name = unit.sources[0]
        if name not in self.used.values():  # store.find() hashes some hundreds of MB
            generation = store.find(unit)
            if not generation:
                return False
            self._locks.append(generation.fd)
            _write(f"{folder}/{name}", text)
            os.symlink(generation.path, f"{folder}/{name}.gch")
        self.used[source] = name
        return True

    def start(
        self, request: Request, slot: str, cflags: str, environment: dict[str, str], jobs: int
    ) -> None:
        """Start the background process for the missing header.

        It is started only if there are a second processor and room on the disk. `slot` is the
        library's. `cflags`, `environment` and `jobs` are those of its units.
        """
        if not self._missing or jobs < 2 or shutil.disk_usage(slot).free < _ROOM:
            return
        program = os.path.basename(os.path.realpath(sys.executable or ""))
        if not program.startswith("python"):  # a program that embeds Python may not know -c
            return
        cache = os.path.dirname(slot)
        if folders.is_last_resort(cache):  # this folder is removed when this process ends
            return
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = [os.path.dirname(package), os.path.dirname(os.path.dirname(torch.__file__))]
        options = {"cwd": "/", "env": environment, "stdin": subprocess.PIPE}
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (
            contextlib.suppress(OSError),
            subprocess.Popen([sys.executable, "-c", _BACKGROUND, *paths], **options) as process,
        ):
            arguments = (request, cache, self._missing, cflags, environment)
            process.communicate(pickle.dumps(arguments))

    def close(self) -> None:
        """Release the locks of the used headers, so that other processes may remove them."""
        for fd in self._locks:
            os.close(fd)


def make(
    request: Request, folder: str, text: str, cflags: str, environment: dict[str, str]
) -> None:
    """Precompile a preamble, without its last lines if these include a header in strangers().

    The result goes into the cache folder `folder`. Nothing is made if another process is making the
    same, or if the folder is gone.
    """
    os.nice(19)
    while text:
        has_stranger = _make(request, folder, text, cflags, environment)
        if not has_stranger:
            break
        text = _shorter(text)


def _make(
    request: Request, folder: str, text: str, cflags: str, environment: dict[str, str]
) -> bool:
    """Precompile a preamble. Return True if a header in strangers() forbids that."""
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

            flag_files = expected_inputs.in_flags(request, cflags)
            before = recording.Before(stage, set(flag_files))

            # The name of a library is not among the flags: see _unit().
            flags = re.sub(r"(?<!\S)-DTORCH_EXTENSION_NAME=\S+", "", cflags).replace("$$", "$")
            options = {
                "cwd": stage,
                "env": environment | {locks.MARK: stage},
                "stdin": subprocess.DEVNULL,
            }
            # First find strangers by preprocessing, which takes much less time than compiling.
            preprocess = f"-E -MD -MF {name}.o.d -MT {name}.o -o {os.devnull}"
            compile_ = f"-MD -MF {name}.o.d -o {name}.o"
            for step in (preprocess, compile_):
                command = f'"$@" {flags} -x c++-header {name} {step}'
                shell = ["sh", "-c", command, "sh", *request.compiler]
                if subprocess.run(shell, **options).returncode:
                    return False
                read, is_complete = dependency_files.of_unit(
                    unit, stage, f"{stage}/{name}", f"{name}.o"
                )
                if strangers(request, read):
                    return True

            recorder = recording.Recorder(unit, toolchain.search(unit, cflags), before)
            others = flag_files | toolchain.tools(request, cflags, "cc1plus", "as")
            unrun = toolchain.unrun(request, cflags, "cc1plus", "as")
            inputs = recorder.closure(read, others, is_complete, unrun)
            store.publish(slot, stage, f"{stage}/{name}.o", unit, inputs)
    if os.path.isdir(folder):
        bounds.prune_preambles(bounds.entries(folder))
    return False


def _write(path: str, text: str) -> None:
    with open(path, "wb") as file:
        file.write(os.fsencode(text))
