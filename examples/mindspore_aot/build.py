"""Build ATen's leaky_relu and our force for MindSpore's Custom operator of type "aot".

    python examples/mindspore_aot/build.py [--out build/mindspore_aot]

Prints the paths of leaky_relu_cpu.so, force_cpu.so and, where there is a GPU, leaky_relu_gpu.so.
"""

import argparse
import shutil
from pathlib import Path

import torch

import calcops_jit

FOLDER = Path(__file__).resolve().parent
# MindSpore closes a library that it needs no longer. Without this flag, PyTorch's libraries would
# be unloaded too, which they do not support.
STAY = "-Wl,-z,nodelete"


def build():
    yield calcops_jit.load("leaky_relu_cpu", [FOLDER / "leaky_relu.cpp"], extra_ldflags=[STAY]).path
    # The linker is called with --as-needed, and drops a library if the source uses no symbol of it.
    # It would drop that of the operators, and must drop torch_python, which follows.
    operators = ["-Wl,--no-as-needed", calcops_jit.library_path(), "-Wl,--as-needed"]
    header = FOLDER.parent.parent / "_calcops_jit" / "include"
    yield calcops_jit.load(
        "force_cpu",
        [FOLDER / "force.cpp"],
        extra_ldflags=[STAY, *operators],
        extra_include_paths=[header],
    ).path
    if torch.cuda.is_available():
        yield calcops_jit.load(
            "leaky_relu_gpu", [FOLDER / "leaky_relu.cu"], extra_ldflags=[STAY]
        ).path


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("build/mindspore_aot"))
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for library in build():
        print(shutil.copy(library, out))
