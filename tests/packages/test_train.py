"""calcops/train: the model is the published one, also with splines, tables or float32 nets in the
place of its nets. Its forces are derivatives of its energy."""

import contextlib
import copy
import io
import re

import numpy as np
import pytest
import torch
from calcops.potentials import package

pytest.importorskip("scipy")

from calcops.deepmd.deep_potential import DeepPotential, load_npz  # noqa: E402
from calcops.deepmd.nets import save_npz  # noqa: E402
from calcops.train.weights import initial  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def arrays(sel=(9, 7), seed=0, rcut=3.0):
    """Return weights for two types, with every kind of layer.

    The width of a layer's output equals that of its input, is twice that, or neither. Some layers
    are residual.
    """
    random = np.random.default_rng(seed)
    result = initial(list(sel), rcut, 1.1, [5, 10, 10], 3, [8, 8, 16], seed)
    for key, w in result.items():
        if re.search("_[wb]", key):
            result[key] = random.normal(size=np.shape(w)) / 2
    result["fit1_res1"] = 0
    result["emb1_res2"] = 0
    result["davg"] = random.normal(0, 0.2, (2, 2, 4))
    result["dstd"] = random.uniform(0.3, 1, (2, 2, 4))
    result["bias_atom_e"] = random.normal(size=2)
    return result


@pytest.fixture(params=[(9, 7), (3, 2)], ids=["room_for_all", "the_nearest_only"])
def weights(request):
    return arrays(request.param)


def load(weights, folder):
    np.savez(folder / "model.npz", **weights)
    return load_npz(folder / "model.npz", ["A", "B"])


def cluster(n=12, seed=1):
    """Return types and positions of n atoms, with distances above 0.7."""
    random = np.random.default_rng(seed)
    positions = []
    while len(positions) < n:
        x = random.uniform(0, 3.2, 3)
        if all(np.linalg.norm(x - y) > 0.7 for y in positions):
            positions.append(x)
    return random.integers(2, size=n), np.array(positions)


def host_list(positions, slots, seed=2):
    """Return list_neigh and Rij in which each atom has all others as neighbours, also beyond the
    cutoff.

    They are in random slots. In the empty slots, Rij is NaN.
    """
    n = len(positions)
    random = np.random.default_rng(seed)
    list_neigh = np.full((1, n, slots), -1)
    Rij = np.full((1, n, slots, 3), np.nan)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        chosen = random.permutation(slots)[: n - 1]
        list_neigh[0, i, chosen] = others
        Rij[0, i, chosen] = positions[others] - positions[i]
    return torch.from_numpy(list_neigh), torch.from_numpy(Rij)


def net(w, name, x):
    """Return the output of a net for a vector x."""
    layers = sum(key.startswith(name + "_w") for key in w)
    for i in range(layers):
        y = x @ w[f"{name}_w{i}"] + w[f"{name}_b{i}"]
        if not (name.startswith("fit") and i == layers - 1):
            y = np.tanh(y) * w.get(f"{name}_idt{i}", 1)
            ratio = len(y) / len(x)
            if w[f"{name}_res{i}"] and ratio in (1, 2):
                y = y + np.concatenate([x] * int(ratio))
        x = y
    return x


def published_energies(w, types, positions):
    """Return the energy of each atom by the published definition, in NumPy.

    It is in Zeng et al., J. Chem. Phys. 159, 054801 (2023), eqs. 4-12.
    """

    def s(r):
        q = (r - w["rcut_smth"]) / (w["rcut"] - w["rcut_smth"])
        q = min(max(q, 0), 1)
        return (1 - 10 * q**3 + 15 * q**4 - 6 * q**5) / r

    def row_of(vector):
        r = np.linalg.norm(vector)
        return s(r) * np.array([1, *vector / r])

    def nearest(vectors, count):
        near = [x for x in vectors if np.linalg.norm(x) < w["rcut"]]
        return sorted(near, key=np.linalg.norm)[:count]

    energies = []
    for i, ti in enumerate(types):
        T = 0
        for t, sel in enumerate(w["sel"]):
            neighbours = [j for j in range(len(types)) if j != i and types[j] == t]
            vectors = [positions[j] - positions[i] for j in neighbours]
            rows = [row_of(x) for x in nearest(vectors, sel)]
            for row in rows + [np.zeros(4)] * (sel - len(rows)):
                R = (row - w["davg"][ti, t]) / w["dstd"][ti, t]
                T = T + np.outer(net(w, f"emb{t}", R[:1]), R)
        T = T / sum(w["sel"])
        D = (T @ T[: w["axis_neuron"]].T).ravel()
        energies.append(net(w, f"fit{ti}", D)[0] + w["bias_atom_e"][ti])
    return np.array(energies)


def assert_close(result, expected, tolerance=1e-12):
    result = np.asarray(result)
    expected = np.asarray(expected)
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * abs(expected).max())


def test_energies_are_those_of_the_published_definition(weights, tmp_path):
    types, positions = cluster()
    expected = published_energies(weights, types, positions)
    for slots, index in ((11, torch.int32), (30, torch.int64)):
        list_neigh, Rij = host_list(positions, slots)
        inputs = torch.from_numpy(types), list_neigh.to(index), Rij
        energy, atom_energy, *_ = load(weights, tmp_path)(*inputs)
        assert_close(atom_energy[0], expected)
        assert_close(energy[0], expected.sum())


def test_saved_weights_are_those_that_were_loaded(weights, tmp_path):
    model = load(weights, tmp_path)
    save_npz(model, tmp_path / "again.npz")
    saved = np.load(tmp_path / "again.npz")
    assert set(saved) == set(weights) | {"type_names", "float32_nets"}
    for key in [key for key in weights if "_res" not in key]:
        assert np.array_equal(saved[key], weights[key]), key
    types, positions = cluster()
    inputs = torch.from_numpy(types), *host_list(positions, 12)
    again = load_npz(tmp_path / "again.npz")
    assert again.type_names == ["A", "B"]
    assert load_npz(tmp_path / "model.npz").type_names == ["X0", "X1"]  # a file without names
    assert torch.equal(again(*inputs)[1], model(*inputs)[1])


# ---- splines, tables and float32 nets ---------------------------------------------------------

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
def table():
    """Return a model with tables, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = steep().tabulated(1e-6)
    assert model.spline is None
    assert model.table is not None
    return model, printed.getvalue()


@pytest.fixture(scope="module")
def structure():
    types, positions = cluster()
    return torch.from_numpy(types), *host_list(positions, 15)


@pytest.mark.parametrize("form", ["exact", "spline"])
def test_forces_on_atoms_and_ghosts_are_derivatives_of_the_energy(form, request):
    """Atoms 8 to 11 are ghosts. The forces are derivatives of the local atoms' energy."""
    model = request.getfixturevalue(form)
    types, positions = cluster()
    list_neigh, Rij = host_list(positions, 15)
    local = model(torch.from_numpy(types), list_neigh[:, :8], Rij[:, :8], 4)
    leaf = torch.tensor(positions, requires_grad=True)
    pairs = leaf[list_neigh.clamp(min=0)] - leaf[:, None]
    energies = model(torch.from_numpy(types), list_neigh, pairs, 0, True)[1][0, :8]
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
def test_torchscript_and_npz_keep_what_replaces_the_nets(kind, spline, table, structure, tmp_path):
    model = spline if kind == "spline" else table[0]
    expected = model(*structure)
    save_npz(model, tmp_path / "model.npz")
    again = load_npz(tmp_path / "model.npz").requires_grad_(False)
    for results in (again(*structure), torch.jit.script(model)(*structure)):
        assert all(map(torch.equal, results, expected))


def test_steep_nets_get_tables(table):
    _, printed = table
    assert re.fullmatch(
        r"tabulated: no spline of up to 256 cells, whose error is \S+; "
        r"2 tables in cells of 0.\d+, \S+ MB, error \S+\n",
        printed,
    )


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
