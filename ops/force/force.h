// Forces and virial from a neighbour list. The contract; the mathematics is in force_math.h.
//
// B frames, n local atoms, m = nghost ghost atoms, K neighbour slots an atom (K = T*M where a list
// has T types with M slots each). For the pair of centre i and slot s that names atom j:
//
//   g[a] = sum_c dE[i,s,c] Ri_d[i,s,c,a]      the force that the pair puts on j
//   F[j] += g,  F[i] -= g
//   W[a][b] += g[a] Rij[i,s,b]                the virial; stress = -W / volume
//
// Sums are taken in float64 and in an order that depends on the sizes and on list_neigh alone: not
// on the number of threads, the types, or which of the results are wanted. So results are the same
// bit for bit. float32 results differ from the exact ones by
// at most one ulp and 1e-14 of the sum of the terms' magnitudes (where terms cancel that is more
// than an ulp). Source: Wang, Zhang, Han, E, Comput. Phys. Commun. 228, 178 (2018), eqs. 5-7, with
// j's share of the virial as in deepmd-kit's prod_virial.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops {

/// calcops::force
/// Force on every atom from a neighbour list, dE/dRi and dRi/dr.
///
/// list_neigh  [B, n, K] or [B, n, T, M] with K = T*M; int32 or int64. 0-based index of the
///             neighbour within the frame: 0 <= j < n a local atom, n <= j < n + nghost a ghost.
///             -1 marks an empty slot, anywhere in a row. An atom may be named more than once, and
///             may name itself (a periodic image).
/// dE          [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K]; float32 or float64; dE_tot/dRi, energy.
/// Ri_d        [B, n, 4K, 3] or [B, n, K, 4, 3]; dRi/dr_i, the derivative for the centre atom,
///             1/length.
/// nghost      number of ghost atoms, 0 to 2^40.
/// neighbor_index  what calcops::neighbor_index(list_neigh, nghost) returned, or None. Saves CUDA
///             the work of finding out who names whom; the CPU has no use for it. Results are the
///             same bit for bit. One of another shape is an error. One of another list gives wrong
///             forces on CUDA; with CALCOPS_CHECK=1 it is an error on either device.
///
/// Returns [B, n + nghost, 3], energy/length: F_j = +sum g over the slots that name j and
/// F_i = -sum g over i's own slots, with g = sum_c dE[c] Ri_d[c, :]. Rows of ghosts are to be added
/// to the atoms they are images of.
///
/// Differentiable to any order in dE and Ri_d, in reverse and in forward mode. What an empty slot
/// holds in dE and Ri_d is never used, and every derivative there is exactly 0.
/// Deterministic. An entry < -1 or >= n + nghost is an error on the CPU; on CUDA the row of its
/// centre atom becomes NaN, and with CALCOPS_CHECK=1 in the environment (which synchronises) it is
/// an error too.

/// calcops::force_virial
/// Force, virial and per-atom virial from a neighbour list, dE/dRi, dRi/dr and pair vectors.
///
/// list_neigh, dE, Ri_d, nghost, neighbor_index: as for calcops::force.
/// Rij         [B, n, K, 3]; r_j - r_i, length; dtype of dE.
///
/// Returns (force [B, n + nghost, 3], virial [B, 3, 3], atom_virial [B, n + nghost, 3, 3]):
/// virial[a][b] = sum g[a] Rij[b] over all pairs, energy; atom_virial gives each pair's term to the
/// neighbour j. Stress = -virial / volume.
///
/// Differentiable to any order in dE, Ri_d and Rij through all three outputs, in reverse and in
/// forward mode. Empty slots, wrong entries and determinism: as for calcops::force.

/// calcops::neighbor_index
/// Which slots name each atom: what force and force_virial can reuse for as long as a list lives.
///
/// list_neigh  [B, n, K] or [B, n, T, M] with K = T*M, nK < 2^31; as for calcops::force.
/// nghost      number of ghost atoms, 0 to 2^40.
///
/// Returns int32 [B, n + nghost + nK]: first, for each atom j, where its part of what follows ends;
/// then the slots i*K + s that name atom 0, those that name atom 1 and so on, each in rising order,
/// and -1 for every slot that names none.

template <class Real, class Index>
struct ForceInputs {
  int64_t frames, natoms, nghost, neighbors;  // B, n, m, K
  bool center;                                // F[i] -= g; otherwise the caller has it already
  bool virial;                                // otherwise Rij and two of the outputs are unused
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

// Its gradients for the inputs; nullptr: not wanted.
template <class Real>
struct ForceGradients {
  Real* dE;
  Real* Ri_d;
  Real* Rij;
};

// Both return the first position in list_neigh that names no atom, or -1 if every entry is right.
template <class Real, class Index>
int64_t force_cpu(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out);
template <class Real, class Index>
int64_t force_backward_cpu(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                           const ForceGradients<Real>& out);

#ifndef CALCOPS_NO_CUDA
// Bytes of device memory that force_cuda works in; any content, 256-byte aligned.
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

}  // namespace calcops
