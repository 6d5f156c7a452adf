// Projections of the density of neighbours on splines of the distance times spherical harmonics.
// The contract is in density.cpp, the mathematics in density_math.h.
//
// There are n atoms with K slots for neighbours. Slot s of atom i has a vector d to the neighbour
// and a kind. The result is the sum over the slots within the cutoff of their kind
//
//   A[l^2 + l + m][i][f] = sum_s g_f(|d|; kind) Y_lm(d / |d|)
//
// g_f = sum_b table[kind][b][f] B_b, where B_b are the quintic B-splines of the cells into which
// the kind's grid is divided. Y_lm are the real spherical harmonics
//
//   Y_lm = N_lm P_l^|m|(cos theta) (cos m phi for m >= 0, sin |m| phi for m < 0)
//
// without the sign (-1)^m. N_lm makes them orthonormal: the integral of Y_lm^2 over the sphere
// is 1.
//
// If each slot has D directions v_1 ... v_D, A is the sum of the derivatives of g_f Y_lm along all
// of them: d^D/(dt_1 ... dt_D) at d + t_1 v_1 + ... + t_D v_D, taken at t = 0.
//
// All numbers are computed in float64 and summed in the order of the slots.
//
// Source: these sums are the descriptors of the neuroevolution potential, Fan et al., J. Chem.
// Phys. 157, 114801 (2022), doi 10.1063/5.0106617, and the atomic base of the atomic cluster
// expansion, Drautz, Phys. Rev. B 99, 014104 (2019). The tables of splines are our own.
#pragma once

#include <calcops/operator.h>

#include "duals.h"

namespace calcops::ops::density {

constexpr int kMostL = 4;

template <class Real, class Index>
struct DensityInputs {
  View<const Real, 3> d;       // [n, K, 3]
  View<const Index, 2> kind;   // [n, K]; -1: empty
  View<const Real, 3> table;   // [kinds, B, F]; there are B - 5 cells
  View<const double, 2> grid;  // [kinds, 2]: first and last distance
  int64_t harmonics;           // (l_max + 1)^2
  View<const Real, 4> along;   // [n, K, D, 3]; D = 0 without directions

  CALCOPS_HD int64_t atoms() const { return d.shape[0]; }
  CALCOPS_HD int64_t slots() const { return d.shape[1]; }
  CALCOPS_HD int64_t kinds() const { return table.shape[0]; }
  CALCOPS_HD int64_t rows() const { return table.shape[1]; }
  CALCOPS_HD int64_t functions() const { return table.shape[2]; }
  CALCOPS_HD int64_t directions() const { return along.shape[2]; }
};

}  // namespace calcops::ops::density
