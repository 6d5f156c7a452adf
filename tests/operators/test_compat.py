"""calculateForce and calculateVirial, the names that programs of MatPL call: values, gradients,
saved archives, and the faults that MatPL's own operators have."""

import io

import pytest
import reference
import torch
from reference import assert_equal_lists, differentiable_pairs, opcheck, pairs
from torch.autograd import gradcheck, gradgradcheck

from calcops_jit import calculateForce, calculateVirial

NAMESPACES = ["CalcOps", "CalcOps_cuda", "CalcOps_cpu"]


@pytest.mark.parametrize("nghost", [None, 0, 2])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_calculate_force_adds_the_neighbours_part_to_the_callers_centre_term(
    device, namespace, nghost
):
    rows = nghost or 0
    list_neigh, dE, Ri_d, Rij = pairs(nghost=rows, device=device)
    F = torch.randn(3, 5, 3, dtype=torch.float64, device=device)
    F_copy = F.clone()
    ghosts = None if nghost is None else torch.tensor(nghost)
    (force,) = getattr(torch.ops, namespace).calculateForce(list_neigh, dE, Ri_d, F, ghosts)
    expected = reference.force(list_neigh, dE, Ri_d, rows, center=False)
    expected[:, :5] += F
    torch.testing.assert_close(force, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(F, F_copy)
    assert force.data_ptr() != F.data_ptr()


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_calculate_virial_gives_each_virial_as_a_row_of_nine(device, namespace):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    op = getattr(torch.ops, namespace).calculateVirial
    virial, atom_virial = op(list_neigh, dE, Rij, Ri_d, torch.tensor([2], dtype=torch.int32))
    _, expected, atom_expected = reference.force_virial(list_neigh, dE, Ri_d, Rij, 2)
    torch.testing.assert_close(virial, expected.reshape(3, 9), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(atom_virial, atom_expected.reshape(3, 7, 9), rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives_of_both_are_right_for_every_input(device):
    list_neigh, *leaves = differentiable_pairs(
        frames=2, natoms=2, nghost=1, neighbors=3, device=device
    )
    F = torch.randn(2, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    nghost = torch.tensor(1)

    def force(dE, Ri_d, F):
        return calculateForce(list_neigh, dE, Ri_d, F, nghost)[0]

    def virials(dE, Ri_d, Rij):
        return tuple(calculateVirial(list_neigh, dE, Rij, Ri_d, nghost))

    for function, inputs in ((force, (*leaves[:2], F)), (virials, leaves)):
        assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_opcheck_and_export_pass_without_a_ghost_tensor(device):
    list_neigh, *leaves = differentiable_pairs(nghost=0, device=device)
    F = torch.randn(3, 5, 3, dtype=torch.float64, device=device, requires_grad=True)
    opcheck(calculateForce, (list_neigh, *leaves[:2], F))
    opcheck(calculateVirial, (list_neigh, leaves[0], leaves[2], leaves[1]))

    class Model(torch.nn.Module):
        def forward(self, list_neigh, dE, Ri_d, F):
            return calculateForce(list_neigh, dE, Ri_d, F)[0]

    dE, Ri_d, _ = leaves
    inputs = list_neigh, dE.detach(), Ri_d.detach(), F.detach()
    program = torch.export.export(Model(), inputs)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


def test_vmap_equals_a_loop(device):
    stack = [pairs(nghost=0, device=device, seed=seed) for seed in range(3)]
    list_neigh, dE, Ri_d, _ = (torch.stack(x) for x in zip(*stack, strict=True))
    F = torch.randn(3, 3, 5, 3, dtype=torch.float64, device=device)
    results = torch.vmap(lambda *x: calculateForce(*x)[0])(list_neigh, dE, Ri_d, F)
    expected = [calculateForce(*x)[0] for x in zip(list_neigh, dE, Ri_d, F, strict=True)]
    torch.testing.assert_close(results, torch.stack(expected), rtol=0, atol=0)


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


# MatPL's own operators return zeros here.
def test_a_wrong_dtype_is_an_error_and_not_zeros():
    list_neigh, dE, Ri_d, _ = pairs(nghost=0)
    F = torch.zeros(3, 5, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected `dE` float32 or float64, got float16"):
        calculateForce(list_neigh, dE.half(), Ri_d, F)
    with pytest.raises(RuntimeError, match="expected `F` of dtype float64 like `dE`, got float32"):
        calculateForce(list_neigh, dE, Ri_d, F.float())


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


def test_a_centre_term_of_the_wrong_shape_is_named():
    list_neigh, dE, Ri_d, _ = pairs(nghost=2)
    F = torch.zeros(3, 7, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        calculateForce(list_neigh, dE, Ri_d, F, torch.tensor(2))
    expected = "CalcOps::calculateForce: expected `F` of shape [B, n, 3] = [3, 5, 3], got [3, 7, 3]"
    assert str(error.value).splitlines()[0] == expected
