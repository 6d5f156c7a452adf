"""Why something failed: the cause, a line that shows it, and one command that fixes it.

`foresee` finds what can be known before a compiler is started; `judge` knows tools' own words, by
causes.txt.
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
from ..request import Request, compiler_words

# CUDA's release notes: the oldest driver for any release of this major version.
_DRIVERS = {12: 525, 13: 580}

# g++ and clang print file:line:column: error: ..., nvcc file(line): error: ... or error #20: ...;
# below it the source
_COMPILER_ERROR = (
    r"^(?P<at>[^\s:(][^:(\n]*(?::\d+(?::\d+)?|\(\d+\)))\s*: (?:fatal )?error\s*(?:#[\w-]+)?: .+"
    r"(?:\n *\d* \| .*){0,4}"
)
# What leads from a source to an error in a header: g++'s words before the error, those of g++,
# clang and nvcc after it, and the includes. The nearest comes first in each.
_LED_BEFORE = (
    r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: +"
    r"(?:recursively required|required|in .constexpr. expansion)"
)
_LED_AFTER = (
    r"^(?P<file>\S.*?):(?P<line>\d+)(?::\d+)?: note: .*(?:requested here|in expansion of macro)"
    r"|^ +instantiation of .* at line (?P<row>\d+) of (?P<unit>\S+)"
)
_INCLUDED = r"^(?:In file included)? +from (?P<file>\S.*?):(?P<line>\d+)(?::\d+)?[,:]"
# Flags after which a compiler writes no object, or another file.
_OUTPUT = re.compile(r"-(?:o.*|c|S|E|MM?|fsyntax-only|-?ptx|-?cubin|-?fatbin|-?preprocess)$")
KILLED = "the compiler was killed"  # how that cause begins


class Problem(SimpleNamespace):
    """A cause, a line that shows it, the command that fixes it."""

    cause: str
    evidence: str
    fix: str

    def error(self, what: str, log: str = "") -> BuildError:
        """The BuildError for `what`, which failed because of this."""
        return report(f"{what}: {self.cause}", [self.evidence], self.fix, log)


def explain(what: str, output: str, request: Request, log: str = "") -> BuildError:
    """The BuildError for `what`, which failed with a tool's output."""
    if known := judge(output, request):
        return known.error(what, log)
    if error := re.search(_COMPILER_ERROR, output, re.MULTILINE):
        return _point_at(what, output, error, request, log)
    noise = (
        # Lines of ninja, which prints the commands, and of torch.
        r"\s*$|ninja:|FAILED: |\[\d|Error building|.* -c "
    )
    last = [line for line in output.splitlines() if not re.match(noise, line)][-6:]
    return report(what, last, f"less {log}" if log else "python -m calcops_jit clean", log)


def _point_at(what: str, output: str, error: re.Match, request: Request, log: str) -> BuildError:
    """The BuildError for a compiler's error: at its line if that is the project's, else at the
    project's line that led to it.
    """
    at, evidence = error["at"], error[0].splitlines()
    file = re.split(r"[:(]\d", at)[0]
    if _is_own(file, request):
        fix = f"correct {at}"
        if file.endswith(".c"):
            fix += f", for it is compiled as C++; or cc -fPIC -c {file}, "
            fix += "and pass extra_ldflags=['<the .o>']"
        return report(f"{what}: error at {at}", evidence, fix, log)
    # The path might leave no room for the words.
    told = re.sub(r"^\S.*/include/(?:c\+\+/[\d.]+/)?", "", evidence[0])
    # Up to the diagnosis before it, down to the error after it.
    before = re.split(
        r"^.*: (?:error|warning|note): .*$", output[: error.start()], flags=re.MULTILINE
    )[-1]
    after = re.split(r"^.*\berror\b.*: ", output[error.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    for pattern, text in ((_LED_BEFORE, before), (_LED_AFTER, after), (_INCLUDED, before)):
        for found in re.finditer(pattern, text, re.MULTILINE):
            words = found.groupdict()
            file, line = words.get("unit") or words["file"], words.get("row") or words["line"]
            if _is_own(file, request):
                source = [*text_of(file).splitlines(), *[""] * int(line)][int(line) - 1]
                evidence = [told, f"{file}:{line}: led to it", f"  {line} | {source}"]
                return report(
                    f"{what}: error at {file}:{line}", evidence, f"correct {file}:{line}", log
                )
    return report(f"{what}: error at {at}", evidence, f"less {log}", log)


def _is_own(file: str, request: Request) -> bool:
    """Return True if a file is the project's. The folder of its sources may lie above PyTorch's or
    below /usr.
    """
    path, root = os.path.abspath(file), f"{request.root.rstrip('/')}/"
    others = [
        request.unfold("@torch"),
        request.unfold("@loader"),
        request.cuda.home,
        sys.prefix,
        "/usr",
        "/opt",
    ]
    above = [f"{folder}/" for folder in others if folder and path.startswith(f"{folder}/")]
    return path.startswith(root) and all(len(folder) < len(root) for folder in above)


def judge(output: str, request: Request) -> Problem | None:
    """The first of the known problems that a tool's output shows."""
    rows = Path(__file__).with_name("causes.txt").read_text("utf-8").splitlines()[3:]
    for pattern, judgement in zip(rows[::2], rows[1::2]):
        if match := re.search(pattern, output, re.MULTILINE):
            start = output.rfind("\n", 0, match.start()) + 1
            line = output[start:].partition("\n")[0].strip()
            cause, _, fix = judgement.strip().partition(" -> ")
            return Problem(
                cause=cause, evidence=line, fix=fix.format(*match.groups(""), **_words(request))
            )
    return None


def _words(request: Request) -> dict[str, str]:
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
        "drop": "take out of extra_cflags:"
        if request.kind == "foreign"
        else "unset CALCOPS_CFLAGS; it has",
    }


def foresee(request: Request, ninja: str | None) -> Iterator[Problem]:
    """Find, in milliseconds, what a build would fail with."""
    yield from _foresee_compiler(request)
    for source in request.sources:
        yield from _foresee_source(source)
    yield from _foresee_outputs(request)
    if ninja is None:
        evidence = "ninja is neither on PATH nor beside this Python; it runs the compilers"
        fix = f"{sys.executable} -m pip install ninja"
        yield Problem(cause="no ninja", evidence=evidence, fix=fix)
    flag = f"-D_GLIBCXX_USE_CXX11_ABI={1 - torch._C._GLIBCXX_USE_CXX11_ABI:d}"
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
    if shutil.which(compiler[-1] if len(compiler) == 1 else compiler[0], path=path) is None:
        other = request.environment.get("CXX") and shutil.which("c++", path=path)
        evidence = f"`{compiler[0]}` is not on PATH" + " (CXX names it), but c++ is" * bool(other)
        fix = "unset CXX" if other else "{install} {compiler}".format(**_words(request))
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
                continue  # the last one counts, which is ours
            evidence = f"{flag}: which files are compiled and linked, and into what, "
            evidence += "is the loader's to say"
            fix = f"{_words(request)['drop']} {flag}".replace("extra_cflags", option)
            yield Problem(cause="a flag asks for another output", evidence=evidence, fix=fix)


def _code(text: str) -> str:
    """A C++ source without its comments."""
    return re.sub(
        r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")',
        lambda match: match[1] or " ",
        text,
        flags=re.DOTALL,
    )


def _foresee_cuda(request: Request) -> Iterator[Problem]:
    nvcc = f"{request.cuda.home}/bin/nvcc"
    known = [
        int(number) / 10
        for number in re.findall(r"compute_(\d+)", answer(request, nvcc, "--list-gpu-arch"))
    ]
    for arch in map(float, re.findall(r"\d+\.\d", cuda.arch_list(request.cuda))):
        if known and arch not in known:
            nearest = max((k for k in known if k < arch), default=min(known))
            has = f"it has {min(known)} to {max(known)}; take {nearest}"
            evidence = f"{nvcc}: unsupported gpu architecture {arch}, {has}"
            fix = f"export TORCH_CUDA_ARCH_LIST={nearest}+PTX"
            yield Problem(
                cause="this nvcc does not know the GPU architecture", evidence=evidence, fix=fix
            )
    host = compiler_words(request.environment, "CC", "gcc")[
        0
    ]  # torch gives nvcc what CC names; by itself nvcc takes gcc
    have = re.search(
        r"__GNUC__ (\d+)", macros := answer(request, host, "-dM", "-E", "-x", "c++", os.devnull)
    )
    limit = re.search(
        r"__GNUC__ > (\d+)", text_of(f"{cuda.headers(request.cuda.home)}/crt/host_config.h")
    )
    if limit and have and int(have[1]) > int(limit[1]) and "__clang__" not in macros:
        evidence = (
            f"{nvcc}: gcc versions later than {limit[1]} are not supported; {host} is {have[1]}"
        )
        fix = f"export CC=gcc-{limit[1]} CXX=g++-{limit[1]}"
        yield Problem(cause="the C++ compiler is too new for this nvcc", evidence=evidence, fix=fix)


def old_driver(request: Request) -> Problem | None:
    """The driver, if it is too old for this PyTorch's CUDA. Initialises nothing."""
    version, needed = ctypes.c_int(), int((torch.version.cuda or "0").partition(".")[0])
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
    """Whether the compiler finds Python.h."""
    named = [*request.environment.get("CPATH", "").split(":"), *request.include_paths]
    return any(
        os.path.exists(f"{f}/Python.h")
        for f in [sysconfig.get_path("include", "posix_prefix"), *named]
    )


def no_headers(evidence: str, request: Request) -> Problem:
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
