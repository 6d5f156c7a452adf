"""What compilers and linkers say of themselves: which they are, their parts, where they search."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess

from ..cache import closure
from ..request import Request

_ABOUT_LINKERS = re.compile(r"-fuse-ld|--ld-path|-B|-specs|-T|-Wl,|-Xlinker|-z|-flto|@")
# What the user's flags for linking may be where a quick linker links.
_PLAIN_LINKING = re.compile(
    r"-(?:[LlOgmDIU]|W(?!l,)|f(?!lto|use-ld|plugin|whole)|pthread)\S*$|/\S*\.so[.\d]*$"
)


def words_of_flags(flags: str) -> list[str]:
    try:
        return shlex.split(flags.replace("$$", "$"))
    except ValueError:  # which the shell will say better
        return flags.split()


def search(request: Request, flags: str) -> list[str]:
    """Returns the folders in which headers are looked for, in order, after those that are ignored.

    A compiler ignores folders that do not exist yet and other names of a folder. It does not say
    where these would come, so they may be before all others.
    """
    words = words_of_flags(flags)
    asked = [word for word in words if not word.startswith("-save-temps")]
    said = ask(request, *asked, "-E", "-v", "-x", "c++", os.devnull)
    listed = re.search(r"search starts here:\n(.*)End of search list", said, re.DOTALL)
    found = (
        [line.strip() for line in listed[1].splitlines() if line.startswith(" ")] if listed else []
    )
    found = (
        re.findall(r'^ignoring (?:nonexistent|duplicate) directory "(.+)"$', said, re.MULTILINE)
        + found
    )
    # The assembler's folders are among these.
    found += filter(os.path.isabs, _values(_words_of_tools([*request.compiler[1:], *words]), "-I"))
    return [spelled for folder in found for spelled in closure.spellings(folder)]


def tools(request: Request, flags: str, *parts: str) -> set[str]:
    """Return the compilers, the programs that they name if they are scripts, and these parts of
    them.
    """
    found = set(request.tools)
    for part in parts:
        program = ask(request, *_choice(flags), f"-print-prog-name={part}").strip()
        if path := shutil.which(program, path=request.environment.get("PATH")):
            found.add(os.path.realpath(path))
    for script in list(found):
        with open(script, "rb") as file:
            text = file.read(65536)
        if text.startswith(b"#!"):
            words = set(re.findall(r"[\w./+-]+", text.decode(errors="replace")))
            found |= {
                os.path.realpath(path) for w in words if "/" in w and (path := shutil.which(w))
            }
    return found


def cuda_tools(request: Request) -> set[str]:
    if not request.cuda.build:
        return set()
    home = os.path.realpath(request.cuda.home)
    parts = ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvcc.profile", "nvvm/bin/cicc")
    found = {f"{home}/{part}" for part in parts if os.path.exists(f"{home}/{part}")}
    return found


def quick_linker(request: Request) -> str:
    """Return the flag for a linker quicker than GNU ld; "" if there is none or flags choose one."""
    ldflags = words_of_flags(" ".join(request.ldflags))
    others = words_of_flags(" ".join([*request.compiler, *request.cflags, *request.cuda_cflags]))
    if any(map(_ABOUT_LINKERS.match, [*ldflags, *others])) or not all(
        map(_PLAIN_LINKING.match, ldflags)
    ):
        return ""
    if "GNU ld" not in ask(request, "-Wl,--version"):  # somebody has chosen another one already
        return ""
    for flag, name in ("-fuse-ld=lld", "LLD"), ("-fuse-ld=gold", "GNU gold"):
        if name in ask(request, flag, "-Wl,--version"):
            return flag
    return ""


def unlinked(request: Request, flags: str, linked: set[str]) -> list[tuple[str, str]]:
    """Returns (folder, name) of every file that a library in the flags may mean, in all folders
    that are searched.

    One that appears may take the place of the one that was found. For -lfoo that is libfoo.so
    before libfoo.a.

    linked   the files that are linked; scripts among them name others
    """
    words = _words_of_tools([*request.compiler[1:], *words_of_flags(flags)])
    folders = request.environment.get("LIBRARY_PATH", "").split(":")
    folders += _searched(request, flags, "libraries")

    names = []
    for path in linked:
        if not closure.is_theirs(request.fold(path)):
            in_script = re.findall(r"[^\s(),\"]+", _script(path))
            names += [
                word for word in in_script if re.search(r"^[^/-][^/]*\.(?:a|o|so[.\d]*)$", word)
            ]
            words += in_script
    folders += _values(words, "-L", "--library-path", "SEARCH_DIR")
    for value in filter(None, _values(words, "-l", "--library")):
        names += [value[1:]] if value.startswith(":") else [f"lib{value}.so", f"lib{value}.a"]
    spelled = [closure.spellings(folder)[0] for folder in filter(os.path.isabs, folders)]
    return [(folder, name) for folder in spelled for name in names]


def unrun(request: Request, flags: str, *parts: str) -> list[tuple[str, str]]:
    """Return (folder, name) of each file that would run as one of these parts."""
    folders = [
        *request.environment.get("COMPILER_PATH", "").split(":"),
        *_searched(request, flags, "programs"),
    ]
    return [(folder, part) for folder in filter(os.path.isabs, folders) for part in parts]


def _searched(request: Request, flags: str, what: str) -> list[str]:
    """Returns the folders in which the compiler looks for its "programs" or for "libraries"."""
    said = ask(request, *_choice(flags), "-print-search-dirs")
    listed = re.search(rf"^{what}: =(.*)$", said, re.MULTILINE)
    return [folder.rstrip("/") for folder in listed[1].split(":")] if listed else []


def _choice(flags: str) -> list[str]:
    """Returns the flags that say where the compiler's parts and libraries are."""
    words = _words_of_tools(words_of_flags(flags))
    folders = [f"-B{folder}" for folder in _values(words, "-B")]
    return [*folders, *(word for word in words if word.startswith(("--sysroot", "-specs")))]


def _words_of_tools(words: list[str]) -> list[str]:
    """Puts what a response file has in the place of @file, and words for the linker or the
    assembler in the place of -Wl,word and -Wa,word.
    """
    found = []
    for word in words:
        if word.startswith(("-Wl,", "-Wa,")):
            found += _words_of_tools(word.split(",")[1:])
        elif word.startswith("@"):
            found += _words_of_tools(words_of_flags(closure.text_of(word[1:])))
        elif word not in ("-Xlinker", "-Xassembler"):
            found.append(word)
    return found


def _values(words: list[str], *options: str) -> list[str]:
    """Returns the values of options: the rest of a word, or the next word."""
    values = []
    for word, following in zip(words, [*words[1:], ""]):
        for option in options:
            if word.startswith(option):
                values.append(word[len(option) :].removeprefix("=") or following)
    return values


def _script(path: str) -> str:
    """Returns the text of a linker script; "" for an object, an archive or a library."""
    with open(path, "rb") as file:
        return "" if b"\0" in file.read(4096) else closure.text_of(path)


def linker(flags: str) -> str:
    """The name by which the compiler finds its linker."""
    chosen = re.findall(r"-fuse-ld=([\w.]+)(?!\S)", flags)
    return f"ld.{chosen[-1]}" if chosen else "ld"


def is_gnu(request: Request) -> bool:
    return "Free Software Foundation" in ask(request, "--version")


def ask(request: Request, *question: str) -> str:
    """The compiler's answer to a question about itself. A process that reloads asks once, and again
    after a change of it.
    """
    # A sanitizer is for this process.
    environment = request.environment | {"LC_ALL": "C.UTF-8", "LD_PRELOAD": ""}
    path = shutil.which(request.compiler[0], path=environment.get("PATH"))
    return _answer(
        closure.stamp_of(path or ""), tuple(environment.items()), *request.compiler, *question
    )


@functools.cache
def _answer(stamp: bytes, environment: tuple[tuple[str, str], ...], *command: str) -> str:
    options = {
        "cwd": "/",
        "env": dict(environment),
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
    }
    done = subprocess.run(command, **options)
    return os.fsdecode(done.stdout + done.stderr)  # it may quote paths
