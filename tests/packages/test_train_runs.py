"""python -m calcops.train: which checkpoint a command goes on from, and what it says at the end."""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.calculators.emt import EMT  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.io import write  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import training  # noqa: E402
from calcops.train.datasets import frames_of  # noqa: E402
from calcops.train.deep_potential import load_npz  # noqa: E402
from calcops.train.first_model import first_model  # noqa: E402
from calcops.train.trainer import loss_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--steps 4 --every 2 --cutoff 3.5 --embedding 4 8 --axis 2 --fitting 6 6".split()


def image(number, a=3.8, symbols="", **info):
    """Return four atoms of copper and perhaps others, with labels by EMT."""
    atoms = bulk("Cu", "fcc", a=a, cubic=True)
    atoms.symbols[: len(symbols) // 2] = re.findall("..", symbols)
    atoms.rattle(0.1, seed=number)
    atoms.calc = EMT()
    labels = {name: atoms.calc.get_property(name, atoms) for name in ("energy", "forces", "stress")}
    atoms.calc = SinglePointCalculator(atoms, **labels)
    atoms.info |= info
    return atoms


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Work in a folder of the test, and without packages, which take ten seconds."""
    monkeypatch.setattr(training, "save", lambda model, path: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Return a function that runs the command, and returns what it printed."""

    def train(*words):
        frames, *options = map(str, words)
        small = SMALL[:4] if "--start" in options else SMALL
        command.main([frames, *small, *options])
        return capsys.readouterr().out

    return train


def steps_of(folder):
    return len(torch.load(f"{folder}/checkpoint.pt")["history"])


def test_a_finished_training_says_that_there_is_nothing_to_do(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    assert "nothing to do" not in run("frames.extxyz")
    words = "nothing to do: trained/frames/checkpoint.pt, which has 4 of 4 steps"
    assert words in run("frames.extxyz")
    again = run("frames.extxyz", "--tabulated")
    assert words in again, "options of the package alone may differ"


def test_the_default_folder_belongs_to_the_frames(run):
    write("one.extxyz", [image(number) for number in range(4)])
    write("two.extxyz", [image(number) for number in range(4, 8)])
    run("one.extxyz")
    assert "nothing to do" not in run("two.extxyz")
    assert steps_of("trained/one") == steps_of("trained/two") == 4
    Path("data.of/water.v2").mkdir(parents=True)
    assert command.parse(["data.of/water.v2/."]).folder == Path("trained/water.v2")


def change_frames(images):
    images[0].positions += 0.01


def change_labels(images):
    images[0].calc.results["energy"] += 1e-3


@pytest.mark.parametrize(
    "change, what", [(change_frames, "frames"), (change_labels, "labels")], ids=["frames", "labels"]
)
def test_a_checkpoint_of_other_frames_is_refused(change, what, run):
    images = [image(number) for number in range(5)]
    write("frames.extxyz", images)
    write("held.extxyz", images[:2])
    run("frames.extxyz", "--validate", "held.extxyz")
    change(images)
    write("frames.extxyz", images)
    message = f"cannot go on from .*checkpoint.pt: it has other {what}; take another --folder"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--validate", "held.extxyz")
    assert steps_of("trained/frames") == 4


def test_a_checkpoint_of_other_frames_held_out_is_refused(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    write("held.extxyz", [image(number) for number in (5, 6)])
    run("frames.extxyz", "--validate", "held.extxyz")
    write("held.extxyz", [image(number) for number in (5, 7)])
    with pytest.raises(ValueError, match="it has other held-out frames"):
        run("frames.extxyz", "--validate", "held.extxyz")


@pytest.mark.parametrize(
    "words, message",
    {
        "--batch 2": "its --batch is 1, not 2",
        "--rates 0.1 0.01": r"its --rates is \[0.01, 0.0001\], not \[0.1, 0.01\]",
        "--weights 1 2 3": r"its --weights is None, not \[1.0, 2.0, 3.0\]",
        "--seed 1": "its --seed is 0, not 1",
        "--start model.npz": "its --start is False, not True",
        "--cutoff 3.4": "its cutoff is 3.5, not 3.4",
        "--sel 90": r"its sel is \[\d+\], not \[90\]",
    }.items(),
)
def test_a_checkpoint_of_other_options_is_refused(words, message, run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz", "--folder", "out")
    if "--start" in words:
        Path("out/model.npz").rename("model.npz")
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--folder", "out", *words.split())


def test_a_checkpoint_of_another_start_is_refused(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz", "--folder", "one")
    run("frames.extxyz", "--folder", "two", "--seed", 1)
    run("frames.extxyz", "--folder", "out", "--start", "one/model.npz")
    with pytest.raises(ValueError, match="it has other weights of --start"):
        run("frames.extxyz", "--folder", "out", "--start", "two/model.npz")


def test_a_start_is_not_overwritten_by_its_training(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz")
    before = Path("trained/frames/model.npz").read_bytes()
    message = "expected another --folder than that of --start, got trained/frames"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--start", "trained/frames/model.npz")
    assert Path("trained/frames/model.npz").read_bytes() == before


def test_an_old_model_in_the_folder_is_not_taken_for_the_best_one(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz")
    Path("trained/frames/checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="expected errors that are numbers"):
        run("frames.extxyz", "--rates", 1e200, 1e200)


@pytest.mark.parametrize(
    "words",
    ["--cutoff 3.5", "--smooth 2.4", "--sel 60", "--embedding 4 8", "--axis 2", "--fitting 6 6"],
)
def test_a_start_with_options_of_the_model_is_refused(words, tmp_path):
    option, *_ = words.split()
    message = f"expected no {option} with --start, which gives the model"
    with pytest.raises(ValueError, match=message):
        command.parse(["frames", "--start", "model.npz", *words.split()])
    settings = tmp_path / "settings.toml"
    settings.write_text('start = "model.npz"\nfitting = [6, 6]\n')
    with pytest.raises(ValueError, match="expected no .*--fitting with --start"):
        command.parse(["frames", "--settings", str(settings), *words.split()])


def test_two_trainings_at_once_in_a_folder_are_refused(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    Path("out").mkdir()
    descriptor = os.open("out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    message = "another training is at work in out: wait for it, or take another --folder"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--folder", "out")
    assert not any(Path("out").iterdir())
    os.close(descriptor)
    run("frames.extxyz", "--folder", "out")
    assert "nothing to do" in run("frames.extxyz", "--folder", "out")


def test_a_training_keeps_others_out_of_its_folder_until_it_ends(run, monkeypatch):
    """The second command is one of its own, since locks of one process might not exclude it."""
    write("frames.extxyz", [image(number) for number in range(5)])
    code = (
        "import pathlib, sys; from calcops.train.training import locked\n"
        "with locked(pathlib.Path('trained/frames')): pass"
    )
    others = []

    def record(run, step, record=training.Run.record):
        others.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True))
        return record(run, step)

    monkeypatch.setattr(training.Run, "record", record)
    run("frames.extxyz")
    assert all("another training is at work in trained/frames" in done.stderr for done in others)
    assert len(others) == 2
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_that_cannot_be_made_is_named(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    with pytest.raises(ValueError, match="cannot write to --folder frames.extxyz: File exists"):
        run("frames.extxyz", "--folder", "frames.extxyz")


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_training_whose_log_is_gone_goes_on_and_writes_it_anew(is_finished, run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz", "--folder", "whole")
    run("frames.extxyz", "--folder", "out", *([] if is_finished else ["--steps", 2]))
    log = Path("out/log.csv")
    first = log.read_text()
    log.unlink()
    assert "held-out frames: energy" in run("frames.extxyz", "--folder", "out")
    assert log.read_text().startswith(first)
    assert log.read_text().count("\n") == 3


def test_a_worse_model_does_not_replace_the_best_one_whose_log_is_gone(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz", "--folder", "out", "--steps", 2)
    best = Path("out/model.npz").read_bytes()
    Path("out/log.csv").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Squares, "errors", lambda squares, numbers=None: [1e3, 1e3, 1e3])
        run("frames.extxyz", "--folder", "out")
    assert Path("out/model.npz").read_bytes() == best


def test_a_checkpoint_whose_best_model_is_gone_is_refused(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz")
    Path("trained/frames/model.npz").unlink()
    message = "expected trained/frames/model.npz, the best model until now, beside .*checkpoint.pt"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz")


def test_a_checkpoint_without_an_identity_is_refused(run):
    write("frames.extxyz", [image(number) for number in range(5)])
    run("frames.extxyz")
    path = "trained/frames/checkpoint.pt"
    state = torch.load(path)
    del state["settings"]["frames"]
    torch.save(state, path)
    with pytest.raises(ValueError, match="another version wrote it, without its frames"):
        run("frames.extxyz")


def test_the_last_lines_have_pairs_sel_and_errors_by_config_type(run):
    kinds = ["bulk", "liquid", "bulk"]
    images = [image(n, symbols="Au", config_type=kinds[n % 3]) for n in range(6)]
    write("frames.extxyz", images)
    printed = run("frames.extxyz", "--test", "frames.extxyz")
    lines = printed[printed.index("test frames:") :].splitlines()
    assert re.match(r"  bulk \(4\): energy .* meV/atom, force .* meV/A, virial", lines[1])
    assert lines[2].startswith("  liquid (2): energy")
    assert re.fullmatch(
        r"shortest pairs trained on: Cu-Cu 2.\d+ A, Cu-Au 2.\d+ A, Au-Au \d\.?\d* A|"
        r"shortest pairs trained on: Cu-Cu 2.\d+ A, Cu-Au 2.\d+ A, Au-Au none",
        lines[3],
    )
    assert re.fullmatch(r"sel, the most neighbours that count: Cu \d+, Au \d+", lines[4])
    assert "config_type" not in printed


def test_elements_with_few_pairs_are_named(run):
    images = [image(number) for number in range(6)]
    images[2].symbols[0] = "Au"
    write("frames.extxyz", images)
    printed = run("frames.extxyz")
    assert re.search("few pairs to learn from, within 3.5 A: Cu-Au 12, Au-Au 0", printed)


def options_for(*words):
    return command.parse(["frames", *SMALL, *words])


def test_statistics_do_not_depend_on_the_order_of_frames(tmp_path):
    """The second element comes after more frames than a sample of the first ones would have."""
    copper = [image(number) for number in range(120)]
    gold = [image(number, a=4.1, symbols="AuAuAuAu") for number in range(3)]
    sorted_model, _ = first_model([*copper, *gold], options_for())
    mixed_model, _ = first_model([*gold, *copper], options_for())
    assert sorted_model.davg[1, 1, 0] > 0.01
    torch.testing.assert_close(sorted_model.davg, mixed_model.davg)
    torch.testing.assert_close(sorted_model.dstd, mixed_model.dstd)
    for one, other in zip(sorted_model.emb, mixed_model.emb):
        torch.testing.assert_close(one[0].b, other[0].b)


def test_nets_tell_the_shortest_distances_apart_although_most_slots_are_empty():
    """A dense frame among many loose ones: x of its pairs is far beyond 2.5."""
    images = [*(image(number, a=4.6) for number in range(30)), image(99, a=2.9)]
    model, pairs = first_model(images, options_for())
    shortest = pairs.shortest[0, 0]
    s = torch.tensor([1 / shortest, 1 / (1.05 * shortest)]).double()
    x = (s - model.davg[0, 0, 0]) / model.dstd[0, 0, 0]
    assert x[0] > 3
    near, farther = model.emb[0][0](x.unsqueeze(-1), 0)
    assert (near - farther).abs().max() > 0.05


def test_sel_has_a_margin_and_does_not_change_the_size_of_the_descriptor():
    images = [image(number) for number in range(6)]
    model, pairs = first_model(images, options_for())
    assert model.sel[0] >= 1.5 * pairs.most[0]
    tight, _ = first_model(images, options_for("--sel", str(pairs.most[0])))
    ratio = model.dstd / tight.dstd
    torch.testing.assert_close(ratio, torch.full_like(ratio, tight.sel[0] / model.sel[0]))


@pytest.mark.parametrize("part", ["train", "held_out", "test"])
def test_an_overrun_sel_is_said_with_the_frame(part, run):
    loose = [image(number, a=4.4) for number in range(4)]
    write("loose.extxyz", loose)
    write("dense.extxyz", [*loose, image(9, a=3.4)])
    files = {name: "dense" if name == part else "loose" for name in ("train", "held_out", "test")}
    words = [f"{files['train']}.extxyz", "--validate", f"{files['held_out']}.extxyz"]
    printed = run(*words, "--test", f"{files['test']}.extxyz", "--sel", 14)
    pattern = r"warning: \d\d neighbours Cu of an atom in dense.extxyz, frame 4, and sel is 14"
    assert len(re.findall(pattern, printed)) == 1
    assert "warning" not in run(*words[:1], "--folder", "roomy", "--sel", 90)


def test_weights_of_the_loss_follow_the_spread_of_the_labels():
    images = [image(number) for number in range(6)]
    frames = frames_of(images, ["Cu"])
    energy, force, virial = loss_weights(frames, 1)
    frames["force"] *= 0.5
    frames["virial"] *= 2
    again = loss_weights(frames, 1)
    np.testing.assert_allclose(again, [energy / 4, force, virial / 16])
    frames["virial"] *= np.nan
    assert loss_weights(frames, 1)[2] == 0
    # One frame, whose energy does not vary: the force still counts.
    one = {key: value[:1] for key, value in frames.items()}
    assert loss_weights(one, 1)[0] <= 1e3


def test_perfect_crystals_without_forces_have_weights_of_the_loss():
    images = [image(0, a=a) for a in (3.6, 3.7, 3.8, 3.9)]
    for atoms in images:
        atoms.calc.results["forces"] *= 0
    assert min(loss_weights(frames_of(images, ["Cu"]), 1)) > 1e-4


def test_lone_atoms_do_not_change_the_weights_of_the_loss():
    images = [image(number) for number in range(6)]
    lone = Atoms("Cu")
    lone.calc = SinglePointCalculator(lone, energy=100.0)
    expected = loss_weights(frames_of(images, ["Cu"]), 1)
    np.testing.assert_allclose(loss_weights(frames_of([lone, *images], ["Cu"]), 1), expected)
    assert np.isfinite(loss_weights(frames_of([lone], ["Cu"]), 1)).all()


def test_frames_without_any_pair_are_refused(run):
    write("frames.extxyz", [image(number) for number in range(4)])
    with pytest.raises(ValueError, match="expected neighbours within --cutoff 1.5 A, got none"):
        command.main(["frames.extxyz", *SMALL, "--cutoff", "1.5"])


def test_a_start_keeps_the_shortest_pairs_that_it_was_trained_on(run):
    write("dense.extxyz", [image(number, a=3.5) for number in range(4)])
    write("loose.extxyz", [image(number, a=4.0) for number in range(4)])
    run("dense.extxyz")
    run("loose.extxyz", "--start", "trained/dense/model.npz")
    run("loose.extxyz", "--folder", "new")
    dense, tuned, new = (
        load_npz(f"{folder}/model.npz").shortest.item()
        for folder in ("trained/dense", "trained/loose", "new")
    )
    assert dense == tuned < new
