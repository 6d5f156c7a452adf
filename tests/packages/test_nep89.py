"""calcops/nep: GPUMD's NEP89, a model of 89 elements, gives NEP_CPU's numbers.

CALCOPS_NEP89 is the path of potentials/nep/nep89_20250409/nep89_20250409.txt of
https://github.com/brucefan1983/GPUMD, which is no part of this repository.
nep_models/nep89_numbers.json has the results of NEP_CPU, commit 7319bdc, compiled by -O3, for
disturbed rock salt. In the second frame two atoms are within the ZBL.
"""

import json
import os

import numpy as np
import pytest
from programs import ROOT, blocks

for module in ("ase", "vesin"):
    pytest.importorskip(module, reason=f"needs {module}")

from ase import Atoms  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.nep import load  # noqa: E402
from calcops.potentials.package import save  # noqa: E402

FILE = os.environ.get("CALCOPS_NEP89")
FRAMES = json.loads((ROOT / "tests/packages/nep_models/nep89_numbers.json").read_text())
pytestmark = pytest.mark.skipif(
    not FILE, reason="expected CALCOPS_NEP89, the path of nep89_20250409.txt of GPUMD's potentials"
)


@pytest.fixture(scope="module")
def models():
    """Return the model of all elements and the one of two."""
    return load(FILE), load(FILE, ["Na", "Cl"])


def results_of(model, frame):
    """Return the energies, forces and virials of atoms."""
    atoms = Atoms(frame["symbols"], frame["positions"], cell=frame["cell"], pbc=True)
    atoms.calc = CalcOps(model)
    stresses = atoms.get_stresses(voigt=False)
    return atoms.get_potential_energies(), atoms.get_forces(), -stresses * atoms.get_volume()


def test_rock_salt_has_the_numbers_of_nep_cpu(models):
    for model in models:
        for frame in FRAMES:
            energies, forces, virials = results_of(model, frame)
            np.testing.assert_allclose(energies, frame["energy"], rtol=0, atol=1e-9)
            for values, name in ((forces, "force"), (virials, "virial")):
                expected = np.array(frame[name]).reshape(values.shape)
                largest = np.abs(expected).max()
                if name == "virial":  # symmetric for ASE
                    expected = (expected + expected.transpose(0, 2, 1)) / 2
                np.testing.assert_allclose(values, expected, rtol=0, atol=1e-8 * largest)


def test_a_model_of_all_elements_computes_tables_of_those_it_meets(models):
    model = load(FILE)
    assert len(model.type_names) == 89
    results_of(model, FRAMES[0])
    assert model.has_table.sum() == 4
    for result, other in zip(results_of(model, FRAMES[1]), results_of(models[1], FRAMES[1])):
        np.testing.assert_allclose(result, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page", ["README.md", "calcops/README.md", "calcops/nep/README.md"])
def test_the_example_of_a_page_prints_what_is_shown(models, page, capsys, monkeypatch, tmp_path):
    """An archive stands for the package, which takes half a minute."""
    save(models[1], tmp_path / "nacl.pt")
    monkeypatch.chdir(tmp_path)
    example = blocks(page, "py")[0]
    capsys.readouterr()
    exec(example.replace("nacl.pt2", "nacl.pt"), {})
    assert f"# {capsys.readouterr().out}" in example
