// Arrays of float32 or float64 for CPU kernels that compute in float64. Their type is known at run
// time, so that a kernel is compiled once and not for each type.
#pragma once

#include <calcops/numbers.h>

#include <algorithm>
#include <cstdint>

namespace calcops {

// A vector of as many Numbers as V has, at any address.
template <class V, class Number>
struct LooseOf {
  static constexpr int kCount = sizeof(V) / sizeof(double);
  typedef Number type
      __attribute__((vector_size(kCount * sizeof(Number)), aligned(sizeof(Number))));
};

// Load a vector of numbers from any address.
template <class V, class Number>
CALCOPS_HD_INLINED inline V load(const Number* from) {
  using Loose = typename LooseOf<V, Number>::type;
  return __builtin_convertvector(*reinterpret_cast<const Loose*>(from), V);
}

// Store the first `count` numbers of a vector.
template <class V, class Number>
CALCOPS_HD_INLINED inline void store(const V& v, Number* to, int64_t count) {
  using Loose = typename LooseOf<V, Number>::type;
  constexpr int kCount = LooseOf<V, Number>::kCount;
  if (count >= kCount)
    *reinterpret_cast<Loose*>(to) = __builtin_convertvector(v, Loose);
  else
    for (int64_t l = 0; l < count; ++l) to[l] = Number(v[l]);
}

// An array that a kernel reads.
class RealInput {
 public:
  RealInput(const void* numbers, bool is_float32) : numbers_(numbers), is_float32_(is_float32) {}
  RealInput(const float* numbers) : RealInput(numbers, true) {}
  RealInput(const double* numbers) : RealInput(numbers, false) {}

  // Return f of the pointer to number i. In it, a loop is compiled for both types.
  template <class F>
  CALCOPS_HD_INLINED inline auto visit(int64_t i, const F& f) const {
    if (is_float32_) return f(static_cast<const float*>(numbers_) + i);
    return f(static_cast<const double*>(numbers_) + i);
  }
  double operator[](int64_t i) const {
    return visit(i, [](const auto* number) { return double(*number); });
  }

 private:
  const void* numbers_;
  bool is_float32_;
};

// An array that a kernel writes.
class RealOutput {
 public:
  RealOutput(float* numbers) : numbers_(numbers), is_float32_(true) {}
  RealOutput(double* numbers) : numbers_(numbers), is_float32_(false) {}

  // Call f with the pointer to number i.
  template <class F>
  CALCOPS_HD_INLINED inline void visit(int64_t i, const F& f) const {
    if (is_float32_)
      f(static_cast<float*>(numbers_) + i);
    else
      f(static_cast<double*>(numbers_) + i);
  }
  void set_zero(int64_t begin, int64_t count) const {
    visit(begin, [&](auto* numbers) { std::fill_n(numbers, count, 0); });
  }

 private:
  void* numbers_;
  bool is_float32_;
};

}  // namespace calcops
