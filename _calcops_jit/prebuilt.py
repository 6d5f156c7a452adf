"""Libraries for machines without a compiler: the folder `prebuilt` among a library's sources.

    <sources>/prebuilt/<name>-<digest of the request's facts>/<digest>/
        <name>.so        the library
        manifest         as in the cache

A wheel of the package has this folder, which is only read. It has one library for each PyTorch for
which `python -m calcops_jit prebuild` was called. The library is for processors with x86-64-v3.

A library fits if all flags, the build of PyTorch, and the bytes of the sources and of the loader
are the same. Compilers and the system's headers are not compared, because a machine may have none.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil

from . import cache, cuda
from .cache import Build
from .messages import report
from .processor import MACHINE, lacking
from .request import Request, request_of

_PROCESSOR = "-march=x86-64-v3"
_WITHOUT_CUDA = cuda.Choice(reason="the prebuilt library is for CPUs", fix="export CALCOPS_CUDA=1")


def find(wanted: Request, reasons: list[str]) -> Build | None:
    """Return the prebuilt library for this machine, or None.

    Why the others do not fit is appended to `reasons`.
    """
    for path in _paths(wanted):
        try:
            return _checked(path, wanted)
        except cache.UNFIT as problem:
            # The reason of the library for this PyTorch comes first.
            is_other = str(problem).startswith("PyTorch: ")
            reasons.insert(len(reasons) if is_other else 0, str(problem))
    return None


def _paths(wanted: Request) -> list[str]:
    """Return the folders of the prebuilt libraries of a name."""
    pattern = f"{wanted.name}-{'[0-9a-f]' * 16}/*"
    return sorted(glob.glob(f"{glob.escape(wanted.root)}/prebuilt/{pattern}"))


def _checked(path: str, wanted: Request) -> Build:
    """Return the build in a folder. UNFIT: it does not fit this machine."""
    facts = cache.read_checked(f"{path}/manifest", is_shipped=True)["facts"]
    choice = cuda.Choice() if wanted.asked["with_cuda"] is False else _WITHOUT_CUDA
    if "CUDA" in facts:
        version, arches = facts["CUDA"]
        choice = cuda.Choice(build=True, version=version, arches=arches)
    flags = os.environ.get("CALCOPS_CFLAGS")
    problem = lacking(facts["portable"]) or _other_cuda(wanted.cuda, choice)
    if flags and wanted.asked["native"]:
        problem = f"CALCOPS_CFLAGS={flags}"
    portable = request_of(wanted.asked, choice, facts["portable"])
    differences = cache.differences(facts, portable.facts)
    of_pytorch = [line for line in differences if line.startswith("PyTorch: ")]
    for reason in filter(None, [*of_pytorch, problem, *differences]):
        raise ValueError(reason)
    return cache.checked(path, portable)


def _other_cuda(wanted: cuda.Choice, built: cuda.Choice) -> str:
    """Return why a library with the choice `built` does not fit the choice `wanted`; "" if it does.

    A library for CUDA fits a machine without nvcc or without a GPU, too.
    """
    if built.build and os.environ.get("CALCOPS_CUDA") == "0":
        return wanted.reason
    if built.build and wanted.build and wanted.arches not in ("", built.arches):
        return f"its GPU architectures are {built.arches}, not {wanted.arches}"
    if not built.build and (wanted.build or wanted.fatal):
        return f"it is for CPUs, and {'CUDA was asked for' if wanted.fatal else 'nvcc is here'}"
    return ""


def write(wanted: Request) -> str:
    """Build a library for other machines, and put it beside its sources. Return its path.

    BuildError: it cannot be built, or another machine could not use it.
    """
    from .build import built

    flags = os.environ.get("CALCOPS_CFLAGS") or _PROCESSOR
    portable = request_of(wanted.asked, _choice_without_gpu(wanted), flags)
    _check_portable(portable)
    found = cache.find(portable) or built(portable, [])
    with open(found.path, "rb") as file:
        if b"libtorch_python" in file.read():
            what = "it calls Python, so it would fit this version alone"
            raise report(f"cannot prebuild {wanted.name}", [what], "call PyTorch's C++ instead")
    for path in _paths(portable):
        if _pytorch_of(path) in (portable.facts["PyTorch"], None):
            cache.remove(os.path.dirname(path))
    target = f"{portable.root}/prebuilt/{portable.entry}/{found.digest}"
    shutil.copytree(os.path.dirname(found.path), target)
    # Every machine can look into the folders of the package.
    inputs = vars(found.inputs)
    absent = {path: names for path, names in inputs["absent"].items() if path[0] == "@"}
    portable_inputs = inputs | {"absent": absent}
    cache.write_checked(f"{target}/manifest", found.manifest | {"inputs": portable_inputs})
    return f"{target}/{portable.product}"


def _choice_without_gpu(wanted: Request) -> cuda.Choice:
    """Return whether a prebuilt library has CUDA. This machine needs no GPU for it."""
    with_cuda = wanted.asked["with_cuda"]
    if not with_cuda:
        return cuda.Choice()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda.DEFAULT_ARCHES)
    if with_cuda == "auto":
        os.environ.setdefault("CALCOPS_CUDA", "1" if cuda.find_toolkit()[0] else "0")
    choice = cuda.choose(needed=with_cuda != "auto")
    return choice if choice.build or choice.fatal else _WITHOUT_CUDA


def _check_portable(portable: Request) -> None:
    """Check that other machines can use a library. BuildError: they cannot."""
    foreign = [path for path in portable.include_paths if portable.fold(path)[0] != "@"]
    own_flags = [*portable.asked["extra_cflags"], *portable.asked["extra_cuda_cflags"]]
    bound = re.findall(r"-m(?:arch|cpu)=\S+", " ".join(own_flags))
    problem = fix = ""
    if MACHINE != "x86_64":
        problem, fix = f"this is {MACHINE}", "build on the other machine"
    elif foreign:
        problem, fix = f"{foreign[0]} is outside of {portable.root}", "move its headers there"
    elif bound:
        problem, fix = f"its flags have {bound[0]}", "use native=True in place of it"
    elif problem := lacking(portable.portable):
        fix = f"CALCOPS_CFLAGS={_PROCESSOR}"
    if problem:
        raise report(f"cannot prebuild {portable.name}", [problem], fix)


def _pytorch_of(path: str) -> list[str] | None:
    """Return the PyTorch of a prebuilt library; None if its manifest cannot be read."""
    with contextlib.suppress(*cache.UNFIT):
        return cache.read_checked(f"{path}/manifest", is_shipped=True)["facts"]["PyTorch"]
    return None
