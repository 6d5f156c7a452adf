"""The edge force operators' CUDA kernels on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

A warp has one atom and takes 128 of its edges' ends at a time. A block has 8 warps, which are 256
threads. A frame's atoms are divided among several blocks, with at least 1,024 atoms for each.
"""

import pytest
import torch
from kernels import alternating, same_bits
from reference import assert_equal_lists, graph

from calcops_jit import edge_order

ops = torch.ops.calcops
# (natoms, edges, frames)
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
    (9, 257, 9),
    (300, 900, 4),
    (2047, 60, 1),
    (2048, 60, 1),
    (3075, 60, 2),
]


def assert_close(results, expected):
    exact = expected[0].dtype == torch.float64
    tolerance = dict(rtol=1e-12, atol=1e-11) if exact else dict(rtol=1e-6, atol=1e-5)
    assert_equal_lists(results, expected, **tolerance)


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES), ids=str)
def test_forces_virials_and_gradients_are_those_of_the_cpu(kernels, size, dtype, index):
    natoms, edges, frames = size
    edge_index, gradient, vec, _, batch, _ = graph(
        max(natoms, 1), edges, max(frames, 1), dtype, index
    )
    inputs = edge_index, gradient, vec, natoms, batch[:natoms], frames
    expected = ops.edge_force_virial(*inputs)
    results = kernels(ops.edge_force_virial, *inputs)
    assert_close(results, expected)
    order = edge_order(edge_index, natoms)
    same_bits(kernels(ops.edge_force_virial, *inputs, edge_order=order), results)
    assert_close(kernels(ops.edge_force, edge_index, gradient, natoms), expected[:1])
    if frames:
        in_frame_0 = *inputs[:4], None, frames
        expected_one = ops.edge_force_virial(*in_frame_0)
        assert_close(kernels(ops.edge_force_virial, *in_frame_0), expected_one)
    gF, gW, gAW = (
        torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for x in expected
    )
    backward = ops._edge_force_virial_backward
    for upstream in ((gF, gW, gAW), (gF, None, None), (None, gW, None), (None, None, gAW)):
        for mask in ([True, True], [True, False], [False, True]):
            arguments = *upstream, *inputs, mask
            assert_close(kernels(backward, *arguments), backward(*arguments))


def test_a_random_edge_order_never_reads_out_of_bounds(kernels):
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
    upstream = [torch.ones_like(x) for x in (F, W, atom_W)]
    arguments = *upstream, edge_index, gradient, vec, natoms, batch, frames
    for x in kernels(ops._edge_force_virial_backward, *arguments):
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
    arguments = *upstream, edge_index, gradient, vec, natoms, wrong, frames
    assert_close(kernels(backward, *arguments), expected)


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_an_atom_of_no_frame_makes_every_virial_nan(kernels, frame):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    batch[3] = frame
    F, W, _ = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isfinite().all()
    assert W.isnan().all()


def test_virials_that_cancel_are_summed_before_they_are_rounded(kernels):
    """Each edge has an opposite one, and their virials cancel up to 1e-6, as at zero pressure."""
    generator = torch.Generator().manual_seed(0)
    natoms = 3000
    pairs = 6000
    edge_index = torch.randint(natoms, (2, pairs), generator=generator)
    gradient, vec = (torch.randn(pairs, 3, generator=generator) for _ in range(2))
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    gradient = torch.cat([gradient, gradient * (1 + 1e-6)])
    vec = torch.cat([vec, -vec])
    _, exact, _ = ops.edge_force_virial(edge_index, gradient.double(), vec.double(), natoms)
    _, virial, atom_virial = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms)
    assert exact.abs().max() < 1e-5 * atom_virial.abs().max()
    torch.testing.assert_close(virial.double(), exact, rtol=1e-6, atol=0)
