import os

import pytest
import torch
from kernels import Emulated, OnGpu
from reference import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that is here."""
    return request.param


@pytest.fixture
def kernels():
    """Where CUDA kernels run; see kernels.py."""
    if os.environ.get("CALCOPS_EMULATED"):
        return Emulated()
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU; test_cuda_on_cpu.py runs this in the emulation")
    return OnGpu()
