"""The cell magic %%operator, which compiles a notebook's cell of C++ or CUDA."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile

from IPython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments

from . import library
from .cache import write_whole
from .inputs import digest
from .messages import BuildError
from .request import CELLS, request_for

# A folder of this process, because two notebooks may use the same name. After a restart, a cell is
# found in the cache nevertheless, because facts have no absolute paths. (Inputs.place has none.)
_folder = os.path.realpath(tempfile.mkdtemp(prefix=f"{CELLS}{os.getuid()}-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
_loaded: dict[str, str] = {}  # {source: text of the last cell that was loaded}
_libraries: dict[str, library.Library] = {}  # {name: the library of its last cell}


@magic_arguments()
@argument(
    "name",
    help="name of the library, and TORCH_EXTENSION_NAME; a later cell of this name replaces it",
)
@argument("--cuda", action="store_true", help="the cell is CUDA")
@argument(
    "--cflags", default="", help="more flags for the compiler, nvcc with --cuda: --cflags='-O2 -g'"
)
@argument("--ldflags", default="", help="more flags for the linker")
@argument(
    "--check",
    action="store_true",
    help="make an index of a contract's kernel that is out of bounds an error of the call",
)
@argument("--verbose", action="store_true", help="show what ninja runs")
def operator(line: str, cell: str) -> None:
    """Build the cell as calcops_jit.load builds a file, and define its operators in the notebook.

    Edit the cell and run it again: all callers of its operators then use the new kernels. If the
    cell cannot be built, or its schema changed, the old operators stay. In errors, line 1 is the
    line below %%operator.
    """
    options = operator.parser.parse_args(shlex.split(line))
    folder = f"{_folder}/{digest(options.name.encode())}"
    os.makedirs(folder, exist_ok=True)
    source = f"{folder}/cell.{'cu' if options.cuda else 'cpp'}"
    write_whole(source, cell.encode())
    # Headers beside the notebook are found. (nvcc knows no -iquote.)
    beside = shlex.quote(f"-I{os.getcwd()}" if options.cuda else f"-iquote{os.getcwd()}")
    settings = {
        "extra_cuda_cflags" if options.cuda else "extra_cflags": f"{beside} {options.cflags}",
        "extra_ldflags": options.ldflags,
        "check": options.check,
        "verbose": options.verbose,
    }
    try:
        wanted = request_for(options.name, source, **settings)
        loaded = library.obtain(wanted, replaced=_libraries.get(options.name))
    except BaseException as error:
        if source in _loaded:  # so that reload() does not build the cell that failed
            write_whole(source, _loaded[source].encode())
        if isinstance(error, (BuildError, ValueError)):
            text = str(error).replace(source, "cell").partition("; `extra_include_paths`")[0]
            text = text.replace("extra_include_paths", "--cflags=-I...").replace("extra_", "--")
            error = BuildError(text)
        raise error from None
    _loaded[source] = cell
    _libraries[options.name] = loaded
    get_ipython().push(loaded.operators)
    for handle in loaded.operators.values():
        print(handle.__doc__.partition("\n\n")[0])  # its schemas
