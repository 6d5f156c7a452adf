"""Random calls of warp_perspective give the reference's results or a documented error.

They are made as in fuzz.py, also with words and border values. What follows from rounding is not
compared.
"""

import random

import fuzz
import pytest
import torch
from reference_warp_perspective import BORDERS, DTYPES, INTERPOLATIONS, random_image, reference
from test_warp_perspective import as_dtype, tolerance

from calcops_jit import warp_perspective

SIZES = [0, 1, 2, 3, 8, 19]
DSIZES = [[], [4], [4, 5, 6], [-1, 3], [3, -(2**63)], [2**62, 2], [2**31, 2**31], [5, 0]]
ENTRIES = [0.0, float("nan"), float("inf"), -1e300, 1e-3, 7.0]
WORDS = ["", "Linear", "lanczos", "transparent", *BORDERS, *INTERPOLATIONS]


def matrices(draw, shape):
    """Return random matrices near the identity. Some mirror, enlarge or shrink. Some have a factor,
    which does not change the map."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    spread = torch.tensor([[0.6, 0.6, 9], [0.6, 0.6, 9], [0.02, 0.02, 0]], dtype=torch.float64)
    random_part = (torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5) * spread
    mirror = torch.tensor(
        [draw.choice([1.0, -1, 0.3]), draw.choice([1.0, -1, 3]), 1], dtype=torch.float64
    )
    scale = draw.choice([1, 1, -3, 1e-20])
    return (torch.eye(3, dtype=torch.float64) * mirror + random_part) * scale


def valid_arguments(draw, seed):
    dtype = draw.choice(DTYPES)
    batch = draw.choice([1, 2, 3])
    channels = draw.choice([0, 1, 2, 3])
    kind = draw.choice(["HW", "CHW", "NCHW", "one matrix", "one image", "videos"])
    size = draw.choice(SIZES), draw.choice(SIZES)

    if kind == "HW":
        shape = size
    elif kind in ("CHW", "one image"):
        shape = (channels, *size)
    elif kind == "videos":
        shape = (2, batch, channels, *size)
    else:
        shape = (batch, channels, *size)

    image = random_image(*shape, dtype=dtype, seed=seed)
    warp_shape = (batch, 3, 3) if kind in ("NCHW", "one image") else (3, 3)
    if kind == "videos":
        warp_shape = draw.choice([(3, 3), (1, 3, 3), (2, batch, 3, 3)])
    warp = matrices(draw, warp_shape)
    arguments = {
        "image": image,
        "warp": warp.to(draw.choice([torch.float64, torch.float64, torch.float32])),
    }
    arguments["dsize"] = draw.choice([[], size, [draw.choice(SIZES), draw.choice(SIZES)]])
    arguments["interpolation"] = draw.choice(INTERPOLATIONS)
    arguments["border_mode"] = draw.choice([*BORDERS, "transparent"])
    count = channels if image.dim() > 2 else 1
    arguments["border_value"] = draw.choice([None, [], 0.5, [0.25], [k / 4 for k in range(count)]])
    arguments["inverse_map"] = draw.random() < 0.5
    if arguments["border_mode"] == "transparent":
        result_shape = image.shape[:-3] or warp_shape[:-2]
        result_shape += (image.shape[-3],) if image.dim() > 2 else ()
        result_shape += tuple(arguments["dsize"] or size)
        arguments["destination"] = random_image(*result_shape, dtype=dtype, seed=seed + 1)

    return {
        name: fuzz.strided(value, draw) if torch.is_tensor(value) else value
        for name, value in arguments.items()
    }


def change(arguments, draw):
    """Change one argument. The call may stay valid."""
    name = draw.choice(sorted(arguments))
    value = arguments.get(name)
    if name in ("interpolation", "border_mode"):
        value = draw.choice(WORDS)
    elif name == "dsize":
        value = draw.choice(DSIZES)
    elif name == "border_value":
        value = draw.choice([[1.0] * 5, [7.5], -3.0, 300.0])
    elif torch.is_tensor(value):
        if draw.random() < 0.15 and value.numel() and value.is_floating_point():
            value = value.clone(memory_format=torch.contiguous_format)
            entry = torch.tensor(draw.choice(ENTRIES), dtype=torch.float64)
            value.view(-1)[draw.randrange(value.numel())] = entry.to(value.dtype)
        else:
            tensor = {name: value}
            fuzz.change(tensor, draw)
            value = tensor[name]
    arguments[name] = value


def expected_of(arguments, result):
    """Return the reference's result, of the shape and dtype of `result`, in float64."""
    image = arguments["image"]
    images = image[None] if image.dim() == 2 else image
    images = images.reshape(-1, *images.shape[-3:])
    warps = arguments["warp"].double().reshape(-1, 3, 3)
    border = arguments["border_value"]
    border = 0.0 if border is None or border == [] else border
    border = as_dtype(torch.tensor(border, dtype=torch.float64), image.dtype).tolist()
    dsize = result.shape[-2:]
    options = [dsize, arguments["interpolation"], arguments["border_mode"]]
    options += [border, arguments["inverse_map"]]
    destinations = arguments.get("destination")
    if destinations is not None:
        destinations = destinations.reshape(-1, images.shape[1], *dsize)
    results = []
    for n in range(max(len(images), len(warps))):
        destination = None if destinations is None else destinations[n]
        warp = warps[n % len(warps)]
        results.append(reference(images[n % len(images)], warp, *options, destination))
    return as_dtype(torch.stack(results).reshape(result.shape), result.dtype).double()


def check(seed):
    draw = random.Random(seed)
    arguments = valid_arguments(draw, seed)
    is_changed = draw.random() < 0.6
    if is_changed:
        change(arguments, draw)
    results = fuzz.results_of(warp_perspective, arguments, is_changed)
    if results is None:
        return
    (result,) = results
    image = arguments["image"]
    assert result.shape[-2:] == tuple(arguments["dsize"] or image.shape[-2:])
    assert result.dtype == image.dtype
    if result.is_meta or not result.numel() or not image.numel():
        return
    # Nearly singular matrices and huge pixels have other tests.
    warp = arguments["warp"].double()
    if is_changed and not (warp.isfinite().all() and torch.linalg.cond(warp).max() < 1e6):
        return
    for name in ("image", "destination"):
        pixels = arguments.get(name)
        if pixels is not None and pixels.is_floating_point() and not (pixels.abs() < 301).all():
            return
    expected = expected_of(arguments, result)
    # The tolerance is for pixels in [0, 1]. A changed call may have border values up to 300.
    atol = tolerance(result.dtype, arguments["interpolation"]) * (300 if is_changed else 1)
    rtol = torch.finfo(result.dtype).eps if is_changed and result.is_floating_point() else 0
    # Near the horizon, and halfway between two pixels, a result depends on the last bits of the
    # matrix. Compare only pixels that keep their value with slightly different matrices.
    is_sure = torch.ones_like(expected, dtype=torch.bool)
    for _ in range(3):
        signs = torch.tensor([draw.choice([-1.0, 1]) for _ in range(9)], dtype=torch.float64)
        nearby = arguments | {"warp": warp * (1 + 2.0**-46 * signs.view(3, 3))}
        is_sure &= (expected - expected_of(nearby, result)).abs() <= atol
    assert is_sure.double().mean() > 0.1 or result.numel() < 100
    torch.testing.assert_close(result.double()[is_sure], expected[is_sure], rtol=rtol, atol=atol)


def test_any_call_gives_the_references_results_or_names_an_argument(one_thread):
    fuzz.check_each(check, range(1000))


@pytest.mark.long
def test_many_calls_give_the_references_results_or_name_an_argument(one_thread):
    fuzz.check_each(check, range(1000, 300_000))
