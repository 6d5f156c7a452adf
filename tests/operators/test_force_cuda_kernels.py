"""The force operators' CUDA kernels on a GPU or in the emulation (kernels.py), at the sizes at
which they branch.

Four lanes share a pair, so that a warp takes eight pairs a step. A warp lists 512 slots, and a
block has 8 warps, which are 256 threads. The virial is summed over groups of 64 blocks.
"""

import pytest
import torch
from kernels import alternating, same_bits
from reference import assert_equal_lists, pairs

from calcops_jit import neighbor_index

ops = torch.ops.calcops
# (frames, natoms, nghost, neighbors)
SIZES = [
    (0, 3, 2, 4),
    (2, 0, 0, 4),
    (2, 0, 3, 4),
    (2, 3, 0, 0),
    (2, 3, 2, 0),
    (1, 1, 0, 1),
    (3, 1, 0, 100),
    (1, 7, 1, 9),
    (5, 8, 8, 31),
    (5, 16, 1, 32),
    (5, 7, 2, 33),
    (2, 33, 5, 40),
    (2, 2, 300, 3),
    (1, 700, 0, 1),
    (130, 1, 1, 2),
    (1, 255, 0, 2),
    (1, 257, 0, 2),
    (2, 530, 3, 1),
]
LONG_ROWS = [(1, 9, 0, 511), (1, 8, 0, 512), (1, 9, 1, 513), (2, 5, 0, 1025), (1, 1, 0, 5000)]


def assert_close(results, expected):
    if expected[0].dtype == torch.float64:
        assert_equal_lists(results, expected, rtol=1e-12, atol=1e-11)
    else:
        # Both devices sum in float64, so a float32 differs by one rounding: 2^-23.
        assert_equal_lists(results, expected, rtol=1.2e-7, atol=1e-12)


def upstream_of(outputs):
    return [
        torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(k))
        for k, x in enumerate(outputs)
    ]


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES + LONG_ROWS), ids=str)
def test_forces_and_virials_are_those_of_the_cpu(kernels, size, dtype, index):
    list_neigh, *values = pairs(*size, dtype, index, seed=size[3])
    nghost = size[2]
    expected = ops.force_virial(list_neigh, *values, nghost)
    results = kernels(ops.force_virial, list_neigh, *values, nghost)
    assert_close(results, expected)
    slots = neighbor_index(list_neigh, nghost)
    same_bits(kernels(ops.force_virial, list_neigh, *values, nghost, neighbor_index=slots), results)
    assert_close(kernels(ops.force, list_neigh, *values[:2], nghost), expected[:1])
    without_center = list_neigh, *values[:2], None, nghost, False, [True, False, False]
    assert_close(kernels(ops._force_virial, *without_center), ops._force_virial(*without_center))


@pytest.mark.parametrize("size, dtype, index", alternating(SIZES + LONG_ROWS[:4]), ids=str)
def test_gradients_are_those_of_the_cpu(kernels, size, dtype, index):
    list_neigh, *values = pairs(*size, dtype, index, seed=size[3])
    nghost = size[2]
    upstream = upstream_of(ops.force_virial(list_neigh, *values, nghost))
    every = [True, True, True]
    one = [[True, False, False], [False, True, False], [False, False, True]]
    # (upstreams that are not None, gradients that are computed)
    cases = [(every, every), *((flags, every) for flags in one)]
    if size not in LONG_ROWS:
        cases += [(every, flags) for flags in one]
    backward = ops._force_virial_backward
    for flags, mask in cases:
        upstreams = [x if flag else None for x, flag in zip(upstream, flags, strict=True)]
        arguments = *upstreams, list_neigh, *values, nghost, True, mask
        assert_close(kernels(backward, *arguments), backward(*arguments))


def test_the_virial_of_several_blocks_has_the_same_bits_in_any_order_of_them(kernels):
    """The last block of a frame adds the sums of all blocks in the order of their numbers."""
    for seed in range(20):
        inputs = pairs(4, 10, 0, 4, seed=seed)
        assert_close(kernels(ops.force_virial, *inputs), ops.force_virial(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [511, 512, 513, 528, 640, 1023, 1024, 1025, 2100, 4800])
def test_results_are_those_of_the_cpu_if_many_slots_name_one_atom(kernels, length, dtype):
    list_neigh, *values = pairs(1, length // 16 + 1, 0, 16, dtype)
    list_neigh.fill_(-1).view(-1)[-length:] = 0
    results = kernels(ops.force_virial, list_neigh, *values)
    assert_close(results, ops.force_virial(list_neigh, *values))
    index = neighbor_index(list_neigh)
    same_bits(kernels(ops.force_virial, list_neigh, *values, neighbor_index=index), results)


def test_nan_in_empty_slots_never_matters(kernels):
    list_neigh, *values = pairs(2, 40, 3, 70)
    empty = torch.rand(list_neigh.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    list_neigh[empty] = -1
    list_neigh[1, 5] = -1
    for x in values:
        x.view(*empty.shape, -1)[empty] = float("nan")
    expected = ops.force_virial(list_neigh, *values, 3)
    assert all(x.isfinite().all() for x in expected)
    assert_close(kernels(ops.force_virial, list_neigh, *values, 3), expected)
    arguments = *upstream_of(expected), list_neigh, *values, 3, True, [True] * 3
    backward = ops._force_virial_backward
    assert_close(kernels(backward, *arguments), backward(*arguments))


def test_a_random_neighbor_index_never_reads_out_of_bounds(kernels):
    list_neigh, *values = pairs(2, 9, 3, 17)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(
            -(2**31), 2**31 - 1, (2, 12 + 9 * 17), generator=generator, dtype=torch.int32
        )
        kernels(ops.force_virial, list_neigh, *values, 3, neighbor_index=index)
        kernels(ops.force_virial, list_neigh, *values, 3, neighbor_index=index.abs() % (9 * 17 + 1))


WRONG = [-2, 12, 2**31 - 1, -(2**31), 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    ("entry", "neighbors"), [(entry, 17) for entry in WRONG] + [(-2, 600), (2**63 - 1, 600)]
)
def test_a_wrong_entry_makes_its_row_nan_and_no_other(kernels, entry, neighbors):
    index = torch.int32 if -(2**31) <= entry < 2**31 else torch.int64
    list_neigh, *values = pairs(2, 9, 3, neighbors, index=index)
    frame, atom, slot = 1, 2, neighbors - 14
    list_neigh[frame, atom, slot] = -1
    outputs = ops.force_virial(list_neigh, *values, 3)
    arguments = *upstream_of(outputs), list_neigh, *values, 3, True, [True] * 3

    def results():
        yield from kernels(ops.force_virial, list_neigh, *values, 3)
        for gradient in kernels(ops._force_virial_backward, *arguments):
            yield gradient.view(2, 9, -1).clone()

    expected = list(results())
    list_neigh[frame, atom, slot] = entry
    for number, (result, right) in enumerate(zip(results(), expected, strict=True)):
        is_virial = number == 1
        row = (frame,) if is_virial else (frame, atom)
        assert result[row].isnan().all()
        result[row] = right[row]
        same_bits([result], [right])
