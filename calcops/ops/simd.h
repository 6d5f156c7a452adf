// Vectors of numbers for CPU kernels that compute in float64.
#pragma once

#include <calcops/numbers.h>

#include <cstdint>
#include <utility>

namespace calcops {

// A vector of this size at any address.
template <class Number, int bytes>
struct LooseVector {
  typedef Number type __attribute__((vector_size(bytes), aligned(sizeof(Number))));
};

// The numbers of a vector V of float64 or int64.
template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(double);
template <class V, class Number>
using LooseOf = typename LooseVector<Number, kLanesOf<V> * sizeof(Number)>::type;

// Load a vector of numbers from any address.
template <class V, class Number>
CALCOPS_HD_INLINED inline V load(const Number* from) {
  using Loose = LooseOf<V, Number>;
  return __builtin_convertvector(*reinterpret_cast<const Loose*>(from), V);
}

// Store the first `count` numbers of a vector.
template <class V, class Number>
CALCOPS_HD_INLINED inline void store(const V& v, Number* to, int64_t count) {
  using Loose = LooseOf<V, Number>;
  if (count >= kLanesOf<V>)
    *reinterpret_cast<Loose*>(to) = __builtin_convertvector(v, Loose);
  else
    for (int64_t l = 0; l < count; ++l) to[l] = Number(v[l]);
}

template <class V>
struct BitsOf {
  typedef int64_t type __attribute__((vector_size(sizeof(V))));
};

// Exchange the blocks of kSpan numbers above and below the diagonal in two rows of a matrix.
template <int kSpan, class V, int... lane>
CALCOPS_HD_INLINED inline void exchange(V& a, V& b, std::integer_sequence<int, lane...>) {
  constexpr int kLanes = kLanesOf<V>;
  const V first = a, second = b;
#if __has_builtin(__builtin_shufflevector)  // GCC 12 and clang
  a = __builtin_shufflevector(first, second, (lane & kSpan ? lane - kSpan + kLanes : lane)...);
  b = __builtin_shufflevector(first, second, (lane & kSpan ? lane + kLanes : lane + kSpan)...);
#else
  using Bits = typename BitsOf<V>::type;
  a = __builtin_shuffle(first, second, Bits{(lane & kSpan ? lane - kSpan + kLanes : lane)...});
  b = __builtin_shuffle(first, second, Bits{(lane & kSpan ? lane + kLanes : lane + kSpan)...});
#endif
}

// Transpose a matrix of as many rows as a vector has numbers.
template <int kSpan = 1, class V>
CALCOPS_HD_INLINED inline void transpose(V* rows) {
  constexpr int kLanes = kLanesOf<V>;
  if constexpr (kSpan < kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i)
      if (!(i & kSpan))
        exchange<kSpan>(rows[i], rows[i + kSpan], std::make_integer_sequence<int, kLanes>());
    transpose<2 * kSpan>(rows);
  }
}

CALCOPS_HD_INLINED inline double sum_of(const Row& v) { return (v[0] + v[2]) + (v[1] + v[3]); }

}  // namespace calcops
