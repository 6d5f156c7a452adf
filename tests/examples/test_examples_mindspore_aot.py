"""examples/mindspore_aot: the C functions as MindSpore calls them, and MindSpore itself if `make
mindspore` has installed it."""

import ctypes
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import ROOT, assert_needs_no_python, blocks, run

import calcops_jit

pytestmark = pytest.mark.long  # a foreign program

FOLDER = ROOT / "examples" / "mindspore_aot"
MINDSPORE = ROOT / "build" / "mindspore" / "bin" / "python"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Return {file name: path} of the libraries that build.py makes."""
    out = tmp_path_factory.mktemp("mindspore_aot")
    result = run(sys.executable, FOLDER / "build.py", "--out", out)
    return {Path(line).name: line for line in result.stdout.splitlines()}


@pytest.fixture
def call(libraries):
    """Return a function: call(symbol, *tensors) calls a C function with inputs and outputs.

    The function fills the outputs, on the device of the first tensor. call returns the last one.
    """

    def call_function(symbol, *tensors, names=None, stream=None):
        kind = "force" if symbol.startswith("Force") else "leaky_relu"
        device = "gpu" if tensors[0].is_cuda else "cpu"
        function = ctypes.CDLL(libraries[f"{kind}_{device}.so"])[symbol]
        n = len(tensors)
        shapes = [(ctypes.c_int64 * t.dim())(*t.shape) if t.dim() else None for t in tensors]
        names = names or [str(t.dtype).removeprefix("torch.") for t in tensors]
        code = function(
            n,
            (ctypes.c_void_p * n)(*(t.data_ptr() for t in tensors)),
            (ctypes.c_int * n)(*(t.dim() for t in tensors)),
            (ctypes.POINTER(ctypes.c_int64) * n)(
                *(shape and ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes)
            ),
            (ctypes.c_char_p * n)(*(name.encode() for name in names)),
            ctypes.c_void_p(stream),
            None,
        )
        assert code == 0
        return tensors[-1]

    return call_function


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (5,)])
def test_forward_and_backward_are_those_of_aten(call, device, dtype, shape):
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    slope = torch.tensor(0.5)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    for attributes, value in ([], 0.01), ([slope.to(device)], 0.5):
        expected = torch.nn.functional.leaky_relu(x, value)
        # 7 stays where a function writes nothing.
        out = torch.full_like(x, 7).detach()
        gradient = torch.full_like(x, 7).detach()
        assert torch.equal(call("LeakyRelu", x.detach(), *attributes, out, stream=stream), expected)
        call("LeakyReluGrad", grad, x.detach(), *attributes, gradient, stream=stream)
        assert torch.equal(gradient, torch.autograd.grad(expected, x, grad)[0])


# The names that MindSpore passes for dtypes. In Python its dtypes have the same names, except for
# bool_, float8_e4m3fn and float8_e5m2.
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 complex64 complex128"
)


def test_every_dtype_that_mindspore_names_is_read(libraries, call):
    """The slope has each of the dtypes. It is 0.5, or 1 for integers. MindSpore's int, uint and
    float have 4 bytes."""
    x = torch.tensor([-2.0])
    pairs = [(name, getattr(torch, name)) for name in DTYPES.split()]
    pairs += [("int", torch.int32), ("uint", torch.uint32), ("float", torch.float32)]
    pairs += [("float8e4m3fn", torch.float8_e4m3fn), ("float8e5m2", torch.float8_e5m2)]
    for name, dtype in pairs:
        slope = torch.tensor(0.5 if dtype.is_floating_point or dtype.is_complex else 1).to(dtype)
        out = call("LeakyRelu", x, slope, torch.empty(1), names=["float32", name, "float32"])
        assert out.item() == -2 * float(slope.to(torch.complex64).real), name


def test_force_is_calcops_force_with_its_gradients(call):
    torch.manual_seed(0)
    list_neigh = torch.tensor([[[1, 3, -1], [0, -1, 2]]], dtype=torch.int32)
    dE = torch.randn(1, 2, 3, 4, dtype=torch.double, requires_grad=True)
    Ri_d = torch.randn(1, 2, 12, 3, dtype=torch.double, requires_grad=True)
    force = calcops_jit.force(list_neigh, dE, Ri_d, 2)
    types = torch.zeros(2 + 2, dtype=torch.int32)
    out = torch.empty_like(force).detach()
    call("Force", list_neigh, dE.detach(), Ri_d.detach(), types, out)
    assert torch.equal(out, force)
    grad = torch.randn_like(force)
    of_dE = torch.empty_like(dE).detach()
    of_Ri_d = torch.empty_like(Ri_d).detach()
    call("ForceGrad", grad, list_neigh, dE.detach(), Ri_d.detach(), of_dE, of_Ri_d)
    expected_of_dE, expected_of_Ri_d = torch.autograd.grad(force, (dE, Ri_d), grad)
    assert torch.equal(of_dE, expected_of_dE)
    assert torch.equal(of_Ri_d, expected_of_Ri_d)


# {dtypes and sizes of the arguments, which have one dimension: the text of the exception}
ERRORS = {
    "string 2, float32 2": "LeakyRelu: expected a dtype that PyTorch has, got string",
    "int32 2, int32 2": "LeakyRelu: \"leaky_relu_cpu\" not implemented for 'Int'",
    "float32 2, float32 3": "expected `output` of Float [2], got Float [3]",
    "float32 2, float64 2": "expected `output` of Float [2], got Double [2]",
    "float32 2, float32 1, float32 2": "expected `negative_slope` of no dimensions, got [1]",
    "float32 2": "LeakyRelu: expected 2 or 3 inputs and outputs, got 1",
    "float32 -1, float32 -1": "expected known sizes for argument 0, got [-1]",
}


@pytest.mark.parametrize("arguments, text", ERRORS.items())
def test_errors_are_exceptions_with_a_text(libraries, arguments, text):
    """No frame catches the exception here, so the C++ runtime prints its text."""
    script = f"""if True:
        from ctypes import *
        dtypes, sizes = zip(*(words.split() for words in "{arguments}".split(", ")))
        n = len(dtypes)
        memory = (c_double * 4)()
        CDLL("{libraries["leaky_relu_cpu.so"]}").LeakyRelu(
            n,
            (c_void_p * n)(*[addressof(memory)] * n),
            (c_int * n)(*[1] * n),
            (POINTER(c_int64) * n)(*(pointer(c_int64(int(size))) for size in sizes)),
            (c_char_p * n)(*(dtype.encode() for dtype in dtypes)),
            None,
            None,
        )"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == -signal.SIGABRT
    (what,) = re.findall(r"what\(\): +(.*)", result.stderr)
    assert text in what


def test_the_libraries_need_no_python_and_no_search_path(libraries):
    assert_needs_no_python(*libraries.values())


@pytest.mark.skipif(not MINDSPORE.exists(), reason="MindSpore is not installed: make mindspore")
@pytest.mark.parametrize("place, name", [(0, "run.py"), (1, "run_force.py")])
def test_mindspore_calls_the_operators_in_both_modes_and_trains(libraries, place, name):
    """The README shows the output of graph mode. In PyNative mode, the error comes later."""
    folder = Path(libraries["leaky_relu_cpu.so"]).parent
    out = run(MINDSPORE, FOLDER / name, folder, PYTHONPATH="").stdout
    shown = blocks("examples/mindspore_aot/README.md", "text")[place]
    assert out == shown + shown.replace("from the call", "from asnumpy()")
