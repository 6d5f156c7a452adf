"""neighbor_index, which lists the slots that name each atom, and the operators that reuse it."""

import pytest
import torch
from kernels import launches
from reference import assert_equal_lists, differentiable_pairs, index_reference, pairs

from calcops_jit import force, force_virial, neighbor_index


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("nghost", [0, 2])
def test_an_index_lists_the_slots_that_name_each_atom(device, index, nghost):
    list_neigh = pairs(nghost=nghost, index=index, device=device)[0]
    result = neighbor_index(list_neigh, nghost)
    assert torch.equal(result.cpu(), index_reference(list_neigh, nghost))
    assert torch.equal(neighbor_index(list_neigh.reshape(3, 5, 7, 1), nghost), result)
    assert torch.equal(neighbor_index(list_neigh.mT.contiguous().mT, nghost), result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [{}, {"frames": 2, "natoms": 300, "nghost": 50, "neighbors": 90}])
def test_results_and_derivatives_have_the_same_bits_with_and_without_an_index(device, dtype, size):
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


def test_a_strided_or_expanded_index_gives_the_same_bits(device):
    list_neigh, *values = pairs(frames=1, device=device)
    list_neigh = list_neigh.expand(3, -1, -1)
    values = [x.expand(3, *x.shape[1:]) for x in values]
    index = neighbor_index(list_neigh[:1], 2)
    expected = force_virial(list_neigh, *values, 2)
    expanded = index.expand(3, -1)
    for view in (expanded, expanded.mT.contiguous().mT):
        results = force_virial(list_neigh, *values, 2, neighbor_index=view)
        assert_equal_lists(results, expected, rtol=0, atol=0)


def test_an_index_of_another_shape_or_nghost_is_refused(device):
    list_neigh, *values = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    message = "force(_virial)?: expected `neighbor_index` of shape"
    for wrong in (index[:2], index[:, 1:], neighbor_index(list_neigh, 3)):
        with pytest.raises(RuntimeError, match=message):
            force_virial(list_neigh, *values, 2, neighbor_index=wrong)
        with pytest.raises(RuntimeError, match=message):
            force(list_neigh, *values[:2], 2, neighbor_index=wrong)


def test_calcops_check_finds_a_stale_index(device, monkeypatch):
    list_neigh, *values = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    stale = list_neigh.clone()
    stale[1, 2, 3] = 0 if stale[1, 2, 3] else 1
    monkeypatch.setenv("CALCOPS_CHECK", "1")
    force_virial(list_neigh, *values, 2, neighbor_index=index)
    message = "expected `neighbor_index` of this list_neigh and nghost"
    with pytest.raises(RuntimeError, match=message):
        force_virial(stale, *values, 2, neighbor_index=index)
    with pytest.raises(RuntimeError, match=message):
        force(stale, *values[:2], 2, neighbor_index=index)
    monkeypatch.setenv("CALCOPS_CHECK", "0")
    force_virial(stale, *values, 2, neighbor_index=index)


def test_an_index_of_wrong_values_never_reads_out_of_bounds(device):
    list_neigh, *values = pairs(device=device)
    for value in (-(2**31), -1, 7, 2**31 - 1):
        index = torch.full_like(neighbor_index(list_neigh, 2), value)
        outputs = force_virial(list_neigh, *values, 2, neighbor_index=index)
        assert all(x.isfinite().all() for x in outputs)


def test_vmap_takes_the_index(device, without_vmap_fallback):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    expected = force_virial(list_neigh, dE, Ri_d, Rij, 2)

    def of_frame(list_neigh, index, dE, Ri_d, Rij):
        list_neigh, index, dE, Ri_d, Rij = (x[None] for x in (list_neigh, index, dE, Ri_d, Rij))
        return [x[0] for x in force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)]

    mapped = torch.vmap(of_frame)(list_neigh, index, dE, Ri_d, Rij)
    assert_equal_lists(mapped, expected, rtol=0, atol=0)

    def of_values(dE):  # one list and one index for all
        return force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)

    mapped = torch.vmap(of_values)(torch.stack([dE, 2 * dE]))
    expected = [torch.stack(x) for x in zip(expected, of_values(2 * dE))]
    assert_equal_lists(mapped, expected, rtol=0, atol=0)


def test_with_an_index_a_call_launches_at_most_two_kernels(gpu):
    inputs = pairs(natoms=3000, neighbors=50, device=gpu)
    index = neighbor_index(inputs[0], 2)
    names = launches(lambda: force_virial(*inputs, 2, neighbor_index=index))
    assert len(names) <= 2, names


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the name and the keyword arguments of each operator that is called below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "calcops":
            self.calls.append((function._opname, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_every_derivative_reuses_the_index(device):
    list_neigh, dE, Ri_d, Rij = differentiable_pairs(device=device)
    index = neighbor_index(list_neigh, 2)
    with Calls() as mode:
        outputs = force_virial(list_neigh, dE, Ri_d, Rij, 2, neighbor_index=index)
        first = torch.autograd.grad(
            [x.square().sum() for x in outputs], (dE, Ri_d, Rij), create_graph=True
        )
        torch.autograd.grad([x.square().sum() for x in first], (dE, Ri_d, Rij))
        torch.func.jvp(
            lambda x: force(list_neigh, x, Ri_d.detach(), 2, neighbor_index=index), (dE,), (dE,)
        )
    names = {name for name, _ in mode.calls}
    assert names >= {"force_virial", "_force_virial", "_force_virial_backward", "force"}
    for name, keywords in mode.calls:
        assert keywords.get("neighbor_index") is not None, name
