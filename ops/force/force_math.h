// The mathematics of one pair, shared by the CPU and the CUDA kernels (formulas: force.h). The sign
// (x) is the outer product.
//
// With R4 = (Rij, 1), the product g (x) R4 has the pair's virial in its first three columns and its
// force in the last. So one accumulator holds both.
//
// The backward has the upstream gradients gF, gV and gAV of force, virial and atom_virial. U holds
// those of the neighbour j as four rows of three: U[b][a] = gV[a][b] + gAV_j[a][b] for b < 3, and
// U[3] = gF_j. e is the gradient for g, and a prime marks the gradient for an input:
//
//   g = dE Ri_d                  e = R4 U - gF_i
//   dE' = Ri_d e                 Ri_d' = dE (x) e                 Rij' = (U g)[0..2]
//
// The CPU has all rows of a matrix at once. A CUDA lane has one row (kRows = 1). Its g and e are
// one of the four terms of the pair's g and e.
#pragma once

#include <calcops/numbers.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace calcops::ops::force {

#ifdef __CUDACC__
using Triple = Numbers<3>;
template <class Real>
CALCOPS_HD_INLINED inline Triple matrix_row(const Real* m, int c) {
  return {double(m[3 * c]), double(m[3 * c + 1]), double(m[3 * c + 2])};
}
template <int kCount, class Real>
CALCOPS_HD_INLINED inline void store(double number, Real* out) {
  static_assert(kCount == 1, "each of four lanes has one number");
  *out = Real(number);
}
#else
// A register holds four numbers. The fourth of a Triple has no meaning.
using Triple = Row;

typedef float Floats __attribute__((vector_size(16)));

CALCOPS_HD_INLINED inline Row load_row(const double* x) {
  Row row;
  std::memcpy(&row, x, sizeof(row));
  return row;
}
CALCOPS_HD_INLINED inline Row load_row(const float* x) {
// GCC 12 makes two to four instructions of the plain code, instead of this one. immintrin.h, which
// has a function for it, is slow to compile.
#if defined(__AVX__) && !defined(__clang__)
  Floats row;
  std::memcpy(&row, x, sizeof(row));
  return __builtin_ia32_cvtps2pd256(row);
#else
  return Row{x[0], x[1], x[2], x[3]};
#endif
}

template <int kA, int kB, int kC, int kD>
CALCOPS_HD_INLINED inline Row shuffle(const Row& x, const Row& y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, kA, kB, kC, kD);
#else  // GCC below 12
  typedef long long Lanes __attribute__((vector_size(32)));
  return __builtin_shuffle(x, y, Lanes{kA, kB, kC, kD});
#endif
}

// Return row c of a 4 x 3 matrix. The last row is loaded from one number before it, so that nothing
// is read beyond the matrix.
template <class Real>
CALCOPS_HD_INLINED inline Triple matrix_row(const Real* m, int c) {
  if (c < 3) return load_row(m + 3 * c);
  const Row last = load_row(m + 8);
  return shuffle<1, 2, 3, 0>(last, last);
}

template <int kCount, class Real>
CALCOPS_HD_INLINED inline void store(const Row& row, Real* out) {
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (std::is_same_v<Real, float>) {
    const Floats numbers = __builtin_ia32_cvtpd2ps256(row);
    std::memcpy(out, &numbers, kCount * sizeof(Real));
    return;
  }
#endif
  const Real numbers[4] = {Real(row[0]), Real(row[1]), Real(row[2]), Real(row[3])};
  std::memcpy(out, numbers, kCount * sizeof(Real));
}
#endif

// Return x m: g from dE and Ri_d, or e (without gF_i) from R4 and U.
template <int kRows, class X, class Real>
CALCOPS_HD_INLINED inline Triple row_times_matrix(const X& x, const Real* m) {
  Triple v = double(x[0]) * matrix_row(m, 0);
  for (int c = 1; c < kRows; ++c) v = v + double(x[c]) * matrix_row(m, c);
  return v;
}

// Write m v: dE' from Ri_d and e, or Rij' from U and g (kRows = 3).
template <int kRows, class M, class Real>
CALCOPS_HD_INLINED inline void matrix_times_column(const M* m, const Triple& v, Real* out) {
#ifdef __CUDACC__
  store<kRows>(v[0] * double(m[0]) + v[1] * double(m[1]) + v[2] * double(m[2]), out);
#else
  const Row x = load_row(m) * shuffle<0, 1, 2, 0>(v, v);
  const Row y = load_row(m + 4) * shuffle<1, 2, 0, 1>(v, v);
  const Row z = load_row(m + 8) * shuffle<2, 0, 1, 2>(v, v);
  // x, y and z hold the twelve products row by row. These shuffles add each row's three.
  const Row xy = shuffle<0, 1, 6, 7>(x, y), yz = shuffle<0, 1, 6, 7>(y, z);
  store<kRows>(
      shuffle<0, 4, 2, 6>(xy, yz) + shuffle<1, 5, 3, 7>(xy, yz) + shuffle<2, 3, 4, 5>(x, z), out);
#endif
}

// Write x (x) v: Ri_d' from dE and e.
template <int kRows, class X, class Real>
CALCOPS_HD_INLINED inline void outer_product(const X* x, const Triple& v, Real* out) {
#ifdef __CUDACC__
  for (int a = 0; a < 3; ++a) out[a] = Real(double(x[0]) * v[a]);
#else
  const Row y = load_row(x);
  store<4>(shuffle<0, 0, 0, 1>(y, y) * shuffle<0, 1, 2, 0>(v, v), out);
  store<4>(shuffle<1, 1, 2, 2>(y, y) * shuffle<1, 2, 0, 1>(v, v), out + 4);
  store<4>(shuffle<2, 3, 3, 3>(y, y) * shuffle<2, 0, 1, 2>(v, v), out + 8);
#endif
}

// Add g (x) R4 to the three rows of `sum`. Without the virial, R4 is the number 1.
template <class R4>
CALCOPS_HD_INLINED inline void add_pair(const Triple& g, const R4& r4, R4* sum) {
  for (int a = 0; a < 3; ++a) sum[a] = sum[a] + g[a] * r4;
}

}  // namespace calcops::ops::force
