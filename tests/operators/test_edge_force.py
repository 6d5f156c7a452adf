"""edge_force and edge_force_virial: signs, bits, wrong entries, memory and compilation.
test_edge_force_by_contract.py has the rest."""

import itertools
import sys

import pytest
import torch
from programs import run
from reference import assert_equal_lists, graph, pairs

from calcops_jit import edge_force, edge_force_virial, edge_order, force, force_virial

backward = torch.ops.calcops._edge_force_virial_backward


def differentiable_graph(**options):
    edge_index, gradient, vec, *rest = graph(**options)
    return edge_index, gradient.requires_grad_(), vec.requires_grad_(), *rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edges", [2, 64, 65, 20_000])
def test_inputs_with_contiguous_columns_give_the_bits_of_contiguous_rows(device, dtype, edges):
    edge_index, gradient, vec, *rest = graph(edges=edges, dtype=dtype, device=device)
    expected = edge_force_virial(edge_index, gradient, vec, *rest)
    columns = [x.mT.contiguous().mT for x in (gradient, vec)]
    assert not columns[0].is_contiguous()
    every_second = [x.repeat_interleave(2, 1)[:, ::2] for x in (gradient, vec)]
    layouts = [columns, (columns[0], vec), (gradient, columns[1]), every_second]
    for g, v in layouts:
        assert_equal_lists(edge_force_virial(edge_index, g, v, *rest), expected, rtol=0, atol=0)
        assert torch.equal(edge_force(edge_index, g, rest[0]), expected[0])
    upstream = [torch.ones_like(x) for x in expected]

    def gradients(*leaves):
        leaves = [x.requires_grad_() for x in leaves]
        return torch.autograd.grad(edge_force_virial(edge_index, *leaves, *rest), leaves, upstream)

    assert_equal_lists(gradients(*columns), gradients(gradient, vec), rtol=0, atol=0)


def test_forces_and_virial_have_the_signs_of_minus_the_gradient_of_an_energy(device):
    """The forces are -dE/dr and the virial is -dE/d(strain), by autograd."""
    positions = torch.randn(6, 3, dtype=torch.float64, device=device, requires_grad=True)
    strain = torch.zeros(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    edge_index = torch.tensor(list(itertools.permutations(range(6), 2)), device=device).T
    r = positions + positions @ strain
    vec = r[edge_index[1]] - r[edge_index[0]]
    energy = (vec.square().sum(1) * vec.norm(dim=1).cos()).sum()
    gradient, dE_dr, dE_dstrain = torch.autograd.grad(energy, (vec, positions, strain))
    F, W, atom_W = edge_force_virial(edge_index, gradient, vec.detach(), 6)
    torch.testing.assert_close(F, -dE_dr)
    # d(vec[b])/d(strain[c][b]) is vec[c].
    torch.testing.assert_close(W[0].mT, -dE_dstrain)
    torch.testing.assert_close(atom_W.sum(0), W[0])


@pytest.mark.parametrize("entry", [7, -(2**63)])
@pytest.mark.parametrize("row", [0, 1])
def test_an_entry_that_names_no_atom_is_an_error_that_shows_the_edge(entry, row):
    edge_index, gradient, vec, *rest = graph()
    edge_index = edge_index.clamp(min=0)
    edge_index[row, 5] = entry
    first, second = edge_index[:, 5].tolist()
    message = (
        r"expected `edge_index` entries -1 or 0 <= i < natoms = 7, "
        rf"got \({first}, {second}\) at edge 5"
    )
    for call in (
        lambda: edge_force(edge_index, gradient, 7),
        lambda: edge_force_virial(edge_index, gradient, vec, *rest),
        lambda: backward(torch.ones(7, 3).double(), None, None, edge_index, gradient, vec, *rest),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(RuntimeError, match="expected `edge_index` entries"):
        torch.vmap(lambda g: edge_force(edge_index, g, 7))(torch.stack([gradient] * 2))


@pytest.mark.parametrize("frame", [-1, 2, 2**62])
def test_a_frame_that_does_not_exist_is_an_error_that_shows_its_atom(frame):
    *edges, batch, frames = graph()
    batch[3] = frame
    with pytest.raises(
        RuntimeError, match=f"`batch` entries 0 <= frame < nframes = 2, got {frame} at atom 3"
    ):
        edge_force_virial(*edges, batch, frames)


def test_an_error_names_the_argument_its_rule_and_its_value():
    edge_index, gradient, vec, natoms, batch, frames = graph()
    names = ("edge_index", "edge_gradient", "edge_vec", "natoms", "batch", "nframes")
    good = dict(zip(names, (edge_index, gradient, vec, natoms, batch, frames), strict=True))
    for bad, message in (
        (
            {"edge_vec": vec.float()},
            "`edge_vec` of dtype float64 like `edge_gradient`, got float32",
        ),
        ({"batch": None, "nframes": 0}, "`nframes` >= 1 where `batch` is None, got 0"),
        ({"batch": batch[1:]}, "`batch` of shape [natoms] = [7], got [6]"),
    ):
        with pytest.raises(RuntimeError) as error:
            edge_force_virial(**{**good, **bad})
        first_line = str(error.value).split("\n")[0]
        assert first_line.removesuffix(".") == f"calcops::edge_force_virial: expected {message}"


@pytest.mark.parametrize("edges", [2**30, 2**32, 2**40])
def test_more_edges_than_an_order_can_count_are_refused(edges):
    """The error comes before any allocation. The tensor here is one number, expanded."""
    edge_index = torch.zeros(2, 1, dtype=torch.int64).expand(2, edges)
    message = rf"expected `edge_index` of less than 2\^30 edges, got \[2, {edges}\]"
    with pytest.raises(RuntimeError, match="calcops::edge_order: " + message):
        edge_order(edge_index, 7)
    order = torch.zeros(1, dtype=torch.int32).expand(7 + 2 * edges)
    message = rf"expected `edge_order` with E < 2\^30, got \[{7 + 2 * edges}\]"
    with pytest.raises(RuntimeError, match="calcops::edge_force: " + message):
        edge_force(edge_index, torch.zeros(1, 3).expand(edges, 3), 7, edge_order=order)


def test_an_order_changes_no_bit_and_calcops_check_refuses_one_of_another_graph(
    device, monkeypatch
):
    inputs = graph(device=device)
    edge_index, gradient, *_ = inputs
    order = edge_order(edge_index, 7)
    monkeypatch.setenv("CALCOPS_CHECK", "1")
    results = edge_force_virial(*inputs, edge_order=order)
    assert_equal_lists(results, edge_force_virial(*inputs), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="expected `edge_order` of this edge_index and natoms"):
        edge_force(edge_index.roll(1, 1), gradient, 7, edge_order=order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_bitwise_the_same_for_any_number_of_threads(dtype):
    edge_index, *leaves, natoms, batch, frames = graph(natoms=500, edges=60_000, dtype=dtype)
    leaves = [x.requires_grad_() for x in leaves]
    upstream = None
    results = []
    threads_of_torch = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            outputs = edge_force_virial(edge_index, *leaves, natoms, batch, frames)
            upstream = upstream or [torch.randn_like(x) for x in outputs]
            results.append((*outputs, *torch.autograd.grad(outputs, leaves, upstream)))
    finally:
        torch.set_num_threads(threads_of_torch)
    for other in results[1:]:
        assert_equal_lists(other, results[0], rtol=0, atol=0)


# ---- few edges among very many atoms or frames, order of sums, memory ----------------------------


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


def test_a_call_needs_at_most_a_quarter_more_memory_than_its_results():
    """A process makes the calls. Its address space may grow by 1.25 times the size of the results,
    which are the only ones at the time."""
    code = """
import resource, torch
from calcops_jit import edge_force, edge_force_virial
torch.set_num_threads(1)
index, edges = torch.tensor([[0], [1]]), torch.ones(1, 3)
edge_force_virial(index, edges, edges, 2)
edge_force(index, edges, 2)
for call, size in (
    (lambda: edge_force(index, edges, 20_000_000), 240e6),
    (lambda: edge_force_virial(index, edges, edges, 4_000_000), 192e6),
    (lambda: edge_force_virial(index, edges, edges, 2, torch.tensor([0, 1]), 6_000_000), 216e6),
):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + int(1.25 * size)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    call()
"""
    run(sys.executable, "-c", code, OMP_NUM_THREADS="1")


# {call: the argument whose size the error names, and this size}
TOO_LARGE = {
    "edge_force(index, edges, 2**40)": ("natoms", 2**40),
    "edge_force_virial(index, edges, edges, 2**33)": ("natoms", 2**33),
    "edge_force_virial(index, edges, edges, 2, nframes=2**33)": ("nframes", 2**33),
    "edge_order(index, 2**33)": ("natoms", 2**33),
    "edge_order(index.int(), 2**40)": ("natoms", 2**40),
    "force(*pairs, 2**33)": ("nghost", 2**33),
    "force(*pairs, 600_000_000)": (
        "nghost",
        600_000_000,
    ),  # suffices for the result, not for the sums
    "force_virial(*pairs, torch.ones(1, 1, 1, 3), 2**40)": ("nghost", 2**40),
    "neighbor_index(list_neigh, 2**33)": ("nghost", 2**33),
}


def test_too_little_memory_is_an_error_that_names_the_size():
    code = f"""
import resource, torch
from calcops_jit import *
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
index, edges, list_neigh = torch.tensor([[0], [1]]), torch.ones(1, 3), torch.zeros(1, 1, 1, dtype=torch.int32)
pairs = list_neigh, torch.ones(1, 1, 1, 4), torch.ones(1, 1, 4, 3)
for call in {[*TOO_LARGE]}:
    try:
        eval(call)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    printed = run(sys.executable, "-c", code).stdout
    for line, (call, (argument, size)) in zip(printed.splitlines(), TOO_LARGE.items(), strict=True):
        message = f"expected `{argument}` for which memory suffices, got {size}"
        assert line == f"calcops::{call.partition('(')[0]}: {message}"


# ---- torch.compile -------------------------------------------------------------------------------


def force_matching(edge_index, g, v, positions):
    F, W, _ = torch.ops.calcops.edge_force_virial(edge_index, g.sin(), v, positions.shape[0])
    return F + positions, W


def test_compile_takes_an_unbacked_number_of_edges():
    torch._dynamo.reset()
    edge_index, g, v, *_ = graph()
    for x, dimension in ((edge_index, 1), (g, 0), (v, 0)):
        torch._dynamo.decorators.mark_unbacked(x, dimension)
    compiled = torch.compile(force_matching, fullgraph=True, backend="aot_eager")
    positions = torch.zeros(7, 3, dtype=torch.float64)
    expected = force_matching(edge_index, g, v, positions)
    assert_equal_lists(compiled(edge_index, g, v, positions), expected, rtol=0, atol=0)
