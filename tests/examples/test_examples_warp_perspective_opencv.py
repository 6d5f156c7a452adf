"""examples/warp_perspective_opencv: its three builds, its errors, and its result beside that of
calcops.warp_perspective."""

import re
import shutil
import sys

import pytest
import torch
from programs import ROOT, run

import calcops_jit

FOLDER = ROOT / "examples" / "warp_perspective_opencv"


@pytest.fixture(scope="module")
def library():
    sys.path.insert(0, str(FOLDER))
    import warp_perspective_opencv

    sys.path.remove(str(FOLDER))
    try:
        return warp_perspective_opencv.load()
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def printed(library, tmp_path_factory):
    out = tmp_path_factory.mktemp("opencv")
    result = run(sys.executable, FOLDER / "warp_perspective_opencv.py", "--out", out)
    assert "Warning" not in result.stderr
    return result.stdout, out


# The output for the two archives, computed by hand: two sums, and pixels 5, 6, 9 and 10 of a 4 x 4
# image, counted from 0.
HOST = "myops::add: 4 6\nmy_ops::warp_perspective: 5 6 9 10\n"


def test_both_namespaces_have_both_operators(library):
    image = torch.randn(32, 32)
    warp = torch.rand(3, 3)
    result = torch.ops.my_ops.warp_perspective(image, warp)
    assert result.shape == (8, 8)
    assert torch.equal(result, torch.ops.myops.warp_perspective(image, warp))
    for namespace in (torch.ops.my_ops, torch.ops.myops):
        assert namespace.add(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_the_result_is_that_of_calcops_up_to_the_rounding_of_opencvs_coordinates(library):
    torch.manual_seed(0)
    image = torch.rand(40, 50)
    for _ in range(20):
        warp = torch.eye(3) + torch.randn(3, 3) * torch.tensor([[0.1], [0.1], [0.001]])
        warp[:2, 2] += 3 * torch.randn(2)
        warp[2, 2] = 1
        result = library.warp_perspective(image, warp, [30, 20])
        expected = calcops_jit.warp_perspective(image, warp, [30, 20])
        # OpenCV rounds x and y to 1/32 pixel, so each is off by up to 1/64. Neighbouring pixels
        # differ by at most 1.
        axes = 2
        assert (result - expected).abs().max() <= axes / 64 + 1e-3


@pytest.mark.parametrize(
    "change", [lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, -t], 2)[:, :, 0]]
)
def test_strided_tensors_give_the_result_of_contiguous_ones(library, change):
    image = torch.randn(9, 12)
    warp = torch.tensor([[1.1, 0.2, 1], [0, 0.9, -1], [0.001, 0, 1]])
    assert not change(image).is_contiguous()
    expected = library.warp_perspective(image, warp)
    assert torch.equal(library.warp_perspective(change(image), change(warp)), expected)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"image": torch.ones(4, 4).double()}, "expected `image` of dtype Float, got Double"),
        ({"warp": torch.eye(3).int()}, "expected `warp` of dtype Float, got Int"),
        ({"image": torch.ones(4, 4, 3)}, "expected `image` of two dimensions, got [4, 4, 3]"),
        ({"warp": torch.eye(4)}, "expected `warp` of shape [3, 3], got [4, 4]"),
        ({"image": torch.ones(0, 4)}, "expected `image` with pixels, got [0, 4]"),
        ({"dsize": [8, 0]}, "expected `dsize` of positive numbers, got [8, 0]"),
    ],
)
def test_arguments_that_opencv_would_misread_are_refused(library, changes, text):
    good = {"image": torch.ones(4, 4), "warp": torch.eye(3), "dsize": [8, 8]}
    with pytest.raises(RuntimeError, match=re.escape(text)):
        library.warp_perspective(*(good | changes).values())


def test_a_cuda_tensor_is_refused(library, gpu):
    with pytest.raises(NotImplementedError, match="CUDA"):
        library.warp_perspective(torch.ones(4, 4, device=gpu), torch.eye(3, device=gpu))


def test_the_script_prints_differences_graphs_and_the_output_of_the_program(printed):
    out, _ = printed
    differences = re.findall(r"largest difference .* ([\d.]+)$", out, re.MULTILINE)
    shift, perspective = map(float, differences)
    assert shift == 0
    assert 0 < perspective < 0.2  # of an image of randn, whose neighbours differ by up to about 6
    assert "myops::add(%" in out
    assert "my_ops.warp_perspective(image, warp): [8, 8]\n" in out
    assert out.endswith(HOST)


def test_without_opencv_one_line_says_what_to_install():
    script = FOLDER / "warp_perspective_opencv.py"
    result = run(sys.executable, script, PATH="/nowhere", fails=True)
    assert result.stdout == ""
    assert re.fullmatch(
        r"skipped: no OpenCV headers; apt-get install .*libopencv-dev.*\n", result.stderr
    )


def test_setuptools_makes_a_library(printed, tmp_path):
    shutil.copytree(
        FOLDER, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build")
    )
    setup = "setup.py", "-q", "build_ext", "--build-lib", tmp_path
    run(sys.executable, *setup, cwd=tmp_path / "source")
    assert_loads(tmp_path / "warp_perspective.so")


def test_cmake_makes_a_library_for_python_and_the_program(printed, tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-S", FOLDER, "-B", tmp_path, prefix)
    # If find_package(Torch) looked for a toolkit, CMake's cache would have this variable.
    assert "CUDA_TOOLKIT_ROOT_DIR" not in (tmp_path / "CMakeCache.txt").read_text()
    run("cmake", "--build", tmp_path, "-j2")
    archives = [printed[1] / name for name in ("compute_scripted.pt", "warp_scripted.pt")]
    assert run(tmp_path / "myops_add", *archives).stdout == HOST
    assert_loads(tmp_path / "libwarp_perspective.so")


def assert_loads(library):
    """Check that a new process can load a library and call its operators."""
    script = f"""import torch
torch.ops.load_library("{library}")
print(torch.ops.my_ops.warp_perspective(torch.arange(16.0).view(4, 4), torch.eye(3), [1, 3]).tolist())
print(torch.ops.myops.add(torch.ones(1), torch.ones(1)).item())"""
    assert run(sys.executable, "-c", script).stdout == "[[0.0, 1.0, 2.0]]\n2.0\n"
