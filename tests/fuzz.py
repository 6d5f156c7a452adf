"""Random calls of an operator give the reference's results or a documented error.

A call begins as a valid one, with random sizes, dtypes, strides and device. In most calls one
argument is then changed. An unchanged call must succeed. A call that succeeds must have the
reference's results. One that fails must name an argument: "calcops::op: expected `argument` ...,
got ...".
"""

import random
import re

import torch

DTYPES = [torch.float32, torch.float64]
INDICES = [torch.int32, torch.int64]
OTHER_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    *DTYPES,
    *INDICES,
]
ENTRIES = [-1, 0, 1, -2, -(2**31), 2**31 - 1, 5, 6, 2**62]
COUNTS = [-(2**63), -1, 0, 1, 2**41, 2**63 - 1]


def strided(x, draw):
    """Return the same values with random strides, or shifted by one element in memory."""
    way = draw.choice(["rows", "rows", "columns", "every second", "with an offset"])
    if way == "columns" and x.dim() > 1:
        return x.mT.contiguous().mT
    if way == "every second" and x.dim() > 0:
        return x.repeat_interleave(2, -1)[..., ::2]
    if way == "with an offset":
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x
    return x


def change(arguments, draw):
    """Change one tensor or integer. The call may stay valid."""
    kinds = (torch.Tensor, int, type(None))
    name = draw.choice(sorted(key for key, value in arguments.items() if isinstance(value, kinds)))
    value = arguments[name]
    if not torch.is_tensor(value):
        if value is not None:
            arguments[name] = draw.choice(COUNTS)
        return
    way = draw.choice(["none", "dtype", "shape", "dimension", "device", "entry", "entry"])
    if way == "none":
        value = None
    elif way == "dtype":
        value = value.to(draw.choice(OTHER_DTYPES))
    elif way == "shape" and value.dim():
        dimension = draw.randrange(value.dim())
        twice = value.repeat_interleave(2, dimension)
        value = twice if draw.random() < 0.5 else value.narrow(dimension, 0, 0)
    elif way == "dimension":
        value = value.unsqueeze(0) if draw.random() < 0.5 or not value.dim() else value.flatten()
    elif way == "device":
        value = value.to("meta")
    elif way == "entry" and value.numel() and value.dtype in INDICES:
        value = value.clone(memory_format=torch.contiguous_format)
        entry = draw.choice(ENTRIES)
        if value.dtype == torch.int64 or -(2**31) <= entry < 2**31:
            value.view(-1)[draw.randrange(value.numel())] = entry
    arguments[name] = value


def tensors(results):
    return [results] if torch.is_tensor(results) else list(results)


def doubled(values):
    def widened(x):
        return x.double() if torch.is_tensor(x) and x.is_floating_point() else x

    return {name: widened(value) for name, value in values.items()}


def results_of(operator, arguments, may_fail):
    """Return the results of a call, or None if it fails with an error that names an argument."""
    try:
        return tensors(operator(**arguments))
    except RuntimeError as error:
        assert may_fail, error
        line = str(error).splitlines()[0]
        argument = re.match(
            r"(?:calcops|CalcOps|calcops_models)::_?\w+: expected `(\w+)` .*, got ", line
        )
        shapes = {key: getattr(value, "shape", value) for key, value in arguments.items()}
        assert argument, f"{line}\n{shapes}"
        names = [argument.name for argument in operator.default._schema.arguments]
        assert argument[1] in names, f"{line}\n{shapes}"


def check_each(check, numbers):
    for number in numbers:
        try:
            check(number)
        except Exception as error:
            raise AssertionError(f"call {number}: {error}") from error


def check(operator, draw_arguments, reference, number):
    draw = random.Random(f"{operator._qualified_op_name} {number}")
    arguments = {
        name: strided(value, draw) if torch.is_tensor(value) else value
        for name, value in draw_arguments(draw, number).items()
    }
    is_changed = draw.random() < 0.6
    if is_changed:
        change(arguments, draw)
    results = results_of(operator, arguments, is_changed)
    if results is None or any(x.is_meta for x in results):
        return
    if not is_changed and "CalcOps" not in operator._qualified_op_name:
        on_meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in arguments.items()}
        shapes = [x.shape for x in tensors(operator(**on_meta))]
        assert shapes == [x.shape for x in results]
    expected = tensors(reference(**doubled(arguments)))
    for result, value in zip(results, expected, strict=True):
        tolerance = 1e-5 if result.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(
            result, value.to(result.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def check_calls(operator, draw_arguments, reference, numbers):
    """Check a call for each number.

    Args:
        operator: of calcops_jit.
        draw_arguments: draw_arguments(draw, number) returns {name: value} of a valid call, by a
            random.Random and the number of the call.
        reference: is called with the same arguments, in float64.
        numbers: of the calls.
    """
    check_each(lambda number: check(operator, draw_arguments, reference, number), numbers)
