"""The operators that reuse neighbor_index. test_force_by_contract.py tests its values."""

import pytest
import torch
from kernels import launches
from reference import differentiable_pairs, pairs

from calcops_jit import force, force_virial, neighbor_index


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
