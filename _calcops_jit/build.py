"""One compile, by torch.utils.cpp_extension.load in a private folder, and what it read."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator

from . import cache, cuda, diagnosis, inputs, reads
from .registration import SHADOW


class OutOfMemory(Exception):
    """A compiler was killed while others ran beside it."""


def compile_library(
    request: inputs.Request, slot: str, staging: str, alone: bool = False
) -> tuple[str, inputs.Closure]:
    """Compiles what changed and links, in `staging`; gives the library and its closure.

    BuildError when that fails; inputs.Changed when a source was saved meanwhile; OutOfMemory when it is worth
    trying `alone`. Whichever it is, every unit that was compiled is kept: it is not compiled again."""
    ninja = find_ninja()
    for problem in diagnosis.foresee(request, ninja):
        raise diagnosis.explain(f"cannot build {request.name}", problem, request)
    looked_up = {source: cache.find(request.unit(source)) for source in request.sources}
    kept = [found for found in looked_up.values() if found]
    fresh = [source for source, found in looked_up.items() if not found]
    started = os.stat(staging).st_mtime_ns
    failure = None
    with _environment(request, staging, ninja, alone):
        try:
            _load(request, staging, fresh, [_bring(found, staging) for found in kept])
        except Exception as error:
            log = f"{slot}/failed.log"
            with contextlib.suppress(OSError):
                _write(log, str(error))
            failure = diagnosis.explain(f"cannot build {request.name}", str(error), request, log)
            if not alone and diagnosis.KILLED in str(failure):
                failure = OutOfMemory()
    read = reads.Reads(request, staging, ninja)
    closures = [found.manifest.closure for found in kept]
    changed = None
    recorder = reads.Recorder(request, read.search)
    for source, (target, paths) in zip(fresh, read.units.items(), strict=False):
        # Nobody knows which state of these the compiler saw. (In the clock's tick in which the staging folder was made
        # a program that edits and reloads may have saved, but no compiler had started.)
        if late := [path for path in paths if os.stat(path).st_ctime_ns > started]:
            changed = inputs.Changed(late[0])
        elif os.path.exists(f"{staging}/{target}"):
            closures.append(recorder.closure(paths | read.tools))
            unit = request.unit(source)
            place = cache.slot_path(os.path.dirname(slot), unit)
            os.makedirs(place, 0o700, exist_ok=True)
            cache.publish(place, staging, f"{staging}/{target}", unit, closures[-1])
    if failure or changed:
        raise failure or changed
    return f"{staging}/{os.path.basename(staging)}", inputs.merged([*closures, recorder.closure(read.libraries)])


def _load(request: inputs.Request, staging: str, sources: list[str], objects: list[str]) -> None:
    from torch.utils import cpp_extension

    if request.cuda.build:
        cpp_extension.CUDA_HOME = request.cuda.home
    # "Standalone" with -shared links a library without libtorch_python and does not load it: that happens later,
    # from verified bytes. The staging folder's name is one that torch's versioner has not seen.
    cpp_extension.load(
        os.path.basename(staging),
        _distinct(sources, staging),
        extra_cflags=_for_this_compiler(request.cflags),
        extra_cuda_cflags=list(request.cuda_cflags),
        extra_ldflags=["-shared", *objects, *_linking(request, staging)],
        extra_include_paths=list(request.include_paths),
        build_directory=staging,
        verbose=request.verbose,
        with_cuda=request.cuda.build,
        is_python_module=False,
        is_standalone=True,
    )


def _bring(found: cache.Generation, staging: str) -> str:
    """A kept object into the staging folder, where its name needs no quoting."""
    name = f"kept.{found.fd}.o"
    with open(found.fd, "rb") as source, open(f"{staging}/{name}", "wb") as target:
        source.seek(0)
        shutil.copyfileobj(source, target)
    return name


def find_ninja() -> str | None:
    """ninja on PATH, beside this Python (whose folder is not on PATH when only it is called), or in its wheel."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        from ninja import BIN_DIR

        folders.append(BIN_DIR)
    return shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(folders))


def jobs() -> int:
    """How many compilers this process may run: processors, and free memory for 1.5 GB each, within its cgroups."""
    processors, free = cgroup_limits()
    if available := re.search(r"MemAvailable:\s+(\d+)", inputs.text_of("/proc/meminfo")):
        free = min(free, int(available[1]) * 1024)
    return max(1, int(min(len(os.sched_getaffinity(0)), processors, free / 1.5e9, 1024)))


def cgroup_limits(mounted: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[float, float]:
    """(processors, bytes) that the control groups, of version 2 or 1, leave to this process; inf: no limit."""
    processors = free = float("inf")
    for line in inputs.text_of(own).splitlines():
        _, controllers, group = line.split(":", 2)
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts) + 1):  # each group above limits, too; a container sees only some
            folder = "/".join([mounted, *filter(None, [controllers]), *parts[:depth]])
            quota = _numbers(f"{folder}/cpu.max") or _numbers(f"{folder}/cpu.cfs_quota_us")
            period = quota[1:] or _numbers(f"{folder}/cpu.cfs_period_us")
            if quota and period and quota[0] > 0:
                processors = min(processors, quota[0] / period[0])
            limit = _numbers(f"{folder}/memory.max") or _numbers(f"{folder}/memory.limit_in_bytes")
            used = _numbers(f"{folder}/memory.current") or _numbers(f"{folder}/memory.usage_in_bytes")
            if limit and used:  # pages of files count as used, but the kernel gives them up
                files = re.search(r"^(?:total_)?inactive_file (\d+)$", inputs.text_of(f"{folder}/memory.stat"), re.M)
                free = min(free, limit[0] - used[0] + int(files[1] if files else 0))
    return processors, free


def _numbers(path: str) -> list[int]:
    """Of a control group's file; none where it says "max" or does not exist."""
    with contextlib.suppress(ValueError):
        return [int(word) for word in inputs.text_of(path).split()]
    return []


@contextlib.contextmanager
def _environment(request: inputs.Request, staging: str, ninja: str, alone: bool) -> Iterator[None]:
    """The variables that torch and the compilers read; as they were afterwards."""
    changes = {
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(ninja)]),
        "LD_PRELOAD": "",  # what this process runs under, a sanitizer say, the compilers need not
        "LC_ALL": "C.UTF-8",  # messages are read by diagnosis.py
        "MAX_JOBS": "1" if alone else os.environ.get("MAX_JOBS") or str(jobs()),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not initialise CUDA
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # two more processes, to warn of compilers older than C++17
    }
    if len(inputs.compiler_words()) > 1:  # torch quotes what CXX says, as if it were one word
        changes["CXX"] = _write(f"{staging}/cxx", f'#!/bin/sh\nexec {os.environ["CXX"]} "$@"\n')
        os.chmod(changes["CXX"], 0o700)
    if request.cuda.build:
        changes |= {"CUDA_HOME": request.cuda.home, "TORCH_CUDA_ARCH_LIST": cuda.arch_list(request.cuda)}
    before = {name: os.environ[name] for name in changes if name in os.environ}
    logger = logging.getLogger("torch.utils.cpp_extension")
    was_disabled, logger.disabled = (logger.disabled, not request.verbose)  # without a GPU it says so, which is no news
    os.environ.update(changes)
    try:
        yield
    finally:
        logger.disabled = was_disabled
        for name in changes:
            del os.environ[name]
        os.environ.update(before)


def _distinct(sources: list[str], staging: str) -> list[str]:
    """torch names objects by basename; a source whose basename is taken is reached through a file of its own.
    And it wants a source even where every object is kept."""
    taken: set[str] = set()
    distinct = []
    for i, source in enumerate(sources):
        if os.path.basename(source) in taken:
            stem, extension = os.path.splitext(os.path.basename(source))
            distinct.append(_write(f"{staging}/{stem}.{i}{extension}", f'#include "{source}"\n'))
        else:
            taken.add(os.path.basename(source))
            distinct.append(source)
    return distinct or [_write(f"{staging}/nothing.cpp", "")]


def _write(path: str, text: str) -> str:
    with open(path, "w") as file:
        file.write(text)
    return path


def _for_this_compiler(cflags: tuple[str, ...]) -> list[str]:
    # torch passes -MMD, which leaves out every header found through -isystem; this makes the list complete.
    if "clang" in reads.ask_compiler("--version"):
        return [*(flag for flag in cflags if flag != "-fno-gnu-unique"), "-MD"]
    return [*cflags, "-Wp,-M"]


def _linking(request: inputs.Request, staging: str) -> list[str]:
    """With rpaths, so that a C++ host needs no LD_LIBRARY_PATH; the CUDA runtime is the one that torch itself uses."""
    flags = ["-Wl,--as-needed", *request.ldflags, "-Wl,-Map=link.map"]
    flags += [f"-Wl,--version-script={shlex.quote(SHADOW)}/hidden.map", *["-ltorch_python"] * bool(request.python)]
    rpaths = [os.path.join(request.unfold("@torch"), "lib")]
    runtime = re.search(r"(/\S.*)/libcudart\.so[.\d]*$", inputs.text_of("/proc/self/maps"), re.MULTILINE)
    if request.cuda.build and runtime:
        os.symlink(runtime[0], f"{staging}/libcudart.so")  # wheels have only libcudart.so.13, which -lcudart ignores
        flags.append("-L.")
        rpaths.append(runtime[1])
    return [*flags, *(f"-Wl,-rpath,{shlex.quote(folder)}" for folder in rpaths)]
