"""The call of torch.utils.cpp_extension.load.

It happens in a child process (child.py), because it needs other environment variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

from . import cuda
from .cache import write_whole
from .inputs import TORCH
from .messages import report
from .request import SHADOW, Request, quoted

# The linker's dependency file. No source has a file of this name, as link.cpp has link.d.
LINKER_DEPENDENCIES = "library.linked"
_INSTALL = "install g++, or: conda install -c conda-forge gxx"
_MEMORY = 2e9  # bytes that one compiler may need, with torch/extension.h
# torch asks compilers for the headers outside of system folders (-MMD). -isystem makes a folder one
# of these, and its headers may be edited, too. The list of main.o's headers is written to main.d.
# In main.o.d, ninja would read and remove it, and shorten `link/../header.h`. The script also lets
# CXX be several words.
_COMPILER = """\
#!/bin/sh
{first}
for word do
  shift
  case "$word" in
    -MMD) word=-MD;;
    *.o.d) word=${{word%.o.d}}.d;;
  esac
  set -- "$@" "$word"
done
exec {command} "$@"
"""
# The script's beginning if there is nothing to link with yet.
_COMPILE_ONLY = 'case " $* " in *" -c "*);; *) exit;; esac'


def compile_and_link(request: Request, folder: str, archives: list[str]) -> str:
    """Compile what changed in a folder, and link it with the runtime. Return the product's path.

    Without the runtime, nothing is linked. torch's exceptions: it failed.
    """
    cpp_extension = _import_cpp_extension()
    cpp_extension.CUDA_HOME = request.cuda.home or None
    os.environ.update(_variables(request, folder, archives))
    path = cpp_extension.load(
        # torch builds nothing if it remembers a build of this name and these sources.
        name=f"library.{os.urandom(4).hex()}",
        sources=_sources(request, folder),
        extra_cflags=_cflags(request),
        extra_cuda_cflags=_cuda_cflags(request),
        extra_ldflags=_ldflags(request, folder, archives),
        extra_include_paths=[path.replace("$", "$$") for path in request.include_paths],
        build_directory=folder,
        verbose=True,  # ninja's output goes to the log
        with_cuda=request.cuda.build,
        # With -shared, a "standalone" program is a library. torch does not load it: the loader
        # does so later, after it has verified the bytes.
        is_python_module=False,
        is_standalone=True,
    )
    if request.product.endswith(".a"):
        path = f"{folder}/{request.product}"
        subprocess.run(["ar", "rcs", path, *files_of(folder, ".o")], check=True)
    return path


def _import_cpp_extension() -> ModuleType:
    """Return torch.utils.cpp_extension."""
    # setuptools is slow to import, and only setup.py needs it.
    placeholder = SimpleNamespace(Command=object, build_ext=object)
    for name in ("setuptools", "setuptools.command", "setuptools.command.build_ext"):
        sys.modules.setdefault(name, placeholder)
    # If the import found a toolkit, it would look for a GPU, which initialises CUDA.
    os.environ.update({"CUDA_HOME": "", "CUDA_PATH": ""})
    from torch.utils import cpp_extension

    if cpp_extension._prepare_ldflags.__module__ != __name__:
        cpp_extension._prepare_ldflags = _corrected(cpp_extension._prepare_ldflags)
    return cpp_extension


def _corrected(prepare_ldflags: Callable) -> Callable:
    """Return torch's function that appends flags for the linker, with its paths quoted.

    torch does not quote its folder and CUDA's, which may contain a space. Its rpath is left out,
    because _ldflags() has one.
    """

    def prepare(ldflags: list[str], *options) -> list[str]:
        flags = prepare_ldflags([], *options)
        return [*ldflags, *(quoted(flag) for flag in flags if not flag.startswith("-Wl,-rpath"))]

    return prepare


def _write_compiler(folder: str, name: str, command: list[str], first="") -> str:
    """Write a script that runs a compiler. Return its path from `folder`, in which ninja runs.

    PyTorch 2.10 does not quote the path, and that of `folder` may contain a space.
    """
    script = f"{folder}/{name}"
    text = _COMPILER.format(command=shlex.join(command), first=first)
    write_whole(script, os.fsencode(text))
    os.chmod(script, 0o755)
    return f"./{name}"


def _variables(request: Request, folder: str, archives: list[str]) -> dict[str, str]:
    """Return environment variables for torch and the compilers."""
    path = request.environment.get("PATH", os.defpath)
    first = "" if archives else _COMPILE_ONLY
    variables = {
        "CXX": _write_compiler(folder, "c++", request.compiler, first),
        "PATH": f"{path}:{os.path.dirname(find_ninja(request))}",
        # Without archives, the runtime is compiled meanwhile, which takes as long as the operators.
        "MAX_JOBS": str(max(1, jobs(request) - (not archives))),
        "LC_ALL": "C.UTF-8",  # messages.py knows the English messages
        "LD_PRELOAD": "",  # it may be a sanitizer for this process
        # Compiler wrappers decide by rules of their own whether an object is up to date.
        "TORCH_NO_COMPILER_WRAPPER": "1",
        "CCACHE_DISABLE": "1",
        "SCCACHE_RECACHE": "1",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # the check starts two processes
    }
    if request.cuda.build:
        variables["CUDA_HOME"] = request.cuda.home
        variables["TORCH_CUDA_ARCH_LIST"] = cuda.arch_list(request.cuda)
        # torch would take another nvcc, and record no headers.
        nvcc = [f"{request.cuda.home}/bin/nvcc"]
        variables["PYTORCH_NVCC"] = _write_compiler(folder, "nvcc", nvcc)
        variables["TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"] = "0"
        variables["CUDA_INC_PATH"] = cuda.headers(request.cuda.home)
    return variables


def _sources(request: Request, folder: str) -> list[str]:
    """Return the sources for torch, which names an object after its source.

    If the name is taken, or ninja or the linker would read the path otherwise, a file in `folder`
    includes the source.
    """
    sources = []
    taken = set()
    for i, source in enumerate(request.sources):
        stem, suffix = os.path.splitext(os.path.basename(source))
        is_cuda = request.cuda.build and suffix == ".cu"
        ending = ".cuda.o" if is_cuda else ".o"
        is_odd = set("$:|").intersection(source) or re.search(r"^-|\s", stem)
        if f"{stem}{ending}" in taken or is_odd:
            text = os.fsencode(f'#include "{source}"\n')
            stem = re.sub(r"^-|[$:|\s]", "_", stem) + f".{i}"
            while f"{stem}{ending}" in taken:
                stem = f"{stem}.{i}"
            source = f"{folder}/{stem}{suffix}"
            _write_if_other(source, text)
        taken.add(f"{stem}{ending}")
        sources.append(source)
    return sources


def _write_if_other(path: str, text: bytes) -> None:
    """Write a file unless it has this text already. A newer time would make ninja compile it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == text:
            return
    write_whole(path, text)


def _cflags(request: Request) -> list[str]:
    """Return the flags for C++, of which some are only for GCC."""
    cflags = [*request.cflags]
    if request.beside:
        cflags.append(quoted(f"-iquote{request.beside}"))
    if not _is_gcc(version(request)):
        return [flag for flag in cflags if flag != "-fno-gnu-unique"]
    # GCC's garbage collector takes a fifth of the time for PyTorch's headers. It runs only if the
    # heap exceeds 1 GiB, or on a machine with little memory 0.4 GB, so that 0.85 GB are enough.
    heap, growth = (1048576, 100) if _memory("Total") > 2 * _MEMORY else (400000, 40)
    # GCC names a header of -isystem by its real path if that is shorter. But a link may change.
    for_gcc = [f"--param=ggc-min-heapsize={heap}", f"--param=ggc-min-expand={growth}"]
    for_gcc.append("-fno-canonical-system-headers")
    for_gcc.append(f"-include {quoted(SHADOW)}/no_precompiled.h")
    return [*for_gcc, *cflags]


def _cuda_cflags(request: Request) -> list[str]:
    """Return the flags for nvcc. A host compiler other than GCC does not know -fno-gnu-unique."""
    flags = " ".join(request.cuda_cflags)
    words = re.findall(r"(?:-ccbin|--compiler-bindir)[= ](\S+)", flags)
    words += filter(None, [os.environ.get("CC"), request.environment.get("NVCC_CCBIN"), "gcc"])
    host = f"{words[0]}/gcc" if os.path.isdir(words[0]) else words[0]
    if not _is_gcc(version(request, [host])):
        flags = flags.replace(",-fno-gnu-unique", "")
    if request.beside:  # nvcc knows no -iquote
        flags += " " + quoted(f"-I{request.beside}")
    return [flags]


def _is_gcc(version: str) -> bool:
    return "Free Software Foundation" in version


def _ldflags(request: Request, folder: str, archives: list[str]) -> list[str]:
    """Return flags for the linker. It takes from the runtime only what the objects need."""
    flags = ["-shared", "-Wl,--as-needed", f"-Wl,--dependency-file={LINKER_DEPENDENCIES}"]
    flags += map(quoted, archives)
    # lld would otherwise link the runtime into every library, because -ltorch_python needs symbols
    # that the runtime defines, too.
    flags += [f"-L{quoted(TORCH)}/lib", "-ltorch_cpu"]
    # The path of another Library may contain a space.
    flags += [quoted(flag) if os.path.isfile(flag) else flag for flag in request.ldflags]
    # With -ffast-math or -Ofast, GCC links an initialiser that makes denormal numbers of the
    # process zero.
    flags += ["-O2", "-fno-fast-math", "-fno-unsafe-math-optimizations"]
    # -Wl would split a path at a comma.
    flags += ["-Xlinker", f"--version-script={quoted(SHADOW)}/hidden.map"]
    # lld reads PyTorch's libraries in a tenth of GNU ld's time. With archives it may make another
    # library.
    is_plain = {*request.ldflags} <= {"-fopenmp", "-ltorch_python"}
    if is_plain and "-flto" not in " ".join(request.cflags) and shutil.which("ld.lld"):
        flags.append("-fuse-ld=lld")
    rpaths = [f"{TORCH}/lib"]  # so that C++ programs need no LD_LIBRARY_PATH
    runtime = cuda.loaded_runtime()
    if request.cuda.build and runtime:
        # Wheels have only libcudart.so.13, but -lcudart needs libcudart.so.
        with contextlib.suppress(FileExistsError):
            os.symlink(runtime, f"{folder}/libcudart.so")
        flags.append("-L.")
        rpaths.append(os.path.dirname(runtime))
    if request.portable:  # PyTorch has loaded its libraries from wherever they are
        rpaths = []
    return [*flags, *(f"-Xlinker -rpath -Xlinker {quoted(path)}" for path in rpaths)]


# ---- programs ------------------------------------------------------------------------------------


def find_ninja(request: Request) -> str:
    """Return the path of ninja: on PATH, next to this Python or in the user's folder; or ""."""
    folders = request.environment.get("PATH", "").split(os.pathsep)
    folders += [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    folders.append(sysconfig.get_path("scripts", "posix_user"))  # of `pip install --user`
    path = os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)
    return shutil.which("ninja", path=path) or ""


def version(request: Request, command: list[str] | None = None) -> str:
    """Return what a command, or the C++ compiler, prints for --version; "" if it does not run."""
    with contextlib.suppress(OSError):
        environment = request.environment | {"LC_ALL": "C.UTF-8"}
        options = {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
        arguments = [*(command or request.compiler), "--version"]
        return subprocess.run(arguments, capture_output=True, env=environment, **options).stdout
    return ""


def foresee(request: Request) -> Iterator[tuple[str, str, str]]:
    """Yield (cause, a line that shows it, a command that fixes it) of what a build lacks."""
    if request.cuda.fatal:
        fix = re.sub("^pip ", f"{sys.executable} -m pip ", request.cuda.fix)
        yield "no build for CUDA", request.cuda.reason, fix
    path = request.environment.get("PATH", "")
    compiler = request.compiler[0]
    if shutil.which(compiler, path=path) is None:
        fix = "unset CXX" if request.environment.get("CXX") else _INSTALL
        yield "no C++ compiler", f"`{compiler}` is not on PATH", fix
    if not find_ninja(request):
        evidence = "ninja, which runs the compilers, is neither on PATH nor where pip installs it"
        yield "no ninja", evidence, f"{sys.executable} -m pip install ninja"


def jobs(request: Request) -> int:
    """Return how many compilers may run: MAX_JOBS, or what processors and memory allow."""
    maximum = request.environment.get("MAX_JOBS", "")
    if maximum.isdigit() and int(maximum) > 0:
        return int(maximum)
    return max(1, int(min(len(os.sched_getaffinity(0)), _memory("Available") / _MEMORY)))


def _memory(kind: str) -> int:
    """Return the bytes of this machine's memory; `kind` is "Total" or "Available"."""
    with open("/proc/meminfo") as file:
        match = re.search(rf"Mem{kind}:\s+(\d+) kB", file.read())
    return int(match[1]) * 1024 if match else 0


def files_of(folder: str, *endings: str) -> list[str]:
    """Return the paths of the files with an ending in a folder of builds. .a.cpp has .a.o."""
    return [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(endings)]


def targets(folder: str) -> list[str]:
    """Return the names of the files that ninja makes in a folder of builds."""
    if not os.path.isfile(f"{folder}/build.ninja"):  # a FIFO would block
        return []
    with open(f"{folder}/build.ninja", errors="replace") as file:
        return re.findall(r"^build (\S+):", file.read(), re.MULTILINE)


def dependencies(folder: str) -> dict[str, list[str]]:
    """Return {object: the files that were read for it} in a folder of builds.

    Compilers write the list also if they fail, and then no object. BuildError: they write none.
    """
    found = {}
    objects = [name[:-2] for name in targets(folder) if name.endswith(".o")]
    for target in objects:
        path = f"{folder}/{target}"
        if os.path.exists(f"{path}.o") and not os.path.exists(f"{path}.d"):
            what = f"cannot determine which files were read for {target}"
            raise report(what, ["the compiler wrote no list of them"], "remove flags such as -MF")
    for path in files_of(folder, ".d"):
        # The compiler writes a rule for make: "main.o: /a/main.cpp /a/with\\ space.h".
        with open(path, "rb") as file:
            rule = os.fsdecode(file.read()).replace("\\\n", " ")
        # -MP adds more rules below.
        names = re.findall(r"(?:\\.|\S)+", rule.partition(":")[2].partition("\n")[0])
        target = f"{os.path.basename(path)[:-2]}.o"
        found[target] = [os.path.join(folder, _unescaped(name)) for name in names]
    return found


def _unescaped(name: str) -> str:
    """Return a path of a rule for make."""
    return re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$")


def linked(folder: str) -> set[str]:
    """Return the files that the linker read."""
    with contextlib.suppress(OSError), open(f"{folder}/{LINKER_DEPENDENCIES}", "rb") as file:
        # Each linker adds an empty rule for each file. In the first rule, mold has all in one line.
        names = re.findall(r"^(.+):$", os.fsdecode(file.read()), re.MULTILINE)
        names += [_unescaped(name) for name in names]  # lld escapes, and GNU ld does not
        # Link-time optimisation links temporary files, which are gone.
        return {path for name in names if os.path.exists(path := os.path.join(folder, name))}
    return set()
