"""calcops/potentials: a package that computes blocks of atoms has the results of a single call."""

import numpy as np
import pytest
import torch
from calcops.potentials.blocks import call_in_blocks, check_entries, near_pairs
from calcops.potentials.lennard_jones import LennardJones

pytest.importorskip("vesin")
from calcops.potentials.neighbours import neighbours, pair_vectors  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CUTOFF = 2.5


@pytest.fixture(scope="module")
def model():
    return LennardJones(cutoff=CUTOFF, type_names=["A", "B"])


def system(frames=1, natoms=40, seed=0):
    """Return types [B, n], list_neigh and Rij of a liquid, with pairs beyond the cutoff."""
    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3), -1).reshape(-1, 3)[:natoms]
    positions = torch.from_numpy(1.1 * grid + random.normal(0, 0.05, (frames, natoms, 3)))
    cells = 4.4 * torch.eye(3, dtype=torch.float64).expand(frames, 3, 3)
    list_neigh, shift = neighbours(positions, cells, CUTOFF + 0.8)
    types = torch.from_numpy(random.integers(2, size=(frames, natoms)))
    return types, list_neigh, pair_vectors(positions, list_neigh, shift)


def assert_same_results(results, expected):
    for result, of_one_call in zip(results, expected):
        assert result.shape == of_one_call.shape
        assert result.dtype == of_one_call.dtype
        scale = of_one_call.abs().max()
        torch.testing.assert_close(result, of_one_call, rtol=0, atol=1e-13 * scale)


@pytest.mark.parametrize("block_slots", [1, 200, 1000, 1 << 20])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_blocks_have_the_results_of_one_call(model, block_slots, frames, index):
    types, list_neigh, Rij = system(frames)
    inputs = types, list_neigh.to(index), Rij
    expected = model(*inputs, 0)
    assert_same_results(call_in_blocks(model, *inputs, 0, block_slots), expected)


def test_blocks_put_forces_on_ghosts(model):
    types, list_neigh, Rij = system()
    inputs = types[0], list_neigh[:, :25], Rij[:, :25], 15
    expected = model(*inputs)
    assert expected[2][0, 25:].abs().max() > 0
    assert_same_results(call_in_blocks(model, *inputs, 200), expected)


def test_a_block_has_no_more_atoms_than_it_needs(model):
    types, list_neigh, Rij = system()
    sizes = []

    def counting(types, list_neigh, Rij, nghost):
        sizes.append((list_neigh.shape[1], len(types), list_neigh.shape[2]))
        return model(types, list_neigh, Rij, nghost)

    call_in_blocks(counting, types[0], *near_pairs(list_neigh, Rij, CUTOFF), 0, 1)
    assert [centres for centres, _, _ in sizes] == [1] * 40
    for _, atoms, _ in sizes:
        assert atoms < 40


def test_near_pairs_are_in_their_order_without_gaps():
    _, list_neigh, Rij = system(frames=2)
    list_neigh[:, :, ::3] = -1
    near_list, near_Rij = near_pairs(list_neigh, Rij, CUTOFF)
    for b, i in np.ndindex(2, 40):
        is_near = (list_neigh[b, i] >= 0) & (Rij[b, i].norm(dim=-1) < CUTOFF)
        count = int(is_near.sum())
        assert torch.equal(near_list[b, i, :count], list_neigh[b, i][is_near])
        assert torch.equal(near_Rij[b, i, :count], Rij[b, i][is_near])
        assert (near_list[b, i, count:] == -1).all()


def test_vectors_that_are_not_numbers_reach_the_model(model):
    types, list_neigh, Rij = system()
    filled = (list_neigh[0, 7] >= 0).nonzero()[0].item()
    Rij[0, 7, filled] = float("nan")
    for block_slots in (1, 1 << 20):
        energy, _, force, _, _ = call_in_blocks(model, types[0], list_neigh, Rij, 0, block_slots)
        assert not energy.isfinite().any()
        assert not force[0, 7].isfinite().all()


@pytest.mark.parametrize("entry", [-2, 40])
def test_an_entry_that_names_no_atom_is_refused(entry):
    _, list_neigh, _ = system()
    list_neigh[0, 3, 0] = entry
    with pytest.raises(ValueError, match=rf"list_neigh from -1 to 39, got {entry} in slot 0 of"):
        check_entries(list_neigh, 40)


def test_no_atoms_and_no_slots_are_no_error(model):
    no_pairs = torch.zeros(1, 3, 0, dtype=torch.int64), torch.zeros(1, 3, 0, 3).double()
    energy, *_ = call_in_blocks(model, torch.zeros(3, dtype=torch.int64), *no_pairs, 0)
    assert energy.tolist() == [0.0]
    nothing = torch.zeros(1, 0, 4, dtype=torch.int64), torch.zeros(1, 0, 4, 3).double()
    energy, *_ = call_in_blocks(model, torch.zeros(0, dtype=torch.int64), *nothing, 0)
    assert energy.tolist() == [0.0]
