"""What to build: a Request has everything that is known before a compiler runs.

The digest of its facts names its folder in the cache. The contents of files are not facts: they are
compared at every import (inputs.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from types import SimpleNamespace

import torch

from . import cuda
from .inputs import TORCH, digest

FORMAT = 10  # the version of the cache's format
LOADER = os.path.dirname(os.path.realpath(__file__))


def once(function: Callable) -> property:
    """Return a property that is computed at its first use.

    functools.cached_property has a lock in Python 3.11. A child that is forked while another
    thread holds it waits for ever.
    """
    name = function.__name__

    def value(self):
        if name not in self.__dict__:
            self.__dict__[name] = function(self)
        return self.__dict__[name]

    return property(value, doc=function.__doc__)


def _part(name: str) -> str:
    """Return the path of ops/ or contracts/: beside calcops_jit.py in a checkout, else here."""
    installed = f"{LOADER}/{name}"
    return os.path.realpath(installed if os.path.isdir(installed) else f"{LOADER}/../{name}")


SHADOW = f"{LOADER}/shadow"  # headers that come before PyTorch's on the include path
CONTRACTS = _part("contracts")
HEADERS = (SHADOW, f"{CONTRACTS}/include")  # the folders of headers for every source
MACHINE = os.uname().machine
WRAPPERS = ("ccache", "sccache")
# Two builds of one operator can be in one process. Hidden symbols that are not "gnu unique" keep
# them from sharing variables.
BASE = ("-O3", "-fvisibility=hidden", "-fno-gnu-unique")
CUDA_BASE = ("-O3", "-Xcompiler", "-fvisibility=hidden,-fno-gnu-unique")
# -Og inlines nothing, which takes a quarter of a call.
RUNTIME = ("-O1", *BASE[1:], "-DAT_PER_OPERATOR_HEADERS")  # the flags of runtime()
# The extensions that each level of the x86-64 psABI adds, in the words of /proc/cpuinfo.
LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}
# Environment variables that change what compilers and linkers produce.
_VARIABLES = (
    "CC CCC_OVERRIDE_OPTIONS COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH"
    " GCC_EXEC_PREFIX LD_RUN_PATH LIBRARY_PATH NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS"
    " SOURCE_DATE_EPOCH"
).split()


class Request(SimpleNamespace):
    """One library to build."""

    name: str
    product: str  # the file name of what is built
    root: str  # the sources' folder, which may move
    sources: tuple[str, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...] = CUDA_BASE
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = HEADERS
    cuda: cuda.Choice = cuda.Choice()
    asked: dict | None = None  # the arguments of request_for(); None for own libraries
    verbose: bool = False
    level: str = ""  # for a library in a wheel: the level of x86-64

    @once
    def environment(self) -> dict[str, str]:
        """Return a copy of the environment variables."""
        # Another thread may remove a variable meanwhile. Then os.environ.copy() raises KeyError.
        values = {name: os.environ.get(name) for name in list(os.environ)}
        return {name: value for name, value in values.items() if value is not None}

    @once
    def _roots(self) -> list[tuple[str, str]]:
        """Return (token, folder) pairs, with the inner one of two nested folders first."""
        pairs = [("@loader", LOADER), ("@contracts", CONTRACTS), ("@root", self.root)]
        return sorted(pairs, key=lambda pair: -len(pair[1]))

    def fold(self, path: str) -> str:
        """Return a path that stays the same if the project or the loader moves."""
        for token, folder in self._roots:
            if f"{path}/".startswith(f"{folder}/"):
                return token + path[len(folder) :]
        return path

    def unfold(self, path: str) -> str:
        """Return the path from which fold() made `path`."""
        for token, folder in self._roots:
            if path.startswith(token):
                return folder + path[len(token) :]
        return path

    @once
    def compiler(self) -> list[str]:
        """Return the words of the C++ compiler's command."""
        return words_of("CXX") or ["c++"]

    @once
    def programs(self) -> list[str]:
        """Return the paths of the compilers. A wrapper such as ccache runs a later one in PATH."""
        if self.level:  # a wheel's library is used without compilers
            return []
        programs = [f"{self.cuda.home}/bin/nvcc"] if self.cuda.build else []
        for word in self.compiler:
            folders = [""] if "/" in word else self.environment.get("PATH", "").split(":")
            paths = dict.fromkeys(
                os.path.realpath(os.path.join(folder, word)) for folder in folders
            )
            programs += [
                path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)
            ]
        return programs

    @once
    def slot(self) -> str:
        """Return the name of this request's folder in the cache."""
        return f"{self.name}-{digest(json.dumps(self.facts, sort_keys=True).encode())[:16]}"

    @once
    def facts(self) -> dict:
        """Return everything that a build depends on besides the contents of files."""
        flags = [*self.cflags, *self.cuda_cflags, *self.ldflags, *self.compiler]
        facts = {
            "format": FORMAT,
            "name": self.name,
            "sources": [self.fold(path) for path in self.sources],
            "include paths": [self.fold(path) for path in self.include_paths],
            "C++ flags": list(self.cflags),
            "CUDA flags": list(self.cuda_cflags),
            "linker flags": list(self.ldflags),
            "runtime's flags": list(RUNTIME),  # it is linked into the library
            "PyTorch": [torch.__version__, torch.version.git_version, str(torch.version.debug)],
        }
        if self.cuda.build:
            facts["CUDA"] = [self.cuda.version, self.cuda.arches or list(self.cuda.gpus)]
        if self.level:  # the other facts are those of one machine
            flags = torch.__config__._cxx_flags()
            return facts | {"level": self.level, "PyTorch's flags": digest(flags.encode())}
        facts |= {
            "compiler": self.compiler,
            # A PyTorch that is built again has libraries of other sizes.
            "PyTorch's size": os.path.getsize(f"{TORCH}/lib/libtorch_cpu.so"),
            "PyTorch's folder": TORCH,  # it is in the library's rpath
            "C library": os.confstr("CS_GNU_LIBC_VERSION"),
            "environment": [
                f"{name}={self.environment[name]}"
                for name in _VARIABLES
                if self.environment.get(name)
            ],
        }
        if any("native" in flag for flag in flags):
            facts["processor"] = processor()
        if self.asked is not None:  # it may call Python
            facts["Python"] = EXTENSION_SUFFIXES[0]
        return facts


def words_of(variable: str) -> list[str]:
    """Return the words of an environment variable, split as a shell would."""
    text = os.environ.get(variable, "")
    if not any(mark in text for mark in "'\"\\"):
        return text.split()
    import shlex  # slow to import, and rarely needed

    try:
        return shlex.split(text)
    except ValueError as problem:
        what = f"expected {variable} as a shell's words, got {text!r}: {problem}"
        raise ValueError(f"calcops_jit: {what}") from None


def processor() -> list[str]:
    """Return the words of /proc/cpuinfo on which -march=native depends, and some more."""
    with open("/proc/cpuinfo", errors="replace") as file:
        text = file.read(8192)  # all cores would take the kernel long
    lines = re.findall(r"(?m)^(?:flags|Features|CPU (?:part|implementer))\s*:(.*)\n", text)
    return sorted({word for line in lines for word in line.split()})


def levels() -> list[str]:
    """Return the levels that this processor has, the highest first."""
    words = set(processor())
    here: list[str] = []
    for level, extensions in LEVELS.items():
        if not words.issuperset(extensions.split()):
            break
        here.insert(0, level)
    return here


def runtime() -> Request:
    """Return the Request for the runtime: the C++ of contracts, and of registration.

    It includes PyTorch's headers, and is built once for each PyTorch. It is an archive, from which
    the linker takes what a library needs.
    """
    return Request(
        name="runtime",
        product="runtime.a",
        root=CONTRACTS,
        sources=(f"{CONTRACTS}/runtime/runtime.cpp", f"{CONTRACTS}/runtime/registry.cpp"),
        cflags=RUNTIME,
    )


def own(
    choice: cuda.Choice | None = None, *, level: str = "", root: str = "", name: str = "calcops"
) -> Request:
    """Return the Request for ops/: every .cpp in it and its folders, and every .cu for CUDA.

    Args:
        choice: whether to build for CUDA; default: cuda.choose().
        level: for a library in a wheel: the level of x86-64. Default: this processor.
        root: the folder; default: ops/ beside calcops_jit.py in a checkout, else in this package.
        name: name of the library.
    """
    root = root or _part("ops")
    choice = choice or cuda.choose()
    extra = words_of("CALCOPS_CFLAGS")
    # Without -fopenmp, parallel_for is a plain loop. The library loads torch's libgomp, because
    # torch's folder is in its rpath.
    march = f"-march={level or 'native'}" if MACHINE == "x86_64" else "-mcpu=native"
    cflags = [*BASE, march, "-fopenmp", "-Wall", "-DAT_PER_OPERATOR_HEADERS", *extra]
    if not choice.build:
        reason = f"{choice.reason}; {choice.fix}"  # neither has a quote or a $
        cflags.append(f"-DCALCOPS_NO_CUDA='\"{reason}\"'")  # a string literal, quoted for a shell
    suffixes = (".cpp", ".cu") if choice.build else (".cpp",)
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    folders = [root, *(f"{root}/{name}" for name in names if name[0] not in "._")]
    files = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder))]
    return Request(
        name=name,
        product=f"{name}.so",
        root=root,
        sources=tuple(file for file in files if file.endswith(suffixes) and "/." not in file),
        cflags=tuple(cflags),
        ldflags=("-fopenmp", *extra),
        include_paths=(*HEADERS, root),
        cuda=choice,
        level=level,
    )
