"""The ASE calculator is copied, pickled, forked and shared as those who use ASE do it,
and takes batches."""

import copy
import multiprocessing
import os
import pickle
import signal
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms, units  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.io import read, write  # noqa: E402
from ase.mep import NEB  # noqa: E402
from ase.optimize import FIRE  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.potentials.package import load, save  # noqa: E402
from calcops.potentials.stillinger_weber import StillingerWeber  # noqa: E402

KEYS = "energy", "free_energy", "energies", "forces", "stress", "stresses"


def silicon(cells=2, rattle=0.1, seed=1):
    atoms = bulk("Si", "diamond", a=5.43, cubic=True).repeat(cells)
    atoms.rattle(rattle, seed=seed)
    return atoms


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-11, atol=1e-12)


def everything(calculator, atoms):
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
    """A calculator that has been used, so that it holds lists."""
    calculator = CalcOps(StillingerWeber() if request.param == "module" else load(archive))
    everything(calculator, silicon(seed=2))
    return calculator


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_calculator_gives_the_same(calculator, copied):
    again = copied(calculator)
    assert again.neighbours.builds == 1
    assert_same(everything(again, silicon()), everything(calculator, silicon()))
    assert again.neighbours.builds == calculator.neighbours.builds == 2
    copied_atoms = copied(silicon())  # as structures travel with their calculator
    copied_atoms.calc = again
    assert np.isfinite(copied(copied_atoms).get_potential_energy())


def test_a_pickled_package_is_opened_by_its_path_wherever_the_process_is(
    archive, tmp_path, monkeypatch
):
    monkeypatch.chdir(archive.parent)
    pickled = pickle.dumps(CalcOps(load(archive.name)))
    monkeypatch.chdir(tmp_path)
    calculator = pickle.loads(pickled)
    assert calculator.model.path == archive and calculator.model.type_names == ["Si"]
    assert_same(
        everything(calculator, silicon()), everything(CalcOps(StillingerWeber()), silicon())
    )


def in_child(calculator, atoms):
    """The results of a forked child, which gets a minute."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
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
    """Some 500 atoms: enough for the operators and for PyTorch to share among threads."""
    torch.set_num_threads(2)
    atoms = silicon(4)
    expected = everything(calculator, atoms)
    atoms.rattle(0.01, seed=3)
    assert_same(in_child(calculator, atoms), everything(calculator, atoms))
    assert expected["energy"] != calculator.results["energy"]


def test_a_forked_child_computes_after_its_parent_used_threads(calculator):
    """Forks in a process of its own: autograd refuses to work in a child of one that used its
    threads for devices, as other tests may have done here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(fork_after_threads, calculator).result()


def test_a_pool_of_spawned_processes_computes(archive):
    calculator, structures = CalcOps(load(archive)), [silicon(seed=seed) for seed in (1, 2)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for atoms, found in zip(structures, pool.map(everything, [calculator] * 2, structures)):
            assert_same(found, everything(calculator, atoms))


def energy_and_forces(atoms):
    return atoms.get_potential_energy(), atoms.get_forces()


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_joblib_computes_structures_that_carry_the_calculator(calculator, backend):
    """Processes get copies of one calculator; threads, which would share its results, get one each
    over one model."""
    joblib = pytest.importorskip("joblib", reason="joblib (extra `test`) is not installed")
    atoms = [silicon(seed=seed) for seed in range(6)]
    expected = [everything(CalcOps(StillingerWeber()), one) for one in atoms]
    for one in atoms:
        one.calc = calculator if backend == "loky" else CalcOps(calculator.model)
    found = joblib.Parallel(n_jobs=2, backend=backend)(
        joblib.delayed(energy_and_forces)(one) for one in atoms
    )
    for (energy, forces), results in zip(found, expected, strict=True):
        np.testing.assert_allclose(energy, results["energy"], rtol=1e-11)
        np.testing.assert_allclose(forces, results["forces"], rtol=1e-11, atol=1e-12)


def test_another_dtype_leaves_the_callers_model_as_it_is():
    model = StillingerWeber()
    exact = everything(CalcOps(model), silicon())
    single = CalcOps(model, dtype=torch.float32)
    assert model.pairs.dtype == torch.float64 and single.model.pairs.dtype == torch.float32
    assert CalcOps(model).model is model, (
        "nothing to change, nothing to copy: it follows a model in training"
    )
    assert 1e-9 < abs(everything(single, silicon())["forces"] - exact["forces"]).max() < 1e-4
    assert CalcOps(model.float()).dtype == torch.float32, "a module's own"


def test_a_package_has_its_own_dtype(archive):
    with pytest.raises(
        ValueError, match=r"expected the package's own cpu, torch.float64, got .*float32"
    ):
        CalcOps(load(archive), dtype=torch.float32)


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="skn"):
        CalcOps(StillingerWeber(), skn=1.0)


def test_a_moving_cell_keeps_its_list_and_every_pair_within_reach():
    """A crystal that is compressed, sheared and shaken step by step, against lists without a
    skin."""
    atoms, random = silicon(rattle=0.02), np.random.default_rng(0)
    atoms.calc = CalcOps(StillingerWeber(), skin=0.6)
    for _ in range(60):
        strain = np.eye(3) + [[-0.002, 0.001, 0], [0, -0.001, 0], [0, 0.0005, -0.0015]]
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        # All of them, too: no relative move.
        atoms.positions += random.normal(0, 0.004, (len(atoms), 3)) + [0.3, 0, 0]
        fresh = everything(CalcOps(StillingerWeber(), skin=0.0), atoms)
        np.testing.assert_allclose(atoms.get_forces(), fresh["forces"], atol=1e-12)
    assert 1 < atoms.calc.neighbours.builds <= 6


def test_npt_dynamics_find_neighbours_in_few_steps():
    from ase.md.nose_hoover_chain import IsotropicMTKNPT

    atoms = silicon(rattle=0.03)
    atoms.calc = CalcOps(StillingerWeber(), skin=1.0)
    dynamics = IsotropicMTKNPT(
        atoms, units.fs, temperature_K=300, pressure_au=0, tdamp=50 * units.fs, pdamp=500 * units.fs
    )
    dynamics.run(100)
    assert atoms.cell.volume != silicon().cell.volume
    assert atoms.calc.neighbours.builds <= 3


def test_a_vacuum_that_grows_needs_no_new_list():
    atoms = silicon()
    atoms.pbc = [True, True, False]
    atoms.calc = CalcOps(StillingerWeber())
    energy = atoms.get_potential_energy()
    atoms.set_cell(atoms.cell.array + np.diag([0, 0, 20]))
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-14)
    assert atoms.calc.neighbours.builds == 1


def test_images_of_a_band_that_share_a_calculator_keep_a_list_each():
    """A vacancy that moves by one site: nine images, eight of them apart by more than the skin."""
    first = bulk("Si", "diamond", a=5.43, cubic=True).repeat(2)
    last = first.copy()
    moving = first.get_distances(0, range(1, len(first)), mic=True).argmin() + 1
    last.positions[moving] = first.positions[0]
    del first[0], last[0]
    shared, found = CalcOps(StillingerWeber()), []
    for calculators in ([shared] * 9, [CalcOps(StillingerWeber()) for _ in range(9)]):
        images = [first.copy() for _ in range(8)] + [last.copy()]
        for image, calculator in zip(images, calculators):
            image.calc = calculator
        band = NEB(images, allow_shared_calculator=True, method="improvedtangent")
        band.interpolate(mic=True)
        FIRE(band, logfile=None).run(fmax=0.0, steps=5)
        found.append((band.energies, band.get_positions()))
    for ours, expected in zip(*found):
        np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-10)
    assert np.ptp(found[0][0]) > 0.1 and 5 <= shared.neighbours.builds <= 2 * len(images)


def test_lists_of_large_structures_do_not_pile_up(monkeypatch):
    calculator = CalcOps(StillingerWeber())
    monkeypatch.setattr("calcops.ase.calculator.kSlots", 3000)
    for seed in range(4):
        everything(calculator, silicon(rattle=0.5, seed=seed))  # 64 atoms in some 30 slots
    assert 1 <= len(calculator.neighbours.kept) < 3


def structures():
    cluster = silicon(1)
    cluster.pbc = False
    sheared = silicon(1, seed=3)
    sheared.set_cell(sheared.cell.array @ [[1, 0.1, 0], [0, 1, 0], [0, 0, 0.97]], scale_atoms=True)
    return [silicon(), cluster, Atoms("Si"), sheared, bulk("Si", "diamond", a=5.3), silicon(seed=5)]


def test_a_batch_of_any_structures_is_one_call_of_the_model(calculator):
    expected = [everything(CalcOps(StillingerWeber()), atoms) for atoms in structures()]
    assert [len(results) for results in expected] == [6, 4, 4, 6, 6, 6]
    calls, model = [], calculator.model
    calculator.model = lambda *arguments: calls.append(1) or model(*arguments)
    for ours, theirs in zip(calculator.calculate_batch(structures()), expected, strict=True):
        assert_same(ours, theirs)
    assert len(calls) == 1 and calculator.calculate_batch([]) == []


def test_results_are_what_ase_calls_them():
    atoms = silicon(1)
    atoms.calc = CalcOps(StillingerWeber())
    assert set(everything(atoms.calc, atoms)) == set(KEYS) == set(CalcOps.implemented_properties)
    assert isinstance(atoms.get_potential_energy(), float)
    assert atoms.get_potential_energy() == atoms.get_potential_energy(force_consistent=True)
    assert atoms.get_potential_energies().shape == (
        8,
    ) and atoms.get_potential_energies().sum() == pytest.approx(
        atoms.get_potential_energy(), rel=1e-14
    )
    assert atoms.get_stress().shape == (6,) and atoms.get_stresses().shape == (8, 6)
    assert atoms.get_stress(voigt=False).shape == (3, 3) and atoms.get_stresses(
        voigt=False
    ).shape == (8, 3, 3)
    np.testing.assert_allclose(atoms.get_stresses().sum(0), atoms.get_stress(), atol=1e-15)


def test_charges_and_magnetic_moments_change_nothing():
    atoms = silicon(1)
    atoms.calc = CalcOps(StillingerWeber())
    forces = atoms.get_forces()
    atoms.set_initial_charges(np.ones(len(atoms)))
    assert atoms.calc.calculation_required(atoms, ["energy"]) is False
    np.testing.assert_array_equal(atoms.get_forces(), forces)


def test_a_file_keeps_every_result(tmp_path):
    atoms = silicon(1)
    atoms.calc = CalcOps(StillingerWeber())
    expected = everything(atoms.calc, atoms)
    exported = atoms.calc.export_properties()  # which checks their shapes
    assert_same({key: exported[key] for key in KEYS}, expected)
    write(tmp_path / "silicon.extxyz", atoms)
    again = read(tmp_path / "silicon.extxyz").calc.results
    assert {"energy", "forces", "stress"} <= again.keys()
    for key, value in again.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-7)
