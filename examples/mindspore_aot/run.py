"""Calls the libraries that build.py made from MindSpore (pip install 'mindspore==2.10.0' 'numpy<2'; Python <= 3.12).

    python examples/mindspore_aot/run.py build/mindspore_aot [cpu|gpu]

Expected output, once in graph and once in pynative mode (the warnings between are MindSpore's own):

    [[ 0.    -0.001]
     [-0.002  1.   ]]
    gradient [0.01 0.01] [0.01 1.  ] with 0.5: [ 0.   -0.05] [-0.1  1. ]
    training: loss 2.5000 -> 0.0000
    force [96. 96. 96.] [-96. -96. -96.] gradient [ -1152.  -4608.  -8064. -11520.]
    error: LeakyRelu: "leaky_relu_cpu" not implemented for 'Int'
"""

import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops

folder, device = Path(sys.argv[1]), (sys.argv[2:] or ["cpu"])[0]
library = f"{folder}/leaky_relu_{device}.so"
force_library = f"{folder}/force_cpu.so"


class LeakyRelu(nn.Cell):
    def __init__(self, negative_slope=0.01):
        super().__init__()
        backward = ops.Custom(
            f"{library}:LeakyReluGrad", lambda g, x, s: x, lambda g, x, s: x, func_type="aot"
        )

        # Is given the inputs, the output and its gradient; gives one for each input.
        def bprop(x, slope, output, grad):
            return backward(grad, x, slope), ops.zeros_like(slope)

        self.op = ops.Custom(
            f"{library}:LeakyRelu", lambda x, s: x, lambda x, s: x, func_type="aot", bprop=bprop
        )
        self.slope = ms.Tensor(negative_slope, ms.float32)  # attributes are tensors of no dimensions

    def construct(self, x):
        return self.op(x, self.slope)


class Force(nn.Cell):
    """calcops::force without ghosts, on the CPU."""

    def __init__(self):
        super().__init__()

        def both(grad, list_neigh, dE, Ri_d):
            return dE, Ri_d

        backward = ops.Custom(f"{force_library}:ForceGrad", both, both, func_type="aot")

        def bprop(list_neigh, dE, Ri_d, output, grad):
            of_dE, of_Ri_d = backward(grad, list_neigh, dE, Ri_d)
            return ops.zeros_like(list_neigh), of_dE, of_Ri_d

        shape, dtype = lambda list_neigh, dE, Ri_d: [*list_neigh[:2], 3], lambda list_neigh, dE, Ri_d: dE
        self.op = ops.Custom(f"{force_library}:Force", shape, dtype, func_type="aot", bprop=bprop)
        self.op.set_device("CPU")  # also where device_target is "GPU"

    def construct(self, list_neigh, dE, Ri_d):
        return self.op(list_neigh, dE, Ri_d)


class Fit(nn.Cell):
    """Mean square of leaky_relu(w) against what it has to become."""

    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(ms.Tensor([1.0, 1.0], ms.float32), name="w")
        self.leaky_relu = LeakyRelu(0.5)

    def construct(self, target):
        return ((self.leaky_relu(self.w) - target) ** 2).mean()


def main():
    x = ms.Tensor(np.array([[0.0, -0.1], [-0.2, 1.0]]).astype(np.float32))
    plain = ops.Custom(f"{library}:LeakyRelu", out_shape=lambda x: x, out_dtype=lambda x: x, func_type="aot")
    print(plain(x))
    print("gradient", *ms.grad(LeakyRelu())(x).asnumpy(), "with 0.5:", *LeakyRelu(0.5)(x).asnumpy())

    fit, target = Fit(), ms.Tensor([2.0, -1.0], ms.float32)
    step = ms.value_and_grad(fit, None, fit.trainable_params())
    optimizer = nn.SGD(fit.trainable_params(), 0.5)
    losses = []
    for _ in range(50):
        loss, gradients = step(target)
        optimizer(gradients)
        losses.append(float(loss.asnumpy()))
    print(f"training: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    list_neigh = ms.Tensor(np.array([[[1, -1], [0, -1]]], np.int32))
    dE, Ri_d = ms.ops.ones((1, 2, 2, 4), ms.float32), ms.ops.arange(48).reshape(1, 2, 8, 3).astype(ms.float32)
    force = Force()

    def square_sum(dE):
        return (force(list_neigh, dE, Ri_d) ** 2).sum()

    gradient = ms.grad(square_sum)(dE)
    print("force", *force(list_neigh, dE, Ri_d).asnumpy()[0], "gradient", gradient.asnumpy()[0, 0, 0])

    try:  # in pynative mode the error comes when the result is looked at, not from the call
        plain(ms.Tensor([1, 2], ms.int32)).asnumpy()
    except Exception as error:
        print("error:", re.search("LeakyRelu: .*", str(error))[0])


ms.set_device(device.upper())
for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
    ms.set_context(mode=mode)
    main()
