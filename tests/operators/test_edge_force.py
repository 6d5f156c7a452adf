"""edge_force and edge_force_virial against the same sums in plain PyTorch: values, masked edges,
wrong entries, derivatives, memory, and PyTorch's other modes."""

import itertools
import sys

import pytest
import torch
from programs import run
from reference import assert_compiles_and_exports, assert_equal_lists, graph, opcheck, pairs
from torch.autograd import gradcheck, gradgradcheck

from calcops_jit import (
    edge_force,
    edge_force_virial,
    edge_order,
    force,
    force_virial,
    neighbor_index,
)

backward = torch.ops.calcops._edge_force_virial_backward


def reference_force_virial(edge_index, edge_gradient, edge_vec, natoms, batch=None, nframes=1):
    """Return the results by the formulas of ops/edge_force/edge_force.h, with one-hot matrices.

    They are differentiable. The matrices have E x natoms elements, so the graphs must be small.
    """
    live = (edge_index >= 0).all(0)
    g = torch.where(live[:, None], edge_gradient, 0.0)
    w = -g[:, :, None] * torch.where(live[:, None], edge_vec, 0.0)[:, None]
    atoms = torch.where(live, edge_index, 0).long()
    centre, neighbour = torch.nn.functional.one_hot(atoms, natoms).to(g)
    force = centre.T @ g - neighbour.T @ g
    atom_virial = torch.einsum("ej,eab->jab", neighbour, w)
    frame = torch.zeros(natoms, dtype=torch.long) if batch is None else batch.long()
    frames = torch.nn.functional.one_hot(frame.to(g.device), nframes).to(g)
    return force, torch.einsum("jf,jab->fab", frames, atom_virial), atom_virial


def differentiable_graph(**options):
    edge_index, gradient, vec, *rest = graph(**options)
    return edge_index, gradient.requires_grad_(), vec.requires_grad_(), *rest


SMALL = dict(natoms=3, edges=5)
MODES = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
SECOND = dict(check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edges", [0, 1, 23, 20_000])
def test_results_equal_the_reference(device, dtype, index, edges):
    edge_index, gradient, vec, natoms, batch, frames = graph(
        edges=edges, dtype=dtype, index=index, device=device
    )
    expected = reference_force_virial(
        edge_index, gradient.double(), vec.double(), natoms, batch, frames
    )
    tolerance = dict(rtol=1e-11, atol=1e-11)
    if dtype == torch.float32:
        tolerance = dict(rtol=1e-5, atol=2e-5)
    F, W, atom_W = (x.to(dtype) for x in expected)
    results = edge_force_virial(edge_index, gradient, vec, natoms, batch, frames)
    assert_equal_lists(results, [F, W, atom_W], **tolerance)
    one_frame = edge_force_virial(edge_index, gradient, vec, natoms)
    assert_equal_lists(one_frame, [F, W.sum(0, True), atom_W], **tolerance)
    assert torch.equal(edge_force(edge_index, gradient, natoms), results[0])


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


@pytest.mark.parametrize("row", [0, 1])
def test_values_of_a_masked_edge_never_matter_and_its_derivatives_are_zero(device, row):
    edge_index, gradient, vec, *rest = graph(device=device)
    edge_index = edge_index.clamp(min=0)
    edge_index[row, 4] = -1
    keep = torch.arange(23, device=device) != 4
    expected = edge_force_virial(edge_index[:, keep], gradient[keep], vec[keep], *rest)
    gradient[4] = float("nan")
    vec[4] = float("inf")
    leaves = gradient.requires_grad_(), vec.requires_grad_()
    results = edge_force_virial(edge_index, *leaves, *rest)
    assert_equal_lists(results, expected, rtol=0, atol=1e-14)
    for x in torch.autograd.grad([x.sum() for x in results], leaves):
        assert x[4].count_nonzero() == 0
        assert x.isfinite().all()


@pytest.mark.parametrize("entry", [-2, 7, 8, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
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
        ({"edge_index": edge_index.T}, "`edge_index` of shape [2, E], got [23, 2]"),
        ({"edge_gradient": gradient.half()}, "`edge_gradient` float32 or float64, got float16"),
        (
            {"edge_vec": vec.float()},
            "`edge_vec` of dtype float64 like `edge_gradient`, got float32",
        ),
        ({"edge_vec": None}, "`edge_vec` of shape [E, 3], got none"),
        ({"batch": None, "nframes": 0}, "`nframes` >= 1 where `batch` is None, got 0"),
        ({"natoms": 2**63 - 1}, "`natoms` of at most 2^40, got 9223372036854775807"),
        ({"batch": batch[1:]}, "`batch` of shape [natoms] = [7], got [6]"),
        ({"edge_order": edge_order(edge_index, natoms).long()}, "`edge_order` int32, got int64"),
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


def test_first_derivatives_are_right_in_every_mode(device):
    edge_index, *leaves, natoms, batch, frames = differentiable_graph(**SMALL, device=device)
    assert gradcheck(
        lambda *x: edge_force_virial(edge_index, *x, natoms, batch, frames), leaves, **MODES
    )
    assert gradcheck(lambda g: edge_force(edge_index, g, natoms), leaves[:1], **MODES)


@pytest.mark.parametrize(
    "output", [0, 1, 2, slice(None)], ids=["force", "virial", "atom_virial", "all"]
)
def test_second_derivatives_through_each_output_are_right(device, output):
    edge_index, g, v, *rest = differentiable_graph(**SMALL, device=device)
    leaves = (g, v) if output != 0 else (g, v.detach())  # the force does not depend on v
    assert gradgradcheck(
        lambda *x: edge_force_virial(edge_index, *x, *rest)[output], leaves, **SECOND
    )


def test_third_derivatives_equal_the_reference(device):
    edge_index, *leaves, natoms, batch, frames = differentiable_graph(device=device)

    def derivatives(function):
        results = function(edge_index, *leaves, natoms, batch, frames)
        scalar = sum(x.sin().sum() for x in results)
        gradients = []
        for _ in range(3):
            gradient = torch.autograd.grad(scalar, leaves, create_graph=True)
            gradients += gradient
            scalar = sum((x * x.detach().cos()).sin().sum() for x in gradient)
        return gradients

    assert_equal_lists(
        derivatives(edge_force_virial), derivatives(reference_force_virial), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("mapped", ["all", "graph", "values", "batch"])
def test_vmap_gives_what_a_loop_gives(device, mapped, size, without_vmap_fallback):
    graphs = [graph(device=device, seed=seed) for seed in range(max(size, 1))]
    tensors = [(edge_index, g, v, batch) for edge_index, g, v, _, batch, _ in graphs]
    stacks = [torch.stack(x)[:size] for x in zip(*tensors)]
    # Which of edge_index, g, v and batch have the additional dimension.
    mapped_arguments = {
        "all": (1, 1, 1, 1),
        "graph": (1, 0, 0, 0),
        "values": (0, 1, 1, 0),
        "batch": (0, 0, 0, 1),
    }
    flags = mapped_arguments[mapped]
    first = tensors[0]
    inputs = [stack if flag else one for stack, one, flag in zip(stacks, first, flags)]

    def function(edge_index, g, v, batch):
        results = edge_force_virial(edge_index, g, v, 7, batch, 2)
        gradients = backward(*results, edge_index, g, v, 7, batch, 2, [True, False])
        return *results, edge_force(edge_index, g, 7), *gradients

    results = torch.vmap(function, tuple(0 if flag else None for flag in flags))(*inputs)
    loop = []
    for k in range(size):
        arguments = [x[k] if flag else x for x, flag in zip(inputs, flags)]
        loop.append(function(*arguments))
    if size == 0:
        assert [x.shape for x in results] == [(0, *x.shape) for x in function(*first)]
    for result, expected in zip(results, zip(*loop)):
        torch.testing.assert_close(result, torch.stack(expected), rtol=0, atol=1e-13)


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


def test_every_element_of_results_and_gradients_is_written(device):
    # In this mode, torch.empty fills new tensors with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        edge_index, *leaves, natoms, batch, frames = differentiable_graph(natoms=40, device=device)
        outputs = edge_force_virial(edge_index, *leaves, natoms, batch, frames)
        gradients = torch.autograd.grad([x.sum() for x in outputs], leaves)
        for x in (*outputs, *gradients):
            assert x.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


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


@pytest.mark.filterwarnings("error")
def test_vmap_of_edge_order_and_neighbor_index_equals_a_loop(without_vmap_fallback):
    lists = torch.randint(-1, 7, (3, 2, 4, 5))
    for function in (lambda x: edge_order(x.flatten(1), 7), lambda x: neighbor_index(x, 3)):
        expected = torch.stack([function(x) for x in lists])
        for dimension in (0, 1):
            results = torch.vmap(function, dimension)(lists.transpose(0, dimension))
            assert torch.equal(results, expected)


# ---- opcheck, torch.compile and torch.export -----------------------------------------------------


def test_opcheck_passes(device):
    inputs = differentiable_graph(**SMALL, device=device)
    edge_index, gradient, _, natoms, *_ = inputs
    order = edge_order(edge_index, natoms)
    opcheck(edge_order, (edge_index, natoms))
    opcheck(edge_force, (edge_index, gradient, natoms), {"edge_order": order})
    opcheck(edge_force_virial, inputs)
    opcheck(edge_force_virial, inputs[:4])
    upstream = [x.detach().requires_grad_() for x in edge_force_virial(*inputs)]
    opcheck(backward, (*upstream, *inputs, [True, True]))
    of_force = upstream[0], None, None, edge_index, gradient, None, natoms, None, 1, [True, False]
    opcheck(backward, of_force)


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


def test_compiled_and_exported_programs_equal_eager_at_other_sizes(device):
    def example(natoms, count):
        edge_index, g, v, *_ = differentiable_graph(natoms=natoms, edges=count, device=device)
        return edge_index, g, v, torch.zeros(natoms, 3, dtype=torch.float64, device=device)

    edges = torch.export.Dim("edges", min=2)
    sizes = {1: edges}, {0: edges}, {0: edges}, {0: torch.export.Dim("atoms", min=2)}
    assert_compiles_and_exports(
        lambda *inputs: torch.cat([x.flatten() for x in force_matching(*inputs)]),
        example(7, 23),
        sizes,
        example(20, 90),
        backend="aot_eager",  # inductor takes 20 seconds here
    )
