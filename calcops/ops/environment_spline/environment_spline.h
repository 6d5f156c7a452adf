// Sums over neighbours of B-splines times rows of the environment matrix. The contract is in
// environment_spline.cpp, the mathematics in environment_spline_math.h.
//
// There are n atoms with K slots for neighbours. Slot s of atom i has a vector d to the neighbour
// and a kind. With r = |d|, it has
//
//   w = 1                               a switch, up to rcut_smth
//   w = (1 - u)^3 (1 + 3u + 6u^2)       from there to rcut, u = (r - rcut_smth)/(rcut - rcut_smth)
//   w = 0                               beyond rcut
//   R = (w/r (1, d/r) - davg[kind]) / dstd[kind]      a row of the environment matrix
//
// B_b are the uniform B-splines of the kind's grid. The result is the sum over the slots s of a
// kind
//
//   P[i][a][kind][b] = sum_s R[i][s][a] B_b(R[i][s][0])
//
// Splines g_m are sums of these B-splines: g_m = sum_b C[kind][b][m] B_b. The sums of g_m over the
// neighbours follow from P:
//
//   sum_s R[i][s][a] g_m(R[i][s][0]) = sum_kind,b P[i][a][kind][b] C[kind][b][m]
//
// So the work for a pair does not depend on the number of functions g_m. Source of R: Zeng et al.,
// J. Chem. Phys. 159, 054801 (2023), II.B.1. Summing over s before b is our own idea.
//
// If each slot has D directions v_1 ... v_D, P is the sum of the derivatives of R[a] B_b(R[0])
// along all of them: d^D/(dt_1 ... dt_D) at d + t_1 v_1 + ... + t_D v_D, taken at t = 0.
//
// All numbers are computed in float64 and summed in the order of the slots.
#pragma once

#include <calcops/numbers.h>
#include <calcops/operator.h>

namespace calcops::ops::environment_spline {

enum class Spline { kQuintic, kCubic };

template <class Real, class Index>
struct SplineInputs {
  View<const Real, 3> d;             // [n, K, 3]
  View<const Index, 2> kind;         // [n, K]; -1: empty
  View<const double, 2> davg, dstd;  // [kinds, 4]
  View<const double, 2> grid;        // [kinds, 2]
  int64_t functions;
  double rcut_smth, rcut;
  Spline spline;
  View<const Real, 4> along;  // [n, K, D, 3]; D = 0 without directions

  CALCOPS_HD int64_t atoms() const { return d.shape[0]; }
  CALCOPS_HD int64_t slots() const { return d.shape[1]; }
  CALCOPS_HD int64_t kinds() const { return davg.shape[0]; }
  CALCOPS_HD int64_t directions() const { return along.shape[2]; }
};

}  // namespace calcops::ops::environment_spline
