// CUDA kernels of tabulated_sum. In the sums, a block computes one atom: its threads look up 32
// slots together, then each thread sums one function. In the gradient, a warp computes one slot.
// Every result has one writer, so the bits are the same in each run.
#include <calcops/launch.h>

#include <cmath>

#include "tabulated_sum/tabulated_sum.h"
#include "tabulated_sum/tabulated_sum_math.h"

namespace calcops::ops::tabulated_sum {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

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
  const int64_t kind = in.kind.data[slot];
  if (kind < 0 || kind >= in.kinds()) {
    pair.coefficients = kind == -1 ? Pair<Real>::kEmpty : Pair<Real>::kWrong;
    return;
  }
  double w[kPowers], next[kPowers];
  const int64_t cell = weights(in.grid.data + 5 * kind, in.cells(), double(in.x.data[slot]),
                               in.order, w, gradient ? next : nullptr);
  pair.coefficients = (kind * in.cells() + cell) * kPowers * in.functions();
  for (int k = 0; k < kPowers; ++k) {
    pair.w[k] = Real(w[k]);
    if (gradient) pair.next[k] = Real(next[k]);
  }
  for (int a = 0; a < 4; ++a) pair.R[a] = in.R.data[4 * slot + a];
}

template <class Real, class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumInputs<Real, Index> in, View<Real, 3> T) {
  __shared__ Pair<Real> pairs[kWarp];
  const int64_t atom = blockIdx.x, M = in.functions();
  for (int64_t first_m = 0; first_m < M; first_m += kThreads) {
    const int64_t m = first_m + threadIdx.x;
    double total[4] = {};
    for (int64_t first = 0; first < in.slots(); first += kWarp) {
      const int count = int(in.slots() - first < kWarp ? in.slots() - first : kWarp);
      __syncthreads();
      if (int(threadIdx.x) < count)
        look_up(in, atom * in.slots() + first + threadIdx.x, false, pairs[threadIdx.x]);
      __syncthreads();
      if (m >= M) continue;
      Real sum[4] = {};
      for (int j = 0; j < count; ++j) {
        const Pair<Real>& pair = pairs[j];
        if (pair.coefficients == Pair<Real>::kWrong)
          total[0] = total[1] = total[2] = total[3] = NAN;
        if (pair.coefficients < 0) continue;
        const Real* c = in.table.data + pair.coefficients + m;
        Real g = 0;
        for (int k = 0; k < kPowers; ++k) g += pair.w[k] * c[k * M];
        for (int a = 0; a < 4; ++a) sum[a] += pair.R[a] * g;
      }
      for (int a = 0; a < 4; ++a) total[a] += sum[a];
    }
    if (m < M)
      for (int a = 0; a < 4; ++a) T.data[(4 * atom + a) * M + m] = Real(total[a]);
  }
}

template <class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(SumInputs<Real, Index> in, View<const Real, 3> grad, SumGradients<Real> out) {
  const int64_t slot = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp, M = in.functions();
  if (slot >= in.atoms() * in.slots()) return;
  const int lane = threadIdx.x % kWarp;
  Pair<Real> pair;
  look_up(in, slot, true, pair);
  double of_x = 0, of_R[4] = {};
  if (pair.coefficients >= 0) {
    const Real* upstream = grad.data + slot / in.slots() * 4 * M;
    for (int64_t m = lane; m < M; m += kWarp) {
      const Real* c = in.table.data + pair.coefficients + m;
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
  if (lane == 0 && out.x) out.x.data[slot] = Real(of_x);
  if (lane < 4 && out.R) out.R.data[4 * slot + lane] = Real(of_R[lane]);
}

template <class Real, class Index>
cudaError_t sum(SumInputs<Real, Index> in, View<Real, 3> T, cudaStream_t stream) {
  const int64_t blocks = in.functions() > 0 ? in.atoms() : 0;
  return launch(sum_kernel<Real, Index>, blocks, kThreads, stream, in, T);
}

template <class Real, class Index>
cudaError_t backward(View<const Real, 3> grad, SumInputs<Real, Index> in, SumGradients<Real> out,
                     cudaStream_t stream) {
  const int64_t blocks = blocks_for(in.atoms() * in.slots(), kWarps);
  return launch(backward_kernel<Real, Index>, blocks, kThreads, stream, in, grad, out);
}

const Kernel kSumCuda("tabulated_sum", sum<float, int32_t>, sum<float, int64_t>,
                      sum<double, int32_t>, sum<double, int64_t>);
const Kernel kBackwardCuda("_tabulated_sum_backward", backward<float, int32_t>,
                           backward<float, int64_t>, backward<double, int32_t>,
                           backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::tabulated_sum
