// Forces and virial from a neighbour list. The contract is in force.cpp, the mathematics in
// force_math.h.
//
// A list has B frames, n local atoms, m = nghost ghost atoms, and K neighbour slots for each local
// atom (K = T*M for T types with M slots each). For the pair of centre i and slot s that names j:
//
//   g[a] = sum_c dE[i,s,c] Ri_d[i,s,c,a]      the force that the pair puts on j
//   F[j] += g,  F[i] -= g
//   W[a][b] += g[a] Rij[i,s,b]                the virial; stress = -W / volume
//
// Sums are in float64. Their order depends on the sizes and on list_neigh alone. So the sums are
// the same bit for bit, whatever the number of threads, the dtypes and the wanted results. float32
// results differ from the exact ones by at most one ulp plus 1e-14 of the sum of the terms'
// magnitudes. The second part exceeds an ulp only where large terms cancel.
//
// Source: Wang, Zhang, Han, E, Comput. Phys. Commun. 228, 178 (2018), eqs. 5-7. As in deepmd-kit's
// prod_virial, a pair's virial belongs to j.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::force {

template <class Real, class Index>
struct ForceInputs {
  int64_t frames, natoms, nghost, neighbors;  // B, n, m, K
  bool center;                                // false: F[i] -= g is left out
  bool virial;                                // false: the force alone; Rij is unused
  const Index* list_neigh;                    // [B, n, K]
  const Real* dE;                             // [B, n, K, 4]
  const Real* Ri_d;                           // [B, n, K, 4, 3]
  const Real* Rij;                            // [B, n, K, 3]
  const int32_t* neighbor_index;              // [B, n+m + nK], or nullptr
};

template <class Real>
struct ForceOutputs {
  Real* force;        // [B, n+m, 3]
  Real* virial;       // [B, 3, 3]
  Real* atom_virial;  // [B, n+m, 3, 3]
};

// Gradients of a scalar for the three outputs; nullptr: zero.
template <class Real>
struct ForceUpstream {
  const Real* force;
  const Real* virial;
  const Real* atom_virial;
};

// Gradients of that scalar for the inputs; nullptr: not wanted.
template <class Real>
struct ForceGradients {
  Real* dE;
  Real* Ri_d;
  Real* Rij;
};

// Both return the position of the first wrong entry in list_neigh, or -1.
template <class Real, class Index>
int64_t force_cpu(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out);
template <class Real, class Index>
int64_t force_backward_cpu(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                           const ForceGradients<Real>& out);

#ifndef CALCOPS_NO_CUDA
// Return the size in bytes of the `workspace` of force_cuda: uninitialised, 256-byte aligned.
template <class Real, class Index>
int64_t force_cuda_workspace(const ForceInputs<Real, Index>& in);
template <class Real, class Index>
cudaError_t force_cuda(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out,
                       void* workspace, cudaStream_t stream);
template <class Real, class Index>
cudaError_t force_backward_cuda(const ForceInputs<Real, Index>& in,
                                const ForceUpstream<Real>& upstream,
                                const ForceGradients<Real>& out, cudaStream_t stream);
#endif

}  // namespace calcops::ops::force
