"""What ninja runs: a command for every unit and one that links, with the flags that torch would use."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import logging
import os
import re
import shlex
import types
from types import SimpleNamespace

from . import cuda, inputs, private, reads
from .diagnosis import report
from .registration import SHADOW

_RULES = """\
rule compile
  command = $cxx $cflags -MD -MF $out.d {assembler}-c $source -o $out
rule cuda_compile
  command = $nvcc $cuda_cflags -MD -MF $out.d -c $source -o $out
rule link
  command = $cxx $objects $ldflags {linked} -o $out
"""


class Plan(SimpleNamespace):
    """The commands of one build in a staging folder."""

    units: dict[str, str]  # {source: object}
    kept: list[str]  # objects that are linked as they are
    flags: dict[str, str]  # as ninja has them, by its variables: cflags, cuda_cflags, ldflags
    environment: dict[str, str]  # what the compilers find
    jobs: int  # how many of them run at once

    @staticmethod
    def of(request: inputs.Request, staging: str, sources: list[str], kept: list[str], jobs: int) -> Plan:
        """Compiles `sources` and links them with the objects `kept`."""
        for text in (*sources, *request.include_paths, *request.cflags, *request.cuda_cflags, *request.ldflags):
            if "\n" in text.strip():
                raise report(f"cannot build {request.name}: a line break in a name", [repr(text)], "rename it")
        environment = _environment(request, staging)
        taken, units = set(), {}
        for i, source in enumerate(sources):
            name = re.sub(r"[^\w.+-]", "_", os.path.basename(source))
            units[source] = f"{i}.{name}.o" if name in taken else f"{name}.o"
            taken.add(name)
        flags = _torch_flags(request, environment, staging)
        return Plan(units=units, kept=kept, flags=flags, environment=environment, jobs=jobs)

    def write(self, request: inputs.Request, staging: str, linked: str) -> None:
        """The file that ninja reads. (Sources are not named as its inputs: it cannot quote every name.)"""
        flags = {"cxx": " ".join(map(_word, request.compiler)), "nvcc": _word(f"{request.cuda.home}/bin/nvcc")}
        flags |= {"jobs": str(self.jobs), **self.flags}
        assembler = "-Wa,--MD,$out.as.d " if reads.is_gnu(request) else ""
        lines = [f"{name} = {value}" for name, value in flags.items()]
        lines.append(_RULES.format(assembler=assembler, linked=linked))
        for source, target in self.units.items():
            rule = "cuda_compile" if request.cuda.build and source.endswith((".cu", ".cuh")) else "compile"
            lines += [f"build {target}: {rule}", f"  source = {_word(source)}"]
        objects = " ".join([*self.kept, *self.units.values()])
        lines += [f"build {os.path.basename(staging)}: link {objects}", f"  objects = {objects}", ""]
        with open(f"{staging}/build.ninja", "wb") as file:
            file.write(os.fsencode("\n".join(lines)))


def _word(text: str) -> str:
    """For ninja, which gives it to a shell."""
    return shlex.quote(text).replace("$", "$$")


def _environment(request: inputs.Request, staging: str) -> dict[str, str]:
    changes = {
        "LD_PRELOAD": "",  # what this process runs under, a sanitizer say, the compilers need not
        "LC_ALL": "C.UTF-8",  # messages are read by diagnosis.py
        private.MARK: staging,
    }
    if request.cuda.build:
        changes |= {"CUDA_HOME": request.cuda.home, "TORCH_CUDA_ARCH_LIST": cuda.arch_list(request.cuda)}
    return request.environment | changes


def _torch_flags(request: inputs.Request, environment: dict[str, str], staging: str) -> dict[str, str]:
    """What torch.utils.cpp_extension.load writes into its ninja file for this request."""
    torch = _cpp_extension()
    torch.os.environ = environment | {"TORCH_DONT_CHECK_COMPILER_ABI": "1"}  # that takes two more processes
    torch.CUDA_HOME = request.cuda.home or None
    torch.logger.disabled = not request.verbose
    written = {}
    torch._write_ninja_file = lambda **options: written.update(options)
    torch.load(
        os.path.basename(staging),  # one that its versioner has not seen
        list(request.sources),
        extra_cflags=[f for f in request.cflags if f != "-fno-gnu-unique" or reads.is_gnu(request)],
        extra_cuda_cflags=list(request.cuda_cflags),
        extra_ldflags=["-shared", *_linking(request, staging)],
        extra_include_paths=[folder.replace("$", "$$") for folder in request.include_paths],
        build_directory=staging,
        verbose=request.verbose,
        with_cuda=request.cuda.build,
        # "Standalone" with -shared links a library without libtorch_python and does not load it: that happens later,
        # from verified bytes.
        is_python_module=False,
        is_standalone=True,
    )
    kinds = ("cflags", "cuda_cflags", "ldflags")
    return {kind: re.sub(reads.MAKE_FLAGS, "", " ".join(f.strip() for f in written[kind] or ())) for kind in kinds}


@functools.cache
def _cpp_extension() -> types.ModuleType:
    """torch.utils.cpp_extension, an instance of our own with an environment of its own and with nothing to do but to
    choose flags. A change of the one that everybody imports, or of os.environ, would be seen by other threads."""
    private_os = types.ModuleType("os")
    vars(private_os).update(vars(os))
    private_os.environ = {"CUDA_PATH": ""}  # no toolkit: it would ask whether there is a GPU, which initialises CUDA
    private_os.getenv = lambda name, default=None: private_os.environ.get(name, default)

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        return private_os if name == "os" else __import__(name, globals, locals, fromlist, level)

    spec = importlib.util.find_spec("torch.utils.cpp_extension")
    module = importlib.util.module_from_spec(spec)
    module.__builtins__ = vars(builtins) | {"__import__": import_}
    spec.loader.exec_module(module)
    module.logger = logging.getLogger("calcops_jit.torch")
    module.verify_ninja_availability = lambda: None
    module._run_ninja_build = lambda *_, **__: None
    return module


def _linking(request: inputs.Request, staging: str) -> list[str]:
    """With rpaths, so that a C++ host needs no LD_LIBRARY_PATH; the CUDA runtime is the one that torch itself uses."""
    flags = ["-Wl,--as-needed", *request.ldflags]
    flags += [f"-Wl,--version-script={_word(SHADOW)}/hidden.map", *["-ltorch_python"] * bool(request.python)]
    rpaths = [os.path.join(request.unfold("@torch"), "lib")]
    runtime = re.search(r"(/\S.*)/libcudart\.so[.\d]*$", inputs.text_of("/proc/self/maps"), re.MULTILINE)
    if request.cuda.build and runtime:
        os.symlink(runtime[0], f"{staging}/libcudart.so")  # wheels have only libcudart.so.13, which -lcudart ignores
        flags.append("-L.")
        rpaths.append(runtime[1])
    return [*flags, *(f"-Wl,-rpath,{_word(folder)}" for folder in rpaths)]
