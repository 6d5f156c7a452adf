// CUDA kernels of the edge force operators.
//
// A warp has an atom: its lanes take the ends that edge_order lists for it, 32 at a time, and their
// sums are added in a fixed tree, so that the bits do not depend on the order of warps. No sum of a
// wrong entry is silent: what it may have belonged to becomes NaN afterwards.
#include <cstdint>

#include "edge_force/edge_force.h"
#include "edge_force/edge_force_math.h"

namespace calcops {
namespace {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;

__device__ inline double sum_of_lanes(double x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ inline Row sum_of_lanes(Row row) {
  for (int b = 0; b < 4; ++b) row[b] = sum_of_lanes(row[b]);
  return row;
}

__device__ inline double sum_of_block(double x, double* shared) {
  x = sum_of_lanes(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

template <bool kVirial, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    atom_kernel(EdgeInputs<Real, Index> in, EdgeOutputs<Real> out) {
  using R = std::conditional_t<kVirial, Row, double>;
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t step = int64_t(gridDim.x) * kWarps, all = 2 * in.edges;
  for (int64_t atom = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; atom < in.atoms;
       atom += step) {
    // An order of another graph must not lead out of bounds.
    const int64_t end = min(max(int64_t(in.edge_order[atom]), int64_t(0)), all);
    const int64_t begin =
        atom == 0 ? 0 : min(max(int64_t(in.edge_order[atom - 1]), int64_t(0)), all);
    R sum[3] = {};
    for (int64_t k = begin + lane; k < end; k += kWarp) {
      const int64_t listed = in.edge_order[in.atoms + k];
      if (listed < 0 || listed >= all) continue;
      const int64_t e = listed % in.edges;
      const Real* g = in.edge_gradient + 3 * e;
      if (listed < in.edges)
        add_to_center(g, sum);
      else
        add_to_neighbor(g, columns_of<R>(in.edge_vec + 3 * e), sum);
    }
    for (int a = 0; a < 3; ++a) sum[a] = sum_of_lanes(sum[a]);
    if (lane != 0) continue;
    for (int a = 0; a < 3; ++a) {
      out.force[3 * atom + a] = Real(last_column(sum[a]));
      if constexpr (kVirial)
        for (int b = 0; b < 3; ++b) out.atom_virial[9 * atom + 3 * a + b] = Real(sum[a][b]);
    }
  }
}

// A block has a frame; which atoms are of it says only `batch`.
template <class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    frame_kernel(EdgeInputs<Real, Index> in, EdgeOutputs<Real> out) {
  __shared__ double shared[kWarps];
  for (int64_t frame = blockIdx.x; frame < in.frames; frame += gridDim.x) {
    double sum[9] = {};
    for (int64_t atom = threadIdx.x; atom < in.atoms; atom += kThreads)
      if (!in.batch || in.batch[atom] == frame)
        for (int k = 0; k < 9; ++k) sum[k] += double(out.atom_virial[9 * atom + k]);
    for (int k = 0; k < 9; ++k) {
      const double total = sum_of_block(sum[k], shared);
      if (threadIdx.x == 0) out.virial[9 * frame + k] = Real(total);
    }
  }
}

template <class Real>
__device__ inline void poison(Real* row, int count) {
  for (int k = 0; k < count; ++k) row[k] = Real(NAN);
}

__device__ inline bool is_wrong(int64_t atom, int64_t atoms) { return atom < -1 || atom >= atoms; }

// NaN where an edge has a wrong entry: both of its atoms and their frames, or the first atom's
// where neither names one. All writers write the same.
template <bool kVirial, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    poison_kernel(EdgeInputs<Real, Index> in, EdgeOutputs<Real> out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < in.edges; e += step) {
    const int64_t names[2] = {in.edge_index[e], in.edge_index[in.edges + e]};
    if (!is_wrong(names[0], in.atoms) && !is_wrong(names[1], in.atoms)) continue;
    for (int k = 0; k < 2; ++k) {
      const bool named = names[k] >= 0 && names[k] < in.atoms;
      if (!named && names[1 - k] >= 0 && names[1 - k] < in.atoms) continue;
      const int64_t atom = named ? names[k] : 0;
      if (atom >= in.atoms) continue;
      poison(out.force + 3 * atom, 3);
      if (!kVirial) continue;
      poison(out.atom_virial + 9 * atom, 9);
      const int64_t frame = in.batch ? in.batch[atom] : 0;
      if (frame >= 0 && frame < in.frames) poison(out.virial + 9 * frame, 9);
    }
  }
  // An atom of no frame: no frame can be trusted to have all of its own.
  const int64_t batched = kVirial && in.batch ? in.atoms : 0;
  for (int64_t atom = int64_t(blockIdx.x) * kThreads + threadIdx.x; atom < batched; atom += step)
    if (in.batch[atom] < 0 || in.batch[atom] >= in.frames)
      for (int64_t frame = 0; frame < in.frames; ++frame) poison(out.virial + 9 * frame, 9);
}

template <class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(EdgeInputs<Real, Index> in, EdgeUpstream<Real> upstream,
                    EdgeGradients<Real> out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < in.edges; e += step) {
    const int64_t i = in.edge_index[e], j = in.edge_index[in.edges + e];
    const bool live = i >= 0 && i < in.atoms && j >= 0 && j < in.atoms;
    const int64_t frame = live && in.batch ? in.batch[j] : 0;
    const bool lost = live && upstream.virial && (frame < 0 || frame >= in.frames);
    if (!live || lost) {
      const bool wrong = lost || is_wrong(i, in.atoms) || is_wrong(j, in.atoms);
      for (int a = 0; a < 3; ++a) {
        if (out.edge_gradient) out.edge_gradient[3 * e + a] = Real(wrong ? NAN : 0);
        if (out.edge_vec) out.edge_vec[3 * e + a] = Real(wrong ? NAN : 0);
      }
      continue;
    }
    edge_backward(in, upstream, out, e, i, j, frame);
  }
}

// Kernels stride over what is beyond their grid.
unsigned blocks_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMost = 1 << 20;
  const int64_t blocks = items / per_block + (items % per_block != 0);
  return unsigned(blocks < kMost ? blocks : kMost);
}

template <bool kVirial, class Real, class Index>
cudaError_t launch_force(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out,
                         cudaStream_t stream) {
  if (in.atoms > 0)
    atom_kernel<kVirial><<<blocks_for(in.atoms, kWarps), kThreads, 0, stream>>>(in, out);
  if (kVirial && in.frames > 0)
    frame_kernel<<<blocks_for(in.frames, 1), kThreads, 0, stream>>>(in, out);
  const int64_t checked = in.edges > in.atoms ? in.edges : in.atoms;
  if (checked > 0)
    poison_kernel<kVirial><<<blocks_for(checked, kThreads), kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

}  // namespace

template <class Real, class Index>
cudaError_t edge_force_cuda(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out,
                            cudaStream_t stream) {
  return in.virial ? launch_force<true>(in, out, stream) : launch_force<false>(in, out, stream);
}

template <class Real, class Index>
cudaError_t edge_force_backward_cuda(const EdgeInputs<Real, Index>& in,
                                     const EdgeUpstream<Real>& upstream,
                                     const EdgeGradients<Real>& out, cudaStream_t stream) {
  if (in.edges > 0)
    backward_kernel<<<blocks_for(in.edges, kThreads), kThreads, 0, stream>>>(in, upstream, out);
  return cudaGetLastError();
}

#define INSTANTIATE(Real, Index)                                                                 \
  template cudaError_t edge_force_cuda(const EdgeInputs<Real, Index>&, const EdgeOutputs<Real>&, \
                                       cudaStream_t);                                            \
  template cudaError_t edge_force_backward_cuda(const EdgeInputs<Real, Index>&,                  \
                                                const EdgeUpstream<Real>&,                       \
                                                const EdgeGradients<Real>&, cudaStream_t);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops
