"""examples/three_x_minus_y: its two builds, its output, and the operator in PyTorch's modes."""

import re
import shutil
import sys

import pytest
import torch
from programs import ROOT, run

FOLDER = ROOT / "examples" / "three_x_minus_y"


def python(*arguments, **options):
    result = run(sys.executable, *arguments, **options)
    assert not re.search("warning|No CUDA", result.stderr, re.IGNORECASE), result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(FOLDER))
    import three_x_minus_y

    yield three_x_minus_y
    sys.path.remove(str(FOLDER))


@pytest.fixture(params=["Test", "operator"])
def function(request, example):
    return example.Test() if request.param == "Test" else example.test_cpp.forward


def numbers(*size, device="cpu", dtype=torch.double):
    return [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize(
    "dtype", [torch.float, torch.double, torch.half, torch.bfloat16, torch.complex64]
)
def test_the_operator_is_3x_minus_y_with_its_gradients(function, device, dtype):
    x, y = numbers(5, 7, device=device, dtype=dtype)
    z = function(x.t(), y.t())
    assert torch.equal(z, 3 * x.t() - y.t())
    grad = torch.randn_like(z)
    gradients = torch.autograd.grad(z, (x, y), grad)
    expected = torch.autograd.grad(3 * x.t() - y.t(), (x, y), grad)
    assert all(map(torch.equal, gradients, expected))


def test_sizes_that_differ_are_refused(function):
    with pytest.raises(RuntimeError, match=r"expected `y` of the size of `x`, \[2\], got \[1\]"):
        function(torch.ones(2), torch.ones(1))


def test_the_module_compiles_and_exports_with_a_dynamic_size(example):
    compiled = torch.compile(example.Test(), fullgraph=True, dynamic=True, backend="aot_eager")
    exported = torch.export.export(
        example.Test(),
        (torch.ones(4), torch.ones(4)),
        strict=False,
        dynamic_shapes=[{0: torch.export.Dim("n")}] * 2,
    ).module()
    for size in (3, 8):
        x, y = numbers(size, dtype=torch.float)
        gradients = torch.autograd.grad(compiled(x, y).sum(), (x, y))
        assert [g.tolist() for g in gradients] == [[3.0] * size, [-1.0] * size]
        assert torch.equal(exported(x, y), 3 * x - y)


def test_the_script_prints_results_checks_and_times():
    out = python(FOLDER / "three_x_minus_y.py", "--size", "100")
    assert "cpu  Test()(x, y) = [2.0, 4.0]  gradients [3.0, 3.0] and [-1.0, -1.0]" in out
    rows = dict(re.findall(r"^(\S+) +((?:(?:pass|fail) *)+)$", out, re.MULTILINE))
    # Finite differences are right in float64, and in float32 only with a large eps.
    for name in ("Sigmoid.apply", "torch.sigmoid"):
        assert rows[name].split() == "pass fail fail pass pass".split()
    assert rows["Test()"].split()[2:] == "fail pass pass".split()
    for name in ("python", "operator", "extension"):
        times = re.search(
            rf"^{name} +Forward: +([\d.]+) \+- [\d.]+ us \| Backward: +([\d.]+) \+- ",
            out,
            re.MULTILINE,
        )
        assert all(float(time) > 0 for time in times.groups())


@pytest.mark.long
def test_setuptools_makes_a_package_that_needs_no_calcops(tmp_path):
    shutil.copytree(
        FOLDER, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build")
    )
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install += ["--no-build-isolation", "--no-deps", "--no-index", "--target", tmp_path / "site"]
    python(*install, tmp_path / "source", MAX_JOBS="2", PYTHONPATH="")
    script = """if True:
        import sys, torch
        sys.modules["calcops_jit"] = None
        import test_cpp
        print(test_cpp.__file__, test_cpp.forward(torch.ones(2), torch.ones(2)).tolist(),
              [g.tolist() for g in test_cpp.backward(torch.ones(1))])"""
    out = python("-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert out.split(maxsplit=1) == [f"{tmp_path}/site/test_cpp.py", "[2.0, 2.0] [[3.0], [-1.0]]\n"]
