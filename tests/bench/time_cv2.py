"""Time of cv2.warpPerspective in the environment that runs this, for bench_warp_perspective.py.

python time_cv2.py FOLDER

It reads image.npy and matrix.npy in FOLDER, writes result.npy there, and prints the version and
milliseconds.
"""

import sys
import time
from pathlib import Path

import cv2
import numpy as np

folder = Path(sys.argv[1])
image, matrix = np.load(folder / "image.npy"), np.load(folder / "matrix.npy")
cv2.setNumThreads(1)
least, end = float("inf"), time.perf_counter() + 1
while time.perf_counter() < end:
    start = time.thread_time()
    result = cv2.warpPerspective(image, matrix, image.shape[1::-1])
    least = min(least, 1e3 * (time.thread_time() - start))
np.save(folder / "result.npy", result)
print(cv2.__version__, least)
