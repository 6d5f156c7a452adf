// The cell of a number in a table and the weights of the cell's coefficients, shared by the CPU and
// the CUDA kernels.
#pragma once

#include <calcops/numbers.h>

#include <cmath>
#include <cstdint>

namespace calcops::ops::tabulated_sum {

constexpr int kPowers = 6;  // of a polynomial of degree 5
constexpr double kFarthest = 1e30;

// Write w[k] = (d/dt)^order t^k.
CALCOPS_HD inline void differentiated_powers(double t, int64_t order, double* w) {
  double power = 1;
  for (int k = 0; k < kPowers; ++k) {
    w[k] = 0;
    if (k < order) continue;
    double factor = 1;
    for (int i = 0; i < order; ++i) factor *= k - i;
    w[k] = factor * power;
    power *= t;
  }
}

// A part of a grid: cells of one width.
struct GridPart {
  double begin, end, width;

  CALCOPS_HD double cells() const { return std::floor((end - begin) / width + 0.5); }
};

// Return the cell that x is in. Write to w the weights of its coefficients c: the derivative of g
// of `order` at x is sum_k w[k] c[k]. Unless `next` is nullptr, write to it those of the next
// order.
//
// grid has the first part's beginning, cell width and end, and the second part's cell width and
// end. Outside the grid, g continues as a straight line. NaN gives weights that are NaN. An
// infinite x counts as kFarthest: with infinite weights, terms of different signs would add up to
// NaN.
CALCOPS_HD inline int64_t weights(const double* grid, int64_t cells, double x, int64_t order,
                                  double* w, double* next) {
  x = x == INFINITY ? kFarthest : x == -INFINITY ? -kFarthest : x;
  const GridPart fine{grid[0], grid[2], grid[1]};
  const GridPart coarse{grid[2], grid[4], grid[3]};
  // The position in the grid that is nearest to x. NaN stays.
  const double inside = x < fine.begin ? fine.begin : x > coarse.end ? coarse.end : x;
  const bool is_coarse = inside >= coarse.begin && coarse.begin < coarse.end;
  const GridPart& part = is_coarse ? coarse : fine;
  const double last = part.cells() - 1;
  double cell = std::floor((inside - part.begin) / part.width);
  cell = cell > last ? last : cell;
  const double t = inside - (part.begin + cell * part.width);
  const double row = is_coarse ? fine.cells() + cell : cell;

  differentiated_powers(t, order, w);
  if (next) differentiated_powers(t, order + 1, next);
  if (!(inside == x)) {  // outside, or NaN
    double slope[kPowers];
    differentiated_powers(t, 1, slope);
    for (int k = 0; k < kPowers; ++k) {
      // The second derivative of a straight line is 0, or NaN if x is NaN.
      w[k] = order == 0 ? w[k] + (x - inside) * slope[k] : order == 1 ? w[k] : 0 * x;
      if (next) next[k] = order == 0 ? next[k] : 0 * x;
    }
  }
  // Even if the grid is wrong, the cell is one of the table's.
  return row > 0 ? (row < double(cells) ? int64_t(row) : cells - 1) : 0;
}

}  // namespace calcops::ops::tabulated_sum
