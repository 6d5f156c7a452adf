import os

import pytest
import torch
from checkout import Checkout, the_zygote
from kernels import Emulated, OnGpu
from reference import DEVICES

# In a process that test_cuda_on_cpu.py starts: the file for the names of the kernels that ran.
EMULATED = os.environ.get("CALCOPS_EMULATED")


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that is here; in the emulation the one that is emulated, with tensors of the CPU."""
    if not EMULATED:
        yield request.param
        return
    with Emulated.on():
        yield request.param


@pytest.fixture
def kernels():
    """What runs CUDA kernels; see kernels.py."""
    if EMULATED:
        return Emulated()
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU; test_cuda_on_cpu.py runs this in the emulation")
    return OnGpu()


def pytest_sessionfinish():
    if EMULATED:
        with open(EMULATED, "w") as file:
            print(*torch.ops.cuda_on_cpu.entered(), file=file)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the loader that a test may edit and build with."""
    return Checkout(the_zygote(), tmp_path)
