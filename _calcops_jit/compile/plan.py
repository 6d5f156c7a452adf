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


# GCC's garbage collection takes a good part of its time on PyTorch's headers.
_NO_COLLECTOR = "--param=ggc-min-heapsize=1048576 "


class Plan(SimpleNamespace):
    """The commands of one build in a private folder."""

    units: dict[str, str]  # {source: object}
    kept: list[str]  # objects that are linked as they are
    # Of every unit and of the link, by ninja's variables: cflags, cuda_cflags, ldflags.
    flags: dict[str, str]
    runtime_cflags: str  # those of the runtime, whose object serves every library
    environment: dict[str, str]  # of the compilers
    jobs: int  # the number of compilers that run at once
    preambles: dict[str, str] = {}  # {source: its precompiled header}

    @staticmethod
    def of(request: Request, folder: str, sources: list[str], kept: list[str], jobs: int) -> Plan:
        """Plan to compile `sources` and to link them with the objects `kept`."""
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
        for source in set(sources).intersection(RUNTIMES):
            runtime_cflags = _torch_flags(request.unit(source), environment, folder)["cflags"]
        return Plan(
            units=units,
            kept=kept,
            flags=_torch_flags(request, environment, folder),
            runtime_cflags=runtime_cflags,
            environment=environment,
            jobs=jobs,
        )

    def write(self, request: Request, folder: str) -> None:
        """Write build.ninja. Sources are no inputs in it, since ninja cannot quote every name."""
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
            lines += [f"build {target}: {rule}", f"  source = {_word(source)}"]
            if source in RUNTIMES:
                lines.append(f"  cflags = {self.runtime_cflags}")
            # Without -fpch-deps, the dependency file has no headers of the preamble.
            if source in self.preambles:
                lines += [f"  preamble = -include {self.preambles[source]} -fpch-deps"]
        objects = " ".join([*self.kept, *self.units.values()])
        lines += [f"build {os.path.basename(folder)}: link {objects}", f"  objects = {objects}", ""]
        with open(f"{folder}/build.ninja", "wb") as file:
            file.write(os.fsencode("\n".join(lines)))


def _word(text: str) -> str:
    """Quote a word for ninja, which gives it to a shell."""
    return shlex.quote(text).replace("$", "$$")


def _environment(request: Request, folder: str) -> dict[str, str]:
    changes = {
        # A sanitizer of this process is not for the compilers.
        "LD_PRELOAD": "",
        "LC_ALL": "C.UTF-8",  # messages are read by diagnosis.py
        locks.MARK: folder,
    }
    if "CC" in request.environment:  # torch has nvcc take it for the host's compiler: one word
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
    torch = _cpp_extension()
    # The check takes two more processes.
    torch.os.environ = environment | {"TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    torch.CUDA_HOME = request.cuda.home or None
    torch.logger.disabled = not request.verbose
    # Else it finds nothing to build under a known name.
    torch.JIT_EXTENSION_VERSIONER.entries.clear()
    written = {}
    torch._write_ninja_file = lambda **options: written.update(options)
    cflags = list(request.cflags)
    if not toolchain.is_gnu(request) and "-fno-gnu-unique" in cflags:
        cflags.remove("-fno-gnu-unique")
    torch.load(
        os.path.basename(folder),
        list(request.sources),
        extra_cflags=cflags,
        extra_cuda_cflags=list(request.cuda_cflags),
        extra_ldflags=["-shared", *_linking(request, folder)],
        extra_include_paths=[path.replace("$", "$$") for path in request.include_paths],
        build_directory=folder,
        verbose=request.verbose,
        with_cuda=request.cuda.build,
        # "Standalone" with -shared links a library without libtorch_python and does not load it:
        # that happens later, from verified bytes.
        is_python_module=False,
        is_standalone=True,
    )
    unwanted = dependency_files.FLAGS
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

    It has an environment of its own. Other threads would see changes of the shared instance and of
    os.environ.
    """
    private_os = types.ModuleType("os")
    vars(private_os).update(vars(os))
    # With a toolkit it would ask whether there is a GPU, which initialises CUDA.
    private_os.environ = {"CUDA_PATH": ""}
    private_os.getenv = lambda name, default=None: private_os.environ.get(name, default)

    # Slow to import, and only setup.py needs it.
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
    """Return flags for the linker, with PyTorch's CUDA runtime.

    The rpaths save C++ hosts an LD_LIBRARY_PATH.
    """
    flags = ["-Wl,--as-needed", *request.ldflags]
    flags.append(f"-Wl,--version-script={_word(SHADOW)}/hidden.map")
    if request.kind == "foreign":
        flags.append("-ltorch_python")
    rpaths = [os.path.join(request.unfold("@torch"), "lib")]
    runtime = re.search(r"(/\S.*)/libcudart\.so[.\d]*$", text_of("/proc/self/maps"), re.MULTILINE)
    if request.cuda.build and runtime:
        with contextlib.suppress(FileExistsError):
            # Wheels have only libcudart.so.13, which -lcudart ignores.
            os.symlink(runtime[0], f"{folder}/libcudart.so")
        flags.append("-L.")
        rpaths.append(runtime[1])
    if request.origin:
        site = os.path.dirname(request.unfold("@torch"))
        rpaths = [f"$ORIGIN/{request.origin}/{os.path.relpath(path, site)}" for path in rpaths]
    return [*flags, *(f"-Wl,-rpath,{_word(path)}" for path in rpaths)]
