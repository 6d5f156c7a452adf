// One pair of atoms: its row of the environment matrix, its B-splines, and their derivatives along
// lines; for CPU and CUDA.
//
// A formula is written once, for any kind of number: a double, a vector of doubles, or a Series of
// one of these, which carries derivatives.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace calcops::ops::environment_spline {

// c[0] + c[1] t + c[2] t^2 + ..., the higher terms left out.
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
CALCOPS_HD_INLINED inline Series<N, k> operator-(double a, const Series<N, k>& b) { return b * -1.0 + a; }
// clang-format on

// x, or the bound that it is beyond; NaN stays.
template <class N, int k>
CALCOPS_HD_INLINED inline Series<N, k> clamped(const Series<N, k>& x, double lower, double upper) {
  const N zero{}, low = zero + lower, high = zero + upper;
  Series<N, k> result;
  for (int i = 0; i < k; ++i) {
    result.c[i] = x.c[0] < low ? (i ? zero : low) : x.c[i];
    result.c[i] = x.c[0] > high ? (i ? zero : high) : result.c[i];
  }
  return result;
}

// w/r and w/r^2
template <class S>
struct Radial {
  S s, over;
};

template <class S>
CALCOPS_HD_INLINED inline Radial<S> radial(const S& r, const S& inverse, double rcut_smth,
                                           double rcut) {
  const S u = clamped((r - rcut_smth) * (1 / (rcut - rcut_smth)), 0, 1), rest = 1.0 - u;
  const S w = rest * rest * rest * (u * (u * 6.0 + 3.0) + 1.0), s = w * inverse;
  return {s, s * inverse};
}

// The B-splines of a cell at t, from 0 to 1 within it, times the degree's factorial. They follow
// from those of the degree below.
template <int kDegree, class N>
CALCOPS_HD_INLINED inline void unscaled_basis(const N& t, N* w) {
  if constexpr (kDegree == 0) {
    w[0] = t * 0.0 + 1.0;
  } else {
    unscaled_basis<kDegree - 1>(t, w);
    w[kDegree] = t * w[kDegree - 1];
    for (int b = kDegree - 1; b > 0; --b)
      w[b] = (t + double(kDegree - b)) * w[b - 1] + (double(b + 1) - t) * w[b];
    w[0] = (1.0 - t) * w[0];
  }
}

CALCOPS_HD constexpr double factorial(int n) { return n > 1 ? n * factorial(n - 1) : 1; }

// The B-splines and, unless `slopes` is nullptr, their derivatives.
template <int kDegree, class N>
CALCOPS_HD_INLINED inline void basis(const N& t, N* w, N* slopes) {
  if (slopes) {
    N below[kDegree];
    unscaled_basis<kDegree - 1>(t, below);
    constexpr double kScale = 1 / factorial(kDegree - 1);
    slopes[0] = below[0] * -kScale;
    for (int b = 1; b < kDegree; ++b) slopes[b] = (below[b - 1] - below[b]) * kScale;
    slopes[kDegree] = below[kDegree - 1] * kScale;
  }
  unscaled_basis<kDegree>(t, w);
  for (int b = 0; b <= kDegree; ++b) w[b] = w[b] * (1 / factorial(kDegree));
}

// What the kinds of pairs differ in.
struct Kind {
  double begin, per_width;  // of the cells
  alignas(32) double slope[4];
  alignas(32) double shift[4];

  CALCOPS_HD Kind() {}
  CALCOPS_HD Kind(const double* davg, const double* dstd, const double* grid, int64_t cells)
      : begin(grid[0]), per_width(double(cells) / (grid[1] - grid[0])) {
    for (int a = 0; a < 4; ++a) {
      slope[a] = 1 / dstd[a];
      shift[a] = davg[a] / dstd[a];
    }
  }
};

// The cell that a position in a grid of `cells` cells of width 1 is in; whatever it is, one of
// them.
CALCOPS_HD inline double cell_of(double position, double cells) {
  if (!(position > 0)) return 0;
  return position < cells ? std::floor(position) : cells - 1;
}

struct Cutoff {
  double rcut_smth, rcut;

  // NaN is no distance beyond it.
  CALCOPS_HD bool ends_before(double r2) const { return r2 >= rcut * rcut; }
};

// ---- a pair that moves along a line -------------------------------------------------------------

// x^(-1/2), term by term from the derivative of x^(-1/2) x = x^(1/2).
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

// Adds to p[b][a] the factor times the term of t^order in R[a] B_b at d + t line, b in the cell
// that d is in, and returns that cell.
template <int kDegree, int kLength>
CALCOPS_HD int64_t add_along(const Kind& kind, const Cutoff& cutoff, int64_t cells, const double* d,
                             const double* line, int order, double factor, double* p) {
  using S = Series<double, kLength>;
  S at[3], square{};
  for (int c = 0; c < 3; ++c) {
    at[c] = S{};
    at[c].c[0] = d[c];
    if (kLength > 1) at[c].c[1 % kLength] = line[c];
    square = square + at[c] * at[c];
  }
  const S inverse = inverse_root(square);
  const Radial<S> f = radial(square * inverse, inverse, cutoff.rcut_smth, cutoff.rcut);
  S R[4];
  R[0] = f.s * kind.slope[0] - kind.shift[0];
  for (int c = 0; c < 3; ++c) R[c + 1] = f.over * at[c] * kind.slope[c + 1] - kind.shift[c + 1];

  const S position = (R[0] - kind.begin) * kind.per_width;
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

// p[b][a]: the derivative of R[a] B_b at d along all directions [count][3]; returns the cell.
//
// It is the sum over the signs of 2..count of their product times the term of t^count along
// direction 1 +- direction 2 ..., over 2^(count - 1). The directions are made unit vectors first:
// rounding is relative to the largest derivative along such ones.
template <int kDegree, int kLength>
CALCOPS_HD int64_t derivative_of(const Kind& kind, const Cutoff& cutoff, int64_t cells,
                                 const double* d, const double (*directions)[3], int count,
                                 double* p) {
  double unit[kMostDirections][3], scale = 1;
  for (int i = 0; i < count; ++i) {
    const double* v = directions[i];
    const double length = std::sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2]);
    for (int c = 0; c < 3; ++c) unit[i][c] = length > 0 ? v[c] / length : v[c];
    scale *= i > 0 ? length / 2 : length;
  }
  for (int i = 0; i < 4 * (kDegree + 1); ++i) p[i] = 0;
  int64_t cell = 0;
  for (int64_t signs = 0; signs < (count > 1 ? int64_t(1) << (count - 1) : 1); ++signs) {
    double line[3] = {0, 0, 0}, factor = scale;
    for (int i = 0; i < count; ++i) {
      const double sign = signs >> i & 1 ? -1 : 1;
      factor *= sign;
      for (int c = 0; c < 3; ++c) line[c] += sign * unit[i][c];
    }
    cell = add_along<kDegree, kLength>(kind, cutoff, cells, d, line, count, factor, p);
  }
  return cell;
}

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
