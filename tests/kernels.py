"""Where a test of CUDA kernels runs them: `kernels(operator, *arguments)` takes and gives CPU tensors.

On a GPU (also under compute-sanitizer: tests/bench/gpu_check.py), or in the emulation of tests/cuda_on_cpu, in which
blocks and threads come in random order and every tensor lies between pages that must not be touched. Every call is
made twice, and has to give the same bits.
"""

import torch

RUNS = 2


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
        return _repeated(lambda: _moved(_as_tuple(operator(*arguments, **options)), torch.Tensor.cpu))


class Emulated:
    emulated = True
    seed = 0  # another one for each call

    def __call__(self, operator, *arguments, **options):
        return _repeated(lambda: self._once(operator.default, arguments, options))

    def _once(self, operator, arguments, options):
        emulation = torch.ops.cuda_on_cpu
        Emulated.seed += 1
        emulation.seed(Emulated.seed)
        arguments = _moved(arguments, emulation.guarded)
        options = dict(zip(options, _moved(options.values(), emulation.guarded), strict=True))
        emulation.enable(True)
        try:
            results = _as_tuple(operator._op_dk(torch._C.DispatchKey.CUDA, *arguments, **options))
        finally:
            emulation.enable(False)
        return _moved(results, torch.clone)
