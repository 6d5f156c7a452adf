// What makes an operator behave like a built-in one: autograd in both modes and to any order,
// compiled autograd and vmap, from one description of its derivatives. contract.cpp has one for
// each operator: a Multilinear, which needs no formula, or the formulas of its source. Everything
// works on boxed calls: a list of arguments, whose names are those of the schema. ops/README.md
// follows a call through all of this.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace calcops {

// An absent tensor is undefined; so is a derivative that is zero.
using tensor_list = std::vector<at::Tensor>;

// One call of an operator.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // as many as the schema has

  // A call of `name` that takes the arguments of the same name from this one; the others have their
  // default, or none.
  Call of(const char* name) const;
  bool has(const std::string& argument) const;
  c10::IValue& operator[](const std::string& argument);
  const c10::IValue& operator[](const std::string& argument) const;
  at::Tensor tensor(const std::string& argument) const;
  // Through the dispatcher: the result is differentiable in its turn, and a graph outlives a live
  // reload.
  tensor_list run() const;
};

// The derivatives of an operator, in calls of operators.
class Derivatives {
 public:
  virtual ~Derivatives() = default;
  // Called before a call of which some arguments are differentiated, in either mode.
  virtual void check(const Call&, const std::vector<bool>& /*differentiated*/) const {}
  // Whether a gradient needs what a tensor held. One that nothing needs may be changed afterwards.
  virtual bool depends_on(size_t /*argument*/) const { return true; }
  // Gradients of the arguments, one for each, from those of the results. What is not wanted may be
  // given or not.
  virtual tensor_list vjp(const Call& call, const tensor_list& upstream,
                          const std::vector<bool>& wanted) const = 0;
  // Tangents of the results from those of the arguments.
  virtual tensor_list jvp(const Call& call, const tensor_list& tangents) const = 0;
};

// A pair of operators that are the gradients of one number: the sum of terms, each of them a result
// of `forward` times its upstream gradient and linear in each of the inputs that the term names,
//
//   L = grad_a a(x, y) + grad_b b(x, y, z)      {{"grad_a", "x", "y"}, {"grad_b", "x", "y", "z"}}
//
// `forward` gives dL/d(upstream), that is its results in the order of the terms; `backward` gives
// dL/d(input) in the order in which the terms name the inputs, those that its output_mask wants, if
// it has one. Its arguments are all that L depends on: the upstream gradients and whatever
// `forward` takes, under the same names. An input that no wanted term names is passed as none. The
// derivative of L along an argument is L with that argument replaced, less the terms without it. So
// both operators have derivatives to any order, and so has any other operator whose results are the
// first terms.
class Multilinear final : public Derivatives {
 public:
  using Term = std::vector<std::string>;
  Multilinear(const char* forward, const char* backward, const std::vector<Term>& terms);

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override;
  tensor_list jvp(const Call& call, const tensor_list& tangents) const override;

 private:
  using Set = uint64_t;  // of factors, a bit each: the upstreams, one a term, then the inputs

  std::vector<int> factors_of_arguments(const Call& call) const;
  std::vector<int> factors_of_results(const Call& call) const;
  tensor_list along(const Call& call, const tensor_list& moved, Set wanted) const;
  void add_gradients(const Call& point, Set moved, Set wanted, tensor_list& sums) const;

  const char *forward_, *backward_;
  std::vector<std::string> factors_;
  std::vector<Set> terms_;
  Set upstreams_;
};

// ---- what the dispatcher's keys hold ------------------------------------------------------------

// Autograd: calls the operator below autograd and attaches its derivatives.
void differentiate(const Derivatives& derivatives, const c10::OperatorHandle& op,
                   c10::DispatchKeySet keys, torch::jit::Stack* stack);

// FuncTorchBatched: hands `run` the call with every tensor [mapped dimension, ...] and the size of
// that dimension, and expects results of this form.
using VmapRule = std::function<tensor_list(Call call, const c10::SymInt& batch)>;
void vmap(const VmapRule& run, const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace calcops
