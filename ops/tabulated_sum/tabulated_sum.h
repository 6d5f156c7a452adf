// Sums over neighbours of tabulated functions. The contract is in tabulated_sum.cpp, the
// mathematics in tabulated_sum_math.h.
//
// n atoms with K slots for neighbours; slot s of atom i has a number x, a row R[4] and a kind,
// which names M functions g of x:
//
//   T[i][a][m] = sum_s R[i][s][a] g_m(x[i][s])
//
// with g's derivative of the given order in its place. g is a piecewise polynomial of degree 5,
// whose coefficients lie in planes: table[kind][cell][k][m] is that of t^k, t = x - start of the
// cell. A compressed Deep Potential computes its descriptor in this way: x is the smoothed inverse
// distance, R a row of the environment matrix, g the embedding net. Source: Lu et al., J. Chem.
// Theory Comput. 18, 5559 (2022), doi 10.1021/acs.jctc.2c00102; the planes are our own.
//
// A sum over s is taken in the order of the slots, in parts of kPart filled ones on the CPU and of
// 32 slots on CUDA, which are summed in float64.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::tabulated_sum {

constexpr int kPart = 16;

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
