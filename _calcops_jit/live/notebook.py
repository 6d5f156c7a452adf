"""%load_ext calcops_jit: %%operator makes operators of the notebook from a cell of C++ or CUDA."""

from __future__ import annotations

import os
import shlex
import tempfile

from IPython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments

from .. import requests
from ..cache import locks, store
from ..cache.closure import digest
from ..errors import BuildError
from . import library

# A folder of this process, as two notebooks may use the same name. The cache's keys name no folder,
# so the cell is found there after a restart.
_folder = locks.make(os.path.realpath(tempfile.gettempdir()), f"calcops-cells-{os.getuid()}")
_OPTIONS = {  # of load, and what a cell has instead
    "extra_include_paths": "--cflags=-I...",
    "extra_cuda_cflags": "--cflags",
    "extra_cflags": "--cflags",
    "extra_ldflags": "--ldflags",
}
_live: dict[str, str] = {}  # {source: the text of the cell whose operators are called}


@magic_arguments()
@argument(
    "name",
    help="of the library, and TORCH_EXTENSION_NAME; a later cell of this name takes its place",
)
@argument("--cuda", action="store_true", help="the cell is CUDA")
@argument(
    "--cflags", default="", help="more flags for the compiler, nvcc with --cuda: --cflags='-O2 -g'"
)
@argument("--ldflags", default="", help="more flags for the linker")
@argument("--verbose", action="store_true", help="show what ninja runs")
def operator(line: str, cell: str) -> None:
    """Build the cell as calcops_jit.load does a file, and define its operators in the notebook.

    Edit the cell and run it again: every caller of its operators then calls the new ones. If the
    cell cannot be built, or its schema changed, the old operators stay. Line 1 of an error is the
    line below %%operator.
    """
    options = operator.parser.parse_args(shlex.split(line))
    folder = f"{_folder}/{digest(options.name.encode())}"
    os.makedirs(folder, exist_ok=True)
    source = f"{folder}/cell.{'cu' if options.cuda else 'cpp'}"
    store.write_whole(source, cell.encode())
    # Headers beside the notebook are found. (nvcc knows no -iquote.)
    beside = [f"-I{os.getcwd()}"] if options.cuda else ["-iquote", os.getcwd()]
    cflags = [*beside, *shlex.split(options.cflags)]
    settings = {
        "extra_cuda_cflags" if options.cuda else "extra_cflags": cflags,
        "extra_ldflags": shlex.split(options.ldflags),
        "verbose": options.verbose,
    }
    try:
        built = library.obtain(requests.foreign(options.name, source, **settings))
    except BaseException as error:
        if source in _live:  # reload() must not find the cell that failed
            store.write_whole(source, _live[source].encode())
        if isinstance(error, BuildError):
            text = str(error).replace(source, "cell")
            for option, of_cell in _OPTIONS.items():
                text = text.replace(option, of_cell)
            error = BuildError(text)
        raise error from None
    _live[source] = cell
    get_ipython().push(built.operators)
    for handle in built.operators.values():
        print(handle.__doc__.partition("\n\n")[0])
