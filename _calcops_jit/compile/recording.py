"""Record the closures of a build: the files that it read, and the paths that must stay absent."""

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

# __has_include(<name>), __has_include("name") and the like. Both groups are empty if a macro holds
# the name.
_TEST = rb"__has_(?:include(?:_next)?|embed)\b(?:\s*\(\s*(?:<([^>\n]+)>|\"([^\"\n]+)\"))?"
# "../a.h" in an #include or a macro. The path of the file that is read does not end with this name.
_UPWARDS = rb"[<\"]([^<>\"\n]*\.\./[^<>\"\n]*)[>\"]"
# A name with two or more folders that a macro holds. __has_include may test the macro, and
# _expect_nothing_new() does not list folders so deep.
_BY_MACRO = rb"#\s*define\s+\w+\s+[<\"]([^<>\"\n]+/[^<>\"\n]+/[^<>\"\n]+)[>\"]"
_COMMENT = rb"/\*.*?\*/|//[^\n]*"
# Stands for an unknown name that a macro holds. If a file tests it, the names in the project's
# folders must stay the same.
ANY_NAME = "*"
# Files that an earlier attempt of a build read unexpectedly, and that may have changed during the
# build. The build is repeated, and then expects them.
_unforeseen: set[str] = set()


class Before:
    """The inputs of a build before the compilers run, to compare with those after they ran.

    Contents are compared, not times, because the clock of another machine's disk may be ahead or
    behind. Times decide only about unexpected files. Such a file must be on the disk of the private
    folder, or belong to PyTorch or the system, whose files nobody edits.
    """

    def __init__(self, staging: str, paths: set[str]):
        """Read the files `paths`. `staging` is the new private folder of the build."""
        paths |= {path for path in _unforeseen if os.path.isfile(path)}
        status = os.stat(staging)
        self._start_ns = status.st_mtime_ns
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

    def is_unchanged(self, path: str, stamp: bytes, digest: str, theirs: bool) -> bool:
        """Return True if a file is known to be the same as when the build began."""
        if path in self._files:
            return self._files[path] == (stamp, digest)
        is_known_clock = theirs or os.stat(path).st_dev == self._device
        return is_known_clock and closure.changed_ns(stamp) <= self._start_ns

    def is_new(self, folder: str, name: str) -> bool:
        """Return True if a name appeared in a folder of expected files after the build began."""
        names = self._folders.get(folder)
        return names is not None and name.partition("/")[0] not in names

    def stamp_to_store(self, path: str, stamp: bytes, theirs: bool) -> bytes:
        """Return the stamp for the closure: young(stamp) if another change may leave the same one.

        `theirs`: the file is PyTorch's or the system's.
        """
        if theirs:
            is_settled = closure.is_old(stamp, time.time_ns())
        else:  # a project's disk may have a wrong clock: two reads, a tick apart, must see `stamp`
            before = self._files.get(path, (b"",))[0]
            is_settled = before == stamp and closure.is_long_ago(self.looked)
        return stamp if is_settled else closure.young(stamp)


class _Absent:
    """What the search for headers and libraries did not find, or passed without reading."""

    def __init__(self):
        self.names: dict[str, set[str]] = {}  # {existing folder: names that must not appear in it}
        # Existing paths that the search passes but nothing reads: folders, links to nothing, other
        # files.
        self.unread: list[str] = []


class Recorder:
    """Makes the closures of a library's units and of the link. It lists every folder only once."""

    def __init__(self, request: Request, search: list[str], before: Before):
        """`search` are the folders in which the compiler looks for headers, in order."""
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
        """Return the closure of one unit, or of the link.

        Args:
            read: sources, headers and, if `is_complete`, the files of .incbin.
            others: files that flags name, libraries, tools.
            is_complete: whether `read` has the files of .incbin.
            unused: (folder, name) of files that would be linked or run if they existed.

        Raises:
            closure.Changed: a file is not what the compiler read.
        """
        files, conditional = self._read(sorted(read | others), is_complete)
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
            path = f"{folder}/{name}"
            if not self._expect(absent, folder, name) and not os.path.isfile(path):
                absent.unread.append(path)
        # A compiler searches only one of two folders with the same real path. So the real paths of
        # all folders belong to the closure.
        for folder in self._search:
            if not self._is_theirs(f"{folder}/"):
                absent.unread.append(f"{folder}/.")
        unread = dict(map(self._young, reversed(absent.unread)))
        entries = unread | files
        tools = [self._request.fold(tool) for tool in self._request.tools]
        return closure.Closure.of(entries, tools, self._with_stamps(absent.names), time.time_ns())

    def _is_theirs(self, path: str) -> bool:
        return closure.is_theirs(self._request.fold(path))

    def _read(
        self, paths: list[str], is_complete: bool
    ) -> tuple[dict[str, tuple[bytes, str]], set[str]]:
        """Return ({folded path: (stamp, digest)}, the names that content() finds in the files)."""
        before = self._before
        entries: dict[str, tuple[bytes, str]] = {}
        conditional: set[str] = set()
        unforeseen = []
        for path in paths:
            present = closure.stamp_of(path)
            theirs = self._is_theirs(path)
            stamp = before.stamp_to_store(path, present, theirs)
            # content() remembers its results by stamp. A young file may have changed without
            # another stamp, so it is read again, by the function without the memory.
            read_content = content if stamp == present else content.__wrapped__
            digest, names, has_incbin = read_content(path, present)
            if has_incbin and not is_complete:
                why = f"{path} has .incbin; only GNU as tells what that reads, and not with -flto"
                raise undetermined(self._request, why)
            if not before.is_unchanged(path, present, digest, theirs):
                unforeseen.append(path)
            entries[self._request.fold(path)] = stamp, digest
            conditional |= names
        if unforeseen:
            _unforeseen.update(unforeseen)
            raise closure.Changed(f"{unforeseen[0]} may have changed while it was compiled")
        if ANY_NAME in conditional:  # the macro may be a flag: -DNAME='<name.h>'
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
        """Record that the project's headers must not appear in any other folder.

        A later folder counts, too. The order in which folders are searched depends on the file that
        includes a header, and on <> or "".
        """
        for name in (names | conditional) - {ANY_NAME}:
            candidates = [""] if name.startswith("/") else folders
            for folder in candidates:
                path = f"{folder}/{name}" if folder else name
                if path in read or self._expect(absent, folder, name):
                    continue
                if self._before.is_new(folder, name):
                    raise closure.Changed(f"{path} is new")
                if name in conditional or not os.path.isfile(path):
                    absent.unread.append(path)

    def _expect_theirs(
        self, absent: _Absent, read: set[str], names: set[str], folders: list[str]
    ) -> None:
        """Record that PyTorch's and the system's headers must not appear in an earlier folder."""
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
        """Record that the names in the project's folders and subfolders must stay the same."""
        for folder in folders:
            if self._is_theirs(f"{folder}/"):
                continue
            entries = os.scandir(folder) if os.path.isdir(folder) else ()
            subfolders = [entry.path for entry in entries if entry.is_dir()]
            for path in [folder, *subfolders]:
                absent.names.setdefault(path, set()).add(closure.listing(path))

    def _expect(self, absent: _Absent, folder: str, name: str) -> bool:
        """Record that folder/name must stay absent. Return False if it exists."""
        missing = self._first_missing(folder, name)
        if missing:
            absent.names.setdefault(missing[0], set()).add(missing[1])
        return missing is not None

    def _with_stamps(self, names: dict[str, set[str]]) -> dict[str, list[str]]:
        """Return the names in the form of Closure.absent."""
        absent = {}
        for folder, missing in sorted(names.items()):
            stamp = self._before.stamp_to_store(
                folder, closure.stamp_of(folder), self._is_theirs(folder)
            )
            absent[self._request.fold(folder)] = [stamp.hex(), "\n".join(sorted(missing))]
        return absent

    def _young(self, path: str) -> tuple[str, tuple[bytes, str]]:
        """Return the closure's entry of a path that was not read."""
        stamp = closure.young(closure.stamp_of(path))
        return self._request.fold(path), (stamp, closure.state_of(path, self._request))

    @staticmethod
    def _names_of(paths: set[str], folders: list[str]) -> set[str]:
        """Return the names under which an #include may have found the paths in the folders."""
        names: set[str] = set()
        for path in paths:
            for folder in folders:
                if path.startswith(folder + "/"):
                    names.add(path[len(folder) + 1 :])
        return names

    def _first_missing(self, folder: str, name: str) -> tuple[str, str] | None:
        """Return (the last existing folder of the path folder/name, the name that it lacks).

        For /a/b/c, this is (/a, b) if /a exists but /a/b does not. Return None if folder/name
        exists.
        """
        name = name.lstrip("/")
        while self._names_in(folder) is None:
            folder, _, last = folder.rpartition("/")
            name = f"{last}/{name}"
        first, _, rest = name.partition("/")
        if first not in self._names_in(folder):
            return folder, first
        if rest and self._names_in(f"{folder}/{first}") is not None:
            return self._first_missing(f"{folder}/{first}", rest)
        return None

    def _names_in(self, folder: str) -> set[str] | None:
        """Return names_in(folder) as it was at the first call."""
        if folder not in self._listed:
            self._listed[folder] = names_in(folder)
        return self._listed[folder]


def names_in(folder: str) -> set[str] | None:
    """Return the names in a folder; None if it cannot be listed."""
    try:
        return {".", "..", *os.listdir(folder or "/")}
    except OSError:
        return None


@functools.cache  # since units of a library, and builds of a process, read the same headers
def content(path: str, stamp: bytes) -> tuple[str, set[str], bool]:
    """Return (a file's digest, names of files that it may test or include, whether it has .incbin).

    The names are those in __has_include, those with "../", and those with two or more folders that
    a macro holds. ANY_NAME is among them if a macro holds the name in __has_include.

    closure.Changed: the file has another stamp by now.
    """
    with open(path, "rb", opener=closure.open_input) as file:
        text = file.read()
    if closure.stamp_of(path) != stamp:
        raise closure.Changed(f"{path} changed while it was read")
    if b"\0" in text:
        return closure.digest(text), set(), False
    names: set[str] = set()
    if b"__has_" in text:
        whole_lines = re.sub(_COMMENT, b" ", text.replace(b"\\\n", b""), flags=re.DOTALL)
        # `#ifdef __has_include` and `defined(__has_include)` test no file.
        definition = rb"(?:#\s*(?:if|un|elif)n?def\s+|\bdefined\s*\(?\s*)\w+"
        tests = re.sub(definition, b"", whole_lines)
        for angled, quoted in re.findall(_TEST, tests):
            names.add(os.fsdecode(angled or quoted) or ANY_NAME)
    upwards = re.findall(_UPWARDS, text) if b"../" in text else []
    names.update(map(os.fsdecode, [*upwards, *re.findall(_BY_MACRO, text)]))
    return closure.digest(text), names, b".incbin" in text


def read_ahead(request: Request, closures: Iterable[closure.Closure]) -> None:
    """Call content() for PyTorch's and the system's files in closures of other units.

    It runs beside the compilers, which read mostly the same files. This saves time afterwards,
    because content() remembers its results.
    """
    paths = set().union(*(unit.entries() for unit in closures))
    for folded in filter(closure.is_theirs, paths):
        path = request.unfold(folded)
        stamp = closure.stamp_of(path)
        with contextlib.suppress(closure.Changed, OSError):
            # A younger file may change and keep its stamp. Then the remembered result is wrong.
            if closure.is_old(stamp, time.time_ns()):
                content(path, stamp)
