"""calcops/nep: models give NEP_CPU's results.

The models in nep_models/ hold random numbers. numbers.json has the results of NEP_CPU, which is
commit 7319bdc of https://github.com/brucefan1983/NEP_CPU, for frames whose cells are smaller than
the sphere of the cutoff. The script was nep_reference.py of commit cdc1db7; two models have NEP_CPU's
find_descriptor and find_latent_space, too.
"""

import json
import re
import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from programs import ROOT, run
from torch.utils._python_dispatch import TorchDispatchMode

FILES = ROOT / "tests/packages/nep_models"
NUMBERS = json.loads((FILES / "numbers.json").read_text())
for module in ("ase", "vesin"):
    pytest.importorskip(module)

from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.nep import load  # noqa: E402
from calcops.nep.nep_file import read, write  # noqa: E402
from calcops.potentials import package  # noqa: E402
from structures import atoms_of, inputs_of  # noqa: E402


def assert_results_of_nep_cpu(results, frame, energy=1e-9, others=1e-8):
    """Compare results with NEP_CPU's. NEP_CPU's virials of atoms are the transposes of ours."""
    total, atom_energy, force, virial, atom_virial = (result[0].numpy() for result in results)
    expected = np.array(frame["energy"])
    assert np.abs(atom_energy - expected).max() < energy
    assert abs(total - expected.sum()) < energy * len(expected)
    expected = np.array(frame["force"])
    largest = np.abs(expected).max()
    assert largest > 0.1
    assert np.abs(force - expected).max() < others * largest
    expected = np.array(frame["virial"]).reshape(-1, 3, 3).transpose(0, 2, 1)
    largest = np.abs(expected).max()
    assert np.abs(atom_virial - expected).max() < others * largest
    assert np.abs(virial - expected.sum(0)).max() < others * len(expected) * largest


@pytest.mark.parametrize("name", NUMBERS)
def test_the_numbers_are_those_of_nep_cpu(name, capsys):
    model = load(FILES / f"{name}.txt")
    printed = capsys.readouterr().out
    assert re.search(r"splines of 256 cells differ by at most \de-\d\d of the largest", printed)
    for frame in NUMBERS[name]:
        assert_results_of_nep_cpu(model(*inputs_of(frame, model)), frame)


def test_few_cells_give_large_errors():
    model = load(FILES / "nep4.txt", cells=16)
    values, slopes = model.spline_error()
    assert 1e-6 < values < slopes < 1e-1
    frame = NUMBERS["nep4"][0]
    with pytest.raises(AssertionError):
        assert_results_of_nep_cpu(model(*inputs_of(frame, model)), frame)


@pytest.mark.parametrize("name", ["nep4", "nep4_types"])
def test_the_printed_errors_bound_those_of_fine_samples(name, capsys):
    """Slopes of the basis come from autograd, those of the splines from scipy."""
    from scipy.interpolate import BSpline

    model = load(FILES / f"{name}.txt", cells=16)
    model.fill()
    expected = np.zeros(2)
    for table, c, grid in (
        (model.radial_table / (4 * np.pi) ** 0.5, model.radial_c, model.radial_grid),
        (model.angular_table, model.angular_c, model.angular_grid),
    ):
        for coefficients, of_kind, (_, cutoff) in zip(table.numpy(), c.detach(), grid.tolist()):
            knots = cutoff / 16 * np.arange(-5, 16 + 6)
            spline = BSpline(knots, coefficients, 5)
            r = torch.linspace(1e-5, cutoff - 1e-5, 3001, dtype=torch.float64)

            def exact(r, cutoff=cutoff, of_kind=of_kind):
                angle = torch.arccos(2 * (r / cutoff - 1) ** 2 - 1)
                orders = torch.arange(len(of_kind), dtype=torch.float64)
                basis = (torch.cos(orders * angle[:, None]) + 1) / 2
                return (basis * (0.5 + 0.5 * torch.cos(torch.pi * r / cutoff))[:, None]) @ of_kind

            values, slopes = torch.func.jvp(exact, (r,), (torch.ones_like(r),))
            for k, true in enumerate((values.numpy(), slopes.numpy())):
                error = np.abs(spline(r.numpy(), k) - true).max() / np.abs(true).max()
                expected[k] = max(expected[k], error)
    bounds = np.array(model.spline_error())
    assert (expected <= bounds).all() and (bounds < 3 * expected).all()
    printed = np.array(re.findall(r"\de-\d\d", capsys.readouterr().out), float)
    assert (bounds <= printed).all() and (printed < 3 * bounds).all()


def test_a_model_of_some_types_gives_the_numbers_of_the_whole():
    whole = load(FILES / "nep4_types.txt")
    part = load(FILES / "nep4_types.txt", ["Al", "Ag"])
    assert part.type_names == ["Al", "Ag"]
    frame = dict(NUMBERS["nep4_types"][0])
    frame["types"] = [0 if t == 0 else 2 for t in frame["types"]]
    expected = whole(*inputs_of(frame, whole))
    # The cutoff of a model is that of its types.
    assert part.cutoff == 4.6
    frame["types"] = [{0: 1, 2: 0}[t] for t in frame["types"]]
    for result, other in zip(part(*inputs_of(frame, part)), expected):
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)


class _NoHostReads(TorchDispatchMode):
    """Raises an error where the host would wait for numbers of a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense
        assert function.overloadpacket not in reads, function
        return function(*args, **(kwargs or {}))


def test_a_model_of_several_nets_never_waits_for_a_gpu(monkeypatch):
    model = load(FILES / "nep4_types.txt")
    assert len(model.w0) > 1
    inputs = inputs_of(NUMBERS["nep4_types"][0], model)
    expected = model(*inputs)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with _NoHostReads():
        results = model(*inputs)
    for result, other in zip(results, expected):
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)


def test_empty_slots_padding_and_frames_change_nothing():
    model = load(FILES / "nep4_types.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS["nep4_types"][1], model)
    expected = model(types, list_neigh, Rij)
    n = len(types)
    # Empty slots hold NaN, one row is no atom, and there are two frames.
    padded_list = torch.full((2, n + 1, list_neigh.shape[2] + 2), -1)
    padded_list[:, :n, 1:-1] = list_neigh
    padded = torch.full((*padded_list.shape, 3), torch.nan, dtype=torch.float64)
    padded[:, :n, 1:-1] = torch.where((list_neigh >= 0).unsqueeze(-1), Rij, torch.nan)
    padded_types = torch.cat([types, torch.tensor([-1])]).expand(2, n + 1)
    results = model(padded_types, padded_list, padded)
    for result, other in zip(results, expected):
        for frame in range(2):
            own = result[frame] if result.shape[1:] == other.shape[1:] else result[frame, :n]
            torch.testing.assert_close(own, other[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["nep3_zbl", "nep4_types"])
def test_second_derivatives_are_those_of_finite_differences(name):
    model = load(FILES / f"{name}.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS[name][1], model)
    generator = torch.Generator().manual_seed(0)
    weights, direction = torch.randn(2, len(types), 3, dtype=torch.float64, generator=generator)
    moved = direction[list_neigh.clamp(min=0)] - direction.unsqueeze(1)

    def weighted_force(Rij):
        return (model(types, list_neigh, Rij, create_graph=True)[2] * weights).sum()

    leaf = torch.where((list_neigh >= 0).unsqueeze(-1), Rij, torch.nan).requires_grad_()
    (gradient,) = torch.autograd.grad(weighted_force(leaf), leaf)
    along = (gradient[list_neigh >= 0] * moved[list_neigh >= 0]).sum()
    step = 1e-4
    expected = (weighted_force(Rij + step * moved) - weighted_force(Rij - step * moved)) / step / 2
    assert abs(along - expected) < 1e-5 * abs(expected)


@pytest.mark.parametrize("name", ["nep4", "nep4_types"])
def test_an_archive_gives_the_same_in_ase(name, tmp_path):
    model = load(FILES / f"{name}.txt")
    package.save(model, tmp_path / "model.pt")
    frame = NUMBERS[name][0]
    results = []
    for potential in (model, package.load(tmp_path / "model.pt")):
        atoms = atoms_of(frame, model.type_names)
        atoms.calc = CalcOps(potential)
        results.append((atoms.get_potential_energies(), atoms.get_forces(), atoms.get_stress()))
    np.testing.assert_allclose(results[0][0], frame["energy"], atol=1e-9)
    for result, other in zip(*results):
        np.testing.assert_allclose(result, other, rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", ["nep3_zbl", "nep4_types"])
def test_a_package_of_the_command_gives_the_numbers_of_nep_cpu(name, tmp_path):
    output = tmp_path / "model.pt2"
    done = run(sys.executable, "-m", "calcops", "nep", FILES / f"{name}.txt", output)
    names = " ".join(read(FILES / f"{name}.txt").type_names)
    assert f"{output}: {names} within" in done.stdout
    model = package.load(output)
    for frame in NUMBERS[name]:
        assert_results_of_nep_cpu(model(*inputs_of(frame, model)), frame)


@pytest.mark.parametrize("ending", [".pt", pytest.param(".pt2", marks=pytest.mark.long)])
def test_a_package_in_float32_gives_the_numbers_of_nep_cpu_to_its_digits(ending, tmp_path):
    package.save(load(FILES / "nep4_types.txt"), tmp_path / f"model{ending}", dtype=torch.float32)
    model = package.load(tmp_path / f"model{ending}")
    for frame in NUMBERS["nep4_types"]:
        types, list_neigh, Rij = inputs_of(frame, model)
        results = model(types, list_neigh, Rij.float())
        assert {result.dtype for result in results} == {torch.float32}
        assert_results_of_nep_cpu([r.double() for r in results], frame, 1e-5, 1e-5)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_file_that_is_written_gives_the_same_model(name, tmp_path):
    model = load(FILES / f"{name}.txt")
    write(model.file(), tmp_path / "nep.txt")
    again = load(tmp_path / "nep.txt")
    assert model.state_dict().keys() == again.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    assert (again.type_names, again.cutoff) == (model.type_names, model.cutoff)
    np.testing.assert_array_equal(again.file().zbl, model.file().zbl)
    assert again.file().triples == model.file().triples


def energies_of_types(name, tmp_path):
    """Return the file of a model with three types as MatPL writes it: an energy for each type."""
    text = (FILES / f"{name}.txt").read_text().splitlines()
    neurons, dim = read(FILES / f"{name}.txt").w0.shape[1:]
    bias = 1 + next(i for i, line in enumerate(text) if line.startswith("ANN"))
    bias += 3 * neurons * (dim + 2)
    (tmp_path / "matpl.txt").write_text(
        "\n".join([*text[:bias], "1.5", "-2", "300", *text[bias + 1 :]])
    )
    return tmp_path / "matpl.txt", float(text[bias])


def test_a_file_of_matpl_subtracts_an_energy_of_each_type(tmp_path):
    frame = NUMBERS["nep4_types"][0]
    path, bias = energies_of_types("nep4_types", tmp_path)
    energy, atom_energy, force, *_ = load(path)(*inputs_of(frame, load(path)))
    whole = load(FILES / "nep4_types.txt")
    _, expected, expected_force, *_ = whole(*inputs_of(frame, whole))
    expected = expected + bias - torch.tensor([1.5, -2.0, 300.0])[frame["types"]]
    torch.testing.assert_close(atom_energy, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(energy, expected.sum(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(force, expected_force, rtol=0, atol=0)


def test_energies_of_types_are_written_as_a_neuron_without_inputs(tmp_path):
    frame = NUMBERS["nep4_types"][0]
    model = load(energies_of_types("nep4_types", tmp_path)[0])
    write(model.file(), tmp_path / "nep.txt")
    words = [line.split() for line in (tmp_path / "nep.txt").read_text().splitlines()]
    neurons = model.w0.shape[-1]
    assert ["ANN", str(neurons + 1), "0"] in words
    # GPUMD's number of numbers: a single energy for all types.
    dim = model.w0.shape[1]
    of_c = model.radial_c.numel() + model.angular_c.numel()
    assert sum(len(line) == 1 for line in words) == 3 * (neurons + 1) * (dim + 2) + 1 + of_c + dim
    again = load(tmp_path / "nep.txt")
    assert again.w0.shape == model.w0.shape
    for result, other in zip(again(*inputs_of(frame, model)), model(*inputs_of(frame, model))):
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)


def test_an_old_file_has_no_numbers_of_neighbours(tmp_path):
    path = edited("nep4", "cutoff 5 4 99 99", "cutoff 5 4", tmp_path)
    assert read(path).neighbours is None
    model = load(path)
    frame = NUMBERS["nep4"][0]
    assert_results_of_nep_cpu(model(*inputs_of(frame, model)), frame)


def test_a_file_with_other_ends_of_lines_is_read(tmp_path):
    text = (FILES / "nep4.txt").read_text()
    (tmp_path / "nep.txt").write_bytes(text.replace("\n", "\r\n").encode())
    assert np.array_equal(read(tmp_path / "nep.txt").w0, read(FILES / "nep4.txt").w0)


def test_written_cutoffs_have_all_digits_and_room_for_neighbours(tmp_path):
    file = read(FILES / "nep4.txt")
    file = replace(file, cutoffs=np.array([[7 + 1e-13, 4 + 1e-15]]))
    for neighbours, expected in ((None, 259), ((300, 40), 300), ((900, 40), 819)):
        write(replace(file, neighbours=neighbours), tmp_path / "nep.txt")
        again = read(tmp_path / "nep.txt")
        assert np.array_equal(again.cutoffs, file.cutoffs)
        assert again.neighbours[0] == expected  # 253 in diamond


def test_models_that_gpumd_and_nep_cpu_cannot_run_are_not_written(tmp_path):
    file = read(FILES / "nep4.txt")
    wide = replace(file, w0=np.ones((1, 121, 24)), b0=np.ones((1, 121)), w1=np.ones((1, 121)))
    with pytest.raises(ValueError, match="expected at most 120 neurons, as GPUMD and NEP_CPU"):
        write(wide, tmp_path / "nep.txt")
    radial, angular = file.c
    for c, message in (
        ((np.ones((1, 1, 5, 14)), angular), "expected n_max of at most 12 8, .*, got 13 4"),
        ((radial, np.ones((1, 1, 5, 10))), "expected n_max of at most 12 8, .*, got 4 9"),
        ((np.ones((1, 1, 18, 5)), angular), "expected basis_size of at most 16 12, .*, got 17"),
        ((radial, np.ones((1, 1, 14, 5))), r"expected basis_size of at most 16 12, .*, got \d+ 13"),
    ):
        with pytest.raises(ValueError, match=message):
            write(replace(file, c=c), tmp_path / "nep.txt")
    assert not (tmp_path / "nep.txt").exists()


def test_a_zbl_up_to_4_angstrom_switches_off_there(tmp_path):
    path = edited("nep3_zbl", "zbl 1 2", "zbl 1.5 3", tmp_path)
    model = load(path)
    types = torch.zeros(2, dtype=torch.int64)
    list_neigh = torch.tensor([[[1], [0]]])
    kind = torch.zeros(2, 1, dtype=torch.int64)
    for r in (1.2, 2.0, 2.9, 3.0, 3.5):
        Z = 6.0
        x = r * 2 * Z**0.23 * 2.134563
        phi = 0.18175 * np.exp(-3.1998 * x) + 0.50986 * np.exp(-0.94229 * x)
        phi += 0.28022 * np.exp(-0.4029 * x) + 0.02817 * np.exp(-0.20162 * x)
        switch = 1.0 if r < 1.5 else (0.5 + 0.5 * np.cos(np.pi * (r - 1.5) / 1.5)) * (r < 3)
        expected = 14.399645 * Z * Z / r * phi * switch
        d = torch.tensor([[[r, 0, 0]], [[-r, 0, 0]]], dtype=torch.float64)
        assert model.energies_of_zbl(d, kind).sum().item() == pytest.approx(expected, abs=1e-12)
    assert model(types, list_neigh, d[None])[0].isfinite().all()


def test_a_neighbour_without_a_type_is_an_empty_slot():
    model = load(FILES / "nep4_types.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS["nep4_types"][0], model)
    without = torch.where(list_neigh == 3, -1, list_neigh)
    types[3] = -1
    results = model(types, list_neigh, Rij)
    for result, other in zip(results, model(types, without, Rij)):
        torch.testing.assert_close(result, other, rtol=0, atol=0)
    assert results[1][0, 3] == 0


@pytest.mark.parametrize("name", ["nep4_types", "nep3_zbl"])
def test_a_type_that_the_model_lacks_is_an_error(name):
    model = load(FILES / f"{name}.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS[name][0], model)
    types[1] = len(model.type_names)
    with pytest.raises(RuntimeError, match="kind"):
        model(types, list_neigh, Rij)


def loss_of(model, frame):
    """Return the mean square of the errors of energies and forces."""
    _, atom_energy, force, _, _ = model(*inputs_of(frame, model), create_graph=True)
    energy = torch.tensor(frame["energy"]) - atom_energy[0]
    return energy.square().mean() + (torch.tensor(frame["force"]) - force[0]).square().mean()


def test_gradients_for_every_parameter_are_those_of_finite_differences():
    frame = NUMBERS["nep4_types"][0]
    model = load(FILES / "nep4_types.txt").train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    gradients = torch.autograd.grad(loss_of(model, frame), [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), gradients):
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        values = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                parameter += step * direction
            values.append(loss_of(model, frame).item())
        with torch.no_grad():
            parameter += 1e-5 * direction
        expected = (values[0] - values[1]) / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_eval_computes_the_tables_of_the_weights_in_training():
    frame = NUMBERS["nep3"][0]
    model = load(FILES / "nep3.txt").train()
    with torch.no_grad():
        model.radial_c += 0.1 * torch.randn(model.radial_c.shape).double()
        model.w0 += 0.1 * torch.randn(model.w0.shape).double()
    in_training = model(*inputs_of(frame, model))
    for result, other in zip(model.eval()(*inputs_of(frame, model)), in_training):
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)


def edited(name, old, new, tmp_path):
    text = (FILES / f"{name}.txt").read_text()
    assert old in text
    path = tmp_path / "nep.txt"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        ("nep4", "nep4 1 Si", "nep4_dipole 1 Si", "nep4_dipole has a dipole, which is not supp"),
        ("nep4", "nep4 1 Si", "nep4_polarizability 1 Si", "has a polarizability, which is not"),
        ("nep4", "nep4 1 Si", "nep4_charge1 1 Si", r"has charges \(qNEP\), which is not supported"),
        ("nep4", "nep4 1 Si", "nep4_zbl_charge2 1 Si", r"has charges \(qNEP\), which is not"),
        ("nep4", "nep4 1 Si", "nep3_temperature 1 Si", "has a temperature, which is not supported"),
        ("nep4", "nep4 1 Si", "nep5 1 Si", "nep5 is a NEP5, which is not supported"),
        ("nep4", "nep4 1 Si", "nep_zbl 1 Si", "nep_zbl is a NEP2, which is not supported"),
        ("nep4", "nep4 1 Si", "nep4 2 Si", "expected 2 types in the first line, got nep4 2 Si"),
        ("nep4", "nep4 1 Si", "nep4", "expected 0 types in the first line, got nep4"),
        ("nep3_zbl", "zbl 1 2", "zbl 0 0", r"expected \d+ numbers after the head, got \d+"),
        (
            "nep3_zbl",
            "zbl 1 2",
            "zbl 1 2 0",
            "expected `zbl` with a factor of radii above 0, got 0",
        ),
        ("nep3_zbl", "zbl 1 2", "zbl 0 0 0 0", "expected `zbl` with 0 <= inner < outer <= 4"),
        ("nep3_zbl", "zbl 1 2", "zbl 1 2 3 4", "expected `zbl` with 0 <= inner < outer <= 4"),
        ("nep3_zbl", "zbl 1 2", "zbl 2 1", "expected `zbl` with 0 <= inner < outer <= 4"),
        ("nep3_zbl", "zbl 1 2", "zbl 2 4.1", "expected `zbl` with 0 <= inner < outer <= 4"),
        (
            "nep3_zbl",
            "cutoff 4 4",
            "cutoff 4 1.5",
            "expected `zbl` within the angular cutoff of 1.5",
        ),
        ("nep4", "cutoff 5 4 99 99", "cutoff 5 4 99", "expected a line of `cutoff` and 2, 4 or 4"),
        ("nep4", "cutoff 5 4 99 99", "cutoff 5 4 9.9 99", "expected numbers of neighbours in `cut"),
        ("nep4", "cutoff 5 4", "cutoff 4 5", "expected radial >= angular > 0 in `cutoff`"),
        ("nep4", "n_max 4 4", "n_max 4", "expected a line of `n_max` and 2 numbers, got n_max 4"),
        ("nep4", "l_max 4 0 0", "l_max 1 2 0", "q_222 needs an `l_max` of 2 or more, got 1"),
        ("nep4", "l_max 4 0 0", "l_max 1 0 0 1", "q_112 needs an `l_max` of 2 or more, got 1"),
        ("nep4", "l_max 4 0 0", "l_max 3 0 0 0 0 0 1", "q_134 needs an `l_max` of 4 or more"),
        ("nep4", "l_max 4 0 0", "l_max 4 0 0 0 2", "expected `l_max` with flags for q_222, q_1111"),
        ("nep4", "l_max 4 0 0", "l_max 4 0 0 0 0 0 0 0", "expected `l_max` with flags for q_222"),
        ("nep4", "l_max 4 0 0", "l_max 5 0 0", "expected `l_max` from 1 to 4, got 5"),
        ("nep4", "l_max 4 0 0", "l_max 4 3 0", "expected `l_max` with flags for q_222, q_1111"),
        ("nep4", "l_max 4 0 0", "l_max 4 2 0", r"expected \d+ numbers after the head, got \d+"),
        ("nep4", "ANN 8 0", "ANN 8 1", "expected `ANN <neurons> 0`, got 8 1"),
        ("nep4", "ANN 8 0\n", "", "expected a line of `ANN` and 2 numbers"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n1\n", r"expected \d+ numbers after the head"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\nnan\n", "expected a finite number, got 'nan'"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n1_0\n", "expected a finite number, got '1_0'"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n1e999\n", "expected a finite number, got '1e999'"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n\u0661\n", "expected a finite number, got '\u0661'"),
        ("nep4", "ANN 8 0\n", "ANN 8 0 # neurons\n", "expected a line of `ANN` and 2 numbers"),
        ("nep4", "ANN 8 0\n", "ANN 8 0\nANN 8 0\n", "expected one number per line after the head"),
        ("nep4", "ANN 8 0\n", "ANN 0x8 0\n", "expected a finite number, got '0x8'"),
        ("nep4", "nep4 1 Si", "nep4 1_0 Si", "expected a finite number, got '1_0'"),
        (
            "nep4",
            "ANN 8 0\n",
            "ANN 8 0\n1 2\n",
            "expected one number per line after the head, got 1 2",
        ),
        ("nep4", "ANN 8 0", "ANN inf 0", "expected a finite number, got 'inf'"),
        ("nep4", "ANN 8 0", "ANN 0 0", "expected `ANN <neurons> 0`, got 0 0"),
        ("nep4", "n_max 4 4", "n_max 4.7 4", "expected an integer from 0 on, got '4.7'"),
        ("nep4", "n_max 4 4", "n_max -1 4", "expected an integer from 0 on, got '-1'"),
        ("nep4", "l_max 4 0 0", "l_max", "expected `l_max` from 1 to 4, got 0"),
        ("nep4", "cutoff 5 4", "cutoff inf 4", "expected a finite number, got 'inf'"),
        ("nep4_types", "3 Ag Cu Al", "3 Ag Cu Ag", "expected different types in the first line"),
        ("nep4", "nep4 1 Si", "nep4 1 si", "expected symbols of elements, such as Si, got si"),
        ("nep4_types", "Ag Cu Al", "Ag cU X", "expected symbols of elements, .*, got cU X"),
        ("nep4", "nep4 1 Si", "Si", "expected nep3, nep3_zbl, nep4 or nep4_zbl, got 'Si'"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(name, old, new, message, tmp_path):
    path = edited(name, old, new, tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, line ")


@pytest.mark.parametrize(
    "name, old, new, line",
    [
        ("nep4", "nep4 1 Si", "nep4 1 si", 1),
        ("nep4", "n_max 4 4", "n_max 4", 3),
        ("nep4", "n_max 4 4", "\nn_max 4", 4),
        ("nep4", "ANN 8 0\n", "", 6),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n1\n", 339),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n\n\n1 2\n", 9),
        ("nep4", "ANN 8 0\n", "ANN 8 0\n1\nnan\n", 8),
        ("nep3_zbl", "cutoff 4 4", "cutoff 4 1.5", 2),
    ],
)
def test_an_error_of_a_file_names_the_line(name, old, new, line, tmp_path):
    path = edited(name, old, new, tmp_path)
    with pytest.raises(ValueError, match=rf"nep\.txt, line {line}: expected"):
        read(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="expected nep3, nep3_zbl, nep4 or nep4_zbl, got "):
        load(tmp_path / "model.pt")


def test_wrong_types_and_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="expected types of Ag Cu Al, got Au$"):
        load(FILES / "nep4_types.txt", ["Au"])
    with pytest.raises(ValueError, match="expected different types, got Cu Cu"):
        load(FILES / "nep4_types.txt", ["Cu", "Cu"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="expected nep3, nep3_zbl, nep4 or nep4_zbl"):
        load(tmp_path / "empty.txt")


@pytest.mark.parametrize(
    "words, message",
    {
        "none.txt si.pt": "No such file or directory: 'none.txt'",
        f"{FILES / 'nep4.txt'} none/si.pt": "expected the folder of none/si.pt, got none",
        f"{FILES / 'nep4.txt'} si.pt --device cuda": "expected a GPU for --device cuda, got none",
        f"{FILES / 'nep4.txt'} si.pt --types Au": "expected types of Si, got Au",
        f"{FILES / 'nep4.txt'} si.pt --cells 0": "expected --cells of at least 4, got 0",
    }.items(),
)
def test_the_command_prints_errors_without_a_traceback(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["calcops.nep", *words.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("calcops.nep", run_name="__main__")
    assert str(stop.value.code).startswith("calcops nep: ")
    assert message in str(stop.value.code)
