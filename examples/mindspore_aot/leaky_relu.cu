// For MindSpore's device_target "GPU". The work is queued on MindSpore's stream, in order with
// MindSpore's own work. The CPU waits only to read an attribute.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "leaky_relu.h"

template <class Function>
int on_stream(const char* name, void* stream, const Function& function) {
  return aot_operator(name, [&] {
    const c10::DeviceIndex device = c10::cuda::current_device();
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device));
    function(c10::Device(at::kCUDA, device));
  });
}

extern "C" {
__attribute__((visibility("default"))) int LeakyRelu(int nparam, void** params, int* ndims,
                                                     int64_t** shapes, const char** dtypes,
                                                     void* stream, void* /*extra*/) {
  return on_stream("LeakyRelu", stream, [&](c10::Device device) {
    leaky_relu(get_torch_tensors(nparam, params, ndims, shapes, dtypes, device));
  });
}

__attribute__((visibility("default"))) int LeakyReluGrad(int nparam, void** params, int* ndims,
                                                         int64_t** shapes, const char** dtypes,
                                                         void* stream, void* /*extra*/) {
  return on_stream("LeakyReluGrad", stream, [&](c10::Device device) {
    leaky_relu_grad(get_torch_tensors(nparam, params, ndims, shapes, dtypes, device));
  });
}
}
