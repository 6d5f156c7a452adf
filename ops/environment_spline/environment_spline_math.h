// The mathematics of one pair of atoms, shared by the CPU and the CUDA kernels: its row of the
// environment matrix, its B-splines, and their derivatives along lines.
//
// Each formula is a template over the type of its numbers: double, a vector of doubles (several
// pairs), or a Series of one of these, which gives the formula's derivatives.
#pragma once

#include <cmath>
#include <cstdint>

#include "b_splines.h"
#include "numbers.h"

namespace calcops::ops::environment_spline {

// A function of t by its first Taylor coefficients: c[0] + c[1] t + c[2] t^2 + ... The operators
// below compute with such functions and drop all terms from t^kLength on.
template <class Number, int kLength>
struct Series {
  Number c[kLength];
};

// clang-format off
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator+(const Series<N, k>& a, const Series<N, k>& b) {
  Series<N, k> sum;
  for (int i = 0; i < k; ++i) sum.c[i] = a.c[i] + b.c[i];
  return sum;
}
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator-(const Series<N, k>& a, const Series<N, k>& b) {
  Series<N, k> difference;
  for (int i = 0; i < k; ++i) difference.c[i] = a.c[i] - b.c[i];
  return difference;
}
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator*(const Series<N, k>& a, const Series<N, k>& b) {
  Series<N, k> product;
  for (int i = 0; i < k; ++i) {
    product.c[i] = a.c[0] * b.c[i];
    for (int j = 1; j <= i; ++j) product.c[i] += a.c[j] * b.c[i - j];
  }
  return product;
}
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator*(const Series<N, k>& a, double b) {
  Series<N, k> product;
  for (int i = 0; i < k; ++i) product.c[i] = a.c[i] * b;
  return product;
}
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator+(const Series<N, k>& a, double b) {
  Series<N, k> sum = a;
  sum.c[0] += b;
  return sum;
}
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator-(const Series<N, k>& a, double b) { return a + -b; }
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> operator-(double a, const Series<N, k>& b) {
  return b * -1.0 + a;
}
// clang-format on

// Return x between its bounds. Beyond one, return the bound, whose derivatives are 0. NaN stays.
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> clamped(const Series<N, k>& x, double lower, double upper) {
  const N zero{};
  const N low = zero + lower;
  const N high = zero + upper;
  Series<N, k> result;
  for (int i = 0; i < k; ++i) {
    result.c[i] = x.c[0] < low ? (i ? zero : low) : x.c[i];
    result.c[i] = x.c[0] > high ? (i ? zero : high) : result.c[i];
  }
  return result;
}

// The factors of the environment row: R = (s, s_over_r d) before it is normalised.
template <class S>
struct Radial {
  S s;         // w/r
  S s_over_r;  // w/r^2
};

template <class S>
CALCOPS_HD_INLINED inline Radial<S> radial(const S& r, const S& inverse, double rcut_smth,
                                           double rcut) {
  const S u = clamped((r - rcut_smth) * (1 / (rcut - rcut_smth)), 0, 1);
  const S rest = 1.0 - u;
  const S w = rest * rest * rest * (u * (u * 6.0 + 3.0) + 1.0);
  const S s = w * inverse;
  return {s, s * inverse};
}

// The constants of a kind of pairs. A row is normalised as R[a] * scale[a] - shift[a]. Its position
// in the grid is (R[0] - begin) * cells_per_unit, measured in cells.
struct Kind {
  double begin;
  double cells_per_unit;
  alignas(32) double scale[4];
  alignas(32) double shift[4];

  CALCOPS_HD Kind() {}
  CALCOPS_HD Kind(const double* davg, const double* dstd, const double* grid, int64_t cells)
      : begin(grid[0]), cells_per_unit(double(cells) / (grid[1] - grid[0])) {
    for (int a = 0; a < 4; ++a) {
      scale[a] = 1 / dstd[a];
      shift[a] = davg[a] / dstd[a];
    }
  }
};

// Return the cell, 0 to cells - 1, that holds a position measured in cells. A position outside the
// grid has the nearest cell, NaN the first.
CALCOPS_HD inline double cell_of(double position, double cells) {
  if (!(position > 0)) return 0;
  return position < cells ? std::floor(position) : cells - 1;
}

struct Cutoff {
  double rcut_smth, rcut;

  // Return whether a pair of the squared distance r2 adds nothing. If r2 is NaN, the pair takes
  // part, so that the sums become NaN.
  CALCOPS_HD bool is_at_or_beyond(double r2) const { return r2 >= rcut * rcut; }
};

// ---- a pair that moves along a line -------------------------------------------------------------

// Return y = x^(-1/2). From x y' = -1/2 x' y, the coefficients of t^(i-1) on both sides give y.c[i]
// in terms of y.c[0] ... y.c[i-1].
template <int k>
CALCOPS_HD inline Series<double, k> inverse_root(const Series<double, k>& x) {
  Series<double, k> y;
  y.c[0] = 1 / std::sqrt(x.c[0]);
  for (int i = 1; i < k; ++i) {
    double sum = 0;
    for (int j = 1; j <= i; ++j) sum += (0.5 * j - i) * x.c[j] * y.c[i - j];
    y.c[i] = sum / (i * x.c[0]);
  }
  return y;
}

// Expand R[a] B_b at d + t line in powers of t, for the B-splines b of the cell that d is in. Add
// `factor` times the coefficient of t^order to p[b][a], and return the cell.
template <int kDegree, int kLength>
CALCOPS_HD int64_t add_along(const Kind& kind, const Cutoff& cutoff, int64_t cells, const double* d,
                             const double* line, int order, double factor, double* p) {
  using S = Series<double, kLength>;
  S point[3], square{};
  for (int c = 0; c < 3; ++c) {
    point[c] = S{};
    point[c].c[0] = d[c];
    // This is c[1]. Where kLength is 1, compilers would find a plain 1 beyond the array.
    if (kLength > 1) point[c].c[1 % kLength] = line[c];
    square = square + point[c] * point[c];
  }
  const S inverse = inverse_root(square);
  const Radial<S> f = radial(square * inverse, inverse, cutoff.rcut_smth, cutoff.rcut);
  S R[4];
  R[0] = f.s * kind.scale[0] - kind.shift[0];
  for (int c = 0; c < 3; ++c)
    R[c + 1] = f.s_over_r * point[c] * kind.scale[c + 1] - kind.shift[c + 1];

  const S position = (R[0] - kind.begin) * kind.cells_per_unit;
  const S inside = clamped(position, 0, double(cells));
  const double cell = cell_of(inside.c[0], double(cells));
  S w[kDegree + 1], slopes[kDegree + 1];
  basis<kDegree>(inside - cell, w, slopes);
  const bool is_outside = position.c[0] != inside.c[0];
  for (int b = 0; b <= kDegree; ++b) {
    if (is_outside) w[b] = w[b] + (position - inside) * slopes[b];
    for (int a = 0; a < 4; ++a) {
      double sum = 0;
      for (int i = 0; i <= order; ++i) sum += w[b].c[i] * R[a].c[order - i];
      p[4 * b + a] += factor * sum;
    }
  }
  return int64_t(cell);
}

constexpr int kMostDirections = 16;

// Write to p[b][a] the mixed derivative of f = R[a] B_b at d along all of directions [count][3],
// for the B-splines b of the cell that d is in. Return the cell.
//
// The mixed derivative follows from derivatives along single lines (polarization). With k = count
// and c_k(v) the coefficient of t^k in f(d + t v), it is
//
//   2^(1-k)  sum of  s_1 ... s_(k-1) c_k(s_1 v_1 + ... + s_(k-1) v_(k-1) + v_k)
//
// over the signs s_i = +1 and -1 of all directions but the last. The directions are made unit
// vectors first, so that rounding is relative to the largest derivative along unit vectors.
template <int kDegree, int kLength>
CALCOPS_HD int64_t derivative_of(const Kind& kind, const Cutoff& cutoff, int64_t cells,
                                 const double* d, const double (*directions)[3], int count,
                                 double* p) {
  double unit[kMostDirections][3];
  double scale = 1;  // the product of the lengths, times 2^(1-k)
  for (int i = 0; i < count; ++i) {
    const double* v = directions[i];
    const double length = std::sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2]);
    for (int c = 0; c < 3; ++c) unit[i][c] = length > 0 ? v[c] / length : v[c];
    scale *= i > 0 ? length / 2 : length;
  }
  for (int i = 0; i < 4 * (kDegree + 1); ++i) p[i] = 0;
  int64_t cell = 0;
  for (int64_t signs = 0; signs < (count > 1 ? int64_t(1) << (count - 1) : 1); ++signs) {
    double line[3] = {0, 0, 0};
    double factor = scale;
    for (int i = 0; i < count; ++i) {
      const double sign = signs >> i & 1 ? -1 : 1;  // bit i: s_i is -1
      factor *= sign;
      for (int c = 0; c < 3; ++c) line[c] += sign * unit[i][c];
    }
    cell = add_along<kDegree, kLength>(kind, cutoff, cells, d, line, count, factor, p);
  }
  return cell;
}

// The same for any count up to kMostDirections. A series may be longer than needed, so only five
// lengths are compiled.
template <int kDegree>
CALCOPS_HD int64_t derivative(const Kind& kind, const Cutoff& cutoff, int64_t cells,
                              const double* d, const double (*directions)[3], int count,
                              double* p) {
  if (count == 0) return derivative_of<kDegree, 1>(kind, cutoff, cells, d, directions, count, p);
  if (count == 1) return derivative_of<kDegree, 2>(kind, cutoff, cells, d, directions, count, p);
  if (count == 2) return derivative_of<kDegree, 3>(kind, cutoff, cells, d, directions, count, p);
  if (count <= 4) return derivative_of<kDegree, 5>(kind, cutoff, cells, d, directions, count, p);
  return derivative_of<kDegree, kMostDirections + 1>(kind, cutoff, cells, d, directions, count, p);
}

}  // namespace calcops::ops::environment_spline
