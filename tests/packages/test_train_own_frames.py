"""python -m calcops.train: frames of other sizes and elements, files of DeePMD-kit, settings, an
interrupted run, fine-tuning, and error messages."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase.build import bulk  # noqa: E402
from ase.calculators.emt import EMT  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.io import write  # noqa: E402
from ase.stress import voigt_6_to_full_3x3_stress  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import training  # noqa: E402
from calcops.train.datasets import elements_of, frames_of, read  # noqa: E402
from calcops.train.deep_potential import load_npz  # noqa: E402
from calcops.train.first_model import first_model  # noqa: E402
from calcops.train.trainer import Data, MeanSquares, Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--steps 20 --every 10 --cutoff 3.5 --embedding 4 8 --axis 2 --fitting 6 6".split()


def image(number, copies=(1, 1, 1), stress=True):
    """Return a frame of copper and gold with labels by EMT."""
    random = np.random.default_rng(number)
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True).repeat(copies)
    atoms.symbols[1] = "Au"
    atoms.rattle(0.1, rng=random)
    atoms.calc = EMT()
    labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    if stress:
        labels["stress"] = atoms.get_stress()
    atoms.calc = SinglePointCalculator(atoms, **labels)
    return atoms


@pytest.fixture(scope="module")
def images():
    sizes = [(1, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 1)]
    return [image(i, sizes[i % 4], stress=i % 3 > 0) for i in range(12)]


@pytest.fixture
def frames(images, tmp_path):
    write(tmp_path / "frames.extxyz", images)
    return tmp_path / "frames.extxyz"


@pytest.fixture(autouse=True)
def without_package(request, monkeypatch):
    """Skip the package, which takes ten seconds, except in the test marked `packaged`."""
    if "packaged" not in request.keywords:
        monkeypatch.setattr(training, "save", lambda model, path: None)


def run(*words):
    command.main([str(word) for word in words])


def test_padded_frames_have_the_errors_that_they_have_alone(images, tmp_path):
    options = command.parse(["frames", *SMALL])
    model, _ = first_model(read_back(images, tmp_path), options)
    frames = frames_of(images, model.type_names)
    assert frames["types"].shape == (12, 16)
    assert (frames["types"] < 0).any()
    squares = MeanSquares(model)
    together = squares(*Data(frames, model)[:])
    alone = [squares(*Data(frames_of([one], model.type_names), model)[:]) for one in images]
    torch.testing.assert_close(together, torch.stack(alone).mean(0), rtol=1e-10, atol=0)
    assert frames["virial"].isnan().any()
    assert together.isfinite().all()


def read_back(images, folder):
    write(folder / "back.extxyz", images)
    return read([folder / "back.extxyz"])


def test_environments_computed_for_each_batch_give_the_same_errors(images, tmp_path, monkeypatch):
    model, _ = first_model(read_back(images, tmp_path), command.parse(["frames", *SMALL]))
    frames = frames_of(images, model.type_names)
    kept = MeanSquares(model)(*Data(frames, model)[3:7])
    monkeypatch.setattr("calcops.train.trainer.kKeptBytes", 0)
    data = Data(frames, model)
    assert data.tensors is None
    torch.testing.assert_close(MeanSquares(model)(*data[3:7]), kept, rtol=1e-12, atol=0)


def test_a_stopped_training_writes_its_files_and_goes_on_bit_for_bit(frames, tmp_path, capsys):
    run(frames, "--folder", tmp_path / "whole", *SMALL)
    out = capsys.readouterr().out
    assert "11 frames to train on, 1 held out; neighbours within 3.5 A: Cu up to" in out
    assert "pair_coeff * * Cu Au" in out
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {"checkpoint.pt", "log.csv", "model.npz", "loss.png", "parity.png"}
    run(frames, "--folder", tmp_path / "parts", *SMALL, "--steps", 10)
    first = (tmp_path / "parts/log.csv").read_text()
    run(frames, "--folder", tmp_path / "parts", *SMALL, "--steps", 20)
    assert (tmp_path / "parts/log.csv").read_text().startswith(first)
    again = tmp_path / "stopped"

    class Stop:
        steps = 0

        def __call__(self, trainer, step=Trainer.step):
            self.steps += 1
            if self.steps == 8:
                raise KeyboardInterrupt
            step(trainer)

    with pytest.MonkeyPatch.context() as patch:
        stop = Stop()
        patch.setattr(Trainer, "step", lambda trainer: stop(trainer))
        with pytest.raises(SystemExit, match="stopped after 7 of 20 steps; the same command goes"):
            run(frames, "--folder", again, *SMALL)
    run(frames, "--folder", again, *SMALL)
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "stopped")]
    assert states[0]["history"] == states[1]["history"]


def test_fine_tuning_begins_with_the_model_and_the_energies_of_the_frames(frames, tmp_path):
    run(frames, "--folder", tmp_path / "first", *SMALL)
    shifted = [image(i) for i in range(6)]
    for atoms in shifted:
        atoms.calc.results["energy"] += 3.0 * len(atoms)
    write(tmp_path / "shifted.extxyz", shifted)
    options = command.parse(["frames", "--start", str(tmp_path / "first/model.npz")])
    shifted = read([tmp_path / "shifted.extxyz"])
    model, _ = first_model(shifted, options)
    before = load_npz(tmp_path / "first/model.npz")
    assert torch.equal(model.fit[0][0].w, before.fit[0][0].w)

    def residual(model):
        types, *environment, energy, _, _ = Data(frames_of(shifted, model.type_names), model)[:]
        return (energy - model.evaluate(types, *environment, 0, False)[0]).mean()

    assert residual(before) > 4.0
    assert residual(model) == pytest.approx(0, abs=1e-9)


def test_folders_of_deepmd_kit_have_the_same_frames(images, tmp_path):
    some = [one for one in images if len(one) == 4 and "stress" in one.calc.results]
    part = tmp_path / "data/set.000"
    part.mkdir(parents=True)
    names = ["Au", "Cu"]
    types = [names.index(symbol) for symbol in some[0].symbols]
    (tmp_path / "data/type.raw").write_text("\n".join(map(str, types)))
    (tmp_path / "data/type_map.raw").write_text("\n".join(names))
    virials = [-one.get_volume() * one.get_stress(voigt=False) for one in some]
    np.save(part / "coord.npy", [one.positions.ravel() for one in some])
    np.save(part / "box.npy", [one.cell.array.ravel() for one in some])
    np.save(part / "energy.npy", [one.get_potential_energy() for one in some])
    np.save(part / "force.npy", [one.get_forces().ravel() for one in some])
    np.save(part / "virial.npy", [virial.ravel() for virial in virials])
    images_of_folder = read([tmp_path / "data"])
    assert elements_of(images_of_folder) == ["Cu", "Au"]
    ours = frames_of(images_of_folder, ["Cu", "Au"])
    expected = frames_of(some, ["Cu", "Au"])
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12)


def with_other_names(atoms, label):
    """Return a frame with its labels under other names. `label` is stress or virial."""
    results = atoms.calc.results
    atoms = atoms.copy()
    atoms.info["REF_energy"] = results["energy"]
    atoms.arrays["REF_forces"] = results["forces"]
    full = voigt_6_to_full_3x3_stress(results["stress"])
    atoms.info[f"REF_{label}"] = full if label == "stress" else -full * atoms.get_volume()
    return atoms


@pytest.mark.parametrize("label", ["stress", "virial"])
def test_labels_may_have_other_names(label, tmp_path):
    images = [image(number) for number in range(4)]
    others = [with_other_names(atoms, label) for atoms in images]
    # Wrong labels under ASE's own names, which are not used.
    others[0].calc = SinglePointCalculator(others[0], energy=1.0, stress=np.ones(6))
    write(tmp_path / "frames.extxyz", others)
    names = f"--energy-key REF_energy --forces-key REF_forces --{label}-key REF_{label}".split()
    options = command.parse([str(tmp_path / "frames.extxyz"), "--held-out", "0.5", *names])
    train, held_out, _ = command.read_sets(options)
    order = [int(atoms.info["source"].rsplit(" ", 1)[1]) for atoms in (*train, *held_out)]
    frames = frames_of([*train, *held_out], ["Cu", "Au"])
    expected = frames_of([images[number] for number in order], ["Cu", "Au"])
    for key, value in expected.items():
        torch.testing.assert_close(frames[key], value, rtol=0, atol=1e-7)


def test_an_absent_label_is_an_error_that_lists_the_names_of_the_frame(tmp_path):
    write(tmp_path / "frames.extxyz", [with_other_names(image(0), "stress")])
    frames = read([tmp_path / "frames.extxyz"])
    with pytest.raises(ValueError, match="none of energy in .*frame 0, which has REF_energy, REF_"):
        frames_of(frames, ["Cu", "Au"])
    frames = read([tmp_path / "frames.extxyz"], {"energy": "REF_energy", "forces": "forces"})
    with pytest.raises(ValueError, match="got none of forces in .*--energy-key and --forces-key"):
        frames_of(frames, ["Cu", "Au"])
    keys = {"energy": "REF_energy", "forces": "REF_forces", "stress": "REF_energy"}
    frames = read([tmp_path / "frames.extxyz"], keys)
    with pytest.raises(ValueError, match="expected a stress of 6 or 9 numbers, got 1 in .*frame 0"):
        frames_of(frames, ["Cu", "Au"])


def test_frames_to_hold_out_and_to_test_may_be_files_of_their_own(frames, tmp_path, capsys):
    write(tmp_path / "others.extxyz", [image(number) for number in range(20, 23)])
    write(tmp_path / "test.extxyz", [image(23)])
    words = ["--validate", tmp_path / "others.extxyz", "--test", tmp_path / "test.extxyz"]
    run(frames, "--folder", tmp_path / "out", *SMALL, *words)
    printed = capsys.readouterr().out
    assert "12 frames to train on, 3 held out" in printed
    assert printed.count("test frames: energy") == 1
    # The same frames twice have the same errors.
    words[1] = words[3]
    run(frames, "--folder", tmp_path / "same", *SMALL, *words)
    lines = capsys.readouterr().out.splitlines()
    errors = {line.partition(": ")[2] for line in lines if line.startswith("step")}
    assert next(line for line in lines if "test frames" in line).partition(": ")[2] in errors


def test_settings_are_defaults_of_the_options(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("steps = 5\nembedding = [4, 8]\naxis = 2\nheld_out = 0.25\n")
    options = command.parse(["frames", "--settings", str(path), "--steps", "7"])
    assert (options.steps, options.embedding, options.held_out) == (7, [4, 8], 0.25)
    path.write_text("stepps = 5\n")
    with pytest.raises(ValueError, match="settings.toml: expected options, got stepps"):
        command.parse(["frames", "--settings", str(path)])


def broken(change):
    atoms = image(0)
    change(atoms)
    return [atoms, *(image(i) for i in range(1, 4))]


WRONG = {
    "no_forces": (
        broken(lambda atoms: atoms.calc.results.pop("forces")),
        "got none of forces in .*frame 0",
    ),
    "nan": (
        broken(lambda atoms: atoms.calc.results.update(energy=float("nan"))),
        "expected numbers, got NaN or infinity in .*frame 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frames_are_refused_with_the_reason(name, tmp_path):
    frames, message = WRONG[name]
    write(tmp_path / "wrong.extxyz", frames)
    # With the default seed, the wrong frame 0 is not the one held out.
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "wrong.extxyz", "--folder", tmp_path / "out", *SMALL, "--held-out", 0.25)


@pytest.mark.parametrize(
    "words, message",
    {
        "--every 0": "expected --every > 0, got 0",
        "--batch 12": "expected a batch of at most 11, the number of frames, got 12",
        "--smooth 4": "expected --smooth < 3.5, got 4",
        "--axis 9": "expected --axis of at most 8, the last width of --embedding, got 9",
        "--held-out 0.99": "expected frames to train on and to hold out, got 12",
        "--sel 9": r"expected --sel for each of Cu Au, got \[9\]",
        "--start none.npz": "expected a model, got none.npz",
        "--stress-key a --virial-key b": "expected --stress-key or --virial-key, got both",
        "--settings none.toml": "cannot read none.toml",
    }.items(),
)
def test_wrong_options_are_refused_with_the_reason(words, message, frames, tmp_path):
    with pytest.raises(ValueError, match=message):
        small = SMALL[:4] if "--start" in words else SMALL
        run(frames, "--folder", tmp_path / "out", *small, *words.split())


def test_files_that_cannot_be_used_are_refused_with_the_reason(frames, tmp_path):
    with pytest.raises(ValueError, match="expected a file or a folder of frames, got none.xyz"):
        run("none.xyz", *SMALL)
    with pytest.raises(ValueError, match="expected frames: files that ASE reads, or folders"):
        run(*SMALL)
    (tmp_path / "text.extxyz").write_text("hello\n")
    with pytest.raises(ValueError, match="cannot read .*text.extxyz: "):
        run(tmp_path / "text.extxyz", *SMALL)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoint.pt").write_bytes(b"PK truncated")
    with pytest.raises(ValueError, match="cannot go on from .*checkpoint.pt: .*another --folder"):
        run(frames, "--folder", tmp_path / "out", *SMALL)
    run(frames, "--folder", tmp_path / "other", *SMALL)
    with pytest.raises(
        ValueError, match=r"cannot go on from .*pt: its --fitting is \[6, 6\], not \[7, 7\]; take"
    ):
        run(frames, "--folder", tmp_path / "other", *SMALL, "--fitting", 7, 7)
    with pytest.raises(ValueError, match="cannot go on from .*: its cutoff is 3.5, not 3.4; take"):
        run(frames, "--folder", tmp_path / "other", *SMALL, "--cutoff", 3.4)
    with pytest.raises(ValueError, match="expected errors that are numbers, got .*smaller --rates"):
        run(frames, "--folder", tmp_path / "far", *SMALL, "--rates", 1e200, 1e200)


@pytest.mark.packaged
def test_the_command_trains_and_its_package_runs_in_ase(frames, images, tmp_path):
    words = [sys.executable, "-W", "ignore", "-m", "calcops.train", frames, "--tabulated", *SMALL]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--folder", tmp_path / "out"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    from calcops.ase import CalcOps
    from calcops.potentials import load

    atoms = images[1].copy()
    atoms.calc = CalcOps(load(tmp_path / "out/model.pt2"))
    packaged = atoms.get_forces()
    atoms.calc = CalcOps(load_npz(tmp_path / "out/model.npz"))
    np.testing.assert_allclose(packaged, atoms.get_forces(), atol=1e-8)
    wrong = subprocess.run(
        [*words, "--every", "0"], capture_output=True, text=True, env=environment
    )
    assert wrong.returncode == 1
    assert wrong.stderr == "calcops.train: expected --every > 0, got 0\n"
