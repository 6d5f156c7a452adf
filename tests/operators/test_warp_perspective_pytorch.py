"""calcops::warp_perspective in PyTorch's other modes: opcheck, compile, export."""

import io

import pytest
import torch
from reference import opcheck
from reference_warp_perspective import DTYPES, SHRUNK, TILTED, random_image

from calcops_jit import warp_perspective

backward = torch.ops.calcops._warp_perspective_backward


def arguments(*image_shape, device="cpu", dtype=torch.float64):
    image = random_image(*image_shape).to(device, dtype).requires_grad_()
    return image, TILTED.to(device, dtype, copy=True).requires_grad_()


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *(((2, 7, 6), dtype) for dtype in DTYPES),
        *((shape, torch.float64) for shape in [(7, 6), (2, 2, 7, 6), (2, 2, 1, 7, 6)]),
    ],
)
def test_opcheck_passes_for_the_operator(shape, dtype, device):
    image = random_image(*shape, dtype=dtype).to(device)
    warp = TILTED.to(device, copy=True)
    if dtype.is_floating_point:
        image.requires_grad_()
        warp.requires_grad_()
    options = {
        "border_mode": "wrap",
        "interpolation": "nearest",
        "border_value": [3.0],
        "inverse_map": True,
    }
    opcheck(warp_perspective, (image, warp, (4, 5)))
    opcheck(warp_perspective, (image, warp, (4, 5)), options)


MASKS = [[True, False], [False, True]]


@pytest.mark.parametrize(
    "output_mask", [[True, True], *(pytest.param(mask, marks=pytest.mark.long) for mask in MASKS)]
)
def test_opcheck_passes_for_the_backward_operator(output_mask, device):
    image, warp = arguments(2, 3, 7, 6, device=device)
    grad = random_image(2, 3, 4, 5, seed=1).to(device).requires_grad_()
    opcheck(backward, (grad, image, warp, "linear", "reflect", [0.5], False, 0, 0, output_mask))
    opcheck(backward, (grad, image, warp, "nearest", "constant", None, True, 0, 0, output_mask))


def warped_twice(image, warp, height, width):
    once = warp_perspective(image, warp, (height, width), border_mode="reflect_101")
    return warp_perspective(
        once.sin(), warp, (height + 1, width), border_value=[0.5], inverse_map=True
    )


def test_compile_makes_one_graph_for_all_sizes_with_the_results_and_gradients_of_eager(device):
    torch._dynamo.reset()
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    for compiled in (
        torch.compile(warped_twice, fullgraph=True, dynamic=True, backend=backend),
        torch.compile(warped_twice, fullgraph=True, dynamic=True, backend="aot_eager"),
        torch.compile(warped_twice, fullgraph=True, dynamic=True),
    ):
        for size in (9, 14, 23):
            inputs = arguments(2, 3, size, size + 2, device=device)
            result = compiled(*inputs, size - 3, size + 1)
            expected = warped_twice(*inputs, size - 3, size + 1)
            torch.testing.assert_close(result, expected)
            upstream = torch.linspace(-1, 1, result.numel(), dtype=torch.float64, device=device)
            upstream = upstream.view_as(result)
            gradients, expected_gradients = (
                torch.autograd.grad(x, inputs, upstream) for x in (result, expected)
            )
            for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(gradient, expected_gradient)
    assert len(graphs) == 1


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


class Warp(torch.nn.Module):
    def forward(self, image, warp):
        return torch.ops.calcops.warp_perspective(image, warp, [5, 7], border_mode="wrap")


def test_an_exported_program_with_dynamic_sizes_runs_at_other_sizes():
    batch = torch.export.Dim("batch", min=2)
    height = torch.export.Dim("height", min=2)
    example = (random_image(3, 2, 9, 8), torch.stack([TILTED, SHRUNK, TILTED]))
    program = torch.export.export(
        Warp(), example, dynamic_shapes=({0: batch, 2: height}, {0: batch})
    )
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    image = random_image(5, 2, 31, 8)
    warps = torch.stack([TILTED] * 3 + [SHRUNK] * 2)
    result = torch.export.load(stored).module()(image, warps)
    assert torch.equal(result, warp_perspective(image, warps, (5, 7), border_mode="wrap"))


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
