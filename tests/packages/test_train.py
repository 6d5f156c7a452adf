"""calcops/train: the model is the published one, and its forces are derivatives of its
energy."""

import re

import numpy as np
import pytest
import torch
from calcops.train.deep_potential import load_npz
from calcops.train.weights import initial, save_npz

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


def test_forces_and_virial_are_derivatives_of_the_published_energy(tmp_path):
    weights = arrays()
    types, positions = cluster()
    h = 1e-5
    _, _, force, virial, atom_virial = load(weights, tmp_path)(
        torch.from_numpy(types), *host_list(positions, 13)
    )

    def slope(move):
        up = published_energies(weights, types, move(positions.copy(), h)).sum()
        down = published_energies(weights, types, move(positions.copy(), -h)).sum()
        return (up - down) / (2 * h)

    def shifted(x, step):
        x[4, 1] += step
        return x

    def sheared(x, step):
        return x + step * np.outer(x[:, 2], [1, 0, 0])

    assert_close(force[0, 4, 1], -slope(shifted), 1e-7)
    assert_close(virial[0, 0, 2], -slope(sheared), 1e-7)
    assert_close(atom_virial.sum(1), virial)
    assert force.sum(1).abs().max() <= 1e-12 * force.abs().max()


def test_deepmd_kit_computes_the_same(weights, tmp_path):
    pytest.importorskip("deepmd", reason="deepmd-kit (extra `peers`) is not installed")
    try:
        from deepmd.dpmodel.descriptor.se_e2_a import DescrptSeA
        from deepmd.dpmodel.fitting.ener_fitting import EnergyFittingNet
        from deepmd.dpmodel.utils.nlist import build_neighbor_list, nlist_distinguish_types
    except ImportError as error:
        pytest.skip(f"deepmd-kit is installed without what it needs: {error}")
    sel = weights["sel"]
    rcut = weights["rcut"]
    descriptor = DescrptSeA(rcut, 0.8, sel, neuron=[4, 8, 8], axis_neuron=3, seed=1)
    fitting = EnergyFittingNet(2, descriptor.get_dim_out(), neuron=[6, 6], resnet_dt=True, seed=2)

    # The same nets as arrays of load_npz.
    w = {key: weights[key] for key in ("davg", "dstd", "bias_atom_e", "sel", "rcut")}
    w |= {"rcut_smth": 0.8, "axis_neuron": 3}
    for kind, nets in (("emb", descriptor.embeddings), ("fit", fitting.nets)):
        for t in range(2):
            for i, layer in enumerate(nets[(t,)].layers):
                parts = {"w": layer.w, "b": layer.b, "idt": layer.idt, "res": layer.resnet}
                present = {key: value for key, value in parts.items() if value is not None}
                w |= {f"{kind}{t}_{key}{i}": value for key, value in present.items()}
    assert "fit0_idt1" in w and "emb1_res0" in w
    descriptor.davg = np.repeat(w["davg"], sel, axis=1)
    descriptor.dstd = np.repeat(w["dstd"], sel, axis=1)
    fitting.bias_atom_e = w["bias_atom_e"][:, None]

    types, positions = cluster()
    n = len(types)
    # A list of all neighbours, then one of the nearest of each type. DeePMD-kit's backend for
    # TensorFlow does the same. The one for PyTorch first keeps the sum(sel) nearest of any type.
    all_neighbours = build_neighbor_list(
        positions.reshape(1, -1), types[None], n, rcut, [n], distinguish_types=False
    )
    nlist = nlist_distinguish_types(all_neighbours, types[None], sel)
    features = descriptor.call(positions.reshape(1, -1), types[None], nlist)[0]
    expected = fitting.call(features, types[None])["energy"][0, :, 0]
    _, atom_energy, *_ = load(w, tmp_path)(torch.from_numpy(types), *host_list(positions, 17))
    assert_close(atom_energy[0], expected)


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


def test_ghosts_carry_the_forces_that_belong_to_them(tmp_path):
    """Atoms 8 to 11 are ghosts. The forces on local atoms and on ghosts are derivatives of the
    local atoms' energy."""
    model = load(arrays(), tmp_path)
    types, positions = cluster()
    list_neigh, Rij = host_list(positions, 15)
    local = model(torch.from_numpy(types), list_neigh[:, :8], Rij[:, :8], 4)
    leaf = torch.tensor(positions, requires_grad=True)
    pairs = leaf[list_neigh.clamp(min=0)] - leaf[:, None]
    energies = model(torch.from_numpy(types), list_neigh, pairs, 0, True)[1][0, :8]
    assert_close(local[1][0], energies.detach())
    assert_close(local[2][0], -torch.autograd.grad(energies.sum(), leaf)[0])
    assert local[4].shape == (1, 12, 3, 3)
