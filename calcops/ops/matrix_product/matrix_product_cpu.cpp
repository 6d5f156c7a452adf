// CPU kernel of matrix_product. It computes tiles of the result, whose sums stay in registers.
#include <calcops/memory.h>
#include <calcops/operator.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace calcops::ops::matrix_product {
namespace {

// A tile has kRows rows of kVectors vectors of kBytes bytes. These leave just enough registers for
// one row of weights and one number of x.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 6, kVectors = 4;
#elif defined(__AVX__)
constexpr int kBytes = 32, kRows = 4, kVectors = 3;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kRows = 6, kVectors = 4;
#else
constexpr int kBytes = 16, kRows = 4, kVectors = 3;
#endif
constexpr int64_t kRowsOfBlock = 8 * kRows;  // few enough to stay in the cache

template <class Real>
struct Lanes {
  static constexpr int kSize = kBytes / sizeof(Real), kPanel = kVectors * kSize;
};
template <class Real>
using Vector = typename LooseVector<Real, kBytes>::type;
template <class Number>
using Matrix = View<Number, 2>;

// Copy the weights to panels of kPanel columns, one panel after the other, so that a tile reads
// contiguous memory. Columns beyond the last are zeros.
template <class Real>
void pack(Matrix<const Real> weights, Real* panels) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  const auto [terms, columns] = weights.shape;
  for (int64_t first = 0; first < columns; first += kPanel)
    for (int64_t k = 0; k < terms; ++k, panels += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, columns - first);
      std::copy_n(weights.data + k * columns + first, count, panels);
      std::fill_n(panels + count, kPanel - count, Real(0));
    }
}

// Write a tile of y: kHigh rows from `n` on, and the columns from `m` on to the end of the panel,
// which take kWide vectors.
template <int kHigh, int kWide, class Real>
void fill_tile(Matrix<const Real> x, const Real* panel, Matrix<Real> y, int64_t n, int64_t m) {
  constexpr int kSize = Lanes<Real>::kSize;
  const int64_t terms = x.shape[1], columns = y.shape[1];
  const Real* from = x.data + n * terms;
  Vector<Real> sum[kHigh][kWide] = {};
  for (int64_t k = 0; k < terms; ++k, panel += Lanes<Real>::kPanel) {
    Vector<Real> weights[kWide];
#pragma GCC unroll 4
    for (int v = 0; v < kWide; ++v)
      weights[v] = *reinterpret_cast<const Vector<Real>*>(panel + v * kSize);
#pragma GCC unroll 6
    for (int row = 0; row < kHigh; ++row) {
      const Real factor = from[row * terms + k];
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) sum[row][v] += factor * weights[v];
    }
  }
  for (int row = 0; row < kHigh; ++row)
    for (int v = 0; v < kWide; ++v) {
      const int64_t first = m + v * kSize, count = std::min<int64_t>(kSize, columns - first);
      Real* to = y.data + (n + row) * columns + first;
      if (count == kSize)
        *reinterpret_cast<Vector<Real>*>(to) = sum[row][v];
      else
        std::memcpy(to, &sum[row][v], count * sizeof(Real));
    }
}

template <int kHigh, class Real>
void fill_rows(Matrix<const Real> x, const Real* panel, Matrix<Real> y, int64_t n, int64_t m) {
  constexpr int kSize = Lanes<Real>::kSize;
  const int64_t columns = std::min<int64_t>(Lanes<Real>::kPanel, y.shape[1] - m);
  if (columns <= kSize) return fill_tile<kHigh, 1>(x, panel, y, n, m);
  if (columns <= 2 * kSize) return fill_tile<kHigh, 2>(x, panel, y, n, m);
  if (columns <= 3 * kSize) return fill_tile<kHigh, 3>(x, panel, y, n, m);
  if constexpr (kVectors > 3) fill_tile<kHigh, 4>(x, panel, y, n, m);
}

template <class Real>
void fill_block(Matrix<const Real> x, const Real* panels, Matrix<Real> y, int64_t begin,
                int64_t end) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  for (int64_t m = 0; m < y.shape[1]; m += kPanel, panels += kPanel * x.shape[1]) {
    int64_t n = begin;
    for (; n + kRows <= end; n += kRows) fill_rows<kRows>(x, panels, y, n, m);
    for (; n < end; ++n) fill_rows<1>(x, panels, y, n, m);
  }
}

template <class Real>
void product(Matrix<const Real> x, Matrix<const Real> weights, Matrix<Real> y) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  const int64_t rows = y.shape[0], columns = y.shape[1];
  if (rows == 0) return;
  const Scratch<Real> panels((columns + kPanel - 1) / kPanel * kPanel * x.shape[1]);
  pack(weights, panels.get());
  const int64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kRowsOfBlock;
      fill_block(x, panels.get(), y, first, std::min(first + kRowsOfBlock, rows));
    }
  });
}

const Kernel kCpu("matrix_product", product<float>, product<double>);

}  // namespace
}  // namespace calcops::ops::matrix_product
