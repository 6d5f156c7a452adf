"""What a build read, and whether all of it is still the same.

A `Closure` lists every file that the compilers and the linker read, as they report it, and the
absent names that they would have found first. It is kept with the library. Every import compares
it with the disk: first a file's stamp, which is what stat returns, and then, if the stamp differs,
the file's content.

The closure has folded paths, whose roots are tokens (see Request.fold), because a checkout, a
virtual environment or a cache may move.
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
_GONE = bytes(_SIZE)  # the stamp of a file that is not there
_NOTHING = "nothing".ljust(_SIZE)  # in place of its digest
# A file system's clock may tick as seldom as this. Two changes within one tick leave the same
# stamp.
_TICK_NS = 2_000_000_000
# Nobody edits PyTorch's and the system's files, and libraries have most of them in common: one look
# a second is enough. /usr/src and /usr/local are not among them: containers keep projects there.
_THEIRS = ("@torch", "@cuda", "@python", "/usr/include/", "/usr/lib", "/usr/bin/", "/usr/share/")
_seen: dict[str, dict[str, bytes]] = {}  # {folder: {name: stamp}} of such files
_seen_ns = 0


class Changed(Exception):
    """An input is not what it was; the message says which."""


# ---- contents ------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_SIZE]


def file_digest(file: int | str) -> str:
    """Digest a file, or the rest of an open one, in pieces that fit a processor's cache."""
    total = hashlib.sha256()
    is_path = isinstance(file, str)
    opener = regular if is_path else None
    with open(file, "rb", buffering=0, closefd=is_path, opener=opener) as opened:
        while piece := opened.read(65536):
            total.update(piece)
    return total.hexdigest()[:_SIZE]


def regular(path: str, flags: int) -> int:
    """Open a file, but not a FIFO or a device, which might never end. BuildError: it is one."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise no_regular_file(path)


def no_regular_file(path: str) -> BuildError:
    return report(
        f"cannot read {path}",
        ["it is no regular file, and a compiler may wait for it"],
        f"rm {path}",
    )


def state_of(path: str, request) -> str:
    """Digest the contents of a file, the real path of a folder, or the absence of both."""
    if stamp_of(path) == _GONE:
        return _NOTHING
    if os.path.isdir(path):
        return digest(os.fsencode(f"folder {request.fold(os.path.realpath(path))}"))
    return file_digest(path)


def text_of(path: str) -> str:
    """Read a text file; "" if it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""


def real_path(path: str) -> str:
    """Resolve the links and each ".." in a path's folder, but not the file itself: a compiler
    searches beside the name it was given.
    """
    folder, name = os.path.split(os.path.join(os.getcwd(), path))
    return os.path.join(os.path.realpath(folder), name) if name != ".." else os.path.realpath(path)


def spellings(path: str) -> list[str]:
    """Return a path without "..". The path itself comes first if a link gives its ".." another
    meaning.
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
    """Pack what stat returns for a file: when it and its inode changed, its size, its inode.

    folder   a descriptor from which a relative path starts; that is quicker than a long path
    """
    try:
        s = os.stat(path, dir_fd=folder)
    except OSError:
        return _GONE
    return _STAMP.pack(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino)


def changed_ns(stamp: bytes) -> int:
    return _STAMP.unpack(stamp)[1]


def young(stamp: bytes) -> bytes:
    """Return a stamp that no file has, so that the next check compares contents.

    It stands for the stamp of a file that may still change without leaving another.
    """
    return bytes(255 - byte for byte in stamp)


def is_long_ago(time_ns: int) -> bool:
    """Return True if more than a tick of any clock has passed since `time_ns`.

    A file that was the same then and now will show its next change.
    """
    return time.time_ns() - time_ns > _TICK_NS


def is_old(stamp: bytes, now_ns: int) -> bool:
    """Return True if a file last changed more than a tick ago, by its disk's clock."""
    return max(_STAMP.unpack(stamp)[:2]) < now_ns - _TICK_NS


def _stamps_in(folder: str, names: list[str]) -> list[bytes]:
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is gone, or no descriptor is left
        return [stamp_of(f"{folder}/{name}") for name in names]
    try:
        return [stamp_of(name, fd) for name in names]
    finally:
        os.close(fd)


def _their_stamps_in(folder: str, names: list[str], now_ns: int) -> list[bytes]:
    """Return stamps of files that nobody edits. They are remembered for a second."""
    global _seen_ns
    if not 0 <= now_ns - _seen_ns < 1_000_000_000:
        _seen.clear()
        _seen_ns = now_ns
    seen = _seen.setdefault(folder, {})
    if unseen := [name for name in names if name not in seen]:
        seen.update(zip(unseen, _stamps_in(folder, unseen)))
    return [seen[name] for name in names]


def listing(folder: str) -> str:
    """Return a name that no file has and that stands for all names in a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    return "/" + digest("\n".join(names).encode(errors="surrogateescape"))


# ---- closures ------------------------------------------------------------------------------------


class Closure(SimpleNamespace):
    """The inputs of a build, in a few long strings, because these are parsed faster than many
    objects.
    """

    files: dict[str, str]  # {folder: lines of names}
    digests: str  # the files' digests, in this order
    stamps: bytes  # the files' stamps, likewise
    tools: list[str]  # the compilers' real paths
    # {folder: [its stamp in hex, lines of names that must not appear there]}.
    absent: dict[str, list[str]]
    looked: int  # when the stamps were taken, by this machine's clock

    @staticmethod
    def of(entries: dict[str, tuple[bytes, str]], tools, absent, looked: int) -> Closure:
        """Makes one from {file: (stamp, digest)}."""
        # The project's own files come first: it is they that change.
        paths = sorted(
            entries, key=lambda path: (not path.startswith("@root"), path.rpartition("/"))
        )
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
            True if files have other stamps, but the same contents. The new stamps are in the
            closure, worth writing down.

        Raises:
            Changed: names the first input that differs.
        """
        look = _Look(self, request)
        look.compare_tools()
        look.compare_files()
        look.compare_absent()
        return look.ended()

    def own_files(self, request) -> list[str]:
        """Paths of the project's own files: not the toolchain's, PyTorch's and the loader's."""
        return [
            request.unfold(path)
            for path in self.entries()
            if not (is_theirs(path) or path.startswith("@loader"))
        ]


class _Look:
    """One comparison of a closure with the disk."""

    def __init__(self, closure: Closure, request):
        self._closure = closure
        self._request = request
        self._now = time.time_ns()
        self._restamped = False  # a stamp in the closure is new
        # A stamp is young, or the clock was set back.
        self._unsettled = closure.looked > self._now

    def compare_tools(self) -> None:
        request = self._request
        tools = self._closure.tools
        for old, path in zip(tools, request.tools, strict=False):
            new = request.fold(path)
            if old != new and self._closure.entries()[old][1] != file_digest(path):
                raise Changed(f"compiler {new} is not {old}")
        if request.tools and len(request.tools) != len(tools):
            raise Changed("the compiler command changed")

    def compare_files(self) -> None:
        end = 0
        for folded, lines in self._closure.files.items():
            names = lines.split("\n")
            start, end = end, end + _SIZE * len(names)
            folder = self._request.unfold(folded)
            if is_theirs(folded):
                stamps = _their_stamps_in(folder, names, self._now)
            else:
                stamps = _stamps_in(folder, names)
            if b"".join(stamps) == self._closure.stamps[start:end]:
                continue  # nearly always
            for position, name, stamp in zip(range(start, end, _SIZE), names, stamps):
                self._compare_file(f"{folded}/{name}", f"{folder}/{name}", position, stamp)

    def _compare_file(self, folded: str, path: str, start: int, stamp: bytes) -> None:
        """Compare the contents of a file if its stamp is new, and put the stamp into the closure.

        `start` is the place of the file's stamp and digest in the closure's.
        """
        closure = self._closure
        end = start + _SIZE
        before = closure.stamps[start:end]
        if stamp == before or stamp == _GONE and self._is_of_missing_compiler(folded):
            return
        if state_of(path, self._request) != closure.digests[start:end]:
            raise Changed(f"{path} {'is gone' if stamp == _GONE else 'changed'}")
        fresher = self._fresher(stamp, before, is_theirs(folded))
        closure.stamps = closure.stamps[:start] + fresher + closure.stamps[end:]

    def _is_of_missing_compiler(self, folded: str) -> bool:
        """Return True if a file belongs to a compiler that is not installed here."""
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
                existing = set(os.listdir(folder))  # quicker than to ask for some hundred names
            except OSError:  # another user's, perhaps, which compilers cannot look into either
                existing = {name for name in names if os.path.lexists(f"{folder}/{name}")}
            for name in names:
                if name in existing:
                    raise Changed(f"{folder}/{name} is new")
            if any(name.startswith("/") and name != listing(folder) for name in names):
                raise Changed(f"{folder} has other files")
            entry[0] = self._fresher(stamp, before, is_theirs(folded)).hex()

    def _fresher(self, stamp: bytes, before: bytes, theirs: bool) -> bytes:
        """Return the stamp to write down: young, if the next change may leave the same."""
        if theirs:
            is_settled = is_old(stamp, self._now)
        else:  # seen twice, as the clock of a project's disk may be wrong
            is_settled = before == young(stamp) and is_long_ago(self._closure.looked)
        written = stamp if is_settled else young(stamp)
        self._restamped |= written != before
        self._unsettled |= stamp != written != before
        return written

    def ended(self) -> bool:
        if self._unsettled:
            self._closure.looked = self._now
        return self._restamped or self._unsettled


def merged(closures: list[Closure]) -> Closure:
    """Merge the closures of a library's units.

    Raises Changed if two units read different contents of one file.
    """
    entries: dict[str, tuple[bytes, str]] = {}
    absent: dict[str, list[str]] = {}
    for closure in closures:
        for path, (stamp, content) in closure.entries().items():
            if entries.setdefault(path, (stamp, content))[1] != content:
                raise Changed(path)
        for folder, (stamp, names) in closure.absent.items():
            other_stamp, other_names = absent.get(folder, [stamp, names])
            both = sorted({*names.split("\n"), *other_names.split("\n")})
            absent[folder] = [stamp if stamp == other_stamp else "", "\n".join(both)]
    looked = max(closure.looked for closure in closures)
    return Closure.of(entries, closures[0].tools, absent, looked)
