"""Run CUDA kernels in a test: `kernels(operator, *arguments)` takes and returns CPU tensors.

The kernels run on a GPU (with bench/gpu_check.py also under compute-sanitizer), or on the CPU
in the emulation of tests/operators/cuda_on_cpu. The emulation runs blocks and threads in random
order, and puts every tensor between two pages that must not be touched. Each call is repeated
(CALCOPS_KERNEL_RUNS, by default two runs), and all runs must give the same bits.
"""

import contextlib
import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# Set in a process that test_cuda_on_cpu.py starts: the file for the names of the kernels that ran.
EMULATED = os.environ.get("CALCOPS_EMULATED")
RUNS = int(os.environ.get("CALCOPS_KERNEL_RUNS", "2"))


TYPES = (torch.float32, torch.int32), (torch.float64, torch.int64)


def alternating(sizes):
    """Return (size, dtype, dtype of lists) for each size. Neighbours have different dtypes."""
    return [(size, *TYPES[number % 2]) for number, size in enumerate(sizes)]


def same_bits(results, others):
    for result, other in zip(results, others, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)


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
    seed = 0  # of the order of blocks and threads; grows with each call

    def __call__(self, operator, *arguments, **options):
        overload = getattr(operator, "default", operator)
        return _repeated(lambda: self._once(overload, arguments, options))

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
        """Let operators on CPU tensors run their CUDA kernels."""
        emulation = torch.ops.cuda_on_cpu
        cls.seed += 1
        emulation.seed(cls.seed)
        emulation.put_in_fault(int(os.environ.get("CALCOPS_EMULATED_FAULT", "0")))
        emulation.enable(True)
        try:
            yield
        finally:
            emulation.enable(False)


class EmulatedBelowAutograd(TorchDispatchMode):
    """Runs the CUDA kernels of the operators that are called, also by derivatives."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace not in ("calcops", "calcops_models"):
            return function(*args, **(kwargs or {}))
        results = Emulated()(function, *args, **(kwargs or {}))
        return results if len(function._schema.returns) > 1 else results[0]


def write_kernels_that_ran():
    with open(EMULATED, "a") as file:
        print(*torch.ops.cuda_on_cpu.entered(), file=file)


def launches(function):
    """Return the names of the kernels, memsets and copies that the GPU runs for one call."""
    function()  # warm-up
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    return names
