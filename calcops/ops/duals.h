// Numbers that carry derivatives along directions, shared by the operators that sum functions of
// vectors.
#pragma once

#include <calcops/numbers.h>

namespace calcops {

// The most directions of a call, where the gradient for d counts as one. Forces, Hessians and
// trainings with forces need derivatives up to this order.
constexpr int kMostDirections = 3;

// A number and its derivative along a direction. A Dual of Duals has two directions: it consists of
// the number, the derivatives along each direction, and the mixed derivative along both.
template <class N>
struct Dual {
  N value, slope;
};

// clang-format off
template <class N>
CALCOPS_HD_INLINED inline Dual<N> operator+(const Dual<N>& a, const Dual<N>& b) {
  return {a.value + b.value, a.slope + b.slope};
}
template <class N>
CALCOPS_HD_INLINED inline Dual<N> operator-(const Dual<N>& a, const Dual<N>& b) {
  return {a.value - b.value, a.slope - b.slope};
}
template <class N>
CALCOPS_HD_INLINED inline Dual<N> operator*(const Dual<N>& a, const Dual<N>& b) {
  return {a.value * b.value, a.value * b.slope + a.slope * b.value};
}
// Here b is a constant: a double or a vector.
template <class N, class B>
CALCOPS_HD_INLINED inline Dual<N> operator+(const Dual<N>& a, const B& b) {
  return {a.value + b, a.slope};
}
template <class N, class B>
CALCOPS_HD_INLINED inline Dual<N> operator-(const Dual<N>& a, const B& b) {
  return {a.value - b, a.slope};
}
template <class N, class B>
CALCOPS_HD_INLINED inline Dual<N> operator*(const Dual<N>& a, const B& b) {
  return {a.value * b, a.slope * b};
}
template <class N>
CALCOPS_HD_INLINED inline Dual<N> operator-(double a, const Dual<N>& b) { return b * -1.0 + a; }
// clang-format on

// MixedOf<Base, D>::type has D directions. In memory it is an array of 2^D Bases, its parts. Part p
// is the mixed derivative along the directions i whose bit i of p is set.
template <class Base, int D>
struct MixedOf {
  using type = Dual<typename MixedOf<Base, D - 1>::type>;
};
template <class Base>
struct MixedOf<Base, 0> {
  using type = Base;
};
template <class Base, int D>
using Mixed = typename MixedOf<Base, D>::type;

template <class Base, class N>
CALCOPS_HD_INLINED inline Base* parts_of(N* number) {
  return reinterpret_cast<Base*>(number);
}

// Return a number without slopes.
template <class N, class Base>
CALCOPS_HD_INLINED inline N constant(const Base& value) {
  N number{};
  *parts_of<Base>(&number) = value;
  return number;
}

// Return x^(-1/2), where `root` is that of the value of x. If the derivatives along up to k
// directions are right, a step of Newton's method gives those along up to 2k + 1.
template <int D, class N, class Base>
CALCOPS_HD_INLINED inline N expand_inverse_root(const N& x, const Base& root) {
  N y = constant<N>(root);
  for (int right = 0; right < D; right = 2 * right + 1) y = y * (1.5 - x * y * y * 0.5);
  return y;
}

// Return x between its bounds. Beyond one, return the bound, whose derivatives are 0. NaN stays.
template <int D, class Base, class N>
CALCOPS_HD_INLINED inline N clamped(const N& x, double lower, double upper) {
  const Base value = *parts_of<const Base>(&x), zero{}, low = zero + lower, high = zero + upper;
  N result = x;
  for (int p = 0; p < 1 << D; ++p) {
    Base& part = parts_of<Base>(&result)[p];
    part = value < low ? (p ? zero : low) : part;
    part = value > high ? (p ? zero : high) : part;
  }
  return result;
}

}  // namespace calcops
