"""Operators that were built elsewhere: calcops_jit.py of a folder that `python -m calcops_jit
export` wrote.

Nothing is compiled and nothing written. ImportError where PyTorch, the processor or the driver are
not such as the library was built for, or where its bytes are not those of calcops.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_EXPORT = "python -m calcops_jit export"


def library_path() -> str:
    """The shared library of the operators: C++ programs link it or dlopen it, TorchScript hosts
    load it."""
    return f"{_HERE}/lib/libcalcops.so"


def _lacking(instructions: list[str]) -> list[str]:
    """Those of the instruction sets that the processor here does not have."""
    with open("/proc/cpuinfo") as file:
        first = file.read(8192)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", first, re.MULTILINE)
    words = flags[1].replace("_", "").split() if flags else []
    return [name for name in instructions if name.replace("_", "") not in words]


def _refusal(about: dict) -> tuple[str, str] | None:
    """(why the library cannot run here, what fixes it)"""
    machine, isa = about["machine"]
    if machine != os.uname().machine:
        return (
            f"built for {machine}, this is {os.uname().machine}",
            f"{_EXPORT} on a machine like this one",
        )
    release, abi = torch.__version__.partition("+")[0], torch.compiled_with_cxx11_abi()
    if [release, abi] != about["torch"]:
        wanted = about["torch"][0]
        return (
            f"built for PyTorch {wanted}, this is {release} (C++11 ABI: {abi})",
            f"pip install torch=={wanted}",
        )
    if missing := _lacking(about["instructions"]):
        return f"this processor has no {' '.join(missing)}", f"{_EXPORT} --isa {isa}"
    if about["cuda"]:
        wanted, cuda, driver = about["cuda"], torch.version.cuda or "none", ctypes.c_int()
        if cuda.partition(".")[0] != wanted.partition(".")[0]:
            return f"built for CUDA {wanted}, PyTorch's is {cuda}", f"CALCOPS_CUDA=0 {_EXPORT}"
        # No driver, no GPU: the CPU's part is there all the same.
        with contextlib.suppress(OSError):
            # And CUDA stays as it is.
            ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
        if 0 < (runs := driver.value // 1000) < int(wanted.partition(".")[0]):
            return (
                f"built for CUDA {wanted}, the driver runs CUDA {runs}",
                "install a newer NVIDIA driver",
            )
    return None


def _load(path: str, fd: int) -> ctypes.CDLL:
    """The file that was verified, under a name that a debugger can open in a process of its own."""
    verified = os.fstat(fd)
    # Glibc takes a name that it has seen for the library that it has.
    with contextlib.suppress(OSError):
        ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW)
        path = f"/proc/{os.getpid()}/fd/{fd}"
    if path == library_path() and not os.path.samestat(os.stat(path), verified):
        raise ValueError(f"{path} was exchanged while it was read")
    # The library asks PyTorch's dispatcher whether somebody else sees to its registration:
    # _register() does.
    held = torch._C._dispatch_library("FRAGMENT", "calcops_jit", "")
    held.define(f"holds.p{os.fsencode(path).hex()}() -> ()")
    library = ctypes.CDLL(path)
    del held
    return library


def _register(library: ctypes.CDLL) -> None:
    library.calcops_jit_commit.restype = ctypes.c_char_p
    if answer := library.calcops_jit_commit(b"").decode(errors="replace"):
        kind, _, rest = answer.partition("taken\n")
        raise ValueError(
            f"{rest.splitlines()[0]} already" if rest else kind.removeprefix("error\t")
        )


def _bring_in() -> dict[str, torch._ops.OpOverloadPacket]:
    """The operators by name."""
    try:
        with open(f"{_HERE}/calcops.json") as file:
            about = json.load(file)
        if not (problem := _refusal(about)):
            # It stays open.
            fd = os.open(library_path(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb", closefd=False) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
                    raise ValueError(f"{library_path()} is damaged")
            _register(_load(library_path(), fd))
    except (OSError, ValueError, KeyError) as error:
        problem = str(error), f"{_EXPORT} with this PyTorch, and copy the folder again"
    if problem:
        raise ImportError(
            f"cannot use the operators in {_HERE}\n  {problem[0]}\n  fix: {problem[1]}"
        )
    handles = {}
    for name, (namespace, operator, text) in about["operators"].items():
        handles[name] = getattr(getattr(torch.ops, namespace), operator)
        handles[name].__doc__ = text
    return handles


globals().update(_operators := _bring_in())
__all__ = ["library_path", *_operators]
