"""examples/train_potential: frames, the training and its gradients, the scripts, and what hosts
run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase import units  # noqa: E402
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.potentials import package  # noqa: E402
from calcops.train import train  # noqa: E402
from calcops.train.deep_potential import DeepPotential  # noqa: E402
from calcops.train.frames import crystals, generate, neighbours, pair_vectors  # noqa: E402
from calcops.train.step_time import differentiate_plainly  # noqa: E402
from calcops.train.systems import kSystems  # noqa: E402
from calcops.train.trainer import Data, MeanSquares, Trainer, differentiate, kLossWeights  # noqa: E402
from calcops.train.weights import initial, standardise  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = dict(trajectories=2, samples=3, cells_each_way=1, settle=20, every=10)


def assert_close(ours, expected, tolerance=1e-12):
    ours, expected = np.asarray(ours), np.asarray(expected)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.fixture(scope="module", params=kSystems)
def system(request):
    return kSystems[request.param]


@pytest.fixture(scope="module")
def frames(system):
    """Six of eight atoms; a neighbour is often an image of an atom that is there already."""
    return generate(system, seed=0, **SMALL)


def beginner(frames, system, **others):
    """A small net and its data."""
    settings = system.model | dict(emb=[6, 12], axis_neuron=4, fit=[10, 10]) | others
    model = DeepPotential(initial(**settings, seed=0), system.labels.type_names)
    types, _, _, kind, R, _, energy, _, _ = Data(frames, model)[:]
    standardise(model, types, kind, R, energy)
    return model, Data(frames, model)


def test_frames_are_reproducible_and_their_dynamics_conserve_energy(frames, system):
    again = generate(system, seed=0, **SMALL)
    assert all(torch.equal(again[key], value) for key, value in frames.items())
    assert not torch.equal(generate(system, seed=1, **SMALL)["positions"], frames["positions"])
    total = (frames["energy"] + frames["kinetic"]).view(2, 3)
    assert (total - total[:, :1]).abs().max() <= 0.05 * frames["kinetic"].max()
    assert frames["cells"][::3].unique(dim=0).shape[0] == 2
    symbols = [system.labels.type_names[t] for t in frames["types"][-1]]
    assert symbols == list(system.cell.symbols)


def test_atoms_begin_at_rest_together_and_with_the_same_temperature_whatever_their_mass(system):
    atoms = system.cell.repeat(6)
    _, velocities, _ = crystals(
        atoms, [300.0], torch.zeros(1, 3, 3), torch.Generator().manual_seed(0)
    )
    masses = torch.from_numpy(atoms.get_masses())[:, None]
    assert (masses * velocities[0]).sum(0).abs().max() <= 1e-9 * (
        masses * velocities[0]
    ).abs().sum()
    for mass in masses.unique():
        of_mass = velocities[0][masses[:, 0] == mass]
        assert (mass * of_mass.square()).mean() == pytest.approx(2 * units.kB * 300, rel=0.05)


def test_the_cell_of_a_system_is_the_one_in_which_its_labels_have_no_stress(system):
    atoms = system.cell.copy()
    atoms.calc = CalcOps(system.labels)
    assert abs(atoms.get_forces()).max() < 1e-10
    assert abs(atoms.get_stress()).max() < 1e-3 < abs(atoms.get_potential_energy())
    atoms.set_cell(1.01 * atoms.cell, scale_atoms=True)
    assert abs(atoms.get_stress()).max() > 1e-2


def test_labels_are_derivatives_of_the_energy_that_they_come_with(frames, system):
    """Moves an atom, and strains a crystal."""
    b, h, energies = 1, 1e-4, []
    positions, cells = frames["positions"][b:], frames["cells"][b:]
    strain = torch.zeros(3, 3, dtype=torch.float64)
    strain[0, 1] = h
    for moved, deform in ((h, 0), (-h, 0), (0, strain), (0, -strain)):
        x = positions.clone()
        x[0, 3, 2] += moved
        deform = torch.eye(3, dtype=torch.float64) + deform
        list_neigh, shift = neighbours(x @ deform, cells @ deform, system.labels.cutoff)
        Rij = pair_vectors(x @ deform, list_neigh, shift)
        energies.append(system.labels(frames["types"][b:], list_neigh, Rij)[0][0])
    assert (energies[1] - energies[0]) / (2 * h) == pytest.approx(
        frames["force"][b, 3, 2].item(), abs=1e-5
    )
    assert (energies[3] - energies[2]) / (2 * h) == pytest.approx(
        frames["virial"][b, 0, 1].item(), abs=1e-4
    )


def test_what_the_nets_see_is_standardised_for_each_pair_of_elements(frames, system):
    model, data = beginner(frames, system)
    types, _, _, kind, R, _, energy, _, _ = data[:]
    for centre in range(len(model.sel)):
        for t, count in enumerate(model.sel):
            empty = (-model.davg[centre, t] / model.dstd[centre, t]).expand(count, 4)
            slots = []
            for row, kinds in zip(R[types == centre], kind[types == centre]):
                slots.append(torch.cat([row[kinds == t], empty])[:count])
            slots = torch.stack(slots)
            assert slots[..., 0].mean().abs() <= 1e-12
            assert_close(slots[..., 0].std(), 1)
            assert_close(slots[..., 1:].square().mean().sqrt(), 10)
    assert_close(model.bias_atom_e[types].sum(1), energy.mean().expand_as(energy))


def test_gradients_through_the_operators_are_those_of_plain_autograd(frames, system):
    model, data = beginner(frames, system)
    mean_squares, batch = MeanSquares(model), data[torch.tensor([0, 4])]
    parameters = dict(mean_squares.named_parameters())
    squares, ours = differentiate(mean_squares, parameters, *batch)
    expected_squares, expected = differentiate_plainly(model, parameters, *batch)
    assert_close(squares, expected_squares, 1e-10)
    for gradient, other in zip(ours, expected):
        assert_close(gradient, other, 1e-9)


def test_prepared_frames_have_the_results_of_a_call_of_the_model(frames, system):
    model, data = beginner(frames, system)
    list_neigh, shift = neighbours(frames["positions"], frames["cells"], model.cutoff)
    Rij = pair_vectors(frames["positions"], list_neigh, shift)
    expected, ours = model(frames["types"], list_neigh, Rij), model.evaluate(*data[:][:6], 0, False)
    assert all(map(torch.equal, ours, expected))
    assert not any(tensor.requires_grad for tensor in data.tensors)


def test_the_loss_falls(frames, system):
    model, data = beginner(frames, system)
    trainer = Trainer(model, data, steps=200, seed=0)
    for _ in range(200):
        trainer.step()
    first, last = (np.array(rows).mean(0) for rows in (trainer.history[:20], trainer.history[-20:]))
    assert last @ kLossWeights < first @ kLossWeights / 5
    assert (last < first / 2).all()


def test_a_resumed_training_is_bitwise_that_without_a_stop(frames, system, tmp_path):
    whole = Trainer(*beginner(frames, system), steps=8, seed=0)
    for _ in range(8):
        whole.step()
    first = Trainer(*beginner(frames, system), steps=8, seed=0)
    for _ in range(5):
        first.step()
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(*beginner(frames, system), steps=8, seed=3)
    second.resume(tmp_path / "checkpoint.pt")
    for _ in range(3):
        second.step()
    assert second.history == whole.history
    for key, value in whole.parameters.items():
        assert torch.equal(second.parameters[key], value), key


def test_each_process_takes_another_part_of_the_batch(frames, system, monkeypatch):
    parts = []
    for rank in range(3):
        calls = {"is_initialized": True, "get_rank": rank, "get_world_size": 3}
        for name, value in calls.items():
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
        parts.append(
            torch.arange(6)[Trainer(*beginner(frames, system), steps=1, seed=0, batch=6).share]
        )
    assert [len(part) for part in parts] == [2, 2, 2] and torch.equal(
        torch.cat(parts).sort()[0], torch.arange(6)
    )


def test_a_batch_of_more_frames_than_there_are_is_refused(frames, system):
    with pytest.raises(ValueError, match="at most the 6 frames there are, got 7"):
        Trainer(*beginner(frames, system), steps=1, seed=0, batch=7)


@pytest.mark.long
def test_a_compiled_step_has_the_same_gradients(frames, system):
    (name,) = (key for key, value in kSystems.items() if value is system)
    # The cutoff is in a shell of neighbours, so that frames differ in how many there are.
    model = {"silicon": dict(rcut=4.45), "gallium-nitride": dict(rcut=3.7)}[name]
    eager, compiled = (
        Trainer(*beginner(frames, system, **model), steps=8, seed=0, compile=compile)
        for compile in (False, True)
    )
    assert (eager.data.tensors[3] >= 0).sum((1, 2)).unique().numel() > 1
    for _ in range(8):
        eager.step()
        compiled.step()
    assert_close(compiled.history, eager.history, 1e-9)


@pytest.mark.parametrize("name", ["model.pt", pytest.param("model.pt2", marks=pytest.mark.long)])
def test_what_is_exported_gives_the_same_in_ase(frames, system, name, tmp_path):
    """Tries other sizes than those it was exported with, and rows longer and shorter than sel."""
    model, _ = beginner(frames, system)
    package.save(model, tmp_path / name)
    exported = package.load(tmp_path / name)
    for cells, strain in ((1, 0), (2, -0.04)):
        atoms = system.cell.repeat(cells)
        atoms.set_cell((1 + strain) * atoms.cell, scale_atoms=True)
        atoms.rattle(0.1, seed=0)
        results = []
        for form in (model, exported):
            atoms.calc = CalcOps(form)
            results.append((atoms.get_potential_energies(), atoms.get_forces(), atoms.get_stress()))
        for ours, expected in zip(*results):
            assert_close(ours, expected, 1e-11)


def test_the_script_goes_on_where_it_was_stopped(frames, system, tmp_path, monkeypatch, capsys):
    (name,) = (key for key, value in kSystems.items() if value is system)
    torch.save({"system": name, "sets": [frames] * 3}, tmp_path / "frames.pt")
    for steps in (2, 3):
        monkeypatch.setattr(
            sys, "argv", ["train.py", str(tmp_path), "--system", name, "--steps", str(steps)]
        )
        train.main()
        assert len(torch.load(tmp_path / "checkpoint.pt")["history"]) == steps
    on_held_out, on_test = re.findall(r"RMSE of .*", capsys.readouterr().out)[-2:]
    assert on_held_out == on_test, "the same frames here"
    for name in ("loss.png", "parity.png", "model.npz"):
        assert (tmp_path / name).stat().st_size > 1000


def test_a_folder_of_another_system_is_refused(tmp_path, monkeypatch, capsys):
    torch.save({"system": "silicon"}, tmp_path / "frames.pt")
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path), "--system", "gallium-nitride"])
    with pytest.raises(SystemExit):
        train.main()
    assert (
        f"expected a folder of gallium-nitride, got one of silicon: {tmp_path}"
        in capsys.readouterr().err
    )


def test_the_three_sets_of_frames_are_different_ones_whatever_the_seed(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(train, "generate", lambda system, n, samples, seed: seeds.append(seed))
    monkeypatch.setattr(train, "DeepPotential", lambda *_: sys.exit())
    for seed in (0, 1):
        monkeypatch.setattr(
            sys, "argv", ["train.py", str(tmp_path / str(seed)), "--seed", str(seed)]
        )
        with pytest.raises(SystemExit):
            train.main()
    assert len(set(seeds)) == 6


def run(script, *options):
    command = [sys.executable, EXAMPLES / "train_potential" / script, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_the_whole_example_reaches_what_its_readme_says(tmp_path):
    printed = run("train.py", tmp_path)
    held_out, test = (float(value) for value in re.findall(r"force ([\d.]+) eV/A", printed)[-2:])
    assert held_out <= 0.05 and test <= 0.055
    assert int(re.search(r"(\d+) s of CPU", printed)[1]) <= 2 * 600  # ten minutes of two cores
    printed = run("deploy.py", tmp_path)
    energies = [float(value) for value in re.findall(r"(-[\d.]+) eV,", printed)]
    assert len(energies) == 3 and np.ptp(energies) <= 1e-8
    assert float(re.search(r"within ([\d.]+) meV/atom", printed)[1]) <= 1
    assert abs(float(re.search(r"drift ([-+\d.]+)", printed)[1])) <= 0.1
    printed = run("step_time.py", tmp_path, "--repeats", "5")
    assert float(re.findall(r"apart by (\S+)", printed)[-1]) <= 1e-9
