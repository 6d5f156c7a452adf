"""Models of CalcOps as files of metatomic, against the ASE calculator."""

import subprocess
import sys

import numpy as np
import pytest
import torch

mta = pytest.importorskip("metatomic.torch", reason="needs metatomic-torch", exc_type=ImportError)
for name in ("ase", "vesin", "metatomic_ase"):
    pytest.importorskip(name, reason=f"needs {name}", exc_type=ImportError)
from ase.build import bulk  # noqa: E402
from calcops import deepmd, nep  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.metatomic import Energies, export  # noqa: E402
from calcops.potentials import LennardJones, StillingerWeber, load, save  # noqa: E402
from metatensor.torch import Labels  # noqa: E402
from metatomic_ase import MetatomicCalculator  # noqa: E402
from programs import ROOT  # noqa: E402
from vesin import metatomic as vesin_metatomic  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


FOLDER = ROOT / "tests" / "packages"
MODELS = FOLDER / "nep_models"


def carbide():
    return LennardJones([0.01, 0.02], [2.0, 2.2], 5.0, units="metal", type_names=["Si", "C"])


def water():
    """Return a Deep Potential of water, with the names of the elements that are computed here."""
    model = deepmd.load(FOLDER / "deepmd_models" / "pairs.pth")
    model.type_names = ["Si", "C"]
    return model


def silicon(cells=1, carbon=()):
    atoms = bulk("Si", cubic=True).repeat((cells, 1, 1))
    atoms.rattle(0.1, seed=0)
    atoms.numbers[list(carbon)] = 6
    return atoms


@pytest.mark.parametrize(
    "model, carbon",
    [
        (StillingerWeber(), []),
        (nep.load(MODELS / "nep4.txt"), []),
        (nep.load(MODELS / "nep4.txt").float(), []),
        (carbide(), [1, 2, 5]),
        (water(), [1, 2, 5]),
    ],
    ids=["sw", "nep", "nep in float32", "two elements", "deep potential"],
)
def test_an_exported_model_is_that_of_the_calculator(model, carbon, tmp_path):
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    export(model, tmp_path / "model.pt")
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    atoms = silicon(2, carbon)
    theirs = atoms.copy()
    atoms.calc = CalcOps(model)
    theirs.calc = MetatomicCalculator(tmp_path / "model.pt", device="cpu")
    atol = 1e-10 if atoms.calc.dtype == torch.float64 else 2e-4
    energy = theirs.get_potential_energy()
    assert energy == pytest.approx(atoms.get_potential_energy(), abs=atol)
    for name in ("forces", "stress", "potential_energies"):
        ours, other = (getattr(x, f"get_{name}")() for x in (atoms, theirs))
        np.testing.assert_allclose(other, ours, atol=atol, err_msg=name)


def test_a_file_runs_in_a_process_without_calcops(tmp_path):
    export(StillingerWeber(), tmp_path / "model.pt", tmp_path / "extensions")
    assert any("calcops" in path.name for path in tmp_path.rglob("*.so"))
    program = f"""
import sys
from ase.build import bulk
from metatomic_ase import MetatomicCalculator
atoms = bulk("Si", cubic=True)
atoms.rattle(0.1, seed=0)
atoms.calc = MetatomicCalculator(r"{tmp_path}/model.pt", device="cpu")
print(atoms.get_potential_energy(), "calcops" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    energy, has_calcops = run.stdout.split()[-2:]
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    assert has_calcops == "False"
    assert float(energy) == pytest.approx(atoms.get_potential_energy(), abs=1e-10)


def test_energies_of_selected_atoms_of_several_systems():
    model = carbide()
    systems = []
    expected = []
    for atoms in (silicon(), silicon(2, [3])):
        atoms.calc = CalcOps(model)
        expected.append(torch.from_numpy(atoms.get_potential_energies()))
        systems.append(atoms)
    systems = mta.systems_to_torch(systems, dtype=torch.float64)
    module = Energies(model)
    vesin_metatomic.compute_requested_neighbors(systems, "angstrom", module, "angstrom")
    selected = Labels(["system", "atom"], torch.tensor([[0, 5], [1, 3], [1, 0]], dtype=torch.int32))
    outputs = {"energy": mta.ModelOutput(unit="eV", sample_kind="atom")}
    block = module(systems, outputs, selected)["energy"].block()
    assert block.samples.values.tolist() == [[0, 5], [1, 3], [1, 0]]
    values = torch.stack([expected[0][5], expected[1][3], expected[1][0]])
    torch.testing.assert_close(block.values[:, 0], values, rtol=0, atol=1e-12)
    outputs = {"energy": mta.ModelOutput(unit="eV", sample_kind="system")}
    block = module(systems, outputs, selected)["energy"].block()
    sums = torch.stack([values[0], values[1:].sum()])
    torch.testing.assert_close(block.values[:, 0], sums, rtol=0, atol=1e-12)
    assert module(systems, {}) == {}


def test_packages_and_other_units_are_refused(tmp_path):
    save(StillingerWeber(), tmp_path / "silicon.pt")
    with pytest.raises(ValueError, match="expected a module, got a package"):
        export(load(tmp_path / "silicon.pt"), tmp_path / "model.pt")
    with pytest.raises(ValueError, match='units "metal", got lj'):
        export(LennardJones(type_names=["Ar"]), tmp_path / "model.pt")
