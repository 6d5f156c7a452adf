"""%load_ext calcops_jit: %%operator makes operators of the notebook from a cell of C++ or CUDA."""

from __future__ import annotations

import os
import shlex
import tempfile

from IPython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments

from calcops_jit import BuildError, load

from . import cache, inputs, private

# Of this process alone, as two notebooks may use one name at once. No folder is in the cache's keys, so that after a
# restart the same cell is found there.
_folder = private.make(os.path.realpath(tempfile.gettempdir()), f"calcops-cells-{os.getuid()}")
_live: dict[str, str] = {}  # {source: the cell that is called}


@magic_arguments()
@argument("name", help="of the library, and TORCH_EXTENSION_NAME; a later cell of this name takes its place")
@argument("--cuda", action="store_true", help="the cell is CUDA")
@argument("--cflags", default="", help="more flags for the compiler, nvcc with --cuda: --cflags='-O2 -g'")
@argument("--ldflags", default="", help="more flags for the linker")
@argument("--verbose", action="store_true", help="show what ninja runs")
def operator(line: str, cell: str) -> None:
    """Builds the cell as calcops_jit.load does a file, and gives the notebook the operators that it registers.

    Edit it and run it again: whatever calls its operators calls the new ones from then on. A cell that cannot be built
    and a changed schema leave everything as it was. Errors count the lines from the one below %%operator.
    """
    options = operator.parser.parse_args(shlex.split(line))
    folder = f"{_folder}/{inputs.digest(options.name.encode())}"
    os.makedirs(folder, exist_ok=True)
    source = f"{folder}/cell.{'cu' if options.cuda else 'cpp'}"
    cache.write_whole(source, cell.encode())
    flags = {"extra_cuda_cflags" if options.cuda else "extra_cflags": shlex.split(options.cflags)}
    flags["extra_ldflags"] = shlex.split(options.ldflags)
    try:
        library = load(options.name, source, **flags, verbose=options.verbose)
    except BaseException as error:
        if source in _live:  # reload() must not meet the cell that failed
            cache.write_whole(source, _live[source].encode())
        if isinstance(error, BuildError):
            error = BuildError(str(error).replace(source, "cell"))
        raise error from None
    _live[source] = cell
    get_ipython().push(library.operators)
    for handle in library.operators.values():
        print(handle.__doc__.partition("\n\n")[0])
