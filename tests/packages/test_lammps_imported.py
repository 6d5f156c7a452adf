"""Imported models in LAMMPS: energy, forces and pressure on any number of ranks are those in Python."""

from pathlib import Path

import numpy as np
import pytest
from lammps_plugin import Lammps, difference

for module in ("ase", "scipy", "vesin"):
    pytest.importorskip(module, reason=f"needs {module}")

from ase import Atoms  # noqa: E402
from calcops import deepmd, nep  # noqa: E402
from calcops.potentials.package import save  # noqa: E402
from structures import inputs_of  # noqa: E402

pytestmark = pytest.mark.long  # a foreign program

FOLDER = Path(__file__).resolve().parent
NKTV2P = 1.6021765e6  # of LAMMPS's `units metal`: energy over volume as a pressure
SCRIPT = """
units metal
lattice fcc 4.1
region box prism 0 3 0 3 0 3 0.4 -0.3 0.5
create_box {last} box
create_atoms 1 box
set group all type/fraction 2 0.4 4711
set group all type/fraction {last} 0.3 4712
displace_atoms all random 0.2 0.2 0.2 4711
mass * 1.0
pair_style calcops {file}
pair_coeff * * {names}
dump atoms all custom 1 atoms id type x y z fx fy fz
dump_modify atoms sort id format float %.17g
thermo_style custom pe pxx pyy pzz pxy pxz pyz vol xlo ylo zlo lx ly lz xy xz yz
thermo_modify norm no line one format float %.17g
run 0
"""


@pytest.fixture(scope="module")
def models():
    return {
        "NEP": nep.load(FOLDER / "nep_models/nep4_types.txt"),
        "Deep Potential": deepmd.load(FOLDER / "deepmd_models/pairs.pth"),
    }


@pytest.fixture(scope="module")
def lammps(tmp_path_factory, models):
    folder = tmp_path_factory.mktemp("imported")
    for name, model in models.items():
        save(model, folder / f"{name[:4].strip()}.pt")
    return Lammps(folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["NEP", "Deep Potential"])
def test_energy_forces_and_pressure_are_those_in_python(lammps, models, name, ranks):
    model = models[name]
    names = " ".join(model.type_names)
    script = SCRIPT.format(file=f"{name[:4].strip()}.pt", names=names, last=len(model.type_names))
    printed = lammps(script, ranks)
    lines = printed.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split()[:1] == ["PotEng"])
    energy, *numbers = map(float, lines[head + 1].split())
    pressure, volume, (lx, ly, lz, xy, xz, yz) = numbers[:6], numbers[6], numbers[10:]
    rows = np.loadtxt(lammps.folder / "atoms", skiprows=9)

    symbols = np.array(model.type_names)[rows[:, 1].astype(int) - 1]
    cell = [[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]]
    atoms = Atoms(symbols, positions=rows[:, 2:5], cell=cell, pbc=True)
    total, _, force, virial, _ = (r[0].numpy() for r in model(*inputs_of(atoms, model)))
    assert energy == pytest.approx(float(total), rel=1e-12)
    assert difference(rows[:, 5:8], force) < 1e-10
    voigt = virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    assert difference(np.array(pressure) * volume / NKTV2P, voigt) < 1e-9
