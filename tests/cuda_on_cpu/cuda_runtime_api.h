// The CUDA runtime's types, for every unit that asks for them: see README.md.
#pragma once

#include <cstddef>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration argument";
}
using cudaStream_t = struct CUstream_st*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cuda_on_cpu {

cudaStream_t current_stream();

// What `x.is_cpu()` and `x.is_cuda()` are while the emulation is on.
bool is_cpu(bool cpu);
bool is_cuda(bool cpu);

}  // namespace cuda_on_cpu
