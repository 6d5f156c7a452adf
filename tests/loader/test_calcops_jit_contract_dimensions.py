"""The operator `scaled` of contracts/operators.cpp: its contract has optional dimensions, lists for
sizes, and conditions between arguments."""

from pathlib import Path

import pytest
import torch
from reference import opcheck

import calcops_jit

SOURCE = Path(__file__).resolve().parent / "contracts" / "operators.cpp"
float64 = {"dtype": torch.float64}


@pytest.fixture(scope="module")
def mine():
    return calcops_jit.load("contracts", [SOURCE])


@pytest.mark.parametrize("gain_shape", [(), (1,), (3,)])
@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5), (1, 2, 6, 5), (3, 2, 6, 5)])
def test_a_result_has_the_optional_dimensions_of_its_arguments(mine, shape, gain_shape):
    image, gain = torch.randn(shape, **float64), torch.randn(gain_shape, **float64)
    items = max((*shape[:-3], *gain_shape, 1))
    channels = shape[-3] if len(shape) > 2 else 1
    expected = image.reshape(-1, channels, 6, 5) * gain.reshape(-1, 1, 1, 1)
    expected = expected.expand(items, -1, 6, 5)
    if len(shape) == 2:
        expected = expected.squeeze(1)
    if len(shape) < 4 and not gain_shape:
        expected = expected.squeeze(0)

    for input in (image, image.mT.contiguous().mT, image.to("meta")):
        actual = mine.scaled(input, gain.to(input.device))
        assert actual.shape == expected.shape
        assert actual.is_contiguous()
        assert input.is_meta or torch.equal(actual, expected)
    assert torch.equal(mine.scaled(image, gain, [2, 4]), expected[..., :2, :4])
    opcheck(mine.scaled, (image, gain, [2, 4]), {})

    images = torch.stack([image, image + 1])
    mapped = torch.vmap(mine.scaled, (0, None))(images, gain)
    assert torch.equal(mapped[1], mine.scaled(image + 1, gain))
    gains = torch.stack([gain, gain + 1])
    assert torch.equal(torch.vmap(mine.scaled)(images, gains)[1], mine.scaled(image + 1, gain + 1))
    mapped = torch.vmap(lambda g: mine.scaled(image, g))(gains)
    assert torch.equal(mapped[1], mine.scaled(image, gain + 1))


def test_a_compiled_function_accepts_other_sizes(mine):
    def doubled(image, gain):
        return mine.scaled(image, gain) * 2

    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend="eager")
    for items in 3, 5:
        image, gain = torch.randn(items, 2, 6, 5), torch.randn(1)
        assert torch.equal(compiled(image, gain), doubled(image, gain))


def test_a_kernel_of_float32_serves_float16(mine):
    image, gain = torch.randn(4, 5).half(), torch.tensor(0.3).half()
    actual = mine.scaled(image, gain)
    assert actual.dtype == torch.float16
    assert torch.equal(actual, (image.float() * gain.float()).half())


# {case: (arguments, the error message without its beginning)}
REFUSED = {
    "one value of a pair": (dict(size=[3]), r"`size` (h, w), both >= 0, got [3]"),
    "a size below zero": (dict(size=[3, -1]), r"`size` (h, w), both >= 0, got [3, -1]"),
    "too many values": (
        dict(offset=[1.0, 2.0, 3.0]),
        "`offset` of one value or C = 2, got 3 values",
    ),
    "no mask": (dict(mode="masked"), '`mask` a tensor where `mode` is "masked", got none'),
    "a mask in another mode": (
        dict(mask=torch.ones(2, 4, 5)),
        '`mask` none where `mode` is not "masked", got a tensor',
    ),
    "a mask of another shape": (
        dict(mode="masked", mask=torch.ones(3, 2, 4, 5)),
        "`mask` of the result's shape [2, 4, 5], got [3, 2, 4, 5]",
    ),
    "an excluded dtype": (
        dict(
            image=torch.ones(1, 1).half(),
            gain=torch.tensor(1).half(),
            mode="masked",
            mask=torch.ones(1, 1).half(),
        ),
        '`image` float32 or float64 where `mode` is "masked", got Half',
    ),
    "too many columns": (
        dict(image=torch.ones(1, 100), mode="masked", mask=torch.ones(1, 100)),
        '`image` of less than 100 columns where `mode` is "masked", got [1, 100]',
    ),
    "different numbers of items": (
        dict(image=torch.ones(2, 1, 1, 1), gain=torch.ones(3)),
        "`gain` of shape [N or 1] or [], [N] = [2], got [3]",
    ),
    "a dimension that others have": (
        dict(image=torch.ones(3, 2, 1, 1), bias=torch.ones(2)),
        "`bias` with the dimension N that others have, got [2]",
    ),
    "a derivative of a mode that has none": (
        dict(image=torch.ones(1, 1, requires_grad=True), mode="rounded"),
        '`mode` "plain" or "masked" where `image` has a derivative, got "rounded"',
    ),
    "a result that no memory holds": (
        dict(size=[2**40, 2**40]),
        "`size` for which memory suffices, got [1099511627776, 1099511627776]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_the_contract_excludes_are_refused(mine, case):
    options, message = REFUSED[case]
    arguments = dict(image=torch.ones(2, 4, 5), gain=torch.tensor(1.0)) | options
    with pytest.raises(RuntimeError) as error:
        mine.scaled(**arguments)
    assert str(error.value) == f"contracts::scaled: expected {message}"


def test_a_result_that_is_rounded_to_integers_has_no_derivative(mine):
    image = torch.ones(1, 1, dtype=torch.uint8)
    assert mine.scaled(image, torch.tensor(3, dtype=torch.uint8)) == 3
    bias = torch.ones(2, requires_grad=True)
    result = mine.scaled(torch.ones(2, 4, 5), torch.tensor(1.0), bias=bias.detach())
    assert (result == 2).all()
