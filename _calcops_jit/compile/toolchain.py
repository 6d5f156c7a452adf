"""Compilers and linkers: the programs that they run, and the folders that they search."""

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
# The flags for linking that do not forbid a quick linker.
_PLAIN_LINKING = re.compile(
    r"-(?:[LlOgmDIU]|W(?!l,)|f(?!lto|use-ld|plugin|whole)|pthread)\S*$|/\S*\.so[.\d]*$"
)


def words_of_flags(flags: str) -> list[str]:
    """Return the words of flags that are quoted for ninja and a shell."""
    try:
        return shlex.split(flags.replace("$$", "$"))
    except ValueError:  # an unclosed quotation mark: the build will fail with the shell's message
        return flags.split()


def search(request: Request, flags: str) -> list[str]:
    """Return the folders in which a compiler looks for headers, in order.

    The folders that it ignores come first: those that do not exist, and second names of a folder.
    They may belong before all others, because the compiler does not print their places.
    """
    words = words_of_flags(flags)
    without_files = [word for word in words if not word.startswith("-save-temps")]
    output = ask(request, *without_files, "-E", "-v", "-x", "c++", os.devnull)
    ignored = r'^ignoring (?:nonexistent|duplicate) directory "(.+)"$'
    folders = re.findall(ignored, output, re.MULTILINE) + searched_folders(output)
    # Flags for the assembler may have -I, too.
    options = _values(_words_of_tools([*request.compiler[1:], *words]), "-I")
    folders += filter(os.path.isabs, options)
    spellings = []
    for folder in folders:
        spellings += closure.spellings(folder)
    return spellings


def searched_folders(output: str) -> list[str]:
    """Return the folders for headers in the output of a compiler with -v."""
    listed = re.search(r"search starts here:\n(.*)End of search list", output, re.DOTALL)
    lines = listed[1].splitlines() if listed else []
    return [line.strip() for line in lines if line.startswith(" ")]


def tools(request: Request, flags: str, *parts: str) -> set[str]:
    """Return the compilers and their `parts`, such as cc1plus.

    If one of them is a script, the programs that it names are returned, too.
    """
    programs = set(request.tools)
    for part in parts:
        program = ask(request, *_folder_flags(flags), f"-print-prog-name={part}").strip()
        path = shutil.which(program, path=request.environment.get("PATH"))
        if path:
            programs.add(os.path.realpath(path))
    return programs.union(*map(_programs_of_script, programs))


def _programs_of_script(path: str) -> set[str]:
    """Return the programs that a script names with a path; none for a binary."""
    with open(path, "rb") as file:
        text = file.read(65536)
    if not text.startswith(b"#!"):
        return set()
    words = set(re.findall(r"[\w./+-]+", text.decode(errors="replace")))
    paths = [shutil.which(word) for word in words if "/" in word]
    return {os.path.realpath(path) for path in paths if path}


def cuda_tools(request: Request) -> set[str]:
    """Return the programs and files of a CUDA toolkit that nvcc runs or reads."""
    if not request.cuda.build:
        return set()
    home = os.path.realpath(request.cuda.home)
    parts = ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvcc.profile", "nvvm/bin/cicc")
    return {f"{home}/{part}" for part in parts if os.path.exists(f"{home}/{part}")}


def quick_linker(request: Request) -> str:
    """Return the flag for lld or gold; "" if neither is installed, or flags concern the linker."""
    ldflags = words_of_flags(" ".join(request.ldflags))
    others = words_of_flags(" ".join([*request.compiler, *request.cflags, *request.cuda_cflags]))
    if any(map(_ABOUT_LINKERS.match, [*ldflags, *others])):
        return ""
    if not all(map(_PLAIN_LINKING.match, ldflags)):
        return ""
    if "GNU ld" not in ask(request, "-Wl,--version"):  # the system's default is another one
        return ""
    for flag, name in ("-fuse-ld=lld", "LLD"), ("-fuse-ld=gold", "GNU gold"):
        if name in ask(request, flag, "-Wl,--version"):
            return flag
    return ""


def unlinked(request: Request, flags: str, linked: set[str]) -> list[tuple[str, str]]:
    """Return (folder, name) for every path at which the linker looks for a library.

    A file that appears at such a path may be linked in place of the present one. For -lfoo, the
    names are libfoo.so and libfoo.a.

    Args:
        request: what is built.
        flags: flags of the link.
        linked: the files that are linked. Linker scripts among them name more libraries.
    """
    words = _words_of_tools([*request.compiler[1:], *words_of_flags(flags)])
    folders = request.environment.get("LIBRARY_PATH", "").split(":")
    folders += _searched(request, flags, "libraries")

    names = []
    for path in linked:
        if not closure.is_theirs(request.fold(path)):
            in_script = re.findall(r"[^\s(),\"]+", _script(path))
            names += filter(re.compile(r"^[^/-][^/]*\.(?:a|o|so[.\d]*)$").search, in_script)
            words += in_script  # such as -lfoo and SEARCH_DIR=/folder
    folders += _values(words, "-L", "--library-path", "SEARCH_DIR")
    for value in filter(None, _values(words, "-l", "--library")):
        if value.startswith(":"):  # -l:name
            names.append(value[1:])
        else:
            names += [f"lib{value}.so", f"lib{value}.a"]
    paths = [closure.spellings(folder)[0] for folder in filter(os.path.isabs, folders)]
    return list(itertools.product(paths, names))


def unrun(request: Request, flags: str, *parts: str) -> list[tuple[str, str]]:
    """Return (folder, name) for every path at which the compiler looks for one of these parts."""
    folders = [
        *request.environment.get("COMPILER_PATH", "").split(":"),
        *_searched(request, flags, "programs"),
    ]
    return list(itertools.product(filter(os.path.isabs, folders), parts))


def _searched(request: Request, flags: str, kind: str) -> list[str]:
    """Return the folders in which the compiler looks for its "programs" or for "libraries"."""
    output = ask(request, *_folder_flags(flags), "-print-search-dirs")
    listed = re.search(rf"^{kind}: =(.*)$", output, re.MULTILINE)
    return [folder.rstrip("/") for folder in listed[1].split(":")] if listed else []


def _folder_flags(flags: str) -> list[str]:
    """Return those flags that determine the folders of the compiler's parts and libraries."""
    words = _words_of_tools(words_of_flags(flags))
    folders = [f"-B{folder}" for folder in _values(words, "-B")]
    others = [word for word in words if word.startswith(("--sysroot", "-specs"))]
    return folders + others


def _words_of_tools(words: list[str]) -> list[str]:
    """Return words in which @file, -Wl,word and -Wa,word are replaced by what they stand for."""
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
    """Return the values of options: `/a` of `-L/a`, `-L=/a` and `-L /a`."""
    values = []
    for word, following in zip(words, [*words[1:], ""]):
        for option in options:
            if word.startswith(option):
                values.append(word[len(option) :].removeprefix("=") or following)
    return values


def _script(path: str) -> str:
    """Return the text of a linker script; "" for a binary file."""
    with open(path, "rb") as file:
        return "" if b"\0" in file.read(4096) else closure.text_of(path)


def linker(flags: str) -> str:
    """Return the name by which the compiler finds its linker."""
    chosen = re.findall(r"-fuse-ld=([\w.]+)(?!\S)", flags)
    return f"ld.{chosen[-1]}" if chosen else "ld"


def is_gnu(request: Request) -> bool:
    """Return True if the compiler is GCC."""
    return "Free Software Foundation" in ask(request, "--version")


def ask(request: Request, *options: str) -> str:
    """Return what the compiler prints for these options.

    The output is remembered until the compiler or the environment changes.
    """
    # LD_PRELOAD may be a sanitizer for this process.
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
    process = subprocess.run(command, **options)
    return os.fsdecode(process.stdout + process.stderr)  # paths in it need not be UTF-8
