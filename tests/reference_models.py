"""Reference results of the operators of calcops/ops in plain PyTorch, from their documentation.

Each function takes the arguments of its operator and is differentiable to any order, but for
`tabulated_sum`, whose cells have no derivative for x.
"""

import math

import torch
from numpy.polynomial import Legendre, Polynomial


def of_kinds(values, kind):
    """Return the row of `values` [kinds, m] of each slot. Empty slots have 1, 2 ... m."""
    empty = torch.arange(1, values.shape[1] + 1).to(values)
    return torch.cat([values, empty[None]])[kind.long()]


DEGREES = {"quintic": 5, "cubic": 3}


def cardinal(degree, t):
    """Return the B-spline of knots 0, 1 ... degree + 1 at t, by its recursion."""
    splines = [((t >= i) & (t < i + 1)).to(t) for i in range(degree + 1)]  # begin at knot i
    for k in range(1, degree + 1):
        splines = [
            ((t - i) * splines[i] + (i + k + 1 - t) * splines[i + 1]) / k
            for i in range(degree + 1 - k)
        ]
    return splines[0]


def splines(degree, position, functions):
    """Return all B-splines [..., functions] at positions in cells of width 1.

    Outside the cells, a B-spline goes on as a straight line.
    """
    cells = functions - degree
    inside = position.clamp(0, cells)
    offset = torch.arange(functions, dtype=position.dtype) - degree
    # The right end of the cells belongs to the last cell. A B-spline is symmetric about
    # (degree + 1) / 2, so at this end it is computed at the mirrored place, with the slope of
    # opposite sign.
    t = inside.unsqueeze(-1) - offset
    at_end = (inside.detach() >= cells).unsqueeze(-1)
    mirrored_end = degree + 1 - (cells - offset)
    value = torch.where(at_end, cardinal(degree, mirrored_end), cardinal(degree, t))

    def slope(t):
        return cardinal(degree - 1, t) - cardinal(degree - 1, t - 1)

    beyond = (position - inside).unsqueeze(-1)
    slope_at_edge = torch.where(at_end, -slope(mirrored_end), slope(-offset).expand_as(value))
    return torch.where(beyond != 0, value.detach() + beyond * slope_at_edge, value)


# ---- density -------------------------------------------------------------------------------------


def spherical_harmonics(u):
    """Return the real spherical harmonics [..., 25] of unit vectors, without the phase (-1)^m."""
    x, y, z = u.unbind(-1)
    one = 1 + 0 * u.sum(-1)  # NaN if u is NaN
    cosines = [one]  # real and imaginary part of (x + iy)^m
    sines = [0 * one]
    for m in range(4):
        cosines.append(x * cosines[m] - y * sines[m])
        sines.append(x * sines[m] + y * cosines[m])
    harmonics = []
    for degree in range(5):
        for m in range(-degree, degree + 1):
            k = abs(m)
            ratio = math.factorial(degree - k) / math.factorial(degree + k)
            factor = math.sqrt((2 - (m == 0)) * (2 * degree + 1) / (4 * math.pi) * ratio)
            legendre = Legendre.basis(degree).deriv(k).convert(kind=Polynomial).coef
            of_z = sum(c * z**n for n, c in enumerate(legendre))
            harmonics.append(factor * of_z * (cosines if m >= 0 else sines)[k])
    return torch.stack(harmonics, -1)


def density(d, kind, table, grid, harmonics):
    begin, end = of_kinds(grid.to(d), kind).unbind(-1)
    live = (kind >= 0) & ~(d.detach().square().sum(-1) >= end**2)
    d = torch.where(live.unsqueeze(-1), d, 1.0)
    r = torch.linalg.vector_norm(d, dim=-1)
    rows = table.shape[1]
    B = splines(5, (r - begin) * (rows - 5) / (end - begin), rows)
    B = torch.where(live.unsqueeze(-1), B, 0.0)
    Y = spherical_harmonics(d / r.unsqueeze(-1))[..., :harmonics]
    kinds = torch.arange(len(table)) == kind.unsqueeze(-1)
    sums = torch.einsum("isk,isb,isq->iqkb", kinds.to(d), B, Y)
    return torch.einsum("iqkb,kbf->qif", sums, table)


# ---- environment_spline --------------------------------------------------------------------------


def environment_rows(d, davg, dstd, rcut_smth, rcut):
    """Return the normalised rows R [..., 4] of Deep Potential's environment matrix."""
    r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    u = ((r - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)
    w = u**3 * (-6 * u**2 + 15 * u - 10) + 1
    return (torch.cat([w / r, w / r * d / r], -1) - davg) / dstd


def environment_spline(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline="quintic"):
    live = (kind >= 0) & ~(d.detach().square().sum(-1) >= rcut**2)
    d = torch.where(live.unsqueeze(-1), d, 1.0)
    R = environment_rows(d, of_kinds(davg, kind), of_kinds(dstd, kind), rcut_smth, rcut)
    begin, end = of_kinds(grid, kind).unbind(-1)
    degree = DEGREES[spline]
    position = (R[..., 0] - begin) * (functions - degree) / (end - begin)
    B = splines(degree, position, functions)
    is_of_kind = (torch.arange(len(grid)) == kind.unsqueeze(-1)) & live.unsqueeze(-1)
    R, B = (torch.where(is_of_kind.unsqueeze(-1), x.unsqueeze(2), 0.0) for x in (R, B))
    return torch.einsum("iska,iskb->iakb", R, B)


# ---- tabulated_sum -------------------------------------------------------------------------------


def tabulated_sum(x, R, kind, table, grid, order=0):
    live = kind >= 0
    x = torch.where(live, x, 1.0).nan_to_num(math.nan, 1e30, -1e30)
    begin, width, middle, wide, end = of_kinds(grid, kind).unbind(-1)
    inside = x.detach().clamp(begin, end)
    fine = ((middle - begin) / width).round()
    coarse = ((end - middle) / wide).round()
    is_fine = (inside < middle) | (coarse == 0)
    cell = torch.where(
        is_fine,
        ((inside - begin) / width).floor().clamp(max=fine - 1),
        fine + ((inside - middle) / wide).floor().clamp(max=coarse - 1),
    )
    start = torch.where(is_fine, begin + cell * width, middle + (cell - fine) * wide)
    zeros = torch.zeros_like(table[:1].sum(0, keepdim=True))  # for empty slots
    c = torch.cat([table, zeros])[kind.long(), cell.long()]  # [n, K, 6, M]
    t = (inside - start).unsqueeze(-1)

    def polynomial(order):
        terms = [math.perm(k, order) * c[..., k, :] * t ** (k - order) for k in range(order, 6)]
        return sum(terms, torch.zeros_like(c[..., 0, :]))

    g = polynomial(order)
    beyond = (x - inside).unsqueeze(-1)
    if order == 0:
        g = g + beyond * polynomial(1)
    elif order > 1:
        g = torch.where(beyond == 0, g, 0.0)
    return torch.einsum("isa,ism->iam", torch.where(live.unsqueeze(-1), R, 0.0), g)


def near_pairs(positions, list_neigh, image, offset, cutoff, slots):
    """Return near, Rij, count and nearest, atom by atom."""
    n = len(list_neigh)
    near = torch.full((n, slots), -1)
    Rij = positions.new_zeros(n, slots, 3)
    count = torch.zeros(n, dtype=torch.int64)
    nearest = positions.new_full((n,), torch.inf)
    for i in range(n):
        filled = list_neigh[i] >= 0
        j = list_neigh[i, filled].long()
        d = positions[j] + offset[image[i, filled].long()] - positions[i]
        r2 = d.square().sum(-1)
        is_near = ~(r2 >= cutoff**2)
        count[i] = is_near.sum()
        kept = min(slots, int(count[i]))
        near[i, :kept] = j[is_near][:kept]
        Rij[i, :kept] = d[is_near][:kept]
        if len(r2):
            nearest[i] = r2.nan_to_num(torch.inf).min()
    return near, Rij, count, nearest


def net_energies(
    radial, A, net, factors, invariant, coefficient, w_radial, w_angular, b0, w1, bias
):
    """Return the energies of density_net, differentiable."""
    sums = torch.cat([A, A.new_ones(1, *A.shape[1:])])  # the factor -1 is 1
    terms = coefficient.view(-1, 1, 1) * sums[factors.long()].prod(1)
    q = A.new_zeros(w_angular.shape[1], *A.shape[1:]).index_add(0, invariant.long(), terms)
    own = net.clamp(min=0)
    hidden = torch.einsum("nr,nrk->nk", radial, w_radial[own]) - b0[own]
    hidden = hidden + torch.einsum("pnf,npfk->nk", q, w_angular[own])
    energy = (torch.tanh(hidden) * w1[own]).sum(-1) - bias[own]
    return torch.where(net >= 0, energy, 0.0)


def density_net(radial, A, **others):
    radial = radial.detach().requires_grad_()
    A = A.detach().requires_grad_()
    energy = net_energies(radial, A, **others)
    gradients = torch.autograd.grad(energy.sum(), [radial, A], materialize_grads=True)
    return energy.detach(), *gradients


def screened_repulsion(d, kind, table):
    is_pair = kind >= 0
    # An empty slot, which may hold NaN, gets a vector beyond all cutoffs.
    far = 1 + table[:, 1].abs().max().item() if len(table) else 1.0
    d = torch.where(is_pair.unsqueeze(-1), d, far).requires_grad_()
    inner, outer, *terms = table[kind.clamp(min=0)].unbind(-1) if len(table) else [d[..., 0]] * 10
    r = d.square().sum(-1).sqrt()
    sums = sum(a * torch.exp(-b * r) for a, b in zip(terms[::2], terms[1::2]))
    x = torch.where(r > inner, (r - inner) / (outer - inner), 0.0)
    energy = torch.where(
        is_pair & (r < outer.abs()), sums / r * (1 + torch.cos(math.pi * x)) / 2, 0.0
    )
    (grad,) = torch.autograd.grad(energy.sum(), d)
    return energy.detach().sum(-1), torch.where((energy != 0).unsqueeze(-1), grad, 0.0)
