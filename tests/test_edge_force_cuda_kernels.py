"""The edge force operators' CUDA kernels at every boundary of theirs, on a GPU or in the emulation (kernels.py).

A warp has an atom and takes 128 of its edges' ends at a time, a block has 8 warps and 256 threads, and a frame's atoms
are shared by as many blocks as they have times 1,024.
"""

import pytest
import torch
from kernels import same_bits
from reference import assert_equal_lists, graph

from calcops_jit import edge_order

ops = torch.ops.calcops
SIZES = [(0, 0, 1), (0, 0, 0), (3, 0, 2), (1, 1, 1), (1, 63, 1), (1, 64, 1), (1, 65, 1), (7, 23, 2), (8, 256, 3)]
SIZES += [(9, 257, 9), (300, 900, 4), (2047, 60, 1), (2048, 60, 1), (3075, 60, 2)]


def assert_close(ours, theirs):
    # Sums are in float64 on either device: a float32 may be rounded the other way.
    exact = theirs[0].dtype == torch.float64
    assert_equal_lists(ours, theirs, **(dict(rtol=1e-12, atol=1e-11) if exact else dict(rtol=1.2e-7, atol=1e-12)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "index"), [(torch.float32, torch.int32), (torch.float64, torch.int64)])
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
    upstream = [torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(0)) for x in expected]
    backward = ops._edge_force_virial_backward
    for above in (upstream, [upstream[0], None, None], [None, upstream[1], None], [None, None, upstream[2]]):
        for mask in ([True, True], [True, False], [False, True]):
            assert_close(kernels(backward, *above, *given, mask), backward(*above, *given, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_virials_that_cancel_are_summed_in_float64(kernels, dtype):
    """3,000 atoms under almost no pressure: two edges of opposite virials at different atoms, and a little more."""
    generator = torch.Generator().manual_seed(0)
    natoms, edges = 3000, 6000
    edge_index = torch.randint(natoms, (2, edges), generator=generator)
    gradient, vec = torch.randn(2, edges // 2, 3, generator=generator)
    tiny = torch.full_like(gradient, 1e-6)
    given = edge_index, torch.cat([gradient, -gradient + tiny]).to(dtype), torch.cat([vec, vec]).to(dtype), natoms
    exact = -(given[1].double()[:, :, None] * given[2].double()[:, None]).sum(0)
    virial = kernels(ops.edge_force_virial, *given)[1][0]
    torch.testing.assert_close(virial.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-11)
    frame = torch.arange(natoms) % 2
    for ours, theirs in zip(
        kernels(ops.edge_force_virial, *given, frame, 2)[1], ops.edge_force_virial(*given, frame, 2)[1], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-11)


def test_an_order_of_garbage_reads_nothing_outside(kernels):
    edge_index, gradient, vec, *rest = graph()
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(-(2**31), 2**31 - 1, (7 + 46,), generator=generator, dtype=torch.int32)
        kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest, edge_order=order)
        kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest, edge_order=order.abs() % 47)


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
    found = kernels(ops._edge_force_virial_backward, *above, edge_index, gradient, vec, natoms, batch, frames)
    for x in found:
        assert x.isnan().all(1).nonzero().flatten().tolist() == [5]


def test_an_edge_of_two_wrong_ends_makes_the_first_atom_nan(kernels):
    """No atom is named that could show it."""
    edge_index, gradient, vec, natoms, batch, frames = graph()
    edge_index = edge_index.clamp(min=0)
    edge_index[:, 5] = torch.tensor([-2, 7])
    F, W, atom_W = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isnan().all(1).nonzero().flatten().tolist() == [0]
    assert atom_W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [0]
    assert W.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [batch[0]]
    assert kernels(ops.edge_force, edge_index, gradient, natoms)[0][0].isnan().all()


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_an_atom_of_no_frame_makes_every_virial_nan(kernels, frame):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    batch[3] = frame
    F, W, _ = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert F.isfinite().all() and W.isnan().all()


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_an_atom_of_no_frame_harms_gradients_only_where_the_virial_has_one(kernels, frame):
    edge_index, gradient, vec, natoms, batch, frames = graph()
    given = edge_index, gradient, vec, natoms, batch, frames
    upstream = [torch.ones_like(x) for x in ops.edge_force_virial(*given)]
    backward = ops._edge_force_virial_backward
    above = upstream[0], None, upstream[2]
    expected = backward(*above, *given)
    lost = batch.clone()
    lost[3] = frame
    assert_close(kernels(backward, *above, *given[:4], lost, frames), expected)
    to_it = (edge_index[1] == 3) & (edge_index[0] >= 0)
    for x in kernels(backward, *upstream, *given[:4], lost, frames):
        assert torch.equal(x.isnan().all(1), to_it) and torch.equal(x.isnan().any(1), to_it)
