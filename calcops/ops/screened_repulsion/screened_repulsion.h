// Screened Coulomb repulsion of pairs that come close, with its gradient. The contract is in
// screened_repulsion.cpp.
//
//   E[i] = sum over slots of (a1 exp(-b1 r) + a2 exp(-b2 r) + a3 exp(-b3 r) + a4 exp(-b4 r)) / r
//   s(r)
//
// s(r) is 1 up to the inner cutoff, and falls to 0 at the outer one like half a cosine.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::screened_repulsion {

constexpr int kNumbers = 10;  // of a kind: inner, outer, a1, b1, a2, b2, a3, b3, a4, b4

template <class Real>
struct Pairs {
  int64_t atoms, slots, kinds;  // n, K
  const Real* d;                // [n, K, 3]
  const int64_t* kind;          // [n, K], -1 in empty slots
  const Real* table;            // [kinds, 10]
};

template <class Real>
struct Repulsion {
  Real *energy, *grad;  // [n], [n, K, 3]
};

// Return the position of a wrong entry of kind, or kNone.
template <class Real>
int64_t screened_repulsion_cpu(const Pairs<Real>& in, const Repulsion<Real>& out);

#ifndef CALCOPS_NO_CUDA
template <class Real>
cudaError_t screened_repulsion_cuda(const Pairs<Real>& in, const Repulsion<Real>& out,
                                    cudaStream_t stream);
#endif

}  // namespace calcops::ops::screened_repulsion
