"""calcops/train: splines or tables in the place of a model's nets, and float32 nets."""

import copy
import re

import pytest
import torch
from calcops.potentials import package
from calcops.train.deep_potential import DeepPotential, load_npz
from calcops.train.weights import save_npz
from test_train import arrays, assert_close, cluster, host_list, published_energies

pytestmark = pytest.mark.usefixtures("one_thread")
RESULTS = "energy", "atom_energy", "force", "virial", "atom_virial"


def steep():
    """Return a model whose first layers have steps that are too steep for a spline."""
    weights = arrays()
    for key in ("emb0_w0", "emb1_w0"):
        weights[key] = 100 * weights[key]
    return DeepPotential(weights, ["A", "B"]).requires_grad_(False)


@pytest.fixture(scope="module")
def exact():
    return DeepPotential(arrays(), ["A", "B"]).requires_grad_(False)


@pytest.fixture(scope="module")
def spline(exact):
    model = exact.tabulated(tolerance=1e-8)
    assert model.spline is not None
    assert model.table is None
    return model


@pytest.fixture(scope="module")
def structure():
    types, positions = cluster()
    return torch.from_numpy(types), *host_list(positions, 15)


def test_a_spline_gives_the_energies_of_the_published_definition(spline):
    types, positions = cluster()
    expected = published_energies(arrays(), types, positions)
    for slots in (11, 30):
        _, atom_energy, *_ = spline(torch.from_numpy(types), *host_list(positions, slots))
        assert_close(atom_energy[0], expected, 1e-8)


def test_a_spline_gives_every_result_of_the_nets(exact, spline, structure):
    for name, result, expected in zip(RESULTS, spline(*structure), exact(*structure)):
        assert result.shape == expected.shape, name
        assert_close(result, expected, 1e-7)


def test_forces_of_a_spline_are_derivatives_of_its_energy(spline):
    """They are exact derivatives of the spline's energy, which itself is not exact. Atoms 8 to 11
    are ghosts."""
    types, positions = cluster()
    list_neigh, Rij = host_list(positions, 15)
    local = spline(torch.from_numpy(types), list_neigh[:, :8], Rij[:, :8], 4)
    leaf = torch.tensor(positions, requires_grad=True)
    pairs = leaf[list_neigh.clamp(min=0)] - leaf[:, None]
    energies = spline(torch.from_numpy(types), list_neigh, pairs, 0, True)[1][0, :8]
    assert_close(local[1][0], energies.detach())
    assert_close(local[2][0], -torch.autograd.grad(energies.sum(), leaf)[0])
    assert local[4].shape == (1, 12, 3, 3)
    assert_close(local[4].sum(1), local[3])


def test_forces_of_a_spline_have_derivatives(spline):
    types, positions = cluster()
    list_neigh, _ = host_list(positions, 15)
    leaf = torch.tensor(positions, requires_grad=True)

    def square_of_forces(x):
        pairs = x[list_neigh.clamp(min=0)] - x[:, None]
        return spline(torch.from_numpy(types), list_neigh, pairs, 0, True)[2].square().sum()

    (gradient,) = torch.autograd.grad(square_of_forces(leaf), leaf)
    step = torch.zeros_like(leaf)
    step[4, 1] = 1e-5
    with torch.no_grad():
        positions_up, positions_down = leaf + step, leaf - step
    difference = square_of_forces(positions_up) - square_of_forces(positions_down)
    assert gradient[4, 1].item() == pytest.approx(difference.item() / 2e-5, rel=1e-6)


def test_frames_in_a_padded_batch_have_the_results_of_single_calls(spline, structure):
    types, list_neigh, Rij = structure
    first_frame = spline(types, list_neigh, Rij)
    fewer = list_neigh.clone()
    fewer[:, :, ::2] = -1
    second_frame = spline(types, fewer, Rij)

    # Both frames in a batch, each with two additional atoms of type -1 without neighbours.
    no_atom = torch.full((1, 2), -1)
    padded_types = torch.cat([types[None], no_atom], 1).expand(2, -1)
    empty = torch.full((2, 2, list_neigh.shape[2]), -1)
    lists = torch.cat([torch.cat([list_neigh, fewer]), empty], 1)
    pairs = torch.cat([Rij.expand(2, -1, -1, -1), Rij.new_zeros(2, 2, *Rij.shape[2:])], 1)
    energy, atom_energy, force, _, _ = spline(padded_types, lists, pairs)
    assert_close(energy, torch.cat([first_frame[0], second_frame[0]]))
    assert_close(force[:, :-2], torch.cat([first_frame[2], second_frame[2]]))
    assert (atom_energy[:, -2:] == 0).all()
    assert (force[:, -2:] == 0).all()


@pytest.mark.parametrize("kind", ["spline", "table"])
def test_torchscript_and_npz_keep_what_replaces_the_nets(kind, spline, structure, tmp_path):
    model = spline
    if kind == "table":
        model = steep().tabulated(1e-6)
    assert getattr(model, kind) is not None
    expected = model(*structure)
    save_npz(model, tmp_path / "model.npz")
    again = load_npz(tmp_path / "model.npz").requires_grad_(False)
    for results in (again(*structure), torch.jit.script(model)(*structure)):
        assert all(map(torch.equal, results, expected))


def test_steep_nets_get_tables(capsys):
    model = steep().tabulated(1e-6)
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"tabulated: no spline of up to 256 cells, whose error is \S+; "
        r"2 tables in cells of 0.\d+, \S+ MB, error \S+\n",
        printed,
    )
    assert model.spline is None
    assert model.table is not None


def test_float32_nets_print_their_error_and_keep_it(exact, structure, tmp_path, capsys):
    model = exact.with_float32_nets()
    printed = capsys.readouterr().out
    errors = [float(number) for number in re.findall(r"by (\S+) of", printed)]
    assert len(errors) == 2
    assert all(1e-9 < error < 1e-5 for error in errors)
    expected = exact(*structure)
    result = model(*structure)
    assert 1e-9 < (result[2] - expected[2]).abs().max() / expected[2].abs().max() < 1e-5
    assert result[2].dtype == torch.float64
    # A package converts the model's numbers to float64; its nets stay as they are.
    assert torch.equal(copy.deepcopy(model).to(torch.float64)(*structure)[2], result[2])
    save_npz(model, tmp_path / "model.npz")
    assert torch.equal(
        load_npz(tmp_path / "model.npz").requires_grad_(False)(*structure)[2], result[2]
    )
    assert torch.equal(torch.jit.script(model)(*structure)[2], result[2])


def test_splines_are_fitted_to_the_exact_nets_of_a_float32_model(exact, spline, structure):
    model = exact.with_float32_nets().tabulated(tolerance=1e-8)
    assert torch.equal(model.spline, spline.spline)
    assert model.has_float32_nets


@pytest.mark.long
def test_a_package_of_a_spline_with_float32_nets_has_its_results(spline, structure, tmp_path):
    model = spline.with_float32_nets()
    package.save(model, tmp_path / "model.pt2")
    packaged = package.load(tmp_path / "model.pt2")
    types, list_neigh, Rij = structure
    # The package was made with other sizes. The second call has a ghost.
    for atoms in (12, 11):
        inputs = types, list_neigh[:, :atoms], Rij[:, :atoms], 12 - atoms
        for name, result, expected in zip(RESULTS, packaged(*inputs), model(*inputs)):
            assert_close(result, expected, 1e-6)
            assert result.dtype == torch.float64, name
