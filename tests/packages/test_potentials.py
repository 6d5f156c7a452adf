"""calcops/potentials: energies follow the published formulas, forces and virials are their
derivatives, for modules, archives and packages."""

import itertools
import math
import sys

import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import load, save
from calcops.potentials.potential import Potential
from calcops.potentials.stillinger_weber import StillingerWeber, read
from programs import blocks, run
from reference import DEVICES, assert_equal_lists

NAMES = "ABC"


def mixture():
    """Return random Stillinger-Weber parameters {(i, j, k): row} of three elements.

    A row is eps, sigma, a, lambda, gamma, cos(theta0), A, B, p, q and tol. Entries (i, j, k) and
    (i, k, j) are equal. Some have a tol, some q = 0, and some gamma < 1.
    """
    numbers = iter(torch.rand(1000, generator=torch.Generator().manual_seed(0)).tolist())
    ranges = [(1, 2), (1, 1.5), (1.5, 1.9), (1, 20), (0.6, 1.4), (-0.6, 0.2), (5, 8), (0.4, 0.9)]
    entries = {}
    for i, j, k in itertools.product(NAMES, repeat=3):
        row = [low + (high - low) * next(numbers) for low, high in ranges]
        row += [4.0, float(next(numbers) > 0.5), 1e-6 * (next(numbers) > 0.5)]
        entries[i, j, k] = entries.get((i, k, j), row)
    return entries


def file_of(entries):
    """Return a file like LAMMPS's: each entry on two lines, with a comment after the first."""
    text = "# three elements\n\n"
    for key, row in entries.items():
        text += f"{' '.join(key)} {' '.join(map(repr, row[:5]))} # of {key[0]}\n"
        text += f"    {' '.join(map(repr, row[5:]))}\n"
    return text


@pytest.fixture(scope="module")
def sw_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("potentials") / "abc.sw"
    path.write_text(file_of(mixture()))
    return path


def cluster(natoms, ntypes, length, seed=0):
    """Return types [n], list_neigh [1, n, K] and random positions [n, 3].

    An atom's list has all other atoms and two empty slots, in random order.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(natoms, 3, generator=generator, dtype=torch.float64) * length
    distances = torch.cdist(positions, positions) + torch.eye(natoms)
    assert distances.min() > 0.3
    rows = [[j for j in range(natoms) if j != i] + [-1] * 2 for i in range(natoms)]
    order = [torch.randperm(natoms + 1, generator=generator) for _ in rows]
    list_neigh = torch.stack([torch.tensor(row)[o] for row, o in zip(rows, order)])[None]
    return torch.randint(ntypes, (natoms,), generator=generator), list_neigh, positions


def vectors(list_neigh, positions):
    """Return Rij [1, n, K, 3], with NaN in empty slots."""
    Rij = positions[list_neigh.clamp(min=0)] - positions[:, None]
    return Rij.where((list_neigh >= 0)[..., None], torch.nan)


def frames(B, natoms, slots, nghost, ntypes, device="cpu"):
    """Return random types, lists and vectors. Some vectors are longer than the cutoff."""
    generator = torch.Generator().manual_seed(natoms)
    types = torch.randint(ntypes, (natoms + nghost,), generator=generator)
    list_neigh = torch.randint(-1, natoms + nghost, (B, natoms, slots), generator=generator)
    Rij = torch.randn(B, natoms, slots, 3, generator=generator, dtype=torch.float64)
    length = 0.9 + 4 * torch.rand(B, natoms, slots, generator=generator)
    Rij *= length.div(Rij.norm(dim=-1))[..., None]
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
    model = Soft(1.0, "metal", ["A"])
    types = torch.zeros(3).long()
    energy, _, force, *_ = model(types, list_neigh, vectors(list_neigh, positions))
    assert energy.item() == 1 + 0.25 + 1 + 0.25
    assert force[0, :, 0].tolist() == [-2, 0, 2]


@pytest.mark.parametrize("tail", ["cut", "shift", "linear"])
@pytest.mark.parametrize("mix", ["geometric", "arithmetic"])
def test_energies_of_lennard_jones_follow_its_formula(tail, mix):
    epsilon = [1.0, 0.5]
    sigma = [1.0, 1.4]
    cutoff = 2.2

    def phi(e, s, r):
        return 4 * e * ((s / r) ** 12 - (s / r) ** 6)

    def slope(e, s, r):
        return -24 * e * (2 * (s / r) ** 12 - (s / r) ** 6) / r

    types, list_neigh, positions = cluster(9, 2, 3.0)
    expected = [0.0] * 9
    pairs_beyond = 0
    for i, j in itertools.permutations(range(9), 2):
        r = math.dist(positions[i].tolist(), positions[j].tolist())
        a, b = types[i], types[j]
        e = math.sqrt(epsilon[a] * epsilon[b])
        s = math.sqrt(sigma[a] * sigma[b]) if mix == "geometric" else (sigma[a] + sigma[b]) / 2
        if r >= cutoff:
            pairs_beyond += 1
            continue
        expected[i] += phi(e, s, r) / 2
        if tail != "cut":
            expected[i] -= phi(e, s, cutoff) / 2
        if tail == "linear":
            expected[i] -= (r - cutoff) * slope(e, s, cutoff) / 2
    assert pairs_beyond
    model = LennardJones(epsilon, sigma, cutoff, tail, type_names=("A", "B"), mix=mix)
    _, atom_energy, *_ = model(types, list_neigh, vectors(list_neigh, positions))
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(atom_energy[0], expected, rtol=1e-13, atol=0)
    tables = model.pairs[..., 0], model.pairs[..., 1]  # of epsilon and sigma for each pair of types
    of_tables = LennardJones(*tables, cutoff, tail, type_names=("A", "B"))
    torch.testing.assert_close(of_tables.pairs, model.pairs, rtol=0, atol=0)


def test_epsilon_and_sigma_are_mixed_by_different_rules_even_if_they_are_one_list():
    both = [1.0, 4.0]
    model = LennardJones(both, both, type_names="AB", mix="arithmetic")
    assert model.pairs[0, 1, :2].tolist() == [2.0, 2.5]
    assert model.pairs[1, 0, :2].tolist() == [2.0, 2.5]


def test_energies_of_stillinger_weber_follow_its_formula_for_three_elements(sw_file):
    entries = mixture()
    names = "CAB"  # not the order of the file
    types, list_neigh, positions = cluster(9, 3, 3.2)
    xyz = positions.tolist()

    def pair(i, j):
        """Return eps, sigma, a, gamma, A, B, p, q of a pair, whether it is within LAMMPS's cutoff,
        and its r."""
        eps, sigma, a, _, gamma, _, A, B, p, q, tol = entries[
            names[types[i]], names[types[j]], names[types[j]]
        ]
        cutoff = sigma * a
        if tol:
            cutoff += min(gamma, 1) * sigma / math.log(tol)
        r = math.dist(xyz[i], xyz[j])
        return eps, sigma, a, gamma, A, B, p, q, r < cutoff, r

    expected = [0.0] * 9
    triples = 0
    for i, j in itertools.permutations(range(9), 2):
        eps, sigma, a, gamma, A, B, p, q, near, r = pair(i, j)
        if not near:
            continue
        powers = B * (sigma / r) ** p - (sigma / r) ** q
        expected[i] += A * eps * powers * math.exp(sigma / (r - a * sigma)) / 2
        for k in range(j + 1, 9):
            _, sigma_k, a_k, gamma_k, *_, near_k, r_k = pair(i, k)
            if k == i or not near_k:
                continue
            eps_ijk, _, _, lambda_ijk, _, cosine_0, *_ = entries[
                names[types[i]], names[types[j]], names[types[k]]
            ]
            product = (positions[j] - positions[i]) @ (positions[k] - positions[i])
            cosine = product.item() / (r * r_k)
            decay = gamma * sigma / (r - a * sigma) + gamma_k * sigma_k / (r_k - a_k * sigma_k)
            expected[i] += lambda_ijk * eps_ijk * (cosine - cosine_0) ** 2 * math.exp(decay)
            triples += 1
    assert triples > 20
    model = StillingerWeber(sw_file, type_names=names)
    assert model.type_names == list(names)
    _, atom_energy, *_ = model(types, list_neigh, vectors(list_neigh, positions))
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(atom_energy[0], expected, rtol=1e-11, atol=1e-13)


def test_a_file_without_the_entry_of_a_triple_is_refused(tmp_path):
    path = tmp_path / "SiGe.sw"
    entry = "2.1683 2.0951 1.80 21.0 1.20 -0.333333333333 7.049556277 0.6022245584 4.0 0.0 0.0"
    path.write_text(f"Si Si Si {entry}\nSi Ge Ge {entry}\n")
    with pytest.raises(ValueError, match=r"expected an entry of Si Si Ge in .*SiGe.sw, got none"):
        StillingerWeber(path)


@pytest.mark.parametrize("word", ["2_1", "nan", "inf", "Si"])
def test_a_word_that_is_no_number_is_refused(word):
    others = "2.0951 1.80 21.0 1.20 -0.333333333333 7.049556277 0.6022245584 4.0 0.0 0.0"
    with pytest.raises(ValueError, match=f"a number in the entry of Si Si Si, got {word}"):
        read(f"Si Si Si {word} {others}")


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
        positions.requires_grad_()
        strain = torch.zeros(3, 3).to(positions).requires_grad_()
        Rij = vectors(list_neigh, positions @ (torch.eye(3).to(strain) + strain))
        with_graph = model(types, list_neigh, Rij, create_graph=True)
        assert all(x.requires_grad for x in with_graph)
        dE_dr, dE_dstrain = torch.autograd.grad(with_graph[0].sum(), (positions, strain))
        largest_force = dE_dr.abs().max().item()
        largest_virial = dE_dstrain.abs().max().item()

        results = model(types, list_neigh, Rij)
        assert not any(x.requires_grad for x in results)
        detached = [x.detach() for x in with_graph]
        assert_equal_lists(results, detached, rtol=0, atol=1e-13 * largest_force)
        _, _, force, virial, atom_virial = results
        atol = 1e-12 * largest_force
        torch.testing.assert_close(force[0], -dE_dr, rtol=1e-11, atol=atol)
        atol = 1e-12 * largest_virial
        torch.testing.assert_close(virial[0], -dE_dstrain, rtol=1e-11, atol=atol)
        torch.testing.assert_close(atom_virial.sum(1), virial, rtol=1e-11, atol=atol)


def test_ghosts_and_frames_with_types_of_their_own_do_not_change_results(sw_file):
    """Every second slot names a ghost of the neighbour, which has the neighbour's type."""
    model = StillingerWeber(sw_file)
    types, list_neigh, positions = cluster(9, 3, 3.2)
    Rij = vectors(list_neigh, positions)
    expected = model(types, list_neigh, Rij)
    is_kept = (list_neigh < 0) | (torch.arange(list_neigh.shape[2]) % 2 == 0)
    with_ghosts = list_neigh.where(is_kept, list_neigh + 9)
    energy, atom_energy, force, virial, atom_virial = model(types.repeat(2), with_ghosts, Rij, 9)
    force = force[:, :9] + force[:, 9:]
    atom_virial = atom_virial[:, :9] + atom_virial[:, 9:]
    results = energy, atom_energy, force, virial, atom_virial
    assert_equal_lists(results, expected, rtol=1e-12, atol=1e-12)

    other = (types + 1) % 3
    lists = list_neigh.expand(2, -1, -1).int()
    both = model(torch.stack([types, other]), lists, Rij.expand(2, -1, -1, -1))
    expected = [torch.cat(pair) for pair in zip(expected, model(other, list_neigh, Rij))]
    assert_equal_lists(both, expected, rtol=1e-12, atol=1e-12)


def test_a_slot_beyond_the_cutoff_adds_nothing(sw_file):
    """So a list with a skin gives the same bits as one without."""
    types = torch.zeros(2, dtype=torch.int64)
    list_neigh = torch.tensor([[[1], [0]]])
    for model in models(sw_file):
        for excess in (0.0, 1e-9, 0.5, 100.0):
            Rij = torch.zeros(1, 2, 1, 3, dtype=torch.float64)
            Rij[0, :, 0, 0] = torch.tensor([1.0, -1.0]) * (model.cutoff + excess)
            assert not any(x.any() for x in model(types, list_neigh, Rij)), (model, excess)
    # Just below the cutoff, Stillinger-Weber's exponents are huge.
    model = StillingerWeber()
    Rij = Rij / Rij.norm(dim=-1, keepdim=True) * (model.cutoff - 1e-4)
    assert all(torch.isfinite(x).all() for x in model(types, list_neigh, Rij))


SIZES = [(1, 64, 30, 0), (3, 20, 9, 11), (2, 1, 1, 1)]


def test_wrong_arguments_of_save_load_and_a_model_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a path that ends in \.pt or \.pt2, got .*model\.onnx"
    ):
        save(LennardJones(), tmp_path / "model.onnx")
    message = "expected dtype torch.float64 or torch.float32, got torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        save(LennardJones(), tmp_path / "model.pt", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match='expected tail "cut", "shift" or "linear"'):
        LennardJones(tail="smooth")
    torch.save(LennardJones().state_dict(), tmp_path / "checkpoint.pt")
    with pytest.raises(
        ValueError,
        match="expected a model that save.. wrote, got .*checkpoint.pt, perhaps a checkpoint",
    ):
        load(tmp_path / "checkpoint.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "foreign.pt")
    (tmp_path / "text.pt2").write_text("text")
    for name in ("foreign.pt", "text.pt2"):
        message = f"expected a model that save.. wrote, got .*{name}"
        with pytest.raises(ValueError, match=message):
            load(tmp_path / name)

    class Uncut(LennardJones):
        def atom_energies(self, types, list_neigh, Ri):
            return Ri[..., 0].sum(-1)

    with pytest.raises(ValueError, match="got ones that an empty slot changes by"):
        save(Uncut(), tmp_path / "model.pt")


def test_the_readme_runs_and_shows_what_is_printed(tmp_path):
    readme = "calcops/potentials/README.md"
    (tmp_path / "morse.py").write_text("".join(blocks(readme, "python")))
    printed = run(sys.executable, "-W", "ignore", "morse.py", cwd=tmp_path).stdout
    assert [printed] == blocks(readme, "text")


# ---- a package -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_gives_the_results_of_the_model_for_every_size(device, tmp_path):
    """This package has the input edge_order. test_potentials_energies.py has one without it."""
    model = LennardJones([1.0, 0.5], [1.0, 1.3], 2.7, "linear", type_names="AB").to(device)
    save(model, tmp_path / "model.pt2", device=device, edge_order=True)
    package = load(tmp_path / "model.pt2")
    metadata = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2")).loader.get_metadata()
    assert metadata["inputs"] == "types list_neigh Rij edge_order"
    assert float(metadata["cutoff"]) == model.cutoff
    assert metadata["units"] == model.units
    assert metadata["dtype"] == "float64"
    assert package.type_names == model.type_names
    for size in SIZES:
        nghost = size[3]
        inputs = frames(*size, len(model.type_names), device)
        expected = model(*inputs, nghost)
        assert_equal_lists(package(*inputs, nghost), expected, rtol=1e-12, atol=1e-12)

    # A package reads memory as if it held contiguous numbers of its own dtypes.
    types, list_neigh, Rij = frames(3, 20, 9, 11, 2, device)
    expected = model(types, list_neigh, Rij, 11)
    strided = types.int(), list_neigh.int().mT.contiguous().mT, Rij.mT.contiguous().mT
    assert_equal_lists(package(*strided, 11), expected, rtol=1e-12, atol=1e-12)
    of_frames = torch.stack([types, 1 - types, types])
    expected = model(of_frames, list_neigh, Rij, 11)
    assert_equal_lists(package(of_frames, list_neigh, Rij, 11), expected, rtol=1e-12, atol=1e-12)
    good = {"types": types, "list_neigh": list_neigh, "Rij": Rij}
    wrong = {
        "of torch.float64, as the file is, got torch.float32": {"Rij": Rij.float()},
        r"types of 20 atoms and nghost=11 ghosts, .* got \[30\]": {"types": types[:30]},
        r"list_neigh .* got \[3, 20, 9\] and \[3, 20, 8, 3\]": {"Rij": Rij[:, :, 1:]},
    }
    if device == "cpu":
        wrong["types from 0 to 1, got 2 to 3"] = {"types": types % 2 + 2}
        entry = list_neigh.clone()
        entry[1, 2, 3] = 31
        message = "list_neigh from -1 to 30, got 31 in slot 3 of atom 2 in frame 1"
        wrong[message] = {"list_neigh": entry}
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=f"expected .*{message}"):
            package(*(good | changes).values(), 11)
