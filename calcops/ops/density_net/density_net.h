// Energies of nets that take invariants of density's sums, and their gradients. The contract is in
// density_net.cpp.
//
//   q[p][i][f] = sum of c A[a][i][f] A[b][i][f] ... over the terms of invariant p
//   E[i]       = sum_k w1[k] t[k] - bias,  t[k] = tanh(sum_r radial[i][r] W[r][k]
//                                                     + sum_pf q[p][i][f] V[p][f][k] - b0[k])
//
// An energy and its gradient are computed together, because a potential needs both in each step.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::density_net {

constexpr int kFactors = 4;  // of a term

template <class Real>
struct Inputs {
  int64_t atoms, functions, harmonics;         // n, F, H
  int64_t radials, invariants, terms;          // R, P, M
  int64_t nets, neurons;                       // N, K
  const Real* radial;                          // [n, R]
  const Real* A;                               // [H, n, F]
  const int64_t* net;                          // [n], -1: no atom
  const int32_t* factors;                      // [M, 4], rows of A, -1: the factor is 1
  const int32_t* invariant;                    // [M]
  const Real* coefficient;                     // [M]
  const Real *w_radial, *w_angular, *b0, *w1;  // [N, R, K], [N, P, F, K], [N, K], [N, K]
  const Real* bias;                            // [N]
};

template <class Real>
struct NetResults {
  Real *energy, *grad_radial, *grad_A;  // [n], [n, R], [H, n, F]
};

// Return the position of a wrong entry, in net, then factors, then invariant; or kNone.
template <class Real>
int64_t density_net_cpu(const Inputs<Real>& in, const NetResults<Real>& out);

#ifndef CALCOPS_NO_CUDA
template <class Real>
cudaError_t density_net_cuda(const Inputs<Real>& in, const NetResults<Real>& out,
                             cudaStream_t stream);
#endif

}  // namespace calcops::ops::density_net
