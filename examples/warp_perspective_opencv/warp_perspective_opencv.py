"""An operator over OpenCV: built, compared with our own, scripted, run by a C++ program.

    python examples/warp_perspective_opencv/warp_perspective_opencv.py [--out
    build/warp_perspective_opencv]

README.md beside this file shows what the script prints.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import calcops_jit

FOLDER, TORCH = Path(__file__).resolve().parent, torch.__path__[0]


def load():
    """How to link a third-party library: its headers, its name, and its folder if not standard."""
    ask = ["pkg-config", "--cflags-only-I", "opencv4"]
    if not shutil.which("pkg-config") or subprocess.run(ask, capture_output=True).returncode:
        sys.exit(
            "skipped: no OpenCV headers; "
            "apt-get install --no-install-recommends libopencv-dev pkg-config"
        )
    include = subprocess.check_output(ask, text=True).replace("-I", "").split()
    return calcops_jit.load(
        "warp_perspective",
        [FOLDER / "ext_ops.cc"],
        extra_include_paths=include,
        # A library elsewhere needs "-L/opt/lib", "-Wl,-rpath,/opt/lib" too.
        extra_ldflags=["-lopencv_imgproc", "-lopencv_core"],
    )


def compile_host(library, out):
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        "-std=c++20",
        "-O2",
        FOLDER / "myops_add.cc",
    ]
    command += [
        "-o",
        out / "myops_add",
        f"-I{TORCH}/include",
        f"-I{TORCH}/include/torch/csrc/api/include",
    ]
    # The program names no symbol of the library, whose operators register themselves: the linker
    # would leave it out.
    command += [
        "-Wl,--no-as-needed",
        library,
        "-Wl,--as-needed",
        f"-L{TORCH}/lib",
        f"-Wl,-rpath,{TORCH}/lib",
    ]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    return out / "myops_add"


def warp(image, matrix):
    return torch.ops.my_ops.warp_perspective(image, matrix, [2, 2])


def compute(x, y):
    return torch.ops.myops.add(x, y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("build/warp_perspective_opencv"))
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    library = load().path

    torch.manual_seed(0)
    image = torch.randn(32, 32)
    print(
        "my_ops.warp_perspective(image, warp): "
        f"{list(torch.ops.my_ops.warp_perspective(image, torch.eye(3)).shape)}"
    )
    matrices = {"a shift by whole pixels": [[1.0, 0, -3], [0, 1, 2], [0, 0, 1]]}
    matrices["a perspective"] = [[0.9, 0.1, 2], [-0.1, 1.1, -1], [0.001, 0.002, 1]]
    for name, matrix in matrices.items():
        opencv = torch.ops.myops.warp_perspective(image, torch.tensor(matrix), [24, 40])
        ours = calcops_jit.warp_perspective(image, torch.tensor(matrix), [24, 40])
        difference = (opencv - ours).abs().max()
        print(f"{name:24} largest difference from calcops_jit.warp_perspective {difference:.4f}")

    warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
    scripted = torch.jit.script(compute)
    print(scripted.graph, flush=True)  # before what the program prints
    scripted.save(f"{out}/compute_scripted.pt")
    torch.jit.script(warp).save(f"{out}/warp_scripted.pt")
    subprocess.run(
        [compile_host(library, out), "compute_scripted.pt", "warp_scripted.pt"], cwd=out, check=True
    )
