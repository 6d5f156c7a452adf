// Energies of nets that take invariants of density's sums, and their gradients. The contract is in
// density_net.cpp.
//
//   q[p][i][f] = sum of c A[a][i][f] A[b][i][f] ... over the terms of invariant p
//   E[i]       = sum_k w1[k] t[k] - bias,  t[k] = tanh(sum_r radial[i][r] W[r][k]
//                                                     + sum_pf q[p][i][f] V[p][f][k] - b0[k])
//
// An energy and its gradient are computed together, because a potential needs both in each step.
#pragma once

#include <calcops/numbers.h>
#include <calcops/operator.h>

namespace calcops::ops::density_net {

constexpr int kFactors = 4;  // of a term

// The arguments and results of a call.
template <class Real>
struct Call {
  View<const Real, 2> radial;      // [n, R]
  View<const Real, 3> A;           // [H, n, F]
  View<const int64_t, 1> net;      // [n], -1: no atom
  View<const int32_t, 2> factors;  // [M, 4], rows of A, -1: the factor is 1
  View<const int32_t, 1> invariant;
  View<const Real, 1> coefficient;
  View<const Real, 3> w_radial;   // [N, R, K]
  View<const Real, 4> w_angular;  // [N, P, F, K]
  View<const Real, 2> b0, w1;     // [N, K]
  View<const Real, 1> bias;
  View<Real, 1> energy;
  View<Real, 2> grad_radial;
  View<Real, 3> grad_A;

  CALCOPS_HD int64_t harmonics() const { return A.shape[0]; }
  CALCOPS_HD int64_t atoms() const { return A.shape[1]; }
  CALCOPS_HD int64_t functions() const { return A.shape[2]; }
  CALCOPS_HD int64_t radials() const { return radial.shape[1]; }
  CALCOPS_HD int64_t invariants() const { return w_angular.shape[1]; }
  CALCOPS_HD int64_t terms() const { return factors.shape[0]; }
  CALCOPS_HD int64_t nets() const { return b0.shape[0]; }
  CALCOPS_HD int64_t neurons() const { return b0.shape[1]; }
};

}  // namespace calcops::ops::density_net
