"""calcops/ase: models in training, committees, batches that are repeated, and what tells
calculators apart."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import ROOT

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.db import connect  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.ase.second_derivatives import response  # noqa: E402
from calcops.check import check  # noqa: E402
from calcops.nep import load  # noqa: E402
from calcops.potentials import package  # noqa: E402
from calcops.potentials.stillinger_weber import StillingerWeber  # noqa: E402
from structures import Morse  # noqa: E402

FILE = ROOT / "tests/packages/nep_models/nep4.txt"


def silicon(seed=0, cells=1, a=5.43):
    atoms = bulk("Si", "diamond", a=a, cubic=True).repeat(cells)
    atoms.rattle(0.1, seed=seed)
    return atoms


def test_an_energy_of_your_own_has_the_forces_and_the_stress_of_its_differences():
    atoms = bulk("Cu", cubic=True)
    atoms.symbols[0] = "Au"
    check(CalcOps(Morse()), atoms, only=["forces", "stress", "supercell"])


def test_unchanged_atoms_are_computed_once():
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    calls = []
    model = atoms.calc.model
    atoms.calc.model = lambda *arguments: calls.append(1) or model(*arguments)
    for _ in range(3):
        atoms.get_forces()
        atoms.get_stress()
    assert len(calls) == 1
    atoms.positions[2, 0] = np.nextafter(atoms.positions[2, 0], 9)
    atoms.get_forces()
    assert len(calls) == 2


@pytest.mark.parametrize("change", ["positions", "numbers", "cell", "pbc", "length"])
def test_any_change_of_atoms_is_noticed(change):
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    before = atoms.get_potential_energy()
    if change == "positions":
        atoms.positions[0] += 0.1
    elif change == "numbers":
        atoms.numbers[0] = 6
        with pytest.raises(ValueError, match="expected atoms of"):
            atoms.get_potential_energy()
        return
    elif change == "cell":
        atoms.set_cell(atoms.cell * 1.01)
    elif change == "pbc":
        atoms.pbc = [True, True, False]
    else:
        del atoms[0]
    assert atoms.get_potential_energy() != before


@pytest.mark.parametrize("name", ["bias", "b0", "w0", "w1", "radial_c", "angular_c", "scale"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_calculator_follows_a_model_in_training_while_atoms_do_not_move(mode, name):
    model = load(FILE).train(mode == "train")
    atoms = silicon()
    atoms.calc = CalcOps(model)
    before = atoms.get_potential_energy()
    with torch.no_grad():
        getattr(model, name).mul_(1.25)  # in place, as an optimizer does
    if name == "scale":  # a buffer
        atoms.calc.reset()
    after = atoms.get_potential_energy()
    assert abs(after - before) > 1e-6
    atoms.calc = CalcOps(copy.deepcopy(model).eval())
    assert after == pytest.approx(atoms.get_potential_energy(), abs=1e-12)


def test_results_do_not_outlive_a_call_that_fails():
    atoms = silicon()
    calculator = CalcOps(StillingerWeber())
    calculator.calculate(atoms)
    atoms.numbers[0] = 6
    with pytest.raises(ValueError, match="expected atoms of"):
        calculator.calculate(atoms)
    assert calculator.results == {}


def test_an_atom_without_neighbours_has_a_row_of_one_empty_slot():
    shapes = []
    model = StillingerWeber()
    calculator = CalcOps(model)
    calculator.model = lambda *arguments: shapes.append(arguments[1].shape) or model(*arguments)
    assert calculator.calculate_batch([Atoms("Si")])[0]["energy"] == 0
    assert shapes == [(1, 1, 1)]


def test_cell_vectors_of_open_directions_may_hold_anything():
    atoms = silicon()
    atoms.pbc = [True, True, False]
    atoms.calc = CalcOps(StillingerWeber())
    expected = atoms.get_forces()
    atoms.cell[2] = np.nan
    np.testing.assert_allclose(atoms.get_forces(), expected, atol=1e-13)


def test_a_package_has_no_second_derivatives(tmp_path):
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    atoms.calc.model.path = tmp_path / "si.pt2"
    with pytest.raises(ValueError, match="module or an archive .* got the package .*si.pt2"):
        response(atoms)


def test_every_frame_of_a_repeated_batch_keeps_its_list():
    frames = [silicon(seed=seed, a=5.3 + 0.01 * seed) for seed in range(40)]
    calculator = CalcOps(StillingerWeber())
    expected = calculator.calculate_batch(frames)
    assert calculator.neighbours.builds == 40
    again = calculator.calculate_batch(frames)
    assert calculator.neighbours.builds == 40
    for results, others in zip(again, expected, strict=True):
        np.testing.assert_array_equal(results["forces"], others["forces"])
    calculator.calculate_batch(frames[::-1])
    assert calculator.neighbours.builds > 40


def test_a_committee_has_the_deviations_of_its_models():
    models = [StillingerWeber() for _ in range(3)]
    for model, factor in zip(models, (1.0, 1.1, 0.95)):
        model.strength *= factor
    atoms = silicon()
    forces = []
    energies = []
    for model in models:
        atoms.calc = CalcOps(model)
        energies.append(atoms.get_potential_energy())
        forces.append(atoms.get_forces())
    atoms.calc = CalcOps(models[0], committee=models[1:])
    assert atoms.get_potential_energy() == energies[0]
    deviation = atoms.calc.get_property("force_deviation", atoms)
    squares = ((np.array(forces) - np.mean(forces, 0)) ** 2).sum(-1)
    np.testing.assert_allclose(deviation, np.sqrt(squares.mean(0)), rtol=1e-12)
    assert deviation.min() > 0
    energy_deviation = atoms.calc.get_property("energy_deviation", atoms)
    assert energy_deviation == pytest.approx(np.std(energies), rel=1e-12)
    np.testing.assert_array_equal(atoms.get_forces(), forces[0])


def test_a_single_model_has_no_deviations():
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    with pytest.raises(PropertyNotImplementedError):
        atoms.calc.get_property("force_deviation", atoms)


def test_a_database_tells_two_models_apart(tmp_path):
    models = [load(FILE), load(FILE)]
    with torch.no_grad():
        models[1].bias += 0.1
    rows = []
    with connect(tmp_path / "two.db") as database:
        for model in models:
            atoms = silicon()
            atoms.calc = CalcOps(model, skin=0.7)
            atoms.get_potential_energy()
            rows.append(database.get(database.write(atoms)))
    assert {row.calculator for row in rows} == {"calcops"}
    first, second = (row.calculator_parameters for row in rows)
    assert (first["model"], first["type_names"], first["skin"]) == ("Nep", ["Si"], 0.7)
    assert first["digest"] != second["digest"]
    assert first == CalcOps(load(FILE), skin=0.7).todict()
    json.dumps(first)


def test_a_package_is_known_by_its_path_and_its_bytes(tmp_path):
    package.save(StillingerWeber(), tmp_path / "sw.pt")
    calculator = CalcOps(package.load(tmp_path / "sw.pt"))
    assert calculator.parameters["model"] == str(tmp_path / "sw.pt")
    (tmp_path / "same.pt").write_bytes((tmp_path / "sw.pt").read_bytes())
    other = CalcOps(package.load(tmp_path / "same.pt"))
    assert calculator.todict()["digest"] == other.todict()["digest"]


def test_descriptors_and_latent_space_are_those_of_the_model():
    model = load(FILE)
    atoms = silicon()
    atoms.calc = CalcOps(model)
    descriptors = atoms.calc.get_descriptors(atoms)
    assert descriptors.shape == (len(atoms), model.w0.shape[1])
    hidden = np.tanh(descriptors @ model.w0[0].detach().numpy() - model.b0[0].detach().numpy())
    latent = atoms.calc.get_latent_space(atoms)
    np.testing.assert_allclose(latent, hidden * model.w1[0].detach().numpy(), rtol=1e-12)
    energies = latent.sum(1) - model.bias[0].item()
    np.testing.assert_allclose(energies, atoms.get_potential_energies(), rtol=1e-11)
    atoms.calc = CalcOps(StillingerWeber())
    with pytest.raises(PropertyNotImplementedError, match="expected a model with descriptors"):
        atoms.calc.get_descriptors(atoms)


def test_atoms_that_are_far_outside_of_the_cell_have_the_forces_of_those_inside():
    atoms = silicon()
    atoms.calc = CalcOps(StillingerWeber())
    expected = atoms.get_forces()
    moves = np.random.default_rng(0).integers(-(2**23), 2**23, (len(atoms), 3))
    atoms.positions += moves @ atoms.cell.array
    np.testing.assert_allclose(atoms.get_forces(), expected, atol=1e-6)


def test_a_nep_computes_blocks_of_atoms_with_the_results_of_one_call(monkeypatch):
    atoms = silicon(cells=2)
    atoms.calc = CalcOps(load(FILE))
    expected = [atoms.get_potential_energies(), atoms.get_forces(), atoms.get_stresses()]
    monkeypatch.setattr("calcops.nep.model.kBlockSlots", 500)
    atoms.calc = CalcOps(load(FILE))
    calls = []
    atoms.calc.model.register_forward_hook(lambda *_: calls.append(1))
    for result, other in zip(
        [atoms.get_potential_energies(), atoms.get_forces(), atoms.get_stresses()], expected
    ):
        np.testing.assert_allclose(result, other, atol=1e-13)
    assert len(calls) > 1


def test_what_is_no_model_and_no_list_is_refused():
    for path in ("nacl.pt2", Path("nacl.pt2")):
        with pytest.raises(ValueError, match="expected a model, such as .*load.*gives, got .*nacl"):
            CalcOps(path)
    with pytest.raises(ValueError, match="expected a list of models as the committee"):
        CalcOps(StillingerWeber(), committee=StillingerWeber())
    with pytest.raises(ValueError, match="expected a list of structures, got one"):
        CalcOps(StillingerWeber()).calculate_batch(silicon())


def test_a_path_of_no_package_is_refused():
    with pytest.raises(ValueError, match="expected a package or an archive, got no file"):
        package.load("none.pt2")
    with pytest.raises(ValueError, match="calcops.nep reads a nep.txt"):
        package.load(FILE)
