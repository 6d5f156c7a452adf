"""All pairs within a cutoff, against sums over images, for arrays and tensors."""

import itertools

import numpy as np
import pytest
import torch

vesin = pytest.importorskip("vesin", reason="needs vesin")
from calcops.potentials.pair_search import pairs_within  # noqa: E402


def pairs_by_images(positions, cell, pbc, cutoff):
    """Return the sorted pairs (i, j, S), by trying every image that may be near."""
    periods = cell * pbc[:, None]
    reach = cutoff + np.linalg.norm(np.ptp(positions, axis=0))
    images = np.where(pbc, np.ceil(reach * np.linalg.norm(np.linalg.pinv(periods), axis=0)), 0)
    pairs = []
    for S in itertools.product(*(range(-int(k), int(k) + 1) for k in images)):
        vectors = positions + S @ periods - positions[:, None]
        near = np.linalg.norm(vectors, axis=-1) < cutoff
        if not any(S):
            np.fill_diagonal(near, False)
        pairs += [(i, j, S) for i, j in np.argwhere(near).tolist()]
    return sorted(pairs)


def listed(i, j, S):
    return sorted(zip(i.tolist(), j.tolist(), map(tuple, S.tolist())))


@pytest.mark.parametrize("pbc", list(itertools.product([True, False], repeat=3)))
def test_the_pairs_are_those_of_all_images(pbc):
    rng = np.random.default_rng(sum(2**k * periodic for k, periodic in enumerate(pbc)))
    for spread in (0.3, 1.0, 4.0):
        cell = 4 * np.eye(3) + rng.uniform(-1.5, 1.5, (3, 3))
        positions = spread * rng.uniform(-4, 4, (7, 3)) + [0, 50, -20]
        arguments = positions, cell, np.array(pbc)
        expected = pairs_by_images(*arguments, cutoff=4.5)
        assert listed(*pairs_within(*arguments, cutoff=4.5)) == expected
        assert listed(*pairs_within(*map(torch.from_numpy, arguments), cutoff=4.5)) == expected


def test_pairs_are_sorted_and_of_the_kind_of_the_positions():
    positions = np.random.default_rng(0).uniform(0, 9, (40, 3))
    arguments = positions, 9 * np.eye(3), np.ones(3, bool)
    for kind, given in (np.ndarray, arguments), (torch.Tensor, map(torch.from_numpy, arguments)):
        i, j, S = pairs_within(*given, cutoff=3.0)
        assert all(isinstance(found, kind) for found in (i, j, S))
        assert (str(i.dtype)[-5:], str(j.dtype)[-5:], S.shape) == ("int64", "int64", (len(i), 3))
        assert (i[1:] >= i[:-1]).all()


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_no_atoms_have_no_pairs(kind):
    i, j, S = pairs_within(kind(np.zeros((0, 3))), kind(np.eye(3)), kind([True] * 3), cutoff=3.0)
    assert (len(i), len(j), S.shape) == (0, 0, (0, 3))


@pytest.mark.parametrize("pbc", [[False, False, False], [True, False, False]])
def test_a_cutoff_far_beyond_the_atoms_is_found_at_once(pbc):
    positions = np.array([[0, 0, 0], [1.2, 0, 0], [0, 0, 40]])
    cell = np.diag([1e4, 1, 1])
    i, _, _ = pairs_within(positions, cell, np.array(pbc), cutoff=1.005e6)
    images = 2 * 100 if pbc[0] else 0
    assert len(i) == 3 * 2 + 9 * images


def test_the_cutoff_of_an_open_system_ends_at_its_extent(monkeypatch):
    # vesin reserves memory for cutoff^3 pairs of an atom on a GPU.
    cutoffs = []
    finder = vesin.NeighborList
    monkeypatch.setattr(
        vesin,
        "NeighborList",
        lambda **options: cutoffs.append(options["cutoff"]) or finder(**options),
    )
    positions = np.array([[0, 0, 0], [3, 4, 12]])
    for pbc in ([False, False, False], [True, False, False]):
        i, _, _ = pairs_within(positions, 1e5 * np.eye(3), np.array(pbc), cutoff=1e4)
        assert len(i) == 2
    assert 13 < cutoffs[0] < 15
    assert cutoffs[1] == 1e4


@pytest.mark.parametrize("pbc", [[True, True, False], [False, False, False]])
def test_far_atoms_in_open_directions_have_their_own_pairs(pbc):
    positions = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 4e5], [0, 1, 4e5]])
    i, j, _ = pairs_within(positions, np.diag([30.0, 30, 1]), np.array(pbc), cutoff=5.0)
    assert (i.tolist(), j.tolist()) == ([0, 1, 2, 3], [1, 0, 3, 2])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_numbers_that_are_not_finite_are_refused_with_their_row(kind):
    positions = np.zeros((3, 3))
    positions[1, 2] = np.inf
    periodic = kind([True] * 3)
    with pytest.raises(
        ValueError, match=r"expected finite positions, got \[0.0, 0.0, inf\] in row 1"
    ):
        pairs_within(kind(positions), kind(np.eye(3)), periodic, cutoff=3.0)
    with pytest.raises(ValueError, match=r"expected finite periodic cell vectors, got \[\[nan"):
        pairs_within(kind(np.eye(3)), kind(np.diag([np.nan, 1, 1])), periodic, cutoff=3.0)
