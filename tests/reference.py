"""Reference results of the force operators in plain PyTorch, from the formulas of ops/*/*.h, and
random inputs.

`force` and `force_virial` are differentiable to any order and work under torch.func, so they are
the reference for derivatives too. They are simple, and therefore slow and need much memory.
"""

import itertools

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def force_virial(list_neigh, dE, Ri_d, Rij=None, nghost=0, center=True, neighbor_index=None):
    """Return force [B, n+m, 3], virial [B, 3, 3] and atom_virial [B, n+m, 3, 3].

    The arguments are those of the operator. neighbor_index has no effect on the results.
    """
    frames, natoms = list_neigh.shape[:2]
    rows = natoms + nghost
    neighbors = list_neigh.shape[2:].numel()
    list_neigh = list_neigh.reshape(frames, natoms, neighbors).long()
    live = list_neigh >= 0
    # torch.where and no product: NaN times 0 is NaN, in values and in gradients of empty slots.
    dE = torch.where(live[..., None], dE.reshape(frames, natoms, neighbors, 4), 0.0)
    Ri_d = torch.where(live[..., None, None], Ri_d.reshape(frames, natoms, neighbors, 4, 3), 0.0)
    Rij = dE.new_zeros(*live.shape, 3) if Rij is None else Rij
    Rij = torch.where(live[..., None], Rij, 0.0)

    pair_force = torch.einsum("bnkc,bnkca->bnka", dE, Ri_d)
    pair_virial = torch.einsum("bnka,bnkc->bnkac", pair_force, Rij)
    # is_neighbor[b, n, k, j] is 1 if slot k of atom n holds atom j.
    target = torch.where(live, list_neigh, 0)
    if rows:
        is_neighbor = torch.nn.functional.one_hot(target, rows).to(pair_force)
    else:
        is_neighbor = pair_force.new_zeros(*target.shape, 0)
    is_neighbor = is_neighbor * live[..., None]
    force = torch.einsum("bnkj,bnka->bja", is_neighbor, pair_force)
    if center:
        on_center = -pair_force.sum(2)
        force = force + torch.cat([on_center, on_center.new_zeros(frames, nghost, 3)], 1)
    atom_virial = torch.einsum("bnkj,bnkac->bjac", is_neighbor, pair_virial)
    return force, pair_virial.sum((1, 2)), atom_virial


def force(list_neigh, dE, Ri_d, nghost=0, center=True, neighbor_index=None):
    return force_virial(list_neigh, dE, Ri_d, None, nghost, center)[0]


def edge_force_virial(
    edge_index, edge_gradient, edge_vec, natoms, batch=None, nframes=1, edge_order=None
):
    """Return force, virial and atom_virial by the formulas of ops/edge_force/edge_force.h.

    The one-hot matrices have E x natoms elements, so the graphs must be small. edge_order has no
    effect.
    """

    def one_hot(numbers, count):
        return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).to(g)

    live = (edge_index >= 0).all(0)
    g = torch.where(live[:, None], edge_gradient, 0.0)
    w = -g[:, :, None] * torch.where(live[:, None], edge_vec, 0.0)[:, None]
    centre, neighbour = one_hot(torch.where(live, edge_index, -1), natoms)
    force = centre.T @ g - neighbour.T @ g
    atom_virial = torch.einsum("ej,eab->jab", neighbour, w)
    frame = torch.zeros(natoms, device=g.device) if batch is None else batch
    frames = one_hot(frame, nframes)
    return force, torch.einsum("jf,jab->fab", frames, atom_virial), atom_virial


def edge_force(edge_index, edge_gradient, natoms, edge_order=None):
    return edge_force_virial(edge_index, edge_gradient, edge_gradient, natoms)[0]


def pairs(
    frames=3,
    natoms=5,
    nghost=2,
    neighbors=7,
    dtype=torch.float64,
    index=torch.int32,
    device="cpu",
    seed=0,
):
    """Return a random neighbour list and its dE, Ri_d, Rij.

    Any slot of the list may be empty, name an atom a second time, or name the centre atom itself.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (frames, natoms, neighbors)
    list_neigh = torch.randint(-1, natoms + nghost, size, generator=generator).to(index)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    Ri_d = random(frames, natoms, 4 * neighbors, 3)
    return list_neigh.to(device), random(*size, 4), Ri_d, random(*size, 3)


def describe(Rij):
    """Return Ri = s (1, Rij) with s = exp(-r^2/4), and Ri_d = dRi/dr_i = -dRi/dRij."""
    s = torch.exp(-Rij.square().sum(-1, keepdim=True) / 4)
    dRi_dRij = torch.cat(
        [
            -(s * Rij / 2).unsqueeze(-2),
            s[..., None]
            * (torch.eye(3, dtype=Rij.dtype) - Rij[..., :, None] * Rij[..., None, :] / 2),
        ],
        -2,
    )
    return torch.cat([s, s * Rij], -1), -dRi_dRij


def energy_of(Ri, live):
    """Return a many-body energy that does not change under rotation and permutation."""
    D = (Ri * live[..., None]).sum(2)
    return (D[..., 0] ** 3 + D[..., 1:].square().sum(-1)).sum()


# The list of this size and of seed 0 has an empty slot, a ghost, an atom twice and a self image.
SMALL = dict(frames=3, natoms=2, nghost=1, neighbors=3)


def differentiable_pairs(**options):
    list_neigh, *values = pairs(**options)
    return list_neigh, *(value.requires_grad_() for value in values)


def neighbor_force(list_neigh, dE, Ri_d, nghost=0):
    """Return the force of the pairs on the neighbours alone, without that on the centre atoms."""
    mask = [True, False, False]
    return torch.ops.calcops._force_virial(list_neigh, dE, Ri_d, None, nghost, False, mask)[0]


def scalar_of(function, list_neigh):
    """Return a nonlinear scalar function of all results of `function`, called with nghost = 1."""

    def scalar(*x):
        F, W, atom_W = function(list_neigh, *x, 1)
        return (F**3).sum() + (W**2).sum() + (F[..., None] * atom_W**2).sum()

    return scalar


def assert_equal_lists(actual, expected, **tolerance):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def graph(
    natoms=7, edges=23, frames=2, dtype=torch.float64, index=torch.int64, device="cpu", seed=0
):
    """Return the arguments of edge_force_virial for a random graph.

    Edges and the frames of atoms are in no order. Some edges are masked, in one row or in both, and
    some join an atom with itself.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_vectors():
        return torch.randn(edges, 3, generator=generator, dtype=torch.float64).to(device, dtype)

    edge_index = torch.randint(-1, natoms, (2, edges), generator=generator).to(device, index)
    gradient = random_vectors()
    vec = random_vectors()
    batch = torch.randint(0, frames, (natoms,), generator=generator).to(device, index)
    return edge_index, gradient, vec, natoms, batch, frames


def opcheck(op, args, kwargs=None):
    """Run every check that PyTorch has for an operator. By default opcheck skips static shapes."""
    pytest.importorskip("expecttest", reason="torch.library.opcheck imports it")
    results = torch.library.opcheck(op, args, kwargs, test_utils=tuple(ALL_TEST_UTILS))
    assert results == dict.fromkeys(ALL_TEST_UTILS, "SUCCESS")


def index_reference(list_neigh, nghost=0):
    """Return neighbor_index in plain Python: where the slots of each atom end, then the slots."""
    frames, rows = len(list_neigh), list_neigh.shape[1] + nghost
    results = []
    for frame in list_neigh.flatten(1).tolist():
        groups = [[] for _ in range(rows)]
        for slot, j in enumerate(frame):
            if 0 <= j < rows:
                groups[j].append(slot)
        ends = list(itertools.accumulate(map(len, groups)))
        slots = list(itertools.chain.from_iterable(groups))
        results.append(ends + slots + [-1] * (len(frame) - len(slots)))
    width = rows + list_neigh.shape[1:].numel()
    return torch.tensor(results, dtype=torch.int32).reshape(frames, width)


def order_reference(edge_index, natoms):
    """Return edge_order: the neighbor_index of a list with both rows of the valid edges."""
    is_valid = ((edge_index >= 0) & (edge_index < natoms)).all(0)
    ends = torch.where(is_valid, edge_index.long(), -1).reshape(1, 1, -1)
    if natoms == 0:
        return torch.full((ends.numel(),), -1, dtype=torch.int32)
    return index_reference(ends, natoms - 1)[0]  # the list has one atom, so the others are ghosts


# ---- checks that several operators share --------------------------------------------------------


def assert_the_order_of_slots_only_rounds(function, *values, kind):
    """Move empty slots to the end of their rows, which changes no bit, and turn the rows round."""
    tensors = *values, kind
    order = torch.argsort((kind < 0).int(), dim=1, stable=True)
    moved = [x[torch.arange(len(x))[:, None], order] for x in tensors]
    expected = function(*tensors)
    assert torch.equal(function(*moved), expected)
    turned = function(*(x.flip(1) for x in tensors))
    atol = 1e-13 * expected.abs().max().item()
    torch.testing.assert_close(turned, expected, rtol=0, atol=atol)


def assert_a_fourth_derivative_is_an_error(function, d, message):
    """Check that `function` has three derivatives for d and no fourth, in both modes."""

    def along(order):
        """Return the derivative of this order along a line, as a function of its position."""
        if order == 0:
            return lambda t: function(d.detach() * (1 + t))
        lower = along(order - 1)
        return lambda t: torch.func.jvp(lower, (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=d.dtype)
    assert along(3)(zero).abs().max() > 0
    with pytest.raises(RuntimeError, match=message):
        along(4)(zero)
    derivative = function(d).sin().sum()
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative.sin().sum(), d, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(derivative.sum(), d)
