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
from keyword import iskeyword
from types import SimpleNamespace

import torch

from . import cuda
from .inputs import TORCH, digest
from .processor import MACHINE, features

FORMAT = 13  # the version of the cache's format
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


def _project_folder(name: str) -> str:
    """Return the path of ops/ or contracts/: beside calcops_jit.py in a checkout, else here."""
    installed = f"{LOADER}/{name}"
    return os.path.realpath(installed if os.path.isdir(installed) else f"{LOADER}/../{name}")


SHADOW = f"{LOADER}/shadow"  # headers that come before PyTorch's on the include path
CONTRACTS = _project_folder("contracts")
OPERATORS = _project_folder("ops")
HEADERS = (SHADOW, f"{CONTRACTS}/include")  # the folders of headers for every source
# Two builds of one operator can be in one process. Hidden symbols that are not "gnu unique" keep
# them from sharing variables.
BASE = ("-O3", "-fvisibility=hidden", "-fno-gnu-unique")
CUDA_BASE = ("-O3", "-Xcompiler", "-fvisibility=hidden,-fno-gnu-unique")
# -Og inlines nothing, which takes a quarter of a call.
RUNTIME = ("-O1", *BASE[1:], "-DAT_PER_OPERATOR_HEADERS")  # the flags of runtime()
CHECK = "-DCALCOPS_CHECK_INDICES"  # the flag of load(..., check=True)
_THIS_PROCESSOR = "-march=native" if MACHINE == "x86_64" else "-mcpu=native"
CELLS = "calcops-cells-"  # begins the name of the folder of a notebook's cells
# Environment variables that change what compilers and linkers produce.
_VARIABLES = (
    "CC CCC_OVERRIDE_OPTIONS COMPILER_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CUDNN_HOME"
    " CUDNN_PATH GCC_EXEC_PREFIX I_MPI_CXX LD_RUN_PATH LIBRARY_PATH MPICH_CXX NIX_CFLAGS_COMPILE"
    " NIX_LDFLAGS NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS OMPI_CXX OMPI_CXXFLAGS"
    " OMPI_LDFLAGS SOURCE_DATE_EPOCH"
).split()
# Namespaces and attributes of torch.ops. An operator there could change PyTorch or not be found.
_OF_PYTORCH = frozenset(
    "_ _c10d_functional _c10d_functional_autograd _dir _dtensor _native _native_aot _quantized"
    " _test aten c10 c10d c10d_functional coor cuda debug_mode_ops debugprims export flex_gemm"
    " fsdp higher_order import_module inductor inductor_prims load_library loaded_libraries"
    " mempool mkl mkldnn mkldnn_prepacked onednn onnx onnx_symbolic prim prims profiler"
    " quantization quantized rngprims sparse static_runtime streams symm_mem torch".split()
)
SOURCES = (".cpp", ".cc", ".cxx", ".c++", ".C", ".c", ".cu")


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
    beside: str = ""  # the folder of a notebook, whose headers its cells may include
    cuda: cuda.Choice = cuda.Choice()
    asked: dict | None = None  # the arguments of request_for(); None for the runtime
    verbose: bool = False
    portable: str = ""  # the processor's flags of a library for other machines (prebuilt.py)

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
        if self.beside:
            pairs.append(("@beside", self.beside))
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
        if self.portable:  # it is used without compilers
            return []
        programs = []
        words = self.compiler
        if self.cuda.build:
            programs = [f"{self.cuda.home}/bin/nvcc"]
            # nvcc runs one of these for the host's code.
            words = [*words, *words_of("NVCC_CCBIN"), *(words_of("CC") or ["gcc"])]
        for word in words:
            folders = [""] if "/" in word else self.environment.get("PATH", "").split(":")
            paths = dict.fromkeys(
                os.path.realpath(os.path.join(folder, word)) for folder in folders
            )
            programs += [
                path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)
            ]
        return programs

    @property
    def is_own(self) -> bool:
        """Return True for the project's operators and the runtime."""
        return self.root in (OPERATORS, CONTRACTS)

    @property
    def is_cell(self) -> bool:
        """Return True for a cell of a notebook, whose folder is a temporary one."""
        return f"/{CELLS}" in self.root

    @once
    def entry(self) -> str:
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
        if self.portable:  # the other facts are those of one machine
            flags = torch.__config__._cxx_flags()
            return facts | {"portable": self.portable, "PyTorch's flags": digest(flags.encode())}
        facts |= {
            "compiler's arguments": self.compiler[1:],  # the first word is among the programs
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
            facts["processor"] = features()
        if "-ltorch_python" in self.ldflags:
            facts["Python"] = EXTENSION_SUFFIXES[0]
        return facts


def words_of(variable: str) -> list[str]:
    """Return the words of an environment variable, split as a shell would."""
    return _split(f"calcops_jit: expected {variable}", os.environ.get(variable, ""))


def _split(expected: str, text: str) -> list[str]:
    """Return the words of a text, split as a shell would. An error begins with `expected`."""
    if not any(mark in text for mark in "'\"\\"):
        return text.split()
    import shlex  # slow to import, and rarely needed

    try:
        return shlex.split(text)
    except ValueError as problem:
        what = f"{expected} as a shell's words, got {text!r}: {problem}"
        raise ValueError(what) from None


def quoted(text: str) -> str:
    """Return a word quoted for a shell, and then for ninja."""
    import shlex  # slow to import, and rarely needed

    return shlex.quote(text).replace("$", "$$")


def runtime() -> Request:
    """Return the Request for the runtime.

    It includes PyTorch's headers, and is built once for each PyTorch. It is an archive, so that
    the linker leaves it out of a library that registers nothing.
    """
    return Request(
        name="runtime",
        product="runtime.a",
        root=CONTRACTS,
        sources=(f"{CONTRACTS}/runtime/runtime.cpp",),
        cflags=RUNTIME,
    )


def own() -> Request:
    """Return the Request for the project's operators."""
    return request_for("calcops", OPERATORS, with_cuda="auto", native=True)


# ---- calcops_jit.load ----------------------------------------------------------------------------


def is_reserved(namespace: str) -> bool:
    """Return True for a namespace of PyTorch, and for one that is no name in Python's programs."""
    return namespace in _OF_PYTORCH or iskeyword(namespace) or namespace.startswith("__")


def request_for(
    name,
    sources,
    extra_cflags=None,
    extra_cuda_cflags=None,
    extra_ldflags=None,
    extra_include_paths=None,
    verbose=False,
    with_cuda=None,
    native=False,
    check=False,
    beside="",
) -> Request:
    """Return the Request for sources, from the options of calcops_jit.load.

    `beside` is the folder of a notebook for a cell.
    """
    given = _absolute("sources", sources)
    _check_name(name, given)
    cuda_sources = [path for path in files_of(given) if path.endswith(".cu")]
    if with_cuda not in (None, False, True, "auto"):
        what = f"expected `with_cuda` None, True, False or 'auto', got {with_cuda!r}"
        raise ValueError(f"calcops_jit.load: {what}")
    if with_cuda is None:
        with_cuda = bool(cuda_sources)
    if cuda_sources and not with_cuda:
        what = f"expected `with_cuda` None, True or 'auto', because {cuda_sources[0]} is a source"
        raise ValueError(f"calcops_jit.load: {what}; got {with_cuda!r}")
    asked = {
        "name": name,
        "sources": given,
        "extra_cflags": _flags("extra_cflags", extra_cflags),
        "extra_cuda_cflags": _flags("extra_cuda_cflags", extra_cuda_cflags),
        "extra_ldflags": _flags("extra_ldflags", extra_ldflags),
        "extra_include_paths": _absolute("extra_include_paths", extra_include_paths),
        "with_cuda": with_cuda,
        "native": bool(native),
        "check": bool(check),
        "beside": beside,
    }
    choice = cuda.choose(needed=with_cuda != "auto") if with_cuda else cuda.Choice()
    return request_of(asked, choice, verbose=verbose)


def request_of(asked: dict, choice: cuda.Choice, portable: str = "", verbose=False) -> Request:
    """Return the Request for checked options of load.

    Args:
        asked: the options.
        choice: whether to build for CUDA.
        portable: flags for a processor, in place of those of this machine and of CALCOPS_CFLAGS.
        verbose: whether to print what ninja prints.
    """
    name = asked["name"]
    # A source that is a link is not resolved, because compilers search headers beside the link.
    paths = [
        os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        for path in files_of(asked["sources"])
    ]
    given = [os.path.realpath(path) for path in asked["sources"] if os.path.isdir(path)]
    root = os.path.commonpath([*given, *map(os.path.dirname, paths)] or ["/"])
    without = ""
    defines = [f"-DTORCH_EXTENSION_NAME={name}", *([CHECK] if asked["check"] else [])]
    cflags = [*defines]
    extra: list[str] = []
    ldflags: list[str] = []
    if asked["with_cuda"] == "auto" and not choice.build:
        paths = [path for path in paths if not path.endswith(".cu")]
        fix = choice.fix if name == "calcops" else choice.fix.replace(" build", f" build {name}")
        reason = f"{choice.reason}; {fix}"  # without a $; its quotes get lost
        cflags.append(f"-DCALCOPS_NO_CUDA='\"{reason}\"'")  # a string literal, quoted for a shell
        without = f" besides .cu, since CUDA is not built: {reason}"
    if not paths:
        what = f"expected `sources` with at least one file{without}, got none"
        raise ValueError(f"calcops_jit.load: {what}")
    if asked["native"]:
        extra = [] if portable else list(map(quoted, words_of("CALCOPS_CFLAGS")))
        # Without -fopenmp, parallel_for is a plain loop. The library loads torch's libgomp, because
        # torch's folder is in its rpath.
        cflags += [portable or _THIS_PROCESSOR, "-fopenmp", "-Wall"]
        ldflags = ["-fopenmp", *extra]
    return Request(
        name=name,
        product=f"{name}.so",
        root=os.path.dirname(paths[0]) if root == "/" else root,
        sources=tuple(dict.fromkeys(paths)),
        cflags=(*BASE, *cflags, *asked["extra_cflags"], *extra),
        cuda_cflags=(*CUDA_BASE, *defines, *asked["extra_cuda_cflags"]),
        ldflags=(*asked["extra_ldflags"], *ldflags, "-ltorch_python"),
        include_paths=(*HEADERS, *given, *map(os.path.realpath, asked["extra_include_paths"])),
        beside=asked["beside"],
        cuda=choice,
        asked=asked,
        verbose=verbose,
        portable=portable,
    )


def _check_name(name, sources: list[str]) -> None:
    """Check the name of a library of these sources."""
    if name == "calcops" and sources == [OPERATORS]:
        return
    allowed = r"(?!(?:calcops|runtime)$)[A-Za-z_][\w.-]{,199}"
    if not isinstance(name, str) or not re.fullmatch(allowed, name) or is_reserved(name):
        words = "of letters, digits and _ . -, at most 200, which is not 'calcops' nor 'runtime',"
        words += " no namespace of PyTorch and no word of Python"
        raise ValueError(f"calcops_jit.load: expected `name` {words}, got {name!r}")


def again(request: Request, followed: Callable[[str], str]) -> Request:
    """Return the Request of the same library in the present environment.

    `followed` returns the present form of a flag for the linker. FileNotFoundError: a source is
    gone.
    """
    ldflags = [followed(flag) for flag in request.asked["extra_ldflags"]]
    return request_for(**request.asked | {"extra_ldflags": ldflags})


def files_of(paths: list[str]) -> list[str]:
    """Return the absolute paths of the sources, which exist. A folder stands for those in it."""
    files = []
    for path in paths:
        if os.path.isdir(path):
            files += _sources_in(os.path.realpath(path))
            continue
        if not os.path.isfile(path):
            raise FileNotFoundError(f"calcops_jit.load: expected `sources` that exist, got {path}")
        if not path.endswith(SOURCES):
            what = f"expected `sources` that end with {' '.join(SOURCES)}, got {path}"
            raise ValueError(f"calcops_jit.load: {what}")
        files.append(path)
    return files


def _sources_in(folder: str) -> list[str]:
    """Return the sources below a folder, but not hidden ones, nor those below a `_folder`."""
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        paths = [f"{place}/{name}" for name in sorted(names) if name[0] != "."]
        files += [path for path in paths if path.endswith(SOURCES) and os.path.isfile(path)]
    return files


def _absolute(argument: str, value) -> list[str]:
    """Return absolute paths from a path, or a sequence of paths."""
    # os.path.abspath would resolve "link/.." to the folder of the link, not to that of its target.
    return [os.path.join(os.getcwd(), path) for path in _strings(argument, value)]


def _strings(argument: str, value) -> list[str]:
    """Return a list of strings from a path, a string, or a sequence of these."""
    try:
        items = [value] if isinstance(value, (str, os.PathLike)) else value or ()
        return list(map(os.fsdecode, items))
    except TypeError:
        what = f"expected `{argument}` as strings or paths, got {value!r}"
        raise TypeError(f"calcops_jit.load: {what}") from None


def _flags(argument: str, value) -> list[str]:
    """Return a list of flags, as a shell and ninja will read them.

    This is a sequence as it is, or the words of a string, quoted.
    """
    flags = _strings(argument, value)
    words = _split(f"calcops_jit.load: expected `{argument}`", " ".join(flags))
    return list(map(quoted, words)) if isinstance(value, str) else flags
