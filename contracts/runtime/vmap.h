// Calls under torch.vmap: one call for all items of the batch if the contract joins a size,
// otherwise one call for each item.
#pragma once

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "checked.h"

namespace calcops {
namespace {

// Run one call for each item.
tensor_list vmap_one_by_one(const Call& call, const SymInt& items) {
  std::vector<tensor_list> items_of_results;
  for (int64_t item = 0; item < items.guard_int(__FILE__, __LINE__); ++item) {
    Call one = call;
    for (IValue& argument : one.arguments)
      if (argument.isTensor()) argument = argument.toTensor().select(0, item);
    const tensor_list results = one.run();
    items_of_results.resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) items_of_results[i].push_back(results[i]);
  }
  tensor_list results;
  for (const tensor_list& list : items_of_results) results.push_back(at::stack(list));
  return results;
}

// Return results without items. Their shapes are those of a call on Meta.
tensor_list vmap_no_items(const Call& call) {
  Call one = call;
  Tensor nothing;  // 0, which depends on all floating arguments, as the results do
  at::TensorOptions options;
  for (IValue& argument : one.arguments) {
    if (!argument.isTensor()) continue;
    const Tensor& x = argument.toTensor();
    options = x.options();
    if (x.is_floating_point()) nothing = nothing.defined() ? nothing.add(x.sum()) : x.sum();
    argument = at::empty_symint(x.sym_sizes().slice(1), options.device(at::kMeta));
  }
  tensor_list results;
  for (const Tensor& result : one.run()) {
    c10::SymDimVector shape(result.sym_sizes());
    shape.insert(shape.begin(), 0);
    results.push_back(at::zeros_symint(shape, options.dtype(result.scalar_type())));
    if (result.is_floating_point() && nothing.defined())
      results.back() = results.back().add(nothing.to(result.scalar_type()));
  }
  return results;
}

// A call under vmap whose tensors are [items, ...], as one call.
struct Joined {
  const Operator& op;
  const Call& given;
  const SymInt& items;
  const std::vector<bool>& serves_all;  // of each argument: it has no batch
  std::vector<IValue> first;            // the arguments of the first item
  const Checked item;                   // All items have its sizes.
  bool is_shifted = false;              // entries are shifted
  // Of each argument with joined sizes: these sizes. Shifted entries tie two, the rows that they
  // name and their own dimension.
  std::vector<uint32_t> ties{};

  Joined(const Operator& op, const Call& given, const SymInt& items,
         const std::vector<bool>& serves_all)
      : op(op),
        given(given),
        items(items),
        serves_all(serves_all),
        first(first_of(given)),
        item(op, first.data()) {}

  static std::vector<IValue> first_of(const Call& given) {
    std::vector<IValue> arguments = given.arguments;
    for (IValue& argument : arguments)
      if (argument.isTensor()) argument = argument.toTensor().select(0, 0);
    return arguments;
  }

  bool is_joined(int size) const { return size >= 0 && item.text.joined >> size & 1; }

  // The dimension of a tensor that vmap joins.
  struct Dimension {
    bool can_be_joined = true;
    int at = -1;  // -1: none
    int size = -1;
    bool is_leading = false;  // `...`, of which the items are one more dimension
  };

  // Only one dimension can be joined, which is one size. In another shape it has the same
  // dimensions before it as in the first one, in which the kernel sees the tensor.
  Dimension dimension(int i) const {
    Dimension found;
    const Line& line = item.text.lines[i];
    if (line.any_shape) return found;
    const Shape& shape = item.shapes[i] ? *item.shapes[i] : line.shapes[0];
    bool begins_like_first = true;
    for (size_t d = 0; d < shape.size(); ++d) {
      begins_like_first =
          begins_like_first && d < line.shapes[0].size() && shape[d] == line.shapes[0][d];
      if (!(contract::sizes_of(shape[d]) & item.text.joined)) continue;
      const int size = contract::bare(shape[d]);
      if (found.at >= 0 || size < 0 || !begins_like_first) return {false};
      const bool is_leading = size == item.text.leading;
      const size_t more = line.has_leading && d > 0 ? item.leading.size() - 1 : 0;
      found = {true, int(d + more), size, is_leading};
    }
    const uint32_t split = line.whole < 0 ? 0 : contract::sizes_of(line.parts) | 1u << line.whole;
    if (split & item.text.joined) return {false};
    return found;
  }

  // Return x [items, ...] with its items joined along the joined dimension, or nothing if they
  // cannot be joined.
  std::optional<Tensor> join(const Tensor& x, int i, bool serves_all) {
    const Sum& below = item.text.lines[i].entries.below;
    const Dimension joined = dimension(i);
    const bool names_rows = contract::sizes_of(below) & item.text.joined;
    if (!joined.can_be_joined) return {};
    if (joined.at < 0) {
      if (names_rows || !(serves_all || items.maybe_as_int() == 1)) return {};
      return x.select(0, 0);
    }
    ties.push_back(1u << joined.size | (contract::sizes_of(below) & item.text.joined));
    Tensor shifted = x;
    if (names_rows) {
      if (contract::bare(below) < 0) return {};
      const SymInt& rows = item.sizes[contract::bare(below)];
      const auto type = x.scalar_type();
      const int bits = int(8 * c10::elementSize(type)) - c10::isSignedType(type);
      if (bits < 63 && !contract::is_at_most(rows * items, SymInt((int64_t(1) << bits) - 1)))
        return {};
      shifted = shifted_by(x, rows).to(type);
      is_shifted = true;
    }
    if (joined.is_leading) return shifted;
    return shifted.movedim(0, joined.at).flatten(joined.at, joined.at + 1);
  }

  // Index entries [items, ...] name the rows of their own item. Return entries that name the same
  // rows of the joined tensor. -1 stays -1, and a wrong entry stays wrong.
  Tensor shifted_by(const Tensor& entries, const SymInt& rows) const {
    const Tensor wide = entries.to(at::kLong);
    Tensor step = at::arange(items, wide.options()).mul(c10::Scalar(rows));
    while (step.dim() < wide.dim()) step = step.unsqueeze(-1);
    const Tensor outside = at::where(wide.eq(-1), -1, c10::Scalar(rows * items));
    return at::where(wide.ge(0).logical_and(wide.lt(rows)), wide.add(step), outside);
  }

  // Return whether entries tie all joined sizes to a size. A kernel cannot know which rows of
  // another size belong to the same item.
  bool are_tied_to(int size) const {
    uint32_t tied = 1u << size, all = 0;
    for (size_t i = 0; i < ties.size(); ++i)
      for (const uint32_t tie : ties)
        if (tie & tied) tied |= tie;
    for (const uint32_t tie : ties) all |= tie;
    return !(all & ~tied);
  }

  // Return one call for all items, or nothing if they cannot be joined.
  std::optional<Call> call() {
    Call all = given;
    for (size_t i = 0; i < op.count(); ++i) {
      if (op.lines[i] < 0) continue;  // output_mask
      const Line& line = item.text.lines[op.lines[i]];
      IValue& argument = all.arguments[i];
      if (argument.isTensor()) {
        const auto joined = join(argument.toTensor(), op.lines[i], serves_all[i]);
        if (!joined) return {};
        argument = *joined;
      } else if (op.kinds[i] == contract::Kind::kInt && is_joined(line.size)) {
        argument = item.sizes[line.size] * items;
        ties.push_back(1u << line.size);
      } else if (contract::sizes_of(line.entries.below) & item.text.joined) {
        return {};  // the kernel cannot know to which item a row belongs
      }
    }
    for (size_t i = 0; i < op.result_lines.size(); ++i) {
      const Dimension joined = dimension(op.result_lines[i]);
      if (joined.at < 0 || !are_tied_to(joined.size)) return {};
      // A result of integers might name the shifted rows.
      const auto type = item.options_of(i).dtype();
      if (is_shifted && c10::isIntegralType(type.toScalarType(), /*includeBool=*/false)) return {};
    }
    try {
      Checked(op, all.arguments.data());
    } catch (const std::exception&) {
      return {};  // it is too large for a limit that one item meets
    }
    return all;
  }

  // Return the results of all items from those of their call.
  tensor_list separate(tensor_list results) const {
    for (size_t i = 0; i < results.size(); ++i) {
      const Dimension joined = dimension(op.result_lines[i]);
      if (!op.is_wanted(given.arguments.data(), i))
        results[i] = results[i].unflatten_symint(0, {items, 0});
      else if (!joined.is_leading)
        results[i] = results[i]
                         .unflatten_symint(joined.at, {items, item.sizes[joined.size]})
                         .movedim(joined.at, 0);
    }
    return results;
  }
};

tensor_list vmap_items(const Operator& op, const Call& call, const SymInt& items,
                       const std::vector<bool>& serves_all) {
  if (items.maybe_as_int() == 0) return vmap_no_items(call);
  if (op.text().joined) {
    Joined joined(op, call, items, serves_all);
    if (const auto all = joined.call()) try {
        return joined.separate(all->run());
      } catch (const c10::Error&) {
        // The calls of the items raise an error with the sizes and positions of an item.
      }
  }
  return vmap_one_by_one(call, items);
}

// The kernel of the dispatch key FuncTorchBatched. The batch dimension comes first in every tensor
// of the calls above.
void vmap(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet,
          torch::jit::Stack* stack) {
  Call call{handle, torch::jit::pop(*stack, op.count())};
  int64_t level = -1;  // of the innermost vmap
  for (const IValue& argument : call.arguments)
    if (const Tensor tensor = tensor_or_none(argument); tensor.defined())
      if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor))
        level = std::max(level, batched->level());
  // Return a tensor's batch at this level, or nullptr.
  const auto batch_of = [&](const Tensor& tensor) {
    const auto* batched = tensor.defined() ? at::functorch::maybeGetBatchedImpl(tensor) : nullptr;
    return batched && batched->level() == level ? batched : nullptr;
  };

  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  c10::SymInt batch = 1;
  for (const IValue& argument : call.arguments)
    if (const auto* batched = batch_of(tensor_or_none(argument)))
      batch = batched->value().sym_size(batched->bdim());
  std::vector<bool> serves_all(op.count());
  for (size_t i = 0; i < op.count(); ++i) {
    IValue& argument = call.arguments[i];
    const Tensor tensor = tensor_or_none(argument);
    serves_all[i] = !batch_of(tensor);
    if (const auto* batched = batch_of(tensor)) {
      argument = batched->value().movedim(batched->bdim(), 0);
    } else if (tensor.defined()) {
      c10::SymDimVector shape(tensor.sym_sizes());
      shape.insert(shape.begin(), batch);
      argument = tensor.unsqueeze(0).expand_symint(shape);
    }
  }
  for (const Tensor& result : vmap_items(op, call, batch, serves_all))
    stack->push_back(at::functorch::makeBatched(result, 0, level));
}

}  // namespace
}  // namespace calcops
