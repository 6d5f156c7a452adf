// Autograd in both modes and to any order, and compiled autograd, for boxed calls of an operator.
// Modelled on the code that PyTorch generates for its own operators
// (torch/csrc/autograd/generated). ops/README.md describes the path of a call through this file.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <cctype>
#include <mutex>

#include "operators.h"

namespace calcops {
namespace {

// The derivatives of an operator are the formulas of its source, which are functions of Values.

// Raise an error if all results have the integer dtype of an argument: they are rounded. Beside a
// floating result, integers are indices. `argument` is differentiated.
void check_rounding(const Operator& op, const Call& call, size_t argument) {
  const auto& lines = op.text().lines;
  int rounded = -1;  // the line of an argument
  for (const int result : op.result_lines) {
    at::ScalarType type = scalar_type(lines[lines[result].group].types[0]);
    for (const int line : op.tensors) {
      const Tensor& x = tensor_or_none(call.arguments[op.argument[line]]);
      if (lines[line].group != lines[result].group || !x.defined()) continue;
      type = x.scalar_type();
      if (!c10::isFloatingType(type)) rounded = line;
    }
    if (c10::isFloatingType(type)) return;
  }
  TORCH_CHECK(rounded < 0, op.name, ": expected `", lines[rounded].name,
              "` of a floating dtype where `", op.parsed.arguments()[argument].name(),
              "` has a derivative, got ",
              dtype_name(call.arguments[op.argument[rounded]].toTensor()));
}

// Raise an error if an argument is differentiated that is constant.
void check_constants(const Operator& op, const Call& call, const std::vector<bool>& differentiated,
                     const char* what) {
  for (size_t i = 0; i < differentiated.size(); ++i) {
    const int line = op.lines[i];
    if (!differentiated[i] || line < 0 || !op.text().lines[line].is_constant) continue;
    const Tensor& x = call.arguments[i].toTensor();
    TORCH_CHECK(false, op.name, ": expected `", op.text().lines[line].name, "` that ", what,
                ", got ", dtype_name(x), ' ', x.sym_sizes());
  }
}

// Return tensors for the Values that a formula set; undefined ones for false, which are unwanted.
// `what` are those that it may set: those for which may_set(i) is true.
template <class MaySet>
tensor_list tensors_of(const Operator& op, const std::vector<Value>& values, const char* what,
                       const MaySet& may_set) {
  tensor_list tensors;
  for (size_t i = 0; i < values.size(); ++i) {
    const IValue& given = ivalue_of(values[i]);
    TORCH_CHECK(given.isTensor() || given.isNone() || given.isBool(), op.name,
                ": expected tensors from the formula of its derivative, got a ", given.tagKind());
    tensors.push_back(tensor_or_none(given));
    TORCH_CHECK(may_set(i) || !tensors[i].defined(), op.name,
                ": expected the formula of its derivative to set ", what, ", got index ", i);
  }
  tensors.resize(tensors.size() - kSpare);
  return tensors;
}

// Return the gradients for the arguments from those for the results. Unwanted ones may be
// undefined.
tensor_list gradients_of(const Operator& op, const Call& call, const tensor_list& upstream,
                         const std::vector<bool>& wanted) {
  check_constants(op, call, wanted, "requires no gradient");
  std::vector<Value> gradients(wanted.size() + kSpare, false);
  for (size_t i = 0; i < wanted.size(); ++i)
    if (wanted[i]) gradients[i] = value_of(Tensor());
  const auto arguments = with_spare(call.arguments);
  const auto given = with_spare(std::vector<IValue>(upstream.begin(), upstream.end()));
  with_errors(op.name, [&] {
    op.derivative->vjp(values_of(arguments.data()), values_of(given.data()), gradients.data());
  });
  return tensors_of(op, gradients, "the gradient of a Tensor", [&](size_t i) {
    return i < op.count() && op.kinds[i] == contract::Kind::kTensor;
  });
}

// Return the tangents of the results from those of the arguments.
tensor_list tangents_of(const Operator& op, const Call& call, const tensor_list& tangents) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.derivative->jvp, op.name,
                              ": its derivative has no formula for forward mode");
  const auto arguments = with_spare(call.arguments);
  const auto given = with_spare(std::vector<IValue>(tangents.begin(), tangents.end()));
  const size_t count = op.parsed.returns().size();
  std::vector<Value> results(count, value_of(Tensor()));
  results.resize(count + kSpare, false);
  op.derivative->jvp(values_of(arguments.data()), values_of(given.data()), results.data());
  return tensors_of(op, results, "the tangent of a result", [&](size_t i) { return i < count; });
}

// From PyTorch 2.13 on, a Node counts its own references. Before, std::shared_ptr does.
template <class Node>
auto make_node() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<Node>();
#else
  return std::shared_ptr<Node>(new Node(), torch::autograd::deleteNode);
#endif
}

bool any_defined(const tensor_list& list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& x) { return x.defined(); });
}

// The graph node of a call. All lists except `upstream` have an entry for each argument.
struct CallNode final : torch::autograd::Node {
  const Operator* op = nullptr;
  std::optional<c10::OperatorHandle> handle;
  std::vector<IValue> plain;                          // the arguments that are no tensors
  std::vector<torch::autograd::SavedVariable> saved;  // the arguments that are tensors

  // Return the node's name: ForceVirialBackward for calcops::force_virial.
  std::string name() const override {
    std::string name;
    bool begins_word = true;
    for (const char letter : op->name.substr(op->name.rfind(':') + 1)) {
      if (letter != '_') name += begins_word ? char(std::toupper(letter)) : letter;
      begins_word = letter == '_';
    }
    return name + "Backward";
  }

  tensor_list apply(tensor_list&& upstream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!any_defined(upstream)) return tensor_list(plain.size());
    return gradients_of(*op, {*handle, arguments()}, upstream, wanted());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // Collect the values on which compiled autograd's cache key and graph depend.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(op->name);
    args.collect(saved, /*is_output=*/false);
    for (const IValue& argument : plain) args.collect(argument);
  }

  // Record the call of replay() in compiled autograd's graph, with its arguments packed into types
  // that an FX graph can hold.
  tensor_list apply_with_saved(const tensor_list& upstream,
                               torch::dynamo::autograd::SwapSavedVariables& swap) override {
    swap.before(saved);
    for (IValue& argument : plain) swap.before(argument);
    torch::dynamo::autograd::PackedArgs packed;
    packed.pack(wanted());
    for (const IValue& argument : arguments()) packed.pack(argument);
    std::vector<at::TypePtr> types;
    for (const IValue& value : packed.vec())
      types.push_back(value.isTensor() ? at::TensorType::get() : value.type());

    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string function = compiler->bind_function(
        swap.get_py_compiler(), name(),
        [op = op, handle = *handle](const tensor_list& upstream,
                                    const std::vector<IValue>& packed) {
          return replay(*op, handle, upstream, packed);
        },
        std::move(types), /*is_custom_function=*/true, /*is_traceable=*/true);
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    tensor_list result = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", function, upstream, packed.vec(),
        torch::dynamo::autograd::IValuePacker<Metadata>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges())));
    swap.after(saved);
    for (IValue& argument : plain) swap.after(argument);
    return result;
  }

 private:
  std::vector<IValue> arguments() const {
    std::vector<IValue> arguments = plain;
    for (size_t i = 0; i < saved.size(); ++i)
      if (at::Tensor tensor = saved[i].unpack(); tensor.defined()) arguments[i] = std::move(tensor);
    return arguments;
  }

  std::vector<bool> wanted() const {
    std::vector<bool> wanted;
    for (size_t i = 0; i < plain.size(); ++i) wanted.push_back(task_should_compute_output(i));
    return wanted;
  }

  // Compute the gradients when compiled autograd runs its graph.
  static tensor_list replay(const Operator& op, const c10::OperatorHandle& handle,
                            const tensor_list& upstream, const std::vector<IValue>& packed) {
    const auto wanted = packed[0].to<std::vector<bool>>();
    const Call call{handle, {packed.begin() + 1, packed.end()}};
    tensor_list gradients(wanted.size());
    if (any_defined(upstream)) gradients = gradients_of(op, call, upstream, wanted);
    // In a graph no gradient may be absent, so it is zero.
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i] && !gradients[i].defined())
        gradients[i] = at::zeros_like(call.arguments[i].toTensor());
    return gradients;
  }
};

// The kernel of the dispatch key Autograd: calls the operator below autograd and attaches its
// derivatives.
void differentiate(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const auto run_below_autograd = [&] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  };
  const size_t count = op.count();
  const auto arguments = torch::jit::last(*stack, count);
  bool reverse_mode = false, forward_mode = false;
  size_t first = count;  // the first argument that is differentiated
  for (size_t i = count; i-- > 0;) {
    if (!arguments[i].isTensor()) continue;
    const at::Tensor& tensor = arguments[i].toTensor();
    const bool reverse = torch::autograd::compute_requires_grad(tensor);
    const bool forward = torch::autograd::isFwGradDefined(tensor);
    reverse_mode = reverse_mode || reverse;
    forward_mode = forward_mode || forward;
    if (reverse || forward) first = i;
  }
  if (first == count) return run_below_autograd();

  Call call{handle, arguments.vec()};
  check_rounding(op, call, first);
  tensor_list inputs, tangents(count);
  inputs.reserve(count);
  for (const IValue& argument : call.arguments) inputs.push_back(tensor_or_none(argument));

  decltype(make_node<CallNode>()) node;
  if (reverse_mode) {
    node = make_node<CallNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    node->op = &op;
    node->handle = handle;
    node->plain.reserve(count);
    node->saved.reserve(count);
    // The caller may change an argument in place if no derivative needs its values.
    const char* unused = op.derivative->unused;
    for (size_t i = 0; i < count; ++i) {
      node->plain.push_back(call.arguments[i].isTensor() ? IValue() : call.arguments[i]);
      const bool is_needed = !unused || op.parsed.arguments()[i].name() != unused;
      node->saved.emplace_back(is_needed ? inputs[i] : at::Tensor(), /*is_output=*/false);
    }
  }

  std::vector<bool> has_tangent(count);
  if (forward_mode)
    for (size_t i = 0; i < count; ++i) {
      if (!torch::autograd::isFwGradDefined(inputs[i])) continue;
      tangents[i] = inputs[i]._fw_grad(/*level=*/0);
      call.arguments[i] = inputs[i]._fw_primal(/*level=*/0);
      has_tangent[i] = true;
    }
  check_constants(op, call, has_tangent, "has no tangent");

  run_below_autograd();
  tensor_list outputs;
  for (const IValue& output : torch::jit::last(*stack, op.parsed.returns().size()))
    outputs.push_back(output.toTensor());
  if (node) {
    tensor_list differentiable = outputs;
    for (at::Tensor& output : differentiable)
      if (!torch::autograd::isDifferentiableType(output.scalar_type())) output = at::Tensor();
    torch::autograd::set_history(differentiable, node);
  }

  if (!forward_mode) return;
  const tensor_list output_tangents = tangents_of(op, call, tangents);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (output_tangents[i].defined())
      outputs[i]._set_fw_grad(output_tangents[i], /*level=*/0, /*is_inplace_op=*/false);
}

}  // namespace
}  // namespace calcops
