"""Why a build failed, in at most twelve lines: what failed, the first real error, what mends it, where the log is."""

from __future__ import annotations

import itertools
import re
import shutil

_MAX_LINES = 12

# g++ and clang print file:line:column: error: ..., nvcc file(line): error: ... or error #20: ...
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+$"
)
_IS_SHOWN_SOURCE = r" *\d* \| "  # as compilers do, with a caret, below their message
KILLED_FOR_MEMORY = (
    r"Killed signal|signal terminated program|Killed$|Cannot allocate memory|out of memory|memory exhausted"
)
# (pattern in the output, cause, remedy); the first that matches, so the narrower come first.
CAUSES = [
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "df -h {cache}; set CALCOPS_CACHE to a folder with space",
    ),
    (
        KILLED_FOR_MEMORY,
        "the compiler was killed, most likely for lack of memory",
        "MAX_JOBS=1 python -m calcops_jit build",
    ),
    (
        r"Python\.h: No such file",
        "Python's headers are missing",
        "apt install python3-dev (or your system's python development package)",
    ),
    (
        r"You need C\+\+(\d+) to compile PyTorch|#error .*C\+\+(?:17|20) or later",
        "an older C++ standard was forced on PyTorch's headers",
        "remove -std=... from the flags: torch chooses the standard itself",
    ),
    (
        r"unsupported GNU version|#error -- unsupported .*version",
        "the C++ compiler is too new for this nvcc",
        "set CC and CXX to an older g++ (CC=g++-13 CXX=g++-13), or take the nvcc of torch's version: make cuda",
    ),
    (
        r"Unknown CUDA arch|Unsupported gpu architecture|unsupported gpu architecture",
        "this nvcc does not know the GPU architecture",
        "set TORCH_CUDA_ARCH_LIST to one that it knows (such as 8.0), or take a newer nvcc: make cuda",
    ),
    (
        r"cannot find -l(\S+)",
        "a library to link with was not found",
        "install it, or name its folder with extra_ldflags=['-L<folder>']",
    ),
    (r"Permission denied", "a file or folder may not be used", "set CALCOPS_CACHE to a folder of your own"),
    (
        r"unrecognized command[ -]line option|unknown argument|unrecognized option",
        "the compiler does not know one of the flags",
        "remove the flag, or set CXX to g++ 9 or newer",
    ),
    (
        r"undefined reference to|undefined symbol",
        "a function is declared but nowhere defined",
        "add the source that defines it, or correct its signature",
    ),
]


class BuildError(RuntimeError):
    """A library could not be built or loaded. The message says why, in at most twelve lines."""

    __module__ = "calcops_jit"

    def _render_traceback_(self) -> list[str]:  # what a notebook shows
        return [f"BuildError: {self}"]


def report(what: str, evidence: list[str], remedy: str, log: str = "") -> BuildError:
    """The one form of every BuildError."""
    tail = [f"  fix: {remedy}"] if remedy else []
    if log:
        tail.append(f"  log: {log}")
    room = _MAX_LINES - 1 - len(tail)
    return BuildError("\n".join([what, *(f"  {line.rstrip()[:200]}" for line in evidence[:room]), *tail]))


def explain(name: str, output: str, log: str, cache: str) -> BuildError:
    """The BuildError for a compile or a link that failed with this output."""
    error = re.search(_COMPILER_ERROR, output, re.MULTILINE)
    for pattern, cause, remedy in CAUSES:
        if match := re.search(pattern, output, re.MULTILINE):
            evidence = (
                [error[0]]
                if error and error.start() <= match.start() <= error.end()
                else [_line(output, match)]
            )
            return report(f"cannot build {name}: {cause}", evidence, remedy.format(cache=cache), log)
    if error:
        below = itertools.takewhile(
            lambda line: re.match(_IS_SHOWN_SOURCE, line), output[error.end() + 1 :].splitlines()
        )
        shown = [error[0], *list(below)[:4]]
        return report(f"cannot build {name}: error at {error['at']}", shown, f"correct {error['at']}", log)
    last = [line for line in output.splitlines() if line.strip() and not line.startswith("ninja:")][-6:]
    return report(f"cannot build {name}", last or ["the output is above"], "read the log", log)


def missing_tools(name: str, compiler: list[str], ninja: str | None) -> BuildError | None:
    """What can be known before anything is started."""
    if shutil.which(compiler[-1] if len(compiler) == 1 else compiler[0]) is None:
        return report(
            f"cannot build {name}: no C++ compiler",
            [f"`{compiler[0]}` is not on PATH" + (" (CXX names it)" if compiler[0] != "c++" else "")],
            "apt install g++ (dnf install gcc-c++, conda install gxx), or set CXX to your compiler",
        )
    if ninja is None:
        return report(
            f"cannot build {name}: no ninja",
            ["ninja runs the compilers; it is neither on PATH nor beside this Python"],
            "pip install ninja",
        )
    return None


def _line(text: str, match: re.Match) -> str:
    start = text.rfind("\n", 0, match.start()) + 1
    return text[start:].partition("\n")[0]
