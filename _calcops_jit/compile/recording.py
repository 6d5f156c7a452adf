"""Closures of what compilers read: the files, and the absent names that would be found first."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterable, Sequence

from ..cache import closure
from ..request import Request
from .dependency_files import undetermined

_ASKS = rb"__has_(?:include(?:_next)?|embed)\b(?:\s*\(\s*(?:<([^>\n]+)>|\"([^\"\n]+)\"))?"
# Names that the paths of the read files do not show: of a folder above, with its whole path, or a
# macro's in two folders.
_UPWARDS = rb"[<\"]([^<>\"\n]*\.\./[^<>\"\n]*)[>\"]"
_BY_MACRO = rb"#\s*define\s+\w+\s+[<\"]([^<>\"\n]+/[^<>\"\n]+/[^<>\"\n]+)[>\"]"
_COMMENT = rb"/\*.*?\*/|//[^\n]*"
# A name that the text does not show. Then every name in the searched folders counts.
ANY_NAME = "*"
# Files that compilers read unexpectedly. If only a clock could show whether one changed during the
# build, the build runs again, and then the file is expected.
_surprises: set[str] = set()


class Before:
    """The inputs of a build before the compilers run, to compare with those after they ran.

    Contents are compared, not times, because the clock of another machine's disk may be ahead or
    behind. A clock decides only for unexpected files, and only if it is this machine's or nobody
    edits the files.
    """

    def __init__(self, staging: str, paths: set[str]):
        paths |= {path for path in _surprises if os.path.isfile(path)}
        status = os.stat(staging)
        self._started = status.st_mtime_ns
        self._device = status.st_dev
        self._files: dict[str, tuple[bytes, str]] = {}  # {path: (stamp, digest)}
        self._folders: dict[str, set[str] | None] = {}  # {folder: the names in it}
        for path in paths:
            stamp = closure.stamp_of(path)
            self._files[path] = stamp, content.__wrapped__(path, stamp)[0]
            folder = os.path.dirname(path)
            if folder not in self._folders:
                self._folders[folder] = names_in(folder)
        self.looked = time.time_ns()

    def is_same(self, path: str, stamp: bytes, digest: str, theirs: bool) -> bool | None:
        """Return True if a file is what it was, False if not, None if that is not known."""
        if path in self._files:
            return self._files[path] == (stamp, digest)
        is_known_clock = theirs or os.stat(path).st_dev == self._device
        return True if is_known_clock and closure.changed_ns(stamp) <= self._started else None

    def is_new(self, folder: str, name: str) -> bool:
        """Return True if a name came into a folder of the project while the compilers ran."""
        names = self._folders.get(folder)
        return names is not None and name.partition("/")[0] not in names

    def judged(self, path: str, stamp: bytes, theirs: bool) -> bytes:
        """Return the stamp to write down: young, if the next change may leave the same."""
        if theirs:
            return stamp if closure.is_old(stamp, time.time_ns()) else closure.young(stamp)
        seen_twice = self._files.get(path, (b"",))[0] == stamp and closure.is_long_ago(self.looked)
        return stamp if seen_twice else closure.young(stamp)


class _Absent:
    """The absent names that compilers would have found first."""

    def __init__(self):
        self.names: dict[str, set[str]] = {}  # {existing folder: names that must not appear in it}
        self.unread: list[str] = []  # paths that exist, but are no files or were not read


class Recorder:
    """Makes the closures of units and of a link, and lists each folder that these share once."""

    def __init__(self, request: Request, search: list[str], before: Before):
        self._request = request
        self._search = search
        self._before = before
        self._listed: dict[str, set[str] | None] = {}

    def closure(
        self,
        read: set[str],
        others: set[str],
        is_complete: bool = True,
        unused: Sequence[tuple[str, str]] = (),
    ) -> closure.Closure:
        """Make the closure of one unit, or of the link.

        Args:
            read: sources, headers and, if `is_complete`, the files of .incbin.
            others: files that flags name, libraries, tools.
            is_complete: whether `read` has the files of .incbin.
            unused: (folder, name) of files that would be linked or run if they existed.

        Raises:
            closure.Changed: a file is not what the compiler has read.
        """
        files, conditional = self._files(sorted(read | others), is_complete)
        theirs = {path for path in read if self._is_theirs(path)}
        # Folders of the project come first, since a quoted include looks there first.
        own = [os.path.dirname(path) for path in sorted(read - theirs)]
        folders = list(dict.fromkeys([*own, *self._search]))
        absent = _Absent()
        self._expect_own(absent, read, self._names_of(read - theirs, folders), conditional, folders)
        if ANY_NAME in conditional:
            self._expect_nothing_new(absent, folders)
        self._expect_theirs(absent, read, self._names_of(theirs, folders), folders)
        for folder, name in unused:
            if not self._expect(absent, folder, name) and not os.path.isfile(f"{folder}/{name}"):
                absent.unread.append(f"{folder}/{name}")
        # Of two folders that are the same one, compilers search one. Real paths decide which.
        for folder in self._search:
            if not self._is_theirs(f"{folder}/"):
                absent.unread.append(f"{folder}/.")
        entries = dict(map(self._young, reversed(absent.unread))) | files
        tools = [self._request.fold(tool) for tool in self._request.tools]
        return closure.Closure.of(entries, tools, self._stamped(absent.names), time.time_ns())

    def _is_theirs(self, path: str) -> bool:
        return closure.is_theirs(self._request.fold(path))

    def _files(
        self, paths: list[str], is_complete: bool
    ) -> tuple[dict[str, tuple[bytes, str]], set[str]]:
        """Return ({folded path: (stamp, digest)}, the names that the files may ask for)."""
        before = self._before
        entries: dict[str, tuple[bytes, str]] = {}
        conditional: set[str] = set()
        unforeseen = []
        for path in paths:
            now = closure.stamp_of(path)
            theirs = self._is_theirs(path)
            stamp = before.judged(path, now, theirs)
            read = content if stamp == now else content.__wrapped__
            digest, names, has_incbin = read(path, now)
            if has_incbin and not is_complete:
                why = f"{path} has .incbin; only GNU as tells what that reads, and not with -flto"
                raise undetermined(self._request, why)
            same = before.is_same(path, now, digest, theirs)
            if same is False:
                raise closure.Changed(path)
            if not same:
                unforeseen.append(path)
            entries[self._request.fold(path)] = stamp, digest
            conditional |= names
        if unforeseen:
            _surprises.update(unforeseen)
            raise closure.Changed(unforeseen[0])
        if ANY_NAME in conditional:  # -DNAME='<name.h>'
            flags = " ".join(self._request.cflags)
            conditional.update(re.findall(r"[<\"]([^<>\"]+)[>\"]", flags))
        return entries, conditional

    def _expect_own(
        self,
        absent: _Absent,
        read: set[str],
        names: set[str],
        conditional: set[str],
        folders: list[str],
    ) -> None:
        """Note that the project's headers must not appear in any other folder.

        Which of the project's folders comes first depends on who includes, and how.
        """
        for name in (names | conditional) - {ANY_NAME}:
            for folder in [""] if name.startswith("/") else folders:
                path = f"{folder}/{name}" if folder else name
                if path in read or self._expect(absent, folder, name):
                    continue
                if self._before.is_new(folder, name):
                    raise closure.Changed(path)
                if name in conditional or not os.path.isfile(path):
                    absent.unread.append(path)

    def _expect_theirs(
        self, absent: _Absent, read: set[str], names: set[str], folders: list[str]
    ) -> None:
        """Note that PyTorch's and the system's headers must not appear in an earlier folder."""
        for name in names:
            for folder in folders:
                path = f"{folder}/{name}"
                if path in read:
                    break
                if self._expect(absent, folder, name):
                    continue
                if os.path.isfile(path):
                    break
                absent.unread.append(path)

    def _expect_nothing_new(self, absent: _Absent, folders: list[str]) -> None:
        """Note all names in the project's folders and the folders in them."""
        for folder in folders:
            if self._is_theirs(f"{folder}/"):
                continue
            below = os.scandir(folder) if os.path.isdir(folder) else ()
            for each in [folder, *(entry.path for entry in below if entry.is_dir())]:
                absent.names.setdefault(each, set()).add(closure.listing(each))

    def _expect(self, absent: _Absent, folder: str, name: str) -> bool:
        """Note that folder/name must stay absent. Return False if it exists."""
        missing = self._first_missing(folder, name)
        if missing:
            absent.names.setdefault(missing[0], set()).add(missing[1])
        return missing is not None

    def _stamped(self, names: dict[str, set[str]]) -> dict[str, list[str]]:
        """Return {folded folder: [its stamp, lines of names that must not appear there]}."""
        stamped = {}
        for folder, missing in sorted(names.items()):
            stamp = self._before.judged(folder, closure.stamp_of(folder), self._is_theirs(folder))
            stamped[self._request.fold(folder)] = [stamp.hex(), "\n".join(sorted(missing))]
        return stamped

    def _young(self, path: str) -> tuple[str, tuple[bytes, str]]:
        """Return the entry of a path that was not read: a folder, a link to nothing."""
        stamp = closure.young(closure.stamp_of(path))
        return self._request.fold(path), (stamp, closure.state_of(path, self._request))

    @staticmethod
    def _names_of(paths: set[str], folders: list[str]) -> set[str]:
        """Returns the names by which an include may have found the paths in the folders."""
        names: set[str] = set()
        for path in paths:
            for folder in folders:
                if path.startswith(folder + "/"):
                    names.add(path[len(folder) + 1 :])
        return names

    def _first_missing(self, folder: str, name: str) -> tuple[str, str] | None:
        """Return (existing folder, name) that must appear before folder/name can; None if it
        exists.
        """
        name = name.lstrip("/")
        while self._names(folder) is None:
            folder, _, above = folder.rpartition("/")
            name = f"{above}/{name}"
        first, _, rest = name.partition("/")
        if first not in self._names(folder):
            return folder, first
        if rest and self._names(f"{folder}/{first}") is not None:
            return self._first_missing(f"{folder}/{first}", rest)
        return None

    def _names(self, folder: str) -> set[str] | None:
        if folder not in self._listed:
            self._listed[folder] = names_in(folder)
        return self._listed[folder]


def names_in(folder: str) -> set[str] | None:
    """Return the names in a folder; None if it does not exist."""
    try:
        return {".", "..", *os.listdir(folder or "/")}
    except OSError:
        return None


@functools.cache  # for a process that reloads
def content(path: str, stamp: bytes) -> tuple[str, set[str], bool]:
    """Return (a file's digest, the names that it may ask for, whether it has .incbin).

    The names are those in __has_include and those with "..", which the paths of the read files do
    not show. ANY_NAME is among them if the file asks for a name that a macro holds.

    closure.Changed: the file has another stamp by now.
    """
    with open(path, "rb", opener=closure.open_input) as file:
        text = file.read()
    if closure.stamp_of(path) != stamp:
        raise closure.Changed(path)
    if b"\0" in text:
        return closure.digest(text), set(), False
    names: set[str] = set()
    if b"__has_" in text:
        whole_lines = re.sub(_COMMENT, b" ", text.replace(b"\\\n", b""), flags=re.DOTALL)
        # `#ifdef __has_include` and `defined(__has_include)` ask for no name.
        asking = re.sub(rb"(?:#\s*(?:if|un|elif)n?def\s+|\bdefined\s*\(?\s*)\w+", b"", whole_lines)
        for angled, quoted in re.findall(_ASKS, asking):
            names.add(os.fsdecode(angled or quoted) or ANY_NAME)
    hidden = re.findall(_UPWARDS, text) if b"../" in text else []
    names.update(map(os.fsdecode, [*hidden, *re.findall(_BY_MACRO, text)]))
    return closure.digest(text), names, b".incbin" in text


def read_ahead(request: Request, closures: Iterable[closure.Closure]) -> None:
    """Read PyTorch's and the system's files of other units while compilers run. Most are needed
    again.
    """
    paths = set().union(*(unit.entries() for unit in closures))
    for folded in filter(closure.is_theirs, paths):
        path = request.unfold(folded)
        stamp = closure.stamp_of(path)
        with contextlib.suppress(closure.Changed, OSError):
            if closure.is_old(stamp, time.time_ns()):  # others may change and leave the same stamp
                content(path, stamp)
