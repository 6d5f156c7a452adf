"""What the loader prints: errors with cause and fix, lines on stderr, the progress of a build."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable

_MAX_LINES = 12
_MAX_WIDTH = 300  # of a line of evidence
_MAX_WARNINGS = 3
_REDRAW_S = 0.5
_LOG_S = 10.0
# Each cause has a line with a pattern of a tool's message, and a line with "cause -> command". The
# first pattern that matches the output counts. {0} is the first group that is not empty.
_CAUSES = r"""
No space left on device|Disk quota exceeded
    the disk is full -> export CALCOPS_CACHE=<a folder with space>, or TMPDIR for files of a compiler
version [`'](?:GLIBCXX|CXXABI|GCC)_\S+ not found
    an older library than the compiler's was loaded first -> export LD_PRELOAD=$(c++ -print-file-name=libstdc++.so.6)
Killed signal|Killed$|(?:terminated with|due to) signal 9|Cannot allocate memory|out of memory|memory exhausted
    the compiler was killed, probably because memory ran out -> export MAX_JOBS=1
same name and overload name multiple times|Only a single TORCH_LIBRARY
    it registers something that is already registered -> restart Python, or load only one of the two libraries
Python\.h(?:: No such file|' file not found)
    Python's headers are missing -> install python3-dev, or conda's Python
(?:before .\(. token|specifier|unknown type name '\w+')\n[ |\d]*TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?\b
    PyTorch's headers are not included -> begin the source with: #include <torch/library.h>
(?:[‘'](?:at|c10|torch)[’'] (?:does not name a type|has not been declared|was not declared)|identifier '(?:at|c10|torch)').*\n.*\b(?:at|c10|torch)::
    PyTorch's headers are not included -> begin the source with: #include <torch/types.h>
[‘']calcops[’'] (?:does not name a type|has not been declared|was not declared)|identifier 'calcops'
    the header of contracts is not included -> begin the source with: #include <calcops/operator.h>
or later compatible compiler is required|strong_ordering['’"]? (?:in namespace|has not been)|(?:member|type) ['"‘]?(?:std::)?strong_ordering
    PyTorch needs a newer C++ -> take -std=... out of extra_cflags and extra_cuda_cflags, or update the compiler
unsupported GNU version! gcc versions later than (\d+)
    nvcc does not support a g++ that new -> export CC=g++-{0}
Unsupported gpu architecture '(\w+)'
    this CUDA does not support the GPU -> leave {0} out of TORCH_CUDA_ARCH_LIST and extra_cuda_cflags, or use an older CUDA
fatal error: '?(\S+?)(?:: No such file|' file not found)
    a header is missing -> find / -path '*/{0}' 2> /dev/null; the folder before {0} belongs in extra_include_paths
(?:cannot find|unable to find library) -l([^\s:]+)
    a library to link with is missing -> find / -name 'lib{0}.*' 2> /dev/null; extra_ldflags=['-L...'] takes its folder
(?:unrecognized command.line option|unknown argument:?|unrecognized option) ['‘]([^'’]+)
    the compiler does not know one of the flags -> take {0} out of the flags, CALCOPS_CFLAGS or CXX
undefined (?:reference to [`']|symbol: )([^\s'(]+)
    a function is declared but nowhere defined -> c++filt {0}; add its source, or its library in extra_ldflags
(\S+): cannot open shared object file
    a library that it needs was not found -> find / -name '{0}' 2> /dev/null; extra_ldflags=['-Wl,-rpath,...'] takes its folder
^\[Errno \d+\]
    the cache cannot be written -> export CALCOPS_CACHE=<a folder of your own>
"""  # noqa: E501
# These causes are searched only in the first error of a compiler, since it may cause the others.
_CAUSES_OF_ERROR = r"""
(?:no matching (?:function for call to|constructor for initialization of)|no instance of constructor) [‘'"](?:const )?calcops::Kernel
    a Kernel takes the operator's name and functions -> write: const calcops::Kernel cpu("name", f<float>, f<double>); a lambda needs a + before its [
(?:no matching (?:function for call to|constructor for initialization of)|no instance of constructor) [‘'"](?:const )?calcops::Contract
    a Contract takes a text and arrays -> write: const calcops::Contract contract(R"(...)"); arrays of Derivative, Check or Composition may follow
expected (?:unqualified-id|an identifier).*\n.*\b(?:Contract|Kernel)\(
    an object needs a name -> write: const calcops::Contract contract(...); and: const calcops::Kernel cpu(...);
\bCheckedPointer<|[‘']auto\*[’'] from [‘'].*::data[’']
    with checks, data is no plain pointer -> write +x.data where a pointer is needed, or build without check
unterminated raw string|raw string missing terminating
    a contract does not end -> end it with )");
missing (?:terminating|closing) .*(?:"|quote)
    a string isn't closed on its line -> write a contract as R"(...)", with the R before the quotation mark
[‘']Tensor[’'] (?:was not declared|does not name a type)|(?:undeclared identifier|unknown type name) 'Tensor'|identifier "Tensor" is undefined
    C++ does not know the type Tensor -> write a contract as R"(...)"; PyTorch's type is at::Tensor
"""  # noqa: E501

# g++ and clang print file:line:column: error: ..., nvcc prints file(line): error: .... Below it,
# they print lines of the source.
_PLACE = r"^(?P<at>\S.*?(?::\d+(?::\d+)?|\(\d+\)))\s*:"
# g++ prints "declared void" before its cause.
_MESSAGE = r"error\s*(?:#[\w-]+)?: (?!variable or field .* declared void)(?P<message>.+)"
_COMPILER_ERROR = rf"{_PLACE} (?:fatal )?{_MESSAGE}(?:\n *\d* \| .*){{0,4}}"
# A line of the source has a number and a bar, or the next line has a caret.
_QUOTED = r"^ *\d* \| .*|^.*\n(?=[ ~]*\^[ ~^]*$)"
# What led to an error stands above it. Macros, and templates of clang and nvcc, stand below it.
_ABOVE = r"In file included from | +from |.*: (?:In|At) |.*: +(?:recursively )?required | *\d* \| "
_REQUIRED = rf"{_PLACE} +(?:recursively )?required "
_NOTED = rf"{_PLACE} note: in (?:instantiation|expansion of macro) "
_INCLUDED = r"(?:In file included| +) from (?P<at>.+?:\d+)"
# g++: static assertion failed: TEXT; nvcc: ... failed with "TEXT"; clang has the condition, too.
_ASSERTION = r"""static[_ ]assert\w* failed(?: due to requirement '.*?')?(?: with|:)? "?(.*?)"?$"""
# Headers of compilers, CUDA, PyTorch and this project, which are correct.
_FOREIGN = (
    r"/usr/(?:bin|include|lib|local/cuda)|.*/(?:site-packages|lib/gcc|lib/clang|include/c\+\+)/"
    r"|.*/(?:torch|contracts|targets/[^/]+|cuda[^/]*)/include/|.*/_calcops_jit/shadow/"
)


class BuildError(RuntimeError):
    """A library could not be built or loaded. The message says why, in at most twelve lines."""

    __module__ = "calcops_jit"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"BuildError: {self}"]


def report(what: str, evidence: list[str], fix: str, log: str = "") -> BuildError:
    """Return a BuildError.

    Args:
        what: what failed.
        evidence: lines that show the cause.
        fix: a command or an action that removes the cause.
        log: path of a file with all output.
    """
    last_lines = [f"  fix: {fix}"]
    if log:
        last_lines.append(f"  log: {log}")
    max_evidence_lines = _MAX_LINES - 1 - len(last_lines)
    lines = [f"  {line.rstrip()[:_MAX_WIDTH]}" for line in evidence[:max_evidence_lines]]
    return BuildError("\n".join([what, *lines, *last_lines]))


def explain(what: str, output: str, log: str = "", unknown: BuildError | None = None) -> BuildError:
    """Return the BuildError for `what`, which failed with a tool's output.

    If the cause is unknown, this is `unknown`, or an error with the last lines of the output.
    """
    output = re.sub("\x1b\\[[0-9;]*m", "", output)  # colours
    for pattern, cause, fix in _table(_CAUSES):
        if match := _search(pattern, output):
            line = output[output.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0]
            groups = filter(None, match.groups())
            return report(f"{what}: {cause}", [line.strip()], fix.format(*groups), log)
    if error := re.search(_COMPILER_ERROR, output, re.MULTILINE):
        return _explain_line(what, error, output, log)
    if unknown:
        return unknown
    # Lines of torch and of ninja, which prints the commands.
    noise = r"\s*$|ninja: (?!error)|note: |FAILED: |\[\d|Error building|calcops_jit: |.* -c "
    lines = [line for line in output.splitlines() if not re.match(noise, line)]
    return report(what, lines[-6:], f"less {log}" if log else "python -m calcops_jit clean", log)


def _explain_line(what: str, error: re.Match, output: str, log: str) -> BuildError:
    """Return the BuildError for the first error that a compiler found in a source."""
    place = error["at"]
    evidence = error[0].splitlines()
    if len(evidence) == 1 and (line := _source_line(place)):
        evidence.append(line)
    for pattern, cause, fix in _table(_CAUSES_OF_ERROR):
        if re.search(pattern, "\n".join(evidence)):
            return report(f"{what}: {cause}", evidence, fix, log)
    hint = re.search("did you forget to [‘'](#include <.+?>)[’']", output[error.end() :])
    if hint:
        return report(f"{what}: a header is missing", evidence, f"write above: {hint[1]}", log)
    fix = f"correct {place}"
    if log and re.match(_FOREIGN, place):
        fix = f"less {log}"
    for line in _what_led_to(error, output)[:1]:
        if re.match(_FOREIGN, place):
            message = re.sub(_ASSERTION, r"static assertion failed: \1", error["message"])
            evidence = [f"{line['at']}: {_source_line(line['at'])}", message, f"in {place}"]
            place = line["at"]
            fix = f"correct {place}"
        else:
            evidence.append(line.string.strip())
            fix += f" or {line['at']}"
    return report(f"{what}: error at {place}", evidence, fix, log)


def warnings_of(log: str) -> list[str]:
    """Return the first lines of a log in which compilers warn."""
    with open(log, encoding="utf-8", errors="replace") as file:
        found = re.finditer(rf"{_PLACE} warning\b.*", file.read(), re.MULTILINE)
    return list(dict.fromkeys(line[0] for line in found))[:_MAX_WARNINGS]


def _table(causes: str) -> list[tuple[str, str, str]]:
    """Return (pattern, cause, fix) for each two lines of a text."""
    lines = causes.strip("\n").splitlines()
    return [
        (pattern, *explanation.strip().split(" -> "))
        for pattern, explanation in zip(lines[::2], lines[1::2])
    ]


def _search(pattern: str, output: str) -> re.Match | None:
    """Return the first match of a cause that does not begin in a line of a source."""
    spans = [match.span() for match in re.finditer(_QUOTED, output, re.MULTILINE)]
    for match in re.finditer(pattern, output, re.MULTILINE):
        if not any(start <= match.start() < end for start, end in spans):
            return match
    return None


def _what_led_to(error: re.Match, output: str) -> list[re.Match]:
    """Return the user's lines that led to an error in a template, a macro or a foreign header."""
    above: list[str] = []
    for line in reversed(output[: error.start()].splitlines()):
        if not re.match(_ABOVE, line):
            break
        above.insert(0, line)
    below = re.split(r": (?:fatal )?(?:error|warning)\b", output[error.end() :])[0]
    # nvcc: detected during instantiation of "f" at line 3 of file
    below = re.sub(r"(?m)^ .* at line (\d+) of (.+)$", r"\2:\1: note: in instantiation here", below)
    if sum(line.startswith("In file") for line in above) > 1:  # clang begins with the source
        above.reverse()
    matches = [re.match(_REQUIRED, line) for line in above]
    matches += [re.match(_NOTED, line) for line in below.splitlines()]
    if re.match(_FOREIGN, error["at"]):
        matches += [re.match(_INCLUDED, line) for line in above]
    return [match for match in matches if match and not re.match(_FOREIGN, match["at"])]


def notebook_shell():
    """Return the shell of IPython, which runs notebooks; None in another program."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython, "get_ipython", lambda: None)()  # another thread may be importing it


def _source_line(place: str) -> str:
    """Return the line of a source at a compiler's place; "" if it cannot be read."""
    path, number = re.match(r"(.*?)[:(](\d+)[:)\d]*$", place).groups()
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()[int(number) - 1].strip()
    except (OSError, IndexError):
        return ""


def say(text: str) -> None:
    """Print a line on stderr. It is never redrawn."""
    _print(f"calcops_jit: {text}\n")


def _print(text: str) -> None:
    if sys.stderr is not None:  # print(file=None) would write to sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not fail a build
            print(text, end="", file=sys.stderr, flush=True)


class Progress:
    """A context that shows the title and the state of a task. At its end it shows `outcome`.

    update() redraws the line on a terminal and in a notebook's cell, and repeats it in a log. The
    caller calls it often. An interrupted build would not always stop a thread.
    """

    outcome = ""

    def __init__(self, title: str, state: Callable[[], str]):
        self._title = title
        self._state = state
        self._terminal = False
        self._cell = None
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a closed stream
            self._terminal = sys.stderr.isatty()
        if type(sys.stderr).__module__.startswith("ipykernel"):
            from IPython.display import display

            self._cell = display({"text/plain": ""}, raw=True, display_id=True)
        self._start = time.monotonic()
        self._next = 0.0  # when the state is shown next, in seconds since the start
        self._shown = ""

    def __enter__(self) -> Progress:
        self.update()
        return self

    def __exit__(self, *exception) -> None:
        self._show(self.outcome, "\n" if self.outcome else "\r")

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._start

    def update(self) -> None:
        """Show the state, unless it was shown a moment ago."""
        seconds = self.seconds()
        if seconds >= self._next:
            self._next = seconds + (_REDRAW_S if self._terminal or self._cell else _LOG_S)
            text = f"{self._title} {self._state()} {seconds:.0f} s"
            if text != self._shown:
                self._shown = text
                self._show(text)

    def _show(self, text: str, end: str = "") -> None:
        if self._cell:
            self._cell.update({"text/plain": text}, raw=True)
        elif self._terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"calcops_jit: {text}" if text else ""
            _print("\r" + line[:width].ljust(width) + end)
        elif text:
            say(text)
