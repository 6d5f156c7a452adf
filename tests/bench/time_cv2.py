"""Time cv2.warpPerspective of the environment that runs this script, for bench_warp_perspective.py.

    python time_cv2.py FOLDER

Reads image.npy and matrix.npy in FOLDER, writes result.npy there, and prints the version and the
milliseconds.
"""

import sys
import time
from pathlib import Path

import cv2
import numpy as np

folder = Path(sys.argv[1])
image = np.load(folder / "image.npy")
matrix = np.load(folder / "matrix.npy")
cv2.setNumThreads(1)
least = float("inf")
end = time.perf_counter() + 1
while time.perf_counter() < end:
    start = time.thread_time()
    result = cv2.warpPerspective(image, matrix, image.shape[1::-1])
    least = min(least, 1e3 * (time.thread_time() - start))
np.save(folder / "result.npy", result)
print(cv2.__version__, least)
