"""Gradients, which other checks compare, and derivatives against finite differences."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .checks import CHECKS, SLOW, Call, Failure, Results, Unchecked, check, error_naming, largest
from .draws import laid

POINTS = 3  # near the call, at which a derivative must be wrong: one may be at a kink

Tensors = Sequence[torch.Tensor]
Function = Callable[..., torch.Tensor]  # of tensors, with one number as result


def weighted_sum(
    call: Call, layout: str = "contiguous", draw: random.Random | None = None
) -> tuple[Function, Results, Results]:
    """Return the sum of the results, each times a weight, as a function; its points; the weights.

    The points are the arguments that have gradients. The weights, which are the upstream gradients,
    are exact in each dtype, and may follow the points. With `draw`, these are some of all.
    """
    names = [name for name in call.floats if call.op.has_derivatives and not call.is_constant(name)]
    wanted = [name for name, x in call.results.items() if names and x.is_floating_point()]
    if draw:
        names, wanted = ([x for x in y if draw.random() < 0.7] or y for y in (names, wanted))
    points = {f"`{name}`": call.tensors[name] for name in names if wanted}
    weights = {}
    for name in wanted:
        x = call.results[name]
        numbers = (torch.arange(x.numel()) * 4 % 11 - 5) / 4
        weights[f"the upstream gradient of {name}"] = laid(numbers.view(x.shape).to(x), layout)

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        results = call.run(**dict(zip(names, inputs, strict=False)))
        return inner([results[name] for name in wanted], inputs[len(names) :] or weights.values())

    return function, points, weights


def inner(tensors: Tensors, others: Tensors) -> torch.Tensor:
    """Return the inner product, in float64."""
    products = ((x.double() * y.double()).sum() for x, y in zip(tensors, others, strict=True))
    return sum(products, torch.zeros(()))


def gradients(function: Function, points: Tensors) -> Tensors:
    """Return the gradients for the points. They can be differentiated if a point requires it."""
    if not points:
        return []
    create_graph = any(x.requires_grad for x in points)
    points = [_differentiable(x) for x in points]
    value = _differentiable(function(*points))
    return torch.autograd.grad(value, points, create_graph=create_graph, materialize_grads=True)


def _differentiable(x: torch.Tensor) -> torch.Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def slope(function: Function, direction: Tensors) -> Function:
    """Return the derivative of a function in a direction, as a function."""
    return lambda *points: inner(gradients(function, points), direction)


def with_gradients(
    call: Call, layout: str = "contiguous", gradients: Callable = gradients
) -> Results:
    """Return the results, and the gradients if there are any, for upstream ones of a layout."""
    function, points, _ = weighted_sum(call, layout)
    names = [f"the gradient for {name}" for name in points]
    return call.results | dict(zip(names, gradients(function, points.values()), strict=True))


def moved(call: Call, seed: int) -> Call:
    """Return the call with numbers near its own ones, which have no ties."""
    names = [name for name in call.floats if not call.is_constant(name)]
    points = [call.tensors[name] for name in names]
    steps = zip(names, points, random_direction(points, seed), strict=True)
    return call.changed({name: x + 0.05 * v for name, x, v in steps})


def random_direction(points: Tensors, seed: int) -> Tensors:
    """Return normal numbers. Each tensor is about as long as the largest number of its point."""
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for x in points:
        normal = torch.randn(x.shape, generator=generator).to(x)
        direction.append(normal * (largest(x) or 1) / max(1, x.numel()) ** 0.5)
    return tuple(direction)


def expect_derivative(call: Call, order: int, forward: bool = False) -> None:
    """Raise Failure if a derivative differs from finite differences at each of several points."""
    exact = call.converted(torch.float64) or call.converted(torch.float32)
    if not exact or not all(x.isfinite().all() for x in exact.floats.values()):
        raise Unchecked("no finite numbers of float64 or float32")
    for seed in range(POINTS):
        try:
            message = _mismatch(moved(exact, seed), order, forward)
        except RuntimeError as error:
            may_lack = order > 1 or call.op.is_composition
            if not may_lack or not re.search(
                "derivative|not implemented|does not support", str(error)
            ):
                raise
            raise Unchecked(f"no derivative of order {order}") from None
        if not message:
            return
    raise Failure(message)


def _mismatch(call: Call, order: int, forward: bool) -> str:
    """Return how a derivative in a direction differs from finite differences, or ""."""
    draw = call.random
    function, named, weights = weighted_sum(call, draw=draw)
    if not named:
        raise Unchecked("no derivatives")
    if order > 1 and draw.random() < 0.5:
        named |= weights
    points = tuple(named.values())
    direction, *others = (random_direction(points, POINTS + k) for k in range(order))
    for other in others:
        function = slope(function, other)
    if forward:
        derivative = torch.func.jvp(function, points, direction)[1].item()
    else:
        derivative = slope(function, direction)(*points).item()

    def at(distance: float) -> float:
        return function(*(x + distance * v for x, v in zip(points, direction, strict=True))).item()

    is_double = all(x.dtype == torch.float64 for x in (*points, *weights.values()))
    step, tolerance = (1e-6, 1e-3) if is_double else (1e-3, 5e-2)
    rough, fine = ((at(h) - at(-h)) / (2 * h) for h in (10 * step, step))
    error = abs(derivative - fine)
    if error <= tolerance * abs(fine) + step * (1 + abs(at(0))):
        return ""
    # A step may cross a kink, and a small one has more rounding.
    if not math.isfinite(rough - fine) or abs(rough - fine) > error / 10:
        raise Unchecked("differences do not converge")
    what = f"of order {order} in a direction of {', '.join(named)}"
    return f"the derivative {what} is {derivative:.9g}, by differences {fine:.9g}"


# Gradients, gradients of gradients, and third derivatives are those of finite differences.
for _order, _name in enumerate(["reverse", "second", "third"], start=1):
    CHECKS[_name] = partial(expect_derivative, order=_order)
    SLOW.append(_name)


@check(SLOW)
def check_forward(call: Call) -> None:
    """Derivatives of forward mode are those of finite differences."""
    if not call.op.has_jvp and not call.op.is_composition:
        raise Unchecked("no forward mode")
    expect_derivative(call, order=1, forward=True)


@check(SLOW)
def check_constant(call: Call) -> None:
    """Asking for the derivative of a constant is an error that names it."""
    constants = [name for name in call.floats if call.is_constant(name)]
    if not constants or not call.op.has_vjp:
        raise Unchecked("no constants")
    for name in constants:
        x = call.tensors[name].detach().clone()

        def total(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return sum(y.sum() for y in call.run(**{name: x}).values() if y.is_floating_point())

        with error_naming(call.op, {name}, f"the gradient for the constant `{name}`"):
            torch.autograd.grad(total(x.requires_grad_()), x)
        if call.op.has_jvp:
            with error_naming(call.op, {name}, f"the tangent of the constant `{name}`"):
                torch.func.jvp(total, (x.detach(),), (x.detach(),))
