"""Find the library in a wheel that fits this processor and this PyTorch.

    built/<PyTorch>/<level of x86-64>/calcops.so, manifest      a generation that is only read
    built/objects/<level of x86-64>/unit.o, manifest            the objects without PyTorch

If the wheel has no library for this PyTorch, its objects are linked here. They are independent of
PyTorch. The one unit that includes PyTorch's headers is compiled here and linked with them.

A library fits if the bytes of the operators' and the loader's sources, all flags, and the build of
PyTorch are the same. Compilers and the system's headers are not compared, because the machine may
have none.
"""

from __future__ import annotations

import os
import re

import torch

from .. import cuda, requests
from ..cache import store
from ..cache.closure import Changed, digest
from ..errors import NO_DESCRIPTOR
from ..request import SHADOW, Request, isa

FOLDER = os.path.join(os.path.dirname(SHADOW), "built")
OBJECTS = "objects"  # the folder in it for objects that are independent of PyTorch
# The extensions that each level of the x86-64 psABI adds, in the words of /proc/cpuinfo. Words that
# request.isa() does not return are left out.
LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}
# From a level's folder to the folder with this package and torch.
ORIGIN = "../../../.."
NO_CUDA = cuda.Choice(
    reason="the wheel is for CPUs", fix="CALCOPS_CUDA=1 python -m calcops_jit build"
)


def request(level: str, choice: cuda.Choice) -> Request:
    """Return the Request for a wheel's library."""
    return requests.own(isa=level, choice=choice).but(origin=ORIGIN)


def facts(request: Request) -> dict:
    """Return what a wheel's library depends on besides the contents of files.

    These facts are the same wherever the wheel is installed.
    """
    build = {
        "version": torch.__version__,
        "commit": torch.version.git_version,
        "debug": torch.version.debug,
        "C++11 ABI": torch.compiled_with_cxx11_abi(),
        "flags": digest(torch.__config__._cxx_flags().encode()),
    }
    local = ("compiler arguments", "environment", "torch version")  # of the machine that builds
    portable = {key: value for key, value in request.facts.items() if key not in local}
    return portable | {"PyTorch": build}


def find(wanted: Request, reasons: list[str]) -> store.Generation | None:
    """Return the wheel's library for this processor, or None.

    Why a library does not fit is appended to `reasons`.
    """
    if not wanted.prebuilt or not os.path.isdir(FOLDER):
        return None
    try:
        return _fitting(wanted)
    except store.UNFIT as problem:
        if getattr(problem, "errno", 0) in NO_DESCRIPTOR:
            raise
        reasons.append(str(problem))
    return None


def _fitting(wanted: Request) -> store.Generation:
    """Return the wheel's library for this processor. UNFIT: it does not fit."""
    labels = [name for name in sorted(os.listdir(FOLDER)) if name != OBJECTS]
    if label() not in labels:
        raise Changed(f"it is for PyTorch {' and '.join(labels)}, not {label()}")
    levels = f"{FOLDER}/{label()}"
    folder = f"{levels}/{_level(levels)}"
    manifest, brought = _checked(folder, wanted.cuda)
    differences = store.differences(manifest.request, facts(brought))
    if differences:
        raise Changed(differences[0])
    return store.verified(f"{folder}/{brought.output}", manifest)


def label() -> str:
    """Return the name of the folder for this PyTorch."""
    return re.sub(r"[^0-9A-Za-z]+", ".", torch.__version__)


def with_objects(wanted: Request) -> Request | None:
    """Return the Request for a library that links a wheel's objects; None if there are none.

    Objects that do not fit count as none. The library's only source is the unit that includes
    PyTorch's headers.
    """
    objects = f"{FOLDER}/{OBJECTS}"
    if not wanted.prebuilt or not os.path.isdir(objects):
        return None
    try:
        return of_objects(f"{objects}/{_level(objects)}", wanted.cuda)
    except store.UNFIT:
        return None


def of_objects(folder: str, choice: cuda.Choice) -> Request:
    """Return the Request for a library of the objects in `folder`. UNFIT: they do not fit."""
    manifest, brought = _checked(folder, choice)
    objects = store.verified(f"{folder}/unit.o", manifest)
    os.close(objects.fd)
    any_pytorch = {"PyTorch": None}  # in both, because the objects are independent of PyTorch
    differences = store.differences(manifest.request | any_pytorch, facts(brought) | any_pytorch)
    if differences:
        raise Changed(differences[0])
    # In the manifest of objects, `asked` has the sources that are not in them.
    others = tuple(path for path in brought.sources if brought.fold(path) in manifest.asked)
    ldflags = (*brought.ldflags, objects.path)
    return brought.but(sources=others, ldflags=ldflags, prebuilt=False, origin="")


def _checked(folder: str, wanted: cuda.Choice) -> tuple[store.Manifest, Request]:
    """Return the manifest in the folder of a level, and the Request that it was built from.

    UNFIT: the wheel's own files have changed, or CUDA or flags differ.
    """
    flags = os.environ.get("CALCOPS_CFLAGS")
    if flags:
        raise Changed(f"CALCOPS_CFLAGS={flags}")
    manifest = store.read_manifest(folder)
    choice = NO_CUDA
    if "CUDA" in manifest.request:
        arches = manifest.request["GPU architectures"]
        choice = cuda.Choice(build=True, version=manifest.request["CUDA"], arches=arches)
    problem = _other_cuda(wanted, choice)
    if problem:
        raise Changed(problem)
    brought = request(os.path.basename(folder), choice)
    brought.tools = []  # the compilers are not compared
    manifest.closure.check(brought)
    return manifest, brought


def _level(folder: str) -> str:
    """Return the highest level that this processor has and for which `folder` has a subfolder.

    Changed: this processor is too old for all of them.
    """
    highest = ""
    extensions = isa().split()
    for level, words in LEVELS.items():
        lacking = [word for word in words.split() if word not in extensions]
        if lacking and not highest:
            raise Changed(f"this processor has no {' '.join(lacking)}, which {level} asks for")
        if lacking:
            break
        if os.path.isdir(f"{folder}/{level}"):
            highest = level
    return highest


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
