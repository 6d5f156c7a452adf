// Calls of ATen's leaky_relu, for leaky_relu.cpp and leaky_relu.cu. `tensors` are the inputs and
// outputs of MindSpore's operator.
#pragma once
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>

#include "ms_ext.h"

// Returns the operator's attribute, which is the last input: a tensor of no dimensions. Without it,
// there are only `count` tensors. MindSpore offers attributes in `extra`, too, but that is a class
// with a std::string of another C++ ABI than PyTorch's, so it cannot be read here.
inline double negative_slope(const std::vector<at::Tensor>& tensors, size_t count) {
  TORCH_CHECK(tensors.size() == count || tensors.size() == count + 1, "expected ", count, " or ",
              count + 1, " inputs and outputs, got ", tensors.size());
  if (tensors.size() == count) return 0.01;
  const at::Tensor& slope = tensors[count - 1];
  TORCH_CHECK(slope.dim() == 0, "expected `negative_slope` of no dimensions, got ", slope.sizes());
  return slope.item<double>();
}

// x[, negative_slope] -> output
inline void leaky_relu(std::vector<at::Tensor> tensors) {
  const double slope = negative_slope(tensors, 2);
  expect_like("output", tensors.back(), tensors[0]);
  at::leaky_relu_out(tensors.back(), tensors[0], slope);
}

// grad, x[, negative_slope] -> gradient of x
inline void leaky_relu_grad(std::vector<at::Tensor> tensors) {
  const double slope = negative_slope(tensors, 3);
  expect_like("grad", tensors[0], tensors[1]);
  expect_like("output", tensors.back(), tensors[1]);
  at::leaky_relu_backward_out(tensors.back(), tensors[0], tensors[1], slope,
                              /*self_is_result=*/false);
}
