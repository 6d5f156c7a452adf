// Arrays of one of two types, for the CPU kernels. What is not a hot loop is compiled once for
// both.
#pragma once

#include <calcops/numbers.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace calcops {

// Numbers of type Narrow or Wide.
template <class Narrow, class Wide>
class Either {
 public:
  Either(Narrow* numbers) : narrow_(numbers) {}
  Either(Wide* numbers) : wide_(numbers) {}

  // Call f(pointer to number i), which is compiled for each type.
  template <class F>
  CALCOPS_HD_INLINED inline void visit(int64_t i, const F& f) const {
    wide_ ? f(wide_ + i) : f(narrow_ + i);
  }

  Wide operator[](int64_t i) const { return wide_ ? wide_[i] : Wide(narrow_[i]); }

  // Return `count` numbers from position `begin` on. Those of type Narrow are copied to `buffer`.
  const Wide* read(int64_t begin, int64_t count, std::remove_const_t<Wide>* buffer) const {
    if (wide_) return wide_ + begin;
    for (int64_t k = 0; k < count; ++k) buffer[k] = narrow_[begin + k];
    return buffer;
  }

  // Write `count` numbers from position `begin` on, rounded to the type of the array.
  void write(int64_t begin, const Wide* from, int64_t count) const {
    visit(begin, [&](auto* numbers) {
      for (int64_t k = 0; k < count; ++k) numbers[k] = from[k];
    });
  }

  // Write zero to `count` numbers from position `begin` on.
  void set_zero(int64_t begin, int64_t count) const {
    visit(begin, [&](auto* numbers) { std::fill_n(numbers, count, 0); });
  }

  // Return the pointer of the type of the argument.
  Narrow* as(Narrow*) const { return narrow_; }
  Wide* as(Wide*) const { return wide_; }

 private:
  Narrow* narrow_ = nullptr;
  Wide* wide_ = nullptr;
};

using Reals = Either<const float, const double>;
using RealResults = Either<float, double>;
using Indices = Either<const int32_t, const int64_t>;

}  // namespace calcops
