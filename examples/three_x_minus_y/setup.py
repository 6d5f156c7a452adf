"""The second recipe: a package that needs no CalcOps.

    pip install --no-build-isolation .

Then `import test_cpp`. With --no-build-isolation pip builds the extension for the PyTorch that is
installed, not for one that it fetches to build with.
"""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name="test_cpp",
    version="1.0",
    py_modules=["test_cpp"],
    ext_modules=[CppExtension("_test_cpp", ["my_op.cpp"], extra_compile_args=["-O3"])],
    # A library of operators, not a Python module: no ABI suffix, and no PyInit function in it.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
