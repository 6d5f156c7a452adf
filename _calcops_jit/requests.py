"""The two kinds of Request: this project's operators, and a user's sources for `load`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from . import cuda
from .errors import NO_DESCRIPTOR, report
from .request import BASE, CUDA_SUFFIXES, SHADOW, Request, located, processor_flag, words_of

_CUDA_BASE = ("-O3", "-Xcompiler", "-fvisibility=hidden,-fno-gnu-unique")


def operators_root() -> str:
    """Return the path of ops/: beside calcops_jit.py in a checkout, else in this package."""
    package = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(package, "ops")
    return os.path.realpath(installed if os.path.isdir(installed) else f"{package}/../ops")


def own(
    root: str | None = None, name: str = "calcops", isa: str = "", choice: cuda.Choice | None = None
) -> Request:
    """Return the Request for ops/: every .cpp in it and its folders, and every .cu for CUDA.

    Args:
        root: the folder; default: operators_root().
        name: name of the library.
        isa: the kind of processor, as processor_flag() takes it. Default: this processor; then a
            wheel's library, which is for several processors, fits, too.
        choice: whether to build for CUDA; default: cuda.choose().
    """
    root = root or operators_root()
    choice = choice or cuda.choose()
    extra = words_of("CALCOPS_CFLAGS")
    try:
        files = sorted(_files(root))
    except OSError as error:
        if error.errno not in NO_DESCRIPTOR:
            raise
        raise report(f"cannot load {name}", [str(error)], "ulimit -n $(ulimit -H -n)") from None
    # Without -fopenmp, parallel_for is a plain loop. The library loads torch's libgomp, because
    # torch's folder is in its rpath.
    cflags = [
        *BASE,
        processor_flag(isa or "native"),
        "-fopenmp",
        "-Wall",
        "-DAT_PER_OPERATOR_HEADERS",
        *extra,
    ]
    if not choice.build:
        reason = f"{choice.reason}; {choice.fix}"  # neither has a quote or a $
        cflags.append(f"-DCALCOPS_NO_CUDA='\"{reason}\"'")  # a string literal, quoted for a shell
    suffixes = (".cpp", ".cu") if choice.build else (".cpp",)
    return Request(
        name=name,
        root=root,
        sources=tuple(file for file in files if file.endswith(suffixes)),
        cflags=tuple(cflags),
        cuda_cflags=_CUDA_BASE,
        ldflags=("-fopenmp", *extra),
        include_paths=(SHADOW, root),
        cuda=choice,
        prebuilt=not isa,
    )


def _files(root: str) -> Iterator[str]:
    """Yield the paths of the files in a folder and in its subfolders, one level deep.

    Names that begin with a dot and subfolders that begin with an underscore are left out.
    """
    # glob would compile three regular expressions, which takes longer than the rest of a Request.
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield entry.path
            elif not entry.name.startswith("_"):
                names = [name for name in os.listdir(entry.path) if not name.startswith(".")]
                yield from (f"{entry.path}/{name}" for name in names)


# {option of torch.utils.cpp_extension.load: (accepted values, which change nothing, and why others
# are refused)}.
_TORCH_OPTIONS = {
    "build_directory": (
        (None,),
        "CALCOPS_CACHE names the folder of the cache, `.path` the library",
    ),
    "is_python_module": ((False,), "operators are registered with TORCH_LIBRARY"),
    "is_standalone": ((False,), "a library is built, no program"),
    "keep_intermediates": ((True, False), "objects are kept in the cache"),
    "with_sycl": ((None, False), "C++ and CUDA are built"),
    "extra_sycl_cflags": ((None, [], ()), "C++ and CUDA are built"),
}


def foreign(
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
        accepted, reason = _TORCH_OPTIONS[option]
        if value not in accepted:
            raise ValueError(f"calcops_jit.load: expected no `{option}`, got {value!r}; {reason}")
    # calcops is this project's own library; names of objects in the cache begin with unit-.
    allowed = r"(?!calcops$|unit-)[A-Za-z_][\w.-]{,199}"
    if not isinstance(name, str) or not re.fullmatch(allowed, name):
        words = "of letters, digits and _ . -, at most 200, not 'calcops' nor 'unit-...'"
        raise ValueError(f"calcops_jit.load: expected `name` {words}, got {name!r}")
    # os.path.abspath would resolve "link/.." to the folder of the link, not to that of its target.
    paths = [os.path.join(os.getcwd(), path) for path in _strings("sources", sources)]
    if not paths:
        raise ValueError("calcops_jit.load: expected `sources` with at least one file, got none")
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"calcops_jit.load: expected `sources` that exist, got {path}")
    if with_cuda is None:
        with_cuda = any(path.endswith(CUDA_SUFFIXES) for path in paths)
    define = f"-DTORCH_EXTENSION_NAME={name}"
    cflags = _flags("extra_cflags", extra_cflags)
    cuda_cflags = _flags("extra_cuda_cflags", extra_cuda_cflags)
    ldflags = _flags("extra_ldflags", extra_ldflags)
    include_paths = _strings("extra_include_paths", extra_include_paths)
    folders = [os.path.join(os.getcwd(), path) for path in include_paths]
    return Request(
        name=name,
        **located(tuple(paths), (SHADOW, *folders)),
        cflags=(*BASE, define, *cflags),
        cuda_cflags=(*_CUDA_BASE, define, *cuda_cflags),
        ldflags=tuple(ldflags),
        cuda=cuda.choose(needed=True) if with_cuda else cuda.Choice(),
        verbose=verbose,
        kind="foreign",
        # For the manifest. `verbose` is False there, because it concerns only this call.
        asked=(name, paths, cflags, cuda_cflags, ldflags, folders, False, with_cuda),
    )


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


def again(request: Request) -> Request:
    """Return the Request of the same library in the present environment, with the present files."""
    if request.kind == "foreign":
        return request.again()
    return own(request.root, request.name)
