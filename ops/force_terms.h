// The derivatives of force and edge_force, as calls of operators. Their inputs are dE, Ri_d and the
// vectors Rij, or edge_gradient and the vectors edge_vec. Gradients of these operators are those of
// the number
//
//   L = grad_force . force + grad_virial . virial + grad_atom_virial . atom_virial
//
// where the dots are inner products. L has three terms. The factors of a term are its upstream
// gradient and the inputs, and the term is linear in each of them. Only the virials contain the
// vectors. _<name>_virial returns the gradients of L for the upstream gradients: its results.
// _<name>_virial_backward returns those for the inputs.
//
// The derivative of L along a direction of a factor is L without the terms that lack the factor,
// and with the direction in the factor's place. So these two operators have derivatives to any
// order.
#pragma once

#include <calcops/operator.h>

namespace calcops {

// A set of factors, a bit each: first the three upstream gradients, then the inputs.
using FactorSet = uint32_t;
constexpr int kUpstreams = 3;
constexpr FactorSet kAllUpstreams = 7, kVirials = 6;

// Where an operator has its arguments, or -1 for those that it lacks. Its results are the gradients
// of L for `results` factors, of which `first_result` is the first.
template <int factors, int others>
struct Places {
  int factor[factors];
  int other[others];  // the arguments that are no factors
  int mask;
  int results;
  int first_result;
};

// Add the derivatives of L along `direction` to `sums`, for the factors `wanted`. Operators has
// results(inputs, has_virial) and gradients(factors, inputs), where `inputs` selects some of them.
template <class Operators, int factors>
void add_derivatives(const Operators& operators, const Value (&point)[factors],
                     const Value (&direction)[factors], FactorSet wanted, Value (&sums)[factors]) {
  constexpr FactorSet inputs = (1u << factors) - 1 - kAllUpstreams;
  constexpr FactorSet vectors = 1u << (factors - 1);
  constexpr FactorSet terms[] = {1 | (inputs & ~vectors), 2 | inputs, 4 | inputs};
  const auto add = [&](int factor, const Value& term) {
    sums[factor] = sums[factor].is_none() ? term : sums[factor] + term;
  };
  // The upstream gradients share the calls, because no term has two of them.
  for (int begin = 0, end = kUpstreams; begin < factors; begin = end++) {
    Value moved[factors];
    FactorSet given = 0, along = 0;
    for (int f = 0; f < factors; ++f) {
      if (f >= begin && f < end) along |= 1u << f;
      moved[f] = along >> f & 1 ? direction[f] : point[f];
      if (moved[f].is_none())
        moved[f] = nullptr;
      else
        given |= 1u << f;
    }
    if (!(given & along)) continue;

    FactorSet results = 0, gradients = 0, needed = 0;
    for (const FactorSet term : terms) {
      const FactorSet absent = term & ~given, of_term = term & wanted & ~along;
      // A term without an input is zero. One without its upstream gradient still has a derivative
      // for it.
      if (!(term & along) || (absent & inputs)) continue;
      results |= of_term & kAllUpstreams;
      if (absent || !(of_term & inputs)) continue;
      gradients |= of_term & inputs;
      needed |= term;
    }
    if (results) {
      const Value all = operators.results(moved + kUpstreams, (results & kVirials) != 0);
      for (int f = 0; f < kUpstreams; ++f)
        if (results >> f & 1) add(f, all[f]);
    }
    if (gradients) {
      for (int f = 0; f < factors; ++f)
        if (!(needed >> f & 1)) moved[f] = nullptr;
      const Value all = operators.gradients(moved, gradients >> kUpstreams);
      for (int f = kUpstreams; f < factors; ++f)
        if (gradients >> f & 1) add(f, all[f - kUpstreams]);
    }
  }
}

template <int factors, int others>
bool is_computed(const Places<factors, others>& op, const Value* arguments, int result) {
  return op.mask < 0 || arguments[op.mask][result].item();
}

template <class Operators, const auto& op, int factors>
void vjp_of(const Value* arguments, const Value* upstream, Value* gradients) {
  Value point[factors], direction[factors], sums[factors];
  FactorSet wanted = 0;
  for (int f = 0; f < factors; ++f) {
    if (op.factor[f] < 0) continue;
    point[f] = arguments[op.factor[f]];
    if (gradients[op.factor[f]].is_wanted()) wanted |= 1u << f;
  }
  for (int i = 0; i < op.results; ++i)
    if (is_computed(op, arguments, i)) direction[op.first_result + i] = upstream[i];
  add_derivatives(Operators(arguments, op.other), point, direction, wanted, sums);
  for (int f = 0; f < factors; ++f)
    if (wanted >> f & 1) gradients[op.factor[f]] = sums[f];
}

template <class Operators, const auto& op, int factors>
void jvp_of(const Value* arguments, const Value* tangents, Value* results) {
  Value point[factors], direction[factors], sums[factors];
  FactorSet wanted = 0;
  for (int f = 0; f < factors; ++f) {
    if (op.factor[f] < 0) continue;
    point[f] = arguments[op.factor[f]];
    direction[f] = tangents[op.factor[f]];
  }
  for (int i = 0; i < op.results; ++i)
    if (is_computed(op, arguments, i)) wanted |= 1u << (op.first_result + i);
  add_derivatives(Operators(arguments, op.other), point, direction, wanted, sums);
  for (int i = 0; i < op.results; ++i) results[i] = sums[op.first_result + i];
}

// Both derivatives of an operator.
template <class Operators, const auto& op, int factors = Operators::kFactors>
constexpr Derivative derivative_of(const char* name) {
  return {name, &vjp_of<Operators, op, factors>, &jvp_of<Operators, op, factors>};
}

// Return the type in which atoms are sorted. int32 takes half the passes of a radix sort. A number
// of atoms that is a symbol could be larger.
inline Type sorted_type(const Value& atom_count) {
  return (atom_count / (int64_t(1) << 31)).is_known(0) ? Type::kInt32 : Type::kInt64;
}

// Raise an error where an operator of results cannot compute the wanted ones.
inline void check_results(const char* op, const char* name, const Value& vectors,
                          const Value& mask) {
  const bool has_virial = mask[1].item();
  if (!mask[0].item() || has_virial != bool(mask[2].item()))
    refuse(op, "output_mask", "[True, True, True] or [True, False, False]", mask);
  if (has_virial && vectors.is_none()) refuse(op, name, "where virials are wanted", "none");
}

// Raise an error where an operator of gradients lacks the vectors that it needs.
inline void check_vectors(const char* op, const char* name, const Value& vectors,
                          const Value* upstream) {
  if (vectors.is_none() && !(upstream[1].is_none() && upstream[2].is_none()))
    refuse(op, name, "where a virial has a gradient", "none");
}

}  // namespace calcops
