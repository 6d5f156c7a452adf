"""examples/identity_conv: the operator and the class in PyTorch's modes, and the packages in Python
and C++."""

import copy
import platform
import re
import sys

import pytest
import torch
from programs import ROOT, assert_needs_no_python, run
from reference import DEVICES

FOLDER = ROOT / "examples" / "identity_conv"
DTYPES = [
    torch.float,
    torch.double,
    torch.half,
    torch.bfloat16,
    torch.int8,
    torch.complex128,
    torch.bool,
]


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(FOLDER))
    import export_compile

    yield export_compile
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module", params=DEVICES)
def packages(request, example, tmp_path_factory):
    """Return the output of export_compile.py, its folder and the device."""
    out = tmp_path_factory.mktemp("identity_conv")
    script = FOLDER / "export_compile.py"
    result = run(sys.executable, script, "--out", out, "--device", request.param)
    assert not re.search("warning|No CUDA|mismatch", result.stderr, re.IGNORECASE), result.stderr
    return result.stdout, out, request.param


def layouts(dtype, device):
    """Yield tensors that are contiguous, without elements or dimensions, transposed, with gaps,
    expanded, and channels last."""
    x = (10 * torch.randn(2, 3, 4, 5, device=device)).to(dtype)
    yield from [
        x,
        x[:0],
        x[0, 0, 0, 0],
        x.transpose(1, 3),
        x[:, ::2, 1:, ::3],
        x[:, :1].expand(2, 7, 4, 5),
    ]
    yield x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_and_class_give_a_copy_of_any_layout_and_dtype(example, device, dtype):
    obj = torch.classes.my_ops.IdentityConvClass(3)
    for x in layouts(dtype, device):
        ops = torch.ops.my_ops
        for y in (ops.identity_conv_op(x), obj.forward(x), ops.identity_conv_object(obj, x)):
            assert torch.equal(x, y)
            assert y.dtype == x.dtype
            assert y.stride() == x.clone().stride()
            assert x.numel() == 0 or y.data_ptr() != x.data_ptr()


def test_operator_passes_opcheck_and_has_the_gradient_of_a_copy(example, device):
    x = torch.randn(2, 3, device=device, dtype=torch.double, requires_grad=True)
    pytest.importorskip("expecttest", reason="torch.library.opcheck imports it")
    torch.library.opcheck(torch.ops.my_ops.identity_conv_op.default, (x,))
    assert torch.autograd.gradcheck(torch.ops.my_ops.identity_conv_op, x)
    obj = torch.classes.my_ops.IdentityConvClass(3)
    assert torch.autograd.gradcheck(obj.forward, x)
    assert torch.autograd.gradcheck(lambda x: torch.ops.my_ops.identity_conv_object(obj, x), x)


def test_the_kernel_runs_on_the_current_stream(example, gpu):
    x = torch.zeros(1 << 24, device=gpu)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x += 1
        y = torch.ops.my_ops.identity_conv_op(x)
    stream.synchronize()
    assert torch.equal(x, y)


def test_the_object_keeps_its_channels_when_copied_flattened_and_saved(example, tmp_path):
    obj = torch.classes.my_ops.IdentityConvClass(7)
    assert obj.get_channels() == 7
    assert copy.deepcopy(obj).get_channels() == 7
    assert obj.__obj_flatten__() == (("channels", 7),)
    torch.save(obj, tmp_path / "object.pt")
    assert torch.load(tmp_path / "object.pt", weights_only=False).get_channels() == 7


@pytest.mark.long
def test_the_exported_graph_calls_the_operator_and_the_object(packages):
    graph, _, _ = packages
    calls = re.findall(
        r"%(\w+) : .*call_function\[target=torch\.ops\.([\w.]+)\]\(args = \((.+)\), kwargs", graph
    )
    conv = "[1, 1], [0, 0], [1, 1], 3"
    assert calls == [
        ("conv2d", "aten.conv2d.default", f"%x, %p_layer1_conv_weight, None, {conv}"),
        ("call_torchbind", "higher_order.call_torchbind", "%obj_layer2_obj, forward, %conv2d"),
        ("identity_conv_op", "my_ops.identity_conv_op.default", "%call_torchbind,"),
        (
            "conv2d_1",
            "aten.conv2d.default",
            f"%identity_conv_op, %p_layer4_conv_weight, None, {conv}",
        ),
    ]


@pytest.mark.long
def test_every_way_to_run_the_model_gives_identical_results(packages, example):
    out, _, device = packages
    assert "eager, deepcopy, torch.compile, export, saved and loaded: identical" in out
    shapes = ", ".join(f"[{batch}, 3, 224, 224] identical" for batch in (1, 2, 5))
    names = ["native.pt2"]
    if hasattr(example.config.cpp, "march") and platform.machine() == "x86_64":
        names.append("portable.pt2")
    for name in names:
        assert out.count(f"{name} on {device}: {shapes}\n") == 2, "once in Python, once in C++"


@pytest.mark.long
def test_program_and_library_need_neither_python_nor_a_search_path(packages, example):
    _, out, _ = packages
    assert_needs_no_python(out / "run_inference", example.custom_ops.library)
