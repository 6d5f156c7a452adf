"""Errors of the force operators in float32 and float64, against NumPy's extended precision."""

import itertools

import numpy
import pytest
import torch
from reference import describe, energy_of, pairs

from calcops_jit import force, force_virial


def scatter(terms, list_neigh, rows, center):
    """Return for each atom the sum of the terms [B, n, K, ...] of the slots that name it, and the
    sum of their absolute values.

    With `center`, an atom's own terms are subtracted from the first sum and added to the second.
    """
    frames = len(list_neigh)
    both = []
    for sign, values in ((-1, terms), (1, numpy.abs(terms))):
        sums = numpy.zeros((frames, rows, *terms.shape[3:]), terms.dtype)
        frame, atom, slot = numpy.nonzero(list_neigh >= 0)
        numpy.add.at(sums, (frame, list_neigh[frame, atom, slot]), values[frame, atom, slot])
        if center:
            numpy.add.at(sums, (frame, atom), sign * values[frame, atom, slot])
        both.append(sums)
    return both


def exact(list_neigh, dE, Ri_d, Rij, nghost, upstream):
    """Return each output and gradient with the sum of its absolute terms.

    The outputs come first: force, virial, atom_virial. Then the gradients of dE, Ri_d and Rij.
    All are long doubles, which have 64 bits of mantissa on x86. The letters are those of
    ops/force/force.h: g is the force of a pair, and U and e are factors of its gradient.
    """
    list_neigh = list_neigh.numpy()
    live = list_neigh >= 0
    dE, Ri_d, Rij, gF, gV, gAV = (
        x.detach().double().numpy().astype(numpy.longdouble) for x in (dE, Ri_d, Rij, *upstream)
    )
    frames, natoms, neighbors = list_neigh.shape
    Ri_d = Ri_d.reshape(frames, natoms, neighbors, 4, 3)
    terms = dE[..., None] * Ri_d * live[..., None, None]  # their sum over c is g
    virials = terms[..., None] * Rij[..., None, None, :]
    # For each slot, the terms of U = gV + gAV_j and of e = gF_j - gF_i + U Rij.
    frame = numpy.arange(frames)[:, None, None]
    target = numpy.where(live, list_neigh, 0)
    shape = (*list_neigh.shape, 3, 3)
    U = [numpy.broadcast_to(gV[:, None, None], shape), gAV[frame, target]]
    e = [gF[frame, target], -numpy.broadcast_to(gF[:, :natoms, None], Rij.shape)]
    e += [u[..., b] * Rij[..., None, b] for u in U for b in range(3)]

    def summed(parts, mask):
        parts = numpy.stack([part * mask for part in parts])
        return parts.sum(0), numpy.abs(parts).sum(0)

    components = range(3)
    slot_mask = live[..., None]
    matrix_mask = live[..., None, None]
    return [
        [x.sum(2) for x in scatter(terms, list_neigh, natoms + nghost, True)],
        (virials.sum((1, 2, 3)), numpy.abs(virials).sum((1, 2, 3))),
        [x.sum(2) for x in scatter(virials, list_neigh, natoms + nghost, False)],
        summed(
            [Ri_d[..., a] * part[..., None, a] for part, a in itertools.product(e, components)],
            slot_mask,
        ),
        summed([dE[..., None] * part[..., None, :] for part in e], matrix_mask),
        summed(
            [
                terms[..., c, a, None] * u[..., a, :]
                for u, c, a in itertools.product(U, range(4), components)
            ],
            slot_mask,
        ),
    ]


def cancelling(inputs):
    """Return inputs whose large terms cancel: each odd slot repeats the even slot before it with
    the opposite sign, up to 1e-6."""
    list_neigh, dE, Ri_d, Rij = inputs
    list_neigh[..., 1::2] = list_neigh[..., 0::2]
    dE[..., 1::2, :] = -dE[..., 0::2, :] * (1 + 1e-6 * torch.rand_like(dE[..., 0::2, :]))
    return list_neigh, dE * 1e3, Ri_d, Rij


@pytest.mark.parametrize("change", [tuple, cancelling], ids=["plain", "cancelling"])
@pytest.mark.parametrize("neighbors", [1, 7, 64, 138, 500])
def test_float32_is_within_one_ulp_of_the_exact_result(neighbors, change):
    if change is cancelling and neighbors % 2:
        neighbors += 1  # slots come in pairs
    inputs = change(pairs(2, 23, 3, neighbors, torch.float32, seed=neighbors))
    leaves = [x.detach().requires_grad_() for x in inputs[1:]]
    outputs = force_virial(inputs[0], *leaves, 3)
    upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in outputs]
    results = *outputs, *torch.autograd.grad(outputs, leaves, upstream)
    names = ("force", "virial", "atom_virial", "dE", "Ri_d", "Rij")
    for name, result, sums in zip(names, results, exact(*inputs, 3, upstream), strict=True):
        value, absolute = (x.reshape(result.shape) for x in sums)
        ulp = numpy.spacing(numpy.abs(value).astype(numpy.float32)).astype(numpy.longdouble)
        error_of_sum = 1e-14 * absolute  # the kernels sum in float64
        excess = numpy.abs(result.detach().numpy() - value) - (ulp + error_of_sum)
        assert excess.max() <= 0, (name, excess.max())
    torch.testing.assert_close(force(*inputs[:3], 3), results[0], rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_the_forces_of_a_frame_sum_to_zero(dtype, bound):
    for neighbors in (1, 90, 500):
        F = force(*pairs(2, 200, 30, neighbors, dtype)[:3], 30).double()
        assert (F.sum(1).norm(dim=-1) <= bound * F.norm(dim=-1).sum(1)).all()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_virial_of_a_rotation_invariant_energy_is_symmetric(dtype, bound):
    list_neigh, _, _, Rij = pairs(3, 100, 0, 60)
    Rij = torch.where(list_neigh[..., None] >= 0, Rij, 0.0)
    Ri, Ri_d = describe(Rij)
    Ri.requires_grad_()
    (dE,) = torch.autograd.grad(energy_of(Ri, list_neigh >= 0), Ri)
    _, W, _ = force_virial(list_neigh, *(x.to(dtype) for x in (dE, Ri_d.flatten(2, 3), Rij)))
    assert ((W - W.mT).abs().amax((1, 2)) <= bound * W.abs().amax((1, 2))).all()
