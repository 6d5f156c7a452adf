"""Why something failed, in at most twelve lines: the cause, the evidence, one command that mends it, the log.

`foresee` finds what can be known before a compiler is started, the rest are tools' words; causes.txt judges both."""

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

import torch

from . import cuda, inputs

_MAX_LINES = 12
_DRIVERS = {12: 525, 13: 580}  # CUDA's release notes: the oldest driver for any release of this major version

# g++ and clang print file:line:column: error: ..., nvcc file(line): error: ... or error #20: ...; below it the source
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+(?:\n *\d* \| .*){0,4}"
)
# What leads from a source to an error in a header: g++'s words before the error, those of g++, clang and nvcc after it,
# and the includes. The nearest comes first in each.
_LED_BEFORE = r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: +(?:recursively required|required|in .constexpr. expansion)"
_LED_AFTER = (
    r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: note: .*(?:requested here|in expansion of macro)"
    r"|^ +instantiation of .* at line (?P<row>\d+) of (?P<unit>\S+)"
)
_INCLUDED = r"^(?:In file included)? +from (?P<file>\S.*?):(?P<line>\d+)(?::\d+)?[,:]"
KILLED = "the compiler was killed"


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


def explain(what: str, output: str, request: inputs.Request, log: str = "") -> BuildError:
    """The BuildError for `what`, which failed with this output."""
    if known := judge(output, request):
        return report(f"{what}: {known[0]}", [known[1]], known[2], log)
    if error := re.search(_COMPILER_ERROR, output, re.MULTILINE):
        return _point_at(what, output, error, request, log)
    noise = r"\s*$|ninja:|FAILED: |\[\d|Error building|.* -c "  # of ninja and torch, who print the commands
    last = [line for line in output.splitlines() if not re.match(noise, line)][-6:]
    return report(what, last, f"less {log}" if log else "python -m calcops_jit clean", log)


def _point_at(what: str, output: str, error: re.Match, request: inputs.Request, log: str) -> BuildError:
    """At the error where it is the project's, else at the nearest line of the project that led to it."""
    at, evidence = error["at"], error[0].splitlines()
    if _is_own(re.split(r"[:(]\d", at)[0], request):
        return report(f"{what}: error at {at}", evidence, f"correct {at}", log)
    told = re.sub(r"^\S.*/include/(?:c\+\+/[\d.]+/)?", "", evidence[0])  # the path might leave no room for the words
    # Up to the diagnosis before it, down to the error after it.
    before = re.split(r"^.*: (?:error|warning|note): .*$", output[: error.start()], flags=re.MULTILINE)[-1]
    after = re.split(r"^.*\berror\b.*: ", output[error.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    for pattern, text in ((_LED_BEFORE, before), (_LED_AFTER, after), (_INCLUDED, before)):
        for found in re.finditer(pattern, text, re.MULTILINE):
            words = found.groupdict()
            file, line = words.get("unit") or words["file"], words.get("row") or words["line"]
            if _is_own(file, request):
                source = [*inputs.text_of(file).splitlines(), *[""] * int(line)][int(line) - 1]
                evidence = [told, f"{file}:{line}: led to it", f"  {line} | {source}"]
                return report(f"{what}: error at {file}:{line}", evidence, f"correct {file}:{line}", log)
    return report(f"{what}: error at {at}", evidence, f"less {log}", log)


def _is_own(file: str, request: inputs.Request) -> bool:
    """Whether a file is the project's: the folder of its sources may lie above PyTorch, or below /usr."""
    path, root = os.path.abspath(file), f"{request.root.rstrip('/')}/"
    others = [request.unfold("@torch"), request.unfold("@loader"), request.cuda.home, sys.prefix, "/usr", "/opt"]
    above = [f"{folder}/" for folder in others if folder and path.startswith(f"{folder}/")]
    return path.startswith(root) and all(len(folder) < len(root) for folder in above)


def judge(output: str, request: inputs.Request) -> tuple[str, str, str] | None:
    """(cause, the line that shows it, the command that mends it)"""
    rows = Path(__file__).with_name("causes.txt").read_text("utf-8").splitlines()[3:]
    for pattern, judgement in zip(rows[::2], rows[1::2]):
        if match := re.search(pattern, output, re.MULTILINE):
            start = output.rfind("\n", 0, match.start()) + 1
            line = output[start:].partition("\n")[0].strip()
            cause, _, remedy = judgement.strip().partition(" -> ")
            return cause, line, remedy.format(*match.groups(""), **_words(request))
    return None


def _words(request: inputs.Request) -> dict[str, str]:
    packages = {
        "apt-get": ("install -y", "g++", f"python3.{sys.version_info[1]}-dev"),
        "dnf": ("install -y", "gcc-c++", "python3-devel"),
        "conda": ("install -c conda-forge", "gxx", "python"),
    }
    tool = next(filter(shutil.which, packages), "conda")
    sudo = "sudo " if os.getuid() and tool != "conda" else ""
    return {
        "install": f"{sudo}{tool} {packages[tool][0]}",
        "compiler": packages[tool][1],
        "headers": packages[tool][2],
        "python": sys.executable,
        "standard": next((flag for flag in request.cflags if flag.startswith("-std=")), "-std="),
        "drop": "take out of extra_cflags:" if request.python else "unset CALCOPS_CFLAGS; it has",
    }


def foresee(request: inputs.Request, ninja: str | None) -> Iterator[str]:
    """What a build would fail with, found in milliseconds; for `explain`."""
    compiler = inputs.compiler_words()
    if shutil.which(compiler[-1] if len(compiler) == 1 else compiler[0]) is None:
        other = " (CXX names it), but c++ is" if os.environ.get("CXX") and shutil.which("c++") else ""
        yield f"`{compiler[0]}` is not on PATH{other}"
    elif not answer(*compiler, "--version"):
        yield f"`{' '.join(compiler)} --version` fails"
    for source in request.sources:
        if not os.path.isfile(source):
            yield f"the source {source} is gone"
    if ninja is None:
        yield "ninja is neither on PATH nor beside this Python; it runs the compilers"
    if (flag := f"-D_GLIBCXX_USE_CXX11_ABI={1 - torch._C._GLIBCXX_USE_CXX11_ABI:d}") in request.cflags:
        yield f"{flag} is not what this PyTorch was built with"
    texts = {source: _code(inputs.text_of(source)) for source in request.sources if request.python}
    for source, text in texts.items():
        if "<torch/extension.h>" in text and not has_headers(request):
            yield f"{source} includes torch/extension.h, which includes Python.h: No such file"
        if "PYBIND11_MODULE" in text and not any("TORCH_LIBRARY" in other for other in texts.values()):
            yield f"{source} has PYBIND11_MODULE and no TORCH_LIBRARY"
    if request.cuda.build:
        yield from _foresee_cuda(request)


def _code(text: str) -> str:
    """A C++ source without its comments."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', lambda match: match[1] or " ", text, flags=re.DOTALL)


def _foresee_cuda(request: inputs.Request) -> Iterator[str]:
    nvcc = f"{request.cuda.home}/bin/nvcc"
    known = [int(number) / 10 for number in re.findall(r"compute_(\d+)", answer(nvcc, "--list-gpu-arch"))]
    for arch in map(float, re.findall(r"\d+\.\d", cuda.arch_list(request.cuda))):
        if known and arch not in known:
            nearest = max((k for k in known if k < arch), default=min(known))
            yield f"{nvcc}: unsupported gpu architecture {arch}, it has {min(known)} to {max(known)}; take {nearest}"
    host = os.environ.get("CC") or "gcc"  # torch gives nvcc what CC names; by itself it takes gcc
    have = re.search(r"__GNUC__ (\d+)", macros := answer(host, "-dM", "-E", "-x", "c++", os.devnull))
    limit = re.search(r"__GNUC__ > (\d+)", answer("cat", f"{request.cuda.home}/include/crt/host_config.h"))
    if limit and have and int(have[1]) > int(limit[1]) and "__clang__" not in macros:
        yield f"{nvcc}: gcc versions later than {limit[1]} are not supported; {host} is {have[1]}"


def old_driver() -> str:
    """For `judge`; "" where the driver runs this PyTorch's CUDA, or there is none. Nothing is initialised."""
    version, needed = ctypes.c_int(), int((torch.version.cuda or "0").partition(".")[0])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if version.value == 0 or version.value // 1000 >= needed:
        return ""
    runs = f"{version.value // 1000}.{version.value % 1000 // 10}"
    oldest = _DRIVERS.get(needed, max(_DRIVERS.values()))
    return f"CUDA {torch.version.cuda} of PyTorch needs driver {oldest} or newer; this one runs CUDA {runs}"


def has_headers(request: inputs.Request) -> bool:
    """Whether the compiler finds Python.h."""
    named = [*os.environ.get("CPATH", "").split(":"), *request.include_paths]
    return any(os.path.exists(f"{f}/Python.h") for f in [sysconfig.get_path("include", "posix_prefix"), *named])


def answer(*command: str) -> str:
    """What it prints; "" where it fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
        return subprocess.run(command, check=True, **options).stdout
    return ""
