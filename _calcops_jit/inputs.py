"""What a build depends on.

A `Request` is everything known before the compiler runs; its digest names the slot in the cache. A closure is
everything the compiler and the linker read, as they report it; it is kept with the library and compared again at
every import: stat first, content only where stat differs.

Paths are kept with their roots replaced by tokens, so a checkout, a virtual environment or a cache can move.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import sysconfig
import time
from dataclasses import dataclass, field
from functools import cached_property

import torch

from . import cuda

FORMAT = 2
_COMPILER_VARIABLES = (
    "CC COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH GCC_EXEC_PREFIX LIBRARY_PATH LD_RUN_PATH"
    " NVCC_APPEND_FLAGS NVCC_PREPEND_FLAGS SOURCE_DATE_EPOCH"
).split()
# A change within this time of the moment it was looked at may leave the same stat behind.
_RACY_NS = 2_000_000_000
# What -march=native turns on begins so; the other words in /proc/cpuinfo come and go with kernels.
_ISA = tuple(
    "sse ssse avx amx fma bmi f16c aes vaes pclmul vpclmul gfni sha adx abm popcnt movbe cx16 lahf xsave rdrnd rdseed"
    " prefetchw 3dnowprefetch clflushopt clwb movdir enqcmd serialize waitpkg sm3 sm4 apx".split()
)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def real_path(path: str) -> str:
    """`path` with its folder resolved, but not the file: the compiler searches beside the name it was given."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def isa() -> str:
    with open(
        "/proc/cpuinfo", "rb"
    ) as file:  # the first processor is enough, and 300 of them are slow to print
        first = file.read(8192).decode(errors="replace")
    flags = first.partition("\nflags")[2].partition("\n")[0]
    return " ".join(sorted(w for w in flags.split() if w.startswith(_ISA)))


@dataclass(eq=False, repr=False)  # which are slow to make, at every import
class Request:
    """One library to build. `root` is the folder that may move; sources and include paths are absolute."""

    name: str
    root: str
    sources: tuple[str, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    cuda: cuda.Choice = field(default_factory=cuda.Choice)
    verbose: bool = False
    python: str = ""  # the extension suffix, where the library may call Python
    file: str = ""  # what is built; NAME.so unless this is one of its units

    def unit(self, source: str) -> Request:
        """One source of this library: its object is kept like a library."""
        name = f"unit-{os.path.basename(source)}"
        return dataclasses.replace(self, name=name, sources=(source,), ldflags=(), file="unit.o")

    @cached_property
    def roots(self) -> list[tuple[str, str]]:
        """(token, folder) pairs; more than one spelling of a folder may have the same token."""
        torch_folder = os.path.dirname(torch.__file__)
        pairs = [("@root", self.root), ("@torch", os.path.realpath(torch_folder)), ("@torch", torch_folder)]
        pairs.append(("@loader", os.path.dirname(os.path.realpath(__file__))))
        if self.cuda.home:
            pairs += [("@cuda", os.path.realpath(self.cuda.home)), ("@cuda", self.cuda.home)]
        if self.python == "":
            pairs.append(("@python", sysconfig.get_path("include", "posix_prefix")))
        return pairs

    def fold(self, path: str) -> str:
        for token, folder in self.roots:
            if path == folder or path.startswith(folder + "/"):
                return token + path[len(folder) :]
        return path

    def unfold(self, path: str) -> str:
        if path.startswith("@"):
            token, slash, rest = path.partition("/")
            return dict(reversed(self.roots))[token] + slash + rest
        return path

    @cached_property
    def facts(self) -> dict:
        flags = [*self.cflags, *self.cuda_cflags, *self.ldflags]
        fold_flags = lambda flags: [flag.replace(self.root + "/", "@root/") for flag in flags]  # noqa: E731
        facts = {
            "format": FORMAT,
            "name": self.name,
            "sources": [self.fold(s) for s in self.sources],
            "include paths": [self.fold(i) for i in self.include_paths],
            "C++ flags": fold_flags(self.cflags),
            "CUDA flags": fold_flags(self.cuda_cflags),
            "linker flags": fold_flags(self.ldflags),
            "torch version": [torch.__version__, torch.version.git_version, torch.version.debug],
            "torch folder": os.path.realpath(os.path.dirname(torch.__file__)),  # the library's rpath names it
            "compiler arguments": [w for w in compiler_words() if w.startswith("-")],
            "environment": {k: os.environ[k] for k in _COMPILER_VARIABLES if os.environ.get(k)},
        }
        if self.cuda.build:
            facts |= {
                "CUDA": self.cuda.version,
                "GPU architectures": self.cuda.arches or list(self.cuda.gpus),
            }
        if any("native" in flag for flag in flags):
            facts["CPU instruction set"] = isa()
        if self.python:
            facts["Python"] = self.python
        return facts

    @cached_property
    def slot(self) -> str:
        return digest(json.dumps(self.facts, sort_keys=True).encode())[:16]

    @cached_property
    def tools(self) -> list[str]:
        """The compilers by real path; empty when one is not there, and then the tools cannot be compared."""
        words = [w for w in compiler_words() if not w.startswith("-")]
        if self.cuda.build:
            words.append(os.path.join(self.cuda.home, "bin", "nvcc"))
        found = [shutil.which(w) for w in words]
        return [os.path.realpath(f) for f in found] if all(found) else []


def compiler_words() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def stamp_of(path: str) -> list[int] | None:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return [s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino]


def _settled(stamp: list[int] | None, now_ns: int) -> list[int] | None:
    return stamp if stamp and max(stamp[0], stamp[1]) < now_ns - _RACY_NS else None


class Changed(Exception):
    """The first input that is not what it was."""


@dataclass(eq=False, repr=False)
class Closure:
    """files: {folder: {name: [stamp, digest]}}; absent: {folder: [stamp, names]}, names which must not appear there;
    tools: the compilers' real paths. Folders and tools are folded."""

    files: dict[str, dict[str, list]]
    absent: dict[str, list]
    tools: list[str]

    def check(self, request: Request) -> bool:
        """Raises Changed at the first difference. True: a stat differed where the content did not, write it down."""
        now = time.time_ns()
        restamped = False
        if tools := request.tools:
            for old, new in zip(self.tools, map(request.fold, tools), strict=False):
                if old != new and self._recorded(old) != file_digest(request.unfold(new)):
                    raise Changed(f"compiler {new} is not {old}")
            if len(tools) != len(self.tools):
                raise Changed("the compiler command changed")
        # Where there is no compiler, what belongs to it need not be there either.
        portable = () if tools else ("@root", "@torch", "@loader")
        for folder, names in self.files.items():
            if portable and not folder.startswith(portable):
                continue
            prefix = request.unfold(folder) + "/"
            for name, entry in names.items():
                stamp = stamp_of(prefix + name)
                if stamp != entry[0] or stamp is None:
                    if stamp is None or file_digest(prefix + name) != entry[1]:
                        raise Changed(f"{prefix}{name} {'is gone' if stamp is None else 'changed'}")
                    if stamp := _settled(stamp, now):
                        entry[0], restamped = stamp, True
        for folder, entry in self.absent.items():
            if portable and not folder.startswith(portable):
                continue
            path = request.unfold(folder)
            stamp = stamp_of(path)
            if stamp != entry[0] or stamp is None:
                for name in entry[1].split("\n"):
                    if os.path.lexists(f"{path}/{name}"):
                        raise Changed(f"{path}/{name} is new")
                if stamp := _settled(stamp, now):
                    entry[0], restamped = stamp, True
        return restamped

    def own_files(self, request: Request) -> list[str]:
        """The project's, without the toolchain's and PyTorch's."""
        own = [(request.unfold(f), names) for f, names in self.files.items() if f.startswith("@root")]
        return [f"{folder}/{name}" for folder, names in own for name in names]

    def _recorded(self, path: str) -> str:
        folder, name = os.path.split(path)
        return self.files[folder][name][1]

    @property
    def contents(self) -> list:
        """What the library is made of, without times and tools' places: with the slot it names the library."""
        return sorted(entry[1] for names in self.files.values() for entry in names.values())


_HAS_INCLUDE = rb"__has_include(?:_next)?\s*\(\s*[<\"]([^>\"\n]+)[>\"]"


class Recorder:
    """Makes closures of what compilers read; what they have in common is looked at once.

    `search` is the folders in which they look for headers, in order."""

    def __init__(self, request: Request, search: list[str]):
        self._request, self._search, self._now = request, search, time.time_ns()
        self._looked_at: dict[str, tuple[list, set[str]]] = {}
        self._missing: dict[tuple[str, str], tuple[str, str]] = {}

    def closure(self, paths: set[str]) -> Closure:
        request = self._request
        files: dict[str, dict[str, list]] = {}
        probed: set[str] = set()
        own: dict[str, None] = {}  # folders of the project's own files: a quoted include looks there first
        for path in sorted(paths):
            entry, names = self._look(path)
            folder, name = os.path.split(request.fold(path))
            files.setdefault(folder, {})[name] = entry
            probed |= names
            if folder.startswith("@root"):
                own[os.path.dirname(path)] = None
        order = list(dict.fromkeys([*own, *self._search]))
        for path in paths:
            probed.update(path[len(folder) + 1 :] for folder in order if path.startswith(folder + "/"))
        missing: dict[str, set[str]] = {}
        for name in probed:
            for folder in order:
                if (below := self._first_missing(folder, name)) is None:
                    break
                missing.setdefault(below[0], set()).add(below[1])
        absent = {
            request.fold(folder): [_settled(stamp_of(folder), self._now), "\n".join(sorted(names))]
            for folder, names in sorted(missing.items())
        }
        return Closure(files, absent, [request.fold(t) for t in request.tools])

    def _look(self, path: str) -> tuple[list, set[str]]:
        """A file's entry in a closure, and the names that it asks for with __has_include."""
        if path not in self._looked_at:
            stamp = _settled(stamp_of(path), self._now)
            with open(path, "rb") as file:
                content = file.read()
            names = set()
            if b"__has_include" in content and b"\0" not in content:
                names = {name.decode(errors="replace") for name in re.findall(_HAS_INCLUDE, content)}
            self._looked_at[path] = ([stamp, digest(content)], names)
        return self._looked_at[path]

    def _first_missing(self, folder: str, name: str) -> tuple[str, str] | None:
        """(existing folder, name in it) that must appear before folder/name can; None: folder/name is there."""
        if (folder, name) not in self._missing:
            below, parts = folder, name.split("/")
            while not os.path.isdir(below):
                below, part = os.path.split(below)
                parts.insert(0, part)
            found = None
            for part in parts:
                if not os.path.lexists(f"{below}/{part}"):
                    found = below, part
                    break
                below = f"{below}/{part}"
            self._missing[folder, name] = found
        return self._missing[folder, name]


def merged(closures: list[Closure]) -> Closure:
    """The closure of a library from those of its units. They agree: each was compared with the files just now."""
    files: dict[str, dict[str, list]] = {}
    absent: dict[str, list] = {}
    for closure in closures:
        for folder, names in closure.files.items():
            files.setdefault(folder, {}).update(names)
        for folder, (stamp, names) in closure.absent.items():
            before = absent.get(folder, (stamp, ""))
            both = set(before[1].split("\n")) | set(names.split("\n"))
            absent[folder] = [stamp if stamp == before[0] else None, "\n".join(sorted(both - {""}))]
    return Closure(files, absent, closures[0].tools)
