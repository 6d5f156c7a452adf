// Runs a package in C++, without Python, for several batch sizes. export_compile.py builds and runs
// it so, with TORCH=$(python -c 'import torch; print(torch.__path__[0])'):
//
//   flags="-I$TORCH/include -I$TORCH/include/torch/csrc/api/include -L$TORCH/lib"
//   libraries="-Wl,-rpath,$TORCH/lib -Wl,--no-as-needed -ltorch -Wl,--as-needed -ltorch_cpu -lc10"
//   g++ -std=c++20 -O2 run_inference.cpp -o run_inference $flags $libraries
//   ./run_inference model.pt2 identity_conv_ops.so
//
// No symbol of libtorch is named here, so without --no-as-needed the linker drops it, and with it
// CUDA's kernels: it is what needs libtorch_cuda. The rpath makes LD_LIBRARY_PATH superfluous.
// Expected output, in one line, of cpu or cuda:
//
//   model.pt2 on cpu: [1, 3, 224, 224] identical, [2, 3, 224, 224] identical,
//     [5, 3, 224, 224] identical
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <stdexcept>

int main(int argc, char** argv) try {
  if (argc != 3) throw std::invalid_argument("run_inference model.pt2 identity_conv_ops.so");
  // Before the package, which holds an object of a class in it. Never closed: the model calls it as
  // long as it lives.
  if (!dlopen(argv[2], RTLD_NOW)) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const std::string device = model.get_metadata()["AOTI_DEVICE_KEY"];
  std::cout << argv[1] << " on " << device;
  const char* separator = ": ";
  for (int64_t batch : {1, 2, 5}) {
    const at::Tensor x = at::rand({batch, 3, 224, 224}, at::TensorOptions(c10::Device(device)));
    const at::Tensor y = model.run({x})[0];
    if (!at::equal(x, y)) throw std::runtime_error("not what went in");
    std::cout << separator << y.sizes() << " identical";
    separator = ", ";
  }
  std::cout << std::endl;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
