"""Operators that a wheel brings, built for several kinds of processor: the library for this one, if
it fits.

    built/<PyTorch>/<level of x86-64>/calcops.so, manifest      a generation that is only read
    built/objects/<level of x86-64>/unit.o, manifest            what in it knows no PyTorch

For a PyTorch that the wheel has no library for, the objects are linked with the one unit that knows
PyTorch, which is compiled here.

There may be no compiler here, so neither compilers nor headers of the system are compared. What is:
the bytes of the operators' sources and of the loader's own, every flag, and that PyTorch is the
very build that was there.
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
OBJECTS = "objects"  # its folder of what knows no PyTorch
# What each level adds, by the x86-64 psABI, in the words of /proc/cpuinfo (as far as request.isa()
# has them).
LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}
# From a level's folder to the one that torch is installed in, beside this package.
ORIGIN = "../../../.."
NO_CUDA = cuda.Choice(
    reason="the wheel is for CPUs", fix="CALCOPS_CUDA=1 python -m calcops_jit build"
)


def request(level: str, choice: cuda.Choice) -> Request:
    """The Request for a wheel's library."""
    return requests.own(isa=level, choice=choice).but(origin=ORIGIN)


def facts(wanted: Request) -> dict:
    """What a wheel's library depends on besides the contents of files, wherever it is installed."""
    build = {
        "version": torch.__version__,
        "commit": torch.version.git_version,
        "debug": torch.version.debug,
        "C++11 ABI": torch.compiled_with_cxx11_abi(),
        "flags": digest(torch.__config__._cxx_flags().encode()),
    }
    there = ("compiler arguments", "environment", "torch version")  # only where it is built
    return {key: value for key, value in wanted.facts.items() if key not in there} | {
        "PyTorch": build
    }


def find(asked: Request, reasons: list[str]) -> store.Generation | None:
    """Find the wheel's library for this processor. Add to `reasons` why another did not fit."""
    if not asked.prebuilt or not os.path.isdir(FOLDER):
        return None
    try:
        return _fitting(asked)
    except store.UNFIT as problem:
        if getattr(problem, "errno", 0) in NO_DESCRIPTOR:
            raise
        reasons.append(str(problem))
    return None


def _fitting(asked: Request) -> store.Generation:
    brought = [name for name in sorted(os.listdir(FOLDER)) if name != OBJECTS]
    if label() not in brought:
        raise Changed(f"it is for PyTorch {' and '.join(brought)}, not {label()}")
    folder = f"{FOLDER}/{label()}/{_level(f'{FOLDER}/{label()}')}"
    manifest, wanted = _checked(folder, asked.cuda)
    if differences := store.differences(manifest.request, facts(wanted)):
        raise Changed(differences[0])
    return store.verified(f"{folder}/{wanted.output}", manifest)


def label() -> str:
    """This PyTorch in a folder's name."""
    return re.sub(r"[^0-9A-Za-z]+", ".", torch.__version__)


def with_objects(asked: Request) -> Request | None:
    """Return the Request for the library of a wheel's objects and what in it knows PyTorch.

    None: the wheel has none, or they do not fit.
    """
    objects = f"{FOLDER}/{OBJECTS}"
    if not asked.prebuilt or not os.path.isdir(objects):
        return None
    try:
        return of_objects(f"{objects}/{_level(objects)}", asked.cuda)
    except store.UNFIT:
        return None


def of_objects(folder: str, asked: cuda.Choice) -> Request:
    """The same for one level. UNFIT: they do not fit."""
    manifest, wanted = _checked(folder, asked)
    found = store.verified(f"{folder}/unit.o", manifest)
    os.close(found.fd)
    there = manifest.request | {"PyTorch": None}
    if differences := store.differences(there, facts(wanted) | {"PyTorch": None}):
        raise Changed(differences[0])
    others = tuple(source for source in wanted.sources if wanted.fold(source) in manifest.asked)
    return wanted.but(
        sources=others, ldflags=(*wanted.ldflags, found.path), prebuilt=False, origin=""
    )


def _checked(folder: str, asked: cuda.Choice) -> tuple[store.Manifest, Request]:
    """Return (the manifest in a folder of a level, its Request) where the wheel's own files are
    what they were. UNFIT: they are not, or CUDA or flags differ.
    """
    if flags := os.environ.get("CALCOPS_CFLAGS"):
        raise Changed(f"CALCOPS_CFLAGS={flags}")
    manifest = store.read_manifest(folder)
    choice = NO_CUDA
    if "CUDA" in manifest.request:
        arches = manifest.request["GPU architectures"]
        choice = cuda.Choice(build=True, version=manifest.request["CUDA"], arches=arches)
    if problem := _other_cuda(asked, choice):
        raise Changed(problem)
    wanted = request(os.path.basename(folder), choice)
    wanted.tools = []  # the compiler that was there need not be here
    manifest.closure.check(wanted)
    return manifest, wanted


def _level(folder: str) -> str:
    """The highest level that this processor has and the wheel brings in a folder."""
    found, here = "", isa().split()
    for level, words in LEVELS.items():
        if lacking := [word for word in words.split() if word not in here]:
            if not found:
                raise Changed(f"this processor has no {' '.join(lacking)}, which {level} asks for")
            break
        found = level if os.path.isdir(f"{folder}/{level}") else found
    return found


def _other_cuda(here: cuda.Choice, there: cuda.Choice) -> str:
    """Why a library that was built with the choice `there` will not do where a build makes the
    choice `here`, or "".
    """
    if there.build and os.environ.get("CALCOPS_CUDA") == "0":
        return here.reason
    if there.build and here.build and here.arches not in ("", there.arches):
        return f"its GPU architectures are {there.arches}, not {here.arches}"
    if not there.build and (here.build or here.fatal):
        return f"it is for CPUs, and {'CUDA was asked for' if here.fatal else 'nvcc is here'}"
    return ""
