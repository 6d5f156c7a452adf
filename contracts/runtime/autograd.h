// Autograd in both modes and to any order, compiled autograd and vmap for an operator. They need
// only its Derivatives. All functions work on boxed calls: a list of arguments in the order of the
// schema. ops/README.md describes the path of a call through this file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "calcops/operator.h"

namespace calcops {

namespace {
struct Operator;
}

// An undefined tensor stands for an absent argument or for a derivative that is zero.
using tensor_list = std::vector<at::Tensor>;

// One call of an operator.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  // as many as the schema has

  // Run the call through the dispatcher. So the results are differentiable, and a graph from before
  // a live reload calls the new kernel.
  tensor_list run() const;
};

// The derivatives of an operator by the formulas of its source, which are functions of Values.
class Derivatives {
 public:
  Derivatives(const Operator& op, const Derivative& formula) : op_(op), formula_(formula) {}
  // Raise an error if a result has an integer dtype, which is rounded. `argument` is
  // differentiated.
  void check(const Call& call, size_t argument) const;
  // Raise an error if an argument is differentiated that is constant.
  void check_constants(const Call& call, const std::vector<bool>& differentiated,
                       const char* what) const;
  // Return whether a gradient needs the values of an argument. The caller may change an argument in
  // place if it is not needed.
  bool depends_on(size_t argument) const;
  // Return the gradients for the arguments from those for the results. Unwanted ones may be
  // undefined.
  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const;
  // Return the tangents of the results from those of the arguments.
  tensor_list jvp(const Call& call, const tensor_list& tangents) const;

 private:
  const Operator& op_;
  const Derivative& formula_;
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
