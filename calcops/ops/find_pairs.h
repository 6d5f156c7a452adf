// The search of pairs.h, and the inverse root of their distances. Few units include this header,
// because immintrin.h is slow to compile.
#pragma once

#include <calcops/parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "pairs.h"
#include "simd.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace calcops {

// Return x^(-1/2) with a relative error of 1e-15, by Newton's method. Without an instruction for an
// estimate, it begins with one that is computed from the bits of x as an integer. GCC does not
// vectorise std::sqrt, which sets errno.
template <class V>
CALCOPS_HD_INLINED inline V inverse_root(const V& x) {
  V y;
  int steps = 4;
#ifdef __AVX512F__
  if constexpr (sizeof(V) == sizeof(__m512d)) {
    y = _mm512_maskz_rsqrt14_pd(255, x);
    steps = 2;
  } else
#endif
  {
    using Bits = typename BitsOf<V>::type;
    const Bits estimate = 0x5FE6EB50C7B537A9 - (reinterpret_cast<Bits>(x) >> 1);
    y = reinterpret_cast<V>(estimate);
  }
  const V half = 0.5 * x;
  for (int step = 0; step < steps; ++step) y *= 1.5 - half * y * y;
  constexpr double kLeast = 1e-280;  // below it two atoms count as in one place
  return x < V{} + kLeast ? V{} + INFINITY : y;
}

#ifdef __AVX512F__
typedef double EightNumbers __attribute__((vector_size(64)));
typedef int64_t EightIntegers __attribute__((vector_size(64)));

// Load eight triples (x, y, z) as vectors of x, of y and of z.
template <class Real>
CALCOPS_HD_INLINED inline void load_triples(const Real* from, EightNumbers* v) {
  const auto a = load<EightNumbers>(from), b = load<EightNumbers>(from + 8);
  const auto c = load<EightNumbers>(from + 16);
  const EightIntegers of_ab[3] = {
      {0, 3, 6, 9, 12, 15, 0, 0}, {1, 4, 7, 10, 13, 0, 0, 0}, {2, 5, 8, 11, 14, 0, 0, 0}};
  const EightIntegers with_c[3] = {
      {0, 1, 2, 3, 4, 5, 10, 13}, {0, 1, 2, 3, 4, 8, 11, 14}, {0, 1, 2, 3, 4, 9, 12, 15}};
  for (int k = 0; k < 3; ++k) {
    v[k] = _mm512_permutex2var_pd(a, (__m512i)of_ab[k], b);
    v[k] = _mm512_permutex2var_pd(v[k], (__m512i)with_c[k], c);
  }
}
#endif

template <class Real, class Index>
void PairFinder::find(const PairFinder& all, int64_t atom, Pairs& pairs, int64_t& wrong) {
  const int64_t slots = all.slots_, begin = atom * slots;
  const Index* kind = static_cast<const Index*>(all.kind_) + begin;
  // An Index, not an int64_t: a vector register compares more of the narrower numbers.
  const Index kinds = Index(std::min<int64_t>(all.kinds_, std::numeric_limits<Index>::max()));
  int any_wrong = 0;
  for (int64_t s = 0; s < slots; ++s) any_wrong |= (kind[s] < -1) | (kind[s] >= kinds);
  pairs.count = 0;
  if (any_wrong) {
    for (int64_t s = 0; wrong == kNone; ++s)
      if (kind[s] < -1 || kind[s] >= kinds) wrong = begin + s;
    return;
  }
  double *x = pairs.x(0), *y = pairs.x(1), *z = pairs.x(2), *square = pairs.square();
  int64_t *slot = pairs.slot(), *kind_of = pairs.kind();
  const double* limits = all.square_of_cutoff();
  const Real* d = static_cast<const Real*>(all.d_) + 3 * begin;
  // Without branches, which the processor could not predict. Every slot is written to the next
  // pair, but only a filled one within the cutoff advances `count`. NaN is within.
  int64_t count = 0, s = 0;
#ifdef __AVX512F__
  for (; s + 8 <= slots; s += 8, d += 24) {
    EightNumbers v[3];
    load_triples(d, v);
    const EightNumbers r2 = v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
    const auto kinds_of = load<EightIntegers>(kind + s);
    EightNumbers limit = EightNumbers{} + limits[0];
    if (!all.have_one_cutoff)
      limit = _mm512_mask_i64gather_pd(limit, 255, (__m512i)kinds_of, limits, 8);
    const __mmask8 is_near =
        _mm512_cmp_pd_mask(r2, limit, _CMP_NGE_UQ) & ~_mm512_movepi64_mask((__m512i)kinds_of);
    for (int c = 0; c < 3; ++c)
      store<EightNumbers>(_mm512_maskz_compress_pd(is_near, v[c]), pairs.x(c) + count, 8);
    store<EightNumbers>(_mm512_maskz_compress_pd(is_near, r2), square + count, 8);
    const EightIntegers slots_of = EightIntegers{0, 1, 2, 3, 4, 5, 6, 7} + (begin + s);
    store((EightIntegers)_mm512_maskz_compress_epi64(is_near, (__m512i)slots_of), slot + count, 8);
    store((EightIntegers)_mm512_maskz_compress_epi64(is_near, (__m512i)kinds_of), kind_of + count,
          8);
    count += __builtin_popcount(is_near);
  }
#endif
  for (; s < slots; ++s, d += 3) {
    const double r2 = double(d[0]) * d[0] + double(d[1]) * d[1] + double(d[2]) * d[2];
    x[count] = d[0], y[count] = d[1], z[count] = d[2];
    square[count] = r2;
    slot[count] = begin + s;
    kind_of[count] = kind[s];
    count += (kind[s] >= 0) & !(r2 >= limits[kind[s]]);
  }
  pairs.count = count;
  for (int64_t j = count; count > 0 && j < pairs.padded_count(); ++j) {
    x[j] = x[0], y[j] = y[0], z[j] = z[0];
    square[j] = square[0];
    slot[j] = slot[0];
    kind_of[j] = kind_of[0];
  }
}

}  // namespace calcops
