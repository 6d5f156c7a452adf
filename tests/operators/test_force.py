"""calcops::force and calcops::force_virial: values, bits, errors and sizes, on the CPU and on a GPU
if there is one."""

import pytest
import reference
import torch
from reference import assert_equal_lists, describe, energy_of, pairs

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


def tolerance_of(dtype, float64_atol=1e-12):
    """Return tolerances for sums of terms of size 1, against the reference in float64."""
    if dtype == torch.float64:
        return dict(rtol=1e-12, atol=float64_atol)
    return dict(rtol=2e-7, atol=1e-6)


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nghost", [0, 2])
def test_values_equal_the_reference(device, dtype, index, nghost):
    list_neigh, dE, Ri_d, Rij = pairs(nghost=nghost, dtype=dtype, index=index, device=device)
    expected = reference.force_virial(list_neigh, *(x.double() for x in (dE, Ri_d, Rij)), nghost)
    results = force_virial(list_neigh, dE, Ri_d, Rij, nghost)
    assert [x.dtype for x in results] == [dtype] * 3
    assert_equal_lists([x.double() for x in results], expected, **tolerance_of(dtype))
    F = force(list_neigh, dE, Ri_d, nghost)
    torch.testing.assert_close(F.double(), expected[0], **tolerance_of(dtype))


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


@pytest.mark.parametrize(
    "sizes", [(0, 5, 2, 7), (3, 0, 2, 7), (3, 5, 2, 0), (0, 0, 0, 0), (1, 1, 0, 1)], ids=str
)
def test_empty_sizes_give_zeros_of_the_right_shape(device, sizes):
    frames, natoms, nghost, neighbors = sizes
    options = dict(dtype=torch.float64, device=device)
    list_neigh = torch.full((frames, natoms, neighbors), -1, device=device)
    leaves = [
        torch.ones(frames, natoms, neighbors, 4, **options, requires_grad=True),
        torch.ones(frames, natoms, 4 * neighbors, 3, **options, requires_grad=True),
        torch.ones(frames, natoms, neighbors, 3, **options, requires_grad=True),
    ]
    outputs = force_virial(list_neigh, *leaves, nghost)
    rows = natoms + nghost
    assert [tuple(x.shape) for x in outputs] == [
        (frames, rows, 3),
        (frames, 3, 3),
        (frames, rows, 3, 3),
    ]
    assert all(x.count_nonzero() == 0 for x in outputs)
    for gradient in torch.autograd.grad(sum(x.sum() for x in outputs), leaves):
        assert gradient.count_nonzero() == 0


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


def test_values_in_an_empty_slot_never_matter(device):
    list_neigh, dE, Ri_d, Rij = pairs(device=device)
    empty = list_neigh < 0
    expected = force_virial(list_neigh, dE, Ri_d, Rij, 2)
    for junk in (float("nan"), float("inf")):
        dirty = [dE.clone(), Ri_d.view(*list_neigh.shape, 4, 3).clone(), Rij.clone()]
        for x in dirty:
            x[empty] = junk
            x.requires_grad_()
        outputs = force_virial(list_neigh, *dirty, 2)
        assert_equal_lists(outputs, expected, rtol=0, atol=0)
        upstream = [torch.randn_like(x) for x in outputs]
        for gradient in torch.autograd.grad(outputs, dirty, upstream, create_graph=True):
            assert gradient.isfinite().all()
            assert (gradient[empty] == 0).all()
            # Nor does the upstream of such a slot matter in the second derivatives.
            v = torch.randn_like(gradient)
            v[empty] = junk
            seconds = torch.autograd.grad(gradient, dirty, v, retain_graph=True, allow_unused=True)
            for second in seconds:
                if second is not None:
                    assert second.isfinite().all()
                    assert (second[empty] == 0).all()


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


def test_every_output_and_gradient_is_written(device):
    # In this mode, torch.empty fills new tensors with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        for result in gradients(*pairs(device=device)):
            assert result.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_names_the_argument_its_rule_and_its_value():
    list_neigh, dE, Ri_d, Rij = pairs()
    good = dict(list_neigh=list_neigh, dE=dE, Ri_d=Ri_d, Rij=Rij, nghost=2)
    sizes = "[B, n, K] = [3, 5, 7]"
    for bad, text in (
        ({"list_neigh": list_neigh.float()}, "`list_neigh` int32 or int64, got float32"),
        (
            {"list_neigh": list_neigh[0]},
            "`list_neigh` of shape [B, n, K] or [B, n, T, M], got [5, 7]",
        ),
        ({"nghost": -1}, "`nghost` >= 0, got -1"),
        ({"dE": dE.half()}, "`dE` float32 or float64, got float16"),
        (
            {"dE": dE[:, :, 1:]},
            f"`dE` of shape [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K], {sizes}, got [3, 5, 6, 4]",
        ),
        ({"Ri_d": Ri_d.float()}, "`Ri_d` of dtype float64 like `dE`, got float32"),
        (
            {"Ri_d": Ri_d.transpose(2, 3)},
            f"`Ri_d` of shape [B, n, 4K, 3] or [B, n, K, 4, 3], {sizes}, got [3, 5, 3, 28]",
        ),
        ({"Rij": Rij[..., 0]}, "`Rij` of shape [B, n, K, 3] = [3, 5, 7, 3], got [3, 5, 7]"),
        ({"Rij": Rij.float()}, "`Rij` of dtype float64 like `dE`, got float32"),
    ):
        with pytest.raises(RuntimeError) as caught:
            force_virial(**good | bad)
        assert str(caught.value).splitlines()[0] == "calcops::force_virial: expected " + text
    for argument in range(4):
        mixed = [list_neigh, dE, Ri_d, Rij]
        mixed[argument] = mixed[argument].to("meta")
        with pytest.raises(
            RuntimeError, match="expected `.*` on (cpu|meta) like `.*`, got (cpu|meta)"
        ):
            force_virial(*mixed, 2)


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


@pytest.mark.parametrize("nghost", [2**63 - 1, 2**62, 2**40 + 1])
def test_more_than_2_to_the_40_ghosts_are_an_error_that_names_their_number(nghost):
    list_neigh, dE, Ri_d, _ = pairs()
    with pytest.raises(
        RuntimeError, match=f"^calcops::force: expected `nghost` of at most 2.40, got {nghost}"
    ):
        force(list_neigh, dE, Ri_d, nghost)
    with pytest.raises(
        RuntimeError, match="^calcops::neighbor_index: expected `nghost` of at most 2.40"
    ):
        torch.ops.calcops.neighbor_index(list_neigh, nghost)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the library has CUDA kernels")
@pytest.mark.parametrize("op", ["force", "_force_virial"])
def test_without_cuda_kernels_an_error_says_why_the_library_has_none(op):
    list_neigh, dE, Ri_d, _ = pairs()
    overload = getattr(torch.ops.calcops, op).default
    options = [2] if op == "force" else [None, 2, True, [True, False, False]]
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=f"^calcops::{op}: built without CUDA because .+; .+"):
        overload.redispatch(cuda, list_neigh, dE, Ri_d, *options)


# ---- size ----------------------------------------------------------------------------------------


# A register, a block of the CPU kernels and a warp of a GPU hold 2 to 32 slots. All remainders of
# a division by these sizes are among the numbers.
SLOTS = [*range(1, 68), 1000]
for size in (128, 256, 512, 4096, 8192):
    SLOTS += [size - 1, size, size + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_of_slots_gives_the_references_results(device, dtype):
    for neighbors in SLOTS:
        inputs = pairs(2, 4, 1, neighbors, dtype, device=device, seed=neighbors)

        def results_of(function, dtype, inputs=inputs):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[1:]]
            outputs = function(inputs[0], *leaves, 1)
            upstream = [torch.linspace(-1, 1, x.numel()).view_as(x).to(x) for x in outputs]
            return *outputs, *torch.autograd.grad(outputs, leaves, upstream)

        results = results_of(force_virial, dtype)
        expected = results_of(reference.force_virial, torch.float64)
        tolerance = tolerance_of(dtype, float64_atol=1e-11)  # up to 8192 slots are summed
        assert_equal_lists([x.double() for x in results], expected, **tolerance)
