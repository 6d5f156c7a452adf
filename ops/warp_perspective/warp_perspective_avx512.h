// Two loops of the CPU kernels in AVX-512 instructions that compilers do not choose: a reciprocal
// without a division, and gathers of pairs of pixels.
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

// Return the mask of the first `count` of eight or sixteen lanes.
template <class Mask>
Mask first_lanes(int64_t count) {
  constexpr int kLanes = 8 * sizeof(Mask);
  return static_cast<Mask>(count < kLanes ? (1u << count) - 1 : ~0u);
}

inline void store(float* to, __mmask8 kept, __m512d numbers) {
  const __m256 narrow = _mm512_maskz_cvtpd_ps(0xff, numbers);
  _mm512_mask_storeu_ps(to, kept, _mm512_castps256_ps512(narrow));
}

inline void store(double* to, __mmask8 kept, __m512d numbers) {
  _mm512_mask_storeu_pd(to, kept, numbers);
}

// Interpolate `count` pixels. The taps a b of each are at above[offset], c d at below[offset]. The
// same as interpolate(); taps of weight zero are not used.
inline void interpolate_by_gathers(const float* above, const float* below, const int64_t* offset,
                                   const float* weight_x, const float* weight_y, int64_t count,
                                   float* out) {
  const __m512i left = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(1));
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 kept = first_lanes<__mmask16>(count - i);
    const __mmask8 low = static_cast<__mmask8>(kept), high = static_cast<__mmask8>(kept >> 8);
    const __m512i offsets[2] = {_mm512_maskz_loadu_epi64(low, offset + i),
                                _mm512_maskz_loadu_epi64(high, offset + i + 8)};
    const __m512 x = _mm512_maskz_loadu_ps(kept, weight_x + i),
                 y = _mm512_maskz_loadu_ps(kept, weight_y + i);
    const auto pairs = [&](__mmask8 lanes, __m512i offsets, const float* from) {
      return _mm512_castpd_ps(
          _mm512_mask_i64gather_pd(_mm512_setzero_pd(), lanes, offsets, from, sizeof(float)));
    };
    const auto along = [&](__m512 weight, __m512 a, __m512 b) {
      const __mmask16 used = _mm512_cmp_ps_mask(weight, zero, _CMP_GT_OQ);
      return _mm512_fmadd_ps(weight, _mm512_maskz_mov_ps(used, b),
                             _mm512_mul_ps(_mm512_sub_ps(one, weight), a));
    };
    const auto along_x = [&](const float* from) {
      const __m512 first = pairs(low, offsets[0], from), second = pairs(high, offsets[1], from);
      return along(x, _mm512_permutex2var_ps(first, left, second),
                   _mm512_permutex2var_ps(first, right, second));
    };
    _mm512_mask_storeu_ps(out + i, kept, along(y, along_x(above), along_x(below)));
  }
}

}  // namespace calcops::ops::warp_perspective
