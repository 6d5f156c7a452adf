// CUDA kernel of matrix_product: a block computes a tile of the result.
#include "matrix_product/matrix_product.h"

namespace calcops::ops::matrix_product {
namespace {

constexpr int kTile = 32, kRowsAtOnce = 8, kThreads = kTile * kRowsAtOnce;
constexpr int kPitch = kTile + 1;  // the numbers of a column are in different memory banks
constexpr int kNumbers = kTile * kPitch;

template <class Real>
__global__ void __launch_bounds__(kThreads) product_kernel(Factors<Real> in, Real* y) {
  __shared__ Real x[kNumbers];
  __shared__ Real weights[kNumbers];
  const int64_t tiles = (in.columns + kTile - 1) / kTile;
  const int64_t first_row = blockIdx.x / tiles * kTile, first_column = blockIdx.x % tiles * kTile;
  const int column = threadIdx.x % kTile, row = threadIdx.x / kTile;
  Real sum[kTile / kRowsAtOnce] = {};
  for (int64_t first = 0; first < in.terms; first += kTile) {
    __syncthreads();
    for (int i = row; i < kTile; i += kRowsAtOnce) {
      const int64_t n = first_row + i, k = first + column;
      x[i * kPitch + column] = n < in.rows && k < in.terms ? in.x[n * in.terms + k] : Real(0);
      const int64_t m = first_column + column, term = first + i;
      weights[i * kPitch + column] =
          m < in.columns && term < in.terms ? in.weights[term * in.columns + m] : Real(0);
    }
    __syncthreads();
    const int count = int(in.terms - first < kTile ? in.terms - first : kTile);
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < kTile / kRowsAtOnce; ++i)
        sum[i] += x[(row + i * kRowsAtOnce) * kPitch + k] * weights[k * kPitch + column];
  }
  const int64_t m = first_column + column;
  for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
    const int64_t n = first_row + row + i * kRowsAtOnce;
    if (n < in.rows && m < in.columns) y[n * in.columns + m] = sum[i];
  }
}

}  // namespace

template <class Real>
cudaError_t matrix_product_cuda(const Factors<Real>& in, Real* y, cudaStream_t stream) {
  const int64_t tiles = (in.rows + kTile - 1) / kTile * ((in.columns + kTile - 1) / kTile);
  if (tiles > 0) product_kernel<<<unsigned(tiles), kThreads, 0, stream>>>(in, y);
  return cudaGetLastError();
}

template cudaError_t matrix_product_cuda(const Factors<float>&, float*, cudaStream_t);
template cudaError_t matrix_product_cuda(const Factors<double>&, double*, cudaStream_t);

}  // namespace calcops::ops::matrix_product
