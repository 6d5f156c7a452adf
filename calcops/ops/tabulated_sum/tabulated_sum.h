// Sums over neighbours of tabulated functions. The contract is in tabulated_sum.cpp, the
// mathematics in tabulated_sum_math.h.
//
// There are n atoms with K slots for neighbours. Slot s of atom i has a number x, a row R[4] and a
// kind. Each kind has M functions g_m of x. The result is
//
//   T[i][a][m] = sum_s R[i][s][a] g_m(x[i][s])
//
// or the same sum over the derivatives of g_m of a given order. g_m is a piecewise polynomial of
// degree 5. table[kind][cell][k][m] is its coefficient of t^k, where t is the distance of x from
// the cell's beginning. So the coefficients of all functions for one k are contiguous.
//
// A compressed Deep Potential computes its descriptor in this way: x is the smoothed inverse
// distance, R a row of the environment matrix, g the embedding net. Source: Lu et al., J. Chem.
// Theory Comput. 18, 5559 (2022), doi 10.1021/acs.jctc.2c00102. The table's layout is our own.
//
// Slots are summed in their order, in blocks of kPart filled slots on the CPU and of 32 slots on
// CUDA. The blocks' sums are added in float64.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::tabulated_sum {

constexpr int kPart = 16;  // filled slots whose sum the CPU kernel adds at once

template <class Real, class Index>
struct SumInputs {
  int64_t atoms, slots, kinds, cells, functions, order;  // n, K, kinds, cells, M
  const Real* x;                                         // [n, K]
  const Real* R;                                         // [n, K, 4]
  const Index* kind;                                     // [n, K]; -1: empty
  const Real* table;                                     // [kinds, cells, 6, M]
  const double* grid;                                    // [kinds, 5]
};

// Gradients of a scalar for x and R; nullptr: not wanted.
template <class Real>
struct SumGradients {
  Real* x;
  Real* R;
};

// Both return the first slot whose kind does not exist, or -1.
template <class Real, class Index>
int64_t tabulated_sum_cpu(const SumInputs<Real, Index>& in, Real* T);
template <class Real, class Index>
int64_t tabulated_sum_backward_cpu(const SumInputs<Real, Index>& in, const Real* grad,
                                   const SumGradients<Real>& out);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t tabulated_sum_cuda(const SumInputs<Real, Index>& in, Real* T, cudaStream_t stream);
template <class Real, class Index>
cudaError_t tabulated_sum_backward_cuda(const SumInputs<Real, Index>& in, const Real* grad,
                                        const SumGradients<Real>& out, cudaStream_t stream);
#endif

}  // namespace calcops::ops::tabulated_sum
