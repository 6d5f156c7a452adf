"""Physical properties of forces and virials, for random atoms and neighbour lists (hypothesis)."""

import pytest
import reference
import torch
from reference import assert_equal_lists, describe, energy_of, pairs

from calcops_jit import force_virial

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CLOSE = dict(rtol=1e-11, atol=1e-11)
settings.register_profile("calcops", max_examples=50, deadline=None, derandomize=True)
settings.load_profile("calcops")


def results_of(list_neigh, Rij, nghost=0):
    """Return force, virial and atom_virial of reference.energy_of."""
    live = list_neigh >= 0
    Rij = torch.where(live[..., None], Rij, 0.0).detach()
    Ri, Ri_d = describe(Rij)
    Ri.requires_grad_()
    (dE,) = torch.autograd.grad(energy_of(Ri, live), Ri)
    return force_virial(list_neigh, dE, Ri_d.flatten(2, 3), Rij, nghost)


def vectors(positions, list_neigh, shift):
    return positions[list_neigh.clamp(min=0)] + shift - positions[None, :, None]


@st.composite
def atoms(draw):
    """Draw positions [n, 3], list_neigh [1, n, K] and the periodic shift [1, n, K, 3] of each slot.

    The list has empty slots, self images and repeats.
    """
    natoms, neighbors = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    positions = 2 * torch.rand(natoms, 3, generator=generator, dtype=torch.float64)
    list_neigh = torch.randint(-1, natoms, (1, natoms, neighbors), generator=generator)
    shift = torch.randint(-1, 2, (1, natoms, neighbors, 3), generator=generator).double()
    return positions, list_neigh, shift


@given(atoms())
def test_force_is_minus_the_gradient_of_the_energy(system):
    positions, list_neigh, shift = system
    positions.requires_grad_()
    energy = energy_of(describe(vectors(positions, list_neigh, shift))[0], list_neigh >= 0)
    (gradient,) = torch.autograd.grad(energy, positions)
    F, _, _ = results_of(list_neigh, vectors(positions, list_neigh, shift))
    torch.testing.assert_close(F[0], -gradient, **CLOSE)


@given(atoms())
def test_virial_is_minus_the_strain_derivative_of_the_energy(system):
    positions, list_neigh, shift = system
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    Rij = vectors(positions, list_neigh, shift)
    energy = energy_of(describe(Rij + Rij @ strain.T)[0], list_neigh >= 0)
    (gradient,) = torch.autograd.grad(energy, strain)
    _, W, atom_W = results_of(list_neigh, Rij)
    torch.testing.assert_close(W[0], -gradient, **CLOSE)
    torch.testing.assert_close(atom_W.sum(1), W, **CLOSE)
    # The energy does not change under rotation, so the virial is symmetric.
    assert (W - W.mT).abs().max() <= 1e-12 * max(1e-300, W.abs().max())


@given(atoms())
def test_translation_changes_nothing(system):
    positions, list_neigh, shift = system
    moved = positions + torch.tensor([3.0, -5.0, 7.0])
    assert_equal_lists(
        results_of(list_neigh, vectors(moved, list_neigh, shift)),
        results_of(list_neigh, vectors(positions, list_neigh, shift)),
        **CLOSE,
    )


@given(atoms(), st.integers(0, 2**31))
def test_rotation_rotates_forces_and_virials(system, seed):
    positions, list_neigh, shift = system
    Rij = vectors(positions, list_neigh, shift)
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    F, W, atom_W = results_of(list_neigh, Rij)
    expected = F @ Q.T, Q @ W @ Q.T, Q @ atom_W @ Q.T
    assert_equal_lists(results_of(list_neigh, Rij @ Q.T), expected, **CLOSE)


@given(atoms(), st.randoms(use_true_random=False))
def test_renaming_atoms_renames_the_result(system, random):
    positions, list_neigh, shift = system
    order = list(range(len(positions)))
    random.shuffle(order)
    order = torch.tensor(order)
    new_name = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    renamed = torch.where(list_neigh >= 0, new_name[list_neigh.clamp(min=0)], -1)[:, order]
    F, W, atom_W = results_of(list_neigh, vectors(positions, list_neigh, shift))
    results = results_of(renamed, vectors(positions[order], renamed, shift[:, order]))
    assert_equal_lists(results, (F[:, order], W, atom_W[:, order]), **CLOSE)


@given(atoms(), st.randoms(use_true_random=False))
def test_the_order_of_the_slots_does_not_matter(system, random):
    positions, list_neigh, shift = system
    Rij = vectors(positions, list_neigh, shift)
    order = list(range(list_neigh.shape[2]))
    random.shuffle(order)
    results = results_of(list_neigh[:, :, order], Rij[:, :, order])
    assert_equal_lists(results, results_of(list_neigh, Rij), **CLOSE)


@given(atoms())
def test_ghosts_folded_back_equal_no_ghosts(system):
    positions, list_neigh, shift = system
    natoms = len(positions)
    Rij = vectors(positions, list_neigh, shift)
    # Each pair across the boundary gets its own ghost.
    crosses = (list_neigh >= 0) & (shift != 0).any(-1)
    nghost = int(crosses.sum())
    owner = list_neigh[crosses]
    with_ghosts = list_neigh.clone()
    with_ghosts[crosses] = natoms + torch.arange(nghost)
    F, W, atom_W = results_of(with_ghosts, Rij, nghost)
    F, atom_W = (x[:, :natoms].index_add(1, owner, x[:, natoms:]) for x in (F, atom_W))
    assert_equal_lists((F, W, atom_W), results_of(list_neigh, Rij), **CLOSE)


@given(
    frames=st.integers(1, 3),
    natoms=st.integers(1, 9),
    nghost=st.integers(0, 3),
    neighbors=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_random_lists_equal_the_reference(frames, natoms, nghost, neighbors, seed):
    inputs = pairs(frames, natoms, nghost, neighbors, seed=seed)
    assert_equal_lists(
        force_virial(*inputs, nghost), reference.force_virial(*inputs, nghost), **CLOSE
    )
