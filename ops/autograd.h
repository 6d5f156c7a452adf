// What makes an operator behave like a built-in one under autograd, compiled autograd, forward mode
// and vmap. An operator describes one call of itself by a plain struct:
//
//   struct Op {
//     static constexpr const char* kNode = "OpBackward";     // the name of its grad_fn
//     <arguments that are not tensors>
//     template <class Visit> void visit(Visit&& visit);      // visit(argument) for each of them
//     tensor_list forward(const tensor_list& inputs) const;  // calls the operator
//     tensor_list backward(const tensor_list& upstream, const tensor_list& inputs,
//                          const std::vector<bool>& needed) const;
//     tensor_list jvp(const tensor_list& tangents, const tensor_list& inputs) const;
//   };
//
// Absent tensors are undefined tensors everywhere. backward and jvp call operators through the
// dispatcher, therefore they are differentiable themselves and a graph outlives a live reload.
// After the code that PyTorch generates for its own operators (torch/csrc/autograd/generated).
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace calcops {

using tensor_list = std::vector<at::Tensor>;

// From 2.13 on a Node counts its own references; before that std::shared_ptr holds it.
template <class Node>
auto make_node() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<Node>();
#else
  return std::shared_ptr<Node>(new Node(), torch::autograd::deleteNode);
#endif
}

template <class Op>
struct OpNode final : torch::autograd::Node {
  Op op;
  std::vector<torch::autograd::SavedVariable> saved;

  std::string name() const override { return Op::kNode; }

  tensor_list apply(tensor_list&& upstream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return gradients(op, upstream, unpack(), needed());
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // Compiled autograd: what its cache key and its graph depend on ...
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(saved, /*is_output=*/false);
    const_cast<Op&>(op).visit([&](const auto& argument) { args.collect(argument); });
  }

  // ... and the call that it records, with everything packed into what an FX graph can hold.
  tensor_list apply_with_saved(const tensor_list& upstream,
                               torch::dynamo::autograd::SwapSavedVariables& swap) override {
    swap.before(saved);
    op.visit([&](auto& argument) { swap.before(argument); });
    torch::dynamo::autograd::PackedArgs packed;
    op.visit([&](const auto& argument) { packed.pack(argument); });
    packed.pack(needed());
    for (const at::Tensor& input : unpack()) packed.pack(input);
    std::vector<at::TypePtr> types;
    for (const c10::IValue& value : packed.vec())
      types.push_back(value.isTensor() ? at::TensorType::get() : value.type());

    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string function =
        compiler->bind_function(swap.get_py_compiler(), name(), replay, std::move(types),
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    tensor_list result = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", function, upstream, packed.vec(),
        torch::dynamo::autograd::IValuePacker<Metadata>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges())));
    swap.after(saved);
    op.visit([&](auto& argument) { swap.after(argument); });
    return result;
  }

 private:
  tensor_list unpack() const {
    tensor_list inputs;
    for (const auto& variable : saved) inputs.push_back(variable.unpack());
    return inputs;
  }

  std::vector<bool> needed() const {
    std::vector<bool> needed;
    for (size_t i = 0; i < saved.size(); ++i) needed.push_back(task_should_compute_output(i));
    return needed;
  }

  static tensor_list gradients(const Op& op, const tensor_list& upstream, const tensor_list& inputs,
                               const std::vector<bool>& needed) {
    for (const at::Tensor& gradient : upstream)
      if (gradient.defined()) return op.backward(upstream, inputs, needed);
    return tensor_list(inputs.size());
  }

  static tensor_list replay(const tensor_list& upstream, const std::vector<c10::IValue>& args) {
    torch::dynamo::autograd::PackedArgs packed(args);
    Op op{};
    op.visit([&](auto& argument) { argument = packed.unpack<std::decay_t<decltype(argument)>>(); });
    const auto needed = packed.unpack<std::vector<bool>>();
    tensor_list inputs;
    for (size_t i = 0; i < needed.size(); ++i) inputs.push_back(packed.unpack<at::Tensor>());
    return gradients(op, upstream, inputs, needed);
  }
};

// The kernel of the Autograd key: runs op.forward below autograd and attaches its derivatives.
template <class Op>
tensor_list differentiable(Op op, const tensor_list& inputs) {
  decltype(make_node<OpNode<Op>>()) node;
  if (torch::autograd::compute_requires_grad(inputs)) {
    node = make_node<OpNode<Op>>();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    node->op = op;
    for (const at::Tensor& input : inputs) node->saved.emplace_back(input, /*is_output=*/false);
  }
  tensor_list outputs;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    outputs = op.forward(inputs);
  }
  if (node) torch::autograd::set_history(outputs, node);

  tensor_list tangents(inputs.size()), primals = inputs;
  bool forward_mode = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!torch::autograd::isFwGradDefined(inputs[i])) continue;
    tangents[i] = inputs[i]._fw_grad(/*level=*/0);
    primals[i] = inputs[i]._fw_primal(/*level=*/0);
    forward_mode = true;
  }
  if (forward_mode) {
    tensor_list output_tangents = op.jvp(tangents, primals);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (output_tangents[i].defined())
        outputs[i]._set_fw_grad(output_tangents[i], /*level=*/0, /*is_inplace_op=*/false);
  }
  return outputs;
}

// The kernel of the FuncTorchBatched key for operators whose inputs and outputs all begin with a
// dimension of independent items: the vmapped dimension is folded into it.
template <class Op>
tensor_list fold_vmap(Op op, const tensor_list& inputs) {
  int64_t level = -1;
  for (const at::Tensor& input : inputs)
    if (input.defined())
      if (const auto* batched = at::functorch::maybeGetBatchedImpl(input))
        level = std::max(level, batched->level());

  c10::SymInt batch = 1, items = 0;
  tensor_list folded = inputs;
  const auto batched_here = [&](const at::Tensor& input) {
    const auto* batched = input.defined() ? at::functorch::maybeGetBatchedImpl(input) : nullptr;
    return batched && batched->level() == level ? batched : nullptr;
  };
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (const auto* batched = batched_here(inputs[i])) {
      folded[i] = batched->value().movedim(batched->bdim(), 0);
      batch = folded[i].sym_size(0);
    }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    if (!batched_here(inputs[i])) {
      c10::SymDimVector shape(inputs[i].sym_sizes());
      shape.insert(shape.begin(), batch);
      folded[i] = inputs[i].unsqueeze(0).expand_symint(shape);
    }
    items = folded[i].sym_size(1);
    folded[i] = folded[i].flatten(0, 1);
  }
  tensor_list outputs = op.forward(folded);
  for (at::Tensor& output : outputs) {
    if (batch != 0) items = output.sym_size(0) / batch;  // an output nobody wants has none
    output = at::functorch::makeBatched(output.unflatten_symint(0, {batch, items}), 0, level);
  }
  return outputs;
}

}  // namespace calcops
