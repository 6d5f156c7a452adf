"""edge_force and edge_force_virial for few edges among very many atoms or frames: results, order of
sums, memory."""

import os
import subprocess
import sys

import pytest
import torch
from reference import assert_equal_lists, graph, pairs

from calcops_jit import (
    edge_force,
    edge_force_virial,
    edge_order,
    force,
    force_virial,
    neighbor_index,
)

MANY = 100_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("edges", [0, 1, 50])
def test_few_edges_give_the_same_bits_among_many_atoms_as_among_few(dtype, index, edges):
    edge_index, gradient, vec, natoms, batch, frames = graph(9, edges, 3, dtype, index)
    few = edge_force_virial(edge_index, gradient, vec, natoms, batch, frames)

    # The same edges between some of many atoms, in the same order.
    atoms = torch.randperm(MANY, generator=torch.Generator().manual_seed(1))[:natoms].sort().values
    many_index = torch.where(edge_index < 0, -1, atoms[edge_index.long()]).to(index)
    many_batch = torch.zeros(MANY, dtype=index)
    many_batch[atoms] = batch
    many_force = torch.zeros(MANY, 3, dtype=dtype)
    many_force[atoms] = few[0]
    many_atom_virial = torch.zeros(MANY, 3, 3, dtype=dtype)
    many_atom_virial[atoms] = few[2]
    expected = many_force, few[1], many_atom_virial
    results = edge_force_virial(many_index, gradient, vec, MANY, many_batch, frames)
    assert_equal_lists(results, expected, rtol=0, atol=0)
    assert torch.equal(edge_force(many_index, gradient, MANY), many_force)
    columns = [x.mT.contiguous().mT for x in (gradient, vec)]
    results = edge_force_virial(many_index, *columns, MANY, many_batch, frames)
    assert_equal_lists(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("entry", [-2, MANY, 2**62])
def test_a_wrong_entry_among_many_atoms_is_an_error(entry):
    edge_index = torch.tensor([[0, 5, 7], [3, entry, 2]])
    with pytest.raises(
        RuntimeError, match=rf"`edge_index` entries .* got \(5, {entry}\) at edge 1"
    ):
        edge_force(edge_index, torch.ones(3, 3), MANY)


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_frames_of_one_atom_have_its_virial_in_any_order_of_frames(order):
    natoms = 2000
    edge_index, gradient, vec, *_ = graph(natoms, 30_000)
    batch = torch.arange(natoms)
    batch = {"rising": batch, "falling": batch.flip(0), "any": torch.randperm(natoms)}[order]
    _, virial, atom_virial = edge_force_virial(edge_index, gradient, vec, natoms, batch, natoms)
    assert torch.equal(virial[batch], atom_virial)


@pytest.mark.parametrize("edges", [5_000, 40_000, 70_000])
@pytest.mark.parametrize("natoms", [700, 2_000, 5_000])
def test_the_order_of_sums_is_the_same_for_all_dtypes_and_for_both_operators(natoms, edges):
    edge_index, gradient, vec, _, batch, frames = graph(natoms, edges, 3, torch.float32)
    expected = edge_force_virial(edge_index, gradient, vec, natoms, batch, frames)
    results = edge_force_virial(edge_index.int(), gradient, vec, natoms, batch.int(), frames)
    assert_equal_lists(results, expected, rtol=0, atol=0)
    doubles = edge_force_virial(edge_index, gradient.double(), vec.double(), natoms, batch, frames)
    assert_equal_lists([x.float() for x in doubles], expected, rtol=0, atol=0)
    for index in (torch.int32, torch.int64):
        assert torch.equal(edge_force(edge_index.to(index), gradient.double(), natoms), doubles[0])


@pytest.mark.parametrize(("natoms", "neighbors"), [(700, 8), (2_000, 16), (1_000, 40)])
def test_the_order_of_sums_over_a_list_is_the_same_for_all_dtypes(natoms, neighbors):
    list_neigh, *values = pairs(1, natoms, 3, neighbors, torch.float32)
    doubles = [x.double() for x in values]
    expected = force_virial(list_neigh, *doubles, 3)
    assert_equal_lists(force_virial(list_neigh.long(), *doubles, 3), expected, rtol=0, atol=0)
    assert torch.equal(force(list_neigh, *doubles[:2], 3), expected[0])
    assert torch.equal(force(list_neigh, *values[:2], 3), expected[0].float())


# {name: (call, bytes of its results)}
LARGE = {
    "forces": ("edge_force(index, edges, 20_000_000)", 240e6),
    "virials": ("edge_force_virial(index, edges, edges, 4_000_000)", 192e6),
    "frames": ("edge_force_virial(index, edges, edges, 2, torch.tensor([0, 1]), 6_000_000)", 216e6),
}


@pytest.mark.parametrize("call", LARGE.values(), ids=LARGE)
def test_a_call_needs_at_most_a_quarter_more_memory_than_its_results(call):
    """A process makes the call. Its address space may grow by 1.25 times the size of the results."""
    code = f"""
import resource, torch
from calcops_jit import edge_force, edge_force_virial
torch.set_num_threads(1)
index, edges = torch.tensor([[0], [1]]), torch.ones(1, 3)
edge_force_virial(index, edges, edges, 2)
edge_force(index, edges, 2)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {int(1.25 * call[1])}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
{call[0]}
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_too_little_memory_is_an_error_that_names_the_size():
    code = """
import resource, torch
from calcops_jit import edge_force, edge_force_virial, edge_order, force, force_virial, neighbor_index
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
index, edges, list_neigh = torch.tensor([[0], [1]]), torch.ones(1, 3), torch.zeros(1, 1, 1, dtype=torch.int32)
pairs = list_neigh, torch.ones(1, 1, 1, 4), torch.ones(1, 1, 4, 3)
for call in (
    lambda: edge_force(index, edges, 2**40),
    lambda: edge_force_virial(index, edges, edges, 2**33),
    lambda: edge_force_virial(index, edges, edges, 2, nframes=2**33),
    lambda: edge_order(index, 2**33),
    lambda: edge_order(index.int(), 2**40),
    lambda: force(*pairs, 2**33),
    lambda: force(*pairs, 600_000_000),  # memory for the result, not for the sums
    lambda: force_virial(*pairs, torch.ones(1, 1, 1, 3), 2**40),
    lambda: neighbor_index(list_neigh, 2**33),
):
    try:
        call()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    sizes = [
        ("edge_force", "natoms", 2**40),
        ("edge_force_virial", "natoms", 2**33),
        ("edge_force_virial", "nframes", 2**33),
        ("edge_order", "natoms", 2**33),
        ("edge_order", "natoms", 2**40),
        ("force", "nghost", 2**33),
        ("force", "nghost", 600_000_000),
        ("force_virial", "nghost", 2**40),
        ("neighbor_index", "nghost", 2**33),
    ]
    assert run.stdout.splitlines() == [
        f"calcops::{operator}: expected `{argument}` for which memory suffices, got {size}"
        for operator, argument, size in sizes
    ]


@pytest.mark.filterwarnings("error")
def test_vmap_of_edge_order_and_neighbor_index_equals_a_loop_without_a_warning():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    lists = torch.randint(-1, 7, (3, 2, 4, 5))
    for function in (lambda x: edge_order(x.flatten(1), 7), lambda x: neighbor_index(x, 3)):
        expected = torch.stack([function(x) for x in lists])
        for dimension in (0, 1):
            results = torch.vmap(function, dimension)(lists.transpose(0, dimension))
            assert torch.equal(results, expected)
