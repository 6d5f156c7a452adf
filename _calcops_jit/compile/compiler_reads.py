"""What the compilers and the linker read, by their own report."""

from __future__ import annotations

import os
import re

from ..cache import closure
from ..errors import BuildError, report
from ..request import Request
from . import toolchain

# Flags for dependency files, such as a Makefile's. A compiler writes only one such file, and we
# need it.
MAKE_FLAGS = r"(?<!\S)(?:-M{1,2}D|-MP|-MG|-MV|-M[FTQ]\s*\S+|-Wp,-M\S*)(?!\S)"
LINKED = "-Wl,--dependency-file=link.d"  # GNU ld since 2.35, gold, lld, mold
# Every library is linked with these. libpthread.a and its like are empty since glibc 2.34.
_RUNTIME = re.compile(r"crt\w+\.o$|lib(?:gcc|gcc_eh|pthread|dl|rt|util|\w+_nonshared)\.a$")
_LINKED_NAME = r"^ +(.+?)(?: \\)?$|^(\S.*):$"  # in a linker's dependency file
_INCLUDE = rb"^[ \t]*#[ \t]*(?:include(?:_next)?|import|embed)[ \t]*[<\"]([^>\"\n]+)[>\"]"


def of_unit(request: Request, staging: str, source: str, target: str) -> tuple[set[str], bool]:
    """(the files that a compiler read for an object, whether it also tells what .incbin reads)

    BuildError: it does not even name the source.
    """
    paths = _files(request, staging, _names(f"{staging}/{target}.d"))
    if source not in paths:
        raise untold(
            request, f"the compiler says that it read {len(paths)} files, but not {source}"
        )
    names = _names(f"{staging}/{target}.as.d")
    # That assembles when it links.
    told = bool(names) and not any(flag.startswith("-flto") for flag in request.cflags)
    for name in names:
        if path := _file(staging, name):
            paths.update(_spellings(request, path))
        # The assembler's own input.
        elif not re.search(r"^[<{]|\.s$", name) and name != os.path.basename(source):
            told = False
    return _foreign(paths, staging), told


def of_link(request: Request, staging: str, objects: list[str]) -> set[str]:
    """Return the linked files without PyTorch's libraries, which are large and have a version."""
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
    """Return the objects and archives that a thin archive names. It does not hold them itself."""
    with open(path, "rb") as file:
        if file.read(8) != b"!<thin>\n":
            return set()
        table = b""
        while header := file.read(60):
            # A table: of symbols, or of names.
            if header.startswith(b"/") and not header[1:2].isdigit():
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
    """Return the file that a tool names, perhaps quoted for make; "" if there is none."""
    for plain in (
        re.sub(r"\\(?=[ \t#:])", "", name).replace("$$", "$"),
        name.replace("$$", "$"),
        name,
    ):
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
    """Return a path as the closure holds it. If a link leads elsewhere tomorrow, so does a path
    with "..".
    """
    found = closure.spellings(path)
    return found[-1:] if closure.is_theirs(request.fold(found[-1])) else found


def _foreign(paths: set[str], staging: str) -> set[str]:
    """Leaves out what the build itself made in its private folder."""
    return {path for path in paths if not path.startswith(f"{staging}/")}


def untold(request: Request, evidence: str) -> BuildError:
    what = f"cannot build {request.name}: it cannot be told what the build reads"
    return report(
        what, [evidence], "use g++ with GNU ld, and names without line breaks and backslashes"
    )


def named(request: Request, flags: str) -> set[str]:
    """Return the files that flags name: response files and their contents, linker scripts, plugins,
    specs.
    """
    found: set[str] = set()
    for word in toolchain.words_of_flags(flags):
        pieces = [word, *re.split("[=,]", word)]
        for path in {piece[piece.index("/") :] for piece in pieces if "/" in piece}:
            if path not in found and os.path.isfile(path):
                found.add(path)
                if word.endswith(f"@{path}"):
                    text = closure.text_of(path)
                    if unwanted := re.search(MAKE_FLAGS, text):
                        what = f"cannot build {request.name}: "
                        what += "a response file is in the way of dependencies"
                        raise report(
                            what, [f"{path} has {unwanted[0]}"], f"take {unwanted[0]} out of {path}"
                        )
                    found |= named(request, text)
    return found


def foreseen(request: Request) -> dict[str, bytes]:
    """Return {file: text} of the project's files that the compilers will read, by their `#include`
    lines.
    """
    found, todo, folders = (
        {},
        list(filter(os.path.isfile, request.sources)),
        project_folders(request),
    )
    while todo:
        path = todo.pop()
        if path in found:
            continue
        with open(path, "rb") as file:
            found[path] = file.read()
        names = [os.fsdecode(name) for name in re.findall(_INCLUDE, found[path], re.MULTILINE)]
        candidates = (
            f"{folder}/{name}" for folder in (os.path.dirname(path), *folders) for name in names
        )
        for candidate in candidates:
            if os.path.isfile(candidate):
                todo.append(closure.real_path(candidate))
            elif os.path.exists(candidate) and not os.path.isdir(candidate):
                raise closure.no_regular_file(candidate)
    return found


def project_folders(request: Request) -> list[str]:
    """Return the folders that are searched for headers, without PyTorch's and the system's."""
    words = [*request.cflags, *request.cuda_cflags]
    folders = [*request.include_paths, *(word[2:] for word in words if word.startswith("-I/"))]
    folders += [
        b for a, b in zip(words, words[1:]) if a in ("-I", "-isystem", "-iquote", "-idirafter")
    ]
    return [folder for folder in folders if not closure.is_theirs(request.fold(folder) + "/")]


def is_plain_link(staging: str, objects: list[str]) -> bool:
    """Whether only plain objects of ours and shared libraries were linked. Of archives that define
    a name twice, and of objects for link-time optimisation, linkers make different libraries.
    """
    for name in objects:
        with open(f"{staging}/{name}", "rb") as file:
            text = file.read()
        if not text.startswith(b"\x7fELF") or b".gnu.lto_" in text:
            return False
    listed = re.findall(_LINKED_NAME, _listing(f"{staging}/link.d"), re.MULTILINE)
    names = {first or second for first, second in listed} - {*objects}
    archives = [os.path.basename(name) for name in names if name.endswith((".a", ".o"))]
    return all(map(_RUNTIME.match, archives))
