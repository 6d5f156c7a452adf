// AVX-512 instructions that compilers do not choose: a reciprocal without a division, and masks.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "warp_perspective/warp_perspective_math.h"

namespace calcops::ops::warp_perspective {

// The same as project(), for eight pixels (u, v), (u + 1, v), ...
//
// The reciprocal starts with 14 correct bits, and each step of Newton's method doubles them. The
// correction of the quotients makes up for its last bit, as in divide().
class Projection8 {
 public:
  Projection8(const double* m, const RowStart& row, double u)
      : m_{all(m[0]), all(m[3]), all(m[6])},
        row_{all(row.x), all(row.y), all(row.w)},
        u_(_mm512_add_pd(all(u), _mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7))) {}

  // Write (x, y) and 1 / W of the current eight pixels, and advance to the next eight.
  void next(__m512d& x, __m512d& y, __m512d& reciprocal) {
    const __m512d w = _mm512_fmadd_pd(m_[2], u_, row_[2]);
    reciprocal = _mm512_maskz_rcp14_pd(0xff, w);
    for (int step = 0; step < 2; ++step)
      reciprocal = _mm512_fmadd_pd(_mm512_fnmadd_pd(w, reciprocal, all(1)), reciprocal, reciprocal);
    const auto over_w = [&](__m512d a) {
      const __m512d quotient = _mm512_mul_pd(a, reciprocal);
      return _mm512_fmadd_pd(_mm512_fnmadd_pd(quotient, w, a), reciprocal, quotient);
    };
    x = over_w(_mm512_fmadd_pd(m_[0], u_, row_[0]));
    y = over_w(_mm512_fmadd_pd(m_[1], u_, row_[1]));
    u_ = _mm512_add_pd(u_, all(8));
  }

 private:
  static __m512d all(double x) { return _mm512_set1_pd(x); }

  __m512d m_[3], row_[3], u_;
};

// Return the mask of the first `count` of eight lanes.
inline __mmask8 first_lanes(int64_t count) {
  return static_cast<__mmask8>(count < 8 ? (1u << count) - 1 : ~0u);
}

inline void store(float* to, __mmask8 kept, __m512d numbers) {
  const __m256 narrow = _mm512_maskz_cvtpd_ps(0xff, numbers);
  _mm512_mask_storeu_ps(to, kept, _mm512_castps256_ps512(narrow));
}

inline void store(double* to, __mmask8 kept, __m512d numbers) {
  _mm512_mask_storeu_pd(to, kept, numbers);
}

}  // namespace calcops::ops::warp_perspective
