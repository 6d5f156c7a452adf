"""The second recipe: setuptools builds the operator's library.

    python setup.py build_ext --build-lib DIR

This makes DIR/warp_perspective.so for torch.ops.load_library("DIR/warp_perspective.so").
"""

import shlex
import subprocess

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

flags = shlex.split(
    subprocess.check_output(["pkg-config", "--cflags-only-I", "opencv4"], text=True)
)

setup(
    name="warp_perspective",
    ext_modules=[
        CppExtension(
            "warp_perspective",
            ["ext_ops.cc"],
            extra_compile_args=["-O3", *flags],
            libraries=["opencv_imgproc", "opencv_core"],
        )
    ],
    # A library of operators, not a Python module: no ABI suffix, and no PyInit function in it.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
