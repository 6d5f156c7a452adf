"""C++ and CUDA operators for PyTorch, compiled at the first import and cached.

    import calcops_jit                      # compiles once; later imports take milliseconds
    force = calcops_jit.force(list_neigh, dE, Ri_d, nghost)         # help(calcops_jit.force)

`dir(calcops_jit)` lists the operators under ops/ whose names have no leading underscore. Each is a
torch.ops handle, so it works with autograd, torch.compile, torch.export, torch.func and
TorchScript.

    calcops_jit.library_path()              # the path of the .so, for C++ programs
    mine = calcops_jit.load("mine", ["mine.cpp", "mine.cu"])        # your own operators
    mine.my_operator(x)                     # or torch.ops.my_namespace.my_operator(x)
    calcops_jit.reload()                    # rebuilds edited sources and exchanges the kernels
    stop = calcops_jit.watch()              # reloads on every save, until stop() is called
    %%operator mine                         # in a notebook: compiles the C++ in this cell

    calcops_jit.test("mine.cpp")            # draws calls from the contracts; you write no test

    python -m calcops_jit --help            # build, test, where, why, export, prebuild, clean

The variables CALCOPS_CACHE, CALCOPS_CUDA, CALCOPS_BUILD, CALCOPS_CFLAGS, CALCOPS_CHECK, CXX, CC,
MAX_JOBS, TORCH_CUDA_ARCH_LIST and CUDA_HOME are explained in _calcops_jit/README.md.

After a failed build, the import succeeds, and every use of an operator raises BuildError. `load`
still works.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
    raise ImportError(
        f"calcops_jit: expected Linux on x86-64 or aarch64, "
        f"got {sys.platform} on {platform.machine()}"
    )

from _calcops_jit import __version__, library, request
from _calcops_jit.library import Library
from _calcops_jit.messages import BuildError, notebook_shell, say

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

if TYPE_CHECKING:
    from _calcops_jit.operators import *  # noqa: F403
    from _calcops_jit.testing import Tensor, check, test, tests_of  # noqa: F401

__all__ = ["BuildError", "Library", "__version__", "library_path", "load", "reload", "watch"]

_own: Library | None = None
_problem: Exception | None = None  # why the operators are missing


def load(
    name: str,
    sources: _Paths,
    extra_cflags: str | Sequence[str] | None = None,
    extra_cuda_cflags: str | Sequence[str] | None = None,
    extra_ldflags: str | Sequence[str] | None = None,
    extra_include_paths: _Paths | None = None,
    *,
    verbose: bool = False,
    with_cuda: bool | str | None = None,
    native: bool = False,
    check: bool = False,
) -> Library:
    """Return the library of operator sources, which is built once and then cached.

    The sources register their operators with a contract or TORCH_LIBRARY. After an edit, the next
    call builds them again. reload() exchanges their kernels in the running process.

    Args:
        name: name of the library; also the macro TORCH_EXTENSION_NAME and the namespace of its
            contracts. It can't be one of PyTorch's own namespaces.
        sources: paths of .cpp and .cu files. A .c file is compiled as C++. A folder stands for all
            sources below it, and is searched for headers.
        extra_cflags: flags for C++, after -O3 -fvisibility=hidden -fno-gnu-unique. A string is
            split into words as a shell would. A list is passed on as torch does, so a flag in it
            that contains a space needs quotes of its own.
        extra_cuda_cflags: flags for nvcc, after -O3.
        extra_ldflags: flags for the linker, objects and archives.
        extra_include_paths: folders of headers.
        verbose: print what ninja prints.
        with_cuda: build for CUDA; default: if there is a .cu source. "auto": like the project's
            operators, if CALCOPS_CUDA, a GPU or TORCH_CUDA_ARCH_LIST asks for it. Otherwise .cu
            sources are left out, and a contract's operator says why when it gets a CUDA tensor.
        native: compile like the project's operators, for this machine's processor, with OpenMP,
            -Wall and CALCOPS_CFLAGS. Without it, at::parallel_for is a plain loop unless -fopenmp
            is in extra_cflags and extra_ldflags.
        check: make an out-of-bounds index into the views of a contract's kernels an error of the
            call. This is slower. The same call with another `check` exchanges the library's
            kernels in place.

    Returns:
        A Library: its operators are attributes, and also in the dictionary `operators`. Its `path`
        is the path of the shared library.

    Raises:
        BuildError: the library cannot be built or loaded. The message has cause and fix.
        FileNotFoundError: a source does not exist.
        TypeError, ValueError: an option has a wrong value.
    """
    return library.obtain(request.request_for(**locals()))  # it has the same parameters


def reload() -> list[str]:
    """Rebuild this process's libraries whose sources or headers changed.

    Every call that begins afterwards uses the new kernels. This includes calls from other threads,
    through torch.ops handles and compiled or scripted functions, and in the backward pass of an
    existing graph. torch.compile traces its functions again. Older builds stay in memory.

    Returns:
        The names of the libraries that changed: "calcops" for this project's operators, and names
        that were passed to load().

    Raises:
        BuildError: a library could not be built, or a schema or C++ signature changed, or it
            cannot be loaded twice in a process. Its old kernels are still called.
    """
    changed = library.reload()
    if _own is not None:
        _expose()
        return changed
    _import_operators()  # missing since the import of this module
    if _own is not None:
        changed.append("calcops")
    return changed


def watch(seconds: float = 0.3) -> Callable[[], None]:
    """Start a thread that calls reload() when a source or a header changes.

    The thread prints errors on stderr. After an error, the old kernels are still called.

    Args:
        seconds: time between two checks of the files.

    Returns:
        A function that stops the thread.
    """
    return library.watch(seconds, reload)


def load_ipython_extension(shell) -> None:
    """Register the cell magic %%operator, as the import in IPython and %load_ext do."""
    from _calcops_jit import notebook

    shell.register_magic_function(notebook.operator, "cell")


def library_path() -> str:
    """Return the path of the operators' shared library.

    C++ programs link it or dlopen it, and torch.ops.load_library takes it.
    """
    if _own is None:
        raise _problem
    return _own.path


def _import_operators() -> None:
    """Load the operators and make them attributes of this module.

    With CALCOPS_BUILD=0, `_problem` says why they are missing.
    """
    global _own, _problem
    _own = library.obtain(request.own(), may_build=os.environ.get("CALCOPS_BUILD", "1") != "0")
    if _own is None:
        _problem = BuildError(
            "calcops_jit: not built, because CALCOPS_BUILD=0; python -m calcops_jit build"
        )
        return
    _problem = None
    _expose()


def _expose() -> None:
    """Make the operators attributes of this module."""
    globals().update(_own.operators)
    __all__.extend(_own.operators.keys() - set(__all__))


_OF_TESTING = "Tensor", "check", "test", "tests_of"
# Operators that calcops_jit had before they became a library of their own.
_MOVED = {"density", "environment_spline", "matrix_product", "tabulated_sum"}


def __getattr__(name: str):
    if name in _OF_TESTING:
        from _calcops_jit import testing  # which needs hypothesis

        return getattr(testing, name)
    if name in _MOVED:
        what = f"calcops_jit.{name} is torch.ops.calcops_models.{name} after `import calcops.ops`"
        raise AttributeError(what)
    if _problem is not None and not name.startswith("_"):
        raise _problem
    raise library.missing(f"module 'calcops_jit' has no attribute {name!r}", __all__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_OF_TESTING, *(name for name in globals() if name.startswith("__"))})


if __name__ == "__main__":
    from _calcops_jit import cli

    sys.exit(cli.main())
try:
    _import_operators()
except BuildError as error:
    _problem = error
    say(str(error))
if notebook_shell():
    load_ipython_extension(notebook_shell())
