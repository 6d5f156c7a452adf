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
# Names that the paths of what is read do not show: of a folder above, with its whole path, or a
# macro's in two folders.
_UPWARDS = rb"[<\"]([^<>\"\n]*\.\./[^<>\"\n]*)[>\"]"
_BY_MACRO = rb"#\s*define\s+\w+\s+[<\"]([^<>\"\n]+/[^<>\"\n]+/[^<>\"\n]+)[>\"]"
_COMMENT = rb"/\*.*?\*/|//[^\n]*"
# What stands for a name that cannot be read from the text: then all names in the folders that are
# searched count.
ANY_NAME = "*"
# Files that compilers read although nobody expected it. If only a clock could tell whether one
# changed meanwhile, the build is run again, and then the file is expected.
_surprises: set[str] = set()


class Before:
    """The inputs of a build before a compiler is started, to compare with those when it has ended.

    Contents are compared, not times: the clock of another machine's disk may be ahead or behind. A
    clock judges only files that nobody expected, and only if it is this machine's or nobody edits
    them.
    """

    def __init__(self, staging: str, paths: set[str]):
        paths |= {path for path in _surprises if os.path.isfile(path)}
        status = os.stat(staging)
        self._started, self._device = status.st_mtime_ns, status.st_dev
        self._files = {
            path: (stamp := closure.stamp_of(path), content.__wrapped__(path, stamp)[0])
            for path in paths
        }
        self._folders = {
            folder: names_in(folder) for folder in {os.path.dirname(path) for path in paths}
        }
        self.looked = time.time_ns()

    def is_same(self, path: str, stamp: bytes, digest: str, theirs: bool) -> bool | None:
        """Whether a file is what it was. None: nobody knows."""
        if path in self._files:
            return self._files[path] == (stamp, digest)
        known_clock = theirs or os.stat(path).st_dev == self._device
        return True if known_clock and closure.changed_ns(stamp) <= self._started else None

    def is_new(self, folder: str, name: str) -> bool:
        """Whether something came into a folder of the project while the compilers ran."""
        there = self._folders.get(folder)
        return there is not None and name.partition("/")[0] not in there

    def judged(self, path: str, stamp: bytes, theirs: bool) -> bytes:
        """The stamp to write down: a young one, unless the next change is sure to leave another."""
        if theirs:
            return stamp if closure.is_old(stamp, time.time_ns()) else closure.young(stamp)
        seen_twice = self._files.get(path, (b"",))[0] == stamp and closure.is_long_ago(self.looked)
        return stamp if seen_twice else closure.young(stamp)


class _Absent:
    """What would have been found first, had it existed."""

    def __init__(self):
        self.names: dict[str, set[str]] = {}  # {existing folder: names that must not appear in it}
        self.unread: list[str] = []  # paths that exist, but are no files or were not read


class Recorder:
    """Makes closures of what compilers read, and looks once at the files that these share.

    search   the folders in which compilers look for headers, in order
    """

    def __init__(self, request: Request, search: list[str], before: Before):
        self._request, self._search, self._before = request, search, before
        self._listed: dict[str, set[str] | None] = {}

    def closure(
        self,
        read: set[str],
        others: set[str],
        told: bool = True,
        unused: Sequence[tuple[str, str]] = (),
    ) -> closure.Closure:
        """Makes the closure of one unit, or of the link.

        read     sources, headers and, if `told`, what .incbin reads
        others   files that flags name, libraries, tools
        unused   (folder, name) of files that would be linked or run if they were there

        closure.Changed: a file is not what the compiler has read.
        """
        files, asked = self._files(sorted(read | others), told)
        theirs = {path for path in read if self._is_theirs(path)}
        # Folders of the project come first, since a quoted include looks there first.
        own = [os.path.dirname(path) for path in sorted(read - theirs)]
        folders = list(dict.fromkeys([*own, *self._search]))
        absent = _Absent()
        self._expect_own(absent, read, self._names_of(read - theirs, folders), asked, folders)
        if ANY_NAME in asked:
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

    def _files(self, paths: list[str], told: bool) -> tuple[dict[str, tuple[bytes, str]], set[str]]:
        """Return ({folded path: (stamp, digest)}, the names that the files ask for)."""
        before = self._before
        entries: dict[str, tuple[bytes, str]] = {}
        asked: set[str] = set()
        unforeseen = []
        for path in paths:
            now = closure.stamp_of(path)
            theirs = self._is_theirs(path)
            stamp = before.judged(path, now, theirs)
            digest, names, embeds = (content if stamp == now else content.__wrapped__)(path, now)
            if embeds and not told:
                why = f"{path} has .incbin; only GNU as tells what that reads, and not with -flto"
                raise undetermined(self._request, why)
            same = before.is_same(path, now, digest, theirs)
            if same is False:
                raise closure.Changed(path)
            if not same:
                unforeseen.append(path)
            entries[self._request.fold(path)] = stamp, digest
            asked |= names
        if unforeseen:
            _surprises.update(unforeseen)
            raise closure.Changed(unforeseen[0])
        if ANY_NAME in asked:  # -DNAME='<name.h>'
            asked.update(re.findall(r"[<\"]([^<>\"]+)[>\"]", " ".join(self._request.cflags)))
        return entries, asked

    def _expect_own(
        self, absent: _Absent, read: set[str], names: set[str], asked: set[str], folders: list[str]
    ) -> None:
        """Note that the project's headers must not appear in any other folder.

        Which of the project's folders comes first depends on who includes, and how.
        """
        for name in (names | asked) - {ANY_NAME}:
            for folder in [""] if name.startswith("/") else folders:
                path = f"{folder}/{name}" if folder else name
                if path in read or self._expect(absent, folder, name):
                    continue
                if self._before.is_new(folder, name):
                    raise closure.Changed(path)
                if name in asked or not os.path.isfile(path):
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
        return self._request.fold(path), (
            closure.young(closure.stamp_of(path)),
            closure.state_of(path, self._request),
        )

    @staticmethod
    def _names_of(paths: set[str], folders: list[str]) -> set[str]:
        """Returns the names by which an include may have found the paths in the folders."""
        names: set[str] = set()
        for path in paths:
            names.update(
                path[len(folder) + 1 :] for folder in folders if path.startswith(folder + "/")
            )
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
    """The names in a folder; None: there is no such folder."""
    try:
        return {".", "..", *os.listdir(folder or "/")}
    except OSError:
        return None


@functools.cache  # for a process that reloads
def content(path: str, stamp: bytes) -> tuple[str, set[str], bool]:
    """(a file's digest, the names that it may ask for, whether it embeds others with .incbin)

    The names are those in __has_include and those with "..", which the paths of what is read do not
    show. Among them is ANY_NAME if it asks for one that a macro holds.

    closure.Changed: the file has another stamp by now.
    """
    with open(path, "rb", opener=closure.regular) as file:
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
        found = re.findall(_ASKS, asking)
        names = {
            os.fsdecode(angled or quoted) if angled or quoted else ANY_NAME
            for angled, quoted in found
        }
    hidden = re.findall(_UPWARDS, text) if b"../" in text else []
    names.update(map(os.fsdecode, [*hidden, *re.findall(_BY_MACRO, text)]))
    return closure.digest(text), names, b".incbin" in text


def read_ahead(request: Request, closures: Iterable[closure.Closure]) -> None:
    """Read PyTorch's and the system's files of other units while compilers run. Most are needed
    again.
    """
    for folded in filter(
        closure.is_theirs, {path for found in closures for path in found.entries()}
    ):
        path = request.unfold(folded)
        stamp = closure.stamp_of(path)
        with contextlib.suppress(closure.Changed, OSError):
            if closure.is_old(stamp, time.time_ns()):  # others may change and leave the same stamp
                content(path, stamp)
