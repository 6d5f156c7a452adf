"""Why a build or a load failed: the cause, a line that shows it, and one command that fixes it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator

import torch

from . import toolchain
from .errors import BuildError, report
from .request import CONTRACTS, LOADER, Request

Problem = tuple[str, str, str]  # cause, a line that shows it, a command that fixes it

# Each cause has a line with a pattern of a tool's message, and a line with "cause -> command". The
# first pattern that matches the output counts. {0} is the first group that is not empty. _fix()
# has the other names in braces.
_CAUSES = r"""
Too many open files
    this process has no descriptor left -> ulimit -n $(ulimit -H -n)
/cc\w+\.\w+: No space left on device
    the disk of temporary files is full -> export TMPDIR=<a folder with space>
No space left on device|Disk quota exceeded
    the disk is full -> export CALCOPS_CACHE=<a folder with space>
Killed signal|Killed$|Cannot allocate memory|out of memory|memory exhausted
    the compiler was killed, most likely for lack of memory -> export MAX_JOBS=1
/c\+\+: Permission denied|failed to map segment
    its folder may not be executed (noexec) -> export CALCOPS_CACHE=<a folder that is not noexec>
Python\.h: No such file
    Python's headers are missing -> install python3-dev, or conda's Python
(?:before .\(. token|specifier|unknown type name '\w+')\n[ |\d]*TORCH_LIBRARY
    PyTorch's headers are not included -> begin the source with: #include <torch/library.h>
[‘'](?:at|c10|torch)[’'] (?:does not name a type|has not been declared|was not declared)|identifier '(?:at|c10|torch)'
    PyTorch's headers are not included -> begin the source with: #include <torch/types.h>
[‘']calcops[’'] (?:does not name a type|has not been declared|was not declared)|identifier 'calcops'
    the header of contracts is not included -> begin the source with: #include <calcops/operator.h>
fatal error: (\S+): No such file
    a header is missing -> find / -path '*/{0}' 2> /dev/null; the folder before {0} belongs in extra_include_paths
(?:command.line option|invalid value) .(?:-std=)?(?:c|gnu)\+\+
    the C++ compiler is too old for this PyTorch -> conda install -c conda-forge gxx
gcc versions later than (\d+)
    the C++ compiler is too new for this nvcc -> export CC=gcc-{0} CXX=g++-{0}
nsupported gpu architecture|Unknown CUDA arch
    this nvcc does not know the GPU architecture -> export TORCH_CUDA_ARCH_LIST=8.0+PTX
(?:cannot find|unable to find library) -l([^\s:]+)
    a library to link with is missing -> find / -name 'lib{0}.*' 2> /dev/null; extra_ldflags=['-L...'] takes its folder
(/[^\s:']+): Permission denied|Permission denied: '(.+)'
    a file may not be read -> chmod u+rX {0}
(?:unrecognized command.line option|unknown argument:?|unrecognized option) ['‘]([^'’]+)
    the compiler does not know one of the flags -> {drop} {0}
(?:bad|unknown) value \(?['‘]([^'’]+)['’]\)? for ['‘]?-m|unknown target CPU ['‘]([^'’]+)
    the compiler does not know this processor -> {drop} {0}
multiple definition of [`'‘]([^'’]+)['’]|duplicate symbol: (.+)
    a function is defined twice -> declare {0} inline or static, or define it in one source
undefined symbol: _Z\S*[A-Zb_]Ss
    the C++ ABI is not PyTorch's -> conda install -c conda-forge gxx
undefined (?:reference to [`']|symbol: )([^\s'(]+)
    a function is declared but nowhere defined -> c++filt {0}; add its source, or its library in extra_ldflags
(\S+): cannot open shared object file
    a library that it needs was not found -> export LD_LIBRARY_PATH=$(dirname $(find / -name '{0}' -print -quit))
"""  # noqa: E501

# g++ and clang print file:line:column: error: ..., nvcc prints file(line): error: .... Below it,
# they print lines of the source.
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+"
    r"(?:\n *\d* \| .*){0,4}"
)
# Lines in which compilers name the source lines that led to an error in a header.
_LED_TO = (
    r"^(?P<file>/[^\s:]*):(?P<line>\d+)(?::\d+)?:"
    r" +(?:(?:recursively )?required|in .constexpr.|note: .*(?:requested here|expansion))",
    r"^ +instantiation of .* at line (?P<line>\d+) of (?P<file>\S+)",
    r"^(?:In file included)? +from (?P<file>/[^\s:]*):(?P<line>\d+)(?::\d+)?[:,]",
)
# Flags with which a compiler writes no object, or writes it to another path.
_OUTPUT = re.compile(r"-(?:o.*|c|S|E|MM?|fsyntax-only|-?ptx|-?cubin|-?fatbin|-?preprocess)$")


def explain(what: str, output: str, request: Request, log: str = "") -> BuildError:
    """Return the BuildError for `what`, which failed with a tool's output."""
    lines = _CAUSES.strip("\n").splitlines()
    for pattern, explanation in zip(lines[::2], lines[1::2]):
        if match := re.search(pattern, output, re.MULTILINE):
            line = output[output.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0]
            cause, _, fix = explanation.strip().partition(" -> ")
            groups = filter(None, match.groups())
            return report(f"{what}: {cause}", [line.strip()], _fix(fix, request, *groups), log)
    error = re.search(_COMPILER_ERROR, output, re.MULTILINE)
    if error:
        place, evidence = _place(output, error, request)
        return report(f"{what}: error at {place}", evidence, f"correct {place}", log)
    # Lines of torch and of ninja, which prints the commands.
    noise = r"\s*$|ninja:|FAILED: |\[\d|Error building|calcops_jit: |.* -c "
    lines = [line for line in output.splitlines() if not re.match(noise, line)]
    return report(what, lines[-6:], f"less {log}" if log else "python -m calcops_jit clean", log)


def _place(output: str, error: re.Match, request: Request) -> tuple[str, list[str]]:
    """Return (place to correct, lines that show why) for a compiler's error.

    For an error in a header of others, this is the project's line that led to it.
    """
    evidence = error[0].splitlines()
    if _is_own(error["at"], request):
        return error["at"], evidence
    matches = [match for pattern in _LED_TO for match in re.finditer(pattern, output, re.MULTILINE)]
    for match in matches:
        file, number = match["file"], match["line"]
        if _is_own(file, request) and os.path.isfile(file):
            with open(file, errors="replace") as source:
                line = source.read().splitlines()[int(number) - 1]
            # The header's long path might leave no room for the message.
            message = re.sub(r"^\S.*/include/(?:c\+\+/[\d.]+/)?", "", evidence[0])
            place = f"{file}:{number}"
            return place, [message, f"{place}: led to it", f"  {number} | {line}"]
    return error["at"], evidence


def _is_own(path: str, request: Request) -> bool:
    """Return True if a file is the project's, and not of software that is in its folder."""
    others = (os.path.dirname(torch.__file__), LOADER, CONTRACTS, sys.prefix)
    inner = [f"{folder}/" for folder in others if folder.startswith(f"{request.root}/")]
    return path.startswith(f"{request.root}/") and not path.startswith(tuple(inner))


def _fix(text: str, request: Request, *groups: str) -> str:
    """Return a command, in which the names in braces are replaced."""
    drop = "take out of extra_cflags:" if request.asked else "unset CALCOPS_CFLAGS; it has"
    return text.format(*groups, drop=drop)


def foresee(request: Request) -> Iterator[Problem]:
    """Yield the problems that a build would have. This takes milliseconds."""
    path = request.environment.get("PATH", "")
    compiler = request.compiler[0]
    if shutil.which(compiler, path=path) is None:
        evidence = f"`{compiler}` is not on PATH"
        fix = "install g++, or: conda install -c conda-forge gxx"
        if request.environment.get("CXX") and shutil.which("c++", path=path):
            evidence += " (CXX names it), but c++ is"
            fix = "unset CXX"
        yield "no C++ compiler", evidence, fix
    elif not toolchain.version(request):
        evidence = f"`{' '.join(request.compiler)} --version` fails"
        yield "the C++ compiler does not run", evidence, "unset CXX"
    if not toolchain.find_ninja(request):
        evidence = "ninja is neither on PATH nor beside this Python; it runs the compilers"
        yield "no ninja", evidence, f"{sys.executable} -m pip install ninja"
    for source in request.sources:
        yield from _foresee_source(source, request)
    for flag in filter(_OUTPUT.match, [*request.cflags, *request.cuda_cflags]):
        evidence = f"{flag}: the loader chooses what is compiled, and into which file"
        yield "a flag asks for another output", evidence, _fix("{drop} " + flag, request)


def _foresee_source(source: str, request: Request) -> Iterator[Problem]:
    if not os.path.isfile(source):
        fix = f"restore {source}, or load without it in a new process"
        yield "a source is gone", f"the source {source} is gone", fix
        return
    if "'" in source:
        yield "ninja cannot read the names of its headers", f"{source} has a '", "rename its folder"
        return
    if re.search(r"\.(?:l?o|obj|a|so[.\d]*)$", source):
        fix = f"take it out of the sources, and pass extra_ldflags=[{source!r}]"
        yield "an object is no source", f"{source} is compiled already", fix
        return
    with open(source, encoding="utf-8", errors="replace") as file:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", file.read(), flags=re.DOTALL)
    python = sysconfig.get_path("include", "posix_prefix")
    if "<torch/extension.h>" in text and not os.path.exists(f"{python}/Python.h"):
        evidence = f"{source} includes torch/extension.h, which includes Python.h: No such file"
        yield "Python's headers are missing", evidence, "install python3-dev, or conda's Python"
    if request.asked and "PYBIND11_MODULE" in text and "TORCH_LIBRARY" not in text:
        evidence = f"{source} has PYBIND11_MODULE and no TORCH_LIBRARY"
        fix = "load it with torch.utils.cpp_extension.load, or register with TORCH_LIBRARY"
        yield "a Python module, not operators", evidence, fix
