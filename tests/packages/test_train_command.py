"""calcops train: labels, settings, checkpoints, messages, and what is refused."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.db import connect  # noqa: E402
from ase.io import write  # noqa: E402
from ase.stress import voigt_6_to_full_3x3_stress  # noqa: E402
from calcops.deepmd.deep_potential import load_npz  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import loop  # noqa: E402
from calcops.train.datasets import elements_of, frames_of, read  # noqa: E402
from calcops.train.first_model import first_model  # noqa: E402
from calcops.train.trainer import (  # noqa: E402
    Data,
    Squares,
    Trainer,
    errors_of,
    kRates,
    kRatesOfStart,
    loss_weights,
    squares_of,
)
from matplotlib.axes import Axes  # noqa: E402
from structures import labelled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--steps 4 --every 2 --cutoff 3.5 --embedding 4 8 --axis 2 --fitting 6 6".split()


LABELS = "energy", "forces", "stress"


def image(number, a=3.8, symbols="", copies=(1, 1, 1), labels=LABELS, **info):
    """Return copper whose first atoms are of `symbols`, with labels by EMT."""
    atoms = bulk("Cu", "fcc", a=a, cubic=True).repeat(copies)
    atoms.symbols[: len(symbols) // 2] = re.findall("..", symbols)
    atoms.rattle(0.1, seed=number)
    atoms.info |= info
    return labelled(atoms, labels)


alloy = partial(image, symbols="CuAu")


def lone(symbol="Cu", energy=3.5, **labels):
    atoms = Atoms(symbol, info={"config_type": "IsolatedAtom"})
    atoms.calc = SinglePointCalculator(atoms, energy=energy, **labels)
    return atoms


@pytest.fixture(scope="module")
def alloys():
    """Return frames of several sizes, of which some have no stress."""
    sizes = [(1, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 1)]
    return [alloy(i, copies=sizes[i % 4], labels=LABELS[: 3 if i % 3 else 2]) for i in range(12)]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Work in a folder with frames.extxyz, and without packages, which take ten seconds."""
    monkeypatch.setattr(loop, "save", lambda model, path: None)
    monkeypatch.chdir(tmp_path)
    write("frames.extxyz", [image(number) for number in range(5)])


@pytest.fixture
def run(capsys):
    """Return a function that trains on frames or a file, and returns what the command printed."""

    def train(frames, *options):
        if isinstance(frames, list):
            write("frames.extxyz", frames)
            frames = "frames.extxyz"
        small = SMALL[:4] if "--start" in options else SMALL
        command.main([str(frames), *small, *map(str, options)])
        return capsys.readouterr().out

    return train


# ---- frames and labels ----------------------------------------------------------------------------


def mixed_type_system(folder):
    """Write two frames of DeePMD-kit's mixed types: CuAu2, and CuAu with one row of no atom."""
    part = folder / "set.000"
    part.mkdir(parents=True)
    (folder / "type.raw").write_text("0\n0\n0\n")  # DeePMD-kit wants a placeholder
    (folder / "type_map.raw").write_text("Au\nCu\n")
    np.save(part / "real_atom_types.npy", [[1, 0, 0], [0, 1, -1]])
    np.save(part / "coord.npy", np.arange(18.0).reshape(2, 9))
    np.save(part / "box.npy", np.tile(9.0 * np.eye(3).ravel(), (2, 1)))
    np.save(part / "energy.npy", [[-1.0], [-2.0]])
    np.save(part / "force.npy", np.arange(18.0).reshape(2, 9))
    np.save(part / "virial.npy", np.arange(18.0).reshape(2, 9))


def test_a_folder_of_mixed_types_has_the_elements_of_each_frame(tmp_path):
    mixed_type_system(tmp_path / "data")
    images = read([tmp_path / "data"])
    assert [str(frame.symbols) for frame in images] == ["CuAu2", "AuCu"]
    frames = frames_of(images, ["Cu", "Au"])
    assert frames["types"].tolist() == [[0, 1, 1], [1, 0, -1]]
    assert frames["force"][1].tolist() == [[9, 10, 11], [12, 13, 14], [0, 0, 0]]
    assert frames["energy"].tolist() == [-1, -2]
    rows = np.arange(9, 18).reshape(3, 3)
    np.testing.assert_allclose(frames["virial"][1], (rows + rows.T) / 2)


def test_a_system_without_periodicity_may_have_virials(tmp_path):
    mixed_type_system(tmp_path / "data")
    (tmp_path / "data/nopbc").touch()
    (frame, _) = read([tmp_path / "data"])
    assert not frame.pbc.any()
    frames = frames_of([frame], ["Cu", "Au"])
    rows = np.arange(9).reshape(3, 3)
    np.testing.assert_allclose(frames["virial"][0], (rows + rows.T) / 2)


def test_systems_behind_links_are_read_once(tmp_path):
    mixed_type_system(tmp_path / "elsewhere/first")
    mixed_type_system(tmp_path / "data/second")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/again").symlink_to(tmp_path / "data/second")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert len(read([tmp_path / "data"])) == 4
    assert len(read([tmp_path / "link"])) == 4


def test_labels_of_a_database_may_be_in_its_key_value_pairs_and_data(tmp_path):
    frame = image(0)
    forces = 2 * frame.get_forces()
    virial = np.diag([1.0, 2.0, 3.0])
    path = tmp_path / "frames.db"
    with connect(path) as database:
        pairs = {"dft_energy": -7.0, "config_type": "bulk"}
        database.write(frame, pairs, data={"dft_forces": forces, "dft_virial": virial})
        database.write(frame)
    labels = {"energy": "dft_energy", "forces": "dft_forces", "virial": "dft_virial"}
    ours, other = read([path], labels)
    frames = frames_of([ours], ["Cu"])
    assert frames["energy"].item() == -7.0
    np.testing.assert_allclose(frames["force"][0], forces)
    np.testing.assert_allclose(frames["virial"][0], virial)
    assert ours.info["config_type"] == "bulk"
    with pytest.raises(ValueError, match="got none of energy in .*frames.db, frame 1"):
        frames_of([other], ["Cu"])
    with pytest.raises(ValueError, match="expected misspelt, the name of the energy, .*dft_energy"):
        read([path], {"energy": "misspelt"})


def test_free_energy_may_be_the_energy():
    frame = image(0)
    frame.calc.results["free_energy"] = -7.0
    write("frames.extxyz", [frame])
    (ours,) = read(["frames.extxyz"], {"energy": "free_energy"})
    assert frames_of([ours], ["Cu"])["energy"].item() == -7.0
    frame.calc.results.pop("energy")
    write("frames.extxyz", [frame])
    with pytest.raises(ValueError, match="none of energy in .*frame 0, which has .*free_energy"):
        frames_of(read(["frames.extxyz"]), ["Cu"])


@pytest.mark.parametrize("is_periodic", [True, False])
def test_a_stress_of_zeros_is_no_label(is_periodic, run):
    images = [image(number) for number in range(6)]
    cluster = Atoms("Cu3", [[0, 0, 0], [2.4, 0, 0], [0, 2.5, 0]], cell=9 * np.eye(3))
    cluster.pbc = is_periodic
    labelled(cluster, LABELS[:2]).calc.results["stress"] = np.zeros(6)
    assert frames_of([cluster], ["Cu"])["virial"].isnan().all()
    printed = run([*images, cluster], "--held-out", 0.15)
    assert "stress of exactly 0 in 1 frames counts as no label" in printed


def test_a_stress_without_a_volume_is_refused():
    atoms = lone(stress=np.ones(6))
    for cell in (np.zeros((3, 3)), [[5, 0, 0], [0, 5, 0], [5, 5, 1e-14]]):
        atoms.set_cell(cell)
        with pytest.raises(ValueError, match="expected a cell with a volume for the stress, got"):
            frames_of([atoms], ["Cu"])


def test_a_lone_atom_has_no_force_and_is_trained_on(run):
    images = [lone(), *(image(number) for number in range(4)), lone(energy=3.6)]
    printed = run(images, "--held-out", 0.5)
    assert "4 frames to train on, 2 held out" in printed
    words = ["frames.extxyz", "--held-out", "0.75"]
    train, held_out, _ = command.read_sets(command.parse(words))
    assert [len(image) for image in held_out] == [4, 4, 4]
    assert sorted(len(image) for image in train) == [1, 1, 4]
    assert torch.equal(frames_of([images[0]], ["Cu"])["force"], torch.zeros(1, 1, 3).double())


def test_an_atom_beyond_the_cutoff_of_the_others_has_the_energy_of_no_neighbours(run):
    images = [image(number) for number in range(5)]
    apart = image(9)
    apart.set_cell(30 * np.eye(3))
    apart.positions[0] += 12
    assert "5 frames to train on, 1 held out" in run([*images, apart], "--held-out", 0.3)


def test_the_last_frame_of_an_element_is_trained_on():
    images = [image(number) for number in range(9)]
    images[4].symbols[0] = "Ag"
    write("frames.extxyz", images)
    for seed in range(4):
        words = ["frames.extxyz", "--seed", str(seed), "--held-out", "0.8"]
        train, held_out, _ = command.read_sets(command.parse(words))
        assert elements_of(train) == ["Cu", "Ag"]
        assert len(held_out) in (6, 7)


def test_each_tenth_frame_of_a_kind_is_held_out_and_rare_kinds_are_trained_on():
    sizes = [(1, 1, 1)] * 30 + [(2, 1, 1)] * 4 + [(1, 1, 2)] * 12
    images = [image(number, copies=copies) for number, copies in enumerate(sizes)]
    for atoms in images[30:34]:
        atoms.info["config_type"] = "dimer"
    write("frames.extxyz", images)
    choices = set()
    for seed in range(3):
        words = ["frames.extxyz", "--seed", str(seed)]
        train, held_out, _ = command.read_sets(command.parse(words))
        assert sorted(len(atoms) for atoms in held_out) == [4, 4, 4, 8]
        assert not any("config_type" in atoms.info for atoms in held_out)
        sources = [atoms.info["source"] for atoms in (*train, *held_out)]
        assert len(set(sources)) == len(images)
        choices.add(tuple(sources[-4:]))
    assert len(choices) == 3


@pytest.mark.parametrize("word", ["", "--stress-key none"])
def test_without_stress_labels_the_log_says_so_and_has_no_virial(word, run):
    images = [image(number, labels=LABELS if word else LABELS[:2]) for number in range(4)]
    printed = run(images, "--held-out", 0.25, *word.split())
    assert "no stress labels\n" in printed
    assert "virial" not in printed
    rows = Path("trained/frames/log.csv").read_text().splitlines()
    assert [rows[1].split(",")[column] for column in (4, 7)] == ["nan", "nan"]
    # A resumed training finds its model in that log.
    assert "nothing to do" in run(images, "--held-out", 0.25, *word.split())


def test_a_frame_without_atoms_or_without_a_cell_is_refused():
    empty = Atoms()
    empty.calc = SinglePointCalculator(empty, energy=0.0, forces=np.zeros((0, 3)))
    with pytest.raises(ValueError, match="expected atoms, got none in a frame"):
        frames_of([image(0), empty], ["Cu"])
    for cell in (np.zeros((3, 3)), np.diag([4.0, 4.0, 0.0]), np.ones((3, 3))):
        frame = image(0, labels=LABELS[:2])
        frame.set_cell(cell)
        with pytest.raises(ValueError, match="expected independent cell vectors in periodic dir"):
            frames_of([frame], ["Cu"])
    frame.set_cell(np.diag([4.0, 4.0, 0.0]))
    frame.pbc = (True, True, False)
    frames_of([frame], ["Cu"])


def test_folders_of_deepmd_kit_have_the_same_frames(alloys, tmp_path):
    some = [one for one in alloys if len(one) == 4 and "stress" in one.calc.results]
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
    atoms.info["dft_energy"] = results["energy"]
    atoms.arrays["dft_forces"] = results["forces"]
    full = voigt_6_to_full_3x3_stress(results["stress"])
    atoms.info[f"dft_{label}"] = full if label == "stress" else -full * atoms.get_volume()
    return atoms


@pytest.mark.parametrize("label", ["stress", "virial"])
def test_labels_may_have_other_names(label):
    images = [alloy(number) for number in range(4)]
    others = [with_other_names(atoms, label) for atoms in images]
    # Wrong labels under ASE's own names, which are not used.
    others[0].calc = SinglePointCalculator(others[0], energy=1.0, stress=np.ones(6))
    write("frames.extxyz", others)
    names = f"--energy-key dft_energy --forces-key dft_forces --{label}-key dft_{label}".split()
    options = command.parse(["frames.extxyz", "--held-out", "0.5", *names])
    train, held_out, _ = command.read_sets(options)
    order = [int(atoms.info["source"].rsplit(" ", 1)[1]) for atoms in (*train, *held_out)]
    frames = frames_of([*train, *held_out], ["Cu", "Au"])
    expected = frames_of([images[number] for number in order], ["Cu", "Au"])
    for key, value in expected.items():
        torch.testing.assert_close(frames[key], value, rtol=0, atol=1e-7)


def test_an_absent_label_is_an_error_that_lists_the_names_of_the_frame():
    write("frames.extxyz", [with_other_names(alloy(0), "stress")])
    frames = read(["frames.extxyz"])
    with pytest.raises(ValueError, match="none of energy in .*frame 0, which has dft_energy, dft_"):
        frames_of(frames, ["Cu", "Au"])
    frames = read(["frames.extxyz"], {"energy": "dft_energy", "forces": "none"})
    with pytest.raises(ValueError, match="got none of forces in .*--energy-key and --forces-key"):
        frames_of(frames, ["Cu", "Au"])
    keys = {"energy": "dft_energy", "forces": "dft_forces", "stress": "dft_energy"}
    frames = read(["frames.extxyz"], keys)
    with pytest.raises(ValueError, match="expected a stress of 6 or 9 numbers, got 1 in .*frame 0"):
        frames_of(frames, ["Cu", "Au"])


# ---- the model and its errors ---------------------------------------------------------------------


def options_for(*words):
    return command.parse(["frames", *SMALL, *words])


def test_frames_of_a_batch_have_the_errors_that_they_have_alone(alloys):
    model, _ = first_model(alloys, options_for())
    frames = frames_of(alloys, model.type_names)
    assert (frames["types"] < 0).any()
    squares = Squares(model)
    numbers = [7, 0, 3, 11]
    batch = Data(frames, model)[numbers]
    together = squares(*batch)
    natoms = [len(alloys[number]) for number in numbers]
    assert batch[-1].tolist() == [[n, 1, n] for n in natoms], "atoms do not weigh the same"
    alone = [squares(*Data(frames_of([alloys[n]], model.type_names), model)[:]) for n in numbers]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=0)
    assert frames["virial"][numbers].isnan().any()
    assert together.isfinite().all()


def test_errors_are_means_over_frames_and_over_atoms(alloys):
    model, _ = first_model(alloys, options_for())
    data = Data(frames_of(alloys, model.type_names), model)
    squares = Squares(model)
    of_energy, of_force, of_virial = (error for _, error in squares.differences(*data[:]))
    assert len(set(map(len, alloys))) > 1
    expected = [of_energy, of_force, of_virial[~of_virial.isnan()]]
    expected = [error.square().mean().sqrt().item() for error in expected]
    np.testing.assert_allclose(errors_of(squares_of(squares, data), data.counts), expected)


def test_environments_computed_for_each_batch_give_the_same_errors(alloys, monkeypatch):
    model, _ = first_model(alloys, options_for())
    frames = frames_of(alloys, model.type_names)
    kept = Squares(model)(*Data(frames, model)[3:7])
    monkeypatch.setattr("calcops.train.trainer.kKeptBytes", 0)
    data = Data(frames, model)
    assert data.kept is None
    torch.testing.assert_close(Squares(model)(*data[3:7]), kept, rtol=1e-12, atol=0)


def test_statistics_do_not_depend_on_the_order_of_frames():
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
    atom = lone(energy=100.0)
    expected = loss_weights(frames_of(images, ["Cu"]), 1)
    np.testing.assert_allclose(loss_weights(frames_of([atom, *images], ["Cu"]), 1), expected)
    assert np.isfinite(loss_weights(frames_of([atom], ["Cu"]), 1)).all()


def test_frames_without_any_pair_are_refused(run):
    write("frames.extxyz", [image(number) for number in range(4)])
    with pytest.raises(ValueError, match="expected neighbours within --cutoff 1.5 A, got none"):
        run("frames.extxyz", "--cutoff", "1.5")


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


@pytest.mark.parametrize("rates, is_beaten", [((1e200, 1e200), False), ((1e-3, 0.0), True)])
def test_a_start_is_recorded_and_stays_the_model_unless_it_is_beaten(rates, is_beaten, run):
    run("frames.extxyz", "--folder", "first")
    printed = run("frames.extxyz", "--start", "first/model.npz", "--rates", *rates)
    lines = re.findall(r"^step +(\d+), held out: (.*)", printed, re.MULTILINE)
    assert [step for step, _ in lines] == ["0", "2", "4"]
    errors = lines[2 if is_beaten else 0][1]
    assert f"held-out frames: {errors}" in printed
    assert ("no record has smaller errors than --start" in printed) != is_beaten
    rows = Path("trained/frames/log.csv").read_text().splitlines()
    assert rows[1].startswith("0,")
    assert len(rows) == 4


def test_a_start_has_lower_rates_by_default():
    assert command.parse(["frames"]).rates == kRates
    assert command.parse(["frames", "--start", "model.npz"]).rates == kRatesOfStart
    assert kRatesOfStart[0] <= kRates[0] / 10


def test_a_start_keeps_all_its_types(run):
    write("both.extxyz", [alloy(number) for number in range(6)])
    run("both.extxyz")
    assert "pair_coeff * * Cu Au" in run("frames.extxyz", "--start", "trained/both/model.npz")
    assert load_npz("trained/frames/model.npz").type_names == ["Cu", "Au"]


def test_fine_tuning_begins_with_the_model_and_the_energies_of_the_frames(alloys, run):
    run(alloys, "--folder", "first")
    shifted = [alloy(i) for i in range(6)]
    for atoms in shifted:
        atoms.calc.results["energy"] += 3.0 * len(atoms)
    write("shifted.extxyz", shifted)
    options = command.parse(["frames", "--start", "first/model.npz"])
    shifted = read(["shifted.extxyz"])
    model, _ = first_model(shifted, options)
    before = load_npz("first/model.npz")
    assert torch.equal(model.fit[0][0].w, before.fit[0][0].w)

    def residual(model):
        data = Data(frames_of(shifted, model.type_names), model)
        (_, error), *_ = Squares(model).differences(*data[:])
        return -(error * data.natoms).mean()

    assert residual(before) > 4.0
    assert residual(model) == pytest.approx(0, abs=1e-9)


# ---- checkpoints and folders ----------------------------------------------------------------------


def test_a_stopped_training_writes_its_files_and_goes_on_bit_for_bit(alloys, run, monkeypatch):
    words = "--steps", 20, "--every", 10, "--folder"
    out = run(alloys, *words, "whole")
    assert "11 frames to train on, 1 held out; neighbours within 3.5 A: Cu up to" in out
    assert "pair_coeff * * Cu Au" in out
    names = {path.name for path in Path("whole").iterdir()}
    assert names == {"checkpoint.pt", "log.csv", "model.npz", "loss.png", "parity.png"}
    run(alloys, "--every", 10, "--steps", 10, "--folder", "parts")
    first = Path("parts/log.csv").read_text()
    run(alloys, *words, "parts")
    assert Path("parts/log.csv").read_text().startswith(first)

    def step(trainer, step=Trainer.step):
        if len(trainer.history) == 7:
            raise KeyboardInterrupt
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(
            SystemExit, match="stopped after 7 of 20 steps; the same command resumes"
        ):
            run(alloys, *words, "stopped")
    run(alloys, *words, "stopped")
    ours, expected = (torch.load(f"{name}/checkpoint.pt") for name in ("stopped", "whole"))
    assert ours["history"] == expected["history"]
    for key, value in expected["parameters"].items():
        assert torch.equal(ours["parameters"][key], value), key


def steps_of(folder):
    return len(torch.load(f"{folder}/checkpoint.pt")["history"])


def test_a_finished_training_says_that_there_is_nothing_to_do(run):
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


def move(images):
    images[0].positions += 0.01


def relabel(images):
    images[0].calc.results["energy"] += 1e-3


@pytest.mark.parametrize(
    "file, change, what",
    [
        ("frames.extxyz", move, "frames"),
        ("frames.extxyz", relabel, "labels"),
        ("held.extxyz", move, "held-out frames"),
    ],
    ids=["frames", "labels", "held-out frames"],
)
def test_a_checkpoint_of_other_frames_is_refused(file, change, what, run):
    write("held.extxyz", [image(number) for number in (5, 6)])
    run("frames.extxyz", "--validate", "held.extxyz")
    images = read([file])
    change(images)
    write(file, images)
    message = f"cannot resume from .*checkpoint.pt: it has other {what}; take another --folder"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--validate", "held.extxyz")
    assert steps_of("trained/frames") == 4


@pytest.mark.parametrize(
    "words, message",
    {
        "--batch 2": "its --batch is 128, not 2",
        "--rates 0.1 0.01": r"its --rates is \[0.01, 0.0\], not \[0.1, 0.01\]",
        "--weights 1 2 3": r"its --weights is None, not \[1.0, 2.0, 3.0\]",
        "--seed 1": "its --seed is 0, not 1",
        "--fitting 7 7": r"its --fitting is \[6, 6\], not \[7, 7\]; take another --folder",
        "--start model.npz --rates 0.01 0": "its --start is False, not True",
        "--cutoff 3.4": "its cutoff is 3.5, not 3.4",
        "--sel 90": r"its sel is \[\d+\], not \[90\]",
    }.items(),
)
def test_a_checkpoint_of_other_options_is_refused(words, message, run):
    run("frames.extxyz", "--folder", "out")
    if "--start" in words:
        Path("out/model.npz").rename("model.npz")
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--folder", "out", *words.split())


def test_a_checkpoint_of_another_start_is_refused(run):
    run("frames.extxyz", "--folder", "one")
    run("frames.extxyz", "--folder", "two", "--seed", 1)
    run("frames.extxyz", "--folder", "out", "--start", "one/model.npz")
    with pytest.raises(ValueError, match="it has other weights of --start"):
        run("frames.extxyz", "--folder", "out", "--start", "two/model.npz")


def test_a_start_is_not_overwritten_by_its_training(run):
    run("frames.extxyz")
    before = Path("trained/frames/model.npz").read_bytes()
    message = "expected another --folder than that of --start, got trained/frames"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz", "--start", "trained/frames/model.npz")
    assert Path("trained/frames/model.npz").read_bytes() == before


def test_an_old_model_in_the_folder_is_not_taken_for_the_best_one(run):
    run("frames.extxyz")
    Path("trained/frames/checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="expected errors that are numbers, got .*smaller --rates"):
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


def test_a_training_keeps_others_out_of_its_folder_until_it_ends(run, monkeypatch):
    refusals = []

    def record(run, step, record=loop.Run.record):
        message = "another training is running in trained/frames: wait for it, or take another"
        with pytest.raises(ValueError, match=message), loop.locked(Path("trained/frames")):
            pass
        refusals.append(step)
        return record(run, step)

    monkeypatch.setattr(loop.Run, "record", record)
    run("frames.extxyz")
    assert len(refusals) == 2
    with loop.locked(Path("trained/frames")):
        pass


def test_a_folder_that_cannot_be_made_is_named(run):
    with pytest.raises(ValueError, match="cannot write to --folder frames.extxyz: File exists"):
        run("frames.extxyz", "--folder", "frames.extxyz")


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_training_whose_log_is_gone_goes_on_and_writes_it_anew(is_finished, run):
    run("frames.extxyz", "--folder", "whole")
    run("frames.extxyz", "--folder", "out", *([] if is_finished else ["--steps", 2]))
    log = Path("out/log.csv")
    first = log.read_text()
    log.unlink()
    assert "held-out frames: energy" in run("frames.extxyz", "--folder", "out")
    assert log.read_text().startswith(first)
    assert log.read_text().count("\n") == 3


def test_a_checkpoint_whose_best_model_is_gone_is_refused(run):
    run("frames.extxyz")
    Path("trained/frames/model.npz").unlink()
    message = "expected trained/frames/model.npz, the best model so far, next to .*checkpoint.pt"
    with pytest.raises(ValueError, match=message):
        run("frames.extxyz")


def test_a_checkpoint_without_an_identity_is_refused(run):
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


# ---- options and files ----------------------------------------------------------------------------


def test_frames_to_hold_out_and_to_test_may_be_files_of_their_own(alloys, run):
    write("others.extxyz", [alloy(number) for number in range(20, 23)])
    write("test.extxyz", [alloy(23)])
    printed = run(alloys, "--validate", "others.extxyz", "--test", "test.extxyz")
    assert "12 frames to train on, 3 held out" in printed
    assert printed.count("test frames: energy") == 1
    # The same frames twice have the same errors.
    same = "--validate", "test.extxyz", "--test", "test.extxyz", "--folder", "same"
    lines = run(alloys, *same).splitlines()
    errors = {line.partition(": ")[2] for line in lines if line.startswith("step")}
    assert next(line for line in lines if "test frames" in line).partition(": ")[2] in errors


def test_frames_without_labels_are_refused_before_the_training(run):
    write("bare.extxyz", [image(20, labels=())])
    for option in ("--validate", "--test"):
        with pytest.raises(ValueError, match="got none of energy in bare.extxyz, frame 0"):
            run("frames.extxyz", option, "bare.extxyz")
    assert not Path("trained/frames/log.csv").exists()


def test_absent_energies_are_neither_printed_nor_drawn(run, monkeypatch):
    titles = []
    set_of_axes = Axes.set
    monkeypatch.setattr(
        Axes, "set", lambda axes, **words: titles.append(words) or set_of_axes(axes, **words)
    )
    images = [image(number, labels=LABELS[:2], energy_weight=0.0) for number in range(4)]
    printed = run(images, "--held-out", 0.25)
    assert re.search(r"held-out frames: force (\S+) meV/A\n", printed)
    drawn = [words["title"] for words in titles if "title" in words]
    assert len(drawn) == 1
    assert drawn[0].startswith("force: RMSE")


def test_a_test_file_may_lack_the_stress_of_a_key(run):
    images = [image(number) for number in range(4)]
    for atoms in images:
        atoms.info["dft_stress"] = atoms.calc.results.pop("stress")
    write("frames.extxyz", images)
    write("test.extxyz", [image(9, labels=LABELS[:2])])
    words = "--stress-key", "dft_stress", "--test", "test.extxyz"
    printed = run("frames.extxyz", *words)
    assert re.search(r"test frames: energy \S+ meV/atom, force \S+ meV/A\n", printed)


def test_settings_are_defaults_of_the_options(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("steps = 5\nembedding = [4, 8]\naxis = 2\nheld_out = 0.25\n")
    options = command.parse(["frames", "--settings", str(path), "--steps", "7"])
    assert (options.steps, options.embedding, options.held_out) == (7, [4, 8], 0.25)
    path.write_text("stepps = 5\n")
    with pytest.raises(ValueError, match="settings.toml: expected options, got stepps"):
        command.parse(["frames", "--settings", str(path)])


def test_a_label_that_is_no_number_is_refused(run):
    images = [alloy(number) for number in range(4)]
    images[0].calc.results["energy"] = float("nan")
    # With the default seed, frame 0 is not the one held out.
    with pytest.raises(ValueError, match="expected numbers, got NaN or infinity in .*frame 0"):
        run(images, "--held-out", 0.25)


@pytest.mark.parametrize(
    "words, message",
    {
        "--every 0": "expected --every > 0, got 0",
        "--smooth 4": "expected --smooth < 3.5, got 4",
        "--axis 9": "expected --axis of at most 8, the last width of --embedding, got 9",
        "--sel 9": r"expected --sel for each of Cu Au, got \[9\]",
        "--start none.npz": "expected a model, got none.npz",
        "--stress-key a --virial-key b": "expected --stress-key or --virial-key, got both",
        "--settings none.toml": "cannot read none.toml",
    }.items(),
)
def test_wrong_options_are_refused_with_the_reason(words, message, alloys, run):
    with pytest.raises(ValueError, match=message):
        run(alloys, *words.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_absent_is_named(run):
    with pytest.raises(ValueError, match="expected a GPU for --device cuda, got none"):
        run("frames.extxyz", "--device", "cuda")


def test_files_that_cannot_be_used_are_refused_with_the_reason(run):
    with pytest.raises(ValueError, match="expected a file or a folder of frames, got none.xyz"):
        run("none.xyz")
    with pytest.raises(ValueError, match="expected frames: files that ASE reads, or folders"):
        command.main(SMALL)
    Path("text.extxyz").write_text("hello\n")
    with pytest.raises(ValueError, match="cannot read .*text.extxyz: "):
        run("text.extxyz")
    Path("out").mkdir()
    Path("out/checkpoint.pt").write_bytes(b"PK truncated")
    with pytest.raises(ValueError, match="cannot resume from .*checkpoint.pt: .*another --folder"):
        run("frames.extxyz", "--folder", "out")
