"""Why a build or a load failed: the cause, a line that shows it, and one command that fixes it.

`foresee` finds causes before a compiler runs. `judge` finds them in a tool's output, with the
patterns of causes.txt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from .. import cuda
from ..cache.closure import text_of
from ..errors import NO_DESCRIPTOR, BuildError, report
from ..request import Request

# {major version of CUDA: the oldest driver for any of its releases}, by CUDA's release notes.
_DRIVERS = {12: 525, 13: 580}

# g++ and clang print file:line:column: error: ..., nvcc prints file(line): error: ... or
# file(line): error #20: .... Below it, they print lines of the source.
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+"
    r"(?:\n *\d* \| .*){0,4}"
)
# Lines in which compilers name the source lines that led to an error in a header. g++ prints those
# of _LED_BEFORE before the error. g++, clang and nvcc print those of _LED_AFTER after the error,
# and those of _INCLUDED before it. Of several such lines, the first is the nearest to the error.
_LED_BEFORE = (
    r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: +"
    r"(?:recursively required|required|in .constexpr. expansion)"
)
_LED_AFTER = (
    r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: note: .*(?:requested here|in expansion of macro)"
    r"|^ +instantiation of .* at line (?P<row>\d+) of (?P<unit>\S+)"
)
_INCLUDED = r"^(?:In file included)? +from (?P<file>\S.*?):(?P<line>\d+)(?::\d+)?[,:]"
# Flags with which a compiler writes no object, or writes it to another path.
_OUTPUT = re.compile(r"-(?:o.*|c|S|E|MM?|fsyntax-only|-?ptx|-?cubin|-?fatbin|-?preprocess)$")
KILLED = "the compiler was killed"  # the beginning of this cause in causes.txt


class Problem(SimpleNamespace):
    """Why something fails."""

    cause: str
    evidence: str  # a line that shows the cause
    fix: str  # a command

    def error(self, what: str, log: str = "") -> BuildError:
        """Return the BuildError for `what`, which failed because of this problem."""
        return report(f"{what}: {self.cause}", [self.evidence], self.fix, log)


def explain(what: str, output: str, request: Request, log: str = "") -> BuildError:
    """Return the BuildError for `what`, which failed with a tool's output."""
    problem = judge(output, request)
    if problem:
        return problem.error(what, log)
    error = re.search(_COMPILER_ERROR, output, re.MULTILINE)
    if error:
        return _point_at(what, output, error, request, log)
    # Lines of torch and of ninja, which prints the commands.
    noise = r"\s*$|ninja:|FAILED: |\[\d|Error building|.* -c "
    lines = [line for line in output.splitlines() if not re.match(noise, line)]
    fix = f"less {log}" if log else "python -m calcops_jit clean"
    return report(what, lines[-6:], fix, log)


def _point_at(what: str, output: str, error: re.Match, request: Request, log: str) -> BuildError:
    """Return the BuildError for a compiler's error.

    It names the line of the error, or the project's line that led to an error in another header.
    """
    place = error["at"]
    evidence = error[0].splitlines()
    file = re.split(r"[:(]\d", place)[0]
    if _is_own(file, request):
        fix = f"correct {place}"
        if file.endswith(".c"):
            fix += f", for it is compiled as C++; or cc -fPIC -c {file}, "
            fix += "and pass extra_ldflags=['<the .o>']"
        return report(f"{what}: error at {place}", evidence, fix, log)
    own_line = _own_line(output, error, request)
    if own_line is None:
        return report(f"{what}: error at {place}", evidence, f"less {log}", log)
    file, number = own_line
    lines = text_of(file).splitlines()
    source = lines[number - 1] if number <= len(lines) else ""
    # The header's long path might leave no room for the message.
    message = re.sub(r"^\S.*/include/(?:c\+\+/[\d.]+/)?", "", evidence[0])
    place = f"{file}:{number}"
    evidence = [message, f"{place}: led to it", f"  {number} | {source}"]
    return report(f"{what}: error at {place}", evidence, f"correct {place}", log)


def _own_line(output: str, error: re.Match, request: Request) -> tuple[str, int] | None:
    """Return (file, line) of the project's code that led to an error in a header."""
    # The text from the previous message to this error, and from this error to the next.
    message = r"^.*: (?:error|warning|note): .*$"
    before = re.split(message, output[: error.start()], flags=re.MULTILINE)[-1]
    after = re.split(r"^.*\berror\b.*: ", output[error.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    for pattern, text in ((_LED_BEFORE, before), (_LED_AFTER, after), (_INCLUDED, before)):
        for match in re.finditer(pattern, text, re.MULTILINE):
            groups = match.groupdict()
            # nvcc's lines have the groups `unit` and `row`, the others `file` and `line`.
            file = groups.get("unit") or groups["file"]
            if _is_own(file, request):
                return file, int(groups.get("row") or groups["line"])
    return None


def _is_own(file: str, request: Request) -> bool:
    """Return True if a file is the project's."""
    path = os.path.abspath(file)
    root = f"{request.root.rstrip('/')}/"
    # Folders of other software. If one of them is in the project, its files are not the project's.
    # If the project is in one of them, the project's files still are.
    others = [
        request.unfold("@torch"),
        request.unfold("@loader"),
        request.cuda.home,
        sys.prefix,
        "/usr",
        "/opt",
    ]
    around = [f"{folder}/" for folder in others if folder and path.startswith(f"{folder}/")]
    # All these folders and the root contain the file. So a shorter path is farther out.
    return path.startswith(root) and all(len(folder) < len(root) for folder in around)


def judge(output: str, request: Request) -> Problem | None:
    """Return the first problem of causes.txt that a tool's output shows."""
    lines = Path(__file__).with_name("causes.txt").read_text("utf-8").splitlines()
    rows = lines[3:]  # without the comment
    for pattern, explanation in zip(rows[::2], rows[1::2]):
        match = re.search(pattern, output, re.MULTILINE)
        if match:
            start = output.rfind("\n", 0, match.start()) + 1
            line = output[start:].partition("\n")[0].strip()
            cause, _, fix = explanation.strip().partition(" -> ")
            fix = fix.format(*match.groups(""), **_words(request))
            return Problem(cause=cause, evidence=line, fix=fix)
    return None


def _words(request: Request) -> dict[str, str]:
    """Return the words for the names in braces in causes.txt."""
    packages = {
        "apt-get": ("install -y", "g++", f"python3.{sys.version_info[1]}-dev"),
        "dnf": ("install -y", "gcc-c++", "python3-devel"),
        "conda": ("install -c conda-forge", "gxx", "python"),
    }
    tool = next(filter(shutil.which, packages), "conda")
    sudo = "sudo " if os.getuid() and tool != "conda" else ""
    is_foreign = request.kind == "foreign"
    return {
        "install": f"{sudo}{tool} {packages[tool][0]}",
        "compiler": packages[tool][1],
        "headers": packages[tool][2],
        "python": sys.executable,
        "standard": next((flag for flag in request.cflags if flag.startswith("-std=")), "-std="),
        "drop": "take out of extra_cflags:" if is_foreign else "unset CALCOPS_CFLAGS; it has",
    }


def foresee(request: Request, ninja: str | None) -> Iterator[Problem]:
    """Yield the problems that a build would have. This takes milliseconds."""
    yield from _foresee_compiler(request)
    for source in request.sources:
        yield from _foresee_source(source)
    yield from _foresee_outputs(request)
    if ninja is None:
        evidence = "ninja is neither on PATH nor beside this Python; it runs the compilers"
        fix = f"{sys.executable} -m pip install ninja"
        yield Problem(cause="no ninja", evidence=evidence, fix=fix)
    wrong_abi = 0 if torch._C._GLIBCXX_USE_CXX11_ABI else 1
    flag = f"-D_GLIBCXX_USE_CXX11_ABI={wrong_abi}"
    if flag in request.cflags:
        evidence = f"{flag} is not what this PyTorch was built with"
        fix = f"{_words(request)['drop']} {flag}"
        yield Problem(cause="the C++ ABI is not PyTorch's", evidence=evidence, fix=fix)
    if request.kind == "foreign":
        yield from _foresee_python(request)
    if request.cuda.build:
        yield from _foresee_cuda(request)


def _foresee_compiler(request: Request) -> Iterator[Problem]:
    compiler = request.compiler
    path = request.environment.get("PATH")
    if not path:
        fix = "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        evidence = "a compiler finds its parts by PATH"
        yield Problem(cause="PATH is not set", evidence=evidence, fix=fix)
    if shutil.which(compiler[0], path=path) is None:
        evidence = f"`{compiler[0]}` is not on PATH"
        fix = "{install} {compiler}".format(**_words(request))
        if request.environment.get("CXX") and shutil.which("c++", path=path):
            evidence += " (CXX names it), but c++ is"
            fix = "unset CXX"
        yield Problem(cause="no C++ compiler", evidence=evidence, fix=fix)
    elif not answer(request, *compiler, "--version"):
        evidence = f"`{' '.join(compiler)} --version` fails"
        yield Problem(cause="the C++ compiler does not run", evidence=evidence, fix="unset CXX")


def _foresee_source(source: str) -> Iterator[Problem]:
    if not os.path.isfile(source):
        evidence = f"the source {source} is gone"
        fix = f"restore {source}, or load without it in a new process"
        yield Problem(cause="a source is gone", evidence=evidence, fix=fix)
    elif re.search(r"\.(?:l?o|obj|a|so[.\d]*)$", source):
        evidence = f"{source} is compiled already"
        fix = f"take it out of the sources, and pass extra_ldflags=[{source!r}]"
        yield Problem(cause="an object is no source", evidence=evidence, fix=fix)


def _foresee_python(request: Request) -> Iterator[Problem]:
    texts = {source: _code(text_of(source)) for source in request.sources}
    registers = any("TORCH_LIBRARY" in text for text in texts.values())
    for source, text in texts.items():
        if "<torch/extension.h>" in text and not has_headers(request):
            missing = f"{source} includes torch/extension.h, which includes Python.h: No such file"
            yield no_headers(missing, request)
        if "PYBIND11_MODULE" in text and not registers:
            evidence = f"{source} has PYBIND11_MODULE and no TORCH_LIBRARY"
            fix = "load it with torch.utils.cpp_extension.load, or register with TORCH_LIBRARY"
            yield Problem(cause="a Python module, not operators", evidence=evidence, fix=fix)


def _foresee_outputs(request: Request) -> Iterator[Problem]:
    options = {
        "extra_cflags": request.cflags,
        "extra_cuda_cflags": request.cuda_cflags,
        "extra_ldflags": request.ldflags,
    }
    for option, flags in options.items():
        for flag in filter(_OUTPUT.match, flags):
            if option == "extra_ldflags" and flag.startswith("-o"):
                continue  # harmless: the build's own -o comes later, and the last one counts
            evidence = f"{flag}: the loader chooses which files are compiled and linked, "
            evidence += "and into what"
            fix = f"{_words(request)['drop']} {flag}".replace("extra_cflags", option)
            yield Problem(cause="a flag asks for another output", evidence=evidence, fix=fix)


def _code(text: str) -> str:
    """Return a C++ source without its comments."""
    comment_or_string = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")'
    return re.sub(comment_or_string, lambda match: match[1] or " ", text, flags=re.DOTALL)


def _foresee_cuda(request: Request) -> Iterator[Problem]:
    nvcc = f"{request.cuda.home}/bin/nvcc"
    yield from _foresee_arches(request, nvcc)
    yield from _foresee_host_compiler(request, nvcc)


def _foresee_arches(request: Request, nvcc: str) -> Iterator[Problem]:
    numbers = re.findall(r"compute_(\d+)", answer(request, nvcc, "--list-gpu-arch"))
    supported = [int(number) / 10 for number in numbers]
    for arch in map(float, re.findall(r"\d+\.\d", cuda.arch_list(request.cuda))):
        if supported and arch not in supported:
            nearest = max((other for other in supported if other < arch), default=min(supported))
            evidence = f"{nvcc}: unsupported gpu architecture {arch}, "
            evidence += f"it has {min(supported)} to {max(supported)}; take {nearest}"
            yield Problem(
                cause="this nvcc does not know the GPU architecture",
                evidence=evidence,
                fix=f"export TORCH_CUDA_ARCH_LIST={nearest}+PTX",
            )


def _foresee_host_compiler(request: Request, nvcc: str) -> Iterator[Problem]:
    host = request.host_compiler
    macros = answer(request, host, "-dM", "-E", "-x", "c++", os.devnull)
    limits = text_of(f"{cuda.headers(request.cuda.home)}/crt/host_config.h")
    version = re.search(r"__GNUC__ (\d+)", macros)
    limit = re.search(r"__GNUC__ > (\d+)", limits)
    if not (limit and version) or "__clang__" in macros:
        return
    if int(version[1]) > int(limit[1]):
        evidence = f"{nvcc}: gcc versions later than {limit[1]} are not supported; "
        evidence += f"{host} is {version[1]}"
        fix = f"export CC=gcc-{limit[1]} CXX=g++-{limit[1]}"
        yield Problem(cause="the C++ compiler is too new for this nvcc", evidence=evidence, fix=fix)


def old_driver(request: Request) -> Problem | None:
    """Return a Problem if the driver is too old for PyTorch's CUDA. CUDA is not initialised."""
    version = ctypes.c_int()  # 13020 is CUDA 13.2
    needed = int((torch.version.cuda or "0").partition(".")[0])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if version.value == 0 or version.value // 1000 >= needed:
        return None
    runs = f"{version.value // 1000}.{version.value % 1000 // 10}"
    oldest = _DRIVERS.get(needed, max(_DRIVERS.values()))
    evidence = f"CUDA {torch.version.cuda} of PyTorch needs driver {oldest} or newer; "
    evidence += f"this one runs CUDA {runs}"
    fix = f"{_words(request)['install']} nvidia-driver-{oldest}"
    return Problem(cause="the NVIDIA driver is too old", evidence=evidence, fix=fix)


def has_headers(request: Request) -> bool:
    """Return True if the compiler finds Python.h."""
    folders = [
        sysconfig.get_path("include", "posix_prefix"),
        *request.environment.get("CPATH", "").split(":"),
        *request.include_paths,
    ]
    return any(os.path.exists(f"{folder}/Python.h") for folder in folders)


def no_headers(evidence: str, request: Request) -> Problem:
    """Return the Problem that the compiler does not find Python.h."""
    return Problem(
        cause="Python's headers are missing",
        evidence=evidence,
        fix="{install} {headers}".format(**_words(request)),
    )


def answer(request: Request, *command: str) -> str:
    """Return what a command prints in the environment of a request; "" if it fails.

    Raises OSError if no descriptor is left.
    """
    options = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "encoding": "utf-8",
        "errors": "replace",
    }
    try:
        return subprocess.run(command, check=True, env=request.environment, **options).stdout
    except subprocess.CalledProcessError:
        return ""
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return ""
