"""examples/identity_conv's CUDA kernel, on a GPU or in the emulation (kernels.py)."""

from pathlib import Path

import pytest
import torch
from kernels import same_bits

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "identity_conv"


@pytest.fixture
def operator(kernels, monkeypatch):
    if kernels.emulated:  # the kernel is in the library of the operators
        import calcops_jit  # noqa: F401

        if not hasattr(torch.ops.my_ops, "identity_conv_op"):
            torch.library.define("my_ops::identity_conv_op", "(Tensor x) -> Tensor")
    else:
        monkeypatch.syspath_prepend(FOLDER)
        import custom_ops  # noqa: F401
    return torch.ops.my_ops.identity_conv_op


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.half, torch.float32, torch.int64, torch.complex128]
)
def test_the_kernel_copies_any_layout_and_dtype(kernels, operator, dtype):
    x = (10 * torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    layouts = [
        x,
        x[:0],
        x[0, 0, 0, 0],
        x.transpose(1, 3),
        x[:, ::2, 1:, ::3],
        x[:, :1].expand(2, 7, 4, 5),
    ]
    layouts += [x.to(memory_format=torch.channels_last), x.repeat(1, 5, 3, 1)[:, 1:, 2:]]
    for layout in layouts:
        same_bits(kernels(operator, layout), [layout])


def test_the_kernel_copies_more_elements_than_a_grid_has_threads(kernels, operator):
    x = torch.arange(2**8 * 2**10 + 3, dtype=torch.int32).to(torch.uint8)
    same_bits(kernels(operator, x), [x])
