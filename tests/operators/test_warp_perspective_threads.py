"""The CPU kernels of warp_perspective under ThreadSanitizer."""

import pytest
import thread_sanitizer

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
