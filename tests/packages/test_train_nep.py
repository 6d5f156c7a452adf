"""calcops train --model nep: it learns, resumes, and writes a nep.txt with its results."""

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase.build import bulk  # noqa: E402
from ase.calculators.lj import LennardJones  # noqa: E402
from ase.io import write  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.nep import load  # noqa: E402
from calcops.nep.nep_file import kTriples, read  # noqa: E402
from calcops.nep.nep_file import write as write_nep  # noqa: E402
from calcops.potentials import package  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import loop, nep_parameters  # noqa: E402
from calcops.train.datasets import frames_of  # noqa: E402
from calcops.train.first_model import first_model  # noqa: E402
from calcops.train.trainer import Data, Squares, Trainer, differentiate  # noqa: E402
from structures import labelled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/packages/nep_models"
SMALL = "--model nep --cutoff 4 --angular-cutoff 3.5 --n-max 3 2 --basis-size 5 4".split()
SMALL += "--l-max 3 2 1 --neurons 6 --steps 20 --every 10".split()


def image(number, calculator=None, copies=1):
    """Return a disturbed crystal of copper and gold with labels, by EMT unless told otherwise."""
    random = np.random.default_rng(number)
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True).repeat((1, 1, copies))
    atoms.symbols[random.random(len(atoms)) < 0.5] = "Au"
    atoms.symbols[:2] = "Cu", "Au"
    atoms.rattle(0.1, rng=random)
    return labelled(atoms, calculator=calculator)


@pytest.fixture(scope="module")
def images():
    return [image(number, copies=1 + number % 2) for number in range(12)]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path, images):
    """Work in a folder with frames, and let archives stand for packages, which take a minute."""
    monkeypatch.chdir(tmp_path)
    write("frames.extxyz", images)
    monkeypatch.setattr(
        loop, "save", lambda model, path: package.save(model, path.with_suffix(".pt"))
    )


def run(*words):
    command.main([str(word) for word in words])


def model_of(images, *words):
    return first_model(images, command.parse(["frames.extxyz", *SMALL, *words]))[0]


def results_of(model, images):
    """Return energy, forces and virial of each frame."""
    model.most_neighbours = 100  # what Data asks for, and a Nep of a file does not know
    data = Data(frames_of(images, model.type_names), model)
    results = []
    for b in range(len(data)):
        types, *environment, _, _, _, _, _ = data[[b]]
        energy, _, force, virial, _ = model.evaluate(types, *environment, 0, False)
        results.append((energy, force, virial))
    return results


def assert_same(results, others, tolerance=1e-9):
    for frame, other in zip(results, others, strict=True):
        size = max(expected.abs().max().item() for expected in other)
        for result, expected in zip(frame, other, strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=tolerance * size)


def test_a_training_keeps_the_invariants_of_its_start(images):
    file = model_of(images, "--l-max", "4", "2", "0").file()
    dim = file.w0.shape[2] + 4 * file.c[1].shape[3]
    random = np.random.default_rng(0)
    w0 = random.normal(0, 0.1, (*file.w0.shape[:2], dim))
    scale = random.uniform(1, 2, dim)
    write_nep(replace(file, triples=kTriples, w0=w0, scale=scale), "start.txt")
    model, _ = first_model(images, command.parse(["frames.extxyz", "--start", "start.txt"]))
    model.write("nep.txt")
    assert load("nep.txt").file().triples == kTriples
    assert_same(results_of(load("nep.txt"), images), results_of(model, images))


@pytest.mark.parametrize("words", ["", "--l-max 4 0 0 --n-max 6 6", "--l-max 2 2 0"])
def test_the_file_has_the_results_of_the_model(words, images):
    model = model_of(images, *words.split())
    with torch.no_grad():  # parameters that no statistics make exact
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter += 0.1 * torch.sin(number + torch.arange(parameter.numel())).view_as(
                    parameter
                )
    model.write("nep.txt")
    assert_same(results_of(load("nep.txt"), images), results_of(model, images))


def test_the_gradients_are_those_of_finite_differences(images):
    model = model_of(images)
    data = Data(frames_of(images[:2], model.type_names), model)
    trainer = Trainer(model, data, steps=1, seed=0)
    factors = torch.tensor([1.0, 2.0, 3.0]).double()
    batch = data[:]
    _, gradients = differentiate(trainer.squares, trainer.parameters, factors, *batch)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"radial_c", "angular_c", "w0", "b0", "w1", "bias"}

    def loss():
        squares = trainer.squares(*batch).detach() * batch[-1]
        return (squares.sum(0) @ factors).item()

    for (name, parameter), gradient in zip(trainer.parameters.items(), gradients):
        direction = torch.sin(1 + torch.arange(parameter.numel())).view_as(parameter)
        step = 1e-5
        losses = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                parameter += sign * step * direction
            losses.append(loss())
        difference = (losses[0] - losses[1]) / (2 * step)
        along = (gradient * direction).sum().item()
        assert along == pytest.approx(difference, rel=1e-4, abs=1e-6), name


def test_a_training_learns_and_its_files_run_in_ase(images, capsys):
    run("frames.extxyz", *SMALL, "--steps", 150, "--every", 50, "--folder", "out")
    printed = capsys.readouterr().out
    assert "shortest pairs trained on: Cu-Cu" in printed
    assert "sel" not in printed
    history = np.array(torch.load("out/checkpoint.pt")["history"])
    assert history[-30:, 1].mean() < 0.2 * history[:10, 1].mean()
    assert {path.name for path in Path("out").iterdir()} == {
        *("checkpoint.pt", "log.csv", "loss.png", "parity.png", "nep.txt", "model.pt")
    }
    packaged = package.load("out/model.pt")
    from_file = load("out/nep.txt")
    assert packaged.shortest.shape == (2, 2)
    atoms = images[0].copy()
    results = []
    for potential in (packaged, from_file):
        atoms.calc = CalcOps(potential)
        results.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
    for result, other in zip(*results):
        np.testing.assert_allclose(result, other, rtol=1e-9, atol=1e-9)
    error = results[0][1] - images[0].get_forces()
    assert np.sqrt(np.square(error).mean()) < 0.5 * images[0].get_forces().std()


@pytest.mark.parametrize("moment", ["in a step", "in a record"])
def test_ctrl_c_waits_for_the_end_of_a_step_and_its_record(moment, monkeypatch):
    run("frames.extxyz", *SMALL, "--folder", "whole")
    owner, name, steps = {
        "in a step": (Trainer, "update", 13),
        "in a record": (loop.Run, "write_model", 10),
    }[moment]
    method = getattr(owner, name)
    calls = []

    def stopped(self, *words):
        calls.append(name)
        if len(calls) == (13 if name == "update" else 1):
            os.kill(os.getpid(), signal.SIGINT)
        method(self, *words)

    monkeypatch.setattr(owner, name, stopped)
    with pytest.raises(SystemExit, match=f"stopped after {steps} of 20 steps"):
        run("frames.extxyz", *SMALL, "--folder", "stopped")
    monkeypatch.setattr(owner, name, method)
    run("frames.extxyz", *SMALL, "--folder", "stopped")
    ours, expected = (torch.load(f"{folder}/checkpoint.pt") for folder in ("stopped", "whole"))
    assert ours["history"] == expected["history"]
    assert ours["records"] == expected["records"]
    assert Path("stopped/nep.txt").read_bytes() == Path("whole/nep.txt").read_bytes()


def test_a_second_ctrl_c_does_not_stop_the_checkpoint_of_the_first(monkeypatch):
    save = Trainer.save

    def interrupted_save(trainer, path):
        os.kill(os.getpid(), signal.SIGINT)
        save(trainer, path)

    def stop(trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", interrupted_save)
    monkeypatch.setattr(Trainer, "step", stop)
    with pytest.raises(SystemExit, match="stopped after 0 of 20 steps"):
        run("frames.extxyz", *SMALL, "--folder", "out")
    assert Path("out/checkpoint.pt").exists()


def test_the_matrices_of_nets_decay_and_radial_functions_do_not(images):
    model = model_of(images)
    trainer = Trainer(model, Data(frames_of(images, model.type_names), model), steps=1, seed=0)
    decays = {
        id(parameter): group["decay"]
        for group in trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    assert decays[id(model.hidden)] == model.decay > 0
    assert decays[id(model.radial_functions)] == decays[id(model.angular_functions)] == 0


def test_a_step_that_fails_draws_its_frames_again(images, monkeypatch):
    model = model_of(images)
    trainer = Trainer(
        model, Data(frames_of(images, model.type_names), model), steps=1, seed=0, batch=8
    )
    trainer.step()
    state = trainer.generator.get_state()
    queue = list(trainer.queue)

    def fail(*words):
        raise RuntimeError("another process has gone")

    monkeypatch.setattr("calcops.train.trainer.differentiate", fail)
    with pytest.raises(RuntimeError, match="has gone"):
        trainer.step()
    assert torch.equal(trainer.generator.get_state(), state)
    assert trainer.queue == queue


def test_a_training_that_was_stopped_before_a_record_can_be_finished(monkeypatch):
    step = Trainer.step

    def stop(trainer):
        if len(trainer.history) == 7:
            raise KeyboardInterrupt
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(
            SystemExit, match="stopped after 7 of 20 steps; the same command resumes"
        ):
            run("frames.extxyz", *SMALL, "--folder", "out")
    run("frames.extxyz", *SMALL, "--folder", "out", "--steps", 7)
    assert [record[0] for record in torch.load("out/checkpoint.pt")["records"]] == [7]
    assert Path("out/nep.txt").exists()


def test_a_kill_while_the_best_model_is_written_leaves_the_old_one(monkeypatch):
    run("frames.extxyz", *SMALL, "--folder", "out")
    before = Path("out/nep.txt").read_bytes()

    def write_half(model, path):
        Path(path).write_text("nep4 2 Cu")
        raise OSError("killed")

    monkeypatch.setattr(nep_parameters.TrainedNep, "write", write_half)
    with pytest.raises(OSError, match="killed"):
        run("frames.extxyz", *SMALL, "--folder", "out", "--steps", 40)
    assert Path("out/nep.txt").read_bytes() == before


def test_perfect_crystals_give_no_forces():
    images = [labelled(bulk("Cu", a=a, cubic=True)) for a in (3.5, 3.6, 3.7, 3.8)]
    write("perfect.extxyz", images)
    words = [*SMALL, "--l-max", "3", "2", "1"]
    model = first_model(images, command.parse(["perfect.extxyz", *words]))[0]
    for _, force, _ in results_of(model, images):
        assert force.abs().max() < 1e-6


def test_the_smallest_nep_trains():
    words = "--neurons 1 --n-max 0 0 --basis-size 0 0 --l-max 1 0 0 --steps 2".split()
    run("frames.extxyz", *SMALL, *words, "--folder", "out")
    assert Path("out/nep.txt").exists()


def test_cutoffs_without_pairs_are_refused(images):
    with pytest.raises(ValueError, match="neighbours within the angular cutoff of 1 A, got none"):
        model_of(images, "--angular-cutoff", "1")


@pytest.mark.parametrize(
    "setting, message",
    {
        "n_max = 3": "--n-max: expected 2 arguments",
        "n_max = [3.5, 3]": "--n-max: invalid int value: '3.5'",
        "n_max = [3, 3, 3]": "expected fewer values of n_max, got .3, 3, 3.",
        "neurons = 4.5": "--neurons: invalid int value",
        "weights = [1, 2]": "--weights: expected 3 arguments",
        "rates = [0.1]": "--rates: expected 2 arguments",
        "cutoff = true": "--cutoff: invalid float value",
        "tabulated = 'no'": "expected tabulated of true or false, got 'no'",
        "device = 'tpu'": "--device: invalid choice",
        "neuron = 4": "expected options, got neuron",
    }.items(),
)
def test_wrong_settings_are_refused(setting, message):
    Path("settings.toml").write_text(f"frames = ['frames.extxyz']\nmodel = 'nep'\n{setting}\n")
    with pytest.raises(ValueError, match=f"settings.toml: .*{message}"):
        command.parse(["--settings", "settings.toml"])


def test_a_setting_of_one_path_needs_no_list():
    Path("settings.toml").write_text("frames = 'frames.extxyz'\ntest = 'frames.extxyz'\n")
    options = command.parse(["--settings", "settings.toml"])
    assert options.frames == options.test == ["frames.extxyz"]


def start_of(name, types, zbl=None):
    """Return a file with the numbers of one of MODELS, for other elements."""
    file = read(MODELS / f"{name}.txt")
    chosen = file.of_types(file.type_names[: len(types)])
    write_nep(replace(chosen, type_names=types, zbl=zbl), "start.txt")
    return read("start.txt")


@pytest.mark.parametrize(
    "name, zbl", [("nep4_types", None), ("nep4_types", (1, 3)), ("nep3", None)]
)
def test_fine_tuning_starts_with_the_results_of_the_file(name, zbl):
    start_of(name, ["Au", "Cu"], zbl)
    before = load("start.txt")
    images = [image(number, CalcOps(before)) for number in range(4)]
    model, _ = first_model(images, command.parse(["frames.extxyz", "--start", "start.txt"]))
    assert_same(results_of(model, images), results_of(before, images), 1e-8)
    squares = Squares(model)(*Data(frames_of(images, model.type_names), model)[:])
    assert squares.max() < 1e-14
    model.write("again.txt")
    after = load("again.txt")
    assert_same(results_of(after, images), results_of(before, images), 1e-8)
    model.write("twice.txt")  # and a second start does not add a neuron again
    again, _ = first_model(images, command.parse(["frames.extxyz", "--start", "again.txt"]))
    assert len(again.file().b0[0]) == len(model.file().b0[0])


@pytest.mark.parametrize("name", ["nep4_types", "nep3"])
def test_an_element_that_the_frames_lack_stays_as_it_was(name, images):
    types = ["Cu", "Au", "Ag"] if name == "nep4_types" else ["Cu", "Au"]
    file = start_of(name, types, (1, 3))
    if name == "nep3":  # one net, but coefficients for each pair
        images = [labelled(bulk("Cu", a=a, cubic=True)) for a in (3.5, 3.6, 3.7)]
    absent = len(types) - 1
    model, _ = first_model(images, command.parse(["frames.extxyz", "--start", "start.txt"]))
    assert model.type_names == types
    frames = frames_of(images, types)
    trainer = Trainer(model, Data(frames, model), steps=1, seed=0)
    batch = trainer.data[:]
    _, gradients = differentiate(
        trainer.squares, trainer.parameters, torch.ones(3).double(), *batch
    )
    pairs = torch.arange(len(types) ** 2).view(len(types), -1)
    of_absent = torch.cat([pairs[absent], pairs[:, absent]])
    for parameter, gradient in zip(trainer.parameters, gradients):
        own = of_absent if "functions" in parameter else [absent]
        if len(gradient) > absent:
            assert (gradient[own] == 0).all(), parameter
            gradient[own] = 1
        assert (gradient != 0).any(), parameter

    begin = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trainer.steps = 3
    for _ in range(2):
        trainer.step()
    for word, parameter in trainer.parameters.items():
        own = of_absent if "functions" in word else [absent]
        if len(parameter) > absent:
            assert torch.equal(parameter[own], begin[word][own]), word
        assert not torch.equal(parameter, begin[word]), word

    written = model.file()
    assert written.zbl == file.zbl
    if name == "nep4_types":
        assert written.bias[absent] == file.bias[absent]
        assert written.bias[0] != file.bias[0]
    for c, before in zip(written.c, file.c):
        np.testing.assert_allclose(c[absent], before[absent], rtol=1e-9, atol=1e-12)
    # Nothing is known about the pairs of an element that the frames lack.
    assert (model.shortest[absent] == 0).all()
    assert 2 < model.shortest[0, 0] < 3
    atoms = bulk(types[absent], a=3.6)
    model.write("nep.txt")
    atoms.calc = CalcOps(model.from_file("nep.txt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        atoms.get_potential_energy()


def test_one_net_of_all_types_has_one_energy(images):
    start_of("nep3", ["Au", "Cu"])
    model, _ = first_model(images, command.parse(["frames.extxyz", "--start", "start.txt"]))
    before = model.energies.item()
    types = torch.tensor([[0, 1, 1, -1], [1, 1, 1, 1]])
    model.shift(types, torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert model.energies.item() == pytest.approx(before + 0.5)


def test_statistics_have_no_pairs_through_an_open_side(images):
    models = []
    for height, is_periodic in ((None, False), (30, True)):
        slabs = [image.copy() for image in images]
        for atoms, labelled_atoms in zip(slabs, images):
            atoms.pbc = True, True, is_periodic
            if height:
                atoms.cell[2, 2] = height
            atoms.calc = labelled_atoms.calc
        models.append(model_of(slabs))
    for name in ("mean", "deviation"):
        open_side, vacuum = (getattr(model, name) for model in models)
        torch.testing.assert_close(open_side, vacuum, rtol=1e-4, atol=1e-6)
    assert models[0].neighbours == models[1].neighbours


def test_cutoffs_and_invariants_are_part_of_the_identity(images):
    words = "", "--angular-cutoff 3.4", "--cutoff 4.1", "--l-max 3 2 0", "--l-max 3 0 1"
    settings = [model_of(images, *own.split()).settings() for own in words]
    for number, own in enumerate(settings):
        assert own not in settings[:number]


def test_sizes_that_gpumd_cannot_run_are_refused(images):
    model = model_of(images, "--neurons", "119")
    model.write("nep.txt")
    assert "ANN 120 0\n" in Path("nep.txt").read_text()
    for words, message in {
        "--neurons 120": "at most 120 neurons, as GPUMD and NEP_CPU run, got 121",
        "--n-max 4 9": "n_max of at most 12 8, as GPUMD and NEP_CPU run, got 4 9",
        "--basis-size 17 4": "basis_size of at most 16 12, as GPUMD and NEP_CPU run, got 17 4",
    }.items():
        with pytest.raises(ValueError, match=message):
            model_of(images, *words.split())


def test_the_head_has_room_for_the_neighbours_in_the_frames(images, monkeypatch):
    dense = labelled(bulk("C", a=3.57, cubic=True), calculator=LennardJones())
    model = model_of([dense], "--cutoff", "7")
    assert model.file().neighbours[0] > 274  # atoms within 7 A in diamond
    monkeypatch.setattr(nep_parameters, "kMostNeighbours", 273)
    with pytest.raises(ValueError, match="expected at most 273 neighbours of an atom, .*, got 274"):
        model_of([dense], "--cutoff", "7")


@pytest.mark.parametrize(
    "words, message",
    {
        "--model nep --start model.npz": "expected a nep.txt of --start with --model nep",
        "--model deep-potential --start nep.txt": "expected a Deep Potential of --start",
        "--start nep.txt --cutoff 5": "expected no --cutoff with --start, which gives the model",
        "--start nep.txt --n-max 3 3": "expected no --n-max with --start",
        "--model nep --embedding 4 8": "expected no --embedding with --model nep",
        "--neurons 8": "expected no --neurons with --model deep-potential",
        "--model nep --tabulated": "expected no --tabulated with --model nep",
        "--model nep --cutoff 4 --angular-cutoff 5": "expected 0 < --angular-cutoff <= 4, got 5",
        "--model nep --l-max 5 0 0": "expected --l-max from 1 to 4",
        "--model nep --l-max 1 2 0": "expected --l-max with 0 or 2 for q_222",
        "--model nep --n-max -1 4": "expected --n-max of two numbers from 0 on",
        "--model nep --cutoff inf": "expected a finite --cutoff",
        "--model nep --rates nan 1": "expected --rates from 0 on",
        "--model nep --weights -1 1 1": "expected --weights from 0 on",
        "--model nep --seed -1": "expected --seed from 0 on, got -1",
        "--model nep --neurons 0": "expected --neurons > 0, got 0",
    }.items(),
)
def test_wrong_options_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        command.parse(["frames.extxyz", *words.split()])


def test_a_start_without_the_elements_of_the_frames_is_refused():
    with pytest.raises(ValueError, match="expected Si, got Au, Cu in frames.extxyz"):
        run("frames.extxyz", "--start", MODELS / "nep4.txt")
    Path("bad.txt").write_text("not a model\n")
    with pytest.raises(ValueError, match="bad.txt, line 1: expected nep3, nep3_zbl"):
        run("frames.extxyz", "--start", "bad.txt")
    with pytest.raises(ValueError, match="expected a model, got none.txt"):
        run("frames.extxyz", "--start", "none.txt")


def test_a_checkpoint_of_another_model_is_refused():
    run("frames.extxyz", *SMALL, "--folder", "out")
    with pytest.raises(ValueError, match="its --neurons is 6, not 5"):
        run("frames.extxyz", *SMALL, "--folder", "out", "--neurons", 5)
    with pytest.raises(ValueError, match="its --model is nep, not deep-potential"):
        run("frames.extxyz", "--cutoff", 4, "--steps", 20, "--folder", "out")
