"""calculateForce and calculateVirial, the names that programs of MatPL call: saved archives, and
errors of the ghost tensor. test_compat_by_contract.py has the rest."""

import io

import pytest
import torch
from reference import assert_equal_lists, differentiable_pairs, pairs

from calcops_jit import calculateForce


class FourTensors(torch.nn.Module):
    def forward(self, list_neigh, dE, Ri_d, F):
        return torch.ops.CalcOps_cuda.calculateForce(list_neigh, dE, Ri_d, F)[0]


class FiveTensors(torch.nn.Module):
    def forward(self, list_neigh, dE, Ri_d, F, nghost):
        return torch.ops.CalcOps_cpu.calculateForce(list_neigh, dE, Ri_d, F, nghost)[0]


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("model, extra", [(FourTensors(), []), (FiveTensors(), [torch.tensor(2)])])
def test_archives_with_four_and_with_five_tensors_load(model, extra):
    list_neigh, dE, Ri_d, _ = differentiable_pairs(nghost=2 if extra else 0)
    F = torch.randn(3, 5, 3, dtype=torch.float64)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for _ in range(3):  # TorchScript optimises the graph after the first runs
        result = loaded(list_neigh, dE, Ri_d, F, *extra)
        expected = model(list_neigh, dE, Ri_d, F, *extra)
        assert torch.equal(result, expected)
        upstream = torch.randn_like(expected)
        gradients = torch.autograd.grad(result, (dE, Ri_d), upstream)
        expected_gradients = torch.autograd.grad(expected, (dE, Ri_d), upstream)
        assert_equal_lists(gradients, expected_gradients, rtol=0, atol=0)


# ---- errors --------------------------------------------------------------------------------------


def test_a_ghost_tensor_without_a_readable_value_is_an_error_that_names_calcops_force():
    list_neigh, dE, Ri_d, _ = pairs(nghost=2)
    F = torch.zeros(3, 5, 3, dtype=torch.float64)
    nghost = torch.tensor(2)
    message = "expected `nghost` with a value that can be read now.*call calcops::force"

    def function(nghost):
        return calculateForce(list_neigh, dE, Ri_d, F, nghost)[0]

    with pytest.raises(RuntimeError, match=message):
        torch.vmap(function)(torch.tensor([2, 2]))
    with pytest.raises(Exception, match=message):
        torch.compile(function, fullgraph=True, backend="eager")(nghost)
    with pytest.raises(RuntimeError, match=message):
        function(nghost.to("meta"))


@pytest.mark.parametrize(
    "nghost, text",
    [
        (torch.tensor([1, 2]), "expected `nghost` of one element, got [2]"),
        (torch.tensor(1.0), "expected `nghost` of an integer dtype, got float32"),
        (torch.tensor(-1), "expected `nghost` >= 0, got -1"),
    ],
)
def test_a_wrong_ghost_tensor_is_named(nghost, text):
    list_neigh, dE, Ri_d, _ = pairs(nghost=0)
    with pytest.raises(RuntimeError) as error:
        calculateForce(list_neigh, dE, Ri_d, torch.zeros(3, 5, 3, dtype=torch.float64), nghost)
    assert text in str(error.value)
