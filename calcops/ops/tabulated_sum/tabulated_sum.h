// Sums over neighbours of tabulated functions. The contract is in tabulated_sum.cpp, the
// mathematics in tabulated_sum_math.h.
//
// There are n atoms with K slots for neighbours. Slot s of atom i has a number x, a row R[4] and a
// kind. Each kind has M functions g_m of x. The result is
//
//   T[i][a][m] = sum_s R[i][s][a] g_m(x[i][s])
//
// or the same sum over the derivatives of g_m of a given order. g_m is a piecewise polynomial of
// degree 5. table[kind][cell][k][m] is its coefficient of t^k, where t is the distance of x from
// the cell's beginning. So the coefficients of all functions for one k are contiguous.
//
// A compressed Deep Potential computes its descriptor in this way: x is the smoothed inverse
// distance, R a row of the environment matrix, g the embedding net. Source: Lu et al., J. Chem.
// Theory Comput. 18, 5559 (2022), doi 10.1021/acs.jctc.2c00102. The table's layout is our own.
//
// Slots are summed in their order, in blocks of kPart filled slots on the CPU and of 32 slots on
// CUDA. The blocks' sums are added in float64.
#pragma once

#include <calcops/numbers.h>
#include <calcops/operator.h>

namespace calcops::ops::tabulated_sum {

constexpr int kPart = 16;  // filled slots whose sum the CPU kernel adds at once

template <class Real, class Index>
struct SumInputs {
  View<const Real, 2> x;       // [n, K]
  View<const Real, 3> R;       // [n, K, 4]
  View<const Index, 2> kind;   // [n, K]; -1: empty
  View<const Real, 4> table;   // [kinds, cells, 6, M]
  View<const double, 2> grid;  // [kinds, 5]
  int64_t order;

  CALCOPS_HD int64_t atoms() const { return x.shape[0]; }
  CALCOPS_HD int64_t slots() const { return x.shape[1]; }
  CALCOPS_HD int64_t kinds() const { return table.shape[0]; }
  CALCOPS_HD int64_t cells() const { return table.shape[1]; }
  CALCOPS_HD int64_t functions() const { return table.shape[3]; }
};

// Gradients of a scalar for x and R, if they are wanted.
template <class Real>
struct SumGradients {
  View<Real, 2> x;
  View<Real, 3> R;
};

}  // namespace calcops::ops::tabulated_sum
