// What makes an operator behave like a built-in one: autograd in both modes and to any order,
// compiled autograd and vmap, from one description of its derivatives. An operator's .cpp says
//
//   define<&kernel, kDerivatives>(m, "name(Tensor x, ...) -> Tensor");
//
// and kDerivatives is a Multilinear, which needs no formula, or a Derivatives with formulas of its
// own. The kernel is a function with the C++ signature of the schema; nothing else repeats that
// signature, because everything around the kernel works on boxed calls: a list of arguments, whose
// names are those of the schema. ops/README.md follows a call through all of this.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "calcops/expect.h"

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
  Call with(const std::string& argument, c10::IValue value) const;
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

template <const auto& derivatives>
void differentiate_with(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  differentiate(derivatives, op, keys, stack);
}

// FuncTorchBatched: hands `run` the call with every tensor [mapped dimension, ...] and the size of
// that dimension, and expects results of this form.
using Boxed = void(const c10::OperatorHandle&, torch::jit::Stack*);
using VmapRule = std::function<tensor_list(Call call, const c10::SymInt& batch)>;
void vmap(const VmapRule& run, const c10::OperatorHandle& op, torch::jit::Stack* stack);

template <tensor_list (*run)(Call call, const c10::SymInt& batch)>
void vmap_with(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  vmap(run, op, stack);
}

// The rule where all tensors begin with a dimension of independent items: the mapped one is folded
// into it.
tensor_list vmap_folded(Call call, const c10::SymInt& batch);

// An operator with a kernel of its own for all devices, derivatives and a rule for vmap.
template <auto kernel, const auto& derivatives, Boxed rule = vmap_with<vmap_folded>>
void define(torch::Library& m, const char* schema) {
  using torch::CppFunction;
  m.def(schema);
  const std::string name(schema, std::strchr(schema, '('));
  const auto impl = [&](c10::DispatchKey key, CppFunction&& function) {
    m.impl(name.c_str(), torch::dispatch(key, std::move(function)));
  };
  impl(c10::DispatchKey::CPU, CppFunction(TORCH_FN(kernel)));
  impl(c10::DispatchKey::Meta, CppFunction(TORCH_FN(kernel)));
#ifdef CALCOPS_NO_CUDA
  impl(c10::DispatchKey::CUDA, CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#else
  impl(c10::DispatchKey::CUDA, CppFunction(TORCH_FN(kernel)));
#endif
  impl(c10::DispatchKey::Autograd,
       CppFunction::makeFromBoxedFunction<&differentiate_with<derivatives>>());
  impl(c10::DispatchKey::FuncTorchBatched, CppFunction::makeFromBoxedFunction<rule>());
}

// An operator composed of other operators, which have devices, derivatives and vmap already.
template <auto composition>
void define(torch::Library& m, const char* schema) {
  m.def(schema, TORCH_FN(composition));
  const std::string name(schema, std::strchr(schema, '('));
  // vmap does not look for compositions, so it stands under that key too.
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::FuncTorchBatched, TORCH_FN(composition)));
}

}  // namespace calcops
