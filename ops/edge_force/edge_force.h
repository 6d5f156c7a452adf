// Forces and virial from the edges of a graph. The contract; the mathematics is in
// edge_force_math.h.
//
// N atoms in F frames, E edges; edge e has the centre i, the neighbour j and v = r_j - r_i (plus
// the shift of a periodic image). With the gradient g = dE/dv of the energy:
//
//   F[i] += g,  F[j] -= g
//   W[a][b] -= g[a] v[b]      the virial; stress = -W / volume
//
// so that -g is the force that the pair puts on j: the signs of calcops::force_virial. Sums are
// taken in float64. On the CPU their order depends on E, N, edge_index and batch alone, on CUDA on
// F too: not on the number of threads, the types, or which of the results are wanted. So results
// are the same bit for bit. Source: -dE/dr by the chain rule; conventions of NequIP, MACE, vesin
// and ASE.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops {

/// calcops::edge_force
/// Force on every atom from the gradients of the energy along the edges of a graph.
///
/// edge_index     [2, E]; int32 or int64. Row 0 the centre i, row 1 the neighbour j, 0-based;
///                edges in any order. -1 in either row: no edge.
/// edge_gradient  [E, 3]; float32 or float64; dE/d(edge_vec), energy/length, with edge_vec =
///                r_j - r_i (plus the shift of a periodic image). A contiguous [3, E], transposed,
///                is not copied on the CPU.
/// natoms         number of atoms of all frames together, ghosts included, 0 to 2^40.
/// edge_order     what calcops::edge_order(edge_index, natoms) returned, or None. Saves CUDA the
///                work of sorting the edges; the CPU has no use for it. One of another shape is an
///                error. One of another graph gives wrong forces on CUDA; with CALCOPS_CHECK=1 it
///                is an error on either device. E < 2^30 with it: torch.export needs a dynamic E
///                as Dim("E", max=2**30 - 1).
///
/// Returns [natoms, 3], energy/length: F_i = +sum g over the edges that i is the centre of, and
/// F_j = -sum g over those that j is the neighbour of.
///
/// Differentiable to any order in edge_gradient, in reverse and in forward mode. What a masked edge
/// holds is never used, and every derivative there is exactly 0. Deterministic. An entry < -1 or
/// >= natoms is an error on the CPU; on CUDA the rows of the edge's atoms become NaN, and with
/// CALCOPS_CHECK=1 in the environment (which synchronises) it is an error too.

/// calcops::edge_force_virial
/// Force, virial and per-atom virial from the gradients of the energy along the edges of a graph.
///
/// edge_index, edge_gradient, natoms, edge_order: as for calcops::edge_force.
/// edge_vec       [E, 3]; r_j - r_i (plus the shift), length; dtype of edge_gradient.
/// batch          [natoms]; int32 or int64; the frame of each atom, 0 <= batch < nframes, in any
///                order; None: all atoms are of frame 0.
/// nframes        number of frames, 0 to 2^40; at least 1 where batch is None and there are atoms.
///
/// Returns (force [natoms, 3], virial [nframes, 3, 3], atom_virial [natoms, 3, 3]): virial[a][b] =
/// -sum g[a] edge_vec[b] over the edges of a frame, energy; atom_virial gives each edge's term to
/// the neighbour j. Stress = -virial / volume.
///
/// Differentiable to any order in edge_gradient and edge_vec through all three outputs, in reverse
/// and in forward mode. Masked edges, wrong entries and determinism: as for calcops::edge_force.

/// calcops::edge_order
/// Which edges meet at each atom: what edge_force can reuse for as long as a graph lives.
///
/// edge_index     [2, E], E < 2^30, for torch.export Dim("E", max=2**30 - 1); as for
///                calcops::edge_force.
/// natoms         number of atoms, 0 to 2^40.
///
/// Returns int32 [natoms + 2E]: first, for each atom, where its part of what follows ends; then the
/// ends e (as the centre) and E + e (as the neighbour) of the edges that meet at atom 0, those at
/// atom 1 and so on, each in rising order, and -1 for every end of an edge that is masked or wrong.

template <class Real, class Index>
struct EdgeInputs {
  int64_t atoms, edges, frames;  // N, E, F
  bool virial;                   // otherwise edge_vec and two of the outputs are unused
  const Index* edge_index;       // [2, E]
  const Real* edge_gradient;     // [E, 3]
  const Real* edge_vec;          // [E, 3]
  const int64_t* batch;          // [N]; nullptr: all in frame 0
  const int32_t* edge_order;     // [N + 2E]; CUDA needs it
  // For edge_force_cpu: [3, E] instead, as code that is vectorised over edges has it.
  bool gradient_is_transposed = false, vec_is_transposed = false;
};

template <class Real>
struct EdgeOutputs {
  Real* force;        // [N, 3]
  Real* virial;       // [F, 3, 3]
  Real* atom_virial;  // [N, 3, 3]
};

// Gradients of a scalar for the three outputs; nullptr: zero.
template <class Real>
struct EdgeUpstream {
  const Real* force;
  const Real* virial;
  const Real* atom_virial;
};

// Its gradients for the inputs; nullptr: not wanted.
template <class Real>
struct EdgeGradients {
  Real* edge_gradient;
  Real* edge_vec;
};

// Both return the first edge with an entry that names no atom, E + the first atom whose frame does
// not exist, or -1 if all are right.
template <class Real, class Index>
int64_t edge_force_cpu(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out);
template <class Real, class Index>
int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>& in,
                                const EdgeUpstream<Real>& upstream, const EdgeGradients<Real>& out);

#ifndef CALCOPS_NO_CUDA
// Bytes of device memory that edge_force_cuda works in; any content, 8-byte aligned.
template <class Real, class Index>
int64_t edge_force_cuda_workspace(const EdgeInputs<Real, Index>& in);
template <class Real, class Index>
cudaError_t edge_force_cuda(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out,
                            void* workspace, cudaStream_t stream);
template <class Real, class Index>
cudaError_t edge_force_backward_cuda(const EdgeInputs<Real, Index>& in,
                                     const EdgeUpstream<Real>& upstream,
                                     const EdgeGradients<Real>& out, cudaStream_t stream);
#endif

}  // namespace calcops
