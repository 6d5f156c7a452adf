"""The cell magic %%operator, which compiles a notebook's cell of C++ or CUDA."""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import shlex
import shutil
import tempfile

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from . import library
from .cache import write_whole
from .inputs import digest
from .messages import BuildError
from .request import CELLS, request_for

_loaded: dict[str, str] = {}  # {source: text of the last cell that was loaded}


@functools.cache
def _folder() -> str:
    """Return the folder of this process's cells.

    Two notebooks may use the same name. After a restart, a cell is found in the cache nevertheless,
    because facts have no absolute paths. (Inputs.place has none.)
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix=f"{CELLS}{os.getuid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@magic_arguments()
@argument(
    "name",
    help="name of the library, and TORCH_EXTENSION_NAME; a later cell of this name replaces it",
)
@argument("--cuda", action="store_true", help="the cell is CUDA")
@argument(
    "--cflags",
    action="append",
    default=[],
    help="more flags for the compiler, nvcc with --cuda: --cflags='-O2 -g'",
)
@argument("--ldflags", action="append", default=[], help="more flags for the linker")
@argument(
    "--check",
    action="store_true",
    help="make an index of a contract's kernel that is out of bounds an error of the call",
)
@argument(
    "--test",
    action="store_true",
    help="test the cell's operators by their contracts, as calcops_jit.test with seconds=10",
)
@argument("--verbose", action="store_true", help="show what ninja runs")
def operator(line: str, cell: str) -> None:
    """Build the cell as calcops_jit.load builds a file, and define its operators in the notebook.

    Edit the cell and run it again: all callers of its operators then use the new kernels. If the
    cell cannot be built, or its schema changed, the old operators stay. In errors, line 1 is
    %%operator, as in the notebook's line numbers.
    """
    try:
        options = operator.parser.parse_args(shlex.split(line))
    except (UsageError, ValueError) as problem:
        flags = "flags are written as --cflags='-O2 -g'"
        raise UsageError(f"%%operator: {problem}; {flags}; %%operator? shows all options") from None
    folder = f"{_folder()}/{digest(options.name.encode())}"
    os.makedirs(folder, exist_ok=True)
    source = f"{folder}/cell.{'cu' if options.cuda else 'cpp'}"
    text = f"\n{cell}"  # the empty line stands for %%operator
    write_whole(source, text.encode())
    settings = {
        "extra_cuda_cflags" if options.cuda else "extra_cflags": " ".join(options.cflags),
        "extra_ldflags": " ".join(options.ldflags),
        "check": options.check,
        "verbose": options.verbose,
        "beside": os.getcwd(),
    }
    try:
        loaded = library.obtain(request_for(options.name, source, **settings))
    except BaseException as error:
        if source in _loaded:  # so that reload() does not build the cell that failed
            write_whole(source, _loaded[source].encode())
        if isinstance(error, (BuildError, ValueError)):
            error = BuildError(str(error).replace(source, "cell"))
        raise error from None
    _loaded[source] = text
    for handle in loaded.operators.values():
        print(handle.__doc__.partition("\n\n")[0])  # its schemas
    _bind(loaded.operators)
    if options.test:
        from . import testing

        testing.test(loaded, seconds=10)


def _bind(operators: dict) -> None:
    """Define a cell's operators in the notebook, except under names that mean something else."""
    shell = get_ipython()
    taken = vars(builtins) | shell.user_ns
    for name, handle in operators.items():
        if taken.get(name, handle) is handle:
            shell.push({name: handle})
        else:
            path = handle._qualified_op_name.replace("::", ".")
            print(f"`{name}` has another meaning here: call torch.ops.{path}")
