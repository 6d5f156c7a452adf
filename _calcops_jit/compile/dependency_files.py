"""Which files the compilers and the linker read, from the dependency files that they write."""

from __future__ import annotations

import os
import re

from ..cache import closure
from ..errors import BuildError, report
from ..request import Request

# Flags for dependency files, which a Makefile may pass. They are removed, because a compiler writes
# only one such file, and the loader needs it.
FLAGS = r"(?<!\S)(?:-M{1,2}D|-MP|-MG|-MV|-M[FTQ]\s*\S+|-Wp,-M\S*)(?!\S)"
LINKER_FLAG = "-Wl,--dependency-file=link.d"  # GNU ld since 2.35, gold, lld, mold
# Files with which every library is linked. libpthread.a and the like are empty since glibc 2.34.
_RUNTIME = re.compile(r"crt\w+\.o$|lib(?:gcc|gcc_eh|pthread|dl|rt|util|\w+_nonshared)\.a$")
_LINKED_NAME = r"^ +(.+?)(?: \\)?$|^(\S.*):$"  # in a linker's dependency file
_TEMPORARY = re.compile(r"\.ltrans\d*\.o$")  # an object of link-time optimisation


def of_unit(request: Request, staging: str, source: str, target: str) -> tuple[set[str], bool]:
    """Return (the files that a compiler read for an object, whether the set is complete).

    The compiler's dependency file lacks the files of .incbin. Only the assembler's has them.

    BuildError: the dependency file does not name the source.
    """
    paths = _existing(request, staging, _prerequisites(f"{staging}/{target}.d"))
    if source not in paths:
        evidence = f"the compiler says that it read {len(paths)} files, but not {source}"
        raise undetermined(request, evidence)
    names = _prerequisites(f"{staging}/{target}.as.d")
    # With -flto the assembler runs when the library is linked.
    is_complete = bool(names) and not any(flag.startswith("-flto") for flag in request.cflags)
    for name in names:
        path = _path_of(staging, name)
        if path:
            paths.update(_spellings(request, path))
            continue
        # The assembler's own input need not be a file now: a temporary .s file, {standard input}.
        is_own_input = re.search(r"^[<{]|\.s$", name) or name == os.path.basename(source)
        if not is_own_input:
            is_complete = False
    return _outside(staging, paths), is_complete


def of_link(request: Request, staging: str, objects: list[str]) -> set[str]:
    """Return the linked files without PyTorch's libraries.

    These are large, and the request's facts have PyTorch's version.
    """
    names = _linked_names(staging)
    if not set(objects) <= set(names):
        raise undetermined(request, "the linker does not tell which files it links")
    others = [name for name in names if name not in objects and not _TEMPORARY.search(name)]
    paths = _outside(staging, _existing(request, staging, others))
    torch_folder = request.unfold("@torch")
    paths = {path for path in paths if not os.path.realpath(path).startswith(torch_folder)}
    return paths.union(*map(_thin_members, paths))


def is_plain_link(staging: str, objects: list[str]) -> bool:
    """Return True if all linkers would make the same library of the linked files.

    They do for plain objects and shared libraries. They may not for archives that define a name
    twice, nor for objects of link-time optimisation.
    """
    for name in objects:
        with open(f"{staging}/{name}", "rb") as file:
            content = file.read()
        if not content.startswith(b"\x7fELF") or b".gnu.lto_" in content:
            return False
    others = set(_linked_names(staging)) - set(objects)
    archives = [os.path.basename(name) for name in others if name.endswith((".a", ".o"))]
    return all(map(_RUNTIME.match, archives))


def undetermined(request: Request, evidence: str) -> BuildError:
    """Return the error of a build whose inputs are not all known."""
    return report(
        f"cannot build {request.name}: cannot determine which files the build reads",
        [evidence],
        "use g++ with GNU ld, and names without line breaks and backslashes",
    )


def _linked_names(staging: str) -> list[str]:
    """Return the files that the linker's dependency file names."""
    # GNU ld, gold, mold and lld write one name on a line. Only lld quotes names for make.
    lines = re.findall(_LINKED_NAME, _text_of(f"{staging}/link.d"), re.MULTILINE)
    return [prerequisite or target for prerequisite, target in lines]


def _thin_members(path: str) -> set[str]:
    """Return the objects and archives that a thin archive names; none for another file."""
    with open(path, "rb") as file:
        if file.read(8) != b"!<thin>\n":
            return set()
        names = b""
        while header := file.read(60):
            # In a thin archive, only the tables of symbols and of names have contents. A header
            # "/12" is that of a member, whose name begins at byte 12 of the table of names.
            if header.startswith(b"/") and not header[1:2].isdigit():
                size = int(header[48:58])
                content = file.read(size + size % 2)
                if header.startswith(b"// "):
                    names = content
    folder = os.path.dirname(path)
    members = {os.path.join(folder, os.fsdecode(name)) for name in names.split(b"/\n")}
    members = {closure.real_path(member) for member in members if os.path.isfile(member)}
    return members.union(*map(_thin_members, members))


def _prerequisites(dependency_file: str) -> list[str]:
    """Return the prerequisites in a dependency file, with their quotes."""
    rule = _text_of(dependency_file).replace("\\\n", " ").rstrip("\n").partition(": ")[2]
    return re.findall(r"(?:\\[\s\S]|[^ \t\\])+", rule)


def _text_of(path: str) -> str:
    """Return the content of a file that a tool should have written; "" if it does not exist."""
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except FileNotFoundError:
        return ""


def _path_of(staging: str, name: str) -> str:
    """Return the path of a file that a tool names; "" if none exists.

    Some tools quote names for make, some only the dollar signs, and some quote nothing.
    """
    without_dollars = name.replace("$$", "$")
    unquoted = re.sub(r"\\(?=[ \t#:])", "", name).replace("$$", "$")
    for spelling in (unquoted, without_dollars, name):
        path = os.path.join(staging, spelling)
        if "\n" not in path and os.path.isfile(path):
            return path
    return ""


def _existing(request: Request, staging: str, names: list[str]) -> set[str]:
    """Return the paths of the files that a tool names."""
    paths: set[str] = set()
    for name in names:
        path = _path_of(staging, name)
        if not path:
            raise undetermined(request, f"it names {name!r}, which is no file")
        paths.update(_spellings(request, path))
    return paths


def _spellings(request: Request, path: str) -> list[str]:
    """Return closure.spellings(path), or only the resolved path of PyTorch's or a system's file."""
    spellings = closure.spellings(path)
    resolved = spellings[-1]
    return [resolved] if closure.is_theirs(request.fold(resolved)) else spellings


def _outside(staging: str, paths: set[str]) -> set[str]:
    """Return the paths that are not in the build's private folder."""
    return {path for path in paths if not path.startswith(f"{staging}/")}
