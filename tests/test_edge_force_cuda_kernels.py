"""The edge force operators' CUDA kernels at every boundary of theirs, on a GPU or in the emulation (kernels.py).

A warp has an atom and takes 32 ends a step, a block has 8 warps; a thread of the backward has an edge.
"""

import pytest
import torch
from kernels import same_bits
from reference import assert_equal_lists

import calcops_jit  # noqa: F401 - registers the operators

ops = torch.ops.calcops
TYPES = [(torch.float32, torch.int32), (torch.float64, torch.int64)]
SIZES = [(1, 0, 1), (1, 5, 1), (7, 1, 2), (7, 31, 2), (8, 32, 3), (9, 33, 1), (40, 700, 4), (300, 257, 260)]


def graph(natoms, edges, frames, dtype=torch.float64, index=torch.int64):
    """Edges in no order, some masked; atoms of frames in no order."""
    generator = torch.Generator().manual_seed(edges)
    edge_index = torch.randint(-1, natoms, (2, edges), generator=generator).to(index)
    gradient, vec = torch.randn(2, edges, 3, generator=generator, dtype=torch.float64).to(dtype)
    batch = torch.randint(0, frames, (natoms,), generator=generator).to(index)
    return edge_index, gradient, vec, natoms, batch, frames


def assert_close(ours, theirs):
    exact = theirs[0].dtype == torch.float64
    assert_equal_lists(ours, theirs, **(dict(rtol=1e-12, atol=1e-11) if exact else dict(rtol=2e-6, atol=1e-5)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "index"), TYPES, ids=["float32", "float64"])
def test_forces_and_gradients(kernels, size, dtype, index):
    edge_index, gradient, vec, *rest = graph(*size, dtype, index)
    order = ops.edge_order(edge_index, size[0])
    expected = ops.edge_force_virial(edge_index, gradient, vec, *rest)
    ours = kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest, edge_order=order)
    assert_close(ours, expected)
    same_bits(kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest), ours)
    same_bits(kernels(ops.edge_force, edge_index, gradient, size[0], edge_order=order), ours[:1])
    above = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=dtype) for x in expected]
    arguments = *above, edge_index, gradient, vec, *rest, [True, True]
    backward = ops._edge_force_virial_backward
    assert_close(kernels(backward, *arguments), backward(*arguments))


def test_all_edges_end_at_one_atom(kernels):
    edge_index, gradient, vec, *rest = graph(9, 500, 1)
    edge_index.fill_(8)
    assert_close(
        kernels(ops.edge_force_virial, edge_index, gradient, vec, *rest),
        ops.edge_force_virial(edge_index, gradient, vec, *rest),
    )


def test_an_order_of_garbage_reads_nothing_outside(kernels):
    edge_index, *given = graph(9, 50, 2)
    shape = ops.edge_order(edge_index, 9).shape
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
        order = order.to(ops.edge_order(edge_index, 9).dtype)
        kernels(ops.edge_force_virial, edge_index, *given, edge_order=order)


@pytest.mark.parametrize("entry", [-2, 9, 2**31 - 1, -(2**31), 2**32, -(2**32), 2**63 - 1, -(2**63)])
def test_a_wrong_entry_is_never_silent(kernels, entry):
    edge_index, gradient, vec, natoms, batch, frames = graph(9, 50, 2)
    edge_index[:, 30] = torch.tensor([4, entry])
    force, virial, atom_virial = kernels(ops.edge_force_virial, edge_index, gradient, vec, natoms, batch, frames)
    assert force[4].isnan().all() and atom_virial[4].isnan().all() and virial[batch[4]].isnan().all()
