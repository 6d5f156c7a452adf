"""The edge force operators' CUDA kernels at every boundary of theirs, on a GPU or in the emulation
(kernels.py).

A warp has an atom and takes 128 of its edges' ends at a time, a block has 8 warps and 256 threads,
and a frame's atoms are shared by as many blocks as they have times 1,024.
"""

import pytest
import torch
from kernels import same_bits
from reference import assert_equal_lists, graph

from calcops_jit import edge_order

ops = torch.ops.calcops
SIZES = [
    (0, 0, 1),
    (0, 0, 0),
    (3, 0, 2),
    (1, 1, 1),
    (1, 63, 1),
    (1, 64, 1),
    (1, 65, 1),
    (7, 23, 2),
    (8, 256, 3),
]
SIZES += [(9, 257, 9), (300, 900, 4), (2047, 60, 1), (2048, 60, 1), (3075, 60, 2)]


def assert_close(ours, theirs):
    exact = theirs[0].dtype == torch.float64
    assert_equal_lists(
        ours, theirs, **(dict(rtol=1e-12, atol=1e-11) if exact else dict(rtol=1e-6, atol=1e-5))
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "index"), [(torch.float32, torch.int32), (torch.float64, torch.int64)]
)
def test_forces_virials_and_gradients(kernels, size, dtype, index):
    natoms, edges, frames = size
    given = graph(max(natoms, 1), edges, max(frames, 1), dtype, index)
    edge_index, gradient, vec, _, batch, _ = given
    given = edge_index, gradient, vec, natoms, batch[:natoms], frames
    expected = ops.edge_force_virial(*given)
    ours = kernels(ops.edge_force_virial, *given)
    assert_close(ours, expected)
    order = edge_order(edge_index, natoms)
    same_bits(kernels(ops.edge_force_virial, *given, edge_order=order), ours)
    assert_close(kernels(ops.edge_force, edge_index, gradient, natoms), expected[:1])
    if frames:
        one = ops.edge_force_virial(*given[:4])
        assert_close(kernels(ops.edge_force_virial, *given[:4]), one)
    upstream = [
        torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for x in expected
    ]
    backward = ops._edge_force_virial_backward
    for above in (
        upstream,
        [upstream[0], None, None],
        [None, upstream[1], None],
        [None, None, upstream[2]],
    ):
        for mask in ([True, True], [True, False], [False, True]):
            assert_close(kernels(backward, *above, *given, mask), backward(*above, *given, mask))


def test_an_order_of_garbage_reads_nothing_outside(kernels):
    edge_index, gradient, vec, *rest = graph()
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(
            -(2**31), 2**31 - 1, (7 + 46,), generator=generator, dtype=torch.int32
        )
        kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest, edge_order=order)
        kernels(
            ops.edge_force_virial, edge_index, gradient, vec, *rest, edge_order=order.abs() % 47
        )


@pytest.mark.parametrize("entry", [-2, 7, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("row", [0, 1])
def test_a_wrong_entry_makes_its_atoms_nan_and_no_others(kernels, entry, row):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    edge_index = edge_index.clamp(min=0)
    edge_index[row, 5] = entry
    partner = edge_index[1 - row, 5]
    F, W, atom_W = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isnan().all(1).nonzero().flatten().tolist() == [partner]
    assert atom_W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [partner]
    assert W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [batch[partner]]
    above = [torch.ones_like(x) for x in (F, W, atom_W)]
    found = kernels(
        ops._edge_force_virial_backward, *above, edge_index, gradient, vec, natoms, batch, frames
    )
    for x in found:
        assert x.isnan().all(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("entries", [(-2, 7), (7, -2), (2**31 - 1, 2**31 - 1)])
def test_an_edge_with_two_wrong_ends_makes_the_first_atom_nan(kernels, entries):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    edge_index = edge_index.clamp(min=0)
    edge_index[:, 5] = torch.tensor(entries)
    F, W, atom_W = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isnan().all(1).nonzero().flatten().tolist() == [0]
    assert atom_W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [0]
    assert W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [batch[0]]


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_the_frame_of_an_atom_counts_only_where_the_virial_has_a_gradient(kernels, frame):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    backward = ops._edge_force_virial_backward
    upstream = (
        torch.randn(natoms, 3, dtype=gradient.dtype),
        None,
        torch.randn(natoms, 3, 3, dtype=gradient.dtype),
    )
    expected = backward(*upstream, edge_index, gradient, vec, natoms, batch, frames)
    wrong = batch.clone()
    wrong[3] = frame
    assert_close(
        kernels(backward, *upstream, edge_index, gradient, vec, natoms, wrong, frames), expected
    )


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_an_atom_of_no_frame_makes_every_virial_nan(kernels, frame):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    batch[3] = frame
    F, W, _ = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isfinite().all() and W.isnan().all()


def test_virials_that_cancel_are_summed_before_they_are_rounded(kernels):
    """3,000 atoms under no pressure: each edge and its opposite, whose virials cancel but for a
    millionth."""
    generator = torch.Generator().manual_seed(0)
    natoms, pairs = 3000, 6000
    edge_index = torch.randint(natoms, (2, pairs), generator=generator)
    gradient, vec = (torch.randn(pairs, 3, generator=generator) for _ in range(2))
    both = torch.cat([edge_index, edge_index.flip(0)], 1)
    opposite = torch.cat([gradient, gradient * (1 + 1e-6)])
    given = both, opposite, torch.cat([vec, -vec]), natoms
    exact = ops.edge_force_virial(both, *(x.double() for x in given[1:3]), natoms)[1]
    _, virial, atom_virial = kernels(ops.edge_force_virial, *given)
    assert exact.abs().max() < 1e-5 * atom_virial.abs().max()
    torch.testing.assert_close(virial.double(), exact, rtol=1e-6, atol=0)
