// CUDA kernels of tabulated_sum. In the sums, a block computes one atom: its threads look up 32
// slots together, then each thread sums one function. In the gradient, a warp computes one slot.
// Every result has one writer, so the bits are the same in each run.
#include <cmath>

#include "tabulated_sum/tabulated_sum.h"
#include "tabulated_sum/tabulated_sum_math.h"

namespace calcops::ops::tabulated_sum {
namespace {

constexpr int kWarp = 32, kThreads = 128, kWarps = kThreads / kWarp;

// A slot: its coefficients in the table, and their weights for the derivatives of g of `order` and
// of the next one.
template <class Real>
struct Pair {
  static constexpr int64_t kEmpty = -1, kWrong = -2;
  int64_t coefficients;  // their position in the table, or kEmpty or kWrong
  Real w[kPowers], next[kPowers], R[4];
};

template <class Real, class Index>
__device__ void look_up(const SumInputs<Real, Index>& in, int64_t slot, bool gradient,
                        Pair<Real>& pair) {
  const int64_t kind = in.kind[slot];
  if (kind < 0 || kind >= in.kinds) {
    pair.coefficients = kind == -1 ? Pair<Real>::kEmpty : Pair<Real>::kWrong;
    return;
  }
  double w[kPowers], next[kPowers];
  const int64_t cell = weights(in.grid + 5 * kind, in.cells, double(in.x[slot]), in.order, w,
                               gradient ? next : nullptr);
  pair.coefficients = (kind * in.cells + cell) * kPowers * in.functions;
  for (int k = 0; k < kPowers; ++k) {
    pair.w[k] = Real(w[k]);
    if (gradient) pair.next[k] = Real(next[k]);
  }
  for (int a = 0; a < 4; ++a) pair.R[a] = in.R[4 * slot + a];
}

template <class Real, class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumInputs<Real, Index> in, Real* T) {
  __shared__ Pair<Real> pairs[kWarp];
  const int64_t atom = blockIdx.x, M = in.functions;
  for (int64_t first_m = 0; first_m < M; first_m += kThreads) {
    const int64_t m = first_m + threadIdx.x;
    double total[4] = {};
    for (int64_t first = 0; first < in.slots; first += kWarp) {
      const int count = int(in.slots - first < kWarp ? in.slots - first : kWarp);
      __syncthreads();
      if (int(threadIdx.x) < count)
        look_up(in, atom * in.slots + first + threadIdx.x, false, pairs[threadIdx.x]);
      __syncthreads();
      if (m >= M) continue;
      Real sum[4] = {};
      for (int j = 0; j < count; ++j) {
        const Pair<Real>& pair = pairs[j];
        if (pair.coefficients == Pair<Real>::kWrong)
          total[0] = total[1] = total[2] = total[3] = NAN;
        if (pair.coefficients < 0) continue;
        const Real* c = in.table + pair.coefficients + m;
        Real g = 0;
        for (int k = 0; k < kPowers; ++k) g += pair.w[k] * c[k * M];
        for (int a = 0; a < 4; ++a) sum[a] += pair.R[a] * g;
      }
      for (int a = 0; a < 4; ++a) total[a] += sum[a];
    }
    if (m < M)
      for (int a = 0; a < 4; ++a) T[(4 * atom + a) * M + m] = Real(total[a]);
  }
}

__device__ double sum_of_lanes(double x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(SumInputs<Real, Index> in, const Real* grad, SumGradients<Real> out) {
  const int64_t slot = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp, M = in.functions;
  if (slot >= in.atoms * in.slots) return;
  const int lane = threadIdx.x % kWarp;
  Pair<Real> pair;
  look_up(in, slot, true, pair);
  double of_x = 0, of_R[4] = {};
  if (pair.coefficients >= 0) {
    const Real* upstream = grad + slot / in.slots * 4 * M;
    for (int64_t m = lane; m < M; m += kWarp) {
      const Real* c = in.table + pair.coefficients + m;
      Real g = 0, slope = 0, along = 0;
      for (int k = 0; k < kPowers; ++k) {
        g += pair.w[k] * c[k * M];
        slope += pair.next[k] * c[k * M];
      }
      for (int a = 0; a < 4; ++a) {
        const Real above = upstream[a * M + m];
        of_R[a] += double(above * g);
        along += pair.R[a] * above;
      }
      of_x += double(along * slope);
    }
  } else if (pair.coefficients == Pair<Real>::kWrong) {
    of_x = of_R[0] = of_R[1] = of_R[2] = of_R[3] = NAN;
  }
  of_x = sum_of_lanes(of_x);
  for (double& sum : of_R) sum = sum_of_lanes(sum);
  if (lane == 0 && out.x) out.x[slot] = Real(of_x);
  if (lane < 4 && out.R) out.R[4 * slot + lane] = Real(of_R[lane]);
}

}  // namespace

template <class Real, class Index>
cudaError_t tabulated_sum_cuda(const SumInputs<Real, Index>& in, Real* T, cudaStream_t stream) {
  if (in.atoms > 0 && in.functions > 0)
    sum_kernel<<<unsigned(in.atoms), kThreads, 0, stream>>>(in, T);
  return cudaGetLastError();
}

template <class Real, class Index>
cudaError_t tabulated_sum_backward_cuda(const SumInputs<Real, Index>& in, const Real* grad,
                                        const SumGradients<Real>& out, cudaStream_t stream) {
  const int64_t slots = in.atoms * in.slots;
  if (slots > 0)
    backward_kernel<<<unsigned((slots + kWarps - 1) / kWarps), kThreads, 0, stream>>>(in, grad,
                                                                                      out);
  return cudaGetLastError();
}

#define INSTANTIATE(Real, Index)                                                               \
  template cudaError_t tabulated_sum_cuda(const SumInputs<Real, Index>&, Real*, cudaStream_t); \
  template cudaError_t tabulated_sum_backward_cuda(const SumInputs<Real, Index>&, const Real*, \
                                                   const SumGradients<Real>&, cudaStream_t);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::tabulated_sum
