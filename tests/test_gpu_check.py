"""bench/gpu_check.py says what a fresh clone lacks, a line each and without a traceback."""

import sys
import sysconfig

import pytest
from programs import ROOT, run

CHECK = ROOT / "bench" / "gpu_check.py"


def lines(*folders):
    """Return what gpu_check.py prints in a Python that has only the packages in these folders."""
    path = ":".join(map(str, (ROOT, *folders)))
    variables = {"PYTHONPATH": path, "PATH": "/nowhere", "CUDA_HOME": "/nowhere"}
    printed = run(sys.executable, "-S", CHECK, fails=True, **variables).stderr
    assert all(line.startswith("gpu_check: ") for line in printed.splitlines()), printed
    return printed


def test_a_python_without_packages_is_told_each_of_them():
    printed = lines()
    for name in ("pytest", "NumPy", "ninja", "C++ compiler", "compute-sanitizer", "PyTorch"):
        assert printed.count(name) >= 1, printed
    assert "make venv, or name a Python that has it, make gpu-check PYTHON=" in printed


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "class version: cuda = None\n__version__ = '2.15.0+cpu'",
            "PyTorch 2.15.0+cpu is a build without CUDA",
        ),
        ("raise OSError('libcudart.so: not found')", "cannot be imported: libcudart.so: not found"),
    ],
)
def test_a_pytorch_that_cannot_use_a_gpu_is_named(source, message, tmp_path):
    (tmp_path / "torch.py").write_text(source)
    assert message in lines(tmp_path)


def test_the_packages_of_the_checkout_are_importable_without_an_installation(tmp_path):
    program = "import calcops.potentials, calcops.graph; print(calcops.potentials.__file__)"
    path = f"{ROOT}:{sysconfig.get_path('purelib')}"
    printed = run(sys.executable, "-S", "-c", program, cwd=tmp_path, PYTHONPATH=path).stdout
    assert printed == f"{ROOT}/calcops/potentials/__init__.py\n"
