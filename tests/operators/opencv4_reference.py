"""Random calls of warp_perspective, and what OpenCV 4 makes of them. OpenCV 4 and 5 cannot be in
one environment, so

    python tests/operators/opencv4_reference.py 600 > tests/operators/opencv4_reference.json

runs where opencv-python-headless 4.12.0.88 is installed, and needs NumPy besides. For each of the
first 600 calls it prints the CRC-32 of the result, and for each kind of call that is computed in
another way, how that differs.

OpenCV 4.9 to 4.12 computes every call in one way on every x86-64. (4.5 left the pixels of the last
row and column alone under "transparent".) From 4.13 on, the wheels leave some kinds to Intel's IPP
(hal/ipp/src/warp_ipp.cpp), which does not round positions to 1/32 pixel; in 4.14,
cv2.ipp.setUseIPP(False) ends that. From 4.14 on, "linear" of one channel of uint16, int16 or
float32 is summed from the last tap to the first, by fma where there is AVX2, 4, 8 or 16 pixels at
once; what is left over is summed as before (imgwarp.simd.hpp). OPENCV_CPU_DISABLE=AVX512-SKX and
=AVX512-SKX,AVX2 show three results on one processor. Neither happens to an image with other numbers
of channels, so `_plain` adds some.
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
    """A map from an image to a result of these sizes, or from there to here, of any of these
    kinds."""
    kind = draw.randint(18)
    matrix = np.eye(3)
    if kind == 0:
        matrix[:2, 2] = draw.randint(-640, 640, 2) / draw.choice([1, 2, 7, 32, 64])
    elif kind == 1:
        matrix[[0, 1], [0, 1]] = draw.choice([-1, 1e-3, 0.5, 1, 2, 3, 1e3], 2)
    elif kind == 2:
        # singular; by rounding, perhaps.
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
    """Arguments of a call, as NumPy's: the image is [H, W, C]."""
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
    image, destination = pixels(*size, channels).astype(dtype), pixels(*out, channels).astype(dtype)
    if dtype.kind == "f" and draw.randint(6) == 0:
        image[draw.uniform(size=image.shape) < 0.05] = draw.choice([np.nan, np.inf, -0.0])
    value = draw.choice([0, 1, 100.5, -7, 300.25, 7e4, 1e10, -1e10, np.nan], 4) * draw.randint(2)
    return {
        "image": image,
        "warp": _matrix(draw, size, out),
        "dsize": out,
        "interpolation": INTERPOLATIONS[draw.randint(len(INTERPOLATIONS))],
        "border_mode": (border := BORDERS[draw.randint(len(BORDERS))]),
        "border_value": value,  # of channels 0 to 3; OpenCV gives channel 4 that of channel 0
        "inverse_map": bool(draw.randint(2)),
        "destination": destination if border == "transparent" else None,
    }


def checksum(result):
    """Of a result [h, w, C]; any NaN is as good as another."""
    if result.dtype.kind == "f":
        result = np.where(np.isnan(result), result.dtype.type(np.nan), result)
    return zlib.crc32(np.ascontiguousarray(result).tobytes())


def _direct(
    cv2, image, warp, dsize, interpolation, border_mode, border_value, inverse_map, destination
):
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
    channels = image.shape[2]
    wanted = np.arange(2 if channels <= 2 else 5) % channels
    image, destination = (x if x is None else np.take(x, wanted, 2) for x in (image, destination))
    return _direct(cv2, image=image, destination=destination, **arguments)[..., :channels]


def _distance(a, b, image):
    """Where results differ, and how far: of floating images in units of their largest pixel."""
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | (a != a) & (b != b)
    if same.all():
        return 0, 0.0
    unit = np.abs(image[np.isfinite(image)]).max(initial=0) if image.dtype.kind == "f" else 1
    with np.errstate(all="ignore"):
        far = np.abs(a.astype(float) - b.astype(float))[~same] / float(unit)
    return int((~same).sum()), float(np.nan_to_num(far, nan=np.inf).max())


def _main(count):
    import cv2

    checksums, differences = [], {}
    for seed in range(count):
        arguments = case(seed)
        image, destination = arguments["image"], arguments["destination"]
        kept = None if destination is None else destination.copy()
        plain = _plain(cv2, **arguments)
        values, far = _distance(_direct(cv2, **arguments | {"destination": kept}), plain, image)
        checksums.append(f"{checksum(plain):08x}")
        if values:
            kind = (
                str(image.dtype),
                arguments["interpolation"],
                image.shape[2],
                arguments["border_mode"],
            )
            calls, before, farthest = differences.get(kind, (0, 0, 0.0))
            differences[kind] = calls + 1, before + values, max(farthest, far)
    found = {
        "opencv": cv2.__version__,
        "differences": sorted(differences.items()),
        "checksums": checksums,
    }
    print(textwrap.fill(json.dumps(found), 120))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
