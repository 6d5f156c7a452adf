"""Every example runs as its first lines say, and what it prints is right."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
for package in ("ase", "vesin", "matplotlib", "skimage", "tqdm"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """{row of the table: its numbers} of a small crystal, and the paths of the pictures."""
    out = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, ROOT / "examples" / "quickstart.py", "--cells", "4", "--steps", "100", "--out", out]
    result = subprocess.run(
        command, cwd=out, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^(.{28})((?: +[-+\d.e]+)+)  ", result.stdout, re.MULTILINE)
    return {name.strip(): [float(v) for v in values.split()] for name, values in rows} | {
        "pictures": [Path(line) for line in result.stdout.splitlines() if line.endswith(".png")]
    }


def test_quickstart_has_the_cohesive_energy_of_silicon(printed):
    assert printed["perfect crystal"] == [pytest.approx(-4.3366, abs=1e-5)]


def test_quickstart_has_the_forces_of_autograd_and_of_differences(printed):
    assert printed["forces against autograd"][0] <= 1e-10
    assert printed["forces against differences"][0] <= 1e-7
    assert printed["sum of forces"][0] <= 1e-11
    assert printed["stress, asymmetry"][0] <= 1e-12


def test_quickstart_conserves_energy(printed):
    assert printed["NVE, total energy"][0] <= 0.5
    assert abs(printed["NVE, drift"][0]) <= 0.1
    assert 200 < printed["NVE, temperature"][0] < 450


def test_quickstart_draws_two_pictures(printed):
    import matplotlib.image

    assert [path.name for path in printed["pictures"]] == ["energies.png", "photograph.png"]
    for path in printed["pictures"]:
        picture = matplotlib.image.imread(path)[..., :3]
        assert picture.shape[0] >= 300 and picture.shape[1] >= 1000 and picture.std() > 0.1


def test_quickstart_straightens_the_ruled_lines_of_the_page(quickstart):
    """Between two ruled lines the photograph is paper and writing; the lines themselves are rows of the result."""
    straight = quickstart.straighten()[-1].double()
    assert straight.shape == (344, 680)
    # A horizontal line darkens its whole row: the rows of the frame are darker than those 12 pixels off on both sides.
    row = straight[:, 60:620].median(dim=1).values
    for line in (110, 210):
        assert row[line - 4 : line + 5].min() < min(row[line - 12], row[line + 12]) - 15


def test_stress_gives_the_published_elastic_constants(quickstart):
    """C11 = 151.4 and C12 = 76.4 GPa: E. R. Cowley, Phys. Rev. Lett. 60, 2379 (1988)."""
    strain, stress = 1e-4, []
    for sign in (1, -1):
        atoms = quickstart.bulk("Si", "diamond", a=quickstart.kLattice, cubic=True).repeat(2)
        atoms.set_cell(atoms.cell.array @ torch.diag(torch.tensor([1 + sign * strain, 1, 1])).numpy(), scale_atoms=True)
        positions, cell = torch.from_numpy(atoms.positions), torch.from_numpy(atoms.cell.array)
        list_neigh, shift = quickstart.neighbours(positions, cell)
        Rij = quickstart.pair_vectors(positions, list_neigh, shift)
        _, _, _, virial, _ = quickstart.StillingerWeber()(None, list_neigh, Rij)
        stress.append(-virial[0] / atoms.get_volume() / quickstart.units.GPa)
    constants = (stress[0] - stress[1]) / (2 * strain)
    assert constants[0, 0].item() == pytest.approx(151.4, abs=0.2)
    assert constants[1, 1].item() == pytest.approx(76.4, abs=0.2)
