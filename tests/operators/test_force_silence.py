"""No derivative of the force operators is lost without a word: every way to lose one gives it, or
an error."""

import itertools

import numpy
import pytest
import reference
import torch
from reference import (
    SMALL,
    assert_equal_lists,
    differentiable_pairs,
    neighbor_force,
    pairs,
    scalar_of,
)
from torch.autograd import forward_ad, gradcheck

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


def gradients_of(function, list_neigh, leaves):
    return torch.autograd.grad(scalar_of(function, list_neigh)(*leaves), leaves)


@pytest.fixture
def small(device):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    return list_neigh, leaves, gradients_of(reference.force_virial, list_neigh, leaves)


CLOSE = dict(rtol=1e-10, atol=1e-10)


# ---- what is not supported raises ----------------------------------------------------------------


def unsupported(list_neigh, dE, Ri_d):
    jagged = torch.nested.nested_tensor([*dE], layout=torch.jagged)
    return {
        "half": (list_neigh, dE.half(), Ri_d.half(), 1),
        "bfloat16": (list_neigh, dE.bfloat16(), Ri_d.bfloat16(), 1),
        "complex": (list_neigh, dE.to(torch.complex128), Ri_d.to(torch.complex128), 1),
        "mixed": (list_neigh, dE, Ri_d.float(), 1),
        "integer": (list_neigh, dE.long(), Ri_d, 1),
        "sparse": (list_neigh, dE.to_sparse(), Ri_d, 1),
        "mkldnn": (list_neigh, dE.float().to_mkldnn(), Ri_d.float(), 1),
        "nested": (list_neigh, jagged, Ri_d, 1),
        "numpy": (list_neigh, numpy.ones(dE.shape), Ri_d, 1),
        "fractional nghost": (list_neigh, dE, Ri_d, 1.0),
    }


@pytest.mark.filterwarnings("ignore")  # some of these are experimental in PyTorch
def test_what_is_not_supported_raises():
    list_neigh, dE, Ri_d, _ = pairs(**SMALL)
    for kind, arguments in unsupported(list_neigh, dE, Ri_d.requires_grad_()).items():
        with pytest.raises((RuntimeError, TypeError)):
            force(*arguments)
            pytest.fail(f"{kind} was taken")


def test_there_is_no_output_to_write_to_that_would_have_no_history(small):
    list_neigh, (dE, Ri_d, _), _ = small
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'out'"):
        force(list_neigh, dE, Ri_d, 1, out=torch.empty(3, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_none_for_a_tensor_is_an_error(device, needs_grad):
    list_neigh, *leaves = (differentiable_pairs if needs_grad else pairs)(**SMALL, device=device)
    W = torch.ones(3, 3, 3, dtype=torch.float64, device=device)
    for op, inputs, above in (
        (force, [list_neigh, *leaves[:2]], []),
        (neighbor_force, [list_neigh, *leaves[:2]], []),
        (force_virial, [list_neigh, *leaves], []),
        (backward, [list_neigh, *leaves], [None, W, None]),
    ):
        rest = [1, True, [True] * 3] if op is backward else [1]
        for i, name in enumerate(("list_neigh", "dE", "Ri_d", "Rij")[: len(inputs)]):
            given = [None if k == i else x for k, x in enumerate(inputs)]
            with pytest.raises(RuntimeError, match=f"expected `{name}` "):
                op(*above, *given, *rest)


@pytest.mark.parametrize("argument", range(4))
def test_inputs_changed_in_place_before_backward_are_noticed(device, argument):
    list_neigh, *leaves = differentiable_pairs(device=device)
    values = [list_neigh, *(x.clone() for x in leaves)]
    result = scalar_of(lambda *x: force_virial(*x[:-1], 2), values[0])(*values[1:])
    values[argument].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("argument", range(3))
def test_upstreams_changed_in_place_before_the_second_backward_are_noticed(device, argument):
    list_neigh, *leaves = differentiable_pairs(**SMALL, device=device)
    outputs = force_virial(list_neigh, *leaves, 1)
    upstream = [torch.ones_like(x).requires_grad_() * 2 for x in outputs]
    gradient = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
    upstream[argument].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(x.sum() for x in gradient).backward()


def test_a_graph_that_is_freed_says_so_and_a_kept_one_gives_the_same_again(small):
    list_neigh, leaves, expected = small
    scalar = scalar_of(force_virial, list_neigh)(*leaves)
    for keep in (True, False):
        assert_equal_lists(
            torch.autograd.grad(scalar, leaves, retain_graph=keep), expected, **CLOSE
        )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(scalar, leaves)


@pytest.mark.parametrize("argument", range(3))
def test_inference_tensors_cannot_be_saved_and_say_so(argument):
    inputs = pairs(**SMALL)[:3]
    with torch.inference_mode():
        made = inputs[argument].clone()
    given = [made if i == argument else x for i, x in enumerate(inputs)]
    given[2 if argument != 2 else 1].requires_grad_()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        force(*given, 1)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_operator(device):
    list_neigh, dE, Ri_d, _ = differentiable_pairs(**SMALL, device=device)
    with torch.autograd.detect_anomaly():
        result = force(list_neigh, dE, Ri_d, 1)
        with pytest.raises(
            RuntimeError, match="ForceBackward.* returned nan values in its 1th output"
        ):
            result.backward(torch.full_like(result, float("nan")))


# ---- what is supported gives the derivative ------------------------------------------------------


def lazily_negative(x):
    """The same numbers behind a bit that a kernel which reads memory would miss."""
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg() and torch.equal(negative, x)
    return negative


def test_tensors_whose_memory_is_not_their_value(device):
    list_neigh, *values = pairs(**SMALL, device=device)
    expected = force_virial(list_neigh, *values, 1)
    assert_equal_lists(
        force_virial(list_neigh, *map(lazily_negative, values), 1), expected, rtol=0, atol=0
    )
    zero = torch._efficientzerotensor(values[0].shape, dtype=torch.float64, device=device)
    assert all(x.count_nonzero() == 0 for x in force_virial(list_neigh, zero, *values[1:], 1))

    leaves = [x.requires_grad_() for x in values]
    outputs = force_virial(list_neigh, *leaves, 1)
    upstream = [torch.randn_like(x) for x in outputs]
    expected = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    ours = torch.autograd.grad(
        outputs, leaves, list(map(lazily_negative, upstream)), retain_graph=True
    )
    assert_equal_lists(ours, expected, rtol=0, atol=0)
    with forward_ad.dual_level():
        tangents = [lazily_negative(values[0].detach().cos()), zero.new_zeros(leaves[1].shape)]
        tangents += [
            torch._efficientzerotensor(leaves[2].shape, dtype=torch.float64, device=device)
        ]
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(leaves, tangents)]
        ours = [forward_ad.unpack_dual(x).tangent for x in force_virial(list_neigh, *duals, 1)]
    expected = force_virial(
        list_neigh, values[0].detach().cos(), *(x.detach() for x in values[1:]), 1
    )
    assert_equal_lists(ours, expected, rtol=0, atol=0)


MASKS = [list(mask) for mask in itertools.product([True, False], repeat=3)][:-1]


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("given", MASKS, ids=str)
def test_the_backward_operator_by_itself_has_its_derivatives_for_every_subset(
    device, given, center
):
    size = dict(frames=1, natoms=2, nghost=1, neighbors=2)
    list_neigh, *leaves = differentiable_pairs(**size, device=device)
    upstream = [torch.randn_like(x).requires_grad_() for x in force_virial(list_neigh, *leaves, 1)]
    for mask in MASKS:

        def function(*inputs, mask=mask):
            rest = iter(inputs)
            above = [next(rest) if flag else None for flag in given]
            results = backward(*above, list_neigh, *rest, 1, center, mask)
            return [result for result, flag in zip(results, mask) if flag]

        assert gradcheck(function, [x for x, flag in zip(upstream, given) if flag] + leaves)


def assert_backward_towards(wanted, small):
    list_neigh, leaves, expected = small
    for x in leaves:
        x.grad = None
    chosen = [x for x, flag in zip(leaves, wanted) if flag]
    scalar_of(force_virial, list_neigh)(*leaves).backward(inputs=chosen)
    for x, flag, value in zip(leaves, wanted, expected):
        assert (x.grad is not None) == flag
        if flag:
            torch.testing.assert_close(x.grad, value, **CLOSE)


@pytest.mark.parametrize("wanted", MASKS, ids=str)
def test_backward_towards_some_of_the_inputs(small, wanted):
    assert_backward_towards(wanted, small)


def test_compiled_autograd_does_not_take_one_set_of_inputs_for_another(small):
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        for wanted in ([True, False, False], [False, True, True], [True, False, False]):
            assert_backward_towards(wanted, small)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(small, reentrant):
    list_neigh, leaves, expected = small
    function = lambda *x: torch.utils.checkpoint.checkpoint(  # noqa: E731
        force_virial, *x, use_reentrant=reentrant
    )
    scalar_of(function, list_neigh)(*leaves).backward()
    assert_equal_lists([x.grad for x in leaves], expected, **CLOSE)


def test_hooks_on_saved_tensors(small):
    list_neigh, leaves, expected = small
    to_numpy = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.detach().cpu().numpy().copy(), x.device),
        lambda x: torch.from_numpy(x[0]).to(x[1]),
    )
    for context in (to_numpy, torch.autograd.graph.save_on_cpu()):
        with context:
            scalar = scalar_of(force_virial, list_neigh)(*leaves)
        assert_equal_lists(torch.autograd.grad(scalar, leaves), expected, **CLOSE)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        values = [x.clone() for x in leaves]
        scalar = scalar_of(force_virial, list_neigh)(*values)
        for value in values:
            value.zero_()
        assert_equal_lists(torch.autograd.grad(scalar, leaves), expected, **CLOSE)


def test_outputs_changed_in_place_keep_their_history(small):
    list_neigh, leaves, _ = small

    def scalar(function):
        F, W, atom_W = function(list_neigh, *leaves, 1)
        F, W, atom_W = (x if function is force_virial else x.clone() for x in (F, W, atom_W))
        F[0].mul_(2)
        W.transpose_(1, 2)
        atom_W[:, 1].add_(F[..., None].sum())
        return (F**2).sum() + (W**3).sum() + (atom_W**2).sum()

    ours, theirs = (
        torch.autograd.grad(scalar(function), leaves)
        for function in (force_virial, reference.force_virial)
    )
    assert_equal_lists(ours, theirs, **CLOSE)


@pytest.mark.parametrize(
    "name", ["jacobian", "jacobian forward", "hessian", "vjp", "jvp", "vhp", "hvp"]
)
def test_torch_autograd_functional(small, name):
    list_neigh, leaves, _ = small
    inputs = tuple(x.detach() for x in leaves)
    tangents = tuple(x.cos() for x in inputs)

    def apply(function):
        transform, *mode = name.split()
        options = dict(strategy="forward-mode", vectorize=True) if mode else dict(strict=True)
        scalar = scalar_of(function, list_neigh)
        extra = () if transform in ("jacobian", "hessian", "vjp") else (tangents,)
        result = getattr(torch.autograd.functional, transform)(scalar, inputs, *extra, **options)
        return torch.utils._pytree.tree_leaves(result)

    assert_equal_lists(apply(force_virial), apply(reference.force_virial), **CLOSE)


def test_hooks_and_gradients_kept_on_the_way(small):
    list_neigh, leaves, expected = small
    values = [x * 1 for x in leaves]
    F, W, atom_W = force_virial(list_neigh, *values, 1)
    seen = []
    F.grad_fn.register_hook(lambda grad_inputs, grad_outputs: seen.append(len(grad_inputs)))
    for x in (*values, F):
        x.retain_grad()
    ((F**3).sum() + (W**2).sum() + (F[..., None] * atom_W**2).sum()).backward()
    assert_equal_lists([x.grad for x in values], expected, **CLOSE)
    assert len(seen) == 1 and F.grad.shape == F.shape and F.grad_fn.name() == "ForceVirialBackward"


def test_forward_mode_alone_and_over_what_needs_a_gradient(small):
    list_neigh, leaves, _ = small

    def tangents(function):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.detach().cos()) for x in leaves]
            tangents = [forward_ad.unpack_dual(x).tangent for x in function(list_neigh, *duals, 1)]
            return *tangents, *torch.autograd.grad(sum((x**3).sum() for x in tangents), leaves)

    assert_equal_lists(tangents(force_virial), tangents(reference.force_virial), **CLOSE)
    with torch.no_grad(), forward_ad.dual_level():  # which turns off the other mode only
        dual = forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0]))
        assert (
            forward_ad.unpack_dual(force(list_neigh, dual, leaves[1], 1)).tangent.count_nonzero()
            > 0
        )


def test_only_what_was_asked_for_is_detached(small):
    list_neigh, (dE, Ri_d, Rij), _ = small
    assert all(
        x.requires_grad for x in force_virial(list_neigh, dE.detach(), Ri_d.detach(), Rij, 1)
    )
    assert force(list_neigh, dE.detach(), Ri_d, 1).requires_grad
    assert not force(list_neigh, dE.detach(), Ri_d.detach(), 1).requires_grad
    with torch.no_grad():
        assert not force(list_neigh, dE, Ri_d, 1).requires_grad
