// CUDA kernels of environment_spline. In the sums, a block computes one atom: its threads compute
// 32 slots together, then each thread sums one B-spline. In the gradient, a thread computes one
// slot. Every result has one writer, so the bits are the same in each run.
#include <calcops/launch.h>

#include <cmath>

#include "environment_spline/environment_spline.h"
#include "environment_spline/environment_spline_math.h"

namespace calcops::ops::environment_spline {
namespace {

constexpr int kSlots = 32, kThreads = 128;

template <int kDegree>
struct Pair {
  static constexpr int64_t kEmpty = -1, kWrong = -2;
  int64_t place;  // the first row of P to which it adds, or kEmpty or kWrong
  double p[4 * (kDegree + 1)];
};

// Return the slot's kind, or kEmpty or kWrong. Write its vector and its directions.
template <int kDegree, class Real, class Index>
__device__ int64_t look_up(const SplineInputs<Real, Index>& in, int64_t slot, double* d,
                           double (*directions)[3]) {
  const int64_t kind = in.kind.data[slot];
  if (kind == -1) return Pair<kDegree>::kEmpty;
  if (kind < 0 || kind >= in.kinds()) return Pair<kDegree>::kWrong;
  double square = 0;
  for (int c = 0; c < 3; ++c) {
    d[c] = in.d.data[3 * slot + c];
    square += d[c] * d[c];
  }
  if (Cutoff{in.rcut_smth, in.rcut}.is_at_or_beyond(square)) return Pair<kDegree>::kEmpty;
  for (int64_t i = 0; i < in.directions(); ++i)
    for (int c = 0; c < 3; ++c)
      directions[i][c] = in.along.data[3 * (in.directions() * slot + i) + c];
  return kind;
}

template <class Real, class Index>
__device__ Kind constants_of(const SplineInputs<Real, Index>& in, int64_t kind, int64_t cells) {
  return Kind(in.davg.data + 4 * kind, in.dstd.data + 4 * kind, in.grid.data + 2 * kind, cells);
}

template <int kDegree, int D, class Real, class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(SplineInputs<Real, Index> in, Real* P) {
  __shared__ Pair<kDegree> pairs[kSlots];
  const int64_t atom = blockIdx.x, rows = in.kinds() * in.functions, cells = in.functions - kDegree;
  const Cutoff cutoff{in.rcut_smth, in.rcut};
  for (int64_t first_row = 0; first_row < rows; first_row += kThreads) {
    const int64_t row = first_row + threadIdx.x;
    double total[4] = {};
    for (int64_t first = 0; first < in.slots(); first += kSlots) {
      const int count = int(in.slots() - first < kSlots ? in.slots() - first : kSlots);
      __syncthreads();
      if (int(threadIdx.x) < count) {
        Pair<kDegree>& pair = pairs[threadIdx.x];
        double d[3], directions[D + 1][3];
        const int64_t kind =
            look_up<kDegree>(in, atom * in.slots() + first + threadIdx.x, d, directions);
        pair.place = kind;
        if (kind >= 0)
          pair.place =
              kind * in.functions + derivative<kDegree, D>(constants_of(in, kind, cells), cutoff,
                                                           cells, d, directions, pair.p);
      }
      __syncthreads();
      for (int j = 0; j < count; ++j) {
        const Pair<kDegree>& pair = pairs[j];
        if (pair.place == Pair<kDegree>::kWrong) total[0] = total[1] = total[2] = total[3] = NAN;
        const int64_t b = row - pair.place;
        if (pair.place < 0 || b < 0 || b > kDegree) continue;
        for (int a = 0; a < 4; ++a) total[a] += pair.p[4 * b + a];
      }
    }
    if (row < rows)
      for (int a = 0; a < 4; ++a) P[(4 * atom + a) * rows + row] = Real(total[a]);
  }
}

template <int kDegree, int D, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(SplineInputs<Real, Index> in, const Real* grad, Real* grad_d) {
  const int64_t slot = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= in.atoms() * in.slots()) return;
  double d[3], directions[D + 1][3], of_d[3];
  const int64_t kind = look_up<kDegree>(in, slot, d, directions);
  for (double& number : of_d) number = kind == Pair<kDegree>::kWrong ? NAN : 0;
  if (kind >= 0) {
    const int64_t rows = in.kinds() * in.functions, cells = in.functions - kDegree;
    const Real* of_kind = grad + slot / in.slots() * 4 * rows + kind * in.functions;
    gradient<kDegree, D>(
        constants_of(in, kind, cells), Cutoff{in.rcut_smth, in.rcut}, cells, d, directions,
        [&](int64_t row, int a) { return double(of_kind[a * rows + row]); }, of_d);
  }
  for (int c = 0; c < 3; ++c) grad_d[3 * slot + c] = Real(of_d[c]);
}

template <class Real, class Index>
cudaError_t environment_spline(SplineInputs<Real, Index> in, View<Real, 4> P, cudaStream_t stream) {
  const bool is_quintic = in.spline == Spline::kQuintic;
  auto kernel = is_quintic ? sum_kernel<5, 0, Real, Index> : sum_kernel<3, 0, Real, Index>;
  if (in.directions() == 1)
    kernel = is_quintic ? sum_kernel<5, 1, Real, Index> : sum_kernel<3, 1, Real, Index>;
  if (in.directions() == 2)
    kernel = is_quintic ? sum_kernel<5, 2, Real, Index> : sum_kernel<3, 2, Real, Index>;
  if (in.directions() == 3)
    kernel = is_quintic ? sum_kernel<5, 3, Real, Index> : sum_kernel<3, 3, Real, Index>;
  return launch(kernel, in.atoms(), kThreads, stream, in, P.data);
}

template <class Real, class Index>
cudaError_t environment_spline_backward(View<const Real, 4> grad, SplineInputs<Real, Index> in,
                                        View<Real, 3> grad_d, cudaStream_t stream) {
  const bool is_quintic = in.spline == Spline::kQuintic;
  auto kernel =
      is_quintic ? backward_kernel<5, 0, Real, Index> : backward_kernel<3, 0, Real, Index>;
  if (in.directions() == 1)
    kernel = is_quintic ? backward_kernel<5, 1, Real, Index> : backward_kernel<3, 1, Real, Index>;
  if (in.directions() == 2)
    kernel = is_quintic ? backward_kernel<5, 2, Real, Index> : backward_kernel<3, 2, Real, Index>;
  const int64_t blocks = blocks_for(in.atoms() * in.slots(), kThreads);
  return launch(kernel, blocks, kThreads, stream, in, grad.data, grad_d.data);
}

const Kernel kCuda("_environment_spline_along", environment_spline<float, int32_t>,
                   environment_spline<float, int64_t>, environment_spline<double, int32_t>,
                   environment_spline<double, int64_t>);
const Kernel kBackwardCuda("_environment_spline_backward",
                           environment_spline_backward<float, int32_t>,
                           environment_spline_backward<float, int64_t>,
                           environment_spline_backward<double, int32_t>,
                           environment_spline_backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::environment_spline
