"""Compilers and linkers: which they are, their parts, and the folders that they search."""

from __future__ import annotations

import functools
import itertools
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
    except ValueError:  # the shell's message is better
        return flags.split()


def search(request: Request, flags: str) -> list[str]:
    """Return the folders in which a compiler looks for headers, in order, after the ignored ones.

    A compiler ignores folders that do not exist yet and other names of a folder. It does not print
    where these would come, so they may be before all others.
    """
    words = words_of_flags(flags)
    without_files = [word for word in words if not word.startswith("-save-temps")]
    output = ask(request, *without_files, "-E", "-v", "-x", "c++", os.devnull)
    ignored = r'^ignoring (?:nonexistent|duplicate) directory "(.+)"$'
    folders = re.findall(ignored, output, re.MULTILINE) + searched_folders(output)
    # The assembler's folders are among these.
    options = _values(_words_of_tools([*request.compiler[1:], *words]), "-I")
    folders += filter(os.path.isabs, options)
    spellings = []
    for folder in folders:
        spellings += closure.spellings(folder)
    return spellings


def searched_folders(output: str) -> list[str]:
    """Return the folders that a compiler lists with -v."""
    listed = re.search(r"search starts here:\n(.*)End of search list", output, re.DOTALL)
    lines = listed[1].splitlines() if listed else []
    return [line.strip() for line in lines if line.startswith(" ")]


def tools(request: Request, flags: str, *parts: str) -> set[str]:
    """Return the compilers, the programs that they name if they are scripts, and these parts of
    them.
    """
    programs = set(request.tools)
    for part in parts:
        program = ask(request, *_choice(flags), f"-print-prog-name={part}").strip()
        path = shutil.which(program, path=request.environment.get("PATH"))
        if path:
            programs.add(os.path.realpath(path))
    return programs.union(*map(_programs_of_script, programs))


def _programs_of_script(path: str) -> set[str]:
    """Return the programs that a script names with a path. A binary names none."""
    with open(path, "rb") as file:
        text = file.read(65536)
    if not text.startswith(b"#!"):
        return set()
    words = set(re.findall(r"[\w./+-]+", text.decode(errors="replace")))
    paths = [shutil.which(word) for word in words if "/" in word]
    return {os.path.realpath(path) for path in paths if path}


def cuda_tools(request: Request) -> set[str]:
    if not request.cuda.build:
        return set()
    home = os.path.realpath(request.cuda.home)
    parts = ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvcc.profile", "nvvm/bin/cicc")
    return {f"{home}/{part}" for part in parts if os.path.exists(f"{home}/{part}")}


def quick_linker(request: Request) -> str:
    """Return the flag for a linker quicker than GNU ld; "" if there is none or flags choose one."""
    ldflags = words_of_flags(" ".join(request.ldflags))
    others = words_of_flags(" ".join([*request.compiler, *request.cflags, *request.cuda_cflags]))
    if any(map(_ABOUT_LINKERS.match, [*ldflags, *others])):
        return ""
    if not all(map(_PLAIN_LINKING.match, ldflags)):
        return ""
    if "GNU ld" not in ask(request, "-Wl,--version"):  # somebody has chosen another one already
        return ""
    for flag, name in ("-fuse-ld=lld", "LLD"), ("-fuse-ld=gold", "GNU gold"):
        if name in ask(request, flag, "-Wl,--version"):
            return flag
    return ""


def unlinked(request: Request, flags: str, linked: set[str]) -> list[tuple[str, str]]:
    """Return (folder, name) of every file that a library in the flags may mean, in all folders
    that are searched.

    One that appears may take the place of the one that was linked. For -lfoo that is libfoo.so
    before libfoo.a.

    Args:
        request: what is built.
        flags: those of the link.
        linked: the files that are linked. Scripts among them name others.
    """
    words = _words_of_tools([*request.compiler[1:], *words_of_flags(flags)])
    folders = request.environment.get("LIBRARY_PATH", "").split(":")
    folders += _searched(request, flags, "libraries")

    names = []
    for path in linked:
        if not closure.is_theirs(request.fold(path)):
            in_script = re.findall(r"[^\s(),\"]+", _script(path))
            names += filter(re.compile(r"^[^/-][^/]*\.(?:a|o|so[.\d]*)$").search, in_script)
            words += in_script
    folders += _values(words, "-L", "--library-path", "SEARCH_DIR")
    for value in filter(None, _values(words, "-l", "--library")):
        names += [value[1:]] if value.startswith(":") else [f"lib{value}.so", f"lib{value}.a"]
    spelled = [closure.spellings(folder)[0] for folder in filter(os.path.isabs, folders)]
    return list(itertools.product(spelled, names))


def unrun(request: Request, flags: str, *parts: str) -> list[tuple[str, str]]:
    """Return (folder, name) of each file that would run as one of these parts."""
    folders = [
        *request.environment.get("COMPILER_PATH", "").split(":"),
        *_searched(request, flags, "programs"),
    ]
    return list(itertools.product(filter(os.path.isabs, folders), parts))


def _searched(request: Request, flags: str, kind: str) -> list[str]:
    """Return the folders in which the compiler looks for its "programs" or for "libraries"."""
    output = ask(request, *_choice(flags), "-print-search-dirs")
    listed = re.search(rf"^{kind}: =(.*)$", output, re.MULTILINE)
    return [folder.rstrip("/") for folder in listed[1].split(":")] if listed else []


def _choice(flags: str) -> list[str]:
    """Return the flags that say where the compiler's parts and libraries are."""
    words = _words_of_tools(words_of_flags(flags))
    folders = [f"-B{folder}" for folder in _values(words, "-B")]
    return [*folders, *(word for word in words if word.startswith(("--sysroot", "-specs")))]


def _words_of_tools(words: list[str]) -> list[str]:
    """Replace @file by the words in that response file, and -Wl,word and -Wa,word by the words for
    the linker and the assembler.
    """
    expanded = []
    for word in words:
        if word.startswith(("-Wl,", "-Wa,")):
            expanded += _words_of_tools(word.split(",")[1:])
        elif word.startswith("@"):
            expanded += _words_of_tools(words_of_flags(closure.text_of(word[1:])))
        elif word not in ("-Xlinker", "-Xassembler"):
            expanded.append(word)
    return expanded


def _values(words: list[str], *options: str) -> list[str]:
    """Return the values of options: the rest of a word, or the next word."""
    values = []
    for word, following in zip(words, [*words[1:], ""]):
        for option in options:
            if word.startswith(option):
                values.append(word[len(option) :].removeprefix("=") or following)
    return values


def _script(path: str) -> str:
    """Return the text of a linker script; "" for an object, an archive or a library."""
    with open(path, "rb") as file:
        return "" if b"\0" in file.read(4096) else closure.text_of(path)


def linker(flags: str) -> str:
    """Return the name by which the compiler finds its linker."""
    chosen = re.findall(r"-fuse-ld=([\w.]+)(?!\S)", flags)
    return f"ld.{chosen[-1]}" if chosen else "ld"


def is_gnu(request: Request) -> bool:
    return "Free Software Foundation" in ask(request, "--version")


def ask(request: Request, *options: str) -> str:
    """Return what the compiler prints for these options. A process that reloads asks once, and
    again after the compiler has changed.
    """
    # A sanitizer is for this process.
    environment = request.environment | {"LC_ALL": "C.UTF-8", "LD_PRELOAD": ""}
    path = shutil.which(request.compiler[0], path=environment.get("PATH"))
    return _answer(
        closure.stamp_of(path or ""), tuple(environment.items()), *request.compiler, *options
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
