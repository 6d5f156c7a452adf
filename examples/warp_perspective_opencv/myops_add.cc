// Runs the archives that warp_perspective_opencv.py saves, which builds it, too:
//
//   ./myops_add compute_scripted.pt warp_scripted.pt
//
// Expected output:
//
//   myops::add: 4 6
//   my_ops::warp_perspective: 5 6 9 10
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <iostream>
#include <stdexcept>

static void print(const char* name, const at::Tensor& tensor) {
  std::cout << name;
  for (int64_t i = 0; i < tensor.numel(); ++i)
    std::cout << ' ' << tensor.flatten()[i].item<float>();
  std::cout << '\n';
}

int main(int argc, char** argv) try {
  if (argc != 3) throw std::invalid_argument("myops_add compute_scripted.pt warp_scripted.pt");
  torch::jit::Module compute = torch::jit::load(argv[1]), warp = torch::jit::load(argv[2]);
  print("myops::add:",
        compute.forward({at::tensor({1.0f, 2.0f}), at::tensor({3.0f, 4.0f})}).toTensor());
  // Moves the image up and left by one pixel; the archive asks for two rows of two.
  at::Tensor shift = at::eye(3);
  shift[0][2] = shift[1][2] = -1;
  const at::Tensor image = at::arange(16.0f).view({4, 4});
  print("my_ops::warp_perspective:", warp.forward({image, shift}).toTensor());
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
