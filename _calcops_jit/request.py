"""What to build: everything that is known before a compiler runs.

Two Requests are alike if their facts are; the digest of these names the slot in the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from types import SimpleNamespace

import torch

from . import cuda
from .cache import closure

FORMAT = 5  # of what the cache holds
# Headers that come before PyTorch's.
SHADOW = os.path.join(os.path.dirname(os.path.realpath(__file__)), "shadow")
# A library that registers operators is linked with one of these units, which include PyTorch's
# headers. The first one serves TORCH_LIBRARY, and compiles in 40 % of the time of the second. The
# second one also serves contracts and derivatives.
_RUNTIME = os.path.join(os.path.dirname(SHADOW), "runtime")
REGISTRY = f"{_RUNTIME}/registry.cpp"
RUNTIME = f"{_RUNTIME}/runtime.cpp"
RUNTIMES = (REGISTRY, RUNTIME)
# Hidden and not "gnu unique", so that two builds of one operator can be in one process without
# sharing variables.
BASE = ("-O3", "-fvisibility=hidden", "-fno-gnu-unique")
CUDA_SUFFIXES = (".cu", ".cuh")  # of sources for nvcc
COMPILER_VARIABLES = (
    "CC CCC_OVERRIDE_OPTIONS COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH GCC_EXEC_PREFIX"
    " LIBRARY_PATH LD_RUN_PATH NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS SOURCE_DATE_EPOCH"
).split()
# Compiler wrappers find objects by rules of their own. Our cache has these objects anyway.
_WRAPPERS = ("ccache", "sccache")
MACHINE = os.uname().machine
# How the names of the extensions that -march=native turns on begin; other words in /proc/cpuinfo
# depend on the kernel.
_ISA = tuple(
    "sse ssse avx amx fma bmi f16c aes vaes pclmul vpclmul gfni sha adx abm popcnt movbe cx16 lahf"
    " xsave rdrnd rdseed prefetchw 3dnowprefetch clflushopt clwb movdir enqcmd serialize waitpkg"
    " sm3 sm4 apx".split()
)
# The lines that decide -mcpu=native on ARM, where the compiler tunes for the model, too. Two of the
# features are the kernel's own.
_ARM_KEYS = ("Features", "CPU implementer", "CPU variant", "CPU part")
_ARM_KERNEL = {"evtstrm", "cpuid"}


class Request(SimpleNamespace):
    """One library to build, or one unit of it. Sources and include paths are absolute; `root` is
    the folder that may move.
    """

    name: str
    root: str
    sources: tuple[str, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    cuda: cuda.Choice = cuda.Choice()
    # "own": this project's operators. "foreign": a library of `load`, which may call Python.
    kind: str = "own"
    is_unit: bool = False  # one source of a library, whose object is kept
    # A wheel's library serves, though it was built for more than this processor.
    prebuilt: bool = False
    # Of a library in a wheel: the relative path from its folder to the one that has torch.
    origin: str = ""
    verbose: bool = False
    asked: tuple = ()  # the arguments of requests.foreign
    given: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # the arguments of located()

    def but(self, **changes) -> Request:
        """Return a Request with other values. Its cached properties are computed anew."""
        # (A dataclass has this, but takes longer to define than all of this module.)
        return Request(**{name: getattr(self, name) for name in Request.__annotations__} | changes)

    def again(self) -> Request:
        """Return the same Request in the present environment, with links followed again."""
        return self.but(**(located(*self.given) if self.given else {}))

    def unit(self, source: str) -> Request:
        """Return the Request for the object of one source, which is kept like a library."""
        changes = {
            "name": f"unit-{os.path.basename(source)}",
            "sources": (source,),
            "ldflags": (),
            "is_unit": True,
        }
        for_nvcc = self.cuda.build and source.endswith(CUDA_SUFFIXES)
        changes |= {"cflags" if for_nvcc else "cuda_cflags": ()}
        if source in RUNTIMES:  # one object serves every library
            cflags = ("-Og", *BASE[1:], "-DAT_PER_OPERATOR_HEADERS")
            changes |= {"kind": "own", "cflags": cflags, "include_paths": (SHADOW,)}
        unit = self.but(**changes)
        for computed in ("environment", "compiler", "tools", "roots"):
            setattr(unit, computed, getattr(self, computed))
        if source in RUNTIMES:  # a path in a project means the same to every other project
            unit.roots = [(token, folder) for token, folder in self.roots if token != "@root"]
        return unit

    @property
    def output(self) -> str:
        return "unit.o" if self.is_unit else f"{self.name}.so"

    @cached_property
    def environment(self) -> dict[str, str]:
        """Return the environment of the compilers."""
        variables = {}
        for name in list(os.environ):
            # Another thread may remove a variable meanwhile: os.environ.copy() would raise
            # KeyError.
            value = os.environ.get(name)
            if value is not None:
                variables[name] = value
        # With these, a compiler ignores -MD.
        for name in ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"):
            variables.pop(name, None)
        # For a c++ that is a script which calls a wrapper, and for an nvcc that finds one under
        # another name.
        return variables | {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}

    @cached_property
    def compiler(self) -> list[str]:
        return compiler_words(self.environment)

    @cached_property
    def roots(self) -> list[tuple[str, str]]:
        """(token, folder) pairs for fold(); two spellings of a folder may share a token."""
        torch_folder = os.path.dirname(torch.__file__)
        pairs = [
            ("@root", self.root),
            ("@torch", os.path.realpath(torch_folder)),
            ("@torch", torch_folder),
        ]
        pairs.append(("@loader", os.path.dirname(SHADOW)))
        if self.cuda.home:
            pairs += [("@cuda", os.path.realpath(self.cuda.home)), ("@cuda", self.cuda.home)]
        # It is sysconfig.get_path("include", "posix_prefix"), which reads a file.
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
        pairs.append(("@python", os.path.join(sys.base_prefix, "include", python)))
        return pairs

    @cached_property
    def _folders(self) -> dict[str, str]:
        return dict(reversed(self.roots))  # {token: folder}; of two spellings, the first

    @cached_property
    def _innermost_first(self) -> list[tuple[str, str]]:
        return sorted(self.roots, key=lambda pair: -len(pair[1]))

    def fold(self, path: str) -> str:
        """Replace the folder that a path begins with by its token."""
        for token, folder in self._innermost_first:
            if path == folder or path.startswith(folder + "/"):
                return token + path[len(folder) :]
        return path

    def unfold(self, path: str) -> str:
        """Undo fold()."""
        if path.startswith("@"):
            token, slash, rest = path.partition("/")
            return self._folders[token] + slash + rest
        return path

    @cached_property
    def facts(self) -> dict:
        """Return everything that a build depends on besides the contents of files."""
        flags = [*self.cflags, *self.cuda_cflags, *self.ldflags, *self.compiler[1:]]
        arguments = [word for word in self.compiler[1:] if not self._is_program(word)]
        facts = {
            "format": FORMAT,
            "name": self.name,
            "sources": [self.fold(path) for path in self.sources],
            "include paths": [self.fold(path) for path in self.include_paths],
            "C++ flags": self._fold_flags(self.cflags),
            "CUDA flags": self._fold_flags(self.cuda_cflags),
            "linker flags": self._fold_flags(self.ldflags),
            "torch version": [torch.__version__, torch.version.git_version, torch.version.debug],
            "torch folder": self.origin or self._folders["@torch"],  # the library's rpath names it
            "compiler arguments": self._fold_flags(arguments),
            "environment": {
                name: self.environment[name]
                for name in COMPILER_VARIABLES
                if self.environment.get(name)
            },
        }
        if self.cuda.build:
            facts |= {
                "CUDA": self.cuda.version,
                "GPU architectures": self.cuda.arches or list(self.cuda.gpus),
            }
        # A response file may have -march=native.
        if any("native" in flag or "@" in flag for flag in flags):
            facts["CPU instruction set"] = isa()
        if self.kind == "foreign":
            facts["Python"] = EXTENSION_SUFFIXES[0]
        return facts

    def _fold_flags(self, flags: Sequence[str]) -> list[str]:
        return [flag.replace(self.root + "/", "@root/") for flag in flags]

    @cached_property
    def slot(self) -> str:
        return closure.digest(json.dumps(self.facts, sort_keys=True).encode())[:16]

    @cached_property
    def tools(self) -> list[str]:
        """Return the real paths of the programs that a build runs; [] if there is no compiler."""
        programs = [word for word in self.compiler if self._is_program(word)]
        if programs[:1] != self.compiler[:1]:
            return []
        programs += ["as", "ld"]  # GCC looks for them on PATH
        if self.cuda.build:
            programs += [os.path.join(self.cuda.home, "bin", "nvcc"), self.host_compiler]
        paths = [shutil.which(program, path=self.environment.get("PATH")) for program in programs]
        return [os.path.realpath(path) for path in paths if path]

    @property
    def host_compiler(self) -> str:
        """Return the compiler that nvcc runs: NVCC_CCBIN, CC, or gcc on PATH, but never CXX."""
        words = compiler_words(self.environment, "CC", "gcc")
        compiler = self.environment.get("NVCC_CCBIN") or words[0]
        return os.path.join(compiler, "gcc") if os.path.isdir(compiler) else compiler

    def _is_program(self, word: str) -> bool:
        """Return True if a word of CXX is a program, as g++ in `env CPATH=include g++`."""
        is_option = word.startswith(("-", "@")) or "=" in word
        return not is_option and shutil.which(word, path=self.environment.get("PATH")) is not None


def located(sources: tuple[str, ...], include_paths: tuple[str, ...]) -> dict:
    """Return a Request's paths, from absolute paths that may contain links."""
    paths = tuple(map(closure.real_path, sources))
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return {
        "given": (sources, include_paths),
        # A folder that can move, not the whole disk.
        "root": root if root != "/" else os.path.dirname(paths[0]),
        "sources": paths,
        "include_paths": tuple(map(os.path.realpath, include_paths)),
    }


def processor_flag(isa: str = "native") -> str:
    """Return the compiler's flag for a kind of processor.

    On ARM a model is an -mcpu, and an architecture such as armv8.2-a+sve is an -march.
    """
    is_model = MACHINE == "aarch64" and not isa.startswith("armv")
    return f"-mcpu={isa}" if is_model else f"-march={isa}"


def isa() -> str:
    """Return the processor's instruction-set extensions; on ARM also numbers of maker and model."""
    # The first processor is enough, and 300 of them take long to print.
    with open("/proc/cpuinfo", "rb") as file:
        first = file.read(8192).decode(errors="replace")
    if MACHINE == "aarch64":  # but a chip may have processors of two kinds
        words = set()
        for line in first.splitlines(keepends=True):
            key, _, value = line.partition(":")
            if line.endswith("\n") and key.strip() in _ARM_KEYS:
                words.update(value.split())
        return " ".join(sorted(words - _ARM_KERNEL))
    flags = first.partition("\nflags")[2].partition("\n")[0]
    return " ".join(sorted(word for word in flags.split() if word.startswith(_ISA)))


def words_of(variable: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Split an environment variable into words, as a shell would."""
    text = environment.get(variable, "")
    if not any(mark in text for mark in "'\"\\"):
        return text.split()
    import shlex  # importing it takes longer than the rest of a Request

    try:
        return shlex.split(text)
    except ValueError as problem:
        raise ValueError(
            f"calcops_jit: expected {variable} as a shell's words, got {text!r}: {problem}"
        ) from None


def compiler_words(
    environment: Mapping[str, str] = os.environ, variable: str = "CXX", otherwise: str = "c++"
) -> list[str]:
    """Return the command of a compiler without a wrapper that keeps objects of its own.

    The command is that of the environment variable, else `otherwise`.
    """
    words: list[str] = []
    is_wrappers = False
    for word in words_of(variable, environment):
        # `ccache KEY=VALUE g++`.
        is_wrappers = os.path.basename(word) in _WRAPPERS or is_wrappers and "=" in word
        if not is_wrappers:
            words.append(word)
    words = words or words_of(variable, environment) or [otherwise]
    if not _is_wrapper(words[0], environment):
        return words
    # A c++ that is a link to a wrapper stands for the next c++ on PATH.
    for folder in environment.get("PATH", os.defpath).split(os.pathsep):
        candidate = os.path.join(folder, os.path.basename(words[0]))
        if os.access(candidate, os.X_OK) and not _is_wrapper(candidate, environment):
            return [candidate, *words[1:]]
    return words


def _is_wrapper(command: str, environment: Mapping[str, str]) -> bool:
    path = shutil.which(command, path=environment.get("PATH"))
    return path is not None and os.path.basename(os.path.realpath(path)) in _WRAPPERS
