"""calcops::force and calcops::force_virial: values that are known, bits and errors, on the CPU and
on a GPU if there is one. test_force_by_contract.py has the rest."""

import pytest
import torch
from reference import assert_equal_lists, describe, energy_of, pairs

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


# ---- values -------------------------------------------------------------------------------------


def test_a_pair_has_the_force_and_virial_computed_by_hand():
    # The force dE @ Ri_d = (1, 2, 3) acts on atom 1, the opposite one on atom 0.
    list_neigh = torch.tensor([[[1, -1], [-1, -1]]])
    dE = torch.tensor([[[[1.0, 1, 1, 0], [9, 9, 9, 9]], [[9] * 4] * 2]], dtype=torch.float64)
    Ri_d = torch.full((1, 2, 2, 4, 3), 7.0, dtype=torch.float64)
    Ri_d[0, 0, 0] = torch.tensor([[1, 0, 0], [0, 2, 0], [0, 0, 3], [5, 5, 5]])
    Rij = torch.tensor([10.0, 20, 30], dtype=torch.float64).expand(1, 2, 2, 3)
    F, W, atom_W = force_virial(list_neigh, dE, Ri_d, Rij)
    assert F.tolist() == [[[-1, -2, -3], [1, 2, 3]]]
    assert force(list_neigh, dE, Ri_d).tolist() == F.tolist()
    assert W.tolist() == [[[10, 20, 30], [20, 40, 60], [30, 60, 90]]]
    assert atom_W[0, 0].abs().sum() == 0
    assert atom_W[0, 1].tolist() == W[0].tolist()


def test_forces_and_virial_are_minus_the_derivatives_of_an_energy():
    """The energy is one of many bodies, whose derivatives are autograd's."""
    list_neigh, _, _, shift = pairs(2, 7, 0, 9)
    positions = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    frame = torch.arange(2)[:, None, None]
    Rij = positions[frame, list_neigh.clamp(min=0).long()] - positions[:, :, None] + shift
    live = list_neigh >= 0
    energy = energy_of(describe(Rij + Rij @ strain.T)[0], live)
    dE_dr, dE_dstrain = torch.autograd.grad(energy, (positions, strain))
    Rij = Rij.detach()
    Ri, Ri_d = describe(Rij)
    (dE,) = torch.autograd.grad(energy_of(Ri.requires_grad_(), live), Ri)
    F, W, atom_W = force_virial(list_neigh, dE, Ri_d.flatten(2, 3), Rij)
    torch.testing.assert_close(F, -dE_dr)
    torch.testing.assert_close(W.sum(0), -dE_dstrain)
    torch.testing.assert_close(atom_W.sum(1), W)


@pytest.mark.parametrize("neighbors", [2, 8, 64, 138, 500])
def test_float32_sums_whose_large_terms_cancel_are_those_of_float64(device, neighbors):
    """Each odd slot repeats the slot before it with the opposite force, up to 1e-6."""
    list_neigh, dE, Ri_d, Rij = pairs(2, 23, 3, neighbors, torch.float32, device=device)
    for x in (list_neigh, dE, Ri_d.view(2, 23, neighbors, 4, 3), Rij):
        x[:, :, 1::2] = x[:, :, 0::2]
    dE[:, :, 1::2] *= -(1 + 1e-6 * torch.rand_like(dE[:, :, 1::2]))
    values = 1e3 * dE, Ri_d, Rij
    expected = gradients(list_neigh, *(x.double() for x in values), nghost=3)
    results = gradients(list_neigh, *values, nghost=3)
    assert expected[0].abs().max() < 1, "the terms are of size 1e3"
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), value, rtol=2.0**-23, atol=1e-9)
    F = force(list_neigh, *values[:2], 3)
    torch.testing.assert_close(F, results[0], rtol=2.0**-23, atol=0)


def test_nan_in_a_live_slot_reaches_only_its_atoms_and_its_frame(device):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    list_neigh[0, 0, 0] = 3
    dE[0, 0, 0] = float("nan")
    F, W, atom_W = force_virial(list_neigh, dE, Ri_d, Rij, 2)
    assert F[0].isnan().any(-1).nonzero().flatten().tolist() == [0, 3]
    assert not F[1:].isnan().any()
    assert W[0].isnan().all()
    assert not W[1:].isnan().any()
    assert atom_W[0].isnan().any(-1).any(-1).nonzero().flatten().tolist() == [3]


def test_pair_vectors_take_no_part_in_the_gradient_of_a_force(device):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    upstream = torch.randn(3, 7, 3, dtype=dE.dtype, device=device)

    def gradients_with(Rij):
        return backward(upstream, None, None, list_neigh, dE, Ri_d, Rij, 2, True, [True] * 3)

    results = gradients_with(Rij * float("nan"))
    assert_equal_lists(results, gradients_with(Rij), rtol=0, atol=0)
    assert results[2].count_nonzero() == 0


# ---- bit for bit ---------------------------------------------------------------------------------


def gradients(list_neigh, *leaves, nghost=2, second=False):
    """Return the outputs and their gradients. With `second`, also return second derivatives."""
    leaves = [x.detach().requires_grad_() for x in leaves]

    def weights(x):
        return torch.linspace(-1, 1, x.numel()).view_as(x).to(x)

    outputs = force_virial(list_neigh, *leaves, nghost)
    first = torch.autograd.grad(outputs, leaves, [weights(x) for x in outputs], create_graph=second)
    if not second:
        return *outputs, *first
    return *outputs, *first, *torch.autograd.grad(first, leaves, [weights(x) for x in first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeats_have_the_same_bits_for_any_number_of_threads(dtype):
    inputs = pairs(frames=2, natoms=900, nghost=100, neighbors=60, dtype=dtype)
    threads_of_torch = torch.get_num_threads()
    expected = gradients(*inputs, nghost=100, second=True)
    try:
        for threads in (1, 2, 3, 4, 8):
            torch.set_num_threads(threads)
            for repeat in range(5):
                results = gradients(*inputs, nghost=100, second=repeat == 0)
                assert all(map(torch.equal, results, expected)), threads
    finally:
        torch.set_num_threads(threads_of_torch)


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_names_the_argument_its_rule_and_its_value():
    list_neigh, dE, Ri_d, Rij = pairs()
    good = dict(list_neigh=list_neigh, dE=dE, Ri_d=Ri_d, Rij=Rij, nghost=2)
    sizes = "[B, n, K] = [3, 5, 7]"
    for bad, text in (
        ({"nghost": -1}, "`nghost` >= 0, got -1"),
        (
            {"dE": dE[:, :, 1:]},
            f"`dE` of shape [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K], {sizes}, got [3, 5, 6, 4]",
        ),
        ({"Rij": Rij[..., 0]}, "`Rij` of shape [B, n, K, 3] = [3, 5, 7, 3], got [3, 5, 7]"),
        ({"Rij": Rij.float()}, "`Rij` of dtype float64 like `dE`, got float32"),
    ):
        with pytest.raises(RuntimeError) as caught:
            force_virial(**good | bad)
        assert str(caught.value).splitlines()[0] == "calcops::force_virial: expected " + text


# The last two values are the limits of int64, where an addition overflows.
@pytest.mark.parametrize("entry", [-2, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_wrong_entry_is_named_with_frame_atom_slot_and_value(entry, index):
    if not torch.iinfo(index).min <= entry <= torch.iinfo(index).max:
        pytest.skip("an int32 has no such value")
    list_neigh, dE, Ri_d, Rij = pairs(index=index)
    list_neigh[1, 2, 3] = list_neigh[2, 4, 6] = entry
    text = (
        f"expected `list_neigh` entries -1 or 0 <= j < n + nghost = 7, got {entry} at "
        "frame 1, atom 2, slot 3"
    )
    with pytest.raises(RuntimeError) as caught:
        force(list_neigh, dE, Ri_d, 2)
    assert str(caught.value).splitlines()[0] == "calcops::force: " + text
    upstream = torch.zeros(3, 7, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="at frame 1, atom 2, slot 3"):
        backward(upstream, None, None, list_neigh, dE, Ri_d, None, 2, True, [True, False, False])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the library has CUDA kernels")
@pytest.mark.parametrize("op", ["force", "_force_virial"])
def test_without_cuda_kernels_an_error_says_why_the_library_has_none(op):
    list_neigh, dE, Ri_d, _ = pairs()
    overload = getattr(torch.ops.calcops, op).default
    options = [2] if op == "force" else [None, 2, True, [True, False, False]]
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=f"^calcops::{op}: built without CUDA because .+; .+"):
        overload.redispatch(cuda, list_neigh, dE, Ri_d, *options)
