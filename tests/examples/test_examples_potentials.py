"""examples/potentials: energies are the published formulas, the rest their derivatives, in every
form of a model."""

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import DEVICES, assert_equal_lists

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "potentials"
from calcops.potentials.lennard_jones import LennardJones  # noqa: E402
from calcops.potentials.package import load, order_of, save  # noqa: E402
from calcops.potentials.potential import Potential  # noqa: E402
from calcops.potentials.stillinger_weber import StillingerWeber, read  # noqa: E402

# A, B and C of numbers alone; entry (i, j, k) is that of (i, k, j). Some have a tol, some q = 0,
# two gamma < 1.
NAMES = "ABC"


def mixture():
    numbers, entries = (
        iter(torch.rand(1000, generator=torch.Generator().manual_seed(0)).tolist()),
        {},
    )
    for i, j, k in itertools.product(NAMES, repeat=3):
        u = lambda low, high: low + (high - low) * next(numbers)  # noqa: E731
        row = [
            u(1, 2),
            u(1, 1.5),
            u(1.5, 1.9),
            u(1, 20),
            u(0.6, 1.4),
            u(-0.6, 0.2),
            u(5, 8),
            u(0.4, 0.9),
            4.0,
        ]
        entries[i, j, k] = entries.get(
            (i, k, j), [*row, float(next(numbers) > 0.5), 1e-6 * (next(numbers) > 0.5)]
        )
    return entries


def file_of(entries):
    """Each entry on two lines with a comment after the first, as in LAMMPS's files."""
    lines = [
        f"{' '.join(key)} {' '.join(map(repr, row[:5]))} # of {key[0]}"
        for key, row in entries.items()
    ]
    return "# three elements\n\n" + "\n".join(
        f"{line}\n    {' '.join(map(repr, row[5:]))}" for line, row in zip(lines, entries.values())
    )


@pytest.fixture(scope="module")
def sw_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("potentials") / "abc.sw"
    path.write_text(file_of(mixture()))
    return path


def cluster(natoms, ntypes, length, seed=0):
    """types [n], list_neigh [1,n,K], positions [n,3]: each atom names all others; slots are
    shuffled, some empty."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(natoms, 3, generator=generator, dtype=torch.float64) * length
    near = torch.cdist(positions, positions) + torch.eye(natoms)
    assert near.min() > 0.3
    rows = [[j for j in range(natoms) if j != i] + [-1] * 2 for i in range(natoms)]
    order = [torch.randperm(natoms + 1, generator=generator) for _ in rows]
    list_neigh = torch.stack([torch.tensor(row)[o] for row, o in zip(rows, order)])[None]
    return torch.randint(ntypes, (natoms,), generator=generator), list_neigh, positions


def vectors(list_neigh, positions):
    """Rij [1,n,K,3]; NaN in empty slots."""
    Rij = positions[list_neigh.clamp(min=0)] - positions[:, None]
    return Rij.where((list_neigh >= 0)[..., None], torch.nan)


def frames(B, natoms, slots, nghost, ntypes, device="cpu"):
    """Pairs of random lengths, not of any crystal, within and beyond the cutoff."""
    generator = torch.Generator().manual_seed(natoms)
    types = torch.randint(ntypes, (natoms + nghost,), generator=generator)
    list_neigh = torch.randint(-1, natoms + nghost, (B, natoms, slots), generator=generator)
    Rij = torch.randn(B, natoms, slots, 3, generator=generator, dtype=torch.float64)
    Rij *= (0.9 + 4 * torch.rand(B, natoms, slots, generator=generator)).div(Rij.norm(dim=-1))[
        ..., None
    ]
    Rij[list_neigh < 0] = torch.nan
    return [x.to(device) for x in (types, list_neigh, Rij)]


def models(sw_file):
    yield LennardJones(epsilon=0.4, sigma=1.2, tail="shift")
    yield LennardJones([1.0, 0.5], [1.0, 1.3], 2.7, "linear", type_names="AB", mix="arithmetic")
    yield StillingerWeber()
    yield StillingerWeber(sw_file)


class Soft(Potential):
    def atom_energies(self, types, list_neigh, Ri):
        return (1 - Ri[..., 0] / self.cutoff).clamp(min=0).square().sum(-1)


def test_a_soft_potential_has_no_nan_where_two_atoms_coincide():
    list_neigh = torch.tensor([[[1, 2], [0, -1], [0, -1]]])
    positions = torch.tensor([[0.0, 0, 0], [0, 0, 0], [0.5, 0, 0]], dtype=torch.float64)
    energy, _, force, *_ = Soft(1.0, "metal", ["A"])(
        torch.zeros(3).long(), list_neigh, vectors(list_neigh, positions)
    )
    assert energy.item() == 1 + 0.25 + 1 + 0.25
    assert force[0, :, 0].tolist() == [-2, 0, 2]


@pytest.mark.parametrize("tail", ["cut", "shift", "linear"])
@pytest.mark.parametrize("mix", ["geometric", "arithmetic"])
def test_lennard_jones_is_its_formula(tail, mix):
    epsilon, sigma, cutoff = [1.0, 0.5], [1.0, 1.4], 2.2

    def phi(e, s, r):
        return 4 * e * ((s / r) ** 12 - (s / r) ** 6)

    def slope(e, s, r):
        return -24 * e * (2 * (s / r) ** 12 - (s / r) ** 6) / r

    types, list_neigh, positions = cluster(9, 2, 3.0)
    expected, beyond = [0.0] * 9, 0
    for i, j in itertools.permutations(range(9), 2):
        r = math.dist(positions[i].tolist(), positions[j].tolist())
        a, b = types[i], types[j]
        e = math.sqrt(epsilon[a] * epsilon[b])
        s = math.sqrt(sigma[a] * sigma[b]) if mix == "geometric" else (sigma[a] + sigma[b]) / 2
        beyond += r >= cutoff
        if r < cutoff:
            expected[i] += phi(e, s, r) / 2
            expected[i] -= phi(e, s, cutoff) / 2 * (tail != "cut")
            expected[i] -= (r - cutoff) * slope(e, s, cutoff) / 2 * (tail == "linear")
    assert beyond
    model = LennardJones(epsilon, sigma, cutoff, tail, type_names=("A", "B"), mix=mix)
    _, ours, *_ = model(types, list_neigh, vectors(list_neigh, positions))
    torch.testing.assert_close(
        ours[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0
    )
    table = model.pairs[..., 0], model.pairs[..., 1]  # the same as tables
    again = LennardJones(*table, cutoff, tail, type_names=("A", "B"))
    torch.testing.assert_close(again.pairs, model.pairs, rtol=0, atol=0)


def test_one_list_for_both_parameters_is_mixed_by_the_rule_of_each():
    both = [1.0, 4.0]
    model = LennardJones(both, both, type_names="AB", mix="arithmetic")
    assert model.pairs[0, 1, :2].tolist() == model.pairs[1, 0, :2].tolist() == [2.0, 2.5]


def test_stillinger_weber_is_its_formula_for_three_elements(sw_file):
    entries, names = mixture(), "CAB"
    types, list_neigh, positions = cluster(9, 3, 3.2)
    xyz = positions.tolist()

    def pair(i, j):
        """eps, sigma, a, gamma, A, B, p, q, whether r is below LAMMPS's cutoff, r of the pair's own
        entry"""
        eps, sigma, a, _, gamma, _, A, B, p, q, tol = entries[
            names[types[i]], names[types[j]], names[types[j]]
        ]
        cut = sigma * a + ((gamma if gamma < 1 else 1) * sigma / math.log(tol) if tol else 0)
        r = math.dist(xyz[i], xyz[j])
        return eps, sigma, a, gamma, A, B, p, q, r < cut, r

    expected, triples = [0.0] * 9, 0
    for i, j in itertools.permutations(range(9), 2):
        eps, sigma, a, gamma, A, B, p, q, near, r = pair(i, j)
        if not near:
            continue
        expected[i] += (
            A
            * eps
            * (B * (sigma / r) ** p - (sigma / r) ** q)
            * math.exp(sigma / (r - a * sigma))
            / 2
        )
        for k in range(j + 1, 9):
            _, sigma_k, a_k, gamma_k, *_, near_k, r_k = pair(i, k)
            if k == i or not near_k:
                continue
            entry = entries[names[types[i]], names[types[j]], names[types[k]]]
            cosine = ((positions[j] - positions[i]) @ (positions[k] - positions[i])).item() / (
                r * r_k
            )
            decay = gamma * sigma / (r - a * sigma) + gamma_k * sigma_k / (r_k - a_k * sigma_k)
            expected[i] += entry[3] * entry[0] * (cosine - entry[5]) ** 2 * math.exp(decay)
            triples += 1
    assert triples > 20
    model = StillingerWeber(sw_file, type_names=names)
    assert model.type_names == list(names)
    _, ours, *_ = model(types, list_neigh, vectors(list_neigh, positions))
    torch.testing.assert_close(
        ours[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-13
    )


def test_a_file_that_is_cut_off_is_refused():
    with pytest.raises(
        ValueError, match=r"expected entries of 3 elements and 11 numbers, got 13 words"
    ):
        read(
            "Si Si Si 2.1683 2.0951 1.80 21.0 1.20 -0.333333333333 7.049556277 "
            "0.6022245584 4.0 0.0 # tol"
        )


@pytest.mark.parametrize("device", DEVICES)
def test_force_and_virials_are_derivatives_of_the_energy(sw_file, device):
    for model in models(sw_file):
        model = model.to(device)
        types, list_neigh, positions = (
            x.to(device) for x in cluster(9, len(model.type_names), 5.0)
        )
        leaf, strain = positions.requires_grad_(), torch.zeros(3, 3).to(positions).requires_grad_()
        Rij = vectors(list_neigh, leaf @ (torch.eye(3).to(strain) + strain))
        kept = model(types, list_neigh, Rij, create_graph=True)
        force, virial = torch.autograd.grad(kept[0].sum(), (leaf, strain))
        plain = model(types, list_neigh, Rij)
        assert not any(x.requires_grad for x in plain) and all(x.requires_grad for x in kept)
        assert_equal_lists(
            plain, [x.detach() for x in kept], rtol=0, atol=1e-13 * force.abs().max().item()
        )
        torch.testing.assert_close(
            plain[2][0], -force, rtol=1e-11, atol=1e-12 * force.abs().max().item()
        )
        torch.testing.assert_close(
            plain[3][0], -virial, rtol=1e-11, atol=1e-12 * virial.abs().max().item()
        )
        torch.testing.assert_close(
            plain[4].sum(1), plain[3], rtol=1e-11, atol=1e-12 * virial.abs().max().item()
        )


def test_second_derivatives_are_right(sw_file):
    for model in models(sw_file):
        types, list_neigh, positions = cluster(5, len(model.type_names), 3.0)

        def outputs(positions, model=model, types=types, list_neigh=list_neigh):
            return model(types, list_neigh, vectors(list_neigh, positions), create_graph=True)[1:]

        assert torch.autograd.gradcheck(
            outputs, positions.requires_grad_(), eps=1e-6, rtol=1e-5, atol=1e-4
        )


def test_ghosts_and_frames_with_their_own_types_change_nothing(sw_file):
    """A neighbour by its index, and the same neighbour as a ghost with the same type."""
    model = StillingerWeber(sw_file)
    types, list_neigh, positions = cluster(9, 3, 3.2)
    Rij = vectors(list_neigh, positions)
    alone = model(types, list_neigh, Rij)
    as_ghosts = list_neigh.where(
        (list_neigh < 0) | (torch.arange(list_neigh.shape[2]) % 2 == 0), list_neigh + 9
    )
    energy, atom_energy, force, virial, atom_virial = model(types.repeat(2), as_ghosts, Rij, 9)
    folded = (
        energy,
        atom_energy,
        force[:, :9] + force[:, 9:],
        virial,
        atom_virial[:, :9] + atom_virial[:, 9:],
    )
    assert_equal_lists(folded, alone, rtol=1e-12, atol=1e-12)
    other = (types + 1) % 3
    both = model(
        torch.stack([types, other]), list_neigh.expand(2, -1, -1).int(), Rij.expand(2, -1, -1, -1)
    )
    expected = [torch.cat(pair) for pair in zip(alone, model(other, list_neigh, Rij))]
    assert_equal_lists(both, expected, rtol=1e-12, atol=1e-12)


def test_a_slot_beyond_the_cutoff_counts_for_nothing(sw_file):
    """Takes rows with a skin and rows without: they are the same crystal, to the last bit."""
    for model in models(sw_file):
        types, list_neigh = torch.zeros(2, dtype=torch.int64), torch.tensor([[[1], [0]]])
        for excess in (0.0, 1e-9, 0.5, 100.0):
            Rij = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
            Rij[0, :, 0, 0] = torch.tensor([1.0, -1.0]) * (model.cutoff + excess)
            assert not any(x.any() for x in model(types, list_neigh, Rij)), (model, excess)
    for x in StillingerWeber()(
        types, list_neigh, Rij / Rij.norm() * 2**0.5 * (StillingerWeber().cutoff - 1e-4)
    ):
        assert torch.isfinite(x).all()


SIZES = [(1, 64, 30, 0), (3, 20, 9, 11), (2, 1, 1, 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_an_archive_is_the_model_for_every_size(sw_file, device, tmp_path):
    for model in models(sw_file):
        save(model, tmp_path / "model.pt", device=device)
        archive = load(tmp_path / "model.pt", device)
        assert (archive.cutoff, archive.units, archive.type_names) == (
            model.cutoff,
            model.units,
            model.type_names,
        )
        for size in SIZES * 2:  # TorchScript specialises itself in the second call
            inputs = frames(*size, len(model.type_names), device)
            assert_equal_lists(
                archive(*inputs, size[3]),
                model.to(device)(*inputs, size[3]),
                rtol=1e-12,
                atol=1e-12,
            )


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_is_the_model_for_every_size(device, tmp_path):
    """Tries a package of four inputs; three, and Stillinger-Weber, are in
    tests/examples/test_examples_ase.py."""
    model = LennardJones([1.0, 0.5], [1.0, 1.3], 2.7, "linear", type_names="AB").to(device)
    save(model, tmp_path / "model.pt2", device=device, edge_order=True)
    package = load(tmp_path / "model.pt2")
    about = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2")).loader.get_metadata()
    assert about["inputs"] == "types list_neigh Rij edge_order"
    assert (float(about["cutoff"]), about["units"], about["dtype"]) == (
        model.cutoff,
        model.units,
        "float64",
    )
    assert package.type_names == model.type_names
    for size in SIZES:
        inputs = frames(*size, len(model.type_names), device)
        assert_equal_lists(
            package(*inputs, size[3]), model(*inputs, size[3]), rtol=1e-12, atol=1e-12
        )


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a path that ends in \.pt or \.pt2, got .*model\.onnx"
    ):
        save(LennardJones(), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match='expected tail "cut", "shift" or "linear"'):
        LennardJones(tail="smooth")
    torch.save(LennardJones().state_dict(), tmp_path / "checkpoint.pt")
    with pytest.raises(
        ValueError,
        match="expected a model that save.. wrote, got .*checkpoint.pt, perhaps a checkpoint",
    ):
        load(tmp_path / "checkpoint.pt")
    uncut = type(
        "Uncut",
        (LennardJones,),
        {"atom_energies": lambda self, types, list_neigh, Ri: Ri[..., 0].sum(-1)},
    )
    with pytest.raises(ValueError, match="got ones that an empty slot changes by"):
        save(uncut(), tmp_path / "model.pt")


def test_an_edge_order_changes_no_bit(sw_file):
    types, list_neigh, Rij = frames(3, 20, 9, 11, 3)
    model, order = StillingerWeber(sw_file), order_of(list_neigh, 11)
    for a, b in zip(
        model(types, list_neigh, Rij, 11), model(types, list_neigh, Rij, 11, edge_order=order)
    ):
        assert torch.equal(a, b)


def test_the_readme_runs_and_shows_what_is_printed(tmp_path):
    text = (FOLDER / "README.md").read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "morse.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{FOLDER.parent.parent}:{FOLDER}"}
    command = [sys.executable, "-W", "ignore", "morse.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.stdout == shown, result.stderr
