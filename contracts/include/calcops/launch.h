// What CUDA kernels share: how they are launched, and sums over the threads of a warp or a block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace calcops {

constexpr int kWarp = 32;

// Return the blocks that have room for all items.
inline int64_t blocks_for(int64_t items, int64_t items_of_block) {
  return items / items_of_block + (items % items_of_block != 0);
}

// Launch a kernel unless `blocks` is 0. Return its error, which is then no longer the runtime's
// last one; cudaErrorInvalidConfiguration if a grid may not have so many blocks.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

// Return the sum of x over a warp to each of its lanes. The tree of the sums is fixed.
__device__ inline double sum_of_lanes(double x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Sum each of the numbers over a block, in a fixed order. Return the sum of number k to thread k.
// `parts` is shared memory; a barrier has to precede its next use.
template <int kCount, int kWarps>
__device__ inline double sum_of_block(double (&numbers)[kCount], double (&parts)[kWarps][kCount]) {
  for (double& number : numbers) number = sum_of_lanes(number);
  if (threadIdx.x % kWarp == 0)
    for (int k = 0; k < kCount; ++k) parts[threadIdx.x / kWarp][k] = numbers[k];
  __syncthreads();
  double sum = 0;
  if (threadIdx.x < kCount)
    for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp][threadIdx.x];
  return sum;
}

}  // namespace calcops
