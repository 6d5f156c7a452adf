// CUDA kernels of density. In the sums, a block computes one atom: its threads compute a few pairs
// together, then the splines of these pairs, then each thread sums some products. In the gradient
// for d, a thread computes one slot. In that for the table, a block has a share of the slots and a
// table of its own. Every result has one writer, so the bits are the same in each run.
#include <calcops/launch.h>

#include <algorithm>
#include <cmath>

#include "density/density.h"
#include "density/density_math.h"

namespace calcops::ops::density {
namespace {

constexpr int kThreads = 128;
constexpr int kFunctions = 16;  // computed at a time

// N_lm of each harmonic. Kernels get them as an argument, because computing one takes up to eight
// divisions.
struct Norms {
  double of[(kMostL + 1) * (kMostL + 1)];

  Norms() {
    int q = 0;
    for (double& norm_of_q : of) norm_of_q = norm(q++);
  }
};

const Norms& norms_of_harmonics() {
  static const Norms all;
  return all;
}

// A pair: the factors of its products, with their derivatives along D directions.
template <int L, int D>
struct Pair {
  using N = Mixed<double, D>;
  static constexpr int kCount = (L + 1) * (L + 1), kParts = 1 << D;
  static constexpr int64_t kEmpty = -1, kWrong = -2;

  int64_t row;  // the first row of the table, or kEmpty or kWrong
  N unit[3], inverse;
  N weights[6], slopes[6];

  // Return whether the pair takes part in the sums.
  template <class Real, class Index>
  __device__ bool look_up(const DensityInputs<Real, Index>& in, int64_t slot, bool with_slopes) {
    const int64_t kind = in.kind.data[slot];
    row = kind == -1 ? kEmpty : kWrong;
    if (kind < 0 || kind >= in.kinds()) return false;
    N d[3], square{};
    for (int c = 0; c < 3; ++c) {
      d[c] = constant<N>(double(in.d.data[3 * slot + c]));
      for (int i = 0; i < D; ++i)
        parts_of<double>(d + c)[1 << i] = in.along.data[3 * (D * slot + i) + c];
      square = square + d[c] * d[c];
    }
    const double begin = in.grid.data[2 * kind], end = in.grid.data[2 * kind + 1];
    const double r2 = *parts_of<double>(&square);
    row = kEmpty;
    if (r2 >= end * end) return false;
    // A grid that does not rise makes the sums NaN.
    const double cells_per_unit = end > begin ? double(in.rows() - 5) / (end - begin) : NAN;
    inverse = expand_inverse_root<D>(square, r2 > 0 ? 1 / std::sqrt(r2) : INFINITY);
    for (int c = 0; c < 3; ++c) unit[c] = d[c] * inverse;
    const N position = (square * inverse - begin) * cells_per_unit;
    const double place = *parts_of<const double>(&position);
    const double last = double(in.rows() - 6);
    const double cell = place > 0 ? (place < last ? std::floor(place) : last) : 0;
    row = kind * in.rows() + int64_t(cell);
    find_weights<D>(position, cell, cells_per_unit, begin == 0, weights,
                    with_slopes ? slopes : nullptr);
    return true;
  }

  // Write Y_q / N_q [part][q]. The harmonic of l = 0 is a constant.
  __device__ void find_harmonics(double (*Y)[kCount]) const {
    for (int p = 0; p < kParts; ++p) Y[p][0] = p == 0;
    if constexpr (L > 0) {
      N values[kCount];
      Harmonics<L, N>(unit[0], unit[1], unit[2]).values(values);
      for (int p = 0; p < kParts; ++p)
        for (int q = 1; q < kCount; ++q) Y[p][q] = parts_of<double>(values + q - 1)[p];
    }
  }
};

// Return part p of a spline, from its coefficients.
template <class N, class Real>
__device__ double weighted(const N* weights, int p, const Real* coefficients, int64_t functions) {
  double sum = 0;
  for (int k = 0; k < 6; ++k)
    sum += parts_of<const double>(weights + k)[p] * double(coefficients[k * functions]);
  return sum;
}

// What the threads of a block share: some pairs, and for these the splines or the gradients for
// them, [part][pair][function], so that the functions of a pair are in different memory banks.
template <int L, int D>
struct Shared {
  static constexpr int kPairs = 32 >> D, kParts = 1 << D;

  int64_t row[kPairs];
  Mixed<double, D> weights[kPairs][6];
  double Y[kPairs][kParts][Pair<L, D>::kCount];
  double numbers[kParts][kPairs][kFunctions];

  // Look up pair j, the slot of a thread.
  template <class Real, class Index>
  __device__ void look_up(const DensityInputs<Real, Index>& in, int64_t slot, int j) {
    Pair<L, D> pair;
    const bool takes_part = pair.look_up(in, slot, false);
    row[j] = pair.row;
    if (!takes_part) return;
    for (int k = 0; k < 6; ++k) weights[j][k] = pair.weights[k];
    pair.find_harmonics(Y[j]);
  }
};

template <int L, int D, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(DensityInputs<Real, Index> in, Norms norms, Real* A) {
  using P = Pair<L, D>;
  using S = Shared<L, D>;
  constexpr int kSums = (P::kCount * kFunctions + kThreads - 1) / kThreads;
  __shared__ S shared;
  const int64_t atom = blockIdx.x;
  for (int64_t first_f = 0; first_f < in.functions(); first_f += kFunctions) {
    const int functions =
        int(in.functions() - first_f < kFunctions ? in.functions() - first_f : kFunctions);
    // A thread sums products number threadIdx.x, threadIdx.x + kThreads and so on. Beyond the last
    // one it repeats that one, so that all threads of a block take the same branches.
    const int products = P::kCount * functions;
    int q[kSums], f[kSums];
    for (int k = 0; k < kSums; ++k) {
      const int product = min(int(threadIdx.x) + k * kThreads, products - 1);
      q[k] = product / functions;
      f[k] = product % functions;
    }
    double sums[kSums] = {};
    bool has_wrong = false;
    for (int64_t first = 0; first < in.slots(); first += S::kPairs) {
      const int count = int(in.slots() - first < S::kPairs ? in.slots() - first : S::kPairs);
      __syncthreads();
      if (int(threadIdx.x) < count)
        shared.look_up(in, atom * in.slots() + first + threadIdx.x, int(threadIdx.x));
      __syncthreads();
      for (int i = threadIdx.x; i < count * functions; i += kThreads) {
        const int j = i / functions, f = i % functions;
        if (shared.row[j] < 0) continue;
        for (int p = 0; p < P::kParts; ++p)
          shared.numbers[p][j][f] = weighted(
              shared.weights[j], p, in.table.data + shared.row[j] * in.functions() + first_f + f,
              in.functions());
      }
      __syncthreads();
      for (int j = 0; j < count; ++j) {
        const int64_t row = shared.row[j];
        has_wrong |= row == P::kWrong;
        if (row < 0) continue;
        for (int k = 0; k < kSums && k * kThreads < products; ++k)
          for (int p = 0; p < P::kParts; ++p)
            sums[k] += shared.numbers[p][j][f[k]] * shared.Y[j][P::kParts - 1 - p][q[k]];
      }
    }
    for (int k = 0; k < kSums; ++k)
      if (int(threadIdx.x) + k * kThreads < products && q[k] < in.harmonics)
        A[(q[k] * in.atoms() + atom) * in.functions() + first_f + f[k]] =
            Real(has_wrong ? NAN : sums[k] * norms.of[q[k]]);
  }
}

template <int L, int D, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(DensityInputs<Real, Index> in, Norms norms, const Real* grad, Real* grad_d) {
  using P = Pair<L, D>;
  using N = typename P::N;
  const int64_t slot = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= in.atoms() * in.slots()) return;
  P pair;
  if (!pair.look_up(in, slot, true)) {
    for (int c = 0; c < 3; ++c) grad_d[3 * slot + c] = pair.row == P::kWrong ? Real(NAN) : Real(0);
    return;
  }
  const int64_t plane = in.atoms() * in.functions();
  const Real* upstream = grad + slot / in.slots() * in.functions();
  const Real* coefficients = in.table.data + pair.row * in.functions();
  const double norm_of_zero = norms.of[0];
  N of_r{}, h[P::kCount] = {}, slope[P::kCount] = {};
  for (int64_t f = 0; f < in.functions(); ++f)
    for (int p = 0; p < P::kParts; ++p) {
      const double of_g = weighted(pair.slopes, p, coefficients + f, in.functions());
      parts_of<double>(&of_r)[p] += of_g * norm_of_zero * double(upstream[f]);
      if constexpr (L > 0) {
        const double g = weighted(pair.weights, p, coefficients + f, in.functions());
        for (int q = 1; q < P::kCount && q < in.harmonics; ++q) {
          const double b = double(upstream[q * plane + f]);
          parts_of<double>(h + q - 1)[p] += b * g;
          parts_of<double>(slope + q - 1)[p] += b * of_g;
        }
      }
    }
  N of_d[3];
  if constexpr (L > 0)
    for (int q = 1; q < P::kCount; ++q) {
      h[q - 1] = h[q - 1] * norms.of[q];
      slope[q - 1] = slope[q - 1] * norms.of[q];
    }
  find_gradient<L>(pair.unit, pair.inverse, h, slope, of_r, of_d);
  for (int c = 0; c < 3; ++c)
    grad_d[3 * slot + c] = Real(parts_of<double>(of_d + c)[P::kParts - 1]);
}

// Thread (k, f) adds to the rows of the table whose number, modulo six, is k. So each number of the
// table has one writer.
template <int L, int D, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    table_kernel(DensityInputs<Real, Index> in, Norms norms, const Real* grad, double* tables) {
  using P = Pair<L, D>;
  using S = Shared<L, D>;
  __shared__ S shared;
  const int64_t slots = in.atoms() * in.slots(), parts = gridDim.x, part = blockIdx.x;
  const int64_t begin = slots / parts * part + (part < slots % parts ? part : slots % parts);
  const int64_t end = begin + slots / parts + (part < slots % parts);
  const int64_t size = in.kinds() * in.rows() * in.functions(), plane = in.atoms() * in.functions();
  double* table = tables + part * size;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) table[i] = 0;
  for (int64_t first_f = 0; first_f < in.functions(); first_f += kFunctions) {
    const int functions =
        int(in.functions() - first_f < kFunctions ? in.functions() - first_f : kFunctions);
    for (int64_t first = begin; first < end; first += S::kPairs) {
      const int count = int(end - first < S::kPairs ? end - first : S::kPairs);
      __syncthreads();
      if (int(threadIdx.x) < count) shared.look_up(in, first + threadIdx.x, int(threadIdx.x));
      __syncthreads();
      for (int i = threadIdx.x; i < count * functions; i += kThreads) {
        const int j = i / functions, f = i % functions;
        if (shared.row[j] < 0) continue;
        const Real* upstream = grad + (first + j) / in.slots() * in.functions() + first_f + f;
        for (int p = 0; p < P::kParts; ++p) {
          double sum = 0;
          for (int q = 0; q < P::kCount && q < in.harmonics; ++q)
            sum += double(upstream[q * plane]) * norms.of[q] * shared.Y[j][P::kParts - 1 - p][q];
          shared.numbers[p][j][f] = sum;
        }
      }
      __syncthreads();
      const int k = threadIdx.x / kFunctions, f = threadIdx.x % kFunctions;
      if (k >= 6 || f >= functions) continue;
      for (int j = 0; j < count; ++j) {
        const int64_t row = shared.row[j];
        if (row == P::kWrong && size > 0) table[k * in.functions() + first_f + f] = NAN;
        if (row < 0) continue;
        const int b = int((k + 6 - row % 6) % 6);
        double sum = 0;
        for (int p = 0; p < P::kParts; ++p)
          sum += parts_of<double>(shared.weights[j] + b)[p] * shared.numbers[p][j][f];
        table[(row + b) * in.functions() + first_f + f] += sum;
      }
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* tables, int64_t parts, int64_t size, Real* grad_table) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  double total = 0;
  for (int64_t part = 0; part < parts; ++part) total += tables[part * size + i];
  grad_table[i] = Real(total);
}

// Return the number of parts of the slots. A part has at least as many slots as a table has rows.
template <class Real, class Index>
int64_t parts_of_slots(const DensityInputs<Real, Index>& in) {
  const int64_t slots = in.atoms() * in.slots(), rows = in.kinds() * in.rows();
  return std::clamp<int64_t>(rows > 0 ? slots / rows : 1, 1, 256);
}

template <class Real, class Index>
cudaError_t density(DensityInputs<Real, Index> in, View<Real, 3> A, cudaStream_t stream) {
  auto kernel = sum_kernel<4, 3, Real, Index>;
  if (in.directions() == 2) kernel = sum_kernel<4, 2, Real, Index>;
  if (in.directions() == 1) kernel = sum_kernel<4, 1, Real, Index>;
  if (in.directions() == 0)
    kernel = in.harmonics == 1 ? sum_kernel<0, 0, Real, Index> : sum_kernel<4, 0, Real, Index>;
  return launch(kernel, in.atoms(), kThreads, stream, in, norms_of_harmonics(), A.data);
}

template <class Real, class Index>
cudaError_t density_backward(View<const Real, 3> grad, DensityInputs<Real, Index> in,
                             View<Real, 3> grad_d, cudaStream_t stream) {
  auto kernel = backward_kernel<4, 2, Real, Index>;
  if (in.directions() == 1) kernel = backward_kernel<4, 1, Real, Index>;
  if (in.directions() == 0)
    kernel =
        in.harmonics == 1 ? backward_kernel<0, 0, Real, Index> : backward_kernel<4, 0, Real, Index>;
  const int64_t blocks = blocks_for(in.atoms() * in.slots(), kThreads);
  return launch(kernel, blocks, kThreads, stream, in, norms_of_harmonics(), grad.data, grad_d.data);
}

template <class Real, class Index>
cudaError_t density_table_backward(View<const Real, 3> grad, DensityInputs<Real, Index> in,
                                   View<Real, 3> grad_table, Workspace& workspace,
                                   cudaStream_t stream) {
  const int64_t size = in.kinds() * in.rows() * in.functions(), parts = parts_of_slots(in);
  workspace.bytes = parts * size * int64_t(sizeof(double));
  if (!workspace.data || size == 0) return cudaSuccess;
  auto kernel = table_kernel<4, 3, Real, Index>;
  if (in.directions() == 2) kernel = table_kernel<4, 2, Real, Index>;
  if (in.directions() == 1) kernel = table_kernel<4, 1, Real, Index>;
  if (in.directions() == 0)
    kernel = in.harmonics == 1 ? table_kernel<0, 0, Real, Index> : table_kernel<4, 0, Real, Index>;
  double* const tables = static_cast<double*>(workspace.data);
  const cudaError_t error =
      launch(kernel, parts, kThreads, stream, in, norms_of_harmonics(), grad.data, tables);
  if (error) return error;
  return launch(total_kernel<Real>, blocks_for(size, kThreads), kThreads, stream, tables, parts,
                size, grad_table.data);
}

const Kernel kAlong("_density_along", density<float, int32_t>, density<float, int64_t>,
                    density<double, int32_t>, density<double, int64_t>);
const Kernel kBackward("_density_backward", density_backward<float, int32_t>,
                       density_backward<float, int64_t>, density_backward<double, int32_t>,
                       density_backward<double, int64_t>);
const Kernel kTable("_density_table_backward", density_table_backward<float, int32_t>,
                    density_table_backward<float, int64_t>, density_table_backward<double, int32_t>,
                    density_table_backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::density
