// 3x - y, the smallest operator: copy this folder, rename, and put your own mathematics in.
//
// Both operators consist of ATen calls and are registered without a device or a derivative: PyTorch
// runs them on every device, differentiates and traces them as if the calls stood in Python. An
// operator with kernels of its own registers one for each device: see ops/force/.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include <tuple>

at::Tensor my_op_forward(const at::Tensor& x, const at::Tensor& y) {
  // sym_sizes, not sizes: under torch.compile and torch.export a size may be a symbol.
  TORCH_CHECK(x.sym_sizes() == y.sym_sizes(),
              "test_cpp::forward: expected `y` of the size of `x`, ", x.sym_sizes(), ", got ",
              y.sym_sizes());
  return at::mul(x, 3).sub(y);
}

std::tuple<at::Tensor, at::Tensor> my_op_backward(const at::Tensor& gradOutput) {
  return {at::mul(gradOutput, 3), at::neg(gradOutput)};
}

TORCH_LIBRARY(test_cpp, m) {
  m.def("forward(Tensor x, Tensor y) -> Tensor", &my_op_forward);
  m.def("backward(Tensor gradOutput) -> (Tensor, Tensor)", &my_op_backward);
}
// torch.func.vmap, too, may look into them; for others it needs a rule.
TORCH_LIBRARY_IMPL(test_cpp, FuncTorchBatchedDecomposition, m) {
  m.impl("forward", &my_op_forward);
  m.impl("backward", &my_op_backward);
}
