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

// Return the dimension of a shape that vmap joins; -1: none.
int joined_dimension(const contract::Text& text, const Shape& shape) {
  for (size_t d = 0; d < shape.size(); ++d)
    if (contains(text.joined, contract::bare(shape[d]))) return int(d);
  return -1;
}

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
tensor_list vmap_one_by_one(Call call, const SymInt& items) {
  const int64_t count = items.guard_int(__FILE__, __LINE__);
  TORCH_CHECK(count > 0, call.op.schema().name(), ": expected vmap over a dimension with items");
  std::vector<tensor_list> items_of_results;
  for (int64_t item = 0; item < count; ++item) {
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

// A call under vmap whose tensors are [items, ...], and the sizes of one item.
struct Mapped {
  const Operator& op;
  const contract::Text& text;
  Call call;
  SymInt items;
  std::array<const Shape*, kMost> shapes{};  // of one item's tensors, by line
  std::vector<SymInt> counts;                // values of one item's sizes: numbers and joined sizes
  uint32_t has_dimension = 0;                // sizes that are a dimension of a tensor, a bit each
  bool fits = true;                          // false: the call cannot be joined

  Mapped(const Operator& op, Call given_call, const SymInt& items)
      : op(op),
        text(op.family->text),
        call(std::move(given_call)),
        items(items),
        counts(text.sizes.size(), 0) {
    // The sizes are read from the shapes of one item. The joined tensors do not show them if there
    // are no items.
    for (size_t i = 0; i < text.lines.size(); ++i) {
      const Line& line = text.lines[i];
      if (line.size < 0 || line.is_tensor()) continue;
      counts[line.size] =
          op.argument[i] < 0 ? SymInt(line.absent) : call.arguments[op.argument[i]].toSymInt();
    }
    for (uint32_t gaps = text.gaps; gaps; gaps &= gaps - 1) counts[__builtin_ctz(gaps)] = 1;
    // Gradients and tensors with the shape of another come second: their shapes follow from others.
    for (const bool is_derived : {false, true})
      for (size_t i = 0; i < text.lines.size(); ++i) {
        const Line& line = text.lines[i];
        if (!line.is_tensor()) continue;
        for (const int position : {op.argument[i], op.gradient[i]}) {
          if (position < 0 || !call.arguments[position].isTensor()) continue;
          const bool follows = position == op.gradient[i] || line.shape_of >= 0;
          if (follows == is_derived) read_shape(int(i), position, is_derived);
        }
      }
  }

  // Find the shape of one item of a tensor, and the value of its joined size.
  void read_shape(int i, int position, bool is_derived) {
    const Line& line = text.lines[i];
    const Tensor& x = call.arguments[position].toTensor();
    const Shape* shape = nullptr;
    if (is_derived && line.shapes.size() > 1) {
      const int other = line.shape_of;
      shape = other >= 0 && op.argument[other] >= 0 ? shapes[other] : &result_shape(line);
    } else {
      for (const Shape& each : line.shapes)
        if (!shape && int64_t(each.size()) == x.dim() - 1) shape = &each;
    }
    fits &= shape && int64_t(shape->size()) == x.dim() - 1;
    if (!fits) return;
    shapes[i] = shape;
    if (!is_derived) has_dimension |= line.shape_sizes[shape - line.shapes.data()];
    const int d = joined_dimension(text, *shape);
    if (d < 0) {
      // A tensor without the joined dimension must serve all items. vmap() expands such a tensor,
      // so that its stride along the items is 0.
      fits &=
          !line.made_by.empty() || items.maybe_as_int() == 1 || x.sym_stride(0).maybe_as_int() == 0;
      return;
    }
    const int size = contract::bare((*shape)[d]);
    const SymInt count = x.sym_size(d + 1);
    if (!(line.or_one >> size & 1)) {
      counts[size] = count;
    } else if (count.maybe_as_int() != 1) {
      const auto earlier = counts[size].maybe_as_int();
      const auto known = count.maybe_as_int();
      if (earlier && known) fits &= earlier == 1 || earlier == known;
      counts[size] = count;
    }
  }

  // As Checked::shape_of.
  const Shape& result_shape(const Line& line) const {
    for (size_t k = 0; k < line.shapes.size(); ++k)
      if (!(line.shape_sizes[k] & line.some_sizes & ~has_dimension)) return line.shapes[k];
    return line.shapes.back();
  }

  // Return x [items, ...] with all dimensions of the line's first shape. Missing ones have size 1.
  static Tensor with_all_dimensions(Tensor x, const Shape& shape, const Line& line) {
    const std::vector<int> from = contract::dimensions_of(line.shapes[0], shape);
    for (size_t d = 0; d < from.size(); ++d)
      if (from[d] < 0) x = x.unsqueeze(int64_t(d) + 1);
    return x;
  }

  // Return x [items, ...] with its items joined along the joined dimension.
  Tensor join(const Tensor& x, int i) const {
    const Line& line = text.lines[i];
    Tensor joined = with_all_dimensions(x, *shapes[i], line);
    // If dimensions were added, the tensor now has the line's first shape.
    const Shape& shape = joined.dim() == x.dim() ? *shapes[i] : line.shapes[0];
    const int d = joined_dimension(text, shape);
    if (d < 0) return x.select(0, 0);  // it serves all items
    if (line.has_entries)
      if (const int size = contract::bare(line.entries.below); contains(text.joined, size))
        joined = shifted(joined, items, counts[size]);
    if (const int size = contract::bare(shape[d]); line.or_one >> size & 1) {
      c10::SymDimVector all(joined.sym_sizes());
      all[d + 1] = counts[size];
      joined = joined.expand_symint(all);
    }
    return joined.movedim(0, d).flatten(d, d + 1);
  }

  // Return the items [items, ...] of a result of the joined call.
  Tensor separate(const Tensor& result, size_t i) const {
    const int index = op.result_lines[i];
    const Line& line = text.lines[index];
    const Shape* const item_shape = op.is_backward ? shapes[index] : &result_shape(line);
    const Shape* shape = nullptr;
    for (const Shape& each : line.shapes)
      if (!shape && int64_t(each.size()) == result.dim()) shape = &each;
    if (!shape)  // an unwanted result, without elements
      return result.unflatten_symint(0, {items, 0});
    const int d = joined_dimension(text, *shape), size = contract::bare((*shape)[d]);
    Tensor each = result.unflatten_symint(d, {items, counts[size]}).movedim(d, 0);
    // An input of size 1 served all N of its item. Its gradient is the sum of theirs.
    if (op.is_backward && line.or_one >> size & 1) {
      const Tensor& input = call.arguments[op.argument[index]].toTensor();
      const int at = joined_dimension(text, *item_shape);
      const SymInt count = at < 0 ? SymInt(1) : input.sym_size(at + 1);
      if (count.sym_ne(counts[size]).guard_bool(__FILE__, __LINE__))
        each = each.sum(d + 1, /*keepdim=*/true);
    }
    // Remove the dimensions that with_all_dimensions() added.
    const std::vector<int> from =
        item_shape ? contract::dimensions_of(line.shapes[0], *item_shape) : std::vector<int>();
    for (size_t k = from.size(); k-- > 0;)
      if (from[k] < 0) each = each.squeeze(int64_t(k) + 1);
    return each;
  }
};

// Run one call for all items. Their tensors are concatenated along the joined dimensions.
tensor_list vmap_joined(const Operator& op, const Call& given, const SymInt& items) {
  const Mapped mapped(op, given, items);
  // If a shape is wrong, a call for each item raises the error.
  if (!mapped.fits) return vmap_one_by_one(given, items);
  const contract::Text& text = mapped.text;
  const std::vector<SymInt>& counts = mapped.counts;
  Call call = given;
  for (size_t i = 0; i < text.lines.size(); ++i) {
    const Line& line = text.lines[i];
    if (op.gradient[i] >= 0)
      if (IValue& argument = call.arguments[op.gradient[i]]; argument.isTensor())
        argument = mapped.join(argument.toTensor(), int(i));
    if (op.argument[i] < 0) continue;
    IValue& argument = call.arguments[op.argument[i]];
    if (!line.made_by.empty() && joined_dimension(text, line.shapes[0]) < 0) {
      argument = IValue();  // such as edge_order, which is made for the joined graph where needed
    } else if (argument.isTensor()) {
      argument = mapped.join(argument.toTensor(), int(i));
    } else if (line.is_tensor() && line.has_entries &&
               contains(text.joined, contract::bare(line.entries.below))) {
      // An absent index tensor names row 0. In the joined call each item has another row 0, so the
      // entries are written out.
      const SymInt& rows = counts[contract::bare(line.entries.below)];
      TORCH_CHECK(rows.maybe_as_int() != 0 || counts[contract::bare(line.shapes[0][0])] == 0,
                  op.name, ": expected `", text.sizes[contract::bare(line.entries.below)],
                  "` >= 1 where `", line.name, "` is None, got ", rows);
      c10::SymDimVector shape{items};
      for (const Sum& dim : line.shapes[0]) shape.push_back(counts[contract::bare(dim)]);
      const Tensor zeros = at::zeros_symint(shape, call.arguments[0].toTensor().options());
      const int d = joined_dimension(text, line.shapes[0]);
      argument = shifted(zeros, items, rows).movedim(0, d).flatten(d, d + 1);
    } else if (line.size >= 0 && contains(text.joined, line.size)) {
      argument = counts[line.size] * items;
    }
  }
  tensor_list results = call.run();
  for (size_t i = 0; i < results.size(); ++i) results[i] = mapped.separate(results[i], i);
  return results;
}

}  // namespace
}  // namespace calcops
