"""neighbor_index and the operators that take it: which slots name each atom, kept for as long as a
list lives."""

import pytest
import torch
from kernels import launches
from reference import assert_equal_lists, differentiable_pairs, pairs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from calcops_jit import force, force_virial, neighbor_index


def index_by_hand(list_neigh, nghost):
    """The same from nothing but Python."""
    found = []
    for frame in list_neigh.flatten(1).tolist():
        rows = [
            [slot for slot, name in enumerate(frame) if name == j]
            for j in range(list_neigh.shape[1] + nghost)
        ]
        slots = [slot for row in rows for slot in row]
        ends = [sum(map(len, rows[: j + 1])) for j in range(len(rows))]
        found.append(ends + slots + [-1] * (len(frame) - len(slots)))
    return torch.tensor(found, dtype=torch.int32)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("nghost", [0, 2])
def test_rows_are_where_the_list_names_them(device, index, nghost):
    list_neigh = pairs(nghost=nghost, index=index, device=device)[0]
    found = neighbor_index(list_neigh, nghost)
    assert torch.equal(found.cpu(), index_by_hand(list_neigh, nghost))
    assert torch.equal(neighbor_index(list_neigh.reshape(3, 5, 7, 1), nghost), found)
    assert torch.equal(neighbor_index(list_neigh.mT.contiguous().mT, nghost), found)


def test_lists_without_pairs_atoms_or_frames_have_an_index(device):
    for size in ((0, 5, 7), (3, 0, 7), (3, 5, 0)):
        list_neigh = torch.zeros(size, dtype=torch.int32, device=device)
        assert neighbor_index(list_neigh, 2).shape == (size[0], size[1] + 2 + size[1] * size[2])
    empty = torch.full((1, 4, 3), -1, device=device)
    assert neighbor_index(empty).tolist() == [[0] * 4 + [-1] * 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [{}, {"frames": 2, "natoms": 300, "nghost": 50, "neighbors": 90}])
def test_results_and_derivatives_have_the_same_bits_with_and_without(device, dtype, size):
    list_neigh, *leaves = differentiable_pairs(dtype=dtype, device=device, **size)
    nghost = size.get("nghost", 2)
    index = neighbor_index(list_neigh, nghost)

    def everything(**options):
        outputs = force_virial(list_neigh, *leaves, nghost, **options)
        scalar = sum((x * x.cos()).sum() for x in outputs)
        gradients = torch.autograd.grad(scalar, leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in gradients), leaves)
        return *outputs, *gradients, *second, force(list_neigh, *leaves[:2], nghost, **options)

    assert_equal_lists(everything(neighbor_index=index), everything(), rtol=0, atol=0)


def test_a_strided_or_expanded_index_is_an_index(device):
    list_neigh, *values = pairs(frames=1, device=device)
    list_neigh = list_neigh.expand(3, -1, -1)
    values = [x.expand(3, *x.shape[1:]) for x in values]
    index = neighbor_index(list_neigh[:1], 2)
    expected = force_virial(list_neigh, *values, 2)
    for form in (index.expand(3, -1), index.expand(3, -1).mT.contiguous().mT):
        ours = force_virial(list_neigh, *values, 2, neighbor_index=form)
        assert_equal_lists(ours, expected, rtol=0, atol=0)


def test_an_index_of_another_shape_nghost_or_dtype_is_refused(device):
    list_neigh, *values = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    expected = (
        r"force(_virial)?: expected `neighbor_index` of shape "
        r".*neighbor_index\(list_neigh, nghost\)"
    )
    for wrong in (
        index[:2],
        index[:, 1:],
        neighbor_index(list_neigh, 3),
        neighbor_index(list_neigh),
    ):
        with pytest.raises(RuntimeError, match=expected):
            force_virial(list_neigh, *values, 2, neighbor_index=wrong)
        with pytest.raises(RuntimeError, match=expected):
            force(list_neigh, *values[:2], 2, neighbor_index=wrong)
    with pytest.raises(RuntimeError, match="expected `neighbor_index` int32, got Long"):
        force(list_neigh, *values[:2], 2, neighbor_index=index.long())
    with pytest.raises(
        RuntimeError, match="calcops::neighbor_index: expected `nghost` >= 0, got -1"
    ):
        neighbor_index(list_neigh, -1)
    with pytest.raises(
        RuntimeError, match="calcops::neighbor_index: expected `list_neigh` int32 or int64"
    ):
        neighbor_index(list_neigh.float())
    with pytest.raises(RuntimeError, match="positional"):
        force_virial(list_neigh, *values, 2, index)


def test_calcops_check_finds_a_stale_index(device, monkeypatch):
    list_neigh, *values = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    stale = list_neigh.clone()
    stale[1, 2, 3] = 0 if stale[1, 2, 3] else 1
    monkeypatch.setenv("CALCOPS_CHECK", "1")
    force_virial(list_neigh, *values, 2, neighbor_index=index)
    for call in (lambda: force_virial(stale, *values, 2, neighbor_index=index),) + (
        lambda: force(stale, *values[:2], 2, neighbor_index=index),
    ):
        with pytest.raises(
            RuntimeError, match="expected `neighbor_index` of this list_neigh and nghost"
        ):
            call()
    monkeypatch.setenv("CALCOPS_CHECK", "0")
    force_virial(stale, *values, 2, neighbor_index=index)


def test_a_stale_index_is_never_read_out_of_bounds(device):
    list_neigh, *values = pairs(device=device)
    for value in (-(2**31), -1, 7, 2**31 - 1):
        index = torch.full_like(neighbor_index(list_neigh, 2), value)
        outputs = force_virial(list_neigh, *values, 2, neighbor_index=index)
        assert all(x.isfinite().all() for x in outputs)


@pytest.fixture
def no_vmap_fallback():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def test_forward_mode_and_vmap_take_the_index(device, no_vmap_fallback):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    tangent = torch.randn_like(dE)

    def results(dE, **options):
        return force_virial(list_neigh, dE, Ri_d, Rij, 2, **options)

    ours = torch.func.jvp(lambda x: results(x, neighbor_index=index), (dE,), (tangent,))
    expected = torch.func.jvp(results, (dE,), (tangent,))
    assert_equal_lists(ours[1], expected[1], rtol=0, atol=0)

    def of_frame(list_neigh, index, dE, Ri_d, Rij):
        list_neigh, index, dE, Ri_d, Rij = (x[None] for x in (list_neigh, index, dE, Ri_d, Rij))
        return [x[0] for x in force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)]

    whole = force_virial(list_neigh, dE, Ri_d, Rij, 2)
    assert_equal_lists(
        torch.vmap(of_frame)(list_neigh, index, dE, Ri_d, Rij), whole, rtol=0, atol=0
    )
    assert torch.equal(torch.vmap(lambda x: neighbor_index(x[None], 2)[0])(list_neigh), index)
    gradient = torch.func.grad(lambda x: sum(y.sum() for y in results(x, neighbor_index=index)))(dE)
    assert torch.equal(gradient, torch.func.grad(lambda x: sum(y.sum() for y in results(x)))(dE))
    many = torch.stack([dE, tangent])  # one list and one index for all
    ours = torch.vmap(lambda x: results(x, neighbor_index=index))(many)
    assert_equal_lists(
        ours, [torch.stack(x) for x in zip(results(dE), results(tangent))], rtol=0, atol=0
    )


def test_opcheck_with_an_index(device):
    list_neigh, *leaves = differentiable_pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    opcheck(neighbor_index, (list_neigh, 2))
    opcheck(force, (list_neigh, *leaves[:2], 2), {"neighbor_index": index})
    opcheck(force_virial, (list_neigh, *leaves, 2), {"neighbor_index": index})


class Step(torch.nn.Module):
    def forward(self, list_neigh, index, dE, Ri_d, Rij):
        return torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)


class Both(torch.nn.Module):
    def forward(self, list_neigh, dE, Ri_d, Rij):
        index = torch.ops.calcops.neighbor_index(list_neigh, 2)
        return torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)


def test_compiled_and_exported_programs_take_the_index(device):
    torch._dynamo.reset()
    compiled = torch.compile(Step(), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for natoms in (11, 13, 17):
            inputs = pairs(5, natoms, 2, natoms + 31, device=device)
            index = neighbor_index(inputs[0], 2)
            expected = force_virial(*inputs, 2)
            assert_equal_lists(compiled(inputs[0], index, *inputs[1:]), expected, rtol=0, atol=0)
    traced = make_fx(Both(), tracing_mode="symbolic")(*inputs)
    other = pairs(4, 9, 2, 12, device=device)
    assert_equal_lists(traced(*other), force_virial(*other, 2), rtol=0, atol=0)


def test_an_exported_program_makes_and_takes_the_index():
    frames, natoms, neighbors = (
        torch.export.Dim(x, min=2) for x in ("frames", "natoms", "neighbors")
    )
    size = {0: frames, 1: natoms, 2: neighbors}
    shapes = (size, size, {0: frames, 1: natoms, 2: 4 * neighbors}, size)
    program = torch.export.export(Both(), pairs(3, 5, 2, 7), dynamic_shapes=shapes)
    other = pairs(4, 9, 2, 12)
    assert_equal_lists(program.module()(*other), force_virial(*other, 2), rtol=0, atol=0)


def test_with_an_index_two_launches_are_left():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    inputs = pairs(natoms=3000, neighbors=50, device="cuda")
    index = neighbor_index(inputs[0], 2)
    names = launches(lambda: force_virial(*inputs, 2, neighbor_index=index))
    assert len(names) <= 2, names


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the keyword arguments of the force operators that are called below autograd."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "calcops":
            self.found.append((function._opname, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_every_derivative_reuses_the_index(device):
    list_neigh, dE, Ri_d, Rij = differentiable_pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    with Calls() as calls:
        outputs = force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)
        first = torch.autograd.grad(
            [x.square().sum() for x in outputs], (dE, Ri_d, Rij), create_graph=True
        )
        torch.autograd.grad([x.square().sum() for x in first], (dE, Ri_d, Rij))
        torch.func.jvp(
            lambda x: force(list_neigh, x, Ri_d.detach(), 2, neighbor_index=index), (dE,), (dE,)
        )
    assert {name for name, _ in calls.found} >= {
        "force_virial",
        "_force_virial",
        "_force_virial_backward",
        "force",
    }
    assert [name for name, keywords in calls.found if keywords.get("neighbor_index") is None] == []
