"""What a build has read, and whether it is still the same.

One rule: PyTorch, Python, CUDA, the compiler and the C library are known by their versions, which
are facts of a request. Every other file is compared by its content at every check. These are the
project's sources and headers, which are few and small. A check reads no clock.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import stat
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from types import SimpleNamespace

# This module does not import PyTorch: a start of LAMMPS imports it.
_INSTALLED = os.path.dirname(find_spec("torch").origin)
TORCH = os.path.realpath(_INSTALLED)
# A larger file, such as a compiler or a library, is known by its size and time.
_LARGE = 1_000_000
_DEFAULT = ("/usr/local/include", "/usr/include")  # where compilers look for headers at last
# Headers of the C library, and folders of the compiler below the folder where it is installed.
_OF_SYSTEM = r"/usr/include/(?:[^/]+|[^/]+-linux-gnu/.+)"
_OF_COMPILER = r"/(?:lib/(?:gcc|clang)/|[^/]+-linux-gnu/)"
_LINKED = r"\.(?:a|o|so[.\d]*)$"
_LIBRARY = r"\.(?:a|so[.\d]*)$"
_TESTED = rb"__has_(?:include(?:_next)?|embed)\b\s*\(\s*[<\"]([^>\"\n]+)[>\"]"
_PLACE = rb"\b(?:__FILE__|__BASE_FILE__|__builtin_FILE|source_location)\b"


class Changed(Exception):
    """An input of a build is not what it was. The message says which."""


class Inputs(SimpleNamespace):
    """The inputs of a build: what it has read. The paths are folded (Request.fold)."""

    files: dict[str, str]  # {file: its state}
    # {folder: names in it}. If one appears, a compiler may read it in place of another file.
    absent: dict[str, list[str]]
    programs: list[str]  # the states of the compilers
    place: str = ""  # the sources' folder, if the library may contain its path

    def check(self, request) -> None:
        """Compare everything with the disk. Changed: something differs."""
        for path in self.changed_files(request):
            raise Changed(f"{path} {'changed' if os.path.exists(path) else 'is gone'}")
        self.check_others(request)

    def changed_files(self, request) -> list[str]:
        """Return the files that are not the same.

        Another machine may lack files that do not lie beside the sources of a prebuilt library.
        """
        states = {request.unfold(path): state for path, state in self.files.items()}
        changed = [path for path, state in states.items() if state_of(path) != state]
        if request.portable:
            changed = [p for p in changed if request.fold(p)[0] == "@" or os.path.exists(p)]
        return changed

    def check_others(self, request) -> None:
        """Compare everything but the files with the disk. Changed: something differs."""
        if self.place not in ("", request.root):
            raise Changed(f"{self.place}, which the code may name, is another folder")
        now = [state_of(path) for path in request.programs]
        # A library that is built already is used without a compiler, too.
        if now and self.programs and now != self.programs:
            raise Changed(f"{' or '.join(request.programs)} is another compiler")
        for path in self.appeared(request):
            raise Changed(f"{path} is new")

    def appeared(self, request) -> list[str]:
        """Return the absent paths that are there now."""
        paths = []
        for folded, names in self.absent.items():
            folder = request.unfold(folded)
            with contextlib.suppress(OSError):
                present = os.listdir(folder)  # quicker than a stat for each name
                paths += [f"{folder}/{name}" for name in {*names}.intersection(present)]
        return list(filter(os.path.exists, paths))  # and no dangling links

    def merged(self, other: Inputs) -> Inputs:
        """Return the inputs of a library that is linked with an archive, whose are `other`."""
        files = self.files | other.files
        absent = dict(self.absent)
        for folder, names in other.absent.items():
            absent[folder] = sorted({*names, *absent.get(folder, ())})
        return Inputs(**vars(self) | {"files": files, "absent": absent})


def state_of(path: str) -> str:
    """Return a file's digest; its size and time if it is large; "" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        return digest_of_open(fd)
    finally:
        os.close(fd)


def digest_of_open(fd: int) -> str:
    """Return the digest of the rest of an open file."""
    total = hashlib.sha256()
    while piece := os.read(fd, 1 << 16):  # which fits a processor's cache
        total.update(piece)
    return total.hexdigest()[:32]


def digest(data: bytes) -> str:
    """Return half of a SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:32]


# ---- after a build -------------------------------------------------------------------------------


def inputs_of(request, read: set[str], before: dict[str, str], start_ns: int) -> Inputs:
    """Return the inputs of a build that has just ended.

    If a file may have changed or appeared during the build, Inputs.check() refuses the inputs: its
    state is then "changed", or it is among the absent files.

    Args:
        request: what was built.
        read: the files that compilers and linker have read.
        before: {file: its state before the build} of the files that were known then.
        start_ns: when the build began, by the clock of the disk. It judges the other files.
    """
    read = read | set(filter(os.path.isfile, paths_in_flags(request)))
    headers = {path for path in read if has_version(path, request) and path.startswith(TORCH)}
    states = {path: state_of(path) for path in read if not has_version(path, request)}
    for path, now in states.items():
        is_changed = before[path] != now if path in before else _is_younger(path, start_ns)
        if is_changed:
            states[path] = "changed"
    own = {path for path in states if not re.search(_LINKED, path)}
    folders = {*map(os.path.dirname, own), *_searched(request)}
    tested = _tested(own)
    names = tested | _names({*own, *headers} - {*request.sources}, folders)
    searched = {*itertools.product(folders, names), *_libraries(read, request)}
    absent: dict[str, set[str]] = {}
    for folder, name in searched:
        path = f"{folder}/{name}"
        missing = _first_missing(folder, name)
        if not missing and path not in states and _is_younger(path, start_ns):
            missing = path  # it may have appeared too late
        if missing:
            parent = request.fold(os.path.dirname(missing))
            absent.setdefault(parent, set()).add(os.path.basename(missing))
        elif name in tested or os.path.isdir(path):  # compilers skip a folder of this name
            states.setdefault(path, state_of(path))
    return Inputs(
        files={request.fold(path): state for path, state in sorted(states.items())},
        absent={parent: sorted(names) for parent, names in sorted(absent.items())},
        programs=[state_of(path) for path in request.programs],
    )


def place_of(product: str, inputs: Inputs, request) -> str:
    """Return the sources' folder if a library may contain its path, as by __FILE__; else "".

    Compilers may split a string. So the sources and their headers are searched, too.
    """
    # Checkouts share the project's libraries, and the folder of a cell is a temporary one.
    if request.is_own or request.portable or request.is_cell:
        return ""
    with open(product, "rb") as file:
        # PyTorch may be in the folder, and its headers name themselves.
        library = file.read().replace(os.fsencode(TORCH), b"")
    texts = [request.unfold(p) for p in inputs.files if p.startswith(("/", "@root"))]
    is_named = os.fsencode(request.root) in library or _matches(_PLACE, texts)
    return request.root if is_named else ""


def _is_younger(path: str, start_ns: int) -> bool:
    """Return True if a file has changed since a time, or is gone."""
    try:
        return os.stat(path).st_ctime_ns >= start_ns
    except OSError:
        return True


def has_version(path: str, request) -> bool:
    """Return True if a file comes with PyTorch, Python, CUDA, the compiler or the system."""
    # A notebook's folder may contain an environment with PyTorch.
    if not request.fold(path).startswith(("/", "@beside")):
        return False
    path = os.path.normpath(path)  # clang: /usr/bin/../include/c++
    home = request.cuda.home
    is_of_cuda = bool(home) and path.startswith((f"{home}/", f"{os.path.realpath(home)}/"))
    if is_of_cuda or path.startswith(_versioned()) or re.fullmatch(_OF_SYSTEM, path):
        return True
    # A user's folder may have such a name, too.
    return any(
        path.startswith(prefix) and re.match(_OF_COMPILER, path[len(prefix) :])
        for prefix in _prefixes(tuple(request.programs))
    )


@functools.cache
def _prefixes(programs: tuple[str, ...]) -> list[str]:
    """Return the folders in which compilers are installed. A script may be in a user's folder."""
    prefixes = []
    for program in programs:
        with contextlib.suppress(OSError), open(program, "rb") as file:
            if file.read(2) != b"#!":
                prefixes.append(os.path.dirname(os.path.dirname(program)))
    return prefixes


@functools.cache
def _versioned() -> tuple[str, ...]:
    """Return the folders of software that is known by its version."""
    site = _INSTALLED
    python = sysconfig.get_path("include", "posix_prefix")
    system = "/lib /lib64 /usr/lib /usr/lib64 /usr/include/c++ /usr/include/linux".split()
    folders = [TORCH, site, f"{os.path.dirname(site)}/nvidia", python, *system]
    return tuple(f"{folder}/" for folder in folders)


def paths_in_flags(request, with_linker: bool = True) -> set[str]:
    """Return the paths that flags name, in whatever form: -I/x, -I /x, -Wp,-I,/x, @/x."""
    import shlex  # slow to import, and only a build needs it

    words = [*request.compiler[1:], *request.cflags, *request.cuda_cflags]
    if request.cuda.build:
        names = "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"
        words += [request.environment.get(name, "") for name in names]
    if with_linker:
        words += request.ldflags
    words = shlex.split(" ".join(words).replace("$$", "$"))  # ninja reads them first
    for word in words.copy():
        if word.startswith("@"):  # a file with more flags
            with contextlib.suppress(OSError, ValueError), open(word[1:]) as file:
                words += shlex.split(file.read())
    # A macro's path is a string. A header that it names is in a dependency file.
    words = [word for before, word in zip(["", *words], words) if "-D" not in (before, word[:2])]
    pieces = [*words, *",".join(words).split(",")]
    return {piece[piece.find("/") :].rstrip("/") for piece in pieces if "/" in piece}


def _searched(request) -> list[str]:
    """Return the folders without version in which the compilers may look for headers."""
    # The loader's own folders come first, so nothing can hide their headers.
    user = [p for p in request.include_paths if request.fold(p).startswith(("/", "@root"))]
    flags = paths_in_flags(request, with_linker=False)
    folders = [*user, request.beside, *flags, _DEFAULT[0]]
    return _without_version(folders, ("CPATH", "CPLUS_INCLUDE_PATH"), request)


def _without_version(folders: Iterable[str], variables: Iterable[str], request) -> list[str]:
    """Return the folders without version of a list, and those that variables name."""
    folders = [*folders]
    for variable in variables:
        folders += request.environment.get(variable, "").split(":")
    folders = [path for path in folders if path.startswith("/") and not os.path.isfile(path)]
    return [path for path in folders if not has_version(path, request)]


def _libraries(read: set[str], request) -> set[tuple[str, str]]:
    """Return (folder, name) of each library that the linker may take in place of one it read.

    For -lvalue, it takes the first libvalue.so or libvalue.a.
    """
    names = {name for name in map(os.path.basename, read) if re.search(_LIBRARY, name)}
    for suffix in ".so", ".a":
        names |= {re.sub(_LIBRARY, suffix, name) for name in names}
    folders = _without_version(paths_in_flags(request), ["LIBRARY_PATH"], request)
    return set(itertools.product(folders, names))


def _names(headers: set[str], folders: set[str]) -> set[str]:
    """Return the names by which a source can include headers."""
    include = f"{TORCH}/include"
    names = set()
    torch_folders = [include, f"{include}/torch/csrc/api/include"]
    for folder in [*folders, *_DEFAULT, *torch_folders]:
        prefix = f"{folder}/"
        names.update(path.removeprefix(prefix) for path in headers if path.startswith(prefix))
    return names


def _tested(paths: Iterable[str]) -> set[str]:
    """Return the names that __has_include tests in files."""
    return set(map(os.fsdecode, _matches(_TESTED, paths)))


def _matches(pattern: bytes, paths: Iterable[str]) -> set[bytes]:
    """Return what a pattern matches in files."""
    matches: set[bytes] = set()
    for path in filter(os.path.isfile, paths):
        with open(path, "rb") as file:
            matches.update(re.findall(pattern, file.read()))
    return matches


def _first_missing(folder: str, name: str) -> str:
    """Return the first path from `folder` to `name` that is absent; "" if none is."""
    path = folder
    for part in name.split("/"):
        if not os.path.exists(path):  # `folder/..` is there as soon as the folder is
            return path
        path = f"{path}/{part}"
    return "" if os.path.exists(path) else path
