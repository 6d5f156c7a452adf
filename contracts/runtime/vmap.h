// Calls under torch.vmap: one call for all items of the batch if the contract joins a size,
// otherwise one call for each item.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "operators.h"

namespace calcops {
namespace {

// Index entries [items, ...] name the rows 0 to count - 1 of their own item. Return entries that
// name the same rows of the joined tensor. -1 stays -1, and a wrong entry stays wrong.
Tensor shifted(const Tensor& entries, const SymInt& items, const SymInt& count) {
  const Tensor wide = entries.to(at::kLong);
  Tensor step = at::arange(items, wide.options()).mul(c10::Scalar(count));
  while (step.dim() < wide.dim()) step = step.unsqueeze(-1);
  const Tensor outside = at::where(wide.eq(-1), -1, c10::Scalar(count * items));
  return at::where(wide.ge(0).logical_and(wide.lt(count)), wide.add(step), outside);
}

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

// A call under vmap whose tensors are [items, ...]. It is run as one call.
struct Joined {
  const Operator& op;
  const contract::Text& text;
  const Call& given;
  const SymInt& items;
  std::vector<SymInt> counts;  // values of one item's sizes: numbers and joined sizes
  bool fits = true;            // false: the call cannot be joined

  Joined(const Operator& op, const Call& given, const SymInt& items)
      : op(op), text(op.family->text), given(given), items(items), counts(text.sizes.size(), 0) {
    for (size_t i = 0; i < text.lines.size(); ++i) {
      const Line& line = text.lines[i];
      if (line.size >= 0)
        counts[line.size] =
            op.has(int(i)) ? given.arguments[op.argument[i]].toSymInt() : SymInt(line.absent);
    }
    for (size_t i = 0; i < text.lines.size(); ++i)
      for (const int position : {op.argument[i], op.gradient[i]})
        if (position >= 0 && given.arguments[position].isTensor())
          read_shape(text.lines[i], given.arguments[position].toTensor());
  }

  // Return the dimension of a tensor that vmap joins; -1: none.
  int dimension(const Line& line) const {
    if (line.shapes.empty()) return -1;
    for (size_t d = 0; d < line.shapes[0].size(); ++d)
      if (is_joined(contract::bare(line.shapes[0][d]))) return int(d);
    return -1;
  }

  bool is_joined(int size) const { return size >= 0 && contains(text.joined, text.sizes[size]); }

  void read_shape(const Line& line, const Tensor& x) {
    const auto has_rank = [&](const Shape& shape) { return int64_t(shape.size()) == x.dim() - 1; };
    if (std::none_of(line.shapes.begin(), line.shapes.end(), has_rank)) fits = false;
    const int d = dimension(line);
    if (!fits) return;
    if (d >= 0)
      counts[contract::bare(line.shapes[0][d])] = x.sym_size(d + 1);
    else if (line.made_by.empty())
      // A tensor without the joined dimension must serve all items. vmap() expands such a tensor,
      // so that its stride along the items is 0.
      fits = items.maybe_as_int() == 1 || x.sym_stride(0).maybe_as_int() == 0;
  }

  // Return x [items, ...] with its items joined along the joined dimension.
  Tensor join(Tensor x, const Line& line) const {
    const int d = dimension(line);
    if (d < 0) return x.select(0, 0);  // it serves all items
    if (line.has_entries)
      if (const int size = contract::bare(line.entries.below); is_joined(size))
        x = shifted(x, items, counts[size]);
    return x.movedim(0, d).flatten(d, d + 1);
  }

  // Return entries that are 0 where absent. In the joined call, each item has another row 0.
  Tensor absent_entries(const Line& line, const at::TensorOptions& options) const {
    const SymInt& rows = counts[contract::bare(line.entries.below)];
    const int d = dimension(line);
    TORCH_CHECK(rows.maybe_as_int() != 0 || counts[contract::bare(line.shapes[0][d])] == 0, op.name,
                ": expected `", line.entries.bound, "` >= 1 where `", line.name, "` is None, got ",
                rows);
    c10::SymDimVector shape{items};
    for (const Sum& dim : line.shapes[0]) shape.push_back(counts[contract::bare(dim)]);
    return join(at::zeros_symint(shape, options.dtype(at::kLong)), line);
  }

  tensor_list run() const {
    Call call = given;
    for (size_t i = 0; i < text.lines.size(); ++i) {
      const Line& line = text.lines[i];
      if (op.gradient[i] >= 0)
        if (IValue& upstream = call.arguments[op.gradient[i]]; upstream.isTensor())
          upstream = join(upstream.toTensor(), line);
      if (!op.has(int(i))) continue;
      IValue& argument = call.arguments[op.argument[i]];
      if (!line.made_by.empty() && dimension(line) < 0)
        argument = IValue();  // such as edge_order, which is made for the joined graph where needed
      else if (argument.isTensor())
        argument = join(argument.toTensor(), line);
      else if (line.has_entries && line.has_absent && is_joined(contract::bare(line.entries.below)))
        argument =
            absent_entries(line, given.arguments[op.argument[op.tensors[0]]].toTensor().options());
      else if (is_joined(line.size))
        argument = counts[line.size] * items;
    }
    tensor_list results = call.run();
    for (size_t i = 0; i < results.size(); ++i) {
      const Line& line = text.lines[op.result_lines[i]];
      const int d = dimension(line);
      if (op.is_wanted(given.arguments.data(), i))
        results[i] = results[i]
                         .unflatten_symint(d, {items, counts[contract::bare(line.shapes[0][d])]})
                         .movedim(d, 0);
      else
        results[i] = results[i].unflatten_symint(0, {items, 0});
    }
    return results;
  }
};

tensor_list vmap_items(const Operator& op, const Call& call, const SymInt& items) {
  if (items.maybe_as_int() == 0) return vmap_no_items(call);
  if (op.family->text.joined.empty()) return vmap_one_by_one(call, items);
  const Joined joined(op, call, items);
  // If a shape is wrong, a call for each item raises the error.
  return joined.fits ? joined.run() : vmap_one_by_one(call, items);
}

}  // namespace
}  // namespace calcops
