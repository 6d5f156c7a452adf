// CUDA kernel of matrix_product: a block computes a tile of the result.
#include <calcops/launch.h>
#include <calcops/operator.h>

namespace calcops::ops::matrix_product {
namespace {

constexpr int kTile = 32, kRowsAtOnce = 8, kThreads = kTile * kRowsAtOnce;
constexpr int kPitch = kTile + 1;  // the numbers of a column are in different memory banks
constexpr int kNumbers = kTile * kPitch;

template <class Real>
__global__ void __launch_bounds__(kThreads)
    product_kernel(View<const Real, 2> x, View<const Real, 2> weights, View<Real, 2> y) {
  __shared__ Real x_tile[kNumbers];
  __shared__ Real weights_tile[kNumbers];
  const int64_t rows = x.shape[0], terms = x.shape[1], columns = weights.shape[1];
  const int64_t tiles = (columns + kTile - 1) / kTile;
  const int64_t first_row = blockIdx.x / tiles * kTile, first_column = blockIdx.x % tiles * kTile;
  const int column = threadIdx.x % kTile, row = threadIdx.x / kTile;
  Real sum[kTile / kRowsAtOnce] = {};
  for (int64_t first = 0; first < terms; first += kTile) {
    __syncthreads();
    for (int i = row; i < kTile; i += kRowsAtOnce) {
      const int64_t n = first_row + i, k = first + column;
      x_tile[i * kPitch + column] = n < rows && k < terms ? x(n, k) : Real(0);
      const int64_t m = first_column + column, term = first + i;
      weights_tile[i * kPitch + column] = m < columns && term < terms ? weights(term, m) : Real(0);
    }
    __syncthreads();
    const int count = int(terms - first < kTile ? terms - first : kTile);
    for (int k = 0; k < count; ++k)
      for (int i = 0; i < kTile / kRowsAtOnce; ++i)
        sum[i] += x_tile[(row + i * kRowsAtOnce) * kPitch + k] * weights_tile[k * kPitch + column];
  }
  const int64_t m = first_column + column;
  for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
    const int64_t n = first_row + row + i * kRowsAtOnce;
    if (n < rows && m < columns) y(n, m) = sum[i];
  }
}

template <class Real>
cudaError_t product(View<const Real, 2> x, View<const Real, 2> weights, View<Real, 2> y,
                    cudaStream_t stream) {
  const int64_t tiles = blocks_for(y.shape[0], kTile) * blocks_for(y.shape[1], kTile);
  return launch(product_kernel<Real>, tiles, kThreads, stream, x, weights, y);
}

const Kernel kCuda("matrix_product", product<float>, product<double>);

}  // namespace
}  // namespace calcops::ops::matrix_product
