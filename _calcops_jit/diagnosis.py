"""Why a build or a load failed: the cause, a line that shows it, and one command that fixes it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator

from . import compile
from .messages import BuildError, report
from .request import Request

# Each cause has a line with a pattern of a tool's message, and a line with "cause -> command". The
# first pattern that matches the output counts. {0} is the first group that is not empty.
_CAUSES = r"""
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
(?:cannot find|unable to find library) -l([^\s:]+)
    a library to link with is missing -> find / -name 'lib{0}.*' 2> /dev/null; extra_ldflags=['-L...'] takes its folder
(?:unrecognized command.line option|unknown argument:?|unrecognized option) ['‘]([^'’]+)
    the compiler does not know one of the flags -> take {0} out of extra_cflags or CALCOPS_CFLAGS
multiple definition of [`'‘]([^'’]+)['’]|duplicate symbol: (.+)
    a function is defined twice -> declare {0} inline or static, or define it in one source
undefined (?:reference to [`']|symbol: )([^\s'(]+)
    a function is declared but nowhere defined -> c++filt {0}; add its source, or its library in extra_ldflags
(\S+): cannot open shared object file
    a library that it needs was not found -> export LD_LIBRARY_PATH=$(dirname $(find / -name '{0}' -print -quit))
^\[Errno \d+\]
    the cache cannot be written -> export CALCOPS_CACHE=<a folder of your own>
"""  # noqa: E501

# g++ and clang print file:line:column: error: ..., nvcc prints file(line): error: .... Below it,
# they print lines of the source.
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+"
    r"(?:\n *\d* \| .*){0,4}"
)


def explain(what: str, output: str, log: str = "") -> BuildError:
    """Return the BuildError for `what`, which failed with a tool's output."""
    lines = _CAUSES.strip("\n").splitlines()
    for pattern, explanation in zip(lines[::2], lines[1::2]):
        if match := re.search(pattern, output, re.MULTILINE):
            line = output[output.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0]
            cause, _, fix = explanation.strip().partition(" -> ")
            groups = filter(None, match.groups())
            return report(f"{what}: {cause}", [line.strip()], fix.format(*groups), log)
    error = re.search(_COMPILER_ERROR, output, re.MULTILINE)
    if error:
        place = error["at"]
        evidence = error[0].splitlines()
        return report(f"{what}: error at {place}", evidence, f"correct {place}", log)
    # Lines of torch and of ninja, which prints the commands.
    noise = r"\s*$|ninja:|FAILED: |\[\d|Error building|calcops_jit: |.* -c "
    lines = [line for line in output.splitlines() if not re.match(noise, line)]
    return report(what, lines[-6:], f"less {log}" if log else "python -m calcops_jit clean", log)


def foresee(request: Request) -> Iterator[tuple[str, str, str]]:
    """Yield (cause, a line that shows it, a command that fixes it) of what a build lacks."""
    if request.cuda.fatal:
        yield "no build for CUDA", request.cuda.reason, request.cuda.fix
    path = request.environment.get("PATH", "")
    compiler = request.compiler[0]
    if shutil.which(compiler, path=path) is None:
        evidence = f"`{compiler}` is not on PATH"
        fix = "install g++, or: conda install -c conda-forge gxx"
        if request.environment.get("CXX") and shutil.which("c++", path=path):
            evidence += " (CXX names it), but c++ is"
            fix = "unset CXX"
        yield "no C++ compiler", evidence, fix
    elif not compile.version(request):
        evidence = f"`{' '.join(request.compiler)} --version` fails"
        yield "the C++ compiler does not run", evidence, "unset CXX"
    if not compile.find_ninja(request):
        evidence = "ninja is neither on PATH nor beside this Python; it runs the compilers"
        yield "no ninja", evidence, f"{sys.executable} -m pip install ninja"
