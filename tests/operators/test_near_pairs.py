"""near_pairs: rows without room, and NaN."""

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import torch

near_pairs = torch.ops.calcops_models.near_pairs


def inputs(n, slots, natoms=None, seed=0):
    """Return positions, list_neigh with empty slots, image and offset."""
    generator = torch.Generator().manual_seed(seed)
    natoms = n if natoms is None else natoms
    positions = torch.randn(natoms, 3, generator=generator, dtype=torch.float64)
    shape = n, slots
    list_neigh = torch.randint(-1, natoms, shape, generator=generator, dtype=torch.int32)
    image = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32)
    offset = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    return positions, list_neigh, image, offset


def test_a_row_without_room_counts_all_its_pairs():
    arguments = inputs(5, 20)
    near, Rij, count, nearest = near_pairs(*arguments, 2.0, 20)
    short_near, short_Rij, short_count, short_nearest = near_pairs(*arguments, 2.0, 3)
    assert count.max() > 3
    assert torch.equal(short_near, near[:, :3])
    assert torch.equal(short_Rij, Rij[:, :3])
    assert torch.equal(short_count, count)
    assert torch.equal(short_nearest, nearest)


def test_a_pair_whose_vector_is_nan_stays():
    positions, list_neigh, image, offset = inputs(4, 6)
    positions[2, 1] = torch.nan
    near, Rij, count, nearest = near_pairs(positions, list_neigh, image, offset, 1e-3, 6)
    assert torch.equal(count[:2], (list_neigh[:2] == 2).sum(1))
    assert count[2] == (list_neigh[2] >= 0).sum()
    assert Rij[near >= 0].isnan().any(-1).all()
    assert not nearest[:2].isnan().any()
