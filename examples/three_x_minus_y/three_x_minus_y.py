"""3x - y as an operator in C++ below a torch.nn.Module: its gradient, and its time beside Python's.

    python examples/three_x_minus_y/three_x_minus_y.py [--size 100000]

README.md beside this file shows what the script prints.
"""

import argparse
import logging
import warnings

import test_cpp
import torch

# A machine may have a CUDA toolkit and no GPU; what the next line imports warns of that.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: "No CUDA runtime" not in record.getMessage()
)
from torch.utils.benchmark import Timer  # noqa: E402


class _TestFunction(torch.autograd.Function):
    """The derivative by hand, as an operator with kernels of its own needs it. test_cpp.forward has
    its own; forward mode is only there, because torch.compile takes no Function with a `jvp`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return test_cpp.forward(x, y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass  # linear: nothing to save for the backward

    @staticmethod
    def backward(ctx, gradOutput):
        gradX, gradY = test_cpp.backward(gradOutput)
        return gradX, gradY  # as many as forward has arguments; None for one without a gradient


class Test(torch.nn.Module):
    def forward(self, inputA, inputB):
        return _TestFunction.apply(inputA, inputB)


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        return output * (1 - output) * grad_output


def gradcheck_table(device):
    columns = [(torch.float32, eps) for eps in (1e-3, 1e-4, 1e-6)] + [
        (torch.float64, eps) for eps in (1e-4, 1e-6)
    ]
    print(f"{'gradcheck':15}" + "".join(f"  {str(dtype)[6:]} {eps:.0e}" for dtype, eps in columns))
    functions = [Sigmoid.apply, torch.sigmoid, lambda x: Test()(x, x.flip(0))]
    for name, function in zip(["Sigmoid.apply", "torch.sigmoid", "Test()"], functions):
        passed = []
        for dtype, eps in columns:
            x = torch.tensor(
                [-0.4646, -0.4403, 1.2525, -0.5953], dtype=dtype, device=device, requires_grad=True
            )
            passed.append(torch.autograd.gradcheck(function, (x,), eps=eps, raise_exception=False))
        print(
            f"{name:15}" + "".join("           pass" if ok else "           fail" for ok in passed)
        )


def time_table(device, size):
    """Timer warms up, synchronises the GPU and runs blocks of calls; median and interquartile range
    of a call.
    """
    x, y = (torch.randn(size, device=device, requires_grad=True) for _ in range(2))
    for name, function in {
        "python": lambda x, y: 3 * x - y,
        "operator": test_cpp.forward,
        "extension": Test(),
    }.items():
        z = function(x, y)
        variables = {"function": function, "x": x, "y": y, "z": z, "grad": torch.ones_like(z)}
        calls = "function(x, y)", "torch.autograd.grad(z, (x, y), grad, retain_graph=True)"
        times = [
            Timer(call, globals=variables).blocked_autorange(min_run_time=0.5) for call in calls
        ]
        forward, backward = (
            f"{1e6 * time.median:8.2f} +- {1e6 * time.iqr:.2f} us" for time in times
        )
        print(f"{name:10} Forward: {forward} | Backward: {backward}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--size", type=int, default=100_000, help="numbers in x and in y of the times"
    )
    size = parser.parse_args().size
    warnings.filterwarnings(
        "ignore", message="Input #0 requires gradient and is not a double precision"
    )
    for device in ["cpu", "cuda"][: 1 + torch.cuda.is_available()]:
        x, y = (torch.tensor([1.0, 2.0], device=device, requires_grad=True) for _ in range(2))
        z = Test()(x, y)
        z.sum().backward()
        print(
            f"{device}  Test()(x, y) = {z.tolist()}  "
            f"gradients {x.grad.tolist()} and {y.grad.tolist()}"
        )
        gradcheck_table(device)
        time_table(device, size)
