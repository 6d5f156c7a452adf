"""examples/train_potential: the model is the published one, and its forces are derivatives of its
energy."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
from calcops.train.deep_potential import load_npz  # noqa: E402
from calcops.train.weights import initial, save_npz  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def arrays(sel=(9, 7), seed=0, rcut=3.0):
    """Weights for two types with every kind of layer: widths equal, doubled and otherwise, residual
    and not."""
    random = np.random.default_rng(seed)
    result = initial(list(sel), rcut, 1.1, [5, 10, 10], 3, [8, 8, 16], seed)
    result |= {
        key: random.normal(size=np.shape(w)) / 2
        for key, w in result.items()
        if re.search("_[wb]", key)
    }
    result |= {"fit1_res1": 0, "emb1_res2": 0, "davg": random.normal(0, 0.2, (2, 2, 4))}
    result |= {"dstd": random.uniform(0.3, 1, (2, 2, 4)), "bias_atom_e": random.normal(size=2)}
    return result


@pytest.fixture(params=[(9, 7), (3, 2)], ids=["room_for_all", "the_nearest_only"])
def weights(request):
    return arrays(request.param)


def load(weights, folder):
    np.savez(folder / "model.npz", **weights)
    return load_npz(folder / "model.npz", ["A", "B"])


def cluster(n=12, seed=1):
    """Types and positions of n atoms, no two closer than 0.7."""
    random, positions = np.random.default_rng(seed), []
    while len(positions) < n:
        x = random.uniform(0, 3.2, 3)
        if all(np.linalg.norm(x - y) > 0.7 for y in positions):
            positions.append(x)
    return random.integers(2, size=n), np.array(positions)


def host_list(positions, slots, seed=2):
    """Every other atom in a random slot of each row, cutoff or not; NaN in the empty slots."""
    n, random = len(positions), np.random.default_rng(seed)
    list_neigh, Rij = np.full((1, n, slots), -1), np.full((1, n, slots, 3), np.nan)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        chosen = random.permutation(slots)[: n - 1]
        list_neigh[0, i, chosen], Rij[0, i, chosen] = others, positions[others] - positions[i]
    return torch.from_numpy(list_neigh), torch.from_numpy(Rij)


def published_energies(w, types, positions):
    """The definition once more, atom by atom, in NumPy: Zeng et al., J. Chem. Phys. 159, 054801
    (2023), eqs. 4-12."""

    def s(r):
        q = (r - w["rcut_smth"]) / (w["rcut"] - w["rcut_smth"])
        return (1 if q < 0 else 0 if q >= 1 else 1 - 10 * q**3 + 15 * q**4 - 6 * q**5) / r

    def net(name, x):
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

    energies = []
    for i, ti in enumerate(types):
        T = 0
        for t, sel in enumerate(w["sel"]):
            vectors = [
                positions[j] - positions[i] for j in range(len(types)) if j != i and types[j] == t
            ]
            near = sorted(
                (x for x in vectors if np.linalg.norm(x) < w["rcut"]), key=np.linalg.norm
            )[:sel]
            rows = [s(r) * np.array([1, *x / r]) for x in near for r in [np.linalg.norm(x)]]
            for row in rows + [np.zeros(4)] * (sel - len(rows)):
                R = (row - w["davg"][ti, t]) / w["dstd"][ti, t]
                T = T + np.outer(net(f"emb{t}", R[:1]), R)
        T = T / sum(w["sel"])
        D = (T @ T[: w["axis_neuron"]].T).ravel()
        energies.append(net(f"fit{ti}", D)[0] + w["bias_atom_e"][ti])
    return np.array(energies)


def assert_close(ours, expected, tolerance=1e-12):
    ours, expected = np.asarray(ours), np.asarray(expected)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * abs(expected).max())


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
    weights, (types, positions), h = arrays(), cluster(), 1e-5
    _, _, force, virial, atom_virial = load(weights, tmp_path)(
        torch.from_numpy(types), *host_list(positions, 13)
    )

    def slope(move):
        up, down = (
            published_energies(weights, types, move(positions.copy(), x)).sum() for x in (h, -h)
        )
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
    sel, rcut = weights["sel"], weights["rcut"]
    descriptor = DescrptSeA(rcut, 0.8, sel, neuron=[4, 8, 8], axis_neuron=3, seed=1)
    fitting = EnergyFittingNet(2, descriptor.get_dim_out(), neuron=[6, 6], resnet_dt=True, seed=2)
    nets = [("emb", descriptor.embeddings), ("fit", fitting.nets)]
    w = {key: weights[key] for key in ("davg", "dstd", "bias_atom_e", "sel", "rcut")}
    w |= {"rcut_smth": 0.8, "axis_neuron": 3}
    for kind, collection in nets:
        for t in range(2):
            for i, layer in enumerate(collection[(t,)].layers):
                found = {"w": layer.w, "b": layer.b, "idt": layer.idt, "res": layer.resnet}
                w |= {
                    f"{kind}{t}_{key}{i}": value
                    for key, value in found.items()
                    if value is not None
                }
    assert "fit0_idt1" in w and "emb1_res0" in w
    descriptor.davg, descriptor.dstd = (np.repeat(w[key], sel, axis=1) for key in ("davg", "dstd"))
    fitting.bias_atom_e = w["bias_atom_e"][:, None]

    types, positions = cluster()
    n = len(types)
    # All of them, then the nearest of each type. (Its PyTorch part keeps sum(sel) of any type
    # first, TensorFlow's not.)
    everyone = build_neighbor_list(
        positions.reshape(1, -1), types[None], n, rcut, [n], distinguish_types=False
    )
    nlist = nlist_distinguish_types(everyone, types[None], sel)
    features = descriptor.call(positions.reshape(1, -1), types[None], nlist)[0]
    expected = fitting.call(features, types[None])["energy"][0, :, 0]
    assert_close(
        load(w, tmp_path)(torch.from_numpy(types), *host_list(positions, 17))[1][0], expected
    )


def test_what_is_saved_is_what_was_loaded(weights, tmp_path):
    model = load(weights, tmp_path)
    save_npz(model, tmp_path / "again.npz")
    saved = np.load(tmp_path / "again.npz")
    res = {key for key in weights if "_res" in key}
    assert set(saved) == set(weights) | {"type_names", "float32_nets"}
    for key in set(weights) - res:
        assert np.array_equal(saved[key], weights[key]), key
    types, positions = cluster()
    inputs = torch.from_numpy(types), *host_list(positions, 12)
    again = load_npz(tmp_path / "again.npz")
    assert again.type_names == ["A", "B"] and load_npz(tmp_path / "model.npz").type_names == [
        "X0",
        "X1",
    ]
    assert torch.equal(again(*inputs)[1], model(*inputs)[1])


def test_ghosts_carry_the_forces_that_belong_to_them(tmp_path):
    """Atoms 8 to 11 as ghosts: the local rows, and what they put on the ghosts, sum to the same
    derivative."""
    model, (types, positions) = load(arrays(), tmp_path), cluster()
    list_neigh, Rij = host_list(positions, 15)
    local = model(torch.from_numpy(types), list_neigh[:, :8], Rij[:, :8], 4)
    leaf = torch.tensor(positions, requires_grad=True)
    pairs = leaf[list_neigh.clamp(min=0)] - leaf[:, None]
    energies = model(torch.from_numpy(types), list_neigh, pairs, 0, True)[1][0, :8]
    assert_close(local[1][0], energies.detach())
    assert_close(local[2][0], -torch.autograd.grad(energies.sum(), leaf)[0])
    assert local[4].shape == (1, 12, 3, 3)
