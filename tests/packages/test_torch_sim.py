"""Models of CalcOps in torch-sim, against the ASE calculator and torch-sim's own checks."""

from pathlib import Path

import numpy as np
import pytest
import torch

ts = pytest.importorskip("torch_sim", reason="needs torch-sim", exc_type=ImportError)
for name in ("ase", "vesin"):
    pytest.importorskip(name, reason=f"needs {name}")
testing = pytest.importorskip("torch_sim.testing", reason="needs torch-sim 0.6")
from ase import Atoms  # noqa: E402
from ase.build import bulk, fcc111  # noqa: E402
from calcops import deepmd, nep  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.potentials import LennardJones, StillingerWeber, load, save  # noqa: E402
from calcops.torch_sim import CalcOpsModel  # noqa: E402
from structures import Morse  # noqa: E402
from torch_sim.models.interface import validate_model_outputs  # noqa: E402

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
NAMES = "Si Mg Fe C H Ar Cu Sb Ti O Ga Ni Ca Os N Al".split()


def pair_model():
    return LennardJones(epsilon=0.01, sigma=2.0, cutoff=6.0, units="metal", type_names=NAMES)


def state_of(*structures):
    return ts.initialize_state(list(structures), CPU, torch.float64)


def silicon(*strains):
    """Return a disturbed cube of silicon for each strain."""
    structures = []
    for seed, strain in enumerate(strains):
        atoms = bulk("Si", cubic=True)
        atoms.set_cell(atoms.cell * (1 + strain), scale_atoms=True)
        atoms.rattle(0.1, seed=seed)
        structures.append(atoms)
    return structures


def assert_same(results, structures, calculator):
    """Assert that results of a batch are those of the calculator for each structure."""
    expected = calculator.calculate_batch(structures)
    forces = results["forces"].split([len(atoms) for atoms in structures])
    energies = results["energies"].split([len(atoms) for atoms in structures])
    for k, of_one in enumerate(expected):
        assert results["energy"][k].item() == pytest.approx(of_one["energy"], abs=1e-11)
        np.testing.assert_allclose(forces[k], of_one["forces"], atol=1e-11)
        np.testing.assert_allclose(energies[k], of_one["energies"], atol=1e-11)
        if "stress" in of_one:
            xx, yy, zz, yz, xz, xy = of_one["stress"]
            stress = [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]
            np.testing.assert_allclose(results["stress"][k], stress, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_sim_validates_the_outputs(dtype):
    model = CalcOpsModel(pair_model().to(dtype))
    assert (model.device, model.dtype) == (CPU, dtype)
    validate_model_outputs(model, CPU, dtype)


@pytest.mark.parametrize("name", testing.SIMSTATE_BULK_GENERATORS)
def test_crystals_of_torch_sim_are_those_of_the_calculator(name):
    state = testing.SIMSTATE_BULK_GENERATORS[name](CPU, torch.float64)
    tolerances = dict.fromkeys(["energy_atol", "force_atol", "stress_atol"], 1e-10)
    calculator = CalcOps(pair_model())
    testing.assert_model_calculator_consistency(
        CalcOpsModel(pair_model()), calculator, state, **tolerances
    )


@pytest.mark.parametrize(
    "model",
    [
        Morse(),
        nep.load(FOLDER / "nep_models/nep4_types.txt"),
        deepmd.load(FOLDER / "deepmd_models/pairs.pth"),
    ],
    ids=["an energy of your own", "NEP", "Deep Potential"],
)
def test_every_kind_of_potential_gives_the_results_of_the_calculator(model):
    structures = []
    for seed, symbol in enumerate(model.type_names):
        atoms = bulk("Cu", a=4.1, cubic=True).repeat(2)
        atoms.rattle(0.1, seed=seed)
        atoms.symbols[::2] = symbol
        atoms.symbols[1::2] = model.type_names[0]
        structures.append(atoms)
    assert_same(CalcOpsModel(model)(state_of(*structures)), structures, CalcOps(model))


def test_molecules_have_forces_and_no_stress():
    states = [make(CPU, torch.float64) for make in testing.SIMSTATE_MOLECULE_GENERATORS.values()]
    state = ts.concatenate_states(states)
    results = CalcOpsModel(pair_model())(state)
    assert_same(results, ts.io.state_to_atoms(state), CalcOps(pair_model()))
    assert results["stress"].isnan().all()


def test_a_batch_of_unlike_systems_is_each_of_them():
    slab = fcc111("Al", (2, 2, 3), vacuum=4)  # periodic in two directions
    wire = Atoms("SiC", [[0, 0, 0], [1, 2, 0]], cell=[3.1, 3, 3], pbc=[True, False, False])
    for structures in (silicon(0, 0.01) + [bulk("Fe"), bulk("Cu").repeat(3)], [slab], [wire]):
        results = CalcOpsModel(pair_model())(state_of(*structures))
        assert_same(results, structures, CalcOps(pair_model()))


def test_only_systems_whose_atoms_have_moved_far_are_searched_again():
    model = CalcOpsModel(StillingerWeber(), skin=0.5)
    state = state_of(*silicon(0, 0.01, 0.02))

    def searches():
        before = model.neighbours.builds
        assert_same(model(state), ts.io.state_to_atoms(state), CalcOps(StillingerWeber()))
        return model.neighbours.builds - before

    assert searches() == 3
    state.positions += torch.linspace(-0.1, 0.1, 72).double().view(24, 3)  # in place
    assert searches() == 0
    state.positions[12] += 0.2  # of the second system
    assert searches() == 1
    state.cell[2] *= 1.01
    assert searches() == 0
    state.cell[0] *= 0.95
    assert searches() == 1
    state.pbc = torch.tensor([True, True, False])
    assert searches() == 3
    state.positions[:8] = state.positions[8:16]
    assert searches() == 1
    state = state[[2, 0]]
    assert searches() == 2
    state.system_idx = torch.tensor([0] * 6 + [1] * 10)
    assert searches() == 2
    state = state_of(bulk("Si", cubic=True).repeat((2, 1, 1)))  # as many atoms in one system
    assert searches() == 1


def test_an_error_leaves_no_list_behind():
    model = CalcOpsModel(StillingerWeber())
    state = state_of(*silicon(0, 0.01))
    expected = model(state)["energy"]
    broken = state.clone()
    broken.positions[3] = torch.nan
    larger = state_of(*silicon(0, 0, 0))
    larger.positions[3] = larger.positions[4]
    for wrong in (broken, larger, larger, broken):
        with pytest.raises(ValueError, match="CalcOps: expected"):
            model(wrong)
        torch.testing.assert_close(model(state)["energy"], expected, rtol=0, atol=1e-12)


def test_errors_name_the_system():
    model = CalcOpsModel(StillingerWeber())
    good, other = silicon(0, 0)
    other.numbers[2] = 32
    with pytest.raises(ValueError, match=r"of \['Si'\], got the atomic number 32 in system 1"):
        model(state_of(good, other))
    other = good.copy()
    other.positions[5] = other.positions[2] + other.cell[0]
    with pytest.raises(ValueError, match="got atoms 2 and 5 of system 1 in the same place"):
        model(state_of(good, other))
    other.positions[5] = np.nan
    with pytest.raises(ValueError, match=r"finite positions, got \[nan.* in row 5 in system 1"):
        model(state_of(good, other))
    steep = CalcOpsModel(LennardJones(1, 1e4, 6.0, units="metal", type_names=["Si"]).float())
    with pytest.raises(ValueError, match=r"expected finite results .* of system 0"):
        steep(state_of(good))
    with pytest.raises(ValueError, match=r"expected chemical symbols .*, got \['OW'\]"):
        CalcOpsModel(LennardJones(units="metal", type_names=["OW"]))


def test_crystals_relax_with_their_cells():
    final = ts.optimize(
        system=silicon(-0.03, 0.02),
        model=CalcOpsModel(StillingerWeber()),
        optimizer=ts.Optimizer.fire,
        convergence_fn=ts.generate_force_convergence_fn(1e-3),
        init_kwargs={"cell_filter": ts.CellFilter.frechet},
    )
    np.testing.assert_allclose(final.energy / 8, -4.3366, atol=1e-4)
    np.testing.assert_allclose(torch.linalg.det(final.cell) ** (1 / 3), 5.431, atol=1e-2)


def test_dynamics_conserve_the_energy_of_each_system():
    totals = []
    model = CalcOpsModel(StillingerWeber(), skin=0.2)
    state = state_of(*silicon(0, 0.01))
    state.rng = 0
    state = ts.nve_init(state, model, kT=torch.tensor(0.05).double())
    for _ in range(200):
        state = ts.nve_step(state, model, dt=torch.tensor(0.05).double())
        squares = (state.momenta.square().sum(1) / state.masses / 2).view(2, 8)
        totals.append(state.energy + squares.sum(1))
    spread = torch.stack(totals).std(0)
    assert (spread < 1e-3).all() and model.neighbours.builds > 4


def test_results_are_differentiable_on_request():
    state = state_of(*silicon(0, 0.01))
    state.positions.requires_grad_()
    model = CalcOpsModel(StillingerWeber(), retain_graph=True)
    results = model(state)
    (gradient,) = torch.autograd.grad(results["energy"].sum(), state.positions)
    torch.testing.assert_close(-gradient, results["forces"].detach())
    assert not CalcOpsModel(StillingerWeber())(state)["energy"].requires_grad


def test_packages_compute_and_keep_their_dtype(tmp_path):
    save(StillingerWeber(), tmp_path / "silicon.pt")
    package = load(tmp_path / "silicon.pt")
    structures = silicon(0, 0.01)
    model = CalcOpsModel(package)
    assert_same(model(state_of(*structures)), structures, CalcOps(StillingerWeber()))
    assert (model.device, model.dtype) == (CPU, torch.float64)
    with pytest.raises(ValueError, match="expected a module for retain_graph=True, got a package"):
        CalcOpsModel(package, retain_graph=True)


def test_a_module_follows_to_and_is_in_the_state_dict():
    model = CalcOpsModel(StillingerWeber()).to(torch.float32)
    assert model.dtype == torch.float32
    assert "model.pairs" in model.state_dict()
