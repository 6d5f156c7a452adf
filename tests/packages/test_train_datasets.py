"""calcops.train.datasets: which labels and weights of a file are read, and what is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.constraints import (  # noqa: E402
    FixAtoms,
    FixBondLengths,
    FixCartesian,
    FixCom,
    FixedLine,
    FixedPlane,
    FixScaled,
    FixSubsetCom,
    Hookean,
)
from ase.db import connect  # noqa: E402
from ase.io import write  # noqa: E402
from calcops.train.datasets import frames_of, read  # noqa: E402
from calcops.train.labels import weights_in_words  # noqa: E402

CELL = "4 0.5 0 0 4 0 0 0 5"
VOLUME = 80.0
STRESS = "0.1 0 0 0 0.2 0.01 0 0.01 0.3"
VIRIAL = " ".join(f"{-VOLUME * float(number):.9g}" for number in STRESS.split())
COLUMNS = "species:S:1:pos:R:3:forces:R:3"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def read_text(
    words="energy=-1",
    cell=f'Lattice="{CELL}"',
    columns=COLUMNS,
    atom="Cu 0 0 0 0.1 0.2 0.3",
    **keys,
):
    """Return the frames dict of an extended xyz file of one frame of two atoms."""
    atoms = f"{atom}\n{atom.split()[0]} 1 2 3 -0.1 -0.2 -0.3"
    Path("frames.xyz").write_text(f"2\n{cell} Properties={columns} {words}\n{atoms}\n")
    return frames_of(read(["frames.xyz"], keys), ["Cu", "X"])


def assert_same(frames, expected):
    for key, value in expected.items():
        torch.testing.assert_close(frames[key], value, equal_nan=True, rtol=1e-6, atol=1e-12)


# ---- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"words": "Energy=-1"},
        {"words": "ENERGY = -1"},
        {"words": "REF_energy=-1"},
        {"words": "energy=-1 dft_energy=-2 free_energy=-3"},
        {"words": "energy=-1 REF_energy=-1"},
        {"words": "E0=-1 energy=-2", "energy": "E0"},
        {"cell": f'lattice="{CELL}"'},
        {"cell": f'LATTICE = " {CELL} " PBC="T T T"'},
        {"columns": "Species:S:1:Pos:R:3:Force:R:3"},
        {"columns": "symbols:S:1:positions:R:3:REF_forces:R:3"},
        {"columns": "Z:I:1:pos:R:3:force:R:3", "atom": "29 0 0 0 0.1 0.2 0.3"},
    ],
    ids=str,
)
def test_names_of_gpumd_ase_and_mace_are_read_in_any_case(options):
    expected = read_text()
    assert expected["pbc"].all()
    assert_same(read_text(**options), expected)


@pytest.mark.parametrize(
    "name", ["stress", "Stress", "REF_stress", "virial", "Virial", "REF_virials"]
)
def test_stress_and_virial_are_read_under_their_names(name):
    values = STRESS if "stress" in name.lower() else VIRIAL
    virial = read_text(f'energy=-1 {name}="{values}"')["virial"][0]
    np.testing.assert_allclose(virial.ravel(), [float(number) for number in VIRIAL.split()])


def test_a_stress_of_six_numbers_has_the_order_of_voigt():
    virial = read_text('energy=-1 REF_stress="0.1 0.2 0.3 0.01 0 0"')["virial"][0]
    np.testing.assert_allclose(virial.ravel(), [float(number) for number in VIRIAL.split()])


def test_the_symmetric_part_of_a_stress_or_a_virial_is_read():
    rows = np.arange(9.0).reshape(3, 3)
    for name, factor in (
        ("virial", 1),
        ("Virial", 1),
        ("stress", -VOLUME),
        ("REF_stress", -VOLUME),
    ):
        words = " ".join(map(str, rows.ravel()))
        virial = read_text(f'energy=-1 {name}="{words}"')["virial"][0]
        np.testing.assert_allclose(virial, factor * (rows + rows.T) / 2)


def test_stresses_of_six_and_nine_numbers_may_be_equal():
    words = f'energy=-1 stress="0.1 0.2 0.3 0.01 0 0" REF_stress="{STRESS}"'
    assert_same(read_text(words), read_text(f'energy=-1 stress="{STRESS}"'))
    with pytest.raises(ValueError, match="one value of stress, got those of stress and REF_stress"):
        read_text(words.replace("0.01 0 0", "0 0.01 0", 1))


def test_forces_of_three_atoms_are_no_tensors():
    rows = np.arange(9).reshape(3, 3)
    columns = np.hstack([rows, rows.T])
    lines = "\n".join(f"Cu {n} 0 0 {' '.join(map(str, row))}" for n, row in enumerate(columns))
    Path("frames.xyz").write_text(f"3\nProperties={COLUMNS}:REF_forces:R:3 energy=-1\n{lines}\n")
    with pytest.raises(ValueError, match="one value of forces, got those of forces and REF_forces"):
        read(["frames.xyz"])


ZEROS = " ".join("0" * 9)


@pytest.mark.parametrize("stress, virial", [(STRESS, VIRIAL), (ZEROS, VIRIAL), (STRESS, ZEROS)])
def test_a_virial_beside_a_stress_agrees_or_one_of_them_is_zero(stress, virial):
    frames = read_text(f'energy=-1 stress="{stress}" virial="{virial}"')
    expected = [float(number) for number in VIRIAL.split()]
    np.testing.assert_allclose(frames["virial"].ravel(), expected)


def test_a_key_of_the_stress_or_the_virial_excludes_the_other():
    both = f'energy=-1 stress="{STRESS}" virial="{STRESS}"'
    numbers = torch.tensor([float(number) for number in STRESS.split()], dtype=torch.float64)
    torch.testing.assert_close(read_text(both, virial="virial")["virial"].ravel(), numbers)
    of_stress = read_text(both, stress="stress")["virial"].ravel()
    torch.testing.assert_close(of_stress, -VOLUME * numbers)
    assert read_text(both, stress="none")["virial"].isnan().all()


@pytest.mark.parametrize(
    "words, message",
    {
        "E0=-1": "got none of energy in frames.xyz, frame 0, which has E0; --energy-key and",
        "energy=abc": "expected numbers of energy, got abc",
        "energy=T": "expected numbers of energy, got True",
        "energy=1_0": "expected numbers of energy, got 1_0",
        'energy="1 2"': "expected an energy, got 2 numbers",
        "energy=-1 REF_energy=-2": "one value of energy, got those of energy and REF_energy in .*"
        "frame 0; --energy-key names the right one",
        f'energy=-1 virial="{STRESS}" stress="{STRESS}"': "expected a virial of -stress . volume, "
        r"got one 12.1 eV/atom off .*--virial-key names",
        f'energy=-1 dft_stress="{STRESS}"': "expected the stress under a name that is read, got "
        "dft_stress in .*frame 0; --stress-key",
        'energy=-1 virial="1 2 3 4 5 6"': "expected a virial of 9 numbers, got 6",
        'energy=-1 pbc="T T"': "expected a pbc of three T or F, got ",
        'energy=-1 pbc="FFF"': "expected a pbc of three T or F, got FFF",
        'energy=-1 lattice="4 0 0 0 4 0 0 0 4"': "frame 0: expected one value of Lattice, got ",
        "energy=-1 Energy=-2": "frame 0: expected one value of Energy, got -1 and -2",
        "energy=-1 weight=5 weight=1": "frame 0: expected one value of weight, got 5 and 1",
        'energy=-1 pbc="T T T" periodic="F F F"': "frame 0: expected one value of pbc, got ",
        "energy=-1 stress=nan": "expected a stress of 6 or 9 numbers, got 1",
        f'energy=-1 stress="{9 * "nan "}"': "expected numbers, got NaN or infinity in .*frame 0",
        f'energy=-1 virial="{VIRIAL} "energy=-2': "expected one value, got virial=.*others; a quote",
        "energy=-1 name=2,2'-bipy weight=5": "expected an end of '-bipy w.*a lone ' is writ",
        "energy=-1 label=it's weight=5 name=2'": "frame 0: expected one value, got label=it's wei",
        r'energy=-1 path="C:\data\" weight=5': "frame 0: expected an end of .C:.data.. weight=5; ",
        "energy=-1 miller=[1,1,1 weight=5": "frame 0: expected an end of .1,1,1 weight=5; a lone",
    }.items(),
)
def test_a_label_that_cannot_be_read_is_an_error(words, message):
    with pytest.raises(ValueError, match=message):
        read_text(words)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cell": f'cell="{CELL}"'}, "expected the cell under a name that is read, got cell in"),
        ({"cell": 'lattice="4 0 0 0 nan 0 0 0 4"'}, "expected numbers, got NaN or infinity in"),
        ({"cell": 'lattice="4 4 4"'}, "expected a Lattice of 9 numbers, got 3"),
        ({"cell": 'Lattice="4 0 0 0 4 0 0 0 4_0"'}, "expected numbers of Lattice, got .* 4_0 in"),
        ({"cell": 'abc="4 4 4"'}, "expected the cell under a name that is read, got abc in"),
        ({"cell": "a=4 b=4 c=4"}, "frame 0: expected a Lattice, got a, b and c"),
        ({"cell": 'periodic="T T T"'}, "expected independent cell vectors in periodic directions"),
        ({"cell": "pbc=3"}, "frame 0: expected a pbc of three T or F, got 3"),
        ({"columns": "species:S:1:xyz:R:3:forces:R:3"}, "expected species and pos in Properties"),
        ({"columns": "name:S:1:pos:R:3:forces:R:3"}, "expected species and pos in Properties"),
        ({"columns": "species:S:1:pos:R:3:force:S:3"}, "expected numbers of forces, got .*0.1"),
        ({"columns": "species:S:1:pos:R:3:force:R:2"}, r"expected forces \[2, 3\], got \[2, 2\]"),
        ({"atom": "Cu 0 0 1_0 1 2 3"}, "could not convert string to float: '1_0'"),
        ({"atom": "OW 0 0 0 1 2 3"}, "expected chemical symbols, got OW"),
        ({"atom": "CA 0 0 0 1 2 3"}, "expected chemical symbols, got CA"),
        ({"atom": "D 0 0 0 1 2 3"}, "expected chemical symbols, got D"),
        ({"atom": "1 0 0 0 1 2 3"}, "expected chemical symbols, got 1"),
        ({"atom": "X 0 0 0 1 2 3"}, "expected elements, got X in .*frame 0"),
    ],
    ids=str,
)
def test_a_structure_that_cannot_be_read_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        read_text(**options)


def test_a_text_keeps_its_underscores():
    read_text("energy=-1 config_type=300_1 of_1_2=3")
    (image,) = read(["frames.xyz"])
    assert image.info["config_type"] == "300_1"
    assert image.info["of_1_2"] == 3


def test_other_values_in_a_comment_are_not_read():
    expected = read_text("energy=-1", cell="")
    words = r"supercell_id=4 cell=T virial_sigma=0.2 has_stress=F box=ab note=it\'s a=1 name=\"\""
    assert_same(read_text(f"{words} energy=-1", cell=""), expected)
    assert_same(read_text('energy=-1 periodic="T F T"'), read_text('energy=-1 pbc="T F T"'))


@pytest.mark.parametrize("blank", ["\n", "  \n\n", "\r\n"])
def test_blank_lines_between_frames_are_dropped(blank):
    expected = read_text()
    text = Path("frames.xyz").read_text()
    Path("frames.xyz").write_bytes(f"\ufeff{blank}{text}{blank}{text}{blank}".encode())
    frames = frames_of(read(["frames.xyz"]), ["Cu"])
    assert_same({name: array[:1] for name, array in frames.items()}, expected)
    assert_same({name: array[1:] for name, array in frames.items()}, expected)


@pytest.mark.parametrize(
    "change, message",
    {
        ("2\n", "3\n"): "frame 0: .*Frame has 2 atoms, expected 3",
        ("2\n", "1\n"): "frame 1: expected a number of atoms, got Cu 1 2 3",
        ("Cu 1", "\nCu 1"): "frame 0: expected 2 atoms, got an empty line",
        ("2\n", "2_0\n"): "frame 0: expected a number of atoms, got 2_0",
    }.items(),
)
def test_a_wrong_number_of_atoms_names_the_frame(change, message):
    read_text()
    text = Path("frames.xyz").read_text()
    Path("frames.xyz").write_text(text.replace(*change))
    with pytest.raises(ValueError, match=f"cannot read frames.xyz: {message}"):
        read(["frames.xyz"])


def test_a_key_has_any_case_and_is_in_a_frame():
    columns = "species:S:1:pos:R:3:mp2_6_31g_forces:R:3"
    keys = {"energy": "dft_energy", "forces": "MP2_6_31G_forces", "stress": "none"}
    words = f'DFT_energy=-1 stress="{STRESS}"'
    assert_same(read_text(words, columns=columns, **keys), read_text())
    with pytest.raises(
        ValueError, match="expected dft_stres, the name of the stress, in a frame, "
    ):
        read_text(words, energy="dft_energy", stress="dft_stres")
    with pytest.raises(ValueError, match="expected a name of the virial, got stress"):
        read_text(words, virial="stress")


@pytest.mark.parametrize("name", ["OUTCAR_frames.xyz", "a@b.xyz", "vasprun.EXTXYZ"])
def test_the_suffix_decides_that_a_file_is_extended_xyz(name):
    expected = read_text()
    Path("frames.xyz").rename(name)
    assert_same(frames_of(read([name]), ["Cu"]), expected)


def test_a_name_may_have_an_at_sign():
    atoms = Atoms("Cu", cell=np.eye(3) * 9, pbc=True)
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    write("traj", atoms, format="traj")
    Path("traj").rename("frames@2.traj")
    (image,) = read(["frames@2.traj"])
    assert image.calc.results["energy"] == -1


def test_a_file_of_an_unknown_format_is_named():
    Path("frames.hdf5").write_text("x")
    with pytest.raises(ValueError, match="expected a file of a format of ASE, got frames.hdf5"):
        read(["frames.hdf5"])


def test_compressed_files_have_the_same_names():
    expected = read_text()
    text = Path("frames.xyz").read_text().replace("Lattice", "lattice")
    Path("frames.xyz.gz").write_bytes(gzip.compress(text.encode()))
    assert_same(frames_of(read(["frames.xyz.gz"]), ["Cu"]), expected)


def test_names_of_a_database_are_read_like_those_of_a_text():
    atoms = Atoms("Cu2", [[0, 0, 0], [1, 2, 3]], cell=np.eye(3) * 9, pbc=True)
    data = {"REF_forces": np.ones((2, 3)), "Virial": np.diag([1.0, 2.0, 3.0])}
    with connect("frames.db") as database:
        database.write(atoms, {"REF_energy": -1.0, "config_weight": 3.0}, data=data)
    frames = frames_of(read(["frames.db"]), ["Cu"])
    assert frames["energy"].item() == -1
    assert frames["virial"][0].diagonal().tolist() == [1, 2, 3]
    assert frames["weights"].tolist() == [[3, 3, 3]]


def test_a_stale_energy_beside_that_of_the_calculator_is_an_error():
    atoms = Atoms("Cu", cell=np.eye(3) * 9, pbc=True, info={"energy": -2.0})
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    write("frames.traj", atoms)
    with pytest.raises(ValueError, match="one value of energy, got those of energy and energy"):
        read(["frames.traj"])


FORCES = np.array([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])


@pytest.mark.parametrize(
    "name, constraint",
    [
        ("frames.extxyz", FixAtoms([0])),
        ("frames.traj", FixAtoms([0])),
        ("frames.traj", FixScaled(0, [True, False, False])),
        ("frames.traj", FixedPlane(0, [0, 0, 1])),
        ("frames.traj", FixedLine(0, [1, 1, 0])),
        ("frames.traj", FixBondLengths([[0, 1]])),
        ("frames.traj", FixSubsetCom([0])),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_forces_with_a_constraint_are_refused(name, constraint):
    atoms = Atoms("Cu2", [[0, 0, 0], [1, 2, 2]], cell=np.eye(3) * 9, pbc=True)
    atoms.set_constraint(constraint)
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=FORCES)
    write(name, atoms)
    assert frames_of(read([name]), ["Cu"])["force"][0].tolist() == FORCES.tolist()
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=atoms.get_forces())
    write(name, atoms)
    with pytest.raises(
        ValueError, match="expected the forces without constraints, got those with them in .*0; in"
    ):
        frames_of(read([name]), ["Cu"])


@pytest.mark.parametrize(
    "constraint",
    [FixCom(), FixCartesian(0, [False] * 3), Hookean(0, 1, 5.0, 9.0)],
    ids=lambda value: type(value).__name__,
)
def test_a_constraint_that_all_forces_meet_is_allowed(constraint):
    atoms = Atoms("Cu2", [[0, 0, 0], [1, 2, 3]], cell=np.eye(3) * 9, pbc=True)
    atoms.set_constraint(constraint)
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=FORCES)
    assert frames_of([atoms], ["Cu"])["force"][0].tolist() == FORCES.tolist()


# ---- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, weights",
    {
        "": [1, 1, 1],
        "Weight=0.5": [0.5, 0.5, 0.5],
        "weight=2 energy_weight=3": [6, 2, 2],
        "config_weight=2 config_energy_weight=0 config_forces_weight=3": [0, 6, 2],
        "config_stress_weight=4": [1, 1, 4],
        "force_weight=5 virials_weights=4": [1, 5, 4],
        'atomic_weight=2 weighted=T kpoint_weights="1 2" weights=3': [3, 3, 3],
        f'virial="{VIRIAL}" config_stress_weight=0 config_virials_weight=2': [1, 1, 2],
        f'stress="{STRESS}" config_stress_weight=3 config_virials_weight=0': [1, 1, 3],
    }.items(),
)
def test_weights_of_frames_are_read(words, weights):
    assert read_text(f"energy=-1 {words}")["weights"].tolist() == [weights]


@pytest.mark.parametrize(
    "words, message",
    {
        "weight=-1": "expected a number from 0 on, got weight -1.0 in .*frame 0",
        "weight=inf": "expected a number from 0 on, got weight inf",
        'weight="1 2"': "expected a number from 0 on, got weight .1. 2..",
        "weight=T": "expected numbers of weight, got True",
        "weight=2 config_weight=3": "one weight of each label, got config_weight, weight in",
        f'stress="{STRESS}" virial="{VIRIAL}" stress_weight=2 virial_weight=3': "expected one "
        "weight of each label, got stress_weight, virial_weight in",
        "weight=0": "expected a weight above 0, got 0 in all frames",
    }.items(),
)
def test_weights_that_cannot_be_read_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read_text(f"energy=-1 {words}")


def test_a_label_whose_weight_is_0_is_no_label():
    words = f'energy=nan energy_weight=0 virial="{ZEROS}" stress="1 2" stress_weight=0'
    frames = read_text(words)
    assert frames["energy"].isnan().all()
    assert frames["virial"].isnan().all()
    assert_same({"force": frames["force"]}, {"force": read_text()["force"]})
    columns = "species:S:1:pos:R:3:no_forces:R:3"
    frames = read_text("energy=-1 forces_weight=0", columns=columns)
    assert frames["energy"].item() == -1
    assert frames["force"].isnan().all()
    assert read_text("config_energy_weight=0")["energy"].isnan().all()


def test_weights_of_atoms_are_refused():
    atom = "Cu 0 0 0 1 2 3"
    with pytest.raises(ValueError, match="expected a number from 0 on, got weight"):
        read_text(
            columns="species:S:1:pos:R:3:weight:R:3", atom=atom, words="energy=-1", forces="weight"
        )


def test_weights_are_described_by_their_range_and_names():
    read_text("energy=-1 weight=0.5 config_energy_weight=4")
    first = read(["frames.xyz"])
    read_text("energy=-1")
    assert weights_in_words(read(["frames.xyz"])) == ""
    words = "0.5 to 2 (config_energy_weight, weight)"
    assert weights_in_words([*first, *read(["frames.xyz"])]) == words


# ---- folders of DeePMD-kit ------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path):
    """Return a folder of DeePMD-kit with two frames of CuO."""
    folder = tmp_path / "data"
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("1\n0\n")
    (folder / "type_map.raw").write_text("O\nCu\n")
    rows = {"coord": 6, "force": 6, "box": 9, "virial": 9, "energy": 1}
    for name, width in rows.items():
        save(folder, name, np.random.default_rng(0).random((2, width)))
    return folder


def save(folder, name, array):
    np.save(folder / f"set.000/{name}.npy", array)


def test_energies_of_a_folder_may_be_rows_or_a_column(system):
    expected = frames_of(read([system]), ["O", "Cu"])
    save(system, "energy", expected["energy"].numpy())
    assert_same(frames_of(read([system]), ["O", "Cu"]), expected)


@pytest.mark.parametrize("name", ["spin", "fparam", "aparam", "atom_pref", "numb_copy"])
def test_arrays_that_change_the_model_or_the_loss_are_refused(name, system):
    save(system, name, np.ones((2, 2)))
    with pytest.raises(ValueError, match=f"expected no {name}, which this training cannot use, in"):
        read([system])


@pytest.mark.parametrize("name", ["Virials", "stress", "forces", "energy_weight", "cell"])
def test_labels_of_other_names_are_refused(name, system):
    save(system, name, np.ones((2, 9)))
    with pytest.raises(ValueError, match=f"expected no {name}, which this training cannot use, in"):
        read([system])


@pytest.mark.parametrize("name", ["energy", "force", "virial", "box"])
def test_arrays_of_other_numbers_of_frames_are_refused(name, system):
    rows = np.load(system / f"set.000/{name}.npy")
    for wrong in (np.concatenate([rows, rows]), rows[:1], rows[:, :-1]):
        save(system, name, wrong)
        with pytest.raises(ValueError, match=rf"expected {name} \[2, .*\], got \[.*set.000"):
            read([system])


@pytest.mark.parametrize(
    "path, message",
    {
        "type_map.raw": "expected the elements of the types, got no .*data/type_map.raw",
        "set.000/box.npy": "expected .*set.000/box.npy, got none",
        "set.000/coord.npy": "expected .*set.000/coord.npy, got none",
    }.items(),
)
def test_a_folder_without_a_file_is_refused(path, message, system):
    (system / path).unlink()
    with pytest.raises(ValueError, match=message):
        read([system])


def test_a_system_without_sets_is_refused(system):
    (system / "set.000").rename(system / "sets")
    with pytest.raises(ValueError, match="expected .*data/set.. with .npy, got none"):
        read([system])


@pytest.mark.parametrize(
    "names, message",
    {"O": "expected types below 1, got 1 in", "O OW": "expected chemical symbols, got OW"}.items(),
)
def test_types_without_an_element_are_refused(names, message, system):
    (system / "type_map.raw").write_text(names)
    with pytest.raises(ValueError, match=message):
        read([system])
