"""What the operators must compute, in plain torch, written from the formulas of ops/*/*.h; and
random inputs.

Every function is differentiable by autograd to any order and works under torch.func, so it is the
reference for derivatives too. Slow and memory-hungry on purpose: clarity first.
"""

import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def force_virial(list_neigh, dE, Ri_d, Rij, nghost=0, center=True):
    """force [B, n+m, 3], virial [B, 3, 3], atom_virial [B, n+m, 3, 3]; arguments as in
    ops/force/force.h."""
    frames, natoms = list_neigh.shape[:2]
    rows = natoms + nghost
    neighbors = list_neigh[0, 0].numel() if frames * natoms else list_neigh.shape[2:].numel()
    list_neigh = list_neigh.reshape(frames, natoms, neighbors).long()
    live = list_neigh >= 0
    # torch.where, not a product: NaN in an empty slot must not survive, nor its gradient.
    dE = torch.where(live[..., None], dE.reshape(frames, natoms, neighbors, 4), 0.0)
    Ri_d = torch.where(live[..., None, None], Ri_d.reshape(frames, natoms, neighbors, 4, 3), 0.0)
    Rij = torch.where(live[..., None], Rij, 0.0)

    g = torch.einsum("bnkc,bnkca->bnka", dE, Ri_d)
    w = torch.einsum("bnka,bnkc->bnkac", g, Rij)
    target = torch.where(live, list_neigh, 0)
    names = (
        torch.nn.functional.one_hot(target, rows).to(g) if rows else g.new_zeros(*target.shape, 0)
    )
    names = names * live[..., None]
    force = torch.einsum("bnkj,bnka->bja", names, g)
    if center:
        own = -g.sum(2)
        force = force + torch.cat([own, own.new_zeros(frames, nghost, 3)], 1)
    return force, w.sum((1, 2)), torch.einsum("bnkj,bnkac->bjac", names, w)


def force(list_neigh, dE, Ri_d, nghost=0, center=True):
    frames, natoms = list_neigh.shape[:2]
    neighbors = list_neigh.shape[2:].numel()
    return force_virial(
        list_neigh, dE, Ri_d, dE.new_zeros(frames, natoms, neighbors, 3), nghost, center
    )[0]


def chunked_force_virial(list_neigh, dE, Ri_d, Rij, nghost=0, chunk=4096):
    """force_virial for any size, in float64: index_add_ over `chunk` atoms at a time; not
    differentiable."""
    frames, natoms, neighbors = list_neigh.shape
    totals = [dE.new_zeros(frames, natoms + nghost, width, dtype=torch.float64) for width in (3, 9)]
    for frame in range(frames):
        for first in range(0, natoms, chunk):
            part = (frame, slice(first, first + chunk))
            target = list_neigh[part]
            live = target >= 0
            rows = target[live].long()
            dE_part, Ri_d_part, Rij_part = (
                x[part].reshape(*target.shape, *shape)[live].double()
                for x, shape in ((dE, (4, 1)), (Ri_d, (4, 3)), (Rij, (1, 3)))
            )
            g = (dE_part * Ri_d_part).sum(-2)
            totals[0][frame].index_add_(0, rows, g)
            totals[1][frame].index_add_(0, rows, (g[:, :, None] * Rij_part).flatten(1))
            centre = first + torch.arange(len(target), device=rows.device)
            totals[0][frame].index_add_(0, centre[:, None].expand_as(live)[live], -g)
    force, atom_virial = totals[0], totals[1].unflatten(2, (3, 3))
    return force, atom_virial.sum(1), atom_virial


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
    """A random list with empty slots anywhere, repeats and self images, and its dE, Ri_d, Rij."""
    generator = torch.Generator().manual_seed(seed)
    size = (frames, natoms, neighbors)
    list_neigh = torch.randint(-1, natoms + nghost, size, generator=generator).to(index)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    Ri_d = random(frames, natoms, 4 * neighbors, 3)
    return list_neigh.to(device), random(*size, 4), Ri_d, random(*size, 3)


def describe(Rij):
    """Ri = s (1, Rij) with s = exp(-r^2/4), and Ri_d = dRi/dr_i = -dRi/dRij."""
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
    """A many-body energy that does not change under rotation and permutation."""
    D = (Ri * live[..., None]).sum(2)
    return (D[..., 0] ** 3 + D[..., 1:].square().sum(-1)).sum()


# Of these, with their seed, a list has all that one may have: test_force_derivatives.py.
SMALL = dict(frames=3, natoms=2, nghost=1, neighbors=3)


def differentiable_pairs(**options):
    list_neigh, *values = pairs(**options)
    return list_neigh, *(value.requires_grad_() for value in values)


def neighbor_force(list_neigh, dE, Ri_d, nghost=0):
    """What the pairs do to the neighbours: the force without the centre atoms' part."""
    return torch.ops.calcops._force_virial(list_neigh, dE, Ri_d, None, nghost, False)[0]


def scalar_of(function, list_neigh):
    def scalar(*x):
        F, W, atom_W = function(list_neigh, *x, 1)
        return (F**3).sum() + (W**2).sum() + (F[..., None] * atom_W**2).sum()

    return scalar


def assert_equal_lists(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def graph(
    natoms=7, edges=23, frames=2, dtype=torch.float64, index=torch.int64, device="cpu", seed=0
):
    """Edges in no order, some masked in one row or in both, some to the atom itself; atoms of
    frames in no order."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(-1, natoms, (2, edges), generator=generator).to(device, index)
    gradient, vec = (
        torch.randn(edges, 3, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in "gv"
    )
    batch = torch.randint(0, frames, (natoms,), generator=generator).to(device, index)
    return edge_index, gradient, vec, natoms, batch, frames


def opcheck(op, args, kwargs=None):
    """Every check that PyTorch has for an operator; opcheck's default leaves static shapes out."""
    results = torch.library.opcheck(op, args, kwargs, test_utils=tuple(ALL_TEST_UTILS))
    assert results == dict.fromkeys(ALL_TEST_UTILS, "SUCCESS")
