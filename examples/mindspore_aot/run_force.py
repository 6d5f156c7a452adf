"""Call calcops::force from MindSpore on the CPU, in the library that build.py built.

    python examples/mindspore_aot/run_force.py build/mindspore_aot

README.md beside this file shows what is printed.
"""

import sys

import mindspore as ms
from mindspore import nn, ops

library = f"{sys.argv[1]}/force_cpu.so"


class Force(nn.Cell):
    """calcops::force with gradients of dE and Ri_d.

    list_neigh [B, n, K], dE [B, n, K, 4], Ri_d [B, n, 4K, 3], types [n + nghost]
    -> force [B, n + nghost, 3]. Only the length of types matters: see force.cpp.
    """

    def __init__(self):
        super().__init__()

        def shape(list_neigh, dE, Ri_d, types):
            return [list_neigh[0], types[0], 3]

        def dtype(list_neigh, dE, Ri_d, types):
            return dE

        # MindSpore passes shapes for the shapes, and dtypes for the dtypes.
        def of_gradients(grad, list_neigh, dE, Ri_d):
            return dE, Ri_d

        backward = ops.Custom(f"{library}:ForceGrad", of_gradients, of_gradients, func_type="aot")

        # MindSpore passes the inputs, the output and the output's gradient. bprop returns a
        # gradient for each input.
        def bprop(list_neigh, dE, Ri_d, types, output, grad):
            of_dE, of_Ri_d = backward(grad, list_neigh, dE, Ri_d)
            return ops.zeros_like(list_neigh), of_dE, of_Ri_d, ops.zeros_like(types)

        self.op = ops.Custom(f"{library}:Force", shape, dtype, func_type="aot", bprop=bprop)
        self.op.set_device("CPU")  # the library is for the CPU, whatever MindSpore's device

    def construct(self, list_neigh, dE, Ri_d, types):
        return self.op(list_neigh, dE, Ri_d, types)


def main():
    # 0 and 1 are each other's neighbour, 2 is a ghost.
    list_neigh = ms.Tensor([[[1, -1], [0, 2]]], ms.int32)
    types = ops.zeros((3,), ms.int32)
    dE = ops.ones((1, 2, 2, 4), ms.float32)
    Ri_d = ops.arange(48).reshape(1, 2, 8, 3).astype(ms.float32)
    force = Force()

    def square_sum(dE):
        return (force(list_neigh, dE, Ri_d, types) ** 2).sum()

    print("force", *force(list_neigh, dE, Ri_d, types).asnumpy()[0])
    print("gradient of dE", ms.grad(square_sum)(dE).asnumpy()[0, 0, 0])


ms.set_device("CPU")
for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
    ms.set_context(mode=mode)
    main()
