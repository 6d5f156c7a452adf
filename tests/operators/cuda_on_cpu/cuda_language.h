// The part of the CUDA language that the CUDA sources use, for a C++ compiler: see README.md.
// Other parts do not compile. A use that cannot be emulated ends the program.
#pragma once

#define __CUDACC__

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

using std::max;
using std::min;
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

namespace [[gnu::visibility("default")]] cuda_on_cpu {

// Prints an error with the kernel, block and thread that made it, and ends the process.
[[noreturn]] void fail(const char* what);

// Runs `kernel` in every thread of every block.
void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const std::function<void()>& kernel);

// Reports that a kernel runs. rewrite.py puts a call at the beginning of each kernel.
void enter(const char* kernel);

// Returns true in the run for the fault of this number, which a test has put into the source.
bool fault(int number);

enum class Meeting { kNone, kWarp, kBlock, kShuffle, kVote, kBlockVote };

// Waits until every thread of the warp or of the block has reached a meeting of the same kind.
void meet(Meeting kind);

// Returns the value of lane `from`. All lanes of the warp have to call this.
uint64_t exchange(uint64_t value, unsigned from);

// Returns the mask of the lanes whose value is `wanted`.
unsigned equal_lanes(unsigned mask, uint64_t value, uint64_t wanted);

inline void expect_all_lanes(unsigned mask) {
  if (mask != 0xffffffffu) fail("names some lanes only, which is not emulated");
}

template <class T>
T shuffle(unsigned mask, T value, unsigned from, int width) {
  static_assert(sizeof(T) <= 8);
  expect_all_lanes(mask);
  if (width != 32) fail("shuffles parts of a warp, which is not emulated");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits, from);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

int count_in_block(bool vote);

// Returns the memory of a __shared__ variable in the running block. It is filled with bytes that
// show a read before the first write.
void* shared_memory(const void* variable, size_t bytes);

}  // namespace cuda_on_cpu

[[gnu::visibility("default")]] extern uint3 threadIdx, blockIdx;
[[gnu::visibility("default")]] extern dim3 blockDim, gridDim;

inline void __syncthreads() { cuda_on_cpu::meet(cuda_on_cpu::Meeting::kBlock); }
inline int __syncthreads_or(int p) { return cuda_on_cpu::count_in_block(p) > 0; }
inline int __syncthreads_count(int p) { return cuda_on_cpu::count_in_block(p); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_on_cpu::expect_all_lanes(mask);
  cuda_on_cpu::meet(cuda_on_cpu::Meeting::kWarp);
}
inline void __threadfence() {}  // all threads always see each other's writes

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cuda_on_cpu::shuffle(mask, value, unsigned(lane) % 32, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return cuda_on_cpu::shuffle(mask, value, (threadIdx.x ^ unsigned(lanes)) % 32, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::shuffle(mask, value, lane >= step ? lane - step : lane, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::shuffle(mask, value, lane + step < 32 ? lane + step : lane, width);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return cuda_on_cpu::equal_lanes(mask, p != 0, true);
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
inline unsigned __match_any_sync(unsigned mask, unsigned value) {
  return cuda_on_cpu::equal_lanes(mask, value, value);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}

template <class T, class Change>
T change_atomically(T* p, Change change) {
  const T before = *p;
  *p = change(before);
  return before;
}
template <class T>
T atomicAdd(T* p, std::common_type_t<T> x) {
  return change_atomically(p, [&](T before) { return T(before + x); });
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> x) {
  return change_atomically(p, [&](T before) { return std::min(before, x); });
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> x) {
  return change_atomically(p, [&](T before) { return std::max(before, x); });
}
template <class T>
T atomicOr(T* p, std::common_type_t<T> x) {
  return change_atomically(p, [&](T before) { return T(before | x); });
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> x) {
  return change_atomically(p, [&](T) { return x; });
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> x) {
  return change_atomically(p, [&](T before) { return before == expected ? x : before; });
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  cuda_on_cpu::check_stream(stream);
  std::memset(p, value, bytes);
  return cudaSuccess;
}

// kernel<<<grid, block, shared, stream>>>(...), as rewrite.py writes it
#define CUDA_ON_CPU_LAUNCH(kernel, grid, block, shared, stream)                        \
  [&](auto... arguments) {                                                             \
    cuda_on_cpu::launch(grid, block, shared, stream, [&] { (kernel)(arguments...); }); \
  }

// __shared__ type name dimensions;, as rewrite.py writes it
#define CUDA_ON_CPU_SHARED(type, name, dimensions) \
  static char name##_key;                          \
  typedef type name##_shared dimensions;           \
  name##_shared& name =                            \
      *static_cast<name##_shared*>(cuda_on_cpu::shared_memory(&name##_key, sizeof(name##_shared)))
