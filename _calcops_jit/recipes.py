"""The two kinds of Request: the operators of this project, and anybody's own sources."""

from __future__ import annotations

import glob
import os
import re
from importlib.machinery import EXTENSION_SUFFIXES

from . import cuda, inputs
from .registration import SHADOW

# Hidden and not "gnu unique", so that two builds of one operator can be in one process without sharing variables.
_BASE = ("-O3", "-fvisibility=hidden", "-fno-gnu-unique")
_CUDA_BASE = ("-O3", "-Xcompiler", "-fvisibility=hidden,-fno-gnu-unique")


def operators_root() -> str:
    """ops/ beside calcops_jit.py in a checkout, in here when installed."""
    here = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(here, "ops")
    return os.path.realpath(installed if os.path.isdir(installed) else f"{here}/../ops")


def own(root: str | None = None, name: str = "calcops", isa: str = "native") -> inputs.Request:
    """Everything under ops/: each .cpp in it or in an operator's folder is a unit, each .cu one where CUDA is built."""
    root = root or operators_root()
    choice = cuda.choose()
    suffixes = (".cpp", ".cu")[: 1 + choice.build]
    extra = inputs.words_of("CALCOPS_CFLAGS")
    pattern = f"{glob.escape(root)}/"
    found = sorted(glob.glob(f"{pattern}[!.]*.cpp") + glob.glob(f"{pattern}[!._]*/[!.]*"))
    # at::parallel_for is a plain loop without -fopenmp; libgomp is the one in torch's folder, by its rpath.
    cflags = [*_BASE, f"-march={isa}", "-fopenmp", "-Wall", "-DAT_PER_OPERATOR_HEADERS", *extra]
    if not choice.build:
        cflags.append(f"-DCALCOPS_NO_CUDA='\"{choice.reason}\"'")  # a shell's word: no reason has a quote or a $
    return inputs.Request(
        name=name,
        root=root,
        sources=tuple(f for f in found if f.endswith(suffixes)),
        cflags=tuple(cflags),
        cuda_cflags=_CUDA_BASE,
        ldflags=("-fopenmp", *extra),
        include_paths=(SHADOW, root),
        cuda=choice,
    )


def foreign(
    name, sources, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths, verbose, with_cuda
) -> inputs.Request:
    """Sources of somebody else, with the meaning that torch.utils.cpp_extension.load gives to the options."""
    if not re.fullmatch(r"(?!calcops$)[A-Za-z_][\w.-]*", name):  # which is that of the operators here
        raise ValueError(f"calcops_jit.load: expected `name` of letters, digits and _ . -, not 'calcops', got {name!r}")
    paths = [inputs.real_path(os.fspath(s)) for s in ([sources] if isinstance(sources, str) else sources)]
    if not paths:
        raise ValueError("calcops_jit.load: expected `sources` with at least one file, got none")
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"calcops_jit.load: expected `sources` that exist, got {path}")
    if with_cuda is None:
        with_cuda = any(path.endswith((".cu", ".cuh")) for path in paths)
    define = f"-DTORCH_EXTENSION_NAME={name}"
    return inputs.Request(
        name=name,
        root=os.path.commonpath([os.path.dirname(p) for p in paths]),
        sources=tuple(paths),
        cflags=(*_BASE, define, *(extra_cflags or ())),
        cuda_cflags=(*_CUDA_BASE, define, *(extra_cuda_cflags or ())),
        ldflags=tuple(extra_ldflags or ()),
        include_paths=(SHADOW, *(os.path.realpath(i) for i in extra_include_paths or ())),
        cuda=cuda.choose(needed=True) if with_cuda else cuda.Choice(),
        verbose=verbose,
        python=EXTENSION_SUFFIXES[0],
    )


def again(request: inputs.Request) -> inputs.Request:
    """The same library as its files and the environment are now."""
    return request.but() if request.python else own(request.root, request.name)


def key(request: inputs.Request) -> str:
    """Names what a build would give, without building: for a CI cache. Equal keys are equal machines and sources."""
    contents = []
    for root in (request.root, SHADOW):
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path.endswith((".h", ".cuh", ".cpp", ".cu")):
                contents += [request.fold(path), inputs.file_digest(path)]
    contents += [inputs.file_digest(tool) for tool in request.tools]
    return f"{request.name}-{inputs.digest(' '.join([request.slot, *contents]).encode())[:20]}"
