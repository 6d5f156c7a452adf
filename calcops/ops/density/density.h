// Projections of the density of neighbours on splines of the distance times spherical harmonics.
// The contract is in density.cpp, the mathematics in density_math.h.
//
// There are n atoms with K slots for neighbours. Slot s of atom i has a vector d to the neighbour
// and a kind. The result is the sum over the slots within the cutoff of their kind
//
//   A[l^2 + l + m][i][f] = sum_s g_f(|d|; kind) Y_lm(d / |d|)
//
// g_f = sum_b table[kind][b][f] B_b, where B_b are the quintic B-splines of the cells into which
// the kind's grid is divided. Y_lm are the real spherical harmonics
//
//   Y_lm = N_lm P_l^|m|(cos theta) (cos m phi for m >= 0, sin |m| phi for m < 0)
//
// without the sign (-1)^m. N_lm makes them orthonormal: the integral of Y_lm^2 over the sphere
// is 1.
//
// If each slot has D directions v_1 ... v_D, A is the sum of the derivatives of g_f Y_lm along all
// of them: d^D/(dt_1 ... dt_D) at d + t_1 v_1 + ... + t_D v_D, taken at t = 0.
//
// All numbers are computed in float64 and summed in the order of the slots.
//
// Source: these sums are the descriptors of the neuroevolution potential, Fan et al., J. Chem.
// Phys. 157, 114801 (2022), doi 10.1063/5.0106617, and the atomic base of the atomic cluster
// expansion, Drautz, Phys. Rev. B 99, 014104 (2019). The tables of splines are our own.
#pragma once

#include <cstdint>

#include "duals.h"

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::density {

constexpr int kMostL = 4;

template <class Real, class Index>
struct DensityInputs {
  int64_t atoms, slots, kinds, rows, functions;  // n, K, kinds, B, F
  int64_t harmonics;                             // (l_max + 1)^2
  int64_t directions;                            // D
  const Real* d;                                 // [n, K, 3]
  const Index* kind;                             // [n, K]; -1: empty
  const Real* along;                             // [n, K, D, 3]
  const Real* table;                             // [kinds, B, F]; there are B - 5 cells
  const double* grid;                            // [kinds, 2]: first and last distance
};

// The CPU kernels return the first slot whose kind does not exist, or -1.
template <class Real, class Index>
int64_t density_cpu(const DensityInputs<Real, Index>& in, Real* A);
// Write the gradient of the inner product <grad, A> for d.
template <class Real, class Index>
int64_t density_backward_cpu(const DensityInputs<Real, Index>& in, const Real* grad, Real* grad_d);
// Write the gradient of <grad, A> for the table. The values of the table have no effect.
template <class Real, class Index>
int64_t density_table_backward_cpu(const DensityInputs<Real, Index>& in, const Real* grad,
                                   Real* grad_table);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t density_cuda(const DensityInputs<Real, Index>& in, Real* A, cudaStream_t stream);
template <class Real, class Index>
cudaError_t density_backward_cuda(const DensityInputs<Real, Index>& in, const Real* grad,
                                  Real* grad_d, cudaStream_t stream);
// Without memory for the sums of the parts (nullptr), only set `bytes` to its size.
template <class Real, class Index>
cudaError_t density_table_backward_cuda(const DensityInputs<Real, Index>& in, const Real* grad,
                                        Real* grad_table, void* memory, int64_t* bytes,
                                        cudaStream_t stream);
#endif

}  // namespace calcops::ops::density
