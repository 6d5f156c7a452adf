// CPU kernel of matrix_product. It computes tiles of the result, whose sums stay in registers.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cstring>

#include "matrix_product/matrix_product.h"

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
  typedef Real type __attribute__((vector_size(kBytes), aligned(sizeof(Real))));
  static constexpr int kSize = kBytes / sizeof(Real), kPanel = kVectors * kSize;
};
template <class Real>
using Vector = typename Lanes<Real>::type;

// Copy the weights to panels of kPanel columns, one panel after the other, so that a tile reads
// contiguous memory. Columns beyond the last are zeros.
template <class Real>
void pack(const Factors<Real>& in, Real* panels) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  for (int64_t first = 0; first < in.columns; first += kPanel)
    for (int64_t k = 0; k < in.terms; ++k, panels += kPanel) {
      const int64_t count = std::min<int64_t>(kPanel, in.columns - first);
      std::copy_n(in.weights + k * in.columns + first, count, panels);
      std::fill_n(panels + count, kPanel - count, Real(0));
    }
}

// Write a tile: kHigh rows and `columns` columns, which take kWide vectors.
template <int kHigh, int kWide, class Real>
void fill_tile(const Factors<Real>& in, const Real* x, const Real* panel, int64_t columns,
               Real* y) {
  constexpr int kSize = Lanes<Real>::kSize;
  Vector<Real> sum[kHigh][kWide] = {};
  for (int64_t k = 0; k < in.terms; ++k, panel += Lanes<Real>::kPanel) {
    Vector<Real> weights[kWide];
#pragma GCC unroll 4
    for (int v = 0; v < kWide; ++v)
      weights[v] = *reinterpret_cast<const Vector<Real>*>(panel + v * kSize);
#pragma GCC unroll 6
    for (int row = 0; row < kHigh; ++row) {
      const Real factor = x[row * in.terms + k];
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) sum[row][v] += factor * weights[v];
    }
  }
  for (int row = 0; row < kHigh; ++row)
    for (int v = 0; v < kWide; ++v) {
      const int64_t first = v * kSize, count = std::min<int64_t>(kSize, columns - first);
      Real* to = y + row * in.columns + first;
      if (count == kSize)
        *reinterpret_cast<Vector<Real>*>(to) = sum[row][v];
      else
        std::memcpy(to, &sum[row][v], count * sizeof(Real));
    }
}

template <int kHigh, class Real>
void fill_rows(const Factors<Real>& in, const Real* x, const Real* panel, int64_t columns,
               Real* y) {
  constexpr int kSize = Lanes<Real>::kSize;
  if (columns <= kSize) return fill_tile<kHigh, 1>(in, x, panel, columns, y);
  if (columns <= 2 * kSize) return fill_tile<kHigh, 2>(in, x, panel, columns, y);
  if (columns <= 3 * kSize) return fill_tile<kHigh, 3>(in, x, panel, columns, y);
  if constexpr (kVectors > 3) fill_tile<kHigh, 4>(in, x, panel, columns, y);
}

template <class Real>
void fill_block(const Factors<Real>& in, const Real* panels, int64_t begin, int64_t end, Real* y) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  for (int64_t first = 0; first < in.columns; first += kPanel, panels += kPanel * in.terms) {
    const int64_t columns = std::min<int64_t>(kPanel, in.columns - first);
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows)
      fill_rows<kRows>(in, in.x + row * in.terms, panels, columns, y + row * in.columns + first);
    for (; row < end; ++row)
      fill_rows<1>(in, in.x + row * in.terms, panels, columns, y + row * in.columns + first);
  }
}

}  // namespace

template <class Real>
void matrix_product_cpu(const Factors<Real>& in, Real* y) {
  constexpr int kPanel = Lanes<Real>::kPanel;
  if (in.rows == 0) return;
  const Scratch<Real> panels((in.columns + kPanel - 1) / kPanel * kPanel * in.terms);
  pack(in, panels.get());
  const int64_t blocks = (in.rows + kRowsOfBlock - 1) / kRowsOfBlock;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kRowsOfBlock;
      fill_block(in, panels.get(), first, std::min(first + kRowsOfBlock, in.rows), y);
    }
  });
}

template void matrix_product_cpu(const Factors<float>&, float*);
template void matrix_product_cpu(const Factors<double>&, double*);

}  // namespace calcops::ops::matrix_product
