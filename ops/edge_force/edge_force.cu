// CUDA kernels of the edge force operators.
//
// Edge e has two ends: number e is its centre, number E + e its neighbour. A warp computes an atom.
// Its lanes add the ends that edge_order lists for the atom. The lanes' sums are added in a fixed
// tree, so that the bits do not depend on the order of warps. A wrong entry is left out of all
// sums; afterwards the results to which it may have belonged become NaN.
#include <calcops/launch.h>

#include <algorithm>
#include <cstdint>

#include "edge_force/edge_force.h"
#include "edge_force/edge_force_math.h"

namespace calcops::ops::edge_force {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kAhead = 4;  // ends that a lane loads before it adds the first
constexpr int64_t kNone = -1;

// The inputs with an edge_index of int32 or int64. Its type is tested when an entry is read.
// Separate kernels for both types would not be faster, and would take nvcc longer to compile.
template <class Real>
struct Inputs : EdgeInputs<Real, void> {
  bool is_int64;

  template <class Index>
  explicit Inputs(const EdgeInputs<Real, Index>& in)
      : EdgeInputs<Real, void>{in.atoms,    in.edges,      in.frames,
                               in.virial,   in.edge_index, in.edge_gradient,
                               in.edge_vec, in.batch,      in.edge_order},
        is_int64(sizeof(Index) == sizeof(int64_t)) {}

  // Return the atom at an end of an edge.
  __device__ int64_t atom_at(int64_t end) const {
    return is_int64 ? static_cast<const int64_t*>(this->edge_index)[end]
                    : static_cast<const int32_t*>(this->edge_index)[end];
  }
};

using calcops::sum_of_lanes;
__device__ inline Row sum_of_lanes(Row row) {
  for (int b = 0; b < 4; ++b) row[b] = sum_of_lanes(row[b]);
  return row;
}

// Blocks that a multiprocessor must hold at once; 0: no limit. Three leave 80 registers for a
// thread, where virials in float64 would take 92. Four would leave 64: float32 would spill on GPUs
// newer than sm_90.
template <bool kVirial>
constexpr int kBlocksAtOnce = kVirial ? 3 : 0;

// Write the atoms' results. exact: memory for their unrounded virials [N, 3, 3], or nullptr.
template <bool kVirial, class Real>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<kVirial>)
    atom_kernel(Inputs<Real> in, EdgeOutputs<Real> out, double* exact) {
  using R = std::conditional_t<kVirial, Row, double>;
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t step = int64_t(gridDim.x) * kWarps, all = 2 * in.edges;
  for (int64_t atom = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; atom < in.atoms;
       atom += step) {
    // The edge_order of another graph must not lead out of bounds.
    const int64_t end = min(max(int64_t(in.edge_order[atom]), int64_t(0)), all);
    const int64_t begin =
        atom == 0 ? 0 : min(max(int64_t(in.edge_order[atom - 1]), int64_t(0)), all);
    R sum[3] = {};
    for (int64_t k = begin + lane; k < end; k += kAhead * kWarp) {
      int64_t ends[kAhead];
      Real g[kAhead][3], v[kAhead][3];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t next = k + n * kWarp;
        ends[n] = next < end ? in.edge_order[in.atoms + next] : kNone;
      }
      // Where there is no end, the first edge is loaded, so that no load waits for a branch. A
      // centre does not need edge_vec.
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (ends[n] < 0 || ends[n] >= all) ends[n] = kNone;
        const int64_t edge = ends[n] < in.edges ? ends[n] : ends[n] - in.edges;
        const int64_t first = ends[n] == kNone ? 0 : 3 * edge;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
          g[n][a] = in.edge_gradient[first + a];
          if (kVirial) v[n][a] = ends[n] < in.edges ? Real(0) : in.edge_vec[first + a];
        }
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (ends[n] == kNone) continue;
        if (ends[n] < in.edges)
          add_to_center(g[n], sum);
        else
          add_to_neighbor(g[n], columns_of<R>(v[n]), sum);
      }
    }
    for (int a = 0; a < 3; ++a) sum[a] = sum_of_lanes(sum[a]);
    if (lane != 0) continue;
    for (int a = 0; a < 3; ++a) {
      out.force[3 * atom + a] = Real(last_column(sum[a]));
      if constexpr (kVirial)
        for (int b = 0; b < 3; ++b) {
          out.atom_virial[9 * atom + 3 * a + b] = Real(sum[a][b]);
          if (exact) exact[9 * atom + 3 * a + b] = sum[a][b];
        }
    }
  }
}

// Return the number of blocks among which the atoms are divided for each frame, so that a few
// frames keep a GPU busy. The number depends on the sizes alone, because the bits depend on it.
template <class Real>
int64_t count_shares(const Inputs<Real>& in) {
  constexpr int64_t kBlocks = 512, kAtoms = 4 * kThreads;
  const int64_t wanted = kBlocks / (in.frames > 0 ? in.frames : 1), most = in.atoms / kAtoms;
  const int64_t shares = wanted < most ? wanted : most;
  return shares > 1 ? shares : 1;
}

// Write the shares of the frames' virials, a block for each. It looks for its frame's atoms among
// its share of all atoms, because `batch` has no order.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    share_kernel(Inputs<Real> in, const double* exact, int64_t shares, double* sums) {
  __shared__ double parts[kWarps][9];
  const int64_t block = blockIdx.x, frame = block / shares, share = block % shares;
  const int64_t end = in.atoms * (share + 1) / shares;
  double sum[9] = {};
  for (int64_t atom = in.atoms * share / shares + threadIdx.x; atom < end; atom += kThreads)
    if ((in.batch ? in.batch[atom] : 0) == frame)
      for (int k = 0; k < 9; ++k) sum[k] += exact[9 * atom + k];
  const double total = sum_of_block(sum, parts);
  if (threadIdx.x < 9) sums[9 * block + threadIdx.x] = total;
}

// Write the frames' virials: the sums of the shares.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    frame_kernel(Inputs<Real> in, EdgeOutputs<Real> out, int64_t shares, const double* sums) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < 9 * in.frames; at += step) {
    double sum = 0;
    for (int64_t share = 0; share < shares; ++share)
      sum += sums[9 * (at / 9 * shares + share) + at % 9];
    out.virial[at] = Real(sum);
  }
}

// Set numbers to NaN.
template <class Real>
__device__ inline void poison(Real* row, int count) {
  for (int k = 0; k < count; ++k) row[k] = Real(NAN);
}

__device__ inline bool is_wrong(int64_t atom, int64_t atoms) { return atom < -1 || atom >= atoms; }

// Set results to NaN where an edge has a wrong entry. These are the results of the edge's atoms and
// of their frames. If neither entry names an atom, they are those of atom 0. All threads write the
// same value.
template <bool kVirial, class Real>
__global__ void __launch_bounds__(kThreads) poison_kernel(Inputs<Real> in, EdgeOutputs<Real> out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < in.edges; e += step) {
    const int64_t entries[2] = {in.atom_at(e), in.atom_at(in.edges + e)};
    if (!is_wrong(entries[0], in.atoms) && !is_wrong(entries[1], in.atoms)) continue;
    for (int k = 0; k < 2; ++k) {
      const bool names_atom = entries[k] >= 0 && entries[k] < in.atoms;
      if (!names_atom && entries[1 - k] >= 0 && entries[1 - k] < in.atoms) continue;
      const int64_t atom = names_atom ? entries[k] : 0;
      if (atom >= in.atoms) continue;
      poison(out.force + 3 * atom, 3);
      if (!kVirial) continue;
      poison(out.atom_virial + 9 * atom, 9);
      const int64_t frame = in.batch ? in.batch[atom] : 0;
      if (frame >= 0 && frame < in.frames) poison(out.virial + 9 * frame, 9);
    }
  }
  // If an atom's frame does not exist, any frame may lack this atom.
  const int64_t batched = kVirial && in.batch ? in.atoms : 0;
  for (int64_t atom = int64_t(blockIdx.x) * kThreads + threadIdx.x; atom < batched; atom += step)
    if (in.batch[atom] < 0 || in.batch[atom] >= in.frames)
      for (int64_t frame = 0; frame < in.frames; ++frame) poison(out.virial + 9 * frame, 9);
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Inputs<Real> in, EdgeUpstream<Real> upstream, EdgeGradients<Real> out) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < in.edges; e += step) {
    const int64_t i = in.atom_at(e), j = in.atom_at(in.edges + e);
    const bool is_live = i >= 0 && i < in.atoms && j >= 0 && j < in.atoms;
    const int64_t frame = is_live && in.batch ? in.batch[j] : 0;
    const bool lacks_frame = is_live && upstream.virial && (frame < 0 || frame >= in.frames);
    if (!is_live || lacks_frame) {
      const bool is_bad = lacks_frame || is_wrong(i, in.atoms) || is_wrong(j, in.atoms);
      for (int a = 0; a < 3; ++a) {
        if (out.edge_gradient) out.edge_gradient[3 * e + a] = Real(is_bad ? NAN : 0);
        if (out.edge_vec) out.edge_vec[3 * e + a] = Real(is_bad ? NAN : 0);
      }
      continue;
    }
    edge_backward(in, upstream, out, e, i, j, frame);
  }
}

// Return the blocks of a launch. If items remain beyond the grid, the kernels stride over them.
int64_t some_blocks_for(int64_t items, int64_t items_of_block) {
  return std::min<int64_t>(blocks_for(items, items_of_block), 1 << 20);
}

template <bool kVirial, class Real>
cudaError_t launch_force(const Inputs<Real>& in, const EdgeOutputs<Real>& out, void* workspace,
                         cudaStream_t stream) {
  double* const sums = static_cast<double*>(workspace);
  const int64_t shares = count_shares(in);
  // The virial is summed from unrounded numbers of the atoms: these cancel, so that the rounding
  // errors of float32 could be as large as their sum.
  double* const unrounded =
      kVirial && sizeof(Real) < sizeof(double) ? sums + 9 * in.frames * shares : nullptr;
  cudaError_t error = launch(atom_kernel<kVirial, Real>, some_blocks_for(in.atoms, kWarps),
                             kThreads, stream, in, out, unrounded);
  if (kVirial) {
    const double* exact = unrounded ? unrounded : reinterpret_cast<const double*>(out.atom_virial);
    if (!error)
      error =
          launch(share_kernel<Real>, in.frames * shares, kThreads, stream, in, exact, shares, sums);
    if (!error)
      error = launch(frame_kernel<Real>, some_blocks_for(9 * in.frames, kThreads), kThreads, stream,
                     in, out, shares, sums);
  }
  const int64_t checked = std::max(in.edges, in.atoms);
  if (!error)
    error = launch(poison_kernel<kVirial, Real>, some_blocks_for(checked, kThreads), kThreads,
                   stream, in, out);
  return error;
}

}  // namespace

template <class Real, class Index>
int64_t edge_force_cuda_workspace(const EdgeInputs<Real, Index>& in) {
  if (!in.virial) return 0;
  const int64_t sums = in.frames * count_shares(Inputs<Real>(in));
  const int64_t exact = sizeof(Real) < sizeof(double) ? in.atoms : 0;
  return int64_t(sizeof(double)) * 9 * (sums + exact);
}

template <class Real, class Index>
cudaError_t edge_force_cuda(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out,
                            void* workspace, cudaStream_t stream) {
  const Inputs<Real> inputs(in);
  return in.virial ? launch_force<true>(inputs, out, workspace, stream)
                   : launch_force<false>(inputs, out, workspace, stream);
}

template <class Real, class Index>
cudaError_t edge_force_backward_cuda(const EdgeInputs<Real, Index>& in,
                                     const EdgeUpstream<Real>& upstream,
                                     const EdgeGradients<Real>& out, cudaStream_t stream) {
  return launch(backward_kernel<Real>, some_blocks_for(in.edges, kThreads), kThreads, stream,
                Inputs<Real>(in), upstream, out);
}

#define INSTANTIATE(Real, Index)                                                                 \
  template int64_t edge_force_cuda_workspace(const EdgeInputs<Real, Index>&);                    \
  template cudaError_t edge_force_cuda(const EdgeInputs<Real, Index>&, const EdgeOutputs<Real>&, \
                                       void*, cudaStream_t);                                     \
  template cudaError_t edge_force_backward_cuda(const EdgeInputs<Real, Index>&,                  \
                                                const EdgeUpstream<Real>&,                       \
                                                const EdgeGradients<Real>&, cudaStream_t);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::edge_force
