// Forces and virial from the edges of a graph. The contract is in edge_force.cpp, the mathematics
// in edge_force_math.h.
//
// A graph has N atoms in F frames and E edges. Edge e has the centre i, the neighbour j and the
// vector v = r_j - r_i (plus the shift of a periodic image). g is the derivative of the energy with
// respect to v. The edge adds
//
//   F[i] += g,  F[j] -= g
//   W[a][b] -= g[a] v[b]      the virial; stress = -W / volume
//
// The force of the edge on j is -g. (In force.h, g itself is that force.)
//
// Sums are in float64. On the CPU their order depends on E, N, edge_index and batch alone, on CUDA
// on F too. So the sums are the same bit for bit, whatever the number of threads, the dtypes and
// the wanted results.
//
// Source: the force is minus the derivative of the energy, by the chain rule. Conventions are those
// of NequIP, MACE, vesin and ASE.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::edge_force {

template <class Real, class Index>
struct EdgeInputs {
  int64_t atoms, edges, frames;  // N, E, F
  bool virial;                   // false: the force alone; edge_vec is unused
  const Index* edge_index;       // [2, E]
  const Real* edge_gradient;     // [E, 3]
  const Real* edge_vec;          // [E, 3]
  const int64_t* batch;          // [N]; nullptr: all in frame 0
  const int32_t* edge_order;     // [N + 2E]; CUDA needs it
  // True if edge_gradient or edge_vec is stored as [3, E]. Code that is vectorised over edges
  // writes this layout. Only edge_force_cpu reads it.
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

// Gradients of that scalar for the inputs; nullptr: not wanted.
template <class Real>
struct EdgeGradients {
  Real* edge_gradient;
  Real* edge_vec;
};

// Both return -1, or the position of the first wrong entry: the number of the edge or, if the frame
// of an atom does not exist, E plus the number of the atom.
template <class Real, class Index>
int64_t edge_force_cpu(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out);
template <class Real, class Index>
int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>& in,
                                const EdgeUpstream<Real>& upstream, const EdgeGradients<Real>& out);

#ifndef CALCOPS_NO_CUDA
// Return the size in bytes of the `workspace` of edge_force_cuda. It may be uninitialised, and must
// be 8-byte aligned.
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

}  // namespace calcops::ops::edge_force
