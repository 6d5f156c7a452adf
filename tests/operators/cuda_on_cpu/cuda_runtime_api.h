// The types of the CUDA runtime, for every unit that includes this header: see README.md.
#pragma once

#include <cstddef>
#include <cstring>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration argument";
}
using cudaStream_t = struct CUstream_st*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The emulator is in the library of the core, and the kernels of others call it.
namespace [[gnu::visibility("default")]] cuda_on_cpu {

cudaStream_t current_stream();
void check_stream(cudaStream_t stream);

// Replace `x.is_cpu()` and `x.is_cuda()`: while the emulation is on, a CPU tensor is a CUDA tensor.
bool is_cpu(bool cpu);
bool is_cuda(bool cpu);

}  // namespace cuda_on_cpu

enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  cuda_on_cpu::check_stream(stream);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
