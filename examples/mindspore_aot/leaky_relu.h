// ATen's leaky_relu as it is called by leaky_relu.cpp and leaky_relu.cu; the tensors are those of
// MindSpore's operator.
#pragma once
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>

#include "ms_ext.h"

// The attribute of the operator comes as one more input of no dimensions, or not at all. `extra`,
// through which MindSpore offers attributes, is a class with std::string in it, of another C++ ABI
// than PyTorch's: not to be touched.
inline double negative_slope(const std::vector<at::Tensor>& tensors, size_t without) {
  TORCH_CHECK(tensors.size() == without || tensors.size() == without + 1, "expected ", without,
              " or ", without + 1, " inputs and outputs, got ", tensors.size());
  if (tensors.size() == without) return 0.01;
  const at::Tensor& slope = tensors[without - 1];
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
