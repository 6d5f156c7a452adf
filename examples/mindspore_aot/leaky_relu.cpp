// For MindSpore's device_target "CPU".
#include "leaky_relu.h"

extern "C" {
__attribute__((visibility("default"))) int LeakyRelu(int nparam, void** params, int* ndims,
                                                     int64_t** shapes, const char** dtypes,
                                                     void* /*stream*/, void* /*extra*/) {
  return aot_operator("LeakyRelu", [&] {
    leaky_relu(get_torch_tensors(nparam, params, ndims, shapes, dtypes, at::kCPU));
  });
}

__attribute__((visibility("default"))) int LeakyReluGrad(int nparam, void** params, int* ndims,
                                                         int64_t** shapes, const char** dtypes,
                                                         void* /*stream*/, void* /*extra*/) {
  return aot_operator("LeakyReluGrad", [&] {
    leaky_relu_grad(get_torch_tensors(nparam, params, ndims, shapes, dtypes, at::kCPU));
  });
}
}
