// The mathematics of one pair of atoms, shared by the CPU and the CUDA kernels: the weights of
// splines, spherical harmonics, and the gradient of their products.
//
// Each formula is a template over the type of its numbers: double, a vector of doubles (several
// pairs), or a Dual of these, which gives the formula's derivatives.
#pragma once

#ifdef __NVCC__
#pragma nv_diag_suppress 1675  // "#pragma GCC unroll": nvcc unrolls these loops by itself
#endif

#include <cmath>
#include <cstdint>

#include "b_splines.h"
#include "duals.h"

namespace calcops::ops::density {

// ---- splines ------------------------------------------------------------------------------------

// Write the weights of the six coefficients of a cell: those for the value of a spline and, unless
// `slopes` is nullptr, those for its derivative for r. `position` is measured in cells, from the
// beginning of the grid. Below it, the splines continue as straight lines.
template <int D, class Base, class N>
CALCOPS_HD_INLINED inline void find_weights(const N& position, const Base& cell,
                                            const Base& cells_per_unit, bool begins_at_zero,
                                            N* weights, N* slopes) {
  N in_cell = position - cell;
  if (begins_at_zero) {
    basis<5>(in_cell, weights, slopes);
  } else {
    const N inside = clamped<D, Base>(in_cell, 0, INFINITY);
    N slopes_inside[6], *at = slopes ? slopes : slopes_inside;
    basis<5>(inside, weights, at);
    for (int k = 0; k < 6; ++k) weights[k] = weights[k] + (in_cell - inside) * at[k];
  }
  if (slopes)
    for (int k = 0; k < 6; ++k) slopes[k] = slopes[k] * cells_per_unit;
}

// ---- spherical harmonics ------------------------------------------------------------------------
//
// On the unit sphere, Y_lm = N_lm Q_l|m|(z) c_m for m >= 0, and Y_lm = N_lm Q_l|m|(z) s_|m| for
// m < 0, where c_m + i s_m = (x + i y)^m. Q_lm is the m-th derivative of Legendre's polynomial P_l,
// divided by 1 * 3 * ... (2m - 1), so that Q_mm = 1 and dQ_lm/dz = (2m + 1) Q_l,m+1. The kernels
// compute without N_lm, and multiply sums and upstream gradients by it.

// Return N_lm of harmonic q = l^2 + l + m.
CALCOPS_HD inline double norm(int q) {
  int l = 0;
  while ((l + 1) * (l + 1) <= q) ++l;
  const int m = q > l * l + l ? q - l * l - l : l * l + l - q;
  double square = (2 * l + 1) / (4 * M_PI) * (m > 0 ? 2 : 1);
  for (int k = l - m + 1; k <= l + m; ++k) square /= k;  // (l - m)! / (l + m)!
  for (int k = 1; k < 2 * m; k += 2) square *= k * k;
  return std::sqrt(square);
}

// The harmonics from l = 1 on, at the unit vector (x, y, z). That of l = 0 is a constant.
template <int L, class N>
struct Harmonics {
  N Q[L + 1][L + 1], c[L + 1], s[L + 1];  // Q_lm for m < l; c and s from m = 1 on

  CALCOPS_HD_INLINED Harmonics(const N& x, const N& y, const N& z) {
    if constexpr (L >= 1) {
      c[1] = x;
      s[1] = y;
      Q[1][0] = z;
    }
    for (int m = 2; m <= L; ++m) {
      c[m] = x * c[m - 1] - y * s[m - 1];
      s[m] = x * s[m - 1] + y * c[m - 1];
    }
    const N z2 = z * z;
    if constexpr (L >= 2) {
      Q[2][0] = z2 * 1.5 - 0.5;
      Q[2][1] = z * 3.0;
    }
    if constexpr (L >= 3) {
      Q[3][0] = z * (z2 * 2.5 - 1.5);
      Q[3][1] = z2 * 7.5 - 1.5;
      Q[3][2] = z * 5.0;
    }
    if constexpr (L >= 4) {
      Q[4][0] = z2 * (z2 * 4.375 - 3.75) + 0.375;
      Q[4][1] = z * (z2 * 17.5 - 7.5);
      Q[4][2] = z2 * 17.5 - 2.5;
      Q[4][3] = z * 7.0;
    }
    static_assert(L <= 4, "a higher l needs its polynomials here");
  }

  // Write Y_q / N_q to Y[q - 1].
  CALCOPS_HD_INLINED void values(N* Y) const {
#pragma GCC unroll 4
    for (int l = 1; l <= L; ++l) {
      N* zero = Y + l * l + l - 1;
      *zero = Q[l][0];
#pragma GCC unroll 4
      for (int m = 1; m <= l; ++m) {
        zero[m] = m < l ? Q[l][m] * c[m] : c[m];
        zero[-m] = m < l ? Q[l][m] * s[m] : s[m];
      }
    }
  }

  // Add to `sum` the sum of h[q - 1] Y_q / N_q.
  CALCOPS_HD_INLINED void add_dot(const N* h, N& sum) const {
#pragma GCC unroll 5
    for (int m = 0; m <= L; ++m) {
      const Pair p = over_l(h, m);
      sum = m > 0 ? sum + p.of_c * c[m] + p.of_s * s[m] : sum + p.of_c;
    }
  }

  // Write the gradient of the same sum for (x, y, z), taken as independent.
  CALCOPS_HD_INLINED void gradient(const N* h, N* w) const {
    w[2] = slope_over_l(h, 0).of_c;
    if constexpr (L >= 1) {
      const Pair p = over_l(h, 1);
      w[0] = p.of_c;
      w[1] = p.of_s;
    }
#pragma GCC unroll 4
    for (int m = 1; m <= L; ++m) {
      if (m < L) {
        const Pair p = slope_over_l(h, m);
        w[2] = w[2] + (p.of_c * c[m] + p.of_s * s[m]) * double(2 * m + 1);
      }
      if (m > 1) {
        const Pair p = over_l(h, m);
        w[0] = w[0] + (p.of_c * c[m - 1] + p.of_s * s[m - 1]) * double(m);
        w[1] = w[1] + (p.of_s * c[m - 1] - p.of_c * s[m - 1]) * double(m);
      }
    }
  }

 private:
  struct Pair {
    N of_c, of_s;
  };

  // Return the factors of c_m and s_m in the sum.
  CALCOPS_HD_INLINED Pair over_l(const N* h, int m) const {
    Pair p{};
    if (m > 0) p = {h[m * m + 2 * m - 1], h[m * m - 1]};
#pragma GCC unroll 4
    for (int l = m > 0 ? m + 1 : 1; l <= L; ++l) {
      p.of_c = p.of_c + Q[l][m] * h[l * l + l + m - 1];
      if (m > 0) p.of_s = p.of_s + Q[l][m] * h[l * l + l - m - 1];
    }
    return p;
  }

  // Return the derivatives of these factors for z, divided by 2m + 1.
  CALCOPS_HD_INLINED Pair slope_over_l(const N* h, int m) const {
    Pair p{};
    if (m < L) p = {h[(m + 1) * (m + 2) + m - 1], h[(m + 1) * (m + 2) - m - 1]};
#pragma GCC unroll 4
    for (int l = m + 2; l <= L; ++l) {
      p.of_c = p.of_c + Q[l][m + 1] * h[l * l + l + m - 1];
      if (m > 0) p.of_s = p.of_s + Q[l][m + 1] * h[l * l + l - m - 1];
    }
    return p;
  }
};

// Write the gradient of sum_qf B[q][f] g_f Y_q / N_q for d, from sums over the functions f:
// h[q - 1] = sum_f B[q][f] g_f and slope[q - 1] = sum_f B[q][f] g_f' for l > 0, and the same slope
// of_r for l = 0.
template <int L, class N>
CALCOPS_HD_INLINED inline void find_gradient(const N* unit, const N& inverse, const N* h,
                                             const N* slope, N of_r, N* of_d) {
  if constexpr (L == 0) {
    for (int c = 0; c < 3; ++c) of_d[c] = of_r * unit[c];
  } else {
    const Harmonics<L, N> Y(unit[0], unit[1], unit[2]);
    Y.add_dot(slope, of_r);
    N w[3];
    Y.gradient(h, w);
    // Moving d along the unit vector changes r; across it, the harmonics.
    const N along = of_r - (w[0] * unit[0] + w[1] * unit[1] + w[2] * unit[2]) * inverse;
    for (int c = 0; c < 3; ++c) of_d[c] = w[c] * inverse + along * unit[c];
  }
}

}  // namespace calcops::ops::density
