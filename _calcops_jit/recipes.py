"""The two kinds of Request: the operators of this project, and anybody's own sources."""

from __future__ import annotations

import glob
import os
import re
from importlib.machinery import EXTENSION_SUFFIXES

from . import cache, cuda, inputs, places
from .diagnosis import report
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


# Options of torch.utils.cpp_extension.load with the values that change nothing here, and what is there instead.
_TORCH_OPTIONS = {
    "build_directory": ((None,), "CALCOPS_CACHE names the folder of the cache, `.path` the library"),
    "is_python_module": ((False,), "operators are registered with TORCH_LIBRARY"),
    "is_standalone": ((False,), "a library is built, no program"),
    "keep_intermediates": ((True, False), "objects are kept in the cache"),
    "with_sycl": ((None, False), "C++ and CUDA are built"),
    "extra_sycl_cflags": ((None, [], ()), "C++ and CUDA are built"),
}


def foreign(
    name,
    sources,
    extra_cflags,
    extra_cuda_cflags,
    extra_ldflags,
    extra_include_paths,
    verbose,
    with_cuda,
    torch_options,
) -> inputs.Request:
    """Sources of somebody else, with the meaning that torch.utils.cpp_extension.load gives to the options."""
    for option, value in torch_options.items():
        if option not in _TORCH_OPTIONS:
            raise TypeError(f"calcops_jit.load: got an unknown argument `{option}`")
        harmless, instead = _TORCH_OPTIONS[option]
        if value not in harmless:
            raise ValueError(f"calcops_jit.load: expected no `{option}`, got {value!r}; {instead}")
    # calcops is the operators here, unit- begins the objects in the cache.
    if not isinstance(name, str) or not re.fullmatch(r"(?!calcops$|unit-)[A-Za-z_][\w.-]{,199}", name):
        what = "of letters, digits and _ . -, at most 200, not 'calcops' nor 'unit-...'"
        raise ValueError(f"calcops_jit.load: expected `name` {what}, got {name!r}")
    paths = [os.path.abspath(path) for path in _strings("sources", sources)]
    if not paths:
        raise ValueError("calcops_jit.load: expected `sources` with at least one file, got none")
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"calcops_jit.load: expected `sources` that exist, got {path}")
    if with_cuda is None:
        with_cuda = any(path.endswith((".cu", ".cuh")) for path in paths)
    define = f"-DTORCH_EXTENSION_NAME={name}"
    cflags, cuda_cflags = _flags("extra_cflags", extra_cflags), _flags("extra_cuda_cflags", extra_cuda_cflags)
    ldflags = _flags("extra_ldflags", extra_ldflags)
    folders = [os.path.abspath(folder) for folder in _strings("extra_include_paths", extra_include_paths)]
    return inputs.Request(
        name=name,
        **inputs.places(tuple(paths), (SHADOW, *folders)),
        cflags=(*_BASE, define, *cflags),
        cuda_cflags=(*_CUDA_BASE, define, *cuda_cflags),
        ldflags=tuple(ldflags),
        cuda=cuda.choose(needed=True) if with_cuda else cuda.Choice(),
        verbose=verbose,
        python=EXTENSION_SUFFIXES[0],
        asked=(name, paths, cflags, cuda_cflags, ldflags, folders, False, with_cuda, {}),
    )


def last(name: str) -> inputs.Request:
    """What `load` was asked for when it last built, or found, a library of this name."""
    for manifest in cache.newest(name):
        if manifest.asked:
            return foreign(*manifest.asked)
    there = sorted({os.path.basename(slot)[:-17] for folder in places.folders() for slot in places.slots(folder)})
    names = [name for name in there if name != "calcops" and not name.startswith("unit-")]
    evidence = f"there are: {', '.join(names) or 'none'}"
    raise report(f"no library `{name}` in {places.folders()[0]}", [evidence], f"calcops_jit.load({name!r}, ...) first")


def _strings(argument: str, value) -> list[str]:
    """One path or string, or a sequence of such."""
    try:
        found = [value] if isinstance(value, (str, os.PathLike)) else list(value or ())
        found = [os.fspath(item) for item in found]
        if all(isinstance(item, str) for item in found):
            return found
    except TypeError:
        pass
    raise TypeError(f"calcops_jit.load: expected `{argument}` as strings or paths, got {value!r}")


def _flags(argument: str, value) -> list[str]:
    """A sequence of flags as it is; a string as the words that a shell would make of it."""
    if isinstance(value, str):
        import shlex  # which takes longer than a Request

        return shlex.split(value)
    return _strings(argument, value)


def again(request: inputs.Request) -> inputs.Request:
    """The same library as its files and the environment are now."""
    return request.again() if request.python else own(request.root, request.name)


def key(request: inputs.Request) -> str:
    """Names what a build would give, without building: for a CI cache. Equal keys are equal machines and sources."""
    contents = []
    for root in (request.root, SHADOW):
        for path in sorted(glob.glob(f"{glob.escape(root)}/**", recursive=True)):
            if path.endswith((".h", ".cuh", ".cpp", ".cu")):
                contents += [request.fold(path), inputs.file_digest(path)]
    contents += [inputs.file_digest(tool) for tool in request.tools]
    return f"{request.name}-{inputs.digest(' '.join([request.slot, *contents]).encode())[:20]}"
