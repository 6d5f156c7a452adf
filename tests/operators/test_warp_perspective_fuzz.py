"""Random calls of warp_perspective: the reference's numbers, or an error of the documented form.

Each call begins as a right one, of any sizes, types, strides and options. Then most have one
argument changed. A call that was not changed must succeed. One that succeeds must have the results
of the reference, and one that fails must name one of the arguments: "calcops::warp_perspective:
expected `argument` ..., got ...".
"""

import random
import re

import pytest
import torch
from reference_warp_perspective import BORDERS, DTYPES, INTERPOLATIONS, random_image, reference
from test_force_fuzz import strided
from test_warp_perspective import as_dtype, tolerance

from calcops_jit import warp_perspective

OTHER_DTYPES = [torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64, *DTYPES]
SIZES = [0, 1, 2, 3, 8, 19]
DSIZES = [[], [4], [4, 5, 6], [-1, 3], [3, -(2**63)], [2**62, 2], [2**31, 2**31], [5, 0]]
ENTRIES = [0.0, float("nan"), float("inf"), -1e300, 1e-3, 7.0]
WORDS = ["", "Linear", "lanczos", "opencv4", "exact", "transparent", *BORDERS, *INTERPOLATIONS]


def matrices(draw, shape):
    """Maps near the identity, mirrored or not, larger or smaller."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    spread = torch.tensor([[0.6, 0.6, 9], [0.6, 0.6, 9], [0.02, 0.02, 0]], dtype=torch.float64)
    random_part = (torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5) * spread
    mirror = torch.tensor(
        [draw.choice([1.0, -1, 0.3]), draw.choice([1.0, -1, 3]), 1], dtype=torch.float64
    )
    return (torch.eye(3, dtype=torch.float64) * mirror + random_part) * draw.choice(
        [1, 1, -3, 1e-20]
    )


def right_arguments(draw, seed):
    dtype, batch, channels = draw.choice(DTYPES), draw.choice([1, 2, 3]), draw.choice([0, 1, 2, 3])
    kind = draw.choice(["HW", "CHW", "NCHW", "one matrix", "one image"])
    size = draw.choice(SIZES), draw.choice(SIZES)
    sizes = {"HW": size, "CHW": (channels, *size), "one image": (channels, *size)}.get(
        kind, (batch, channels, *size)
    )
    image = random_image(*sizes, dtype=dtype, seed=seed)
    shape = (batch, 3, 3) if kind in ("NCHW", "one image") else (3, 3)
    given = dict(
        image=image,
        warp=matrices(draw, shape).to(draw.choice([torch.float64, torch.float64, torch.float32])),
    )
    given["dsize"] = draw.choice([[], size, [draw.choice(SIZES), draw.choice(SIZES)]])
    given["interpolation"] = draw.choice(INTERPOLATIONS)
    given["border_mode"] = draw.choice([*BORDERS, "transparent"])
    count = channels if image.dim() > 2 else 1
    given["border_value"] = draw.choice([None, [], 0.5, [0.25], [k / 4 for k in range(count)]])
    given["inverse_map"] = draw.random() < 0.5
    if given["border_mode"] == "transparent":
        result = (batch,) if image.dim() == 4 or len(shape) == 3 else ()
        result += (image.shape[-3],) if image.dim() > 2 else ()
        given["destination"] = random_image(
            *result, *(given["dsize"] or size), dtype=dtype, seed=seed + 1
        )
    return {k: strided(x, draw) if torch.is_tensor(x) else x for k, x in given.items()}


def change(given, draw):
    """Changes one argument, perhaps to one that is as right."""
    name = draw.choice(["arithmetic", *sorted(given)])
    value = given.get(name)
    if name in ("arithmetic", "interpolation", "border_mode"):
        value = draw.choice(WORDS)
    elif name == "dsize":
        value = draw.choice(DSIZES)
    elif name == "border_value":
        value = draw.choice([[1.0] * 5, [7.5], -3.0, 300.0])
    elif torch.is_tensor(value):
        way = draw.choice(["dtype", "shape", "dimension", "device", "entry"])
        if way == "dtype":
            value = value.to(draw.choice(OTHER_DTYPES))
        elif way == "shape":
            dimension = draw.randrange(value.dim())
            value = (
                value.repeat_interleave(2, dimension)
                if draw.random() < 0.5
                else value.narrow(dimension, 0, 0)
            )
        elif way == "dimension":
            value = value.unsqueeze(0) if draw.random() < 0.5 else value.flatten()
        elif way == "device":
            value = value.to("meta")
        elif value.numel() and value.is_floating_point():
            value = value.clone(memory_format=torch.contiguous_format)
            entry = torch.tensor(draw.choice(ENTRIES), dtype=torch.float64)
            value.view(-1)[draw.randrange(value.numel())] = entry.to(value.dtype)
    given[name] = value


def expected_of(given, dsize):
    """The reference's result, image by image."""
    image, warp = given["image"], given["warp"].double()
    images = image.reshape(
        -1, *([1] * (image.dim() == 2)), *image.shape[-(2 if image.dim() == 2 else 3) :]
    )
    warps = warp.reshape(-1, 3, 3)
    border = given["border_value"]
    border = 0.0 if border is None or border == [] else border
    border = as_dtype(torch.tensor(border, dtype=torch.float64), image.dtype).tolist()
    destination = given.get("destination")
    options = dsize, given["interpolation"], given["border_mode"], border, given["inverse_map"]
    results = []
    for n in range(max(len(images), len(warps))):
        kept = None
        if destination is not None:
            kept = destination.reshape(-1, images.shape[1], *dsize)[n]
        results.append(reference(images[n % len(images)], warps[n % len(warps)], *options, kept))
    return torch.stack(results)


def check(seed):
    draw = random.Random(seed)
    given = right_arguments(draw, seed)
    changed = draw.random() < 0.6
    if changed:
        change(given, draw)
    try:
        result = warp_perspective(**given)
    except RuntimeError as error:
        assert changed, error
        line = str(error).splitlines()[0]
        found = re.match(r"calcops::warp_perspective: expected `(\w+)` .*, got ", line)
        assert found and found[1] in {*given, "destination"}, line
        return
    dsize = tuple(given["dsize"] or given["image"].shape[-2:])
    assert result.shape[-2:] == dsize and result.dtype == given["image"].dtype
    is_exact = given.get("arithmetic", "exact") == "exact"
    if result.is_meta or not result.numel() or not given["image"].numel() or not is_exact:
        return
    # Other maps and pixels have tests of their own.
    pixels = [
        x for k, x in given.items() if k in ("image", "destination") and x.is_floating_point()
    ]
    warp = given["warp"].double()
    if changed and not (warp.isfinite().all() and torch.linalg.cond(warp).max() < 1e6):
        return
    if not all((x.abs() < 301).all() for x in pixels):
        return
    expected = as_dtype(expected_of(given, dsize).reshape(result.shape), result.dtype).double()
    atol = tolerance(result.dtype, given["interpolation"]) * (300 if changed else 1)
    rtol = torch.finfo(result.dtype).eps if changed and result.is_floating_point() else 0
    # Near the horizon, and between two pixels, the last bits of a matrix decide.
    is_sure = torch.ones_like(expected, dtype=torch.bool)
    for _ in range(3):
        signs = torch.tensor([draw.choice([-1.0, 1]) for _ in range(9)], dtype=torch.float64).view(
            3, 3
        )
        nearby = given | {"warp": warp * (1 + 2.0**-46 * signs)}
        beside = as_dtype(expected_of(nearby, dsize).reshape(result.shape), result.dtype).double()
        is_sure &= (expected - beside).abs() <= atol
    assert is_sure.double().mean() > 0.1 or result.numel() < 100
    torch.testing.assert_close(result.double()[is_sure], expected[is_sure], rtol=rtol, atol=atol)


def check_all(first, count):
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"check({seed}): {error}") from error


def test_any_call_gives_the_references_numbers_or_names_an_argument(one_thread):
    check_all(0, 3000)


@pytest.mark.long
def test_many_calls_give_the_references_numbers_or_name_an_argument(one_thread):
    check_all(3000, 300_000)
