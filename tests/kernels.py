"""What runs CUDA kernels in a test: `kernels(operator, *arguments)` takes and gives CPU tensors.

On a GPU (also under compute-sanitizer: tests/bench/gpu_check.py), or in the emulation of
tests/operators/cuda_on_cpu, in which blocks and threads come in random order and every tensor lies between
pages that must not be touched. Every call is made twice (CALCOPS_KERNEL_RUNS), and has to give the
same bits.
"""

import contextlib
import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

RUNS = int(os.environ.get("CALCOPS_KERNEL_RUNS", "2"))


def same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _as_tuple(results):
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _moved(arguments, move):
    return [move(x) if isinstance(x, torch.Tensor) else x for x in arguments]


def _repeated(call):
    first, *others = [call() for _ in range(RUNS)]
    for other in others:
        same_bits(other, first)
    return first


class OnGpu:
    emulated = False

    def __call__(self, operator, *arguments, **options):
        arguments = _moved(arguments, torch.Tensor.cuda)
        options = dict(zip(options, _moved(options.values(), torch.Tensor.cuda), strict=True))
        return _repeated(
            lambda: _moved(_as_tuple(operator(*arguments, **options)), torch.Tensor.cpu)
        )


class Emulated:
    emulated = True
    seed = 0  # another one for each call

    def __call__(self, operator, *arguments, **options):
        return _repeated(lambda: self._once(operator.default, arguments, options))

    def _once(self, operator, arguments, options):
        guarded = torch.ops.cuda_on_cpu.guarded
        arguments = _moved(arguments, guarded)
        options = dict(zip(options, _moved(options.values(), guarded), strict=True))
        with self.on():
            results = _as_tuple(operator._op_dk(torch._C.DispatchKey.CUDA, *arguments, **options))
        return _moved(results, torch.clone)

    @classmethod
    @contextlib.contextmanager
    def on(cls):
        emulation = torch.ops.cuda_on_cpu
        cls.seed += 1
        emulation.seed(cls.seed)
        emulation.put_in_fault(int(os.environ.get("CALCOPS_EMULATED_FAULT", "0")))
        emulation.enable(True)
        try:
            yield
        finally:
            emulation.enable(False)


def launches(function):
    """Kernels, memsets and copies that the device runs for one call."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    return names
