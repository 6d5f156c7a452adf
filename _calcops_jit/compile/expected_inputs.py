"""Which files a build will read, as far as the request shows before a compiler runs."""

from __future__ import annotations

import os
import re

from ..cache import closure
from ..errors import report
from ..request import Request
from . import dependency_files, toolchain

_INCLUDE = rb"^[ \t]*#[ \t]*(?:include(?:_next)?|import|embed)[ \t]*[<\"]([^>\"\n]+)[>\"]"


def by_include_lines(request: Request) -> dict[str, bytes]:
    """Return {path: content} of the sources and of the project's headers that they may include."""
    contents: dict[str, bytes] = {}
    folders = project_folders(request)
    unread = [source for source in request.sources if os.path.isfile(source)]
    while unread:
        path = unread.pop()
        if path in contents:
            continue
        with open(path, "rb") as file:
            contents[path] = file.read()
        for name in re.findall(_INCLUDE, contents[path], re.MULTILINE):
            unread += _headers(os.fsdecode(name), [os.path.dirname(path), *folders])
    return contents


def _headers(name: str, folders: list[str]) -> list[str]:
    """Return the files with this name in the folders.

    BuildError: one of them is a FIFO or the like.
    """
    headers = []
    for folder in folders:
        path = f"{folder}/{name}"
        if os.path.isfile(path):
            headers.append(closure.real_path(path))
        elif os.path.exists(path) and not os.path.isdir(path):
            raise closure.no_regular_file(path)
    return headers


def project_folders(request: Request) -> list[str]:
    """Return the folders that compilers search for headers, without PyTorch's and the system's."""
    words = [*request.cflags, *request.cuda_cflags]
    folders = list(request.include_paths)
    folders += [word[2:] for word in words if word.startswith("-I/")]
    for option, value in zip(words, words[1:]):
        if option in ("-I", "-isystem", "-iquote", "-idirafter"):
            folders.append(value)
    return [folder for folder in folders if not closure.is_theirs(request.fold(folder) + "/")]


def in_flags(request: Request, flags: str) -> set[str]:
    """Return the files that flags name, such as linker scripts, plugins and response files.

    Files that response files name are among them.
    """
    files: set[str] = set()
    for word in toolchain.words_of_flags(flags):
        # A path begins at the first slash of a piece, as in -Wl,-T,/a/b.ld. The whole word is a
        # piece, too, because a path may contain "=" or ",".
        pieces = [word, *re.split("[=,]", word)]
        paths = {piece[piece.index("/") :] for piece in pieces if "/" in piece}
        for path in paths:
            if path in files or not os.path.isfile(path):
                continue
            files.add(path)
            if word.endswith(f"@{path}"):
                files |= in_flags(request, _response(request, path))
    return files


def _response(request: Request, path: str) -> str:
    """Return the flags in a response file. BuildError: some are for dependency files."""
    flags = closure.text_of(path)
    unwanted = re.search(dependency_files.FLAGS, flags)
    if unwanted:
        raise report(
            f"cannot build {request.name}: a response file has flags for dependency files",
            [f"{path} has {unwanted[0]}"],
            f"take {unwanted[0]} out of {path}",
        )
    return flags
