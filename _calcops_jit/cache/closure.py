"""The inputs of a build, and whether they are still the same.

A `Closure` lists every file that the compilers and the linker report to have read. It also lists
absent paths: if a file appears there, the compilers would read it in place of another. A closure is
stored with its library. Every import compares it with the disk: first a file's stamp, which is what
stat returns, and then, if the stamp differs, the file's content.

Paths in a closure are folded: a token stands for the folder at their beginning (see Request.fold),
because a checkout, a virtual environment or a cache may move.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import time
from types import SimpleNamespace

from ..errors import BuildError, report

_STAMP = struct.Struct("<qqQQ")
_SIZE = 32  # bytes of a stamp, and characters of a digest
_GONE = bytes(_SIZE)  # the stamp of a file that does not exist
_NOTHING = "nothing".ljust(_SIZE)  # the digest of a file that does not exist
# The longest tick of a file system's clock. Two changes within one tick leave the same stamp.
_TICK_NS = 2_000_000_000
# The beginnings of folded paths of PyTorch's and the system's files. Nobody edits them, and most of
# them belong to many closures, so their stamps are read at most once a second. /usr/src and
# /usr/local are not among them, because containers have projects there.
_THEIRS = ("@torch", "@cuda", "@python", "/usr/include/", "/usr/lib", "/usr/bin/", "/usr/share/")
_seen: dict[str, dict[str, bytes]] = {}  # {folder: {name: stamp}} of such files
_seen_ns = 0  # when the first of these stamps was read


class Changed(Exception):
    """An input of a build is not what it was. The message says which."""


# ---- contents ------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    """Return half of a SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:_SIZE]


def file_digest(file: int | str) -> str:
    """Return the digest of a file, or of the rest of an open one."""
    total = hashlib.sha256()
    is_path = isinstance(file, str)
    opener = open_input if is_path else None
    with open(file, "rb", buffering=0, closefd=is_path, opener=opener) as opened:
        while piece := opened.read(65536):  # which fits a processor's cache
            total.update(piece)
    return total.hexdigest()[:_SIZE]


def open_input(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor, for `opener` of open().

    BuildError: the file is a FIFO or a device, which may never end.
    """
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise no_regular_file(path)


def no_regular_file(path: str) -> BuildError:
    evidence = "it is no regular file, and a compiler may wait for it"
    return report(f"cannot read {path}", [evidence], f"rm {path}")


def state_of(path: str, request) -> str:
    """Return the digest of a file's content or of a folder's real path; _NOTHING if none exists."""
    if stamp_of(path) == _GONE:
        return _NOTHING
    if os.path.isdir(path):
        return digest(os.fsencode(f"folder {request.fold(os.path.realpath(path))}"))
    return file_digest(path)


def text_of(path: str) -> str:
    """Return the content of a text file; "" if it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def real_path(path: str) -> str:
    """Return an absolute path in which the links and each ".." of the folder are resolved.

    A file that is a link is not resolved, because a compiler searches headers beside the link.
    """
    folder, name = os.path.split(os.path.join(os.getcwd(), path))
    if name == "..":
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(folder), name)


def spellings(path: str) -> list[str]:
    """Return the paths under which a closure lists a path that may have "..".

    This is the path with each ".." resolved. If a ".." follows a link, the unresolved path comes
    first, because the link may change.
    """
    if "/.." not in path:
        return [path]
    real = real_path(path)
    return [real] if real == os.path.normpath(path) else [path, real]


def is_theirs(folded: str) -> bool:
    """Return True if a file is PyTorch's or the system's."""
    return folded.startswith(_THEIRS)


# ---- stamps --------------------------------------------------------------------------------------


def stamp_of(path: str, folder: int | None = None) -> bytes:
    """Return a file's mtime, ctime, size and inode number, packed; _GONE if it does not exist.

    A relative path starts from the descriptor `folder`, which is quicker than a long path.
    """
    try:
        s = os.stat(path, dir_fd=folder)
    except OSError:
        return _GONE
    return _STAMP.pack(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino)


def changed_ns(stamp: bytes) -> int:
    """Return when a file's inode changed, in ns by its disk's clock."""
    return _STAMP.unpack(stamp)[1]


def young(stamp: bytes) -> bytes:
    """Return a stamp that no file has, so that the next check compares contents.

    A closure stores it in place of `stamp` as long as another change could leave the same `stamp`.
    """
    return bytes(255 - byte for byte in stamp)


def is_long_ago(time_ns: int) -> bool:
    """Return True if more than a tick of any clock has passed since `time_ns`.

    If a file's stamp has stayed the same since then, its next change will leave another stamp.
    """
    return time.time_ns() - time_ns > _TICK_NS


def is_old(stamp: bytes, now_ns: int) -> bool:
    """Return True if a file last changed more than a tick before `now_ns`."""
    return max(_STAMP.unpack(stamp)[:2]) < now_ns - _TICK_NS


def _stamps_in(folder: str, names: list[str]) -> list[bytes]:
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # the folder is gone, or this process has no descriptor left
        return [stamp_of(f"{folder}/{name}") for name in names]
    try:
        return [stamp_of(name, fd) for name in names]
    finally:
        os.close(fd)


def _their_stamps_in(folder: str, names: list[str], now_ns: int) -> list[bytes]:
    """Return stamps of PyTorch's or the system's files, at most a second old."""
    global _seen_ns
    if not 0 <= now_ns - _seen_ns < 1_000_000_000:
        _seen.clear()
        _seen_ns = now_ns
    seen = _seen.setdefault(folder, {})
    if unseen := [name for name in names if name not in seen]:
        seen.update(zip(unseen, _stamps_in(folder, unseen)))
    return [seen[name] for name in names]


def listing(folder: str) -> str:
    """Return "/" and a digest of all names in a folder.

    In the list of a folder's absent names, this entry means: no name may come or go.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    return "/" + digest("\n".join(names).encode(errors="surrogateescape"))


# ---- closures ------------------------------------------------------------------------------------


class Closure(SimpleNamespace):
    """The inputs of a build. A few long strings are parsed faster than many objects."""

    files: dict[str, str]  # {folder: names, separated by line breaks}
    digests: str  # the files' digests, in the order of `files`
    stamps: bytes  # the files' stamps, in the same order
    tools: list[str]  # the compilers' real paths
    # {folder: [its stamp in hex, names that must not appear there, separated by line breaks]}.
    absent: dict[str, list[str]]
    looked: int  # when its young stamps were read, in ns by this machine's clock

    @staticmethod
    def of(entries: dict[str, tuple[bytes, str]], tools, absent, looked: int) -> Closure:
        """Return a closure with the files in `entries`, which is {file: (stamp, digest)}."""

        def order(path: str) -> tuple[bool, tuple[str, str, str]]:
            # The project's own files come first, since they are likely to change.
            return not path.startswith("@root"), path.rpartition("/")

        paths = sorted(entries, key=order)
        files: dict[str, str] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            files[folder] = f"{files[folder]}\n{name}" if folder in files else name
        return Closure(
            files=files,
            digests="".join(entries[path][1] for path in paths),
            stamps=b"".join(entries[path][0] for path in paths),
            tools=tools,
            absent=absent,
            looked=looked,
        )

    def entries(self) -> dict[str, tuple[bytes, str]]:
        """Return {file: (stamp, digest)}."""
        entries = {}
        start = 0
        for folder, names in self.files.items():
            for name in names.split("\n"):
                end = start + _SIZE
                entries[f"{folder}/{name}"] = self.stamps[start:end], self.digests[start:end]
                start = end
        return entries

    def check(self, request) -> bool:
        """Compare every input of a build for `request` with the disk.

        Returns:
            True if some files have new stamps and the same contents. The closure then has the new
            stamps and should be stored again.

        Raises:
            Changed: an input differs. The message names the first one.
        """
        comparison = _Comparison(self, request)
        comparison.compare_tools()
        comparison.compare_files()
        comparison.compare_absent()
        return comparison.finish()

    def own_files(self, request) -> list[str]:
        """Return the paths of the files that are not PyTorch's, the system's or the loader's."""
        return [
            request.unfold(path)
            for path in self.entries()
            if not (is_theirs(path) or path.startswith("@loader"))
        ]


class _Comparison:
    """One comparison of a closure with the disk. It puts new stamps into the closure."""

    def __init__(self, closure: Closure, request):
        self._closure = closure
        self._request = request
        self._now = time.time_ns()
        self._is_restamped = False  # the closure has a new stamp
        # `looked` must be set to now, because a new stamp is young or the clock was set back.
        self._is_unsettled = closure.looked > self._now

    def compare_tools(self) -> None:
        request = self._request
        tools = self._closure.tools
        # zip() may drop some. The last check of this function compares the numbers.
        for old, path in zip(tools, request.tools, strict=False):
            new = request.fold(path)
            if old != new and self._closure.entries()[old][1] != file_digest(path):
                raise Changed(f"compiler {new} is not {old}")
        # If no compiler is installed here, a library that is already built can still be used.
        if request.tools and len(request.tools) != len(tools):
            raise Changed("the compiler command changed")

    def compare_files(self) -> None:
        start = 0
        for folded, lines in self._closure.files.items():
            names = lines.split("\n")
            positions = range(start, start + _SIZE * len(names), _SIZE)
            before = self._closure.stamps[start : positions.stop]
            start = positions.stop
            folder = self._request.unfold(folded)
            if is_theirs(folded):
                stamps = _their_stamps_in(folder, names, self._now)
            else:
                stamps = _stamps_in(folder, names)
            if b"".join(stamps) == before:  # nearly always
                continue
            for position, name, stamp in zip(positions, names, stamps):
                self._compare_file(f"{folded}/{name}", f"{folder}/{name}", position, stamp)

    def _compare_file(self, folded: str, path: str, start: int, stamp: bytes) -> None:
        """Compare the contents of a file if its stamp is new, and put the stamp into the closure.

        `start` is the place of the file in the closure's `stamps` and in its `digests`.
        """
        closure = self._closure
        end = start + _SIZE
        before = closure.stamps[start:end]
        if stamp == before:
            return
        if stamp == _GONE and self._is_of_missing_compiler(folded):
            return
        if state_of(path, self._request) != closure.digests[start:end]:
            raise Changed(f"{path} {'is gone' if stamp == _GONE else 'changed'}")
        fresher = self._fresher(stamp, before, is_theirs(folded))
        closure.stamps = closure.stamps[:start] + fresher + closure.stamps[end:]

    def _is_of_missing_compiler(self, folded: str) -> bool:
        """Return True if an absent file belongs to a compiler that is not installed here."""
        # PyTorch is always installed, so an absent file of PyTorch's was removed.
        if self._request.tools or folded.startswith("@torch"):
            return False
        tools = self._closure.tools
        if is_theirs(folded) or folded in tools:
            return True
        path = self._request.unfold(folded)
        for tool in tools:
            prefix = self._request.unfold(os.path.dirname(os.path.dirname(tool)))
            if path.startswith(prefix + "/") and not os.path.isdir(prefix):
                return True
        return False

    def compare_absent(self) -> None:
        for folded, entry in self._closure.absent.items():
            folder = self._request.unfold(folded)
            stamp = stamp_of(folder)
            before = bytes.fromhex(entry[0])
            if stamp in (before, _GONE):
                continue
            names = entry[1].split("\n")
            try:
                existing = set(os.listdir(folder))  # quicker than one stat for each of the names
            except OSError:  # the folder may be searched, but not listed
                existing = {name for name in names if os.path.lexists(f"{folder}/{name}")}
            for name in names:
                if name in existing:
                    raise Changed(f"{folder}/{name} is new")
            if any(name.startswith("/") and name != listing(folder) for name in names):
                raise Changed(f"{folder} has other files")
            entry[0] = self._fresher(stamp, before, is_theirs(folded)).hex()

    def _fresher(self, stamp: bytes, before: bytes, theirs: bool) -> bytes:
        """Return the stamp for the closure: young(stamp) if another change may leave `stamp`.

        `before` is the closure's present stamp. `theirs`: the file is PyTorch's or the system's.
        """
        if theirs:
            is_settled = is_old(stamp, self._now)
        else:  # a project's disk may have a wrong clock: two checks, a tick apart, must see `stamp`
            is_settled = before == young(stamp) and is_long_ago(self._closure.looked)
        fresher = stamp if is_settled else young(stamp)
        self._is_restamped |= fresher != before
        self._is_unsettled |= not is_settled and fresher != before
        return fresher

    def finish(self) -> bool:
        """Return True if the closure changed and should be stored again."""
        if self._is_unsettled:
            self._closure.looked = self._now
        return self._is_restamped or self._is_unsettled


def merged(closures: list[Closure]) -> Closure:
    """Return the union of the closures of a library's units.

    Raises Changed if two units read different contents of one file.
    """
    entries: dict[str, tuple[bytes, str]] = {}
    absent: dict[str, list[str]] = {}
    for closure in closures:
        for path, (stamp, content) in closure.entries().items():
            _, other_content = entries.setdefault(path, (stamp, content))
            if content != other_content:
                raise Changed(f"{path} changed while it was compiled")
        for folder, (stamp, names) in closure.absent.items():
            other_stamp, other_names = absent.get(folder, [stamp, names])
            both = sorted({*names.split("\n"), *other_names.split("\n")})
            # No folder has the stamp "", so that the next check looks for the names.
            absent[folder] = [stamp if stamp == other_stamp else "", "\n".join(both)]
    looked = max(closure.looked for closure in closures)
    return Closure.of(entries, closures[0].tools, absent, looked)
