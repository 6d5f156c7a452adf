"""The commands of a build, for ninja: one for each unit and one to link, with torch's flags."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import logging
import os
import re
import shlex
import types
from types import SimpleNamespace

from .. import cuda
from ..cache import locks
from ..cache.closure import text_of
from ..errors import report
from ..request import CUDA_SUFFIXES, RUNTIMES, SHADOW, Request, compiler_words
from . import dependency_files, toolchain

_RULES = """\
rule compile
  command = $cxx {collector}$cflags $preamble -MD -MF $out.d {assembler}-c $source -o $out
rule cuda_compile
  command = $nvcc $cuda_cflags -MD -MF $out.d -c $source -o $out
rule link
  command = $cxx $objects $ldflags {linked} -o $out
"""


# GCC's garbage collector is slow on PyTorch's headers. It runs only if the heap exceeds 1 GiB.
_NO_COLLECTOR = "--param=ggc-min-heapsize=1048576 "


class Plan(SimpleNamespace):
    """The commands of one build in a private folder."""

    units: dict[str, str]  # {source to compile: object}
    cached: list[str]  # objects from the cache, which are only linked
    flags: dict[str, str]  # {ninja's variable: flags}, of cflags, cuda_cflags and ldflags
    runtime_cflags: str  # flags of a unit of RUNTIMES, the same for all libraries
    environment: dict[str, str]  # of the compilers
    jobs: int  # the number of compilers that run at once
    preambles: dict[str, str] = {}  # {source: its precompiled header}

    @staticmethod
    def of(request: Request, folder: str, sources: list[str], cached: list[str], jobs: int) -> Plan:
        """Return the plan to compile `sources` and to link them with the objects `cached`."""
        flags = [*request.cflags, *request.cuda_cflags, *request.ldflags]
        for text in [*sources, *request.include_paths, *flags]:
            if "\n" in text.strip():
                what = f"cannot build {request.name}: a line break in a name"
                raise report(what, [repr(text)], "rename it")
        environment = _environment(request, folder)
        units: dict[str, str] = {}
        for i, source in enumerate(sources):
            name = re.sub(r"[^\w.+-]", "_", os.path.basename(source)) + ".o"
            units[source] = f"{i}.{name}" if name in units.values() else name
        runtime_cflags = ""
        runtimes = [source for source in sources if source in RUNTIMES]
        if runtimes:  # one of the two
            runtime = request.unit(runtimes[0])
            runtime_cflags = _torch_flags(runtime, environment, folder)["cflags"]
        return Plan(
            units=units,
            cached=cached,
            flags=_torch_flags(request, environment, folder),
            runtime_cflags=runtime_cflags,
            environment=environment,
            jobs=jobs,
        )

    def write(self, request: Request, folder: str) -> None:
        """Write build.ninja into the private folder."""
        variables = {
            "cxx": " ".join(map(_word, request.compiler)),
            "nvcc": _word(f"{request.cuda.home}/bin/nvcc"),
            "jobs": str(self.jobs),
            **self.flags,
        }
        lines = [f"{name} = {value}" for name, value in variables.items()]
        is_gnu = toolchain.is_gnu(request)
        rules = _RULES.format(
            assembler="-Wa,--MD,$out.as.d " if is_gnu else "",
            collector=_NO_COLLECTOR if is_gnu else "",
            linked=dependency_files.LINKER_FLAG,
        )
        lines.append(rules)
        for source, target in self.units.items():
            is_for_nvcc = request.cuda.build and source.endswith(CUDA_SUFFIXES)
            rule = "cuda_compile" if is_for_nvcc else "compile"
            # The source is a variable, not an input of the rule, because ninja cannot quote every
            # path of an input.
            lines += [f"build {target}: {rule}", f"  source = {_word(source)}"]
            if source in RUNTIMES:
                lines.append(f"  cflags = {self.runtime_cflags}")
            # With -fpch-deps, the dependency file names the headers in the precompiled one.
            if source in self.preambles:
                lines += [f"  preamble = -include {self.preambles[source]} -fpch-deps"]
        objects = " ".join([*self.cached, *self.units.values()])
        lines += [f"build {os.path.basename(folder)}: link {objects}", f"  objects = {objects}", ""]
        with open(f"{folder}/build.ninja", "wb") as file:
            file.write(os.fsencode("\n".join(lines)))


def _word(text: str) -> str:
    """Return a word quoted for a shell, and then for ninja."""
    return shlex.quote(text).replace("$", "$$")


def _environment(request: Request, folder: str) -> dict[str, str]:
    """Return the environment of the compilers and of _torch_flags()."""
    changes = {
        "LD_PRELOAD": "",  # it may be a sanitizer for this process
        "LC_ALL": "C.UTF-8",  # diagnosis.py knows the English messages
        locks.MARK: folder,
    }
    if "CC" in request.environment:  # torch passes it to nvcc's -ccbin, which takes one word
        changes["CC"] = compiler_words(request.environment, "CC", "gcc")[0]
    if request.cuda.build:
        changes |= {
            "CUDA_HOME": request.cuda.home,
            "TORCH_CUDA_ARCH_LIST": cuda.arch_list(request.cuda),
        }
        headers = cuda.headers(request.cuda.home)
        if headers != os.path.join(request.cuda.home, "include"):
            changes["CUDA_INC_PATH"] = headers  # torch adds it to CUDA_HOME/include
    return request.environment | changes


def _torch_flags(request: Request, environment: dict[str, str], folder: str) -> dict[str, str]:
    """Return the flags that torch.utils.cpp_extension.load would write into its ninja file."""
    cpp_extension = _cpp_extension()
    # torch's check of the compiler's ABI would start two more processes.
    cpp_extension.os.environ = environment | {"TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    cpp_extension.CUDA_HOME = request.cuda.home or None
    cpp_extension.logger.disabled = not request.verbose
    # torch writes no ninja file if it remembers a build of this name and these sources.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.clear()
    written = {}
    cpp_extension._write_ninja_file = lambda **options: written.update(options)
    cflags = list(request.cflags)
    # Only GCC knows this flag of request.BASE.
    if not toolchain.is_gnu(request) and "-fno-gnu-unique" in cflags:
        cflags.remove("-fno-gnu-unique")
    cpp_extension.load(
        os.path.basename(folder),
        list(request.sources),
        extra_cflags=cflags,
        extra_cuda_cflags=list(request.cuda_cflags),
        extra_ldflags=["-shared", *_linking(request, folder)],
        extra_include_paths=[path.replace("$", "$$") for path in request.include_paths],
        build_directory=folder,
        verbose=request.verbose,
        with_cuda=request.cuda.build,
        # With -shared, a "standalone" program is a library without libtorch_python. torch does not
        # load it. The loader does so later, after it has verified the bytes.
        is_python_module=False,
        is_standalone=True,
    )
    unwanted = dependency_files.FLAGS
    # A wheel's library finds PyTorch by the rpaths with $ORIGIN of _linking(), wherever it is.
    if request.origin:
        unwanted += r"|-Wl,-rpath,/\S+"
    flags = {}
    for kind in ("cflags", "cuda_cflags", "ldflags"):
        text = " ".join(flag.strip() for flag in written[kind] or ())
        flags[kind] = re.sub(unwanted, "", text)
    return flags


@functools.cache
def _cpp_extension() -> types.ModuleType:
    """Return a private instance of torch.utils.cpp_extension, which only chooses flags.

    It has an `os.environ` of its own, because other threads would see changes of the shared
    cpp_extension and of the real os.environ.
    """
    private_os = types.ModuleType("os")
    vars(private_os).update(vars(os))
    # With an empty CUDA_PATH, the import of cpp_extension looks for no toolkit. If it found one, it
    # would look for a GPU, which initialises CUDA.
    private_os.environ = {"CUDA_PATH": ""}
    private_os.getenv = lambda name, default=None: private_os.environ.get(name, default)

    # setuptools is slow to import, and only setup.py needs it.
    setuptools = SimpleNamespace(Command=object, build_ext=object)
    replaced = {
        "os": private_os,
        "setuptools": setuptools,
        "setuptools.command.build_ext": setuptools,
    }

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        return replaced.get(name) or __import__(name, globals, locals, fromlist, level)

    spec = importlib.util.find_spec("torch.utils.cpp_extension")
    module = importlib.util.module_from_spec(spec)
    module.__builtins__ = vars(builtins) | {"__import__": import_}
    spec.loader.exec_module(module)
    module.logger = logging.getLogger("calcops_jit.torch")
    module.verify_ninja_availability = lambda: None
    module._run_ninja_build = lambda *_, **__: None
    return module


def _linking(request: Request, folder: str) -> list[str]:
    """Return flags for the linker.

    They link the CUDA runtime that PyTorch has loaded. With the rpaths, C++ programs need no
    LD_LIBRARY_PATH.
    """
    flags = ["-Wl,--as-needed", *request.ldflags]
    flags.append(f"-Wl,--version-script={_word(SHADOW)}/hidden.map")
    if request.kind == "foreign":
        flags.append("-ltorch_python")
    rpaths = [os.path.join(request.unfold("@torch"), "lib")]
    runtime = re.search(r"(/\S.*)/libcudart\.so[.\d]*$", text_of("/proc/self/maps"), re.MULTILINE)
    if request.cuda.build and runtime:
        with contextlib.suppress(FileExistsError):
            # Wheels have only libcudart.so.13, but -lcudart needs libcudart.so.
            os.symlink(runtime[0], f"{folder}/libcudart.so")
        flags.append("-L.")
        rpaths.append(runtime[1])
    if request.origin:
        site = os.path.dirname(request.unfold("@torch"))
        rpaths = [f"$ORIGIN/{request.origin}/{os.path.relpath(path, site)}" for path in rpaths]
    return [*flags, *(f"-Wl,-rpath,{_word(path)}" for path in rpaths)]
