// Uniform B-splines, shared by the operators that tabulate functions.
#pragma once

#include <calcops/numbers.h>

namespace calcops {

// Write to w[0..kDegree] the B-splines that are not 0 in a cell, times kDegree!, at the position t
// from 0 to 1 in the cell. By de Boor's recursion each is a weighted sum of two of the degree
// below.
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

// Write to w the B-splines of a cell at t and, unless `slopes` is nullptr, their derivatives.
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

}  // namespace calcops
