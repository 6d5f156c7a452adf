"""Call ATen's leaky_relu from MindSpore, in the library that build.py built.

    python examples/mindspore_aot/run.py build/mindspore_aot [cpu|gpu]

README.md beside this file shows what is printed.
"""

import re
import sys

import mindspore as ms
from mindspore import nn, ops

device = (sys.argv[2:] or ["cpu"])[0]
library = f"{sys.argv[1]}/leaky_relu_{device}.so"


class LeakyRelu(nn.Cell):
    def __init__(self, negative_slope=0.01):
        super().__init__()
        backward = ops.Custom(
            f"{library}:LeakyReluGrad",
            out_shape=lambda grad, x, slope: x,
            out_dtype=lambda grad, x, slope: x,
            func_type="aot",
        )

        # MindSpore passes the inputs, the output and the output's gradient. bprop returns a
        # gradient for each input.
        def bprop(x, slope, output, grad):
            return backward(grad, x, slope), ops.zeros_like(slope)

        self.op = ops.Custom(
            f"{library}:LeakyRelu",
            out_shape=lambda x, slope: x,
            out_dtype=lambda x, slope: x,
            func_type="aot",
            bprop=bprop,
        )
        # The operator takes its attribute as an input: a tensor of no dimensions.
        self.slope = ms.Tensor(negative_slope, ms.float32)

    def construct(self, x):
        return self.op(x, self.slope)


class Fit(nn.Cell):
    """The loss: the mean square difference between leaky_relu(w) and a target."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(ms.Tensor([1.0, 1.0], ms.float32), name="w")
        self.leaky_relu = LeakyRelu(0.5)

    def construct(self, target):
        return ((self.leaky_relu(self.w) - target) ** 2).mean()


def main():
    x = ms.Tensor([[0.0, -0.1], [-0.2, 1.0]], ms.float32)
    # Without a slope as an input, the slope is 0.01.
    leaky_relu = ops.Custom(
        f"{library}:LeakyRelu", out_shape=lambda x: x, out_dtype=lambda x: x, func_type="aot"
    )
    print(leaky_relu(x))
    gradient = ms.grad(LeakyRelu())(x).asnumpy()
    with_half = LeakyRelu(0.5)(x).asnumpy()
    print("gradient", *gradient, "with 0.5:", *with_half)

    fit = Fit()
    target = ms.Tensor([2.0, -1.0], ms.float32)
    step = ms.value_and_grad(fit, None, fit.trainable_params())
    optimizer = nn.SGD(fit.trainable_params(), 0.5)
    losses = []
    for _ in range(50):
        loss, gradients = step(target)
        optimizer(gradients)
        losses.append(float(loss.asnumpy()))
    print(f"training: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    where = "the call"
    try:
        result = leaky_relu(ms.Tensor([1, 2], ms.int32))
        where = "asnumpy()"  # pynative mode does not wait for what it has queued
        result.asnumpy()
    except Exception as error:
        print(f"error from {where}:", re.search("LeakyRelu: .*", str(error))[0])


ms.set_device(device.upper())
for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
    ms.set_context(mode=mode)
    main()
