"""python -m calcops.train: labels of other programs, isolated atoms, and what is said of them."""

import numpy as np
import pytest
import torch

for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.calculators.emt import EMT  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.db import connect  # noqa: E402
from ase.io import write  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import training  # noqa: E402
from calcops.train.datasets import elements_of, frames_of, read  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--steps 4 --every 2 --cutoff 3.5 --embedding 4 8 --axis 2 --fitting 6 6".split()


def crystal(number, labels=("energy", "forces", "stress"), **info):
    """Return a frame of copper with labels by EMT."""
    atoms = bulk("Cu", "fcc", a=3.8, cubic=True)
    atoms.rattle(0.1, seed=number)
    atoms.calc = EMT()
    results = {name: atoms.calc.get_property(name, atoms) for name in labels}
    atoms.calc = SinglePointCalculator(atoms, **results)
    atoms.info |= info
    return atoms


def lone(symbol="Cu", energy=3.5, **labels):
    atoms = Atoms(symbol, info={"config_type": "IsolatedAtom"})
    atoms.calc = SinglePointCalculator(atoms, energy=energy, **labels)
    return atoms


def written(images, folder, name="frames.extxyz"):
    write(folder / name, images)
    return folder / name


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that trains on frames, and returns what the command printed."""
    monkeypatch.setattr(training, "save", lambda model, path: None)

    def train(images, *words, folder="out"):
        path = written(images, tmp_path)
        command.main([str(path), "--folder", str(tmp_path / folder), *SMALL, *map(str, words)])
        return capsys.readouterr().out

    return train


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
    assert [str(image.symbols) for image in images] == ["CuAu2", "AuCu"]
    frames = frames_of(images, ["Cu", "Au"])
    assert frames["types"].tolist() == [[0, 1, 1], [1, 0, -1]]
    assert frames["force"][1].tolist() == [[9, 10, 11], [12, 13, 14], [0, 0, 0]]
    assert frames["energy"].tolist() == [-1, -2]
    np.testing.assert_allclose(frames["virial"][1].ravel(), np.arange(9, 18))


def test_a_system_without_periodicity_may_have_virials(tmp_path):
    mixed_type_system(tmp_path / "data")
    (tmp_path / "data/nopbc").touch()
    (image, _) = read([tmp_path / "data"])
    assert not image.pbc.any()
    frames = frames_of([image], ["Cu", "Au"])
    np.testing.assert_allclose(frames["virial"][0].ravel(), np.arange(9))


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
    image = crystal(0, ("energy", "forces", "stress"))
    forces = 2 * image.get_forces()
    virial = np.diag([1.0, 2.0, 3.0])
    path = tmp_path / "frames.db"
    with connect(path) as database:
        pairs = {"dft_energy": -7.0, "config_type": "bulk"}
        database.write(image, pairs, data={"dft_forces": forces, "dft_virial": virial})
        database.write(image)
    labels = {"energy": "dft_energy", "forces": "dft_forces", "virial": "dft_virial"}
    ours, other = read([path], labels)
    frames = frames_of([ours], ["Cu"])
    assert frames["energy"].item() == -7.0
    np.testing.assert_allclose(frames["force"][0], forces)
    np.testing.assert_allclose(frames["virial"][0], virial)
    assert ours.info["config_type"] == "bulk"
    with pytest.raises(ValueError, match="got none of energy in .*frames.db, frame 1"):
        frames_of([other], ["Cu"])
    with pytest.raises(ValueError, match="none of energy in .*frame 0, which has .*dft_energy"):
        frames_of(read([path], {"energy": "misspelt"}), ["Cu"])


def test_free_energy_may_be_the_energy(tmp_path):
    image = crystal(0)
    image.calc.results["free_energy"] = -7.0
    path = written([image], tmp_path)
    (ours,) = read([path], {"energy": "free_energy"})
    assert frames_of([ours], ["Cu"])["energy"].item() == -7.0
    image.calc.results.pop("energy")
    path = written([image], tmp_path)
    with pytest.raises(ValueError, match="none of energy in .*frame 0, which has .*free_energy"):
        frames_of(read([path]), ["Cu"])


@pytest.mark.parametrize("is_periodic", [True, False])
def test_a_stress_of_zeros_is_no_label(is_periodic, run):
    images = [crystal(number) for number in range(6)]
    cluster = Atoms("Cu3", [[0, 0, 0], [2.4, 0, 0], [0, 2.5, 0]], cell=9 * np.eye(3))
    cluster.pbc = is_periodic
    cluster.calc = EMT()
    labels = {"energy": cluster.get_potential_energy(), "forces": cluster.get_forces()}
    cluster.calc = SinglePointCalculator(cluster, **labels, stress=np.zeros(6))
    assert frames_of([cluster], ["Cu"])["virial"].isnan().all()
    printed = run([*images, cluster], "--held-out", 0.15)
    assert "stress of exactly 0 in 1 frames counts as no label" in printed


def test_a_stress_without_a_volume_is_refused():
    atoms = lone(stress=np.ones(6))
    with pytest.raises(ValueError, match="expected a cell with a volume for the stress, got none"):
        frames_of([atoms], ["Cu"])


def test_a_lone_atom_has_no_force_and_is_trained_on(run, tmp_path):
    images = [lone(), *(crystal(number) for number in range(4)), lone(energy=3.6)]
    printed = run(images, "--held-out", 0.5)
    assert "3 frames to train on, 3 held out" in printed
    words = [str(tmp_path / "frames.extxyz"), "--held-out", "0.6"]
    train, held_out, _ = command.read_sets(command.parse(words))
    assert [len(image) for image in held_out] == [4, 4, 4, 4]
    assert sorted(len(image) for image in train) == [1, 1]
    assert torch.equal(frames_of([images[0]], ["Cu"])["force"], torch.zeros(1, 1, 3).double())


def test_an_atom_beyond_the_cutoff_of_the_others_has_the_energy_of_no_neighbours(run):
    images = [crystal(number) for number in range(5)]
    apart = crystal(9)
    apart.set_cell(30 * np.eye(3))
    apart.positions[0] += 12
    assert "4 frames to train on, 2 held out" in run([*images, apart], "--held-out", 0.3)


def test_the_last_frame_of_an_element_is_trained_on(tmp_path):
    images = [crystal(number) for number in range(9)]
    images[4].symbols[0] = "Ag"
    for seed in range(4):
        words = [str(written(images, tmp_path)), "--seed", str(seed), "--held-out", "0.8"]
        train, held_out, _ = command.read_sets(command.parse(words))
        assert elements_of(train) == ["Cu", "Ag"]
        assert len(held_out) == 7


@pytest.mark.parametrize("word", ["", "--stress-key nothing"])
def test_without_stress_labels_the_log_says_so_and_has_no_virial(word, run, tmp_path):
    labels = ("energy", "forces") if not word else ("energy", "forces", "stress")
    images = [crystal(number, labels) for number in range(4)]
    printed = run(images, "--held-out", 0.25, *word.split())
    assert "no stress labels\n" in printed
    assert "virial" not in printed
    rows = (tmp_path / "out/log.csv").read_text().splitlines()
    assert [rows[1].split(",")[column] for column in (4, 7)] == ["nan", "nan"]
    # A resumed training finds its best model in that log.
    assert "nothing to do" in run(images, "--held-out", 0.25, *word.split())


def test_a_bare_virial_is_named(run):
    images = [crystal(number, ("energy", "forces")) for number in range(4)]
    for image in images:
        image.info["virial"] = np.eye(3)
    printed = run(images, "--held-out", 0.25)
    assert "no stress labels; the frames have virial, see --stress-key and --virial-key" in printed
    assert "no stress labels" not in run(
        images, "--held-out", 0.25, "--virial-key", "virial", folder="other"
    )


def test_a_frame_without_atoms_or_without_a_cell_is_refused():
    empty = Atoms()
    empty.calc = SinglePointCalculator(empty, energy=0.0, forces=np.zeros((0, 3)))
    with pytest.raises(ValueError, match="expected atoms, got none in a frame"):
        frames_of([crystal(0), empty], ["Cu"])
    for cell in (np.zeros((3, 3)), np.diag([4.0, 4.0, 0.0]), np.ones((3, 3))):
        image = crystal(0, ("energy", "forces"))
        image.set_cell(cell)
        with pytest.raises(ValueError, match="expected independent cell vectors in periodic dir"):
            frames_of([image], ["Cu"])
    image.set_cell(np.diag([4.0, 4.0, 0.0]))
    image.pbc = (True, True, False)
    frames_of([image], ["Cu"])
