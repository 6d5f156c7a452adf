"""calcops::warp_perspective: large sizes, memory, threads, error texts, torch.compile."""

import pytest
import thread_sanitizer
import torch
from reference import assert_equal_lists
from reference_warp_perspective import BORDERS, SHRUNK, TILTED, random_image

import calcops_jit
from calcops_jit import warp_perspective


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_rows_of_any_length_use_no_memory_out_of_bounds(dtype):
    """Kernels take blocks of pixels, here with all taps inside the image."""
    pytest.importorskip("hypothesis")
    warp = torch.tensor([[1.0, 0, 0.25], [0, 1, 0.25], [0, 0, 1]])
    for width in (1, 7, 8, 9, 15, 17):
        image = random_image(3, width + 1, dtype=dtype)
        options = {"interpolation": "linear", "border_mode": "constant", "border_value": None}
        options |= {"inverse_map": True, "destination": None}
        arguments = {"image": image, "warp": warp, "dsize": [2, width], **options}
        calcops_jit.check(torch.ops.calcops.warp_perspective, "memory", arguments)


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


GOOD = {"image": torch.zeros(2, 3, 5, 6), "warp": torch.eye(3), "dsize": (4, 4)}
TRANSPARENT = {"border_mode": "transparent"}
OF_IMAGE = "`image` of shape [..., C, H, W] or [H, W], got"
OF_WARP = "`warp` of shape [..., 3, 3] or [3, 3], [...] = [2], got"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"image": torch.zeros(5)}, f"{OF_IMAGE} [5]"),
        (
            {"image": torch.zeros(4, 2, 3, 5, 6), "warp": torch.zeros(2, 3, 3)},
            "`warp` of shape [..., 3, 3] or [3, 3], [...] = [4, 2], got [2, 3, 3]",
        ),
        ({"warp": torch.eye(4)}, f"{OF_WARP} [4, 4]"),
        ({"warp": torch.eye(3)[0]}, f"{OF_WARP} [3]"),
        ({"warp": torch.zeros(3, 3, 3)}, f"{OF_WARP} [3, 3, 3]"),
        ({"dsize": (-1, 4)}, "`dsize` (height, width), both >= 0, got [-1, 4]"),
        ({"dsize": (4,)}, "`dsize` (height, width), both >= 0, got [4]"),
        (TRANSPARENT, '`destination` a tensor where `border_mode` is "transparent", got none'),
        (
            {"destination": torch.zeros(2, 3, 4, 4)},
            '`destination` none where `border_mode` is not "transparent", got a tensor',
        ),
        (
            TRANSPARENT | {"destination": torch.zeros(3, 4, 4)},
            "`destination` of the result's shape [2, 3, 4, 4], got [3, 4, 4]",
        ),
        ({"border_value": [1.0, 2.0]}, "`border_value` of one value or C = 3, got 2 values"),
    ],
)
def test_an_error_of_a_check_names_the_argument_its_rule_and_its_value(bad, message):
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


# ---- torch.compile ------------------------------------------------------------------------------


def warped_twice(image, warp, height, width):
    once = warp_perspective(image, warp, (height, width), border_mode="reflect_101")
    return warp_perspective(
        once.sin(), warp, (height + 1, width), border_value=[0.5], inverse_map=True
    )


def arguments(*image_shape, device):
    image = random_image(*image_shape).to(device).requires_grad_()
    return image, TILTED.to(device, copy=True).requires_grad_()


def test_compile_makes_one_graph_for_all_sizes_with_the_results_and_gradients_of_eager(device):
    def with_gradients(function, size):
        inputs = arguments(2, 3, size, size + 2, device=device)
        result = function(*inputs, size - 3, size + 1)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    torch._dynamo.reset()
    compiled = torch.compile(warped_twice, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (9, 14, 23):
            assert_equal_lists(with_gradients(compiled, size), with_gradients(warped_twice, size))


def test_compiled_autograd_gives_the_gradients_of_eager(device):
    torch._dynamo.reset()
    gradients = {}
    for mode in ("eager", "compiled"):
        inputs = arguments(3, 12, 13, device=device)
        result = warped_twice(*inputs, 8, 9).square().sum()
        if mode == "compiled":
            with torch._dynamo.compiled_autograd._enable(
                torch.compile(backend="aot_eager", fullgraph=True)
            ):
                result.backward()
        else:
            result.backward()
        gradients[mode] = [tensor.grad for tensor in inputs]
    for eager, compiled in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3)])
def test_compile_takes_a_batch_of_unbacked_size_with_one_matrix(shape):
    torch._dynamo.reset()
    image = random_image(4, 2, 9, 8)
    warp = TILTED.reshape(shape)
    torch._dynamo.decorators.mark_unbacked(image, 0)
    compiled = torch.compile(
        lambda *x: warp_perspective(*x, (5, 7)), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(image, warp), warp_perspective(image, warp, (5, 7)))


# ---- CUDA -----------------------------------------------------------------------------------------


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
