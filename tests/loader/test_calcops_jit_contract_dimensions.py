"""Contracts whose tensors may lack dimensions or have 1, whose lists give sizes, and that exclude
what goes with another argument: `scaled` of contracts/operators.cpp."""

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
def test_a_result_has_the_dimensions_that_the_arguments_have(mine, shape, gain_shape):
    image, gain = torch.randn(shape, **float64), torch.randn(gain_shape, **float64)
    items = max((*shape[:-3], *gain_shape, 1))
    expected = image.reshape(*(shape[:1] if len(shape) == 4 else (1,)), -1, 6, 5)
    expected = (expected * gain.reshape(-1, 1, 1, 1)).expand(items, -1, 6, 5)
    has_items, has_channels = len(shape) == 4 or gain_shape, len(shape) > 2
    if not has_channels:
        expected = expected.squeeze(1)
    if not has_items:
        expected = expected.squeeze(0)
    for given in (image, image.mT.contiguous().mT, image.to("meta")):
        found = mine.scaled(given, gain.to(given.device))
        assert found.shape == expected.shape
        assert found.is_contiguous()
        assert given.is_meta or torch.equal(found, expected)
    assert torch.equal(mine.scaled(image, gain, [2, 4]), expected[..., :2, :4])
    opcheck(mine.scaled, (image, gain, [2, 4]), {})
    images = torch.stack([image, image + 1])
    for dims in ((0, None), (None, None, 0)):
        mapped = torch.vmap(lambda i, g: mine.scaled(i, g), (0, None))(images, gain)
        assert torch.equal(mapped[1], mine.scaled(image + 1, gain)), dims
    gains = torch.stack([gain, gain + 1])
    assert torch.equal(torch.vmap(mine.scaled)(images, gains)[1], mine.scaled(image + 1, gain + 1))
    mapped = torch.vmap(lambda g: mine.scaled(image, g))(gains)
    assert torch.equal(mapped[1], mine.scaled(image, gain + 1))


def test_sizes_follow_symbols(mine):
    def part(image, gain):
        return mine.scaled(image, gain) * 2

    compiled = torch.compile(part, fullgraph=True, dynamic=True, backend="eager")
    for items in 3, 5:
        image, gain = torch.randn(items, 2, 6, 5), torch.randn(1)
        assert torch.equal(compiled(image, gain), part(image, gain))


def test_a_kernel_of_float32_serves_float16(mine):
    image, gain = torch.randn(4, 5).half(), torch.tensor(0.3).half()
    found = mine.scaled(image, gain)
    assert found.dtype == torch.float16
    assert torch.equal(found, (image.float() * gain.float()).half())


REFUSED = {
    "one of a pair": (dict(size=[3]), r"`size` (h, w), both >= 0, got [3]"),
    "a size below zero": (dict(size=[3, -1]), r"`size` (h, w), both >= 0, got [3, -1]"),
    "too many values": (
        dict(offset=[1.0, 2.0, 3.0]),
        "`offset` of one value or C = 2, got 3 values",
    ),
    "no mask": (dict(mode="masked"), '`mask` a tensor where `mode` is "masked", got none'),
    "a mask for nothing": (
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
    "too wide": (
        dict(image=torch.ones(1, 100), mode="masked", mask=torch.ones(1, 100)),
        '`image` of less than 100 columns where `mode` is "masked", got [1, 100]',
    ),
    "items that differ": (
        dict(image=torch.ones(2, 1, 1, 1), gain=torch.ones(3)),
        "`gain` of shape [N or 1] or [], [N] = [2], got [3]",
    ),
    "a dimension that others have": (
        dict(image=torch.ones(3, 2, 1, 1), bias=torch.ones(2)),
        "`bias` with the dimension N that others have, got [2]",
    ),
    "a derivative of what has none": (
        dict(image=torch.ones(1, 1, requires_grad=True), mode="rounded"),
        '`mode` "plain" or "masked" where `image` has a derivative, got "rounded"',
    ),
    "a result that no memory holds": (
        dict(size=[2**40, 2**40]),
        "`size` for which memory suffices, got [1099511627776, 1099511627776]",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_a_line_excludes_is_refused(mine, wrong):
    options, message = REFUSED[wrong]
    arguments = dict(image=torch.ones(2, 4, 5), gain=torch.tensor(1.0)) | options
    with pytest.raises(RuntimeError) as caught:
        mine.scaled(**arguments)
    assert str(caught.value) == f"contracts::scaled: expected {message}"


def test_a_result_that_is_rounded_to_integers_has_no_derivative(mine):
    image = torch.ones(1, 1, dtype=torch.uint8)
    assert mine.scaled(image, torch.tensor(3, dtype=torch.uint8)) == 3
    bias = torch.ones(2, requires_grad=True)
    found = mine.scaled(torch.ones(2, 4, 5), torch.tensor(1.0), bias=bias.detach())
    assert (found == 2).all()
