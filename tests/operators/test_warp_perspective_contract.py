"""calcops::warp_perspective: default and empty sizes, threads, unwritten memory, error texts."""

import pytest
import thread_sanitizer
import torch
from reference_warp_perspective import (
    BORDERS,
    INTERPOLATIONS,
    SHRUNK,
    TILTED,
    random_image,
    reference,
)

from calcops_jit import warp_perspective


def test_without_dsize_the_result_has_the_images_size(device):
    for shape in (5, 7), (2, 5, 7), (3, 2, 5, 7):
        image = torch.rand(shape, dtype=torch.float64, device=device, requires_grad=True)
        matrix = TILTED.to(device, copy=True).requires_grad_()
        result = warp_perspective(image, matrix)
        assert torch.equal(result, warp_perspective(image, matrix, (5, 7)))
        tangents = torch.rand_like(image), torch.rand_like(matrix)
        _, tangent = torch.func.jvp(warp_perspective, (image, matrix), tangents)
        _, expected = torch.func.jvp(
            lambda i, m: warp_perspective(i, m, (5, 7)), (image, matrix), tangents
        )
        assert torch.equal(tangent, expected)
        matrices = torch.stack([matrix.detach()] * 2)
        mapped = torch.vmap(warp_perspective, (None, 0))(image.detach(), matrices)
        assert torch.equal(mapped[1], result)
    compiled = torch.compile(warp_perspective, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(image, matrix), result)


def test_an_error_names_dsize_if_the_result_is_too_large_for_any_memory():
    image = torch.rand(5, 7)
    for dsize in (2**31, 2**31), (2**62, 2), (2**40, 2**20):
        for device in "cpu", "meta":
            with pytest.raises(
                RuntimeError, match="^calcops::warp_perspective: expected `dsize` for which memory"
            ):
                warp_perspective(image.to(device), TILTED.to(device), dsize)
            with pytest.raises(RuntimeError, match="expected `dsize` for which memory"):
                warp_perspective(torch.rand(0, 5, 7, device=device), TILTED.to(device), dsize)
    with pytest.raises(
        RuntimeError, match=r"expected `dsize` \(height, width\), both >= 0, got \[4\]"
    ):
        warp_perspective(image, TILTED, [4])


def test_empty_images_and_results_work(device):
    warp = TILTED.to(device)
    for shape, warp_shape, result_shape in (
        ((0, 5, 6), (3, 3), (0, 4, 3)),
        ((0, 3, 5, 6), (3, 3), (0, 3, 4, 3)),
        ((0, 3, 5, 6), (0, 3, 3), (0, 3, 4, 3)),
        ((1, 3, 5, 6), (0, 3, 3), (0, 3, 4, 3)),
        ((3, 5, 6), (0, 3, 3), (0, 3, 4, 3)),
    ):
        image = torch.rand(shape, dtype=torch.float64, device=device, requires_grad=True)
        matrices = warp.expand(warp_shape).clone().requires_grad_()
        result = warp_perspective(image, matrices, (4, 3))
        assert result.shape == result_shape
        for gradient in torch.autograd.grad(result.sum(), (image, matrices)):
            assert torch.equal(gradient, torch.zeros_like(gradient))
    for dsize in ((0, 4), (4, 0), (0, 0)):
        image = torch.rand(2, 5, 6, dtype=torch.float64, device=device, requires_grad=True)
        result = warp_perspective(image, warp, dsize)
        assert result.shape == (2, *dsize)
        (gradient,) = torch.autograd.grad(result.sum(), image)
        assert torch.equal(gradient, torch.zeros_like(image))


@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_pixels_is_all_border_value(size, border_mode, device):
    image = torch.rand(2, *size, device=device, requires_grad=True)
    warp = TILTED.to(device, copy=True).requires_grad_()
    result = warp_perspective(
        image, warp, (3, 4), border_mode=border_mode, border_value=[0.25, 0.5]
    )
    assert torch.equal(
        result, torch.tensor([0.25, 0.5], device=device)[:, None, None].expand(2, 3, 4)
    )
    _, gradient = torch.autograd.grad(result.sum(), (image, warp))
    assert torch.equal(gradient, torch.zeros_like(warp))


def test_more_channels_than_a_launch_takes_are_right(device):
    image = random_image(300, 5, 6)  # a launch takes 256 channels
    border = torch.linspace(0, 1, 300, dtype=torch.float64)
    result = warp_perspective(
        image.to(device), TILTED.to(device), (7, 9), border_value=border.tolist()
    )
    expected = reference(image, TILTED, (7, 9), border=border.numpy())
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=1e-12)


@pytest.mark.long  # 12 GB
@pytest.mark.parametrize("shape", [(1, 50000, 50000), (3, 30000, 30000)], ids=str)
def test_images_of_more_than_two_to_the_31_pixels_are_right(shape):
    """The value of a pixel is a function of its row and column. The map is a quarter turn."""
    channels, size, _ = shape
    column = torch.arange(size, dtype=torch.int64)
    row = column[:, None]
    image = torch.empty(shape, dtype=torch.uint8)
    for c in range(channels):
        for part in torch.arange(size).split(1000):
            image[c, part] = ((row[part] * 31 + column * 17 + c) % 251).to(torch.uint8)
    turn = torch.tensor([[0.0, -1, size - 1], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    for interpolation in ("linear", "nearest"):
        result = warp_perspective(image, turn, (size, size), interpolation)
        for c in range(channels):
            for v in (0, 1, size // 2, size - 1):
                assert torch.equal(result[c, v], image[c, :, v].flip(0))
        del result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("interpolation", ["linear", "cubic"])
@pytest.mark.parametrize("border_mode", BORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_gradients_are_bitwise_equal_for_1_to_4_threads(
    dtype, border_mode, interpolation
):
    image = random_image(2, 3, 211, 190, dtype=dtype).requires_grad_()
    warps = torch.stack([TILTED, SHRUNK]).requires_grad_()
    upstream = random_image(2, 3, 170, 230, dtype=dtype, seed=1)

    def run(threads):
        torch.set_num_threads(threads)
        result = warp_perspective(image, warps, (170, 230), interpolation, border_mode)
        return result, *torch.autograd.grad(result, (image, warps), upstream)

    with_one_thread = run(1)
    for threads in (2, 3, 4):
        for result, expected in zip(run(threads), with_one_thread, strict=True):
            assert torch.equal(result, expected), threads


@pytest.fixture
def filled_with_nan():
    """Let torch.empty fill new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


PROGRAM = """
#include <vector>
#include "warp_perspective/warp_perspective.h"
using namespace calcops;
using namespace calcops::ops::warp_perspective;

int main() {
  const int64_t N = 2, C = 3, H = 61, W = 83;
  const double warp[9] = {1.05, 0.12, -3.1, -0.08, 0.93, 2.3, 7.1e-4, -9.1e-4, 1}, border[C] = {};
  for (Border mode : {Border::kConstant, Border::kReflect101}) {
    const Interpolation how =
        mode == Border::kConstant ? Interpolation::kLinear : Interpolation::kCubic;
    std::vector<float> image(N * C * H * W, 1), out(image), grad_image(image.size());
    std::vector<double> grad_warp(9);
    const WarpInputs<float> in{{N, N, 1, C, H, W, H, W, mode, how, false},
                               image.data(), {C * H * W, H * W, W, 1}, warp, border};
    warp_perspective<float>(in, nullptr, out.data());
    warp_perspective_backward(
        in, WarpGradients<float>{out.data(), grad_image.data(), grad_warp.data()});
  }
}
"""


@pytest.mark.long
def test_the_kernels_have_no_data_race(tmp_path):
    thread_sanitizer.run(
        tmp_path,
        PROGRAM,
        "warp_perspective/warp_perspective_cpu.cpp",
        "warp_perspective/warp_perspective_backward_cpu.cpp",
    )


@pytest.mark.usefixtures("filled_with_nan")
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("border_mode", BORDERS)
def test_every_element_of_results_and_gradients_is_written(border_mode, interpolation, device):
    assert torch.empty(1).isnan().all()
    image = random_image(2, 3, 50, 40).to(device).requires_grad_()
    warp = torch.stack([TILTED, torch.zeros(3, 3)]).to(device).requires_grad_()
    result = warp_perspective(image, warp, (33, 70), interpolation, border_mode)
    for values in (result, *torch.autograd.grad(result.sum(), (image, warp))):
        assert values.isfinite().all()


GOOD = {"image": torch.zeros(2, 3, 5, 6), "warp": torch.eye(3), "dsize": (4, 4)}
TRANSPARENT = {"border_mode": "transparent"}
OF_IMAGE = "`image` of shape [..., C, H, W] or [H, W], got"
OF_WARP = "`warp` of shape [..., 3, 3] or [3, 3], [...] = [2], got"
BORDER_MODES = '"constant", "replicate", "reflect", "wrap", "reflect_101" or "transparent"'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"image": torch.zeros(5)}, f"{OF_IMAGE} [5]"),
        (
            {"image": torch.zeros(4, 2, 3, 5, 6), "warp": torch.zeros(2, 3, 3)},
            "`warp` of shape [..., 3, 3] or [3, 3], [...] = [4, 2], got [2, 3, 3]",
        ),
        (
            {"image": torch.zeros(5, 6).int()},
            "`image` uint8, uint16, int16, float16, bfloat16, float32 or float64, got int32",
        ),
        ({"warp": torch.eye(3).int()}, "`warp` float32 or float64, got int32"),
        ({"warp": torch.eye(4)}, f"{OF_WARP} [4, 4]"),
        ({"warp": torch.eye(3)[0]}, f"{OF_WARP} [3]"),
        ({"warp": torch.zeros(1, 1, 3, 3)}, f"{OF_WARP} [1, 1, 3, 3]"),
        ({"warp": torch.zeros(3, 3, 3)}, f"{OF_WARP} [3, 3, 3]"),
        ({"warp": torch.eye(3, device="meta")}, "`warp` on cpu like `image`, got meta"),
        ({"dsize": (-1, 4)}, "`dsize` (height, width), both >= 0, got [-1, 4]"),
        ({"dsize": (4,)}, "`dsize` (height, width), both >= 0, got [4]"),
        ({"interpolation": "area"}, '`interpolation` "linear", "cubic" or "nearest", got "area"'),
        ({"border_mode": "mirror"}, f'`border_mode` {BORDER_MODES}, got "mirror"'),
        (TRANSPARENT, '`destination` a tensor where `border_mode` is "transparent", got none'),
        (
            {"destination": torch.zeros(2, 3, 4, 4)},
            '`destination` none where `border_mode` is not "transparent", got a tensor',
        ),
        (
            TRANSPARENT | {"destination": torch.zeros(3, 4, 4)},
            "`destination` of the result's shape [2, 3, 4, 4], got [3, 4, 4]",
        ),
        (
            TRANSPARENT | {"destination": torch.zeros(2, 3, 4, 4).double()},
            "`destination` of dtype float32 like `image`, got float64",
        ),
        ({"border_value": [1.0, 2.0]}, "`border_value` of one value or C = 3, got 2 values"),
    ],
)
def test_an_error_names_the_argument_its_rule_and_its_value(bad, message):
    with pytest.raises(RuntimeError) as error:
        warp_perspective(**{**GOOD, **bad})
    first_line = str(error.value).split("\n")[0]
    assert first_line.removesuffix(".") == f"calcops::warp_perspective: expected {message}"


@pytest.mark.parametrize("name", ["uint8", "uint16", "int16"])
def test_an_integer_image_with_a_matrix_that_requires_a_gradient_is_an_error(name):
    image = torch.zeros(5, 6, dtype=getattr(torch, name))
    warp = torch.eye(3, requires_grad=True)
    message = f"expected `image` of a floating dtype where `warp` has a derivative, got {name}"
    with pytest.raises(RuntimeError, match=message):
        warp_perspective(image, warp)
    with torch.no_grad():
        warp_perspective(image, warp)


class TestOnAGpu:
    def test_kernels_run_on_the_current_stream_and_in_a_cuda_graph(self, gpu):
        image = random_image(3, 500, 400).to(gpu)
        warp = TILTED.to(gpu)
        expected = warp_perspective(image, warp, (300, 300))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(image)
            torch.cuda._sleep(10**8)
            late.copy_(image)  # a kernel on another stream would read the zeros
            result = warp_perspective(late, warp, (300, 300))
        stream.synchronize()
        assert torch.equal(result, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = warp_perspective(late, warp, (300, 300))
        late.zero_()
        graph.replay()
        assert torch.equal(result, torch.zeros_like(expected))
