// Sums over neighbours of B-splines times rows of the environment matrix. The contract is in
// environment_spline.cpp, the mathematics in environment_spline_math.h.
//
// n atoms with K slots for neighbours; slot s of atom i has a pair vector d and a kind. With r =
// |d|
//
//   w(r)  1 up to rcut_smth, (1 - u)^3 (1 + 3u + 6u^2) from there to rcut, u from 0 to 1; then 0
//   R     (w/r (1, d/r) - davg[kind]) / dstd[kind], a row of the environment matrix
//   P[i][a][kind][b] = sum_s R[i][s][a] B_b(R[i][s][0])
//
// where B_b are the uniform B-splines of the kind's grid. A spline of coefficients C[kind][b][m]
// has the sums sum_s R[a] g_m(R[0]) = sum_b P[a][b] C[b][m]: the work for a pair does not depend on
// the number of functions g_m. Source of R: Zeng et al., J. Chem. Phys. 159, 054801 (2023), II.B.1.
// That the sum over neighbours and the spline commute is our own.
//
// With D directions v in each slot, the derivative d^D/dt_1...dt_D at 0 of what
// d + t_1 v_1 + ... + t_D v_D gives takes the place of R[a] B_b.
//
// Everything is computed in float64, and summed in the order of the slots.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::environment_spline {

enum class Spline { kQuintic, kCubic };

template <class Real, class Index>
struct SplineInputs {
  int64_t atoms, slots, kinds, functions, directions;  // n, K, kinds, functions, D
  const Real* d;                                       // [n, K, 3]
  const Index* kind;                                   // [n, K]; -1: empty
  const Real* along;                                   // [n, K, D, 3]
  const double *davg, *dstd;                           // [kinds, 4]
  const double* grid;                                  // [kinds, 2]
  double rcut_smth, rcut;
  Spline spline;
};

// Both return the first slot whose kind does not exist, or -1.
template <class Real, class Index>
int64_t environment_spline_cpu(const SplineInputs<Real, Index>& in, Real* P);
// The gradient for d of <grad, P>.
template <class Real, class Index>
int64_t environment_spline_backward_cpu(const SplineInputs<Real, Index>& in, const Real* grad,
                                        Real* grad_d);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t environment_spline_cuda(const SplineInputs<Real, Index>& in, Real* P,
                                    cudaStream_t stream);
template <class Real, class Index>
cudaError_t environment_spline_backward_cuda(const SplineInputs<Real, Index>& in, const Real* grad,
                                             Real* grad_d, cudaStream_t stream);
#endif

}  // namespace calcops::ops::environment_spline
