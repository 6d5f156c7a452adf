"""What the compilers and the linker read, by their own report, and the closure that this makes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterable, Sequence

from . import closure, toolchain
from .errors import BuildError, report
from .request import Request

# Flags for dependency files, such as a Makefile's. A compiler writes only one such file, and we need it.
MAKE_FLAGS = r"(?<!\S)(?:-M{1,2}D|-MP|-MG|-MV|-M[FTQ]\s*\S+|-Wp,-M\S*)(?!\S)"
LINKED = "-Wl,--dependency-file=link.d"  # GNU ld since 2.35, gold, lld, mold
# Every library is linked with these. libpthread.a and its like are empty since glibc 2.34.
_RUNTIME = re.compile(r"crt\w+\.o$|lib(?:gcc|gcc_eh|pthread|dl|rt|util|\w+_nonshared)\.a$")
_LINKED_NAME = r"^ +(.+?)(?: \\)?$|^(\S.*):$"  # in a linker's dependency file
_ASKS = rb"__has_(?:include(?:_next)?|embed)\b(?:\s*\(\s*(?:<([^>\n]+)>|\"([^\"\n]+)\"))?"
# Names that the paths of what is read do not show: of a folder above, with its whole path, or a macro's in two folders.
_UPWARDS = rb"[<\"]([^<>\"\n]*\.\./[^<>\"\n]*)[>\"]"
_BY_MACRO = rb"#\s*define\s+\w+\s+[<\"]([^<>\"\n]+/[^<>\"\n]+/[^<>\"\n]+)[>\"]"
_COMMENT = rb"/\*.*?\*/|//[^\n]*"
_INCLUDE = rb"^[ \t]*#[ \t]*(?:include(?:_next)?|import|embed)[ \t]*[<\"]([^>\"\n]+)[>\"]"


def of_unit(request: Request, staging: str, source: str, target: str) -> tuple[set[str], bool]:
    """(the files that a compiler read for an object, whether it also tells what .incbin reads)

    BuildError: it does not even name the source."""
    paths = _files(request, staging, _names(f"{staging}/{target}.d"))
    if source not in paths:
        raise untold(request, f"the compiler says that it read {len(paths)} files, but not {source}")
    names = _names(f"{staging}/{target}.as.d")
    told = bool(names) and not any(flag.startswith("-flto") for flag in request.cflags)  # that assembles when it links
    for name in names:
        if path := _file(staging, name):
            paths.update(_spellings(request, path))
        elif not re.search(r"^[<{]|\.s$", name) and name != os.path.basename(source):  # the assembler's own input
            told = False
    return _foreign(paths, staging), told


def of_link(request: Request, staging: str, objects: list[str]) -> set[str]:
    """The files that were linked, without PyTorch's: these are too large to read, and its version stands for them."""
    listed = _listing(f"{staging}/link.d")
    # GNU ld, gold and mold do not quote; these and lld name each file on a line of its own.
    names = [first or second for first, second in re.findall(_LINKED_NAME, listed, re.MULTILINE)]
    if not set(objects) <= set(names):
        raise untold(request, "the linker does not tell which files it links")
    torch_folder = request.unfold("@torch")
    temporary = r"\.ltrans\d*\.o$"  # of link-time optimisation
    names = [name for name in names if name not in objects and not re.search(temporary, name)]
    paths = _foreign(_files(request, staging, names), staging)
    paths = {path for path in paths if not os.path.realpath(path).startswith(torch_folder)}
    return paths.union(*map(_thin_members, paths))


def _thin_members(path: str) -> set[str]:
    """Returns the paths of the objects and archives that a thin archive names; it does not hold them itself."""
    with open(path, "rb") as file:
        if file.read(8) != b"!<thin>\n":
            return set()
        table = b""
        while header := file.read(60):
            if header.startswith(b"/") and not header[1:2].isdigit():  # a table: of symbols, or of names
                size = int(header[48:58])
                content = file.read(size + size % 2)
                table = content if header.startswith(b"// ") else table
    folder = os.path.dirname(path)
    members = {os.path.join(folder, os.fsdecode(name)) for name in table.split(b"/\n")}
    members = {closure.real_path(member) for member in members if os.path.isfile(member)}
    return members.union(*map(_thin_members, members))


def _names(file: str) -> list[str]:
    """The prerequisites in a dependency file, with their quotes."""
    rule = _listing(file).replace("\\\n", " ").rstrip("\n").partition(": ")[2]
    return re.findall(r"(?:\\[\s\S]|[^ \t\\])+", rule)


def _listing(file: str) -> str:
    """A file that a tool has written; "" if it has not."""
    try:
        with open(file, "rb") as opened:
            return os.fsdecode(opened.read())
    except FileNotFoundError:
        return ""


def _file(staging: str, name: str) -> str:
    """The file that a tool in the private folder means by a name, which may be quoted for make. "": there is none."""
    for plain in (re.sub(r"\\(?=[ \t#:])", "", name).replace("$$", "$"), name.replace("$$", "$"), name):
        path = os.path.join(staging, plain)
        if "\n" not in path and os.path.isfile(path):
            return path
    return ""


def _files(request: Request, staging: str, names: list[str]) -> set[str]:
    found = {name: _file(staging, name) for name in names}
    if missing := [name for name, path in found.items() if not path]:
        raise untold(request, f"it names {missing[0]!r}, which is no file")
    return set().union(*(_spellings(request, path) for path in found.values()))


def _spellings(request: Request, path: str) -> list[str]:
    """Returns a path as it is written down. If a link leads elsewhere tomorrow, so does the path with ".."."""
    found = closure.spellings(path)
    return found[-1:] if closure.is_theirs(request.fold(found[-1])) else found


def _foreign(paths: set[str], staging: str) -> set[str]:
    """Leaves out what the build itself made in its private folder."""
    return {path for path in paths if not path.startswith(f"{staging}/")}


def untold(request: Request, evidence: str) -> BuildError:
    what = f"cannot build {request.name}: it cannot be told what the build reads"
    return report(what, [evidence], "use g++ with GNU ld, and names without line breaks and backslashes")


def named(request: Request, flags: str) -> set[str]:
    """The files that flags name: response files and what these name, linker scripts, libraries, plugins, specs ..."""
    found: set[str] = set()
    for word in toolchain.words_of_flags(flags):
        pieces = [word, *re.split("[=,]", word)]
        for path in {piece[piece.index("/") :] for piece in pieces if "/" in piece}:
            if path not in found and os.path.isfile(path):
                found.add(path)
                if word.endswith(f"@{path}"):
                    text = closure.text_of(path)
                    if unwanted := re.search(MAKE_FLAGS, text):
                        what = f"cannot build {request.name}: a response file is in the way of dependencies"
                        raise report(what, [f"{path} has {unwanted[0]}"], f"take {unwanted[0]} out of {path}")
                    found |= named(request, text)
    return found


def foreseen(request: Request) -> dict[str, bytes]:
    """The files of the project that compilers will read, as far as the text of the sources says so, and their texts."""
    found, todo, folders = {}, list(filter(os.path.isfile, request.sources)), project_folders(request)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        with open(path, "rb") as file:
            found[path] = file.read()
        names = [os.fsdecode(name) for name in re.findall(_INCLUDE, found[path], re.MULTILINE)]
        candidates = (f"{folder}/{name}" for folder in (os.path.dirname(path), *folders) for name in names)
        for candidate in candidates:
            if os.path.isfile(candidate):
                todo.append(closure.real_path(candidate))
            elif os.path.exists(candidate) and not os.path.isdir(candidate):
                raise closure.no_regular_file(candidate)
    return found


def project_folders(request: Request) -> list[str]:
    """The folders in which compilers look for headers, as far as they are neither PyTorch's nor the system's."""
    words = [*request.cflags, *request.cuda_cflags]
    folders = [*request.include_paths, *(word[2:] for word in words if word.startswith("-I/"))]
    folders += [b for a, b in zip(words, words[1:]) if a in ("-I", "-isystem", "-iquote", "-idirafter")]
    return [folder for folder in folders if not closure.is_theirs(request.fold(folder) + "/")]


def is_plain_link(staging: str, objects: list[str]) -> bool:
    """Whether only plain objects of ours and shared libraries were linked. Of archives that define a name twice, and of
    objects for link-time optimisation, linkers make different libraries."""
    for name in objects:
        with open(f"{staging}/{name}", "rb") as file:
            text = file.read()
        if not text.startswith(b"\x7fELF") or b".gnu.lto_" in text:
            return False
    listed = re.findall(_LINKED_NAME, _listing(f"{staging}/link.d"), re.MULTILINE)
    names = {first or second for first, second in listed} - {*objects}
    archives = [os.path.basename(name) for name in names if name.endswith((".a", ".o"))]
    return all(map(_RUNTIME.match, archives))


# What stands for a name that cannot be read from the text: then all names in the folders that are searched count.
ANY_NAME = "*"
# Files that compilers read although nobody expected it. If only a clock could tell whether one changed meanwhile, the
# build is run again, and then the file is expected.
_surprises: set[str] = set()


class Before:
    """The inputs of a build before a compiler is started, to compare with those when it has ended.

    Contents are compared, not times: the clock of another machine's disk may be ahead or behind. A clock judges only
    files that nobody expected, and only if it is this machine's or nobody edits them."""

    def __init__(self, staging: str, paths: set[str]):
        paths |= {path for path in _surprises if os.path.isfile(path)}
        status = os.stat(staging)
        self._started, self._device = status.st_mtime_ns, status.st_dev
        self._files = {path: (stamp := closure.stamp_of(path), content.__wrapped__(path, stamp)[0]) for path in paths}
        self._folders = {folder: names_in(folder) for folder in {os.path.dirname(path) for path in paths}}
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


class Recorder:
    """Makes closures of what compilers read. Files that they have in common are looked at once.

    search   the folders in which compilers look for headers, in order"""

    def __init__(self, request: Request, search: list[str], before: Before):
        self._request, self._search, self._before = request, search, before
        self._listed: dict[str, set[str] | None] = {}

    def closure(
        self, read: set[str], others: set[str], told: bool = True, unused: Sequence[tuple[str, str]] = ()
    ) -> closure.Closure:
        """Makes the closure of one unit, or of the link.

        read     sources, headers and, if `told`, what .incbin reads
        others   files that flags name, libraries, tools
        unused   (folder, name) of files that would be linked or run if they were there

        closure.Changed: a file is not what the compiler has read."""
        request, before = self._request, self._before
        entries: dict[str, tuple[bytes, str]] = {}
        probed: set[str] = set()
        own: dict[str, None] = {}  # folders of the project, where a quoted include looks first
        unforeseen = []
        for path in sorted(read | others):
            now, folded = closure.stamp_of(path), request.fold(path)
            theirs = closure.is_theirs(folded)
            stamp = before.judged(path, now, theirs)
            digest, names, embeds = (content if stamp == now else content.__wrapped__)(path, now)
            if embeds and not told:
                raise untold(request, f"{path} has .incbin; only GNU as tells what that reads, and not with -flto")
            if (same := before.is_same(path, now, digest, theirs)) is False:
                raise closure.Changed(path)
            unforeseen += [] if same else [path]
            entries[folded] = stamp, digest
            probed |= names
            if path in read and not theirs:
                own[os.path.dirname(path)] = None
        if unforeseen:
            _surprises.update(unforeseen)
            raise closure.Changed(unforeseen[0])
        # Which of the project's folders comes first depends on who includes, and how. So a name that is read from one
        # of them must not appear in any other. PyTorch's and the system's come last: the first match ends their search.
        order = list(dict.fromkeys([*own, *self._search]))
        theirs = {path for path in read if closure.is_theirs(request.fold(path))}
        missing: dict[str, set[str]] = {}
        if ANY_NAME in probed:  # -DNAME='<name.h>'
            probed.update(re.findall(r"[<\"]([^<>\"]+)[>\"]", " ".join(request.cflags)))
        for name in (probed - {ANY_NAME}) | self._names_of(read - theirs, order):
            for folder in [""] if name.startswith("/") else order:
                path = f"{folder}/{name}" if folder else name
                if path in read:
                    continue
                if below := self._first_missing(folder, name):
                    missing.setdefault(below[0], set()).add(below[1])
                elif before.is_new(folder, name):
                    raise closure.Changed(path)
                elif name in probed or not os.path.isfile(path):
                    entries.setdefault(*self._young(path))
        if ANY_NAME in probed:
            for folder in [folder for folder in order if not closure.is_theirs(request.fold(folder) + "/")]:
                below = [entry.path for entry in os.scandir(folder) if entry.is_dir()] if os.path.isdir(folder) else []
                for each in (folder, *below):
                    missing.setdefault(each, set()).add(closure.listing(each))
        for name in self._names_of(theirs, order):
            for folder in order:
                path = f"{folder}/{name}"
                if path in read:
                    break
                if below := self._first_missing(folder, name):
                    missing.setdefault(below[0], set()).add(below[1])
                elif os.path.isfile(path):
                    break
                else:
                    entries.setdefault(*self._young(path))
        for folder, name in unused:
            if below := self._first_missing(folder, name):
                missing.setdefault(below[0], set()).add(below[1])
            elif not os.path.isfile(f"{folder}/{name}"):
                entries.setdefault(*self._young(f"{folder}/{name}"))
        # Of two folders that are the same one, compilers search one. Where folders lead decides which.
        for folder in self._search:
            if not closure.is_theirs(request.fold(folder) + "/"):
                entries.setdefault(*self._young(f"{folder}/."))
        absent = {}
        for folder, names in sorted(missing.items()):
            folded = request.fold(folder)
            stamp = before.judged(folder, closure.stamp_of(folder), closure.is_theirs(folded))
            absent[folded] = [stamp.hex(), "\n".join(sorted(names))]
        tools = [request.fold(t) for t in request.tools]
        return closure.Closure.of(entries, tools, absent, time.time_ns())

    def _young(self, path: str) -> tuple[str, tuple[bytes, str]]:
        """Returns the entry of what was looked for and is no file, or was not read: a folder, a link to nothing."""
        return self._request.fold(path), (closure.young(closure.stamp_of(path)), closure.state_of(path, self._request))

    @staticmethod
    def _names_of(paths: set[str], folders: list[str]) -> set[str]:
        """Returns the names by which an include may have found the paths in the folders."""
        names: set[str] = set()
        for path in paths:
            names.update(path[len(folder) + 1 :] for folder in folders if path.startswith(folder + "/"))
        return names

    def _first_missing(self, folder: str, name: str) -> tuple[str, str] | None:
        """(existing folder, name in it) that must appear before folder/name can; None: folder/name is there."""
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

    The names are those in __has_include and those with "..", which the paths of what is read do not show. Among them
    is ANY_NAME if it asks for one that a macro holds.

    closure.Changed: the file has another stamp by now."""
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
        names = {os.fsdecode(angled or quoted) if angled or quoted else ANY_NAME for angled, quoted in found}
    hidden = re.findall(_UPWARDS, text) if b"../" in text else []
    names.update(map(os.fsdecode, [*hidden, *re.findall(_BY_MACRO, text)]))
    return closure.digest(text), names, b".incbin" in text


def read_ahead(request: Request, closures: Iterable[closure.Closure]) -> None:
    """Reads, while compilers run, PyTorch's and the system's files of other units: most will be asked for again."""
    for folded in filter(closure.is_theirs, {path for found in closures for path in found.entries()}):
        path = request.unfold(folded)
        stamp = closure.stamp_of(path)
        with contextlib.suppress(closure.Changed, OSError):
            if closure.is_old(stamp, time.time_ns()):  # others may change and leave the same stamp
                content(path, stamp)
