"""What a user does first. release.py runs it in the environment of an installed distribution.

It writes into the working folder and the cache. Its last line has the versions and the seconds in
which the operators were built.
"""

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

start = time.monotonic()
import calcops.ops  # noqa: E402, F401

import calcops_jit  # noqa: E402

seconds = time.monotonic() - start
from ase.build import bulk  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.potentials import StillingerWeber, load, save  # noqa: E402

SCRIPTS = Path(sys.executable).parent
OPERATOR = """
#include <calcops/operator.h>
const calcops::Contract contract(R"(
twice(Tensor x) -> Tensor y
x [N]; float64.
y [N]; like x.
)");
void twice(calcops::View<const double, 1> x, calcops::View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
const calcops::Kernel cpu("twice", twice);
"""
INPUT = """
units      metal
read_data  silicon.data
pair_style calcops silicon.pt2
pair_coeff * * Si
run        0
"""

# An operator of the distribution.
edge_index = torch.tensor([[0, 1], [1, 0]])
edge_vec = torch.tensor([[1.0, 0, 0], [-1, 0, 0]])
force, virial, _ = calcops_jit.edge_force_virial(edge_index, -12 * edge_vec, edge_vec, natoms=2)
assert force.tolist() == [[-24, 0, 0], [24, 0, 0]]
assert virial[0, 0, 0] == 24

# An operator of one's own.
Path("mine.cpp").write_text(OPERATOR)
mine = calcops_jit.load("mine", ["mine.cpp"])
assert torch.compile(mine.twice)(torch.arange(3.0).double()).tolist() == [0, 2, 4]

# A potential in ASE.
save(StillingerWeber(), "silicon.pt2")
silicon = bulk("Si", a=5.431, cubic=True)
silicon.calc = CalcOps(load("silicon.pt2"))
energy = silicon.get_potential_energy()
assert abs(energy / len(silicon) + 4.3366) < 1e-4
silicon.write("silicon.cif")
subprocess.run([SCRIPTS / "calcops", "check", "silicon.pt2", "silicon.cif"], check=True)

# The same in LAMMPS.
silicon.write("silicon.data", format="lammps-data", masses=True, specorder=["Si"])
Path("in.silicon").write_text(INPUT)
log = subprocess.check_output([SCRIPTS / "lmp", "-in", "in.silicon"], text=True)
values = log.partition("   Step ")[2].splitlines()[1].split()
assert abs(float(values[2]) / energy - 1) < 1e-6, log

print(f"PyTorch {torch.__version__}, LAMMPS {version('lammps')}, built in {seconds:.0f} s")
