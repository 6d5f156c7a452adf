"""What to build: everything that is known before a compiler runs.

Two Requests are equivalent if their facts are equal. The digest of the facts names the slot in the
cache.
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

FORMAT = 5  # version of the cache's format
# Headers that come before PyTorch's on the include path.
SHADOW = os.path.join(os.path.dirname(os.path.realpath(__file__)), "shadow")
# A library that registers operators is linked with one of these two units, which include PyTorch's
# headers. REGISTRY implements TORCH_LIBRARY and compiles in 40 % of RUNTIME's time. RUNTIME
# implements contracts and derivatives, too.
_RUNTIME = os.path.join(os.path.dirname(SHADOW), "runtime")
REGISTRY = f"{_RUNTIME}/registry.cpp"
RUNTIME = f"{_RUNTIME}/runtime.cpp"
RUNTIMES = (REGISTRY, RUNTIME)
# Two builds of one operator can be in one process. Hidden symbols that are not "gnu unique" keep
# them from sharing variables.
BASE = ("-O3", "-fvisibility=hidden", "-fno-gnu-unique")
CUDA_SUFFIXES = (".cu", ".cuh")  # of sources for nvcc
# Environment variables that change what the compilers and the linker produce.
COMPILER_VARIABLES = (
    "CC CCC_OVERRIDE_OPTIONS COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH GCC_EXEC_PREFIX"
    " LIBRARY_PATH LD_RUN_PATH NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS SOURCE_DATE_EPOCH"
).split()
# Compiler wrappers are bypassed: they decide by rules of their own whether an object is up to date,
# and the loader's cache has these objects anyway.
_WRAPPERS = ("ccache", "sccache")
MACHINE = os.uname().machine
# Prefixes of the instruction-set extensions that -march=native turns on. The other words in
# /proc/cpuinfo depend on the kernel.
_ISA = tuple(
    "sse ssse avx amx fma bmi f16c aes vaes pclmul vpclmul gfni sha adx abm popcnt movbe cx16 lahf"
    " xsave rdrnd rdseed prefetchw 3dnowprefetch clflushopt clwb movdir enqcmd serialize waitpkg"
    " sm3 sm4 apx".split()
)
# The lines of /proc/cpuinfo that decide -mcpu=native on ARM. They include the model, because the
# compiler tunes for it.
_ARM_KEYS = ("Features", "CPU implementer", "CPU variant", "CPU part")
_ARM_KERNEL = {"evtstrm", "cpuid"}  # features of the kernel, not of the processor


class Request(SimpleNamespace):
    """One library to build, or one unit of it.

    Sources and include paths are absolute. The facts name paths below `root` relative to it, so
    that the project can move.
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
    is_unit: bool = False  # one source of a library, whose object is cached
    # A wheel's library may be used, although it was not built for exactly this processor.
    prebuilt: bool = False
    # For a library in a wheel: the relative path from its folder to the one that has torch.
    origin: str = ""
    verbose: bool = False
    asked: tuple = ()  # the arguments with which requests.foreign made this Request
    # The arguments of located(): sources and include paths with their links unresolved.
    given: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def but(self, **changes) -> Request:
        """Return a copy with other values. Its cached properties are computed anew."""
        # dataclasses.replace does this, but defining a dataclass takes longer than importing this
        # module.
        values = {name: getattr(self, name) for name in Request.__annotations__}
        return Request(**values | changes)

    def again(self) -> Request:
        """Return the same Request in the present environment, with links followed again."""
        if self.given is None:
            return self.but()
        return self.but(**located(*self.given))

    def unit(self, source: str) -> Request:
        """Return the Request for the object of one source, which is cached like a library."""
        changes = {
            "name": f"unit-{os.path.basename(source)}",
            "sources": (source,),
            "ldflags": (),
            "is_unit": True,
        }
        for_nvcc = self.cuda.build and source.endswith(CUDA_SUFFIXES)
        # Flags of the compiler that does not compile this source must not change its slot.
        changes |= {"cflags" if for_nvcc else "cuda_cflags": ()}
        if source in RUNTIMES:  # every library links the same object
            cflags = ("-O1", *BASE[1:], "-DAT_PER_OPERATOR_HEADERS")
            changes |= {"kind": "own", "cflags": cflags, "include_paths": (SHADOW,)}
        unit = self.but(**changes)
        for name in ("environment", "compiler", "tools", "roots"):  # need not be computed again
            setattr(unit, name, getattr(self, name))
        if source in RUNTIMES:
            # Projects with other roots use this object, too. So its paths below this project's
            # root are stored without the token @root.
            unit.roots = [(token, folder) for token, folder in self.roots if token != "@root"]
        return unit

    @property
    def output(self) -> str:
        return "unit.o" if self.is_unit else f"{self.name}.so"

    @cached_property
    def environment(self) -> dict[str, str]:
        """Return the environment of the compilers."""
        variables = {}
        # Another thread may remove a variable meanwhile. Then os.environ.copy() raises KeyError.
        for name in list(os.environ):
            value = os.environ.get(name)
            if value is not None:
                variables[name] = value
        # With these variables, a compiler ignores -MD.
        for name in ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"):
            variables.pop(name, None)
        # compiler_words() does not find every wrapper: c++ may be a script that calls one, and nvcc
        # may call a compiler that is a link to one. These variables turn such wrappers off.
        return variables | {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}

    @cached_property
    def compiler(self) -> list[str]:
        return compiler_words(self.environment)

    @cached_property
    def roots(self) -> list[tuple[str, str]]:
        """Return (token, folder) pairs for fold(). Two spellings of a folder may share a token."""
        torch_folder = os.path.dirname(torch.__file__)
        pairs = [
            ("@root", self.root),
            ("@torch", os.path.realpath(torch_folder)),
            ("@torch", torch_folder),
            ("@loader", os.path.dirname(SHADOW)),
        ]
        if self.cuda.home:
            pairs += [("@cuda", os.path.realpath(self.cuda.home)), ("@cuda", self.cuda.home)]
        # sysconfig.get_path("include", "posix_prefix") returns the same, but reads a file for it.
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}"
        pairs.append(("@python", os.path.join(sys.base_prefix, "include", python)))
        return pairs

    @cached_property
    def _folders(self) -> dict[str, str]:
        """Return {token: folder}, with the first of two spellings of a folder."""
        return dict(reversed(self.roots))

    @cached_property
    def _innermost_first(self) -> list[tuple[str, str]]:
        return sorted(self.roots, key=lambda pair: -len(pair[1]))

    def fold(self, path: str) -> str:
        """Return a path in which a folder of `roots` is replaced by its token."""
        for token, folder in self._innermost_first:
            if path == folder or path.startswith(folder + "/"):
                return token + path[len(folder) :]
        return path

    def unfold(self, path: str) -> str:
        """Return the path from which fold() made `path`."""
        if path.startswith("@"):
            token, slash, rest = path.partition("/")
            return self._folders[token] + slash + rest
        return path

    @cached_property
    def facts(self) -> dict:
        """Return everything that a build depends on besides the contents of files."""
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
            "torch folder": self.origin or self._folders["@torch"],  # it is in the library's rpath
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
        flags = [*self.cflags, *self.cuda_cflags, *self.ldflags, *self.compiler[1:]]
        # A response file, @file, may have -march=native.
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
        if programs[:1] != self.compiler[:1]:  # the command's first word is no program
            return []
        programs += ["as", "ld"]  # GCC looks for them on PATH
        if self.cuda.build:
            programs += [os.path.join(self.cuda.home, "bin", "nvcc"), self.host_compiler]
        paths = [shutil.which(program, path=self.environment.get("PATH")) for program in programs]
        return [os.path.realpath(path) for path in paths if path]

    @property
    def host_compiler(self) -> str:
        """Return the compiler that nvcc runs: CC, NVCC_CCBIN, or gcc on PATH, but never CXX."""
        if "CC" in self.environment:  # PyTorch passes it as -ccbin, which nvcc prefers
            compiler = compiler_words(self.environment, "CC", "gcc")[0]
        else:
            compiler = self.environment.get("NVCC_CCBIN") or "gcc"
        return os.path.join(compiler, "gcc") if os.path.isdir(compiler) else compiler

    def _is_program(self, word: str) -> bool:
        """Return True if a word of CXX is a program: `env` and `g++` in `env CPATH=include g++`."""
        is_option = word.startswith(("-", "@")) or "=" in word
        return not is_option and shutil.which(word, path=self.environment.get("PATH")) is not None


def located(sources: tuple[str, ...], include_paths: tuple[str, ...]) -> dict:
    """Return a Request's paths, from absolute paths that may contain links."""
    paths = tuple(map(closure.real_path, sources))
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    if root == "/":  # the sources have no project folder in common
        root = os.path.dirname(paths[0])
    return {
        "given": (sources, include_paths),
        "root": root,
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
    # The beginning is enough, and the kernel takes long to print the text for 300 cores.
    with open("/proc/cpuinfo", "rb") as file:
        text = file.read(8192).decode(errors="replace")
    if MACHINE == "aarch64":
        words = set()
        for line in text.splitlines(keepends=True):  # of every core: a chip may have two kinds
            key, _, value = line.partition(":")
            is_whole = line.endswith("\n")  # the last one may be cut off
            if is_whole and key.strip() in _ARM_KEYS:
                words.update(value.split())
        return " ".join(sorted(words - _ARM_KERNEL))
    flags = text.partition("\nflags")[2].partition("\n")[0]
    return " ".join(sorted(word for word in flags.split() if word.startswith(_ISA)))


def words_of(variable: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words of an environment variable, split as a shell would."""
    text = environment.get(variable, "")
    if not any(mark in text for mark in "'\"\\"):
        return text.split()
    import shlex  # slow to import, and rarely needed

    try:
        return shlex.split(text)
    except ValueError as problem:
        raise ValueError(
            f"calcops_jit: expected {variable} as a shell's words, got {text!r}: {problem}"
        ) from None


def compiler_words(
    environment: Mapping[str, str] = os.environ, variable: str = "CXX", otherwise: str = "c++"
) -> list[str]:
    """Return the words of a compiler's command, without ccache and sccache.

    The command is the value of the environment variable `variable`, else `otherwise`.
    """
    words: list[str] = []
    belongs_to_wrapper = False
    for word in words_of(variable, environment):
        # In `ccache KEY=VALUE g++`, the first two words are the wrapper's.
        is_setting = belongs_to_wrapper and "=" in word
        belongs_to_wrapper = is_setting or os.path.basename(word) in _WRAPPERS
        if not belongs_to_wrapper:
            words.append(word)
    words = words or words_of(variable, environment) or [otherwise]
    if not _is_wrapper(words[0], environment):
        return words
    # If c++ is a link to a wrapper, take what the wrapper would run: the next c++ on PATH.
    for folder in environment.get("PATH", os.defpath).split(os.pathsep):
        candidate = os.path.join(folder, os.path.basename(words[0]))
        if os.access(candidate, os.X_OK) and not _is_wrapper(candidate, environment):
            return [candidate, *words[1:]]
    return words


def _is_wrapper(command: str, environment: Mapping[str, str]) -> bool:
    """Return True if a command is a link to ccache or sccache, or one of them."""
    path = shutil.which(command, path=environment.get("PATH"))
    return path is not None and os.path.basename(os.path.realpath(path)) in _WRAPPERS
