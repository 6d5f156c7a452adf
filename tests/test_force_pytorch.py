"""The force operators in the rest of PyTorch: opcheck, compile, export, TorchScript, other processes."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from reference import assert_equal_lists, differentiable_pairs, pairs
from test_force_derivatives import SMALL, scalar_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


def test_opcheck_of_every_operator(device):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    opcheck(force, (list_neigh, *leaves[:2], 1))
    opcheck(torch.ops.calcops._neighbor_force, (list_neigh, *leaves[:2], 1))
    opcheck(force_virial, (list_neigh, *leaves, 1))
    upstream = [torch.randn_like(x).requires_grad_() for x in force_virial(list_neigh, *leaves, 1)]
    for mask in ([True] * 3, [True, False, False], [False, True, True]):
        opcheck(backward, (*upstream, list_neigh, *leaves, 1, True, mask))
    opcheck(backward, (upstream[0], None, None, list_neigh, *leaves[:2], None, 1, True, [True, True, False]))


class ForceModel(torch.nn.Module):
    """The smallest model with forces: a per-pair energy, its derivative and the operators."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, list_neigh: torch.Tensor, Ri: torch.Tensor, Ri_d: torch.Tensor, Rij: torch.Tensor):
        dE = self.weight * torch.cos(Ri * self.weight)
        return torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, 1)


def loss_gradient(model, *inputs):
    F, W, atom_W = model(*inputs)
    loss = F.square().sum() + W.square().sum() + atom_W.square().sum()
    return loss, torch.autograd.grad(loss, model.weight)[0]


def test_compiled_model_equals_eager_without_recompiling(device):
    torch._dynamo.reset()
    model = ForceModel().to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for natoms in range(10, 30):  # no size equals another or 3 or 4, or PyTorch takes them for one
            inputs = pairs(5 + natoms % 3, natoms, 1, natoms + 31, device=device, seed=natoms)
            ours, expected = loss_gradient(compiled, *inputs), loss_gradient(model, *inputs)
            assert_equal_lists(ours, expected, rtol=1e-12, atol=1e-12)


def test_compiled_autograd_equals_eager(device):
    torch._dynamo.reset()
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    expected = torch.autograd.grad(scalar_of(force_virial, list_neigh)(*leaves), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        scalar_of(force_virial, list_neigh)(*leaves).backward()
    assert_equal_lists([x.grad for x in leaves], expected, rtol=1e-12, atol=1e-12)


def test_export_with_dynamic_frames_atoms_and_neighbours():
    class Operators(torch.nn.Module):
        def forward(self, list_neigh, dE, Ri_d, Rij):
            return torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, 1)

    frames, natoms, neighbors = (torch.export.Dim(x, min=2) for x in ("frames", "natoms", "neighbors"))
    size = {0: frames, 1: natoms, 2: neighbors}
    program = torch.export.export(
        Operators(),
        pairs(2, 5, 1, 7),
        dynamic_shapes=(size, size, {0: frames, 1: natoms, 2: 4 * neighbors}, size),
    )
    for sizes in ((2, 5, 1, 7), (3, 4, 1, 9), (5, 11, 1, 2)):
        inputs = pairs(*sizes)
        assert_equal_lists(program.module()(*inputs), force_virial(*inputs, 1), rtol=0, atol=0)


def test_make_fx_of_a_force_matching_loss_equals_eager():
    model = ForceModel()
    parameters = dict(model.named_parameters())

    def loss_gradients(parameters, list_neigh, Ri, Ri_d, Rij):
        Ri = Ri.detach().requires_grad_()
        weight = parameters["weight"]
        energy = torch.sin(Ri * weight).sum()
        (dE,) = torch.autograd.grad(energy, Ri, create_graph=True)
        F, W, _ = torch.ops.calcops.force_virial(list_neigh, dE, Ri_d, Rij, 1)
        return torch.autograd.grad(F.square().sum() + W.square().sum(), weight)

    inputs = pairs(2, 5, 1, 7)
    traced = make_fx(loss_gradients, tracing_mode="symbolic")(parameters, *inputs)
    for sizes in ((2, 5, 1, 7), (4, 8, 1, 5)):
        inputs = pairs(*sizes)
        ours, expected = traced(parameters, *inputs), loss_gradients(parameters, *inputs)
        assert_equal_lists(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_scripted_model_saved_and_loaded_gives_the_same():
    model, inputs = ForceModel(), pairs(2, 4, 1, 6)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for _ in range(3):  # the profiling executor changes the graph on the way
        assert_equal_lists(
            loss_gradient(loaded, *inputs), loss_gradient(model, *inputs), rtol=1e-13, atol=1e-13
        )


def test_models_are_copied_and_pickled():
    model, inputs = ForceModel(), pairs(2, 4, 1, 6)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_lists(twin(*inputs), model(*inputs), rtol=0, atol=0)


def test_inference_mode_and_autocast_change_nothing(device):
    inputs = pairs(dtype=torch.float32, device=device)
    expected = force_virial(*inputs, 2)
    with torch.inference_mode():
        assert_equal_lists(force_virial(*inputs, 2), expected, rtol=0, atol=0)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_equal_lists(force_virial(*inputs, 2), expected, rtol=0, atol=0)


def test_inputs_changed_in_place_before_backward_are_noticed():
    list_neigh, dE, Ri_d, Rij = differentiable_pairs()
    result = force(list_neigh, dE, Ri_d, 2).sum()
    list_neigh.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def run_model(model, inputs):
    return [x.detach().numpy() for x in model(*inputs)]


def test_a_model_goes_to_another_process():
    model, inputs = ForceModel(), pairs(2, 4, 1, 6)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(run_model, (model, inputs))
    for there, here in zip(result, run_model(model, inputs), strict=True):
        assert (there == here).all()
