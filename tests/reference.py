"""Reference results of the force operators in plain PyTorch, from the formulas of ops/*/*.h, and
random inputs.

`force` and `force_virial` are differentiable to any order and work under torch.func, so they are
the reference for derivatives too. They are simple, and therefore slow and need much memory.
"""

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def force_virial(list_neigh, dE, Ri_d, Rij, nghost=0, center=True):
    """Return force [B, n+m, 3], virial [B, 3, 3] and atom_virial [B, n+m, 3, 3].

    The arguments are those of ops/force/force.h.
    """
    frames, natoms = list_neigh.shape[:2]
    rows = natoms + nghost
    neighbors = list_neigh.shape[2:].numel()
    list_neigh = list_neigh.reshape(frames, natoms, neighbors).long()
    live = list_neigh >= 0
    # torch.where and no product: NaN times 0 is NaN, in values and in gradients of empty slots.
    dE = torch.where(live[..., None], dE.reshape(frames, natoms, neighbors, 4), 0.0)
    Ri_d = torch.where(live[..., None, None], Ri_d.reshape(frames, natoms, neighbors, 4, 3), 0.0)
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


def force(list_neigh, dE, Ri_d, nghost=0, center=True):
    frames, natoms = list_neigh.shape[:2]
    Rij = dE.new_zeros(frames, natoms, list_neigh.shape[2:].numel(), 3)  # of no effect on the force
    return force_virial(list_neigh, dE, Ri_d, Rij, nghost, center)[0]


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


# The list of this size and of seed 0 has an empty slot, a ghost, an atom twice and a self image, as
# test_force_derivatives.py checks.
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
        ends = []
        slots = []
        for row in range(rows):
            slots += [slot for slot, j in enumerate(frame) if j == row]
            ends.append(len(slots))
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


def assert_strides_and_threads_change_no_bit(function, *tensors):
    """Compare the results of `function` for contiguous and strided tensors on several threads."""
    expected = function(*tensors)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert not strided[0].is_contiguous()
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 5):
            torch.set_num_threads(count)
            for inputs in (tensors, strided):
                assert_equal_lists(function(*inputs), expected, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


def assert_empty_slots_never_matter(function, empty, left_out, *values):
    """Compare `function` of values [n, K, ...] with NaN in the empty slots [n, K] and without.

    The slots that are left out, the empty ones among them, have derivatives of zero.
    """
    dirty = [x.clone() for x in values]
    for x in dirty:
        x[empty] = torch.nan
        x.requires_grad_()
    result = function(*dirty)
    assert torch.equal(result, function(*values))
    scalar = result.square().sum()
    for _ in range(2):
        gradients = torch.autograd.grad(scalar, dirty, create_graph=True)
        for gradient in gradients:
            assert gradient.isfinite().all()
            assert (gradient[left_out] == 0).all()
        scalar = sum(gradient.square().sum() for gradient in gradients)
    tangents = [torch.ones_like(x) for x in values]
    for tangent in tangents:
        tangent[left_out] = torch.nan
    assert torch.func.jvp(function, tuple(dirty), tuple(tangents))[1].isfinite().all()


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


def assert_vmap_equals_a_loop(function, *items, constant):
    """Compare vmap with a loop: with one last argument for all items, and with one for each."""
    dims = *(0 for _ in items), None
    expected = torch.stack([function(*item, constant) for item in zip(*items)])
    for chunk in (None, 2):
        mapped = torch.vmap(function, dims, chunk_size=chunk)
        assert torch.equal(mapped(*items, constant), expected)
    constants = torch.stack([(1 + k) * constant for k in range(len(items[0]))])
    expected = torch.stack([function(*item) for item in zip(*items, constants)])
    assert torch.equal(torch.vmap(function)(*items, constants), expected)


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


def assert_modes_agree(scalar, *inputs, argument=0, **tolerance):
    """Compare third derivatives of a scalar, two of them in input 0, in all mixtures of modes."""
    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    expected = rev(rev(rev(scalar), argument))(*inputs)
    for outer, middle, inner in (
        (fwd, rev, rev),
        (rev, fwd, rev),
        (rev, rev, fwd),
        (fwd, fwd, fwd),
    ):
        result = outer(middle(inner(scalar), argument))(*inputs)
        torch.testing.assert_close(result, expected, **tolerance)


def assert_compiles_and_exports(function, arguments, sizes, other, backend="inductor"):
    """Compare torch.compile, with one graph for all sizes, and torch.export with eager mode.

    Some arguments require a gradient. `sizes` are their dynamic shapes, and `other` arguments of
    other sizes. All sizes differ, because torch.compile takes equal ones for one.
    """

    def gradients(f, values):
        values = [x.detach().requires_grad_(y.requires_grad) for x, y in zip(values, arguments)]
        leaves = [x for x in values if x.requires_grad]
        return torch.autograd.grad(f(*values).square().sum(), leaves)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for values in (arguments, other):
            results = gradients(compiled, values)
            assert_equal_lists(results, gradients(function, values), rtol=1e-12, atol=1e-12)

    class Module(torch.nn.Module):
        def forward(self, *arguments):
            return function(*arguments)

    # The module takes *arguments, which is one argument for torch.export.
    detached = tuple(x.detach() for x in arguments)
    program = torch.export.export(Module(), detached, dynamic_shapes=(sizes,))
    assert torch.equal(program.module()(*other), function(*other))
