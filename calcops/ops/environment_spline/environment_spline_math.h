// The mathematics of one pair of atoms, shared by the CPU and the CUDA kernels: its row of the
// environment matrix, its B-splines, and their derivatives along directions.
//
// Each formula is a template over the type of its numbers: double, a vector of doubles (several
// pairs), or a Dual of these, which gives the formula's derivatives.
#pragma once

#include <cmath>
#include <cstdint>

#include "b_splines.h"
#include "duals.h"

namespace calcops::ops::environment_spline {

// The factors of the environment row: R = (s, s_over_r d) before it is normalised.
template <class N>
struct Radial {
  N s;         // w/r
  N s_over_r;  // w/r^2
};

template <int D, class Base, class N>
CALCOPS_HD_INLINED inline Radial<N> radial(const N& r, const N& inverse, double rcut_smth,
                                           double rcut) {
  const N u = clamped<D, Base>((r - rcut_smth) * (1 / (rcut - rcut_smth)), 0, 1);
  const N rest = 1.0 - u;
  const N w = rest * rest * rest * (u * (u * 6.0 + 3.0) + 1.0);
  const N s = w * inverse;
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

// ---- a pair that moves along directions ---------------------------------------------------------

// The numbers of a pair that moves along D directions.
template <int kDegree, int D>
struct MovingPair {
  using N = Mixed<double, D>;
  static constexpr int kMixed = (1 << D) - 1;  // the part that is derived along all directions

  N d[3], r, inverse;
  N R[4];
  int64_t cell;                           // the one that R[0] is in
  N w[kDegree + 1], slopes[kDegree + 1];  // its B-splines and their derivatives for the position

  CALCOPS_HD MovingPair(const double* at, const double (*directions)[3]) {
    N square{};
    for (int c = 0; c < 3; ++c) {
      d[c] = constant<N>(at[c]);
      for (int i = 0; i < D; ++i) parts_of<double>(d + c)[1 << i] = directions[i][c];
      square = square + d[c] * d[c];
    }
    inverse = expand_inverse_root<D>(square, 1 / std::sqrt(*parts_of<double>(&square)));
    r = square * inverse;
  }

  // Find all other numbers, from f at r.
  CALCOPS_HD void find_splines(const Kind& kind, const Radial<N>& f, double cells) {
    R[0] = f.s * kind.scale[0] - kind.shift[0];
    for (int c = 0; c < 3; ++c)
      R[c + 1] = f.s_over_r * d[c] * kind.scale[c + 1] - kind.shift[c + 1];
    const N position = (R[0] - kind.begin) * kind.cells_per_unit;
    const N inside = clamped<D, double>(position, 0, cells);
    const N beyond = position - inside;
    const double first = cell_of(*parts_of<const double>(&inside), cells);
    cell = int64_t(first);
    basis<kDegree>(inside - first, w, slopes);
    if (*parts_of<const double>(&beyond) == 0) return;
    for (int b = 0; b <= kDegree; ++b) w[b] = w[b] + beyond * slopes[b];
  }
};

// Write to p[b][a] the mixed derivative of R[a] B_b at d along all of D directions, for the
// B-splines b of the cell that d is in. Return the cell.
template <int kDegree, int D>
CALCOPS_HD int64_t derivative(const Kind& kind, const Cutoff& cutoff, int64_t cells,
                              const double* d, const double (*directions)[3], double* p) {
  using P = MovingPair<kDegree, D>;
  P pair(d, directions);
  pair.find_splines(kind, radial<D, double>(pair.r, pair.inverse, cutoff.rcut_smth, cutoff.rcut),
                    double(cells));
  for (int b = 0; b <= kDegree; ++b)
    for (int a = 0; a < 4; ++a) {
      const typename P::N product = pair.w[b] * pair.R[a];
      p[4 * b + a] = parts_of<const double>(&product)[P::kMixed];
    }
  return pair.cell;
}

// Write the gradient for d of the sum of upstream(cell + b, a) p[b][a] over the numbers p above. It
// is the mixed derivative of the gradient that this sum has without directions.
template <int kDegree, int D, class Upstream>
CALCOPS_HD void gradient(const Kind& kind, const Cutoff& cutoff, int64_t cells, const double* d,
                         const double (*directions)[3], const Upstream& upstream, double* of_d) {
  using P = MovingPair<kDegree, D>;
  using N = typename P::N;
  P pair(d, directions);
  // The slopes of these are derivatives for r.
  const Dual<N> r{pair.r, constant<N>(1.0)};
  const Dual<N> inverse{pair.inverse, pair.inverse * pair.inverse * -1.0};
  const auto f = radial<D + 1, double>(r, inverse, cutoff.rcut_smth, cutoff.rcut);
  pair.find_splines(kind, {f.s.value, f.s_over_r.value}, double(cells));

  N of_R[4] = {}, of_position{};
  for (int b = 0; b <= kDegree; ++b)
    for (int a = 0; a < 4; ++a) {
      const double number = upstream(pair.cell + b, a);
      of_R[a] = of_R[a] + pair.w[b] * number;
      of_position = of_position + pair.slopes[b] * pair.R[a] * number;
    }
  of_R[0] = of_R[0] + of_position * kind.cells_per_unit;
  for (int a = 0; a < 4; ++a) of_R[a] = of_R[a] * kind.scale[a];
  N along{};
  for (int c = 0; c < 3; ++c) along = along + of_R[c + 1] * pair.d[c];
  const N of_r = (of_R[0] * f.s.slope + along * f.s_over_r.slope) * pair.inverse;
  for (int c = 0; c < 3; ++c) {
    const N sum = of_r * pair.d[c] + f.s_over_r.value * of_R[c + 1];
    of_d[c] = parts_of<const double>(&sum)[P::kMixed];
  }
}

}  // namespace calcops::ops::environment_spline
