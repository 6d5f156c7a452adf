"""Random calls of warp_perspective and OpenCV 4's results for them.

OpenCV 4 and 5 cannot be installed in one environment. So this command needs an environment with
opencv-python-headless 4.12.0.88 and NumPy:

    python tests/operators/opencv4_reference.py 600 > tests/operators/opencv4_reference.json

It prints the CRC-32 of the result of each of the first 600 calls. Some versions of OpenCV compute
some kinds of calls with other arithmetic. For each of these kinds, the command also prints how far
the result differs from that of the usual arithmetic.

- OpenCV 4.9 to 4.12 uses the usual arithmetic for every call on every x86-64. (With "transparent",
  4.5 does not write the pixels of the last row and column.)
- From 4.13 on, the wheels leave some kinds to Intel's IPP (hal/ipp/src/warp_ipp.cpp), which does
  not round positions to 1/32 pixel. In 4.14, cv2.ipp.setUseIPP(False) switches IPP off.
- From 4.14 on, "linear" of one channel of uint16, int16 or float32 adds the taps from the last to
  the first, with fma if there is AVX2, for 4, 8 or 16 pixels at once. The remaining pixels are
  summed as before (imgwarp.simd.hpp). OPENCV_CPU_DISABLE=AVX512-SKX and =AVX512-SKX,AVX2 show three
  different results on one processor.

These exceptions depend on the number of channels. With two or five channels the arithmetic is the
usual one, so `_plain` adds channels to the image.
"""

import json
import sys
import textwrap
import zlib

import numpy as np

DTYPES = ["uint8", "uint16", "int16", "float32", "float64"]
BORDERS = ["constant", "replicate", "reflect", "wrap", "reflect_101", "transparent"]
INTERPOLATIONS = ["linear", "linear", "nearest"]


def _matrix(draw, size, out):
    """Return a random matrix between an image and a result of these sizes, of one of ten kinds."""
    kind = draw.randint(18)
    matrix = np.eye(3)
    if kind == 0:
        matrix[:2, 2] = draw.randint(-640, 640, 2) / draw.choice([1, 2, 7, 32, 64])
    elif kind == 1:
        matrix[[0, 1], [0, 1]] = draw.choice([-1, 1e-3, 0.5, 1, 2, 3, 1e3], 2)
    elif kind == 2:
        # Singular. With the factor 0.1, rounding may make it nearly singular.
        matrix = np.array([[1, 2, 3], [2, 4, 6], [0, 0, 1]]) * draw.choice([0.1, 1])
    elif kind == 3:
        matrix = draw.randint(-1, 2, (3, 3)) * draw.choice([0.0, 1.0])
    elif kind == 4:
        matrix[2] = [*draw.randint(-3, 4, 2), -draw.randint(30)]  # W is 0 in the picture
    elif kind == 5:
        matrix[draw.randint(3), draw.randint(3)] = draw.choice([np.nan, np.inf, -np.inf])
    elif kind == 6:
        matrix = draw.standard_normal((3, 3)) * 10.0 ** draw.randint(-5, 12, (3, 3))
    elif kind == 7:
        matrix = (matrix + draw.standard_normal((3, 3)) / 10) * 10.0 ** draw.randint(-320, 300)
    elif kind == 8:
        turn = draw.uniform(0, 7)
        matrix[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        matrix[:2, 2] = np.array(size[::-1]) / 2 - matrix[:2, :2] @ np.array(out[::-1]) / 2
    else:
        across, down = min(size[1], out[1]), min(size[0], out[0])
        spread = [[0.2, 0.2, across / 5], [0.2, 0.2, down / 5], [0.3 / out[1], 0.3 / out[0], 0.1]]
        matrix = matrix + draw.standard_normal((3, 3)) * spread
    return matrix


def case(seed):
    """Return the arguments of a random call as NumPy's arrays; the image is [H, W, C]."""
    draw = np.random.RandomState(seed)
    dtype = np.dtype(DTYPES[seed % len(DTYPES)])
    lengths = [2, 30, 300, 300, 300]
    size, out = (draw.randint(1, draw.choice(lengths, 2) + 1).tolist() for _ in range(2))
    if draw.randint(20) == 0:
        out = draw.randint([1, 300], [4, 2500]).tolist()
    channels = draw.choice([1, 1, 2, 3, 4, 5])

    def pixels(*shape):
        if dtype.kind == "f":
            return draw.standard_normal(shape) * scale
        return draw.randint(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape)

    scale = draw.choice([1, 255, 1e30])
    image = pixels(*size, channels).astype(dtype)
    destination = pixels(*out, channels).astype(dtype)
    if dtype.kind == "f" and draw.randint(6) == 0:
        image[draw.uniform(size=image.shape) < 0.05] = draw.choice([np.nan, np.inf, -0.0])
    # The values of channels 0 to 3. OpenCV uses the value of channel 0 for channel 4.
    value = draw.choice([0, 1, 100.5, -7, 300.25, 7e4, 1e10, -1e10, np.nan], 4) * draw.randint(2)
    warp = _matrix(draw, size, out)
    interpolation = INTERPOLATIONS[draw.randint(len(INTERPOLATIONS))]
    border_mode = BORDERS[draw.randint(len(BORDERS))]
    return {
        "image": image,
        "warp": warp,
        "dsize": out,
        "interpolation": interpolation,
        "border_mode": border_mode,
        "border_value": value,
        "inverse_map": bool(draw.randint(2)),
        "destination": destination if border_mode == "transparent" else None,
    }


def checksum(result):
    """Return the CRC-32 of a result [h, w, C], in which all NaN count as equal."""
    if result.dtype.kind == "f":
        result = np.where(np.isnan(result), result.dtype.type(np.nan), result)
    return zlib.crc32(np.ascontiguousarray(result).tobytes())


def _direct(
    cv2, image, warp, dsize, interpolation, border_mode, border_value, inverse_map, destination
):
    """Return OpenCV's result for the image as it is."""
    flags = {"linear": cv2.INTER_LINEAR, "nearest": cv2.INTER_NEAREST}[interpolation]
    if destination is not None and image.shape[2] == 1:
        destination = destination[..., 0]
    border = getattr(cv2, "BORDER_" + border_mode.upper())
    result = cv2.warpPerspective(
        image,
        warp,
        dsize[::-1],
        dst=destination,
        flags=flags | (cv2.WARP_INVERSE_MAP if inverse_map else 0),
        borderMode=border,
        borderValue=border_value.tolist(),
    )
    return result.reshape(*dsize, image.shape[2])


def _plain(cv2, image, destination, **arguments):
    """Return OpenCV's result by the usual arithmetic: for an image of two or five channels.

    The channels of the image are repeated, and those of the result are cut off again.
    """
    channels = image.shape[2]
    repeated = np.arange(2 if channels <= 2 else 5) % channels
    image = np.take(image, repeated, 2)
    if destination is not None:
        destination = np.take(destination, repeated, 2)
    return _direct(cv2, image=image, destination=destination, **arguments)[..., :channels]


def _distance(a, b, image):
    """Return how many values differ, and by how much at most.

    The unit is 1 for integers, and for floating-point images their largest pixel.
    """
    same_number = (a == b) & (np.signbit(a) == np.signbit(b))
    same = same_number | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0, 0.0
    unit = np.abs(image[np.isfinite(image)]).max(initial=0) if image.dtype.kind == "f" else 1
    with np.errstate(all="ignore"):
        far = np.abs(a.astype(float) - b.astype(float))[~same] / float(unit)
    return int((~same).sum()), float(np.nan_to_num(far, nan=np.inf).max())


def _main(count):
    import cv2

    checksums = []
    differences = {}  # {kind of call: (calls, values that differ, largest distance)}
    for seed in range(count):
        arguments = case(seed)
        image = arguments["image"]
        plain = _plain(cv2, **arguments)
        if arguments["destination"] is not None:
            arguments["destination"] = arguments["destination"].copy()  # OpenCV writes to it
        values, far = _distance(_direct(cv2, **arguments), plain, image)
        checksums.append(f"{checksum(plain):08x}")
        if values:
            kind = (
                str(image.dtype),
                arguments["interpolation"],
                image.shape[2],
                arguments["border_mode"],
            )
            calls, all_values, farthest = differences.get(kind, (0, 0, 0.0))
            differences[kind] = calls + 1, all_values + values, max(farthest, far)
    report = {
        "opencv": cv2.__version__,
        "differences": sorted(differences.items()),
        "checksums": checksums,
    }
    print(textwrap.fill(json.dumps(report), 120))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
