"""What a build depends on.

A `Request` is everything known before the compiler runs; its digest names the slot in the cache. A `Closure` is
everything the compiler and the linker read, as they report it; it is kept with the library and compared again at
every import: stat first, content only where stat differs.

Paths are kept with their roots replaced by tokens, so a checkout, a virtual environment or a cache can move.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace

import torch

from . import cuda

FORMAT = 4
COMPILER_VARIABLES = (
    "CC COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH GCC_EXEC_PREFIX LIBRARY_PATH LD_RUN_PATH"
    " NVCC_APPEND_FLAGS NVCC_PREPEND_FLAGS SOURCE_DATE_EPOCH"
).split()
# They answer for a compiler by rules of their own, and what they keep is kept here anyway.
_WRAPPERS = ("ccache", "sccache")
# What -march=native turns on begins so; the other words in /proc/cpuinfo come and go with kernels.
_ISA = tuple(
    "sse ssse avx amx fma bmi f16c aes vaes pclmul vpclmul gfni sha adx abm popcnt movbe cx16 lahf xsave rdrnd rdseed"
    " prefetchw 3dnowprefetch clflushopt clwb movdir enqcmd serialize waitpkg sm3 sm4 apx".split()
)
_STAMP = struct.Struct("<qqQQ")
_SIZE = 32  # of a stamp in bytes, and of a digest in characters
_GONE = bytes(_SIZE)  # which no file has
# A file system's clock may tick so seldom: a second change within a tick leaves the same stat behind.
_TICK_NS = 2_000_000_000


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def file_digest(file: int | str) -> str:
    """Of a path, or of all that an open descriptor still has to give, in pieces that a processor's cache holds."""
    found = hashlib.sha256()
    with open(file, "rb", buffering=0, closefd=isinstance(file, str)) as opened:
        while piece := opened.read(65536):
            found.update(piece)
    return found.hexdigest()[:32]


def text_of(path: str) -> str:
    """What a file says; "" where it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def real_path(path: str) -> str:
    """`path` with its folder resolved, but not the file: the compiler searches beside the name it was given."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def isa() -> str:
    with open("/proc/cpuinfo", "rb") as file:  # the first processor is enough, and 300 of them are slow to print
        first = file.read(8192).decode(errors="replace")
    flags = first.partition("\nflags")[2].partition("\n")[0]
    return " ".join(sorted(w for w in flags.split() if w.startswith(_ISA)))


class Request(SimpleNamespace):
    """One library to build. `root` is the folder that may move; sources and include paths are absolute."""

    name: str
    root: str
    sources: tuple[str, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    cuda: cuda.Choice = cuda.Choice()
    verbose: bool = False
    python: str = ""  # the extension suffix, where the library may call Python
    asked: tuple = ()  # the arguments of recipes.foreign
    file: str = ""  # what is built; NAME.so unless this is one of its units
    given: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # see places()

    def but(self, **changes) -> Request:
        """The same with other values, looked at anew. (A dataclass would take longer to make than all of this.)"""
        return Request(**{name: getattr(self, name) for name in Request.__annotations__} | changes)

    def again(self) -> Request:
        """The same as the environment, and the links on the way to its files, are now."""
        return self.but(**(places(*self.given) if self.given else {}))

    def unit(self, source: str) -> Request:
        """One source of this library: its object is kept like a library."""
        name = f"unit-{os.path.basename(source)}"
        unit = self.but(name=name, sources=(source,), ldflags=(), file="unit.o")
        unit.environment, unit.compiler, unit.tools, unit.roots = (  # found already
            self.environment,
            self.compiler,
            self.tools,
            self.roots,
        )
        return unit

    @property
    def output(self) -> str:
        return self.file or f"{self.name}.so"

    @cached_property
    def environment(self) -> dict[str, str]:
        """As it is now, for the key and for the compilers; without what would change what they do for us."""
        # Another thread may take out a variable: os.environ.copy() would raise KeyError.
        now = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        for name in ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"):  # for those a compiler forgets -MD
            now.pop(name, None)
        # Where c++ is a script that calls one of these, and where nvcc finds it under another name.
        return now | {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}

    @cached_property
    def compiler(self) -> list[str]:
        return compiler_words(self.environment)

    @cached_property
    def roots(self) -> list[tuple[str, str]]:
        """(token, folder) pairs; more than one spelling of a folder may have the same token."""
        torch_folder = os.path.dirname(torch.__file__)
        pairs = [("@root", self.root), ("@torch", os.path.realpath(torch_folder)), ("@torch", torch_folder)]
        pairs.append(("@loader", os.path.dirname(os.path.realpath(__file__))))
        if self.cuda.home:
            pairs += [("@cuda", os.path.realpath(self.cuda.home)), ("@cuda", self.cuda.home)]
        if self.python == "":  # as sysconfig.get_path("include", "posix_prefix") has it, which reads a file first
            python = f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
            pairs.append(("@python", os.path.join(sys.base_prefix, "include", python)))
        return pairs

    @cached_property
    def _innermost_first(self) -> list[tuple[str, str]]:
        return sorted(self.roots, key=lambda pair: -len(pair[1]))

    def fold(self, path: str) -> str:
        for token, folder in self._innermost_first:
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
            "compiler arguments": [w for w in self.compiler if w.startswith("-")],
            "environment": {k: self.environment[k] for k in COMPILER_VARIABLES if self.environment.get(k)},
        }
        if self.cuda.build:
            facts |= {"CUDA": self.cuda.version, "GPU architectures": self.cuda.arches or list(self.cuda.gpus)}
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
        words = [w for w in self.compiler if not w.startswith("-") and "=" not in w]
        if self.cuda.build:
            words.append(os.path.join(self.cuda.home, "bin", "nvcc"))
        found = [shutil.which(w, path=self.environment.get("PATH")) for w in words]
        return [os.path.realpath(f) for f in found] if all(found) else []


def places(sources: tuple[str, ...], include_paths: tuple[str, ...]) -> dict:
    """A Request's places, from absolute paths whose folders may be links to others tomorrow."""
    found = tuple(map(real_path, sources))
    root = os.path.commonpath([os.path.dirname(path) for path in found])
    return {
        "given": (sources, include_paths),
        "root": root if root != "/" else os.path.dirname(found[0]),  # a folder that can move, and not everything
        "sources": found,
        "include_paths": tuple(map(os.path.realpath, include_paths)),
    }


def words_of(variable: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """An environment variable's words, as a shell would take them."""
    text = environment.get(variable, "")
    if not any(mark in text for mark in "'\"\\"):
        return text.split()
    import shlex  # which takes longer than the rest of a Request

    try:
        return shlex.split(text)
    except ValueError as problem:
        raise ValueError(f"calcops_jit: expected {variable} as a shell's words, got {text!r}: {problem}") from None


def compiler_words(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command of the compiler itself: CXX, or c++, without a wrapper that keeps objects of its own."""
    words: list[str] = []
    wrapped = False
    for word in words_of("CXX", environment):
        wrapped = os.path.basename(word) in _WRAPPERS or wrapped and "=" in word  # `ccache KEY=VALUE g++`
        words += [] if wrapped else [word]
    words = words or words_of("CXX", environment) or ["c++"]
    # A c++ that is a link to a wrapper means the next c++ on PATH.
    for folder in environment.get("PATH", os.defpath).split(os.pathsep) if _is_wrapper(words[0], environment) else ():
        candidate = os.path.join(folder, os.path.basename(words[0]))
        if os.access(candidate, os.X_OK) and not _is_wrapper(candidate, environment):
            return [candidate, *words[1:]]
    return words


def _is_wrapper(command: str, environment: Mapping[str, str]) -> bool:
    found = shutil.which(command, path=environment.get("PATH"))
    return found is not None and os.path.basename(os.path.realpath(found)) in _WRAPPERS


def stamp_of(path: str) -> bytes:
    """What stat says: when the file and its inode changed, size, inode."""
    try:
        s = os.stat(path)
    except OSError:
        return _GONE
    return _STAMP.pack(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino)


# Nobody edits what is PyTorch's and the system's, and libraries have most of it in common: looked at once a second.
_THEIRS = ("@torch", "@cuda", "@python", "/usr/")
_seen, _seen_ns = {}, 0


def is_theirs(folded: str) -> bool:
    """Whether it is PyTorch's or the system's."""
    return folded.startswith(_THEIRS)


def changed_ns(stamp: bytes) -> int:
    return _STAMP.unpack(stamp)[1]


def young(stamp: bytes) -> bytes:
    """The stamp of a file that may still change without a trace: no file has it, so contents are compared."""
    return bytes(255 - byte for byte in stamp)


def is_long_ago(time_ns: int) -> bool:
    """What was seen then and is the same now has outlived a tick of any clock: the next change leaves another stamp."""
    return time.time_ns() - time_ns > _TICK_NS


def is_old(stamp: bytes, now_ns: int) -> bool:
    """Likewise, if the clock of its file system is right."""
    return max(_STAMP.unpack(stamp)[:2]) < now_ns - _TICK_NS


class Changed(Exception):
    """The first input that is not what it was."""


class Closure(SimpleNamespace):
    """What a build read, and what it would have read had it been there. Folders, files and tools are folded.

    (Strings, because a few large ones are parsed sooner than many small objects.)"""

    files: dict[str, str]  # {folder: lines of names}
    digests: str  # of the files, in this order
    stamps: bytes  # likewise
    tools: list[str]  # the compilers' real paths
    absent: dict[str, list[str]]  # {folder: [its stamp in hex, lines of names that must not appear there]}
    looked: int  # when, by this machine's clock

    @staticmethod
    def of(entries: dict[str, tuple[bytes, str]], tools, absent, looked: int) -> Closure:
        """From {file: (stamp, digest)}."""
        # The project's own come first: it is they that change.
        paths = sorted(entries, key=lambda path: (not path.startswith("@root"), path.rpartition("/")))
        files: dict[str, str] = {}
        for folder, _, name in (path.rpartition("/") for path in paths):
            files[folder] = f"{files[folder]}\n{name}" if folder in files else name
        stamps, digests = b"".join(entries[p][0] for p in paths), "".join(entries[p][1] for p in paths)
        return Closure(files=files, digests=digests, stamps=stamps, tools=tools, absent=absent, looked=looked)

    def entries(self) -> dict[str, tuple[bytes, str]]:
        """{file: (stamp, digest)}"""
        paths = [f"{folder}/{name}" for folder, names in self.files.items() for name in names.split("\n")]
        at = range(0, _SIZE * len(paths), _SIZE)
        return {p: (self.stamps[i : i + _SIZE], self.digests[i : i + _SIZE]) for p, i in zip(paths, at)}

    def check(self, request: Request) -> bool:
        """Raises Changed at the first difference. True: a stat differed where the content did not, write it down."""
        global _seen_ns
        tools = request.tools
        for old, new in zip(self.tools, map(request.fold, tools), strict=False):
            if old != new and self.entries()[old][1] != file_digest(request.unfold(new)):
                raise Changed(f"compiler {new} is not {old}")
        if tools and len(tools) != len(self.tools):
            raise Changed("the compiler command changed")
        # Where there is no compiler, what belongs to it need not be there either.
        compared = ("",) if tools else ("@root", "@torch", "@loader")
        now, restamped, end = time.time_ns(), False, 0
        seen_young = not 0 <= now - self.looked  # the clock was set back

        def fresher(stamp: bytes, before: bytes, theirs: bool) -> bytes:
            old = is_old(stamp, now) if theirs else before == young(stamp) and is_long_ago(self.looked)
            return stamp if old else young(stamp)

        if not 0 <= now - _seen_ns < 1_000_000_000:
            _seen.clear()
            _seen_ns = now
        for folder, lines in self.files.items():
            names = lines.split("\n")
            start, end = end, end + _SIZE * len(names)
            if not folder.startswith(compared):
                continue
            prefix = request.unfold(folder) + "/"
            paths = [prefix + name for name in names]
            theirs = is_theirs(folder)
            stamps = [_seen.get(path) or stamp_of(path) for path in paths] if theirs else [*map(stamp_of, paths)]
            _seen.update(zip(paths, stamps) if theirs else ())
            if b"".join(stamps) == self.stamps[start:end]:
                continue  # mostly; what follows takes longer
            for at, path, stamp in zip(range(start, end, _SIZE), paths, stamps):
                if stamp == self.stamps[at : at + _SIZE]:
                    continue
                if stamp == _GONE or file_digest(path) != self.digests[at : at + _SIZE]:
                    raise Changed(f"{path} {'is gone' if stamp == _GONE else 'changed'}")
                before = self.stamps[at : at + _SIZE]
                if (written := fresher(stamp, before, theirs)) != before:
                    self.stamps = self.stamps[:at] + written + self.stamps[at + _SIZE :]
                    restamped, seen_young = True, seen_young or written != stamp
        for folder, entry in self.absent.items():
            path = request.unfold(folder)
            stamp = stamp_of(path)
            if stamp.hex() == entry[0] or not folder.startswith(compared):
                continue
            if new := next((name for name in entry[1].split("\n") if os.path.lexists(f"{path}/{name}")), ""):
                raise Changed(f"{path}/{new} is new")
            before = bytes.fromhex(entry[0])
            if (written := fresher(stamp, before, is_theirs(folder))) != before:
                entry[0], restamped, seen_young = written.hex(), True, seen_young or written != stamp
        if seen_young:
            self.looked, restamped = now, True
        return restamped

    def own_files(self, request: Request) -> list[str]:
        """The project's, without the toolchain's and PyTorch's."""
        return [request.unfold(path) for path in self.entries() if not (is_theirs(path) or path.startswith("@loader"))]


def merged(closures: list[Closure]) -> Closure:
    """The closure of a library from those of its units. Changed: they saw different states of a file."""
    entries, absent = {}, {}
    for closure in closures:
        for path, (stamp, content) in closure.entries().items():
            if entries.setdefault(path, (stamp, content))[1] != content:
                raise Changed(path)
        for folder, (stamp, names) in closure.absent.items():
            before = absent.get(folder, [stamp, names])
            both = set(before[1].split("\n")) | set(names.split("\n"))
            absent[folder] = [stamp if stamp == before[0] else "", "\n".join(sorted(both))]
    return Closure.of(entries, closures[0].tools, absent, max(closure.looked for closure in closures))
