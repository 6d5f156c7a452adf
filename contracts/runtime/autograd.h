// Autograd in both modes and to any order, compiled autograd and vmap for an operator. They need
// only its Derivatives, which contract.cpp makes: a Multilinear, which needs no formula, or the
// formulas of the operator's source. All functions work on boxed calls: a list of
// arguments with the names of the schema. ops/README.md describes the path of a call through this
// file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "calcops/contract_proofs.h"

namespace calcops {

// An undefined tensor stands for an absent argument or for a derivative that is zero.
using tensor_list = std::vector<at::Tensor>;

// One call of an operator.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // as many as the schema has

  // Return a call of the operator `name`. Arguments of the same names are taken from this call.
  // Each other argument has its default or, without one, none.
  Call of(const char* name) const;
  bool has(const std::string& argument) const;
  c10::IValue& operator[](const std::string& argument);
  const c10::IValue& operator[](const std::string& argument) const;
  at::Tensor tensor(const std::string& argument) const;
  // Run the call through the dispatcher. So the results are differentiable, and a graph from before
  // a live reload calls the new kernel.
  tensor_list run() const;
};

// The derivatives of an operator, computed by calls of operators.
class Derivatives {
 public:
  virtual ~Derivatives() = default;
  // Raise an error if a call is not differentiable. It is called if an argument of the call is
  // differentiated, in either mode.
  virtual void check(const Call&, size_t /*argument*/) const {}
  // Return whether there are derivatives for an argument. Asking for another one is an error.
  virtual bool covers(const std::string& argument) const = 0;
  // Return whether a gradient needs the values of an argument. The caller may change an argument in
  // place if it is not needed.
  virtual bool depends_on(size_t /*argument*/) const { return true; }
  // Return the gradients for the arguments from those for the results. Unwanted ones may be
  // undefined.
  virtual tensor_list vjp(const Call& call, const tensor_list& upstream,
                          const std::vector<bool>& wanted) const = 0;
  // Return the tangents of the results from those of the arguments.
  virtual tensor_list jvp(const Call& call, const tensor_list& tangents) const = 0;
};

// The derivatives of the two operators of a line `linear`. They compute the gradients of one
// number, such as
//
//   L = grad_a a(x, y) + grad_b b(x, y, z)
//
// L is a sum of terms. The factors of a term are the upstream gradient of a result and inputs, and
// the term is linear in each of them. `forward` returns the gradients of L for the upstream
// gradients: its results. `backward` returns those for the inputs. If it has an argument
// output_mask, that selects some of them. Optional factors that occur only in terms that are not
// needed are passed as none.
//
// The derivative of L along a direction of a factor is L without the terms that lack the factor,
// and with the direction in the factor's place. So both operators have derivatives to any order. So
// has any other operator whose results are those of the first terms.
class Multilinear final : public Derivatives {
 public:
  Multilinear(std::string forward, std::string backward, const contract::Linear& linear)
      : forward_(std::move(forward)),
        backward_(std::move(backward)),
        factors_(linear.factors),
        terms_(linear.terms),
        optional_(linear.optional),
        upstreams_((Set(1) << terms_.size()) - 1) {}
  bool covers(const std::string& argument) const override;

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override;
  tensor_list jvp(const Call& call, const tensor_list& tangents) const override;

 private:
  // A set of factors, a bit each.
  using Set = uint64_t;

  std::vector<int> factors_of_arguments(const Call& call) const;
  std::vector<int> factors_of_results(const Call& call) const;
  tensor_list along(const Call& call, const tensor_list& moved, Set wanted) const;
  void add_gradients(const Call& point, Set moved, Set wanted, tensor_list& sums) const;

  std::string forward_, backward_;
  std::vector<std::string> factors_;
  std::vector<Set> terms_;
  Set optional_, upstreams_;
};

// ---- kernels of dispatch keys -------------------------------------------------------------------

// Autograd: calls the operator below autograd and attaches its derivatives.
void differentiate(const Derivatives& derivatives, const c10::OperatorHandle& op,
                   c10::DispatchKeySet keys, torch::jit::Stack* stack);

// FuncTorchBatched: calls `run` with the batch dimension first in every tensor, and with the size
// of the batch. The results of `run` have the batch dimension first, too.
using VmapRule = std::function<tensor_list(Call call, const c10::SymInt& batch)>;
void vmap(const VmapRule& run, const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace calcops
