"""Results and gradients are the same in other memory, under PyTorch's transforms, and on CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import library
from ..request import request_for
from .checks import (
    RARE,
    SLOW,
    Call,
    Failure,
    Refused,
    Results,
    Unchecked,
    check,
    distance,
    expect_same,
    largest,
)
from .derivatives import Function, Tensors, gradients, moved, slope, weighted_sum, with_gradients
from .draws import laid


@check()
def check_memory(call: Call) -> None:
    """A call and its derivatives use no memory beyond their tensors."""
    for mode in (1, 2):  # tensors end, or begin, at pages that may not be accessed
        with _protected(mode):
            protected = call.changed({name: _copy(x) for name, x in call.tensors.items()})
            with contextlib.suppress(Failure, Refused, RuntimeError):  # other checks examine errors
                with_gradients(protected)
                total, points, weights = weighted_sum(protected)
                points = [*points.values(), *weights.values()]
                gradients(slope(total, points), points)


@contextlib.contextmanager
def _protected(mode: int) -> Iterator[None]:
    """Let new tensors have such pages. They are filled with 0x55."""
    protected_pages().protect(mode)
    try:
        yield
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


def _expect_repeated(call: Call, got: Results, what: str) -> None:
    """Raise Failure unless a kernel's results are the same bits.

    PyTorch's operators, of which gradients and compositions consist, may round differently.
    """
    if not call.op.is_composition:
        expect_same(got, call.results, what)
    call.expect_close(got, with_gradients, what)


@check()
def check_written(call: Call) -> None:
    """All elements are written, no argument changes, and no result shares memory."""
    before = {name: x.clone() for name, x in call.tensors.items()}
    what = "is not written everywhere, or differs in the next call"
    # New tensors are filled with 0x55. They begin at a page, as aligned as others: PyTorch's sums
    # of tensors that are aligned differently have other last bits.
    with _protected(2):
        got = with_gradients(call.changed({}))
    _expect_repeated(call, got, what)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are filled with NaN
    try:
        got = with_gradients(call.changed({}))
    finally:
        torch.use_deterministic_algorithms(False)
    _expect_repeated(call, got, what)
    expect_same(call.tensors, before, "is an argument that the call changes")
    owners = dict(call.tensors)
    for name, x in call.results.items():
        for other, y in owners.items():
            if x.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
                raise Failure(f"{name} shares memory with {other}")
        owners[name] = x


@check()
def check_threads(call: Call) -> None:
    """Results of 1, 2 and 3 threads are the same bits, and gradients the same but for rounding."""
    if not call.op.has_openmp:
        raise Unchecked("the library is built without -fopenmp")
    for threads in (2, 3, 3):
        torch.set_num_threads(threads)
        got = with_gradients(call.changed({}))
        torch.set_num_threads(1)
        _expect_repeated(call, got, f"differs with {threads} threads")


@check()
def check_layouts(call: Call) -> None:
    """The layout of a tensor in memory does not matter, also of an upstream gradient."""
    for layout in ("contiguous", "transposed", "every second", "offset"):
        same = {name: laid(x.contiguous(), layout) for name, x in call.tensors.items()}
        got = with_gradients(call.changed(same), layout)
        call.expect_close(got, with_gradients, f"of {layout} tensors")


@check()
def check_precision(call: Call) -> None:
    """Float32 is as exact as its inputs; float16 and bfloat16 are rounded from float32."""
    exact = call.converted(torch.float64)
    inexact = [name for name, x in call.floats.items() if x.dtype != torch.float64]
    if not exact or not inexact or call.op.is_composition:
        raise Unchecked("no dtypes other than float64, or PyTorch's precision")
    got, roundings = with_gradients(call), {}
    for name, x in with_gradients(exact).items():
        if not x.is_floating_point():
            continue
        y, info = got[name], torch.finfo(got[name].dtype)
        if name in call.results:
            allowed = 2 * info.eps * (x.abs().nan_to_num(0.0) + info.tiny)
        else:  # PyTorch's operators, which compute gradients, round each number
            allowed = 32 * info.eps * max(map(largest, [x, *exact.floats.values()]))
            allowed = torch.where(y.isfinite(), allowed, torch.inf)
        is_too_large = (y.dtype == torch.float16) & (x.abs() >= 6e4)
        roundings[name] = torch.where(is_too_large, torch.inf, allowed)
        got[name] = y.double()
    if not roundings:
        raise Unchecked("no floating results")
    if all(call.tensors[name].dtype == torch.float32 for name in inexact):
        for seed in range(3):  # results of other roundings show how exact sums inside are
            near = with_gradients(call.rounded(seed, inexact))
            for name in roundings:
                roundings[name] = roundings[name] + 16 * distance(near[name], got[name])
    epsilon = torch.finfo(torch.float32).eps
    what = f"in {call.tensors[inexact[0]].dtype}"
    exact.expect_close(got, with_gradients, what, inexact, epsilon, roundings)


@check()
def check_empty_slots(call: Call) -> None:
    """Numbers that an entry of -1 switches off may be NaN, and so may their derivatives be."""
    if 0 in [x for x in call.arguments.values() if isinstance(x, float)]:
        raise Unchecked("a factor of zero may switch off more")
    call = moved(call, 1)  # numbers that are not zero
    dead = _switched_off(call)
    if not any(mask.any() for mask in dead.values()):
        raise Unchecked("no entry of -1 whose slot has numbers")

    def filled(number: float) -> Call:
        numbers = {name: torch.where(dead[name], number, call.tensors[name]) for name in dead}
        return call.changed(numbers)

    for number in (0.25, 1000.0, -1000.0):
        try:
            expect_same(filled(number).results, call.results, "")
        except Failure:
            raise Unchecked("the operator uses the numbers of empty slots") from None
    expected = with_gradients(filled(0.25))
    expect_same(with_gradients(filled(torch.nan)), expected, "changes with NaN in an empty slot")


def _switched_off(call: Call) -> dict[str, torch.Tensor]:
    """Return {name: mask} of the numbers whose slot has the entry -1.

    A tensor belongs to the slots if its shape has the dimensions at which the contract places an
    entry, such as `atom, slot`.
    """
    masks = {}
    for index, line in call.op.arguments.items():
        if index not in call.tensors or not line or not line.may_be_none:
            continue
        is_empty = call.tensors[index] == -1
        count = len(line.positions) or is_empty.dim()
        place = _dimensions(call, index)[-count:]
        while is_empty.dim() > count:
            is_empty = is_empty.any(0)
        for name, x in call.floats.items():
            dimensions = _dimensions(call, name)
            for end in range(count, x.dim() + 1):
                if dimensions[end - count : end] == place:
                    masks[name] = is_empty[(..., *[None] * (x.dim() - end))]
    return masks


def _dimensions(call: Call, name: str) -> list:
    """Return the dimensions of an argument in the contract, or [] if it has any others."""
    line = call.op.arguments[name]
    form = line.form_of(call.tensors[name].shape) if line and not line.has_leading else []
    return [total for total, _ in form]


@check(SLOW)
def check_vmap(call: Call) -> None:
    """torch.vmap, also nested, gives what a loop gives, of results and of gradients."""
    draw = call.random
    dims = {name: draw.choice([0, 0, -1, -1, None]) for name in call.tensors}
    shared = {name: x for name, x in call.tensors.items() if dims[name] is None}
    if len(shared) == len(dims):
        raise Unchecked("no tensor with items")
    count = draw.choice([1, 2, 3])

    def function(tensors: dict) -> Results:
        return with_gradients(call.changed(tensors), gradients=_functional_gradients)

    def items(call: Call) -> list[dict]:
        return [_item(call, seed).changed(shared).tensors for seed in range(count)]

    def loop(call: Call) -> Results:
        results = [function(tensors) for tensors in items(call)]
        return {name: torch.stack([x[name] for x in results]) for name in results[0]}

    stacked = dict(call.tensors)
    for name in stacked.keys() - shared.keys():
        stacked[name] = torch.stack([tensors[name] for tensors in items(call)], dims[name])
    mapped = torch.vmap(function, in_dims=(dims,))
    call.expect_close(mapped(stacked), loop, f"under vmap with in_dims={dims}")
    nested = torch.vmap(mapped)({name: torch.stack([x, x]) for name, x in stacked.items()})
    last = {name: x[1] for name, x in nested.items()}
    call.expect_close(last, loop, f"under vmap of vmap with in_dims={dims}")


def _functional_gradients(function: Function, points: Tensors) -> Tensors:
    """Return the gradients for the points, also under vmap."""
    value, pullback = torch.func.vjp(function, *points)
    return pullback(torch.ones_like(value))


def _item(call: Call, seed: int) -> Call:
    """Return a call of the same shapes with other numbers and other entries."""
    item = moved(call, seed)
    if any(map(call.op.maker_of, call.tensors)):
        return item  # the result of an operator belongs to these entries
    lines = call.op.arguments
    indices = [name for name in call.tensors if lines[name] and lines[name].below]
    return item.changed({name: call.tensors[name].roll(seed) for name in indices})


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
    compiled_call = call.changed({})
    compiled_call.function = lambda arguments: compiled(arguments)[0]
    call.expect_close(with_gradients(compiled_call), with_gradients, "under torch.compile")


@check(RARE)
def check_export(call: Call) -> None:
    """torch.export with dynamic sizes gives the same results."""
    dims = {name: [torch.export.Dim.AUTO] * x.dim() for name, x in call.tensors.items()}
    module = torch.nn.Module()
    module.forward = lambda tensors: call.run(**tensors)
    program = torch.export.export(module, (call.tensors,), dynamic_shapes=(dims,))
    got = program.module()(call.tensors)
    call.expect_close(got, lambda call: call.results, "of the exported program")


@check(SLOW)
def check_cuda(call: Call) -> None:
    """CUDA has the CPU's results and gradients, but for rounding."""
    if not call.op.is_composition and "cuda" not in call.op.devices:
        raise Unchecked("no kernels for CUDA")
    call.expect_close(on_cuda(call), with_gradients, "on CUDA")


def on_cuda(call: Call) -> Results:
    """Return results and gradients that CUDA computes, as tensors on the CPU."""
    if not torch.cuda.is_available():
        raise Unchecked("no GPU")
    got = with_gradients(call.changed({name: x.cuda() for name, x in call.tensors.items()}))
    for name, x in got.items():
        if not x.is_cuda:
            raise Failure(f"{name} of tensors on CUDA is on the {x.device}")
    return {name: x.cpu() for name, x in got.items()}
