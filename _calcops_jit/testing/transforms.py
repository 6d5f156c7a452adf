"""Results and gradients are the same in other memory, under PyTorch's transforms, and on CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

import torch

from .. import library
from ..request import request_for
from .checks import (
    EPSILON,
    RARE,
    SLOW,
    Call,
    Failure,
    Refused,
    Results,
    Unchecked,
    check,
    expect,
    expect_same,
    largest,
)
from .contract import COMPARE
from .derivatives import Function, moved, with_gradients
from .draws import laid


@check()
def check_memory(call: Call) -> None:
    """A call and its derivatives use no memory beyond their tensors."""
    for mode in (1, 2):  # tensors end, or begin, at pages that may not be accessed
        protected_pages().protect(mode)
        try:
            protected = call.changed({name: _copy(x) for name, x in call.tensors.items()})
            with_gradients(protected)
            if call.op.has_derivatives:
                _second_derivative(protected)
        finally:
            protected_pages().protect(0)


@functools.cache
def protected_pages() -> ctypes.CDLL:
    """Return the library that allocates such tensors. It is built once for each PyTorch."""
    source = Path(__file__).with_name("protected_pages.cpp")
    return ctypes.CDLL(library.obtain(request_for("protected_pages", source)).path)


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own, with the same strides unless elements overlap."""
    strides = x.contiguous().stride() if 0 in x.stride() else x.stride()
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def _second_derivative(call: Call) -> None:
    try:
        function = Function(call)
        function.gradients(*function.points(2), order=2)
    except (Unchecked, RuntimeError):  # check_second examines errors
        return


@check()
def check_written(call: Call) -> None:
    """All elements are written, no argument changes, and no result shares memory."""
    before = {name: x.clone() for name, x in call.tensors.items()}
    results = with_gradients(call)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are filled with NaN
    try:
        filled = with_gradients(call.changed({}))
    finally:
        torch.use_deterministic_algorithms(False)
    expect_same(filled, results, "is not written everywhere, or differs in the next call")
    expect_same(with_gradients(call.changed({})), results, "differs in the next call")
    expect_same(call.tensors, before, "is an argument that the call changes")
    owners = dict(call.tensors)
    for name, x in call.results.items():
        for other, y in owners.items():
            if x.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                raise Failure(f"{name} shares memory with {other}")
        owners[name] = x


@check()
def check_threads(call: Call) -> None:
    """Results and gradients of 1, 2 and 3 threads are the same bits."""
    expected = with_gradients(call)
    for threads in (2, 3, 3, 1):
        torch.set_num_threads(threads)
        got = with_gradients(call.changed({}))
        expect_same(got, expected, f"differs with {threads} threads")


@check()
def check_layouts(call: Call) -> None:
    """The layout of a tensor in memory does not matter, also of an upstream gradient."""
    expected = with_gradients(call)
    for layout in ("contiguous", "transposed", "every second", "offset"):
        same = {name: laid(x.contiguous(), layout) for name, x in call.tensors.items()}
        got = with_gradients(call.changed(same), layout)
        call.expect_close(got, expected, f"of {layout} tensors")


@check()
def check_precision(call: Call) -> None:
    """Float32 is as exact as its inputs; float16 and bfloat16 are rounded from float32."""
    rounded = [call.converted(dtype) for dtype in EPSILON if dtype != torch.float64]
    pairs = [(x, x.converted(torch.float64)) for x in rounded if x]
    pairs = [(x, exact) for x, exact in pairs if exact]
    if not pairs:
        raise Unchecked("no dtypes beside float64")
    for x, exact in pairs:
        # A tie or a kink is met by chance. Other changes of the inputs show what it does.
        message = _imprecision(x, exact, seed=0)
        if message and _imprecision(x, exact, seed=1):
            raise Failure(message)


def _imprecision(rounded: Call, exact: Call, seed: int) -> str:
    """Return what is less exact than the rounding of inputs and result explains."""
    generator = torch.Generator().manual_seed(seed)
    results = {name: x for name, x in with_gradients(exact).items() if x.is_floating_point()}
    of_rounded = with_gradients(rounded)
    spread = {name: torch.zeros_like(x) for name, x in results.items()}
    for _ in range(6):
        near = {
            name: x * (1 + EPSILON[torch.float32] * torch.randn(x.shape, generator=generator))
            for name, x in exact.floats.items()
            if rounded.arguments[name].dtype != torch.float64
        }
        changed = with_gradients(exact.changed(near))
        for name, x in results.items():
            spread[name] = torch.maximum(spread[name], (changed[name] - x).abs())
    for name, x in results.items():
        got = of_rounded[name]
        allowed = 16 * spread[name] + 2 * EPSILON[got.dtype] * x.abs() + 1e-30
        # The numbers of a result share a scale. A plain sum has a rounding for each term.
        scale = max(map(largest, [x, *exact.floats.values()]))
        terms = max(y.numel() for y in exact.floats.values())
        allowed += (16 + terms) * EPSILON[torch.float32] * scale
        allowed += 2.0**-24 if got.dtype == torch.float16 else 0
        is_decided = x.isfinite() & spread[name].isfinite() & (x.abs() < 6e4)
        try:
            expect(
                ~is_decided | ((got.double() - x).abs() <= allowed),
                got,
                x,
                f"{name} in {got.dtype}",
            )
        except Failure as failure:
            return f"{failure} in float64"
    return ""


@check()
def check_empty_slots(call: Call) -> None:
    """Numbers that an entry of -1 switches off may be NaN, and so may their derivatives be."""
    dead = _switched_off(call).items()
    if not dead:
        raise Unchecked("no entry of -1 beside numbers of its slot")

    def filled(call: Call, number: float) -> Call:
        numbers = {name: torch.where(is_dead, number, call.tensors[name]) for name, is_dead in dead}
        return call.changed(numbers)

    # The numbers are used if others give other results, also with other arguments.
    others = [call]
    with contextlib.suppress(Refused):
        others += [x for x in [moved(_with_other_floats(call), 1)] if x.results]
    for other in others:
        for number in (0.25, 1000.0, -1000.0):
            try:
                expect_same(filled(other, number).results, other.results, "")
            except Failure:
                raise Unchecked("the operator uses the numbers of empty slots") from None
    of_number = with_gradients(filled(call, 0.25))
    of_nan = with_gradients(filled(call, torch.nan))
    expect_same(of_nan, of_number, "changes with NaN in an empty slot")


def _with_other_floats(call: Call) -> Call:
    """Return the call with 1.5 for each float that may have that value."""
    changes = {}
    for name, x in call.arguments.items():
        line = call.op.arguments[name]
        bounds = line.bounds if line else []
        if isinstance(x, float) and all(COMPARE[sign](1.5, end) for sign, end in bounds):
            changes[name] = 1.5
    return call.changed(changes)


def _switched_off(call: Call) -> dict[str, torch.Tensor]:
    """Return {name: mask} of the numbers whose slot has the entry -1.

    A tensor belongs to the slots if its shape has the dimensions at which the contract places an
    entry, such as `atom, slot`.
    """
    masks = {}
    for index, line in call.op.arguments.items():
        entries = call.tensors.get(index)
        if entries is None or not line or not line.may_be_none or not (entries == -1).any():
            continue
        count = len(line.positions) or entries.dim()
        place = [total for total, _ in line.form_of(entries.shape)][-count:]
        is_dead = (entries == -1).reshape(-1, *entries.shape[-count:]).any(0)
        for name, x in call.floats.items():
            own = call.op.arguments[name]
            form = [total for total, _ in own.form_of(x.shape)] if own else []
            begins = [d for d in range(len(form)) if form[d : d + count] == place]
            if begins and not own.has_leading:
                after = x.dim() - begins[0] - count
                masks[name] = is_dead.reshape(is_dead.shape + (1,) * after).expand(x.shape)
    return masks


@check(SLOW)
def check_vmap(call: Call) -> None:
    """torch.vmap, also nested, gives what a loop gives, of results and of gradients."""
    draw = call.random
    items = [_item(call, seed) for seed in range(draw.choice([1, 2, 3]))]
    batched = [name for name in call.tensors if draw.random() < 0.7] or [*call.tensors][:1]
    if not batched:
        raise Unchecked("no tensors")
    dims = {name: draw.choice([0, -1]) if name in batched else None for name in call.tensors}
    stacked = dict(call.tensors)
    for name in batched:
        stacked[name] = torch.stack([item.arguments[name] for item in items], dims[name])
    function = _mapped_function(call, batched)
    where = f"under vmap with in_dims={dims}"
    got = torch.vmap(function, in_dims=(dims,))(stacked)
    if draw.random() < 0.3:
        where = f"under vmap of {where[6:]}"
        twice = {name: torch.stack([x, x]) for name, x in stacked.items()}
        got = torch.vmap(torch.vmap(function, in_dims=(dims,)))(twice)
        got = {name: x[1] for name, x in got.items()}
    loop = [
        function(call.tensors | {name: item.arguments[name] for name in batched}) for item in items
    ]
    call.expect_close(got, {name: torch.stack([x[name] for x in loop]) for name in loop[0]}, where)


def _item(call: Call, seed: int) -> Call:
    """Return a call of the same shapes with other numbers and other entries."""
    item = moved(call, seed)
    if any(map(call.op.maker_of, call.tensors)):
        return item  # the result of an operator belongs to these entries
    for name, x in call.tensors.items():
        line = call.op.arguments[name]
        if seed and x.dim() and line and line.below:
            item.arguments[name] = x.flip(-1)
    return item


def _mapped_function(call: Call, names: list[str]):
    """Return a function of the tensors that gives results, and gradients if there are any."""
    try:
        function = Function(call)
    except Unchecked:
        return lambda tensors: call.run(**tensors)
    inputs = [name for name in function.names if name in names]

    def results_and_gradients(tensors: dict) -> Results:
        def floating(*values: torch.Tensor) -> tuple:
            results = call.run(**tensors | dict(zip(inputs, values, strict=True)))
            return tuple(x for x in results.values() if x.is_floating_point()), results

        values = [tensors[name] for name in inputs]
        if not inputs:
            return floating()[1]
        _, pullback, results = torch.func.vjp(floating, *values, has_aux=True)
        names = (f"the gradient for `{name}`" for name in inputs)
        return results | dict(zip(names, pullback(tuple(function.upstream)), strict=True))

    return results_and_gradients


@check(RARE)
def check_compile(call: Call) -> None:
    """torch.compile gives the same results and gradients, in one graph for all sizes."""
    torch._dynamo.reset()

    def with_shapes(arguments: dict) -> tuple[Results, Results]:
        results = call.op(arguments)
        return results, {name: torch.zeros(x.shape) for name, x in results.items()}

    compiled = torch.compile(with_shapes, fullgraph=True, dynamic=True, backend="aot_eager")
    for name, x in compiled(call.arguments)[1].items():
        if x.shape != call.results[name].shape:
            what = f"{list(x.shape)} in a graph, {list(call.results[name].shape)} in an eager call"
            raise Failure(f"{name} has shape {what}")
    got = with_gradients(Call(call.op, call.arguments, lambda arguments: compiled(arguments)[0]))
    call.expect_close(got, with_gradients(call), "under torch.compile")


class _Module(torch.nn.Module):
    def __init__(self, call: Call):
        super().__init__()
        self.call = call

    def forward(self, tensors: dict) -> Results:
        return self.call.run(**tensors)


@check(RARE)
def check_export(call: Call) -> None:
    """torch.export with dynamic sizes gives the same results."""
    dims = {name: [torch.export.Dim.AUTO] * x.dim() for name, x in call.tensors.items()}
    program = torch.export.export(_Module(call), (call.tensors,), dynamic_shapes=(dims,))
    call.expect_close(program.module()(call.tensors), call.results, "of the exported program")


@check(SLOW)
def check_cuda(call: Call) -> None:
    """CUDA has the CPU's results and gradients, but for rounding."""
    if not call.op.is_composition and "cuda" not in call.op.devices:
        raise Unchecked("no kernels for CUDA")
    # Sums in another order are rounded differently at each term, and differences of sums more so.
    terms = max((x.numel() for x in call.tensors.values()), default=0)
    got, expected = on_cuda(call), with_gradients(call)
    for name, x in expected.items():
        roundings = 2**16 if x.dtype == torch.float64 else 64
        call.expect_close({name: got[name]}, {name: x}, "on CUDA", max(roundings, terms))


def on_cuda(call: Call) -> Results:
    """Return results and gradients that CUDA computes, as tensors on the CPU."""
    if not torch.cuda.is_available():
        raise Unchecked("no GPU")
    got = with_gradients(call.changed({name: x.cuda() for name, x in call.tensors.items()}))
    for name, x in got.items():
        if not x.is_cuda:
            raise Failure(f"{name} of tensors on CUDA is on the {x.device}")
    return {name: x.cpu() for name, x in got.items()}
