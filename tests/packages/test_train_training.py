"""calcops/train: the crystals' frames, the training and its gradients, the scripts, and
the exported models."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import ROOT, run

SCRIPTS = ROOT / "examples" / "train_potential"
sys.path.append(str(SCRIPTS))
for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

import make_frames  # noqa: E402
from ase import Atoms  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train.datasets import frames_of, relabel, set_labels  # noqa: E402
from calcops.train.deep_potential import DeepPotential  # noqa: E402
from calcops.train.muon import Muon, orthogonal  # noqa: E402
from calcops.train.neighbours import neighbours, pair_vectors  # noqa: E402
from calcops.train.pairs import Pairs  # noqa: E402
from calcops.train.trainer import Data, MeanSquares, Trainer, differentiate  # noqa: E402
from calcops.train.weights import initial, kDirections, least_energies, standardise  # noqa: E402
from make_frames import generate, kCrystals, kMixed  # noqa: E402
from step_time import differentiate_plainly  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "gallium-nitride"  # a crystal of two elements
CRYSTAL, _ = kCrystals[NAME]
NAMES = list(dict.fromkeys(CRYSTAL.symbols))


def assert_close(ours, expected, tolerance=1e-12):
    ours, expected = np.asarray(ours), np.asarray(expected)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.fixture(scope="module")
def frames():
    """Return six frames of eight atoms. An atom often has several images of one neighbour."""
    return frames_of(generate(NAME, 2, 3, seed=0, copies=1), NAMES)


def statistics(frames, model):
    sources = range(len(frames["types"]))
    return Pairs(frames, sources, len(model.sel), model.cutoff, model.rcut_smth)


def beginner(frames, **others):
    """Return a small untrained model and its data."""
    settings = dict(sel=[18, 18], rcut=4.2, rcut_smth=3.0, emb=[6, 12], axis_neuron=4)
    weights = initial(**settings | dict(fit=[10, 10]) | others, seed=0)
    model = DeepPotential(weights, NAMES)
    standardise(model, statistics(frames, model))
    model.bias_atom_e[:] = least_energies(frames["types"], frames["energy"], len(model.sel))
    return model, Data(frames, model)


def test_frames_of_silver_and_copper_are_of_four_kinds(monkeypatch):
    monkeypatch.setattr(make_frames, "kSettle", 10)
    frames = generate(kMixed, 4, 1, seed=0)
    assert [frame.info["config_type"] for frame in frames] == ["bulk", "slab", "cluster", "liquid"]
    assert [frame.pbc.sum() for frame in frames] == [3, 2, 0, 3]
    assert ["stress" in frame.calc.results for frame in frames] == [True, True, False, True]
    again = generate(kMixed, 4, 1, seed=0)
    assert all((a.get_forces() == b.get_forces()).all() for a, b in zip(frames, again))
    rms = [np.sqrt(np.square(frame.get_forces()).mean()) for frame in frames]
    assert rms[3] > 3 * max(rms[:3])


def test_inputs_of_the_nets_are_standardised_for_each_pair_of_elements(frames):
    model, data = beginner(frames)
    most = statistics(frames, model).most
    scale = most.sum() / sum(model.sel)
    types, _, _, kind, R, _, energy, _, _ = data[:]
    for centre in range(len(model.sel)):
        for t, count in enumerate(most):
            empty = (-model.davg[centre, t] / model.dstd[centre, t]).expand(count, 4)
            slots = []
            for row, kinds in zip(R[types == centre], kind[types == centre]):
                slots.append(torch.cat([row[kinds == t], empty])[:count])
            slots = scale * torch.stack(slots)
            assert slots[..., 0].mean().abs() <= 1e-12
            assert_close(slots[..., 0].std(correction=0), 1)
            assert_close(slots[..., 1:].square().mean().sqrt(), kDirections)
    assert_close(model.bias_atom_e[types].sum(1), energy.mean().expand_as(energy))


def test_the_first_layers_have_steps_from_empty_slots_to_the_shortest_pair(frames):
    model, data = beginner(frames)
    _, _, _, kind, R, *_ = data[:]
    for t, net in enumerate(model.emb):
        first = net[0]
        steps = (-first.b / first.w[0]).detach()
        x = R[..., 0][kind == t]
        empty = (-model.davg / model.dstd)[:, t, 0]
        low, high = torch.minimum(x.min(), empty.min()), x.max()
        expected = low + (high - low) * torch.linspace(0, 1, len(steps) + 2)[1:-1]
        assert_close(steps.sort()[0], expected, 1e-6)
        assert (first.w * (steps[1] - steps[0]).abs()).min() > 0.3


def test_gradients_through_the_operators_are_those_of_plain_autograd(frames):
    model, data = beginner(frames)
    mean_squares = MeanSquares(model)
    batch = data[torch.tensor([0, 4])]
    parameters = dict(mean_squares.named_parameters())
    squares, ours = differentiate(mean_squares, parameters, *batch)
    expected_squares, expected = differentiate_plainly(model, parameters, *batch)
    assert_close(squares, expected_squares, 1e-10)
    for gradient, other in zip(ours, expected):
        assert_close(gradient, other, 1e-9)


def test_prepared_frames_have_the_results_of_a_call_of_the_model(frames):
    model, data = beginner(frames)
    list_neigh, shift = neighbours(frames["positions"], frames["cells"], model.cutoff)
    Rij = pair_vectors(frames["positions"], list_neigh, shift)
    expected = model(frames["types"], list_neigh, Rij)
    ours = model.evaluate(*data[:][:6], 0, False)
    assert all(map(torch.equal, ours, expected))
    assert not any(tensor.requires_grad for tensor in data.tensors)


def test_the_loss_falls(frames):
    # With fewer steps in the first layer than by default, a training begins more slowly.
    model, data = beginner(frames, emb=[24, 24])
    trainer = Trainer(model, data, steps=200, seed=0)
    for _ in range(200):
        trainer.step()
    first, last = (np.array(rows).mean(0) for rows in (trainer.history[:20], trainer.history[-20:]))
    assert last @ trainer.weights < first @ trainer.weights / 5
    assert (last < first / 2).all()


@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_muon_takes_the_steps_of_torch(shape):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    parameters[1].copy_(parameters[0])
    optimizers = [
        Muon(parameters[:1], lr=0.01),
        torch.optim.Muon(parameters[1:], lr=0.01, weight_decay=0),
    ]
    begin = parameters[0].clone()
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        for parameter, optimizer in zip(parameters, optimizers):
            parameter.grad = gradient
            optimizer.step()
    # torch computes in bfloat16, whose numbers have eight bits.
    length = (parameters[1] - begin).norm()
    assert (parameters[0] - parameters[1]).norm() < 0.02 * length


@pytest.mark.parametrize("shape", [(24, 24), (48, 12)])
def test_a_direction_does_not_depend_on_rounding_errors_of_the_gradient(shape):
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        # As of a trained net: entries and singular values of many sizes.
        scales = 10 ** (-4 * torch.rand(2, max(shape), generator=generator, dtype=torch.float64))
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        gradient *= scales[0, : shape[0], None] * scales[1, : shape[1]]
        errors = torch.randn(shape, generator=generator, dtype=torch.float64)
        other = gradient + 1e-15 * gradient.norm() * errors
        assert not torch.equal(gradient, other)
        assert torch.equal(orthogonal(gradient), orthogonal(other))


@pytest.mark.long
def test_a_compiled_step_has_the_same_gradients(frames):
    # The cutoff lies within a shell of neighbours, so that frames have different numbers of pairs.
    eager, compiled = (
        Trainer(*beginner(frames, rcut=3.7), steps=8, seed=0, compile=compile)
        for compile in (False, True)
    )
    assert (eager.data.tensors[3] >= 0).sum((1, 2)).unique().numel() > 1
    for _ in range(8):
        eager.step()
        compiled.step()
    assert_close(compiled.history, eager.history, 1e-9)


def test_frames_of_the_script_are_those_that_the_settings_name(tmp_path, monkeypatch):
    calls = []
    image = generate(NAME, 1, 1, 0, copies=1)

    def generate_few(name, trajectories, samples, seed):
        calls.append((name, trajectories, samples, seed))
        return image

    monkeypatch.setattr(make_frames, "generate", generate_few)
    monkeypatch.chdir(tmp_path)
    for seed in "0", "1":
        monkeypatch.setattr(sys, "argv", ["make_frames.py", NAME, "--seed", seed])
        make_frames.main()
    assert [call[:3] for call in calls[:3]] == [(NAME, n, 8) for n in (40, 8, 8)]
    assert len({call[3] for call in calls}) == 6, "two sets have the same seed"
    words = ["--settings", str(SCRIPTS / f"{NAME}.toml")]
    options = command.parse(words)
    train, held_out, test = command.read_sets(options)
    assert [len(images) for images in (train, held_out, test)] == [1, 1, 1]
    assert options.folder == Path("build/train_potential", NAME)


def python(*words):
    return run(sys.executable, *words, OMP_NUM_THREADS="1").stdout


@pytest.mark.long
def test_the_whole_example_reaches_what_its_readme_says(tmp_path):
    python(SCRIPTS / "make_frames.py", "silicon", tmp_path)
    words = [tmp_path / "train.extxyz", "--settings", SCRIPTS / "silicon.toml"]
    words += ["--validate", tmp_path / "held_out.extxyz", "--test", tmp_path / "test.extxyz"]
    printed = python("-m", "calcops.train", *words, "--folder", tmp_path)
    held_out, test = (float(value) for value in re.findall(r"force ([\d.]+) meV/A", printed)[-2:])
    assert held_out <= 65
    assert test <= 55
    assert float(re.search(r"([\d.]+) ms a step", printed)[1]) <= 15
    printed = python(SCRIPTS / "deploy.py", tmp_path)
    energies = [float(value) for value in re.findall(r"(-[\d.]+) eV,", printed)]
    assert len(energies) == 3
    assert np.ptp(energies) <= 1e-8
    assert float(re.search(r"within ([\d.]+) meV/atom", printed)[1]) <= 1
    assert abs(float(re.search(r"drift ([-+\d.]+)", printed)[1])) <= 0.1
    printed = python(SCRIPTS / "step_time.py", tmp_path, "--repeats", "5")
    assert float(re.findall(r"apart by (\S+)", printed)[-1]) <= 1e-9


def test_statistics_count_pairs_across_periodic_directions_only():
    frame = {
        "types": torch.tensor([[0, 0]]),
        "positions": torch.tensor([[[0.5, 0, 0], [8.5, 0, 0]]], dtype=torch.float64),
        "cells": 10 * torch.eye(3, dtype=torch.float64)[None],
    }
    for pbc, count in (([True, True, True], 2), ([False, True, True], 0)):
        pairs = Pairs(frame | {"pbc": torch.tensor([pbc])}, ["a frame"], 1, 4.0, 2.0)
        assert pairs.counts.item() == count
        assert pairs.shortest.item() == pytest.approx(2.0 if count else 4.0)


def test_a_frame_whose_pairs_cannot_be_found_is_named():
    frame = {
        "types": torch.tensor([[0, 0]]),
        "positions": torch.tensor([[[0, 0, 0], [1e6, 0, 0]]], dtype=torch.float64),
        "cells": torch.zeros(1, 3, 3, dtype=torch.float64),
        "pbc": torch.zeros(1, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match="expected a system of fewer than .*: far.xyz, frame 0"):
        Pairs(frame, ["far.xyz, frame 0"], 1, 4.0, 2.0)


def test_a_named_virial_replaces_the_stress_also_where_it_is_absent():
    for info in ({"my_virial": np.eye(3)}, {}):
        image = Atoms("Ar", cell=[5, 5, 5], pbc=True, info=dict(info))
        set_labels(image, {"energy": 0.0, "stress": np.ones(6)})
        relabel(image, {"virial": "my_virial"})
        assert set(image.calc.results) == {"energy"} | ({"virial"} if info else set())
