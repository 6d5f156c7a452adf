"""calcops/deepmd: imported models give DeePMD-kit's results.

DeePMD-kit 3.2.0 wrote the models and results in deepmd_models/. Each model was trained for two
steps on random labels. numbers.json has the results of deepmd.infer.DeepPot for a periodic
structure, whose cell is smaller than the sphere of the cutoff, and for a cluster.
`dp compress --step 0.5` wrote the compressed models. The script was deepmd_reference.py of commit
cdc1db7.
"""

import copy
import json
import re
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests/packages/deepmd_models"
NAMES = sorted(path.name for path in FILES.iterdir() if path.suffix != ".json")
for module in ("ase", "vesin"):
    pytest.importorskip(module)

from calcops.__main__ import main  # noqa: E402
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.deepmd.formats import read  # noqa: E402
from calcops.deepmd.import_deepmd import DeepPotential, arrays, load, save_npz  # noqa: E402
from calcops.deepmd.nets import kActivations  # noqa: E402
from calcops.potentials import package  # noqa: E402
from calcops.train.trainer import Trainer  # noqa: E402
from structures import atoms_of, inputs_of  # noqa: E402


def path_of(name):
    for module in {".dp": ["h5py"], ".yaml": ["yaml"]}.get(Path(name).suffix, []):
        pytest.importorskip(module, reason=f"{module} (extra `examples`) reads {Path(name).suffix}")
    return FILES / name


def largest_difference(model, structures):
    """Return the largest relative difference of the model's results from those of DeePMD-kit.

    Energies, forces and virials are each compared with the largest value of their kind.
    """
    worst = 0
    for structure in structures:
        ours = model(*inputs_of(structure, model))
        for key, values in zip(("energy", "atom_energy", "force", "virial", "atom_virial"), ours):
            expected = np.array(structure[key])
            worst = max(worst, abs(values[0].numpy() - expected).max() / abs(expected).max())
    return worst


def bound(name):
    """Return the largest relative difference that a model may have.

    DeePMD-kit computes float32 nets in float32. DeepPotential computes them in float64.
    """
    return 3e-6 if name.startswith("float32") else 1e-12


@pytest.fixture(scope="module")
def numbers():
    return json.loads((FILES / "numbers.json").read_text())


@pytest.mark.filterwarnings("ignore:.*its tables differ from its nets")
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_deepmd_kit(name, numbers):
    far = largest_difference(load(path_of(name)), numbers[Path(name).stem])
    print(f"{name:24} {far:.1e}")
    assert far <= bound(name)


@pytest.mark.parametrize("name, expected", {"relu": 7, "relu6": 6, "linear": 7}.items())
def test_activations_that_no_model_here_has_are_those_of_their_names(name, expected):
    values = kActivations[name]()(torch.tensor([-1.0, 7.0]))
    assert values.tolist() == [-1 if name == "linear" else 0, expected]


def test_tables_that_differ_from_the_nets_are_reported():
    with pytest.warns(UserWarning, match="compressed_dt.pth: its tables differ from its nets by "):
        load(path_of("compressed_dt.pth"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path_of("compressed.pth"))


@pytest.mark.parametrize(
    "name", [pytest.param("pairs.dp", marks=pytest.mark.long), "one_side.yaml", "silicon.pt"]
)
def test_tabulated_models_give_the_same_numbers(name, numbers, capsys):
    model = load(path_of(name)).tabulated()
    if name == "pairs.dp":
        assert re.search(r"; 4 tables in cells of 0.\d+", capsys.readouterr().out)
        assert model.table is not None
    else:
        assert re.search(r"tabulated: a spline of \d+ cells", capsys.readouterr().out)
        assert model.spline is not None
    assert largest_difference(model, numbers[Path(name).stem]) <= 1e-9


def test_nets_with_kinks_are_not_tabulated():
    weights = arrays(read(path_of("silicon.pt"))) | {"emb0_act0": "relu"}
    with pytest.raises(ValueError, match="expected nets that a table has within 1e-09, got "):
        DeepPotential(weights).tabulated()


def test_the_same_model_is_in_every_format():
    first, second = (arrays(read(path_of(f"pairs{ending}"))) for ending in (".pth", ".dp"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert first["emb1_w1"].shape == (2, 3, 6)
    assert "emb1_idt1" in first
    assert first["emb1_act1"] == "tanh"


@pytest.mark.parametrize("name", ["pairs.pth", "one_side.yaml", "compressed.pth"])
def test_an_archive_and_an_npz_of_it_give_the_same_in_ase(name, numbers, tmp_path):
    model = load(path_of(name))
    structure, _ = numbers[Path(name).stem]
    package.save(model, tmp_path / "model.pt")
    save_npz(model, tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as saved:
        again = DeepPotential(dict(saved))
    for form in (package.load(tmp_path / "model.pt"), again):
        atoms = atoms_of(structure, model.type_names)
        atoms.calc = CalcOps(form)
        assert atoms.get_potential_energy() == pytest.approx(structure["energy"], rel=1e-12)
        np.testing.assert_allclose(atoms.get_forces(), structure["force"], atol=1e-11)
        pressure = -np.trace(structure["virial"]) / 3 / atoms.get_volume()
        assert atoms.get_stress()[:3].mean() == pytest.approx(pressure, rel=1e-10)
    assert (again.type_names, again.units, again.cutoff) == (["O", "H"], "metal", 3.0)


@pytest.mark.parametrize("output", ["water.pt", pytest.param("water.pt2", marks=pytest.mark.long)])
def test_a_model_imported_by_the_command_gives_the_same_in_ase(
    output, numbers, tmp_path, monkeypatch, capsys
):
    path = tmp_path / output
    monkeypatch.setattr("sys.argv", [])
    main(["deepmd", f"{FILES}/pairs.pth", f"{path}"])
    printed = capsys.readouterr().out
    assert "neighbours within 3 A: O up to 12, H up to 24" in printed
    form = package.load(path)
    for structure in numbers["pairs"]:
        atoms = atoms_of(structure, form.type_names)
        atoms.calc = CalcOps(form)
        assert atoms.get_potential_energy() == pytest.approx(structure["energy"], rel=1e-12)
        np.testing.assert_allclose(atoms.get_forces(), structure["force"], atol=1e-11)


def test_every_weight_of_an_imported_model_is_trained():
    trainer = Trainer(load(path_of("pairs.pth")), [None], steps=1, seed=0, weights=(1.0, 1.0, 1.0))
    trained = [p for optimizer in trainer.optimizers for p in optimizer.param_groups[0]["params"]]
    assert {id(p) for p in trained} == {id(p) for p in trainer.parameters.values()}


@pytest.fixture(scope="module")
def serialised():
    return read(path_of("pairs.pth"))


REFUSED = {
    "type": ("zbl", "a model of type standard, got zbl"),
    "pair_exclude_types": ([[0, 1]], "the model has pair_exclude_types"),
    "spin": ({"use_spin": [True]}, "the model has spin, which is not supported: DeePMD-kit's own"),
    "use_srtab": ("table.txt", "the model has use_srtab"),
    "something_new": (1, "the model has something_new"),
    "@version": (3, "a model of version 2 at most, got 3"),
    "descriptor.type": ("dpa1", "a descriptor of type se_e2_a, got dpa1"),
    "descriptor.exclude_types": ([[0, 1]], "the descriptor has exclude_types"),
    "descriptor.env_protection": (1e-6, "the descriptor has env_protection"),
    "descriptor.precision": ("bfloat16", "the descriptor is of precision bfloat16"),
    "descriptor.env_mat": (
        {"rcut": 3.0, "use_exp_switch": True},
        "the environment has use_exp_switch",
    ),
    "fitting.type": ("dipole", "a fitting of type ener, got dipole"),
    "fitting.numb_fparam": (2, "the fitting has numb_fparam"),
    "fitting.exclude_types": ([1], "the fitting has exclude_types"),
    "fitting.precision": ("float16", "the fitting is of precision float16"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_unsupported_option_is_refused_by_name(option, serialised):
    arrays(serialised | {"_comment": "water"})  # a comment is accepted
    value, message = REFUSED[option]
    model = copy.deepcopy(serialised)
    part, _, name = option.rpartition(".")
    options = model[part] if part else model
    options[name] = value
    with pytest.raises(ValueError, match=message):
        arrays(model)


def test_models_with_unsupported_weights_and_other_files_are_refused(serialised, tmp_path):
    model = copy.deepcopy(serialised)
    model["descriptor"]["@variables"]["davg"][1, 3, 0] += 1
    with pytest.raises(ValueError, match="davg differs between slots"):
        arrays(model)
    model = copy.deepcopy(serialised)
    model["descriptor"]["embeddings"]["networks"][0]["layers"][0]["activation_function"] = (
        "silut:3.0"
    )
    with pytest.raises(ValueError, match="activation function silut:3.0 is not supported"):
        arrays(model)
    model = copy.deepcopy(serialised)
    model["descriptor"]["embeddings"]["networks"][2] = None
    with pytest.raises(ValueError, match="an embedding net for each of 2 types or of 4 pairs"):
        arrays(model)
    options = {"descriptor": {"type": "se_e2_a"}, "spin": {"use_spin": [True]}}
    state = {
        "_extra_state": {"model_params": options},
        "model.Default.backbone_model.x": torch.ones(2),
    }
    torch.save({"model": state}, tmp_path / "spin.pt")
    with pytest.raises(ValueError, match="spin.pt: the model has spin, which is not supported"):
        load(tmp_path / "spin.pt")
    torch.save({"model": {"_extra_state": {"model_params": {}}}}, tmp_path / "empty.pt")
    with pytest.raises(ValueError, match="empty.pt: expected a model of type se_e2_a, got one"):
        load(tmp_path / "empty.pt")
    torch.save({"weights": torch.ones(2)}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="weights.pth: expected a frozen model"):
        load(tmp_path / "weights.pth")
    with pytest.raises(
        ValueError, match="graph.pb: expected .pth, .pt, .dp or .yaml; `dp convert-backend`"
    ):
        load(tmp_path / "graph.pb")


kUnreadable = {
    "empty.pth": lambda path: path.touch(),
    "text.pth": lambda path: path.write_text("text"),
    "zip.pth": lambda path: zipfile.ZipFile(path, "w").close(),
    "folder.pth": lambda path: path.mkdir(),
    "cut.pth": lambda path: path.write_bytes((FILES / "pairs.pth").read_bytes()[:3000]),
    "text.pt": lambda path: path.write_text("text"),
    "list.pt": lambda path: torch.save([1], path),
    "module.pt": lambda path: torch.save(torch.nn.Linear(2, 2), path),
    "cut.yaml": lambda path: path.write_text("model: ["),
    "number.yaml": lambda path: path.write_text("model: 3"),
    "text.dp": lambda path: path.write_text("text"),
}


@pytest.mark.parametrize("name", [*kUnreadable, "absent.pth"])
def test_a_file_that_is_no_model_is_one_line_of_the_command(name, tmp_path, monkeypatch):
    for module in {".dp": ["h5py"], ".yaml": ["yaml"]}.get(Path(name).suffix, []):
        pytest.importorskip(module)
    path = tmp_path / name
    kUnreadable.get(name, lambda path: None)(path)
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(SystemExit) as exit:
        main(["deepmd", str(path), str(tmp_path / "model.npz")])
    assert re.fullmatch(f"calcops deepmd: .*{name}.*", exit.value.code)


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    for name in ("absent/model.npz", "model.xyz"):
        with pytest.raises(SystemExit) as exit:
            main(["deepmd", str(FILES / "pairs.pth"), str(tmp_path / name)])
        assert re.fullmatch(f"calcops deepmd: .*{tmp_path}.*", exit.value.code)
