"""warp_perspective with arithmetic="opencv4" gives OpenCV 4's bits.

The checksums of OpenCV 4's results come from opencv4_reference.py. It ran in another environment,
because OpenCV 4 cannot be installed beside OpenCV 5.
"""

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
    """Return a call of opencv4_reference.py as arguments of the operator."""
    arguments = reference.case(seed)
    image = arguments["image"]
    value = arguments["border_value"]
    destination = arguments.pop("destination")
    arguments["image"] = torch.from_numpy(image).permute(2, 0, 1)
    arguments["warp"] = torch.from_numpy(np.ascontiguousarray(arguments["warp"]))
    arguments["border_value"] = [value[channel % 4] for channel in range(image.shape[2])]
    if destination is not None:
        arguments["destination"] = torch.from_numpy(destination).permute(2, 0, 1)
    return arguments


def wrong(checksums, seeds):
    """Return the seeds of the calls whose result differs from OpenCV's."""
    differing = []
    for seed in seeds:
        result = warp_perspective(**tensors(seed), arithmetic="opencv4").permute(1, 2, 0)
        if f"{reference.checksum(result.numpy()):08x}" != checksums[seed]:
            differing.append(seed)
    return differing


@pytest.mark.parametrize("number", range(len(reference.DTYPES)), ids=reference.DTYPES)
def test_results_are_those_of_opencv_4(number):
    checksums = REFERENCE["checksums"]
    assert not wrong(checksums, range(number, len(checksums), len(reference.DTYPES)))


def test_the_reference_is_opencv_4_12_which_computes_every_call_in_one_way():
    assert REFERENCE["opencv"] == "4.12.0"
    assert not REFERENCE["differences"]


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
    w_zero_in_column_1 = [[1, 0, 1], [0, 1, 1], [1, 0, -1]]
    assert warped(w_zero_in_column_1, border_value=[7.0], inverse_map=True) == [[7, 10, 7]]


def test_a_nan_coordinate_is_the_left_border_in_groups_of_16_pixels_and_the_right_one_after_them():
    nan_x = [[1, 0, math.nan], [0, 1, 0], [0, 0, 1]]
    result = warped(nan_x, (1, 18), inverse_map=True, border_mode="replicate")
    assert result == [[10] * 16 + [30] * 2]


def test_a_border_value_beyond_int32_or_nan_is_the_least_pixel():
    far = [[1, 0, 100], [0, 1, 0], [0, 0, 1]]
    assert warped(far, (1, 1), border_value=[300.0]) == [[255]]
    for value in (3e9, -3e9, math.nan):
        assert warped(far, (1, 1), border_value=[value]) == [[0]]


def test_a_tap_of_weight_zero_counts():
    image = torch.tensor([[1.0, math.inf]])
    assert math.isnan(warped(torch.eye(3).tolist(), (1, 1), image)[0][0])


def test_transparent_interpolates_the_last_row_and_column_from_the_taps_inside_the_image():
    half_and_quarter = [[1, 0, -0.5], [0, 1, -0.25], [0, 0, 1]]
    destination = torch.zeros((3, 4), dtype=IMAGE.dtype)
    options = dict(border_mode="transparent", destination=destination)
    assert warped(half_and_quarter, (3, 4), **options) == [
        [23, 33, 38, 0],
        [45, 55, 60, 0],
        [0, 0, 0, 0],
    ]


def test_transparent_loses_the_sign_of_zeros_in_the_last_row_and_column():
    zeros = torch.full((2, 2), -0.0)
    options = dict(image=zeros, border_mode="transparent", destination=torch.ones(2, 2))
    assert str(warped(torch.eye(3).tolist(), (2, 2), **options)) == "[[-0.0, 0.0], [0.0, 0.0]]"


def test_batches_and_strided_images_give_the_results_of_single_images():
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (2, 3, 9, 11), generator=generator).to(torch.uint8)
    warps = torch.tensor(
        [[[1, 0.2, -1.3], [0.1, 1, 0.4], [0.01, 0, 1]], [[0, 1, 0], [1, 0, 0], [0, 0, 1]]]
    )

    def wrapped(image, warp):
        return warp_perspective(image, warp, [12, 40], "linear", "wrap", arithmetic="opencv4")

    result = wrapped(image, warps)
    for i in range(2):
        assert torch.equal(result[i], wrapped(image[i], warps[i]))
    for strided in (image.to(memory_format=torch.channels_last), image.mT.contiguous().mT):
        assert torch.equal(result, wrapped(strided, warps))
    assert warp_perspective(image, warps, [0, 4], arithmetic="opencv4").shape == (2, 3, 0, 4)


def test_an_image_without_pixels_gives_border_value_or_the_destination():
    empty = torch.empty(0, 4)
    warp = torch.eye(3)
    for mode in ("constant", "reflect"):
        filled = warp_perspective(empty, warp, [2, 2], "linear", mode, [5.0], arithmetic="opencv4")
        assert filled.tolist() == [[5, 5], [5, 5]]
    destination = torch.rand(2, 2)
    options = dict(border_mode="transparent", destination=destination, arithmetic="opencv4")
    assert torch.equal(warp_perspective(empty, warp, [2, 2], **options), destination)


def test_opcheck_passes_for_the_operator():
    image = torch.rand(2, 5, 7)
    warp = torch.tensor([[1, 0.2, -1.3], [0.1, 1, 0.4], [0.01, 0, 1]])
    torch.library.opcheck(
        warp_perspective.default, (image, warp, [4, 6]), {"arithmetic": "opencv4"}
    )


WHERE = ' where `arithmetic` is "opencv4"'


@pytest.mark.parametrize(
    "options, message",
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
                f"expected `image` uint8, uint16, int16, float32 or float64{WHERE}, got {name}",
            )
            for dtype, name in ((torch.float16, "Half"), (torch.bfloat16, "BFloat16"))
        ],
    ],
)
def test_options_that_opencv_does_not_have_are_refused(options, message):
    arguments = dict(image=torch.ones(2, 2), warp=torch.eye(3), dsize=[2, 2], arithmetic="opencv4")
    with pytest.raises(RuntimeError) as error:
        warp_perspective(**arguments | options)
    assert f"calcops::warp_perspective: {message}" in str(error.value)


@pytest.mark.parametrize("name", ["image", "warp", "destination"])
def test_derivatives_are_refused(name):
    arguments = dict(image=torch.ones(2, 2), warp=torch.eye(3), destination=torch.ones(2, 2))
    options = dict(dsize=[2, 2], border_mode="transparent", arithmetic="opencv4")
    message = (
        f'calcops::warp_perspective: expected `arithmetic` "exact" where `{name}` has '
        'a derivative, got "opencv4"'
    )

    def warped(value):
        return warp_perspective(**arguments | {name: value}, **options)

    with pytest.raises(RuntimeError, match=re.escape(message)):
        warped(arguments[name].requires_grad_())
    value = arguments[name].detach()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.func.jvp(warped, (value,), (value,))
    with torch.no_grad():
        warp_perspective(**arguments, **options)


def has_other_arithmetic(dtype, interpolation, channels, border):
    """Return True if OpenCV 4.14 may leave such a call to IPP, or use fma in it.

    opencv4_reference.py describes these cases.
    """
    linear = interpolation == "linear"
    if linear and channels == 1 and dtype in ("uint16", "int16", "float32"):
        return True
    if border not in ("constant", "replicate", "transparent"):
        return False
    if dtype == "int16":
        return channels in (1, 4) or (channels == 3 and not linear)
    return dtype == "uint16" and channels == 4 and linear


@pytest.mark.long
@pytest.mark.parametrize("version", ["4.12.0.88", "4.14.0.94"])
def test_10000_random_results_are_those_of_opencv_4(version):
    folder = ROOT / "build" / "opencv4" / version
    subprocess.run(["make", "-C", ROOT, f"build/opencv4/{version}/ready"], check=True)
    script = [folder / "bin/python", reference.__file__, "10000"]
    report = json.loads(subprocess.check_output(script, text=True))
    print(f"\nOpenCV {report['opencv']}; kinds of calls that it computes with other arithmetic:")
    print("kind, calls, values that differ, largest distance")
    for kind, (calls, values, far) in report["differences"]:
        print(f"{' '.join(map(str, kind)):40} {calls:5} {values:9} {far:9.3g}")
    assert not wrong(report["checksums"], range(len(report["checksums"])))
    kinds = {tuple(kind) for kind, _ in report["differences"]}
    if version.startswith("4.12"):
        assert not kinds
    else:
        assert kinds
        assert all(has_other_arithmetic(*kind) for kind in kinds)
