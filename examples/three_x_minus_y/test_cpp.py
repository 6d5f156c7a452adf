"""The operators forward(x, y) = 3x - y and backward(gradOutput), of any device and dtype.

`import test_cpp` loads the library that `pip install .` built (setup.py). Without one calcops_jit
builds it, once, from the file in this folder.
"""

from pathlib import Path

import torch

folder = Path(__file__).parent
if (folder / "_test_cpp.so").exists():
    torch.ops.load_library(folder / "_test_cpp.so")
else:
    import calcops_jit

    calcops_jit.load("test_cpp", [folder / "my_op.cpp"])

forward, backward = torch.ops.test_cpp.forward, torch.ops.test_cpp.backward
