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
from calcops.deepmd.deep_potential import DeepPotential, least_energies  # noqa: E402
from calcops.potentials.neighbours import neighbours, pair_vectors  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import trainer as trainer_module  # noqa: E402
from calcops.train.datasets import frames_of  # noqa: E402
from calcops.train.labels import relabel, set_labels  # noqa: E402
from calcops.train.muon import Muon, orthogonal  # noqa: E402
from calcops.train.pairs import Pairs  # noqa: E402
from calcops.train.trainer import (  # noqa: E402
    Data,
    Squares,
    Trainer,
    clipped,
    differentiate,
    errors_of,
    kClip,
    kColumns,
    kRows,
    loss_weights,
    squares_of,
)
from calcops.train.weights import initial, kDirections, standardise  # noqa: E402
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
    types, _, _, kind, R, _, frame, energy, *_ = data[:]
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
    sums = torch.zeros_like(energy).index_add(0, frame, model.bias_atom_e[types[0]])
    assert_close(sums, energy.mean().expand_as(energy))


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
    squares = Squares(model)
    batch = data[[0, 4]]
    batch[-1][:] = torch.tensor([[1.0, 2.0, 0.5], [0.7, 1.0, 3.0]])
    factors = torch.tensor([1.0, 2.0, 3.0]).double()
    parameters = dict(squares.named_parameters())
    sums, ours = differentiate(squares, parameters, factors, *batch)
    expected_sums, expected = differentiate_plainly(model, parameters, factors, *batch)
    assert_close(sums, expected_sums, 1e-10)
    for gradient, other in zip(ours, expected):
        assert_close(gradient, other, 1e-9)


def test_prepared_frames_have_the_results_of_a_call_of_the_model(frames):
    model, data = beginner(frames)
    list_neigh, shift = neighbours(frames["positions"], frames["cells"], model.cutoff)
    Rij = pair_vectors(frames["positions"], list_neigh, shift)
    energy, _, force, virial, _ = model(frames["types"], list_neigh, Rij)
    pairs = Squares(model).differences(*data[:])
    ours = [label + error for label, error in pairs]
    expected = [energy / 8, force.flatten(0, 1), (virial / 8)[:, kRows, kColumns]]
    for result, other in zip(ours, expected):
        assert_close(result.detach(), other, 1e-12)
    assert not any(tensor.requires_grad for tensors in data.kept for tensor in tensors)


def test_the_loss_falls(frames):
    # With fewer steps in the first layer than by default, a training begins more slowly.
    model, data = beginner(frames, emb=[24, 24])
    trainer = Trainer(model, data, steps=200, seed=0)
    for _ in range(200):
        trainer.step()
    first, last = (np.array(rows).mean(0) for rows in (trainer.history[:20], trainer.history[-20:]))
    assert last[:3] @ trainer.weights < first[:3] @ trainer.weights / 5
    assert (last < first / 2)[:3].all()


def trained(frames, steps, **others):
    """Return a Trainer after some steps of 16 atoms."""
    trainer = Trainer(*beginner(frames), **{"steps": steps, "seed": 0, "batch": 16} | others)
    for _ in range(steps):
        trainer.step()
    return trainer


def norm_of_step(trainer):
    """Return the norm of the gradient that the last step took."""
    return torch.stack([p.grad.norm() for p in trainer.parameters.values()]).norm().item()


def test_a_gradient_is_clipped_at_a_multiple_of_the_median_norm(frames):
    trainer = trained(frames, 30)
    norms = [norm for *_, norm in trainer.history]
    assert norm_of_step(trainer) == pytest.approx(norms[-1])
    trainer.data.frames["energy"] += 1e4
    trainer.step()
    assert trainer.history[-1][3] > 100 * max(norms)
    assert norm_of_step(trainer) == pytest.approx(kClip * np.median(norms))
    assert clipped(trainer.history)[-1]
    assert clipped(trainer.history[:-1]) == [False] * 20 + [
        norms[step] > kClip * np.median(norms[:step]) for step in range(20, 30)
    ]


def test_a_step_whose_gradient_is_not_finite_is_left_out(frames):
    trainer = trained(frames, 3)
    before = trainer.state()
    energy = trainer.data.frames["energy"].clone()
    trainer.data.frames["energy"] *= np.inf
    trainer.step()
    after = trainer.state()
    assert_same_tensors(after["parameters"], before["parameters"])
    for ours, theirs in zip(after["optimizers"], before["optimizers"]):
        for number, values in ours["state"].items():
            assert_same_tensors(values, theirs["state"][number])
    assert np.isnan(trainer.history[-1][3])
    trainer.data.frames["energy"] = energy
    trainer.step()
    assert np.isfinite(trainer.history[-1]).all()


def assert_same_tensors(ours, theirs):
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_numbers_of_a_step_are_read_after_the_gradient_of_the_next_one(frames, monkeypatch):
    done = []

    def logged(name, function):
        def call(*arguments):
            done.append(name)
            return function(*arguments)

        return call

    trainer = trained(frames, 1)
    read_later = trainer_module.read_later
    monkeypatch.setattr(
        trainer_module, "differentiate", logged("gradient", trainer_module.differentiate)
    )
    monkeypatch.setattr(
        trainer_module, "read_later", lambda tensor: logged("read", read_later(tensor))
    )
    assert len(trainer.history) == 1  # which reads it
    for _ in range(3):
        trainer.step()
    assert done == ["gradient", "gradient", "read", "gradient", "read"]
    assert len(trainer.history) == 4
    assert done[-1] == "read"


def test_a_gpu_keeps_environments_in_half_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30e9, 80e9))
    assert trainer_module.most_kept_bytes(torch.device("cuda")) == 15e9
    assert trainer_module.most_kept_bytes(torch.device("cpu")) == 2e9


def test_a_run_that_grows_beyond_its_start_goes_back_with_half_the_rate(frames, monkeypatch):
    monkeypatch.setattr("calcops.train.trainer.kWindow", 10)
    trainer = trained(frames, 20)
    good = [parameter.clone() for parameter in trainer.parameters.values()]
    rate = trainer.rate(0)
    update = trainer.update
    trainer.update = lambda rate: update(1e3 * rate)
    for _ in range(10):
        trainer.step()
    assert trainer.divergences == [30]
    assert all(map(torch.equal, trainer.parameters.values(), good))
    assert trainer.rate(0) == rate / 2


def test_a_frame_without_a_virial_is_no_error_of_zero(frames):
    model, data = beginner(frames)
    squares = squares_of(Squares(model), data)
    some = frames | {"virial": frames["virial"].clone()}
    some["virial"][1:] = np.nan
    data = Data(some, model)
    partial = squares_of(Squares(model), data)
    expected = squares[:1, 2].sqrt().item()
    assert errors_of(partial, data.counts)[2] == pytest.approx(expected, rel=1e-12)
    trainer = Trainer(model, data, steps=1, seed=0, batch=1000)
    trainer.step()
    assert trainer.history[0][2] ** 0.5 == pytest.approx(expected, rel=1e-12)


def test_the_error_of_the_virial_is_the_mean_of_six_components(frames):
    model, data = beginner(frames)
    (energy, _), _, (virial, errors) = Squares(model).differences(*data[:])
    assert virial.shape == (6, 6)
    full = frames["virial"] / 8
    assert_close(
        virial, torch.stack([full[:, int(a), int(b)] for a, b in "00 11 22 01 12 20".split()], 1)
    )


@pytest.mark.parametrize("name", ["energy", "force", "virial"])
def test_an_absent_label_adds_nothing_and_is_not_counted(name, frames):
    model, data = beginner(frames)
    column = ["energy", "force", "virial"].index(name)
    some = frames | {name: frames[name].clone()}
    some[name][2:] = np.nan
    absent = Data(some, model)
    ours, all_squares = (squares_of(Squares(model), own) for own in (absent, data))
    assert (ours[2:, column] == 0).all()
    errors = errors_of(ours, absent.counts)
    few = errors_of(all_squares[:2], data.counts[:2])
    assert errors[column] == pytest.approx(few[column], rel=1e-12)
    weights = loss_weights(some, 2)
    assert np.isfinite(weights).all()
    some[name][:] = np.nan
    assert loss_weights(some, 2)[column] == 0
    parameters = dict(Squares(model).named_parameters())
    batch = Data(some, model)[:3]
    _, gradients = differentiate(Squares(model), parameters, torch.ones(3).double(), *batch)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_frames_count_by_their_weights(frames):
    model, _ = beginner(frames)
    parameters = dict(Squares(model).named_parameters())
    factors = torch.ones(3).double()
    heavy = frames | {"weights": frames["weights"].clone()}
    heavy["weights"][0] = 0.0
    heavy["weights"][1] = 2.0
    _, ours = differentiate(Squares(model), parameters, factors, *Data(heavy, model)[:3])
    _, expected = differentiate(
        Squares(model), parameters, factors, *Data(frames, model)[[1, 1, 2]]
    )
    for gradient, other in zip(ours, expected):
        assert_close(gradient, other, 1e-10)


def test_a_matrix_without_a_gradient_is_not_moved_by_momentum():
    stack = torch.nn.Parameter(torch.ones(2, 3, 3).double())
    alone = torch.nn.Parameter(torch.ones(3, 3).double())
    muon = Muon([stack, alone], lr=0.1)
    gradient = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    stack.grad, alone.grad = gradient, gradient[0].clone()
    muon.step()
    before = stack.detach().clone(), alone.detach().clone()
    stack.grad[1] = 0.0
    alone.grad[:] = 0.0
    muon.step()
    assert not torch.equal(stack[0], before[0][0])
    assert torch.equal(stack[1], before[0][1])
    assert torch.equal(alone, before[1])


def test_decay_shortens_a_matrix_in_units_of_the_rate():
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    matrices = []
    for decay in (0.0, 0.5):
        parameter = torch.nn.Parameter(torch.arange(12.0).double().view(3, 4))
        parameter.grad = gradient
        Muon([parameter], lr=0.1, decay=decay).step()
        matrices.append(parameter.detach())
    expected = -0.1 * 0.5 * torch.arange(12.0).double().view(3, 4)
    torch.testing.assert_close(matrices[1] - matrices[0], expected)


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
    printed = python("-m", "calcops", "train", *words, "--folder", tmp_path)
    held_out, test = (float(value) for value in re.findall(r"force ([\d.]+) meV/A", printed)[-2:])
    assert held_out <= 50
    assert test <= 45
    assert float(re.search(r"([\d.]+) ms a step", printed)[1]) <= 30
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
