// The derivatives along directions of sums over the slots of atoms, shared by operators whose sums
// are a function A of the vector d [n, K, 3] of each slot.
//
// A(d; v_1 ... v_D) is the D-th derivative of A(d) along the directions v_1 ... v_D, whose order
// has no effect. Two operators give every derivative in d: _<name>_along computes
// A(d; v_1 ... v_D), and _<name>_backward computes grad_d <grad, A(d; v_1 ... v_D)>. They are
// enough because of two facts:
//
// - The derivative of A(d; v_1 ... v_D) along v is A(d; v_1 ... v_D, v).
// - A(d; v_1 ... v_D) is linear in v_i. So the gradient of <grad, A(d; v_1 ... v_D)> for v_i is
//   grad_d <grad, A(d; the other directions)>.
#pragma once

#include <calcops/operator.h>

#include <stdexcept>
#include <string>

#include "duals.h"

namespace calcops {

// Refuse a call with more directions than `most`. A gradient for d counts as a direction.
inline void expect_order(const char* name, int64_t directions, int64_t most) {
  if (directions > most)
    throw std::runtime_error(std::string(name) +
                             ": expected `d` in derivatives up to third order, got a higher one");
}

// The directions [n, K, D, 3] of a call; D = 0 where the call has none.
class Directions {
 public:
  Directions() = default;
  // Under tracing, size(2) is a symbol. It can be compared with a number, but not read.
  explicit Directions(const Value& all) : all_(all) {
    if (!all.is_none())
      while (!all.size(2).equals(count_)) ++count_;
  }

  int count() const { return count_; }
  const Value& all() const { return all_; }

  // Return these directions and another one [n, K, 3].
  Directions with(const Value& direction) const {
    const Value one = Value::call("aten::unsqueeze", direction, 2);
    return {count_ > 0 ? Value::call("aten::cat", Value::list(all_, one), 2) : one, count_ + 1};
  }

  // Return all directions but the i-th.
  Directions without(int i) const {
    if (count_ == 1) return {};
    const Value before = Value::call("aten::narrow", all_, 2, 0, i);
    const Value after = Value::call("aten::narrow", all_, 2, i + 1, count_ - 1 - i);
    return {Value::call("aten::cat", Value::list(before, after), 2), count_ - 1};
  }

 private:
  Directions(const Value& all, int count) : all_(all), count_(count) {}

  Value all_;
  int count_ = 0;
};

inline void add(Value& sum, const Value& term) { sum = sum.is_none() ? term : sum + term; }

// Set the gradients of <grad, A(d; v)> for d and v, where they are wanted. gradient(w) is
// grad_d <grad, A(d; w)>. Without directions, `of_directions` is not used.
template <class Gradient>
void differentiate(const Directions& v, Value& of_d, Value* of_directions,
                   const Gradient& gradient) {
  if (of_d.is_wanted()) of_d = gradient(v);
  if (v.count() == 0 || !of_directions->is_wanted()) return;
  Value all;
  for (int i = 0; i < v.count(); ++i) {
    const Value one = Value::call("aten::unsqueeze", gradient(v.without(i)), 2);
    all = all.is_tensor() ? Value::call("aten::cat", Value::list(all, one), 2) : one;
  }
  *of_directions = all;
}

// Add the derivative of f(d; v) along the tangents of d and of v to `result`. f(w) is f(d; w),
// which is linear in each direction.
template <class Function>
void add_along_tangents(const Directions& v, const Value& of_d, const Value* of_directions,
                        const Function& f, Value& result) {
  if (!of_d.is_none()) add(result, f(v.with(of_d)));
  if (v.count() == 0 || of_directions->is_none()) return;
  for (int i = 0; i < v.count(); ++i)
    add(result, f(v.without(i).with(Value::call("aten::select.int", *of_directions, 2, i))));
}

}  // namespace calcops
