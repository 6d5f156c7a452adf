"""The force operators in PyTorch's other modes: compile, export, inference mode, large sizes."""

import pathlib
import re

import pytest
import torch
from reference import SMALL, assert_equal_lists, differentiable_pairs, pairs, scalar_of

from calcops_jit import force_virial

backward = torch.ops.calcops._force_virial_backward


class ForceModel(torch.nn.Module):
    """The smallest model with forces: the derivative dE of a pair energy, and the operator."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, list_neigh, Ri, Ri_d, Rij, nghost):
        dE = self.weight * torch.cos(Ri * self.weight)
        return torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, nghost)


def loss_gradient(model, *inputs):
    F, W, atom_W = model(*inputs)
    loss = F.square().sum() + W.square().sum() + atom_W.square().sum()
    return loss, torch.autograd.grad(loss, model.weight)[0]


@pytest.mark.parametrize(
    "backend, shapes", [("aot_eager", 3), pytest.param("inductor", 2, marks=pytest.mark.long)]
)
def test_compiled_model_equals_eager_without_recompiling(device, backend, shapes):
    torch._dynamo.reset()
    model = ForceModel().to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        # All sizes differ from each other, and from 3 and 4, which are in the shapes. torch.compile
        # would treat equal sizes as one, and compile again when they differ.
        for case in range(shapes):
            frames = 5 + case % 3
            natoms = 20 + case
            nghost = 9 + case % 5
            neighbors = natoms + 31
            tensors = pairs(frames, natoms, nghost, neighbors, device=device, seed=case)
            result = loss_gradient(compiled, *tensors, nghost)
            expected = loss_gradient(model, *tensors, nghost)
            assert_equal_lists(result, expected, rtol=1e-12, atol=1e-12)


def test_compiled_autograd_equals_eager_for_any_set_of_inputs(device):
    torch._dynamo.reset()
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    expected = torch.autograd.grad(scalar_of(force_virial, list_neigh)(*leaves), leaves)
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        for flags in ([True, True, True], [True, False, False]):
            for x in leaves:
                x.grad = None
            chosen = [x for x, flag in zip(leaves, flags) if flag]
            scalar_of(force_virial, list_neigh)(*leaves).backward(inputs=chosen)
            for x, flag, value in zip(leaves, flags, expected):
                assert (x.grad is not None) == flag
                if flag:
                    torch.testing.assert_close(x.grad, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_runs_for_other_numbers_of_frames_atoms_ghosts_and_neighbours(strict):
    class Operators(torch.nn.Module):
        def forward(self, list_neigh, dE, Ri_d, Rij, positions):
            nghost = positions.shape[1] - list_neigh.shape[1]
            F, W, atom_W = torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, nghost)
            return F + positions, W, atom_W, torch.ops.calcops.force(list_neigh, dE, Ri_d, nghost)

    def example(*sizes):
        return *pairs(*sizes), torch.zeros(sizes[0], sizes[1] + sizes[2], 3, dtype=torch.float64)

    frames, natoms, neighbors = (
        torch.export.Dim(x, min=2) for x in ("frames", "natoms", "neighbors")
    )
    size = {0: frames, 1: natoms, 2: neighbors}
    auto = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        Operators(),
        example(2, 5, 4, 7),
        dynamic_shapes=(
            size,
            size,
            {0: frames, 1: natoms, 2: 4 * neighbors},
            size,
            {0: frames, 1: auto},
        ),
        strict=strict,
    )
    for sizes in ((2, 5, 4, 7), (3, 4, 2, 9), (5, 11, 30, 2)):
        *inputs, positions = example(*sizes)
        expected = force_virial(*inputs, sizes[2])
        results = program.module()(*inputs, positions)
        assert_equal_lists(results, (*expected, expected[0]), rtol=0, atol=0)


def test_inference_mode_changes_nothing(device):
    inputs = pairs(device=device)
    expected = force_virial(*inputs, 2)
    with torch.inference_mode():
        results = force_virial(*inputs, 2)
        results_of_inference_tensors = force_virial(*(x.clone() for x in inputs), 2)
    assert all(x.is_inference() for x in results)
    assert_equal_lists(results, expected, rtol=0, atol=0)
    assert_equal_lists(results_of_inference_tensors, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "chosen", [[0, 1, 2], *(pytest.param([i], marks=pytest.mark.long) for i in range(3))], ids=str
)
def test_compiled_autograd_of_a_second_derivative_equals_eager(device, chosen):
    """Some second derivatives are always zero. In eager mode the operator returns no tensor for
    them, but a compiled graph needs one."""
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)

    def loss():
        F, W, _ = force_virial(list_neigh, *leaves, 1)
        scalar = F.square().sum() + W.square().sum()
        gradients = torch.autograd.grad(scalar, [leaves[i] for i in chosen], create_graph=True)
        return sum(x.square().sum() for x in gradients)

    expected = torch.autograd.grad(loss(), leaves, materialize_grads=True)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss().backward()
    assert_equal_lists([x.grad for x in leaves], expected, rtol=1e-12, atol=1e-12)


def test_copy_on_write_tensors_stay_shared(device):
    """The operators only read their inputs, and so cause no copy."""
    list_neigh, *values = pairs(**SMALL, device=device)
    upstream = [torch.ones_like(x) for x in force_virial(list_neigh, *values, 1)]
    lazy = [torch._lazy_clone(x) for x in (*upstream, list_neigh, *values)]
    backward(*lazy, 1, True, [True] * 3)
    force_virial(*lazy[3:], 1)
    assert all(torch._C._is_cow_tensor(x) for x in lazy)


@pytest.mark.long
def test_inputs_of_more_than_2_to_the_31_elements_are_right():
    # Ri_d has 2.17e9 elements. The list repeats every `period` atoms, so the results repeat those
    # of a small list.
    period, repeats, neighbors = 1000, 3840, 47
    natoms = period * repeats
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", meminfo)[1])
    # A slot has an int32 and 19 float32. An atom has 12 results, in three arrays of 8 bytes.
    needed = 1.1 * natoms * (neighbors * (4 + 19 * 4) + 12 * 8 * 3)
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
    small = pairs(1, period, 0, neighbors, torch.float32)
    blocks = [x.expand(repeats, *x.shape[1:]).reshape(1, natoms, *x.shape[2:]) for x in small]
    offsets = (
        torch.arange(repeats, dtype=torch.int32).repeat_interleave(period)[None, :, None] * period
    )
    blocks[0] = torch.where(blocks[0] >= 0, blocks[0] + offsets, -1)
    assert blocks[2].numel() > 2**31
    F, W, atom_W = force_virial(*blocks)
    expected_F, expected_W, expected_atom_W = force_virial(*small)
    for result, expected in ((F, expected_F), (atom_W, expected_atom_W)):
        result = result.view(repeats, *expected.shape[1:])
        torch.testing.assert_close(result, expected.expand_as(result), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(W, expected_W * repeats, rtol=1e-4, atol=1e-2)
