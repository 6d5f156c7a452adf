"""The options of calcops_jit.load, which are those of torch.utils.cpp_extension.load."""

from __future__ import annotations

import os
import re

from . import cuda
from .messages import BuildError
from .request import BASE, CUDA_BASE, HEADERS, Request, own

# The other options of torch.utils.cpp_extension.load, and the value that each must have.
_TORCH_OPTIONS = {
    "build_directory": None,  # CALCOPS_CACHE names the cache's folder
    "is_python_module": False,
    "is_standalone": False,
    "keep_intermediates": True,
    "with_sycl": None,
    "extra_sycl_cflags": None,
}


def request_for(
    name,
    sources,
    extra_cflags=None,
    extra_cuda_cflags=None,
    extra_ldflags=None,
    extra_include_paths=None,
    verbose=False,
    with_cuda=None,
    torch_options=(),
) -> Request:
    """Return the Request for a user's sources, from the options of calcops_jit.load."""
    for option, value in dict(torch_options).items():
        if option not in _TORCH_OPTIONS:
            raise TypeError(f"calcops_jit.load: got an unknown argument `{option}`")
        if value and value != _TORCH_OPTIONS[option]:
            raise ValueError(f"calcops_jit.load: expected no `{option}`, got {value!r}")
    allowed = r"(?!(?:calcops|runtime)$)[A-Za-z_][\w.-]{,199}"
    if not isinstance(name, str) or not re.fullmatch(allowed, name):
        words = "of letters, digits and _ . -, at most 200, not 'calcops' nor 'runtime'"
        raise ValueError(f"calcops_jit.load: expected `name` {words}, got {name!r}")
    # os.path.abspath would resolve "link/.." to the folder of the link, not to that of its target.
    paths = [os.path.join(os.getcwd(), path) for path in _strings("sources", sources)]
    if not paths:
        raise ValueError("calcops_jit.load: expected `sources` with at least one file, got none")
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"calcops_jit.load: expected `sources` that exist, got {path}")
    if with_cuda is None:
        with_cuda = any(path.endswith((".cu", ".cuh")) for path in paths)
    folders = [
        os.path.join(os.getcwd(), path)
        for path in _strings("extra_include_paths", extra_include_paths)
    ]
    asked = {
        "name": name,
        "sources": paths,
        "extra_cflags": _flags("extra_cflags", extra_cflags),
        "extra_cuda_cflags": _flags("extra_cuda_cflags", extra_cuda_cflags),
        "extra_ldflags": _flags("extra_ldflags", extra_ldflags),
        "extra_include_paths": folders,
        "with_cuda": with_cuda,
    }
    # A source that is a link is not resolved, because compilers search headers beside the link.
    real = [os.path.join(os.path.realpath(os.path.dirname(p)), os.path.basename(p)) for p in paths]
    root = os.path.commonpath(map(os.path.dirname, real))
    define = f"-DTORCH_EXTENSION_NAME={name}"
    return Request(
        name=name,
        product=f"{name}.so",
        root=os.path.dirname(real[0]) if root == "/" else root,
        sources=tuple(real),
        cflags=(*BASE, define, *asked["extra_cflags"]),
        cuda_cflags=(*CUDA_BASE, define, *asked["extra_cuda_cflags"]),
        ldflags=(*asked["extra_ldflags"], "-ltorch_python"),
        include_paths=(*HEADERS, *map(os.path.realpath, folders)),
        cuda=cuda.choose(needed=True) if with_cuda else cuda.Choice(),
        asked=asked,
        verbose=verbose,
    )


def again(request: Request) -> Request:
    """Return the Request of the same library in the present environment, with the present files.

    Raises:
        BuildError: a source is gone.
    """
    if request.asked is None:
        return own(root=request.root, name=request.name)
    try:
        return request_for(**request.asked)
    except FileNotFoundError as error:
        what = str(error).removeprefix("calcops_jit.load: ")
        raise BuildError(f"cannot build {request.name}: {what}") from None


def _strings(argument: str, value) -> list[str]:
    """Return a list of strings from a path, a string, or a sequence of these."""
    try:
        items = [value] if isinstance(value, (str, os.PathLike)) else list(value or ())
        strings = [os.fspath(item) for item in items]
        if all(isinstance(item, str) for item in strings):
            return strings
    except TypeError:
        pass
    raise TypeError(f"calcops_jit.load: expected `{argument}` as strings or paths, got {value!r}")


def _flags(argument: str, value) -> list[str]:
    """Return a list of flags from a sequence, or from a string as a shell would split it."""
    if isinstance(value, str):
        import shlex  # slow to import, and rarely needed

        return shlex.split(value)
    return _strings(argument, value)
