// The product of a matrix of many rows by a small one. The contract is in matrix_product.cpp.
//
//   y[n][m] = sum_k x[n][k] weights[k][m]
//
// It is made for the layers of neural nets, whose weights fit into the processor's cache. Each
// result is summed in the order of k. So its bits depend neither on the number of rows nor on the
// number of threads.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::matrix_product {

template <class Real>
struct Factors {
  int64_t rows, terms, columns;  // N, K, M
  const Real* x;                 // [N, K]
  const Real* weights;           // [K, M]
};

template <class Real>
void matrix_product_cpu(const Factors<Real>& in, Real* y);

#ifndef CALCOPS_NO_CUDA
template <class Real>
cudaError_t matrix_product_cuda(const Factors<Real>& in, Real* y, cudaStream_t stream);
#endif

}  // namespace calcops::ops::matrix_product
