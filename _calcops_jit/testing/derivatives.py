"""Derivatives against finite differences, by torch.autograd.gradcheck."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from .checks import SLOW, Call, Failure, Results, Unchecked, check, error_naming
from .draws import laid

MOST = 2000  # numbers of a tensor
POINTS = 3  # near the call, at which a derivative must be wrong: one may be at a kink


class Function:
    """A call as a function of `points`, which gradcheck differentiates.

    `names` are the floating arguments that are not constant. They are the first points. The others
    are fixed numbers, the upstream gradients of the results.
    """

    def __init__(self, call: Call):
        self.call = call
        self.names = [name for name, x in call.floats.items() if not call.is_constant(name)]
        results = [x for x in call.results.values() if x.is_floating_point()]
        if not call.op.has_derivatives or not self.names or not results:
            raise Unchecked("no derivatives")
        generator = torch.Generator().manual_seed(0)
        numbers = (torch.randn(x.shape, generator=generator) for x in results)
        # Exact in each dtype, so that float16 and float64 have the same upstream gradients.
        self.upstream = [
            (8 * y).round().div(8).to(x) for x, y in zip(results, numbers, strict=True)
        ]
        self.inputs = [call.tensors[name] for name in self.names]

    def points(self, order: int) -> list[torch.Tensor]:
        """Return the points on which a derivative of an order depends."""
        points = self.inputs
        if order > 1:
            points = points + self.upstream
        if order > 2:
            points = points + self.weights(points)
        return [x.detach().clone().requires_grad_() for x in points]

    @staticmethod
    def weights(points: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(x.shape, generator=generator).to(x) for x in points]

    def __call__(self, *points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the floating results."""
        results = self.call.run(**dict(zip(self.names, points, strict=False)))
        return tuple(x for x in results.values() if x.is_floating_point())

    def gradients(
        self, *points: torch.Tensor, order: int = 1, graph: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients for the points of an inner product.

        It is that of the results with the upstream gradients. For a higher order, it is that of the
        gradients of the order below with the weights.
        """
        count = len(self.names) if order == 1 else len(self.names) + len(self.upstream)
        points, given = points[:count], list(points[count:])
        if order == 1:
            terms, weights = self(*points), given or self.upstream
        else:
            terms = self.gradients(*points, order=order - 1)
            weights = given or self.weights(terms)
        total = sum((x * w).sum() for x, w in zip(terms, weights, strict=True))
        points += tuple(given)
        if not total.requires_grad:
            return tuple(map(torch.zeros_like, points))
        found = torch.autograd.grad(total, points, allow_unused=True, create_graph=graph)
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(points, found, strict=True)
        )


def with_gradients(call: Call, layout: str = "contiguous") -> Results:
    """Return the results, and the gradients if there are any, for upstream ones of a layout."""
    try:
        function = Function(call)
    except Unchecked:
        return call.results
    function.upstream = [laid(x, layout) for x in function.upstream]
    gradients = function.gradients(*function.points(1), graph=False)
    names = (f"the gradient for `{name}`" for name in function.names)
    return call.results | dict(zip(names, gradients, strict=True))


def moved(call: Call, seed: int) -> Call:
    """Return the call with numbers near its own ones, which have no ties; with its own for 0."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, x in call.floats.items():
        if seed and not call.is_constant(name):
            scale = 0.05 * x.double().square().sum().div(max(1, x.numel())).sqrt() or 0.05
            changes[name] = x + (scale * torch.randn(x.shape, generator=generator)).to(x.dtype)
    return call.changed(changes)


def expect_derivative(call: Call, order: int, **options) -> None:
    """Raise Failure if a derivative differs from finite differences at several points."""
    exact = call.converted(torch.float64) or call.converted(torch.float32)
    if not exact:
        raise Unchecked("neither float64 nor float32")
    if not all(x.isfinite().all() for x in exact.floats.values()):
        raise Unchecked("infinite numbers")
    has_float64 = any(x.dtype == torch.float64 for x in exact.floats.values())
    options |= {"rtol": 1e-3, "atol": 1e-5} if has_float64 else {"rtol": 5e-2, "atol": 1e-2}
    # A smaller step crosses fewer kinks, and has more rounding.
    steps = (1e-5, 1e-6, 1e-7) if has_float64 else (1e-2, 1e-3)
    for seed in range(1, POINTS + 1):
        function = Function(moved(exact, seed))
        numbers = []
        for step in steps:
            message = _mismatch(function, order, options | {"eps": step})
            if not message:
                return
            numerical = re.search(r"numerical:\D*?([-+]?(?:\d[-+.\de]*|nan|inf))", message)
            numbers.append(float(numerical[1]) if numerical else 0.0)
        if not any(abs(a - b) <= 0.01 * abs(b) + 1e-5 for a, b in pairwise(numbers)):
            raise Unchecked("differences do not converge")
    raise Failure(f"{message}; the inputs are {', '.join(function.names)}")


def _mismatch(function: Function, order: int, options: dict) -> str:
    """Return what gradcheck says of a derivative, or "" if it is right."""
    points = function.points(order)
    if not all(0 < x.numel() < MOST for x in points):
        raise Unchecked("an empty tensor or a large one")

    def differentiated(*points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return function(*points) if order == 1 else function.gradients(*points, order=order - 1)

    try:
        gradcheck(differentiated, points, fast_mode=True, **options)
    except GradcheckError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return " ".join(lines[:3])
    return ""


@check(SLOW)
def check_reverse(call: Call) -> None:
    """Gradients are those of finite differences."""
    expect_derivative(call, 1)


@check(SLOW)
def check_forward(call: Call) -> None:
    """Derivatives of forward mode are those of finite differences."""
    expect_derivative(call, 1, check_forward_ad=True, check_backward_ad=False)


@check(SLOW)
def check_second(call: Call) -> None:
    """Gradients of gradients are those of finite differences."""
    _expect_higher(call, 2)


@check(SLOW)
def check_third(call: Call) -> None:
    """Third derivatives are those of finite differences."""
    _expect_higher(call, 3)


def _expect_higher(call: Call, order: int) -> None:
    """Check a higher derivative if the operator has it."""
    try:
        expect_derivative(call, order)
    except RuntimeError as error:
        if "derivative" not in str(error) and "not implemented" not in str(error):
            raise
        raise Unchecked(f"no derivative of order {order}") from None


@check(SLOW)
def check_constant(call: Call) -> None:
    """Asking for the derivative of a constant is an error that names it."""
    for name in filter(call.is_constant, call.floats):
        x = call.tensors[name].detach().clone()

        def total(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return sum(y.sum() for y in call.run(**{name: x}).values() if y.is_floating_point())

        with error_naming(call.op, {name}, f"the gradient for the constant `{name}`"):
            total(x.requires_grad_()).backward()
        if call.op.has_jvp:
            with error_naming(call.op, {name}, f"the tangent of the constant `{name}`"):
                torch.func.jvp(total, (x.detach(),), (x.detach(),))
