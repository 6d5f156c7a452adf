"""The ASE calculator when users copy, pickle, fork or share it. Its neighbour lists, batches and
results."""

import copy
import multiprocessing
import os
import pickle
import signal
import traceback
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.io import read, write  # noqa: E402
from ase.mep import NEB  # noqa: E402
from ase.optimize import FIRE  # noqa: E402
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.potentials.package import load, save  # noqa: E402
from calcops.potentials.stillinger_weber import StillingerWeber  # noqa: E402

KEYS = "energy", "free_energy", "energies", "forces", "stress", "stresses"


def silicon(cells=2, rattle=0.1, seed=1):
    atoms = bulk("Si", "diamond", a=5.43, cubic=True).repeat(cells)
    atoms.rattle(rattle, seed=seed)
    return atoms


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(results[key], value, rtol=1e-11, atol=1e-12)


def everything(calculator, atoms):
    """Return all results of the calculator for a structure."""
    atoms = atoms.copy()
    atoms.calc = calculator
    atoms.get_potential_energy()
    return calculator.results


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "silicon.pt"
    save(StillingerWeber(), path)
    return path


@pytest.fixture(params=["module", "archive"])
def calculator(request, archive):
    """Return a calculator that has been used once, so that it holds neighbour lists."""
    calculator = CalcOps(StillingerWeber() if request.param == "module" else load(archive))
    everything(calculator, silicon(seed=2))
    return calculator


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_calculator_gives_the_same_results(calculator, copied):
    twin = copied(calculator)
    assert twin.neighbours.builds == 1
    assert_same(everything(twin, silicon()), everything(calculator, silicon()))
    assert calculator.neighbours.builds == 2
    assert twin.neighbours.builds == 2
    atoms = silicon()
    atoms.calc = twin  # copied together with its structure
    assert np.isfinite(copied(atoms).get_potential_energy())


def test_a_pickled_package_opens_from_any_working_folder(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(archive.parent)
    pickled = pickle.dumps(CalcOps(load(archive.name)))
    monkeypatch.chdir(tmp_path)
    calculator = pickle.loads(pickled)
    assert calculator.model.path == archive
    assert calculator.model.type_names == ["Si"]
    expected = everything(CalcOps(StillingerWeber()), silicon())
    assert_same(everything(calculator, silicon()), expected)


def in_child(calculator, atoms):
    """Return the results that a forked child computes. A child that hangs ends after a minute."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            with open(writer, "wb") as file:
                pickle.dump(everything(calculator, atoms), file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        received = file.read()
    os.waitpid(child, 0)
    return pickle.loads(received)


def fork_after_threads(calculator):
    torch.set_num_threads(2)
    atoms = silicon(4)  # 512 atoms, enough for the operators and PyTorch to use threads
    before = everything(calculator, atoms)
    atoms.rattle(0.01, seed=3)
    assert_same(in_child(calculator, atoms), everything(calculator, atoms))
    assert before["energy"] != calculator.results["energy"]


def test_a_forked_child_computes_after_its_parent_used_threads(archive):
    """The fork is in a new process. If a process has used autograd's threads for devices, autograd
    does not work in its children, and other tests may have used them in this process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(fork_after_threads, CalcOps(load(archive))).result()


def energy_and_forces(atoms):
    return atoms.get_potential_energy(), atoms.get_forces()


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_joblib_computes_structures_that_carry_the_calculator(archive, backend):
    """Each process gets a copy of one calculator. Threads would share its results, so each
    structure gets its own calculator of one model."""
    joblib = pytest.importorskip("joblib", reason="joblib (extra `test`) is not installed")
    calculator = CalcOps(load(archive))
    structures = [silicon(seed=seed) for seed in range(6)]
    expected = [everything(CalcOps(StillingerWeber()), atoms) for atoms in structures]
    for atoms in structures:
        atoms.calc = calculator if backend == "loky" else CalcOps(calculator.model)
    results = joblib.Parallel(n_jobs=2, backend=backend)(
        joblib.delayed(energy_and_forces)(atoms) for atoms in structures
    )
    for (energy, forces), values in zip(results, expected, strict=True):
        np.testing.assert_allclose(energy, values["energy"], rtol=1e-11)
        np.testing.assert_allclose(forces, values["forces"], rtol=1e-11, atol=1e-12)


def test_another_dtype_does_not_change_the_callers_model():
    model = StillingerWeber()
    exact = everything(CalcOps(model), silicon())
    single = CalcOps(model, dtype=torch.float32)
    assert model.pairs.dtype == torch.float64
    assert single.model.pairs.dtype == torch.float32
    assert CalcOps(model).model is model, "without a change of dtype, a model is not copied"
    difference = abs(everything(single, silicon())["forces"] - exact["forces"]).max()
    assert 1e-9 < difference < 1e-4
    assert CalcOps(model.float()).dtype == torch.float32, "the default dtype is the module's"


def test_another_dtype_than_that_of_a_package_is_refused(archive):
    with pytest.raises(
        ValueError, match=r"expected the package's own cpu, torch.float64, got .*float32"
    ):
        CalcOps(load(archive), dtype=torch.float32)


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="skn"):
        CalcOps(StillingerWeber(), skn=1.0)


def test_in_a_moving_cell_few_lists_give_the_forces_of_a_new_list_at_each_step():
    """A crystal is compressed, sheared and shaken step by step."""
    atoms = silicon(rattle=0.02)
    random = np.random.default_rng(0)
    atoms.calc = CalcOps(StillingerWeber(), skin=0.6)
    for _ in range(60):
        strain = np.eye(3) + [[-0.002, 0.001, 0], [0, -0.001, 0], [0, 0.0005, -0.0015]]
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        # The common shift of all atoms needs no new list.
        atoms.positions += random.normal(0, 0.004, (len(atoms), 3)) + [0.3, 0, 0]
        fresh = everything(CalcOps(StillingerWeber(), skin=0.0), atoms)
        np.testing.assert_allclose(atoms.get_forces(), fresh["forces"], atol=1e-12)
    assert 1 < atoms.calc.neighbours.builds <= 6


def test_a_vacuum_that_grows_needs_no_new_list():
    atoms = silicon()
    atoms.pbc = [True, True, False]
    atoms.calc = CalcOps(StillingerWeber())
    energy = atoms.get_potential_energy()
    atoms.set_cell(atoms.cell.array + np.diag([0, 0, 20]))
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-14)
    assert atoms.calc.neighbours.builds == 1


def test_images_of_a_band_that_share_a_calculator_keep_a_list_each():
    """A vacancy moves by one site in nine images, which differ by more than the skin."""
    first = bulk("Si", "diamond", a=5.43, cubic=True).repeat(2)
    last = first.copy()
    moving = first.get_distances(0, range(1, len(first)), mic=True).argmin() + 1
    last.positions[moving] = first.positions[0]
    del first[0], last[0]
    shared = CalcOps(StillingerWeber())
    results = []
    for calculators in ([shared] * 9, [CalcOps(StillingerWeber()) for _ in range(9)]):
        images = [first.copy() for _ in range(8)] + [last.copy()]
        for image, calculator in zip(images, calculators):
            image.calc = calculator
        band = NEB(images, allow_shared_calculator=True, method="improvedtangent")
        band.interpolate(mic=True)
        FIRE(band, logfile=None).run(fmax=0.0, steps=5)
        results.append((band.energies, band.get_positions()))
    for with_shared, expected in zip(*results):
        np.testing.assert_allclose(with_shared, expected, rtol=1e-11, atol=1e-10)
    energies, _ = results[0]
    assert np.ptp(energies) > 0.1
    assert 5 <= shared.neighbours.builds <= 2 * len(images)


def test_a_calculator_keeps_few_lists_of_large_structures(monkeypatch):
    calculator = CalcOps(StillingerWeber())
    monkeypatch.setattr("calcops.ase.neighbour_lists.kSlots", 3000)
    for seed in range(4):
        everything(calculator, silicon(rattle=0.5, seed=seed))  # 64 atoms with some 30 slots each
    assert 1 <= len(calculator.neighbours.kept) < 3


def structures():
    cluster = silicon(1)
    cluster.pbc = False
    sheared = silicon(1, seed=3)
    sheared.set_cell(sheared.cell.array @ [[1, 0.1, 0], [0, 1, 0], [0, 0, 0.97]], scale_atoms=True)
    return [silicon(), cluster, Atoms("Si"), sheared, bulk("Si", "diamond", a=5.3), silicon(seed=5)]


def test_a_batch_of_any_structures_is_one_call_of_the_model(calculator):
    expected = [everything(CalcOps(StillingerWeber()), atoms) for atoms in structures()]
    # Without a cell there are no stress and stresses.
    assert [len(results) for results in expected] == [6, 6, 4, 6, 6, 6]
    model = calculator.model
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return model(*arguments)

    calculator.model = counted
    batch = calculator.calculate_batch(structures())
    assert len(calls) == 1
    for results, of_one in zip(batch, expected, strict=True):
        assert_same(results, of_one)
    assert calculator.calculate_batch([]) == []


def test_a_file_keeps_every_result(tmp_path):
    atoms = silicon(1)
    atoms.calc = CalcOps(StillingerWeber())
    expected = everything(atoms.calc, atoms)
    assert set(CalcOps.implemented_properties) == set(expected) == set(KEYS)
    assert isinstance(expected["energy"], float)
    np.testing.assert_allclose(expected["stresses"].sum(0), expected["stress"], atol=1e-15)
    exported = atoms.calc.export_properties()  # checks the shapes
    assert_same({key: exported[key] for key in KEYS}, expected)
    write(tmp_path / "silicon.extxyz", atoms)
    results = read(tmp_path / "silicon.extxyz").calc.results
    assert {"energy", "forces", "stress"} <= results.keys()
    for key, value in results.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-7)
