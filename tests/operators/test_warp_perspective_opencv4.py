"""warp_perspective with arithmetic="opencv4" gives OpenCV 4's bits. What those are was found out
elsewhere (opencv4_reference.py), for OpenCV 4 and 5 cannot be in one environment."""

import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import opencv4_reference as reference
import pytest
import torch

import calcops_jit  # noqa: F401 - registers the operator

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = json.loads((ROOT / "tests/operators/opencv4_reference.json").read_text())
warp_perspective = torch.ops.calcops.warp_perspective


def tensors(seed):
    """A call of opencv4_reference.py as arguments of the operator."""
    arguments = reference.case(seed)
    image, destination, value = (
        arguments.pop(name) for name in ("image", "destination", "border_value")
    )
    arguments["image"] = torch.from_numpy(image).permute(2, 0, 1)
    arguments["warp"] = torch.from_numpy(np.ascontiguousarray(arguments["warp"]))
    arguments["border_value"] = [value[channel % 4] for channel in range(image.shape[2])]
    if destination is not None:
        arguments["destination"] = torch.from_numpy(destination).permute(2, 0, 1)
    return arguments


def wrong(checksums, seeds):
    """The calls whose result is another than OpenCV's."""
    found = {
        seed: warp_perspective(**tensors(seed), arithmetic="opencv4").permute(1, 2, 0)
        for seed in seeds
    }
    return [
        seed
        for seed in seeds
        if f"{reference.checksum(found[seed].numpy()):08x}" != checksums[seed]
    ]


@pytest.mark.parametrize("number", range(len(reference.DTYPES)), ids=reference.DTYPES)
def test_results_are_those_of_opencv_4(number):
    checksums = REFERENCE["checksums"]
    assert not wrong(checksums, range(number, len(checksums), len(reference.DTYPES)))


def test_the_reference_is_of_one_way_of_computing():
    assert REFERENCE["opencv"] == "4.12.0" and not REFERENCE["differences"]


IMAGE = torch.tensor([[10, 20, 30], [40, 50, 60]], dtype=torch.uint8)


def warped(matrix, dsize=(1, 3), image=IMAGE, **options):
    warp = torch.tensor(matrix, dtype=torch.float64)
    return warp_perspective(image, warp, dsize, arithmetic="opencv4", **options).tolist()


def test_positions_are_rounded_to_a_32nd_of_a_pixel():
    def shifted(shift):
        return warped([[1, 0, -shift], [0, 1, 0], [0, 0, 1]], (1, 1), IMAGE * 1.0)

    assert shifted(0.25) == shifted(0.25 + 0.0156) == [[12.5]]
    assert shifted(0.25 + 0.0157) == [[10 + 10 * 9 / 32]]


def test_a_matrix_that_cannot_be_inverted_shows_the_first_pixel_everywhere():
    assert warped([[1, 2, 3], [2, 4, 6], [0, 0, 1]]) == [[10, 10, 10]]
    assert warped([[0, 0, 0]] * 3, inverse_map=True) == [[10, 10, 10]]


def test_where_w_is_zero_the_first_pixel_is_shown():
    assert warped([[1, 0, 1], [0, 1, 1], [1, 0, -1]], border_value=[7.0], inverse_map=True) == [
        [7, 10, 7]
    ]


def test_nan_is_far_to_the_left_in_sixteen_pixels_at_once_and_far_to_the_right_in_what_is_left_over():
    options = dict(inverse_map=True, border_mode="replicate")
    assert warped([[1, 0, math.nan], [0, 1, 0], [0, 0, 1]], (1, 18), **options) == [
        [10] * 16 + [30] * 2
    ]


def test_a_border_value_that_no_int_holds_is_the_least_pixel():
    far = [[1, 0, 100], [0, 1, 0], [0, 0, 1]]
    assert [warped(far, (1, 1), border_value=[v]) for v in (300.0, 3e9, -3e9, math.nan)] == [
        [[255]],
        *[[[0]]] * 3,
    ]


def test_a_tap_of_weight_zero_is_used():
    image = torch.tensor([[1.0, math.inf]])
    assert math.isnan(warped(torch.eye(3).tolist(), (1, 1), image)[0][0])


def test_transparent_takes_the_last_row_and_column_from_the_taps_inside_and_loses_the_sign_of_zero():
    def kept(*size):
        return dict(border_mode="transparent", destination=torch.zeros(size).to(IMAGE.dtype))

    half_and_quarter = [[1, 0, -0.5], [0, 1, -0.25], [0, 0, 1]]
    assert warped(half_and_quarter, (3, 4), **kept(3, 4)) == [
        [23, 33, 38, 0],
        [45, 55, 60, 0],
        [0, 0, 0, 0],
    ]
    zeros = torch.full((2, 2), -0.0)
    options = dict(image=zeros, border_mode="transparent", destination=torch.ones(2, 2))
    assert str(warped(torch.eye(3).tolist(), (2, 2), **options)) == "[[-0.0, 0.0], [0.0, 0.0]]"


def test_batches_strides_and_empty_images():
    image = torch.randint(0, 256, (2, 3, 9, 11), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    warps = torch.tensor(
        [[[1, 0.2, -1.3], [0.1, 1, 0.4], [0.01, 0, 1]], [[0, 1, 0], [1, 0, 0], [0, 0, 1]]]
    )
    result = warp_perspective(image, warps, [12, 40], "linear", "wrap", arithmetic="opencv4")
    for i in range(2):
        alone = warp_perspective(
            image[i], warps[i], [12, 40], "linear", "wrap", arithmetic="opencv4"
        )
        assert torch.equal(result[i], alone)
    for strided in (image.to(memory_format=torch.channels_last), image.mT.contiguous().mT):
        assert torch.equal(
            result,
            warp_perspective(strided, warps, [12, 40], "linear", "wrap", arithmetic="opencv4"),
        )
    empty, warp = torch.empty(0, 4), torch.eye(3)
    for mode in ("constant", "reflect"):
        filled = warp_perspective(empty, warp, [2, 2], "linear", mode, [5.0], arithmetic="opencv4")
        assert filled.tolist() == [[5, 5], [5, 5]]
    kept = torch.rand(2, 2)
    transparent = dict(border_mode="transparent", destination=kept, arithmetic="opencv4")
    assert torch.equal(warp_perspective(empty, warp, [2, 2], **transparent), kept)
    assert warp_perspective(image, warps, [0, 4], arithmetic="opencv4").shape == (2, 3, 0, 4)


def test_the_operator_is_as_pytorch_wants_it():
    image, warp = torch.rand(2, 5, 7), torch.tensor([[1, 0.2, -1.3], [0.1, 1, 0.4], [0.01, 0, 1]])
    torch.library.opcheck(
        warp_perspective.default, (image, warp, [4, 6]), {"arithmetic": "opencv4"}
    )


WHERE = ' where `arithmetic` is "opencv4"'


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(arithmetic="opencv5"), 'expected `arithmetic` "exact" or "opencv4", got "opencv5"'),
        (
            dict(interpolation="cubic"),
            f'expected `interpolation` "linear" or "nearest"{WHERE}, got "cubic"',
        ),
        (
            dict(image=torch.ones(1, 32767)),
            f"expected `image` of less than 32767 columns{WHERE}, got [1, 32767]",
        ),
        *[
            (
                dict(image=torch.ones(2, 2, dtype=dtype)),
                (f"expected `image` uint8, uint16, int16, float32 or float64{WHERE}, got {name}"),
            )
            for dtype, name in ((torch.float16, "Half"), (torch.bfloat16, "BFloat16"))
        ],
    ],
)
def test_what_opencv_does_not_have_is_refused(options, says):
    arguments = (
        dict(image=torch.ones(2, 2), warp=torch.eye(3), dsize=[2, 2], arithmetic="opencv4")
        | options
    )
    with pytest.raises(RuntimeError) as error:
        warp_perspective(**arguments)
    assert f"calcops::warp_perspective: {says}" in str(error.value)


@pytest.mark.parametrize("name", ["image", "warp", "destination"])
def test_derivatives_are_refused(name):
    arguments = dict(image=torch.ones(2, 2), warp=torch.eye(3), destination=torch.ones(2, 2))
    options = dict(dsize=[2, 2], border_mode="transparent", arithmetic="opencv4")
    says = (
        f'calcops::warp_perspective: expected `arithmetic` "exact" where `{name}` has '
        'a derivative, got "opencv4"'
    )
    with pytest.raises(RuntimeError, match=re.escape(says)):
        warp_perspective(**arguments | {name: arguments[name].requires_grad_()}, **options)
    value = arguments[name].detach()
    with pytest.raises(RuntimeError, match=re.escape(says)):
        torch.func.jvp(
            lambda x: warp_perspective(**arguments | {name: x}, **options), (value,), (value,)
        )
    with torch.no_grad():
        warp_perspective(**arguments, **options)


def left_to_others(dtype, interpolation, channels, border):
    """Whether OpenCV 4.14 may leave such a call to IPP, or compute it in vectors of fma."""
    linear = interpolation == "linear"
    ipp = dtype == "int16" and (channels in (1, 4) or (channels == 3 and not linear))
    ipp = (ipp or (dtype == "uint16" and channels == 4 and linear)) and border in (
        "constant",
        "replicate",
        "transparent",
    )
    return ipp or (linear and channels == 1 and dtype in ("uint16", "int16", "float32"))


@pytest.mark.long
@pytest.mark.parametrize("version", ["4.12.0.88", "4.14.0.94"])
def test_10000_random_results_are_those_of_opencv_4(version):
    folder = ROOT / "build" / "opencv4" / version
    subprocess.run(["make", "-C", ROOT, f"build/opencv4/{version}/ready"], check=True)
    script = [folder / "bin/python", reference.__file__, "10000"]
    found = json.loads(subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(
        f"\nOpenCV {found['opencv']}; kinds of calls that it computes in more "
        "than one way: calls, values, how far"
    )
    for kind, (calls, values, far) in found["differences"]:
        print(f"{' '.join(map(str, kind)):40} {calls:5} {values:9} {far:9.3g}")
    assert not wrong(found["checksums"], range(len(found["checksums"])))
    others = {tuple(kind) for kind, _ in found["differences"]}
    assert (
        not others
        if version.startswith("4.12")
        else others and all(left_to_others(*kind) for kind in others)
    )
