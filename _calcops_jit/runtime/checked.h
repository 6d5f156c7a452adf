// Checks one call of an operator against its contract, collects the sizes and allocates the
// results.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <new>

#include "operators.h"

namespace calcops {
namespace {

// Sizes are int64_t. Under torch.compile and torch.export they are SymInt, which may be symbols.
// The functions below exist for both, so that a check is written once.

// Return whether a condition holds. A condition of symbols becomes an assertion of the graph.
bool holds(bool ok) { return ok; }
bool holds(const c10::SymBool& ok) { return ok.expect_true(__FILE__, __LINE__); }
// Return whether a condition is known to hold. If `may_guard`, a condition of symbols becomes a
// guard of the graph; with unbacked symbols that is an error. Otherwise an unknown condition is
// false.
bool is_known_true(bool ok, bool /*may_guard*/) { return ok; }
bool is_known_true(const c10::SymBool& ok, bool may_guard) {
  return may_guard ? ok.guard_bool(__FILE__, __LINE__) : ok.maybe_as_bool().value_or(false);
}
bool equal(int64_t a, int64_t b) { return a == b; }
c10::SymBool equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b); }
bool both(bool a, bool b) { return a && b; }
c10::SymBool both(const c10::SymBool& a, const c10::SymBool& b) { return a.sym_and(b); }
bool either(bool a, bool b) { return a || b; }
c10::SymBool either(const c10::SymBool& a, const c10::SymBool& b) { return a.sym_or(b); }
bool below(int64_t a, int64_t b) { return a < b; }
c10::SymBool below(const SymInt& a, const SymInt& b) { return a.sym_lt(b); }
// Return a size, or 0 if it is a symbol without a value.
int64_t value_or_zero(int64_t a) { return a; }
int64_t value_or_zero(const SymInt& a) { return a.maybe_as_int().value_or(0); }
// The second argument of these selects the type of the result.
auto sizes_in(const Tensor& x, int64_t) { return x.sizes(); }
auto sizes_in(const Tensor& x, const SymInt&) { return x.sym_sizes(); }
int64_t integer(const IValue& x, int64_t) { return x.toInt(); }
SymInt integer(const IValue& x, const SymInt&) { return x.toSymInt(); }
std::vector<int64_t> integers(const IValue& x, int64_t) { return x.toIntVector(); }
std::vector<SymInt> integers(const IValue& x, const SymInt&) { return x.toSymIntVector(); }
Tensor make(at::ArrayRef<int64_t> shape, const at::TensorOptions& options) {
  return at::empty(shape, options);
}
Tensor make(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint(shape, options);
}

// Return "a, b or c".
std::string joined_by_or(const std::vector<std::string>& items) {
  std::string list;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool is_last = i + 1 == items.size();
    if (i > 0) list += is_last ? " or " : ", ";
    list += items[i];
  }
  return list;
}

std::string quoted(const std::string& text) { return '"' + text + '"'; }

template <class Item>
bool contains(const std::vector<Item>& list, const Item& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

const Tensor kNone;

const Tensor& tensor_or_none(const IValue& value) {
  return value.isTensor() ? value.toTensor() : kNone;
}

// One call. The constructor checks it. Int is int64_t, or SymInt if sizes may be symbols.
template <class Int>
struct Checked {
  const Operator& op;
  const contract::Text& text;
  const IValue* stack;                         // the arguments
  std::array<const Tensor*, kMost> tensors;    // the arguments by their line in the contract
  std::array<const Tensor*, kMost> gradients;  // the upstream gradients by the line of the result
  std::array<Int, kMost> sizes;                // the values of the contract's sizes
  const Line* first_line = nullptr;            // of the first tensor that is given
  const Tensor* first_tensor = &kNone;
  uint32_t has_value = 0;      // sizes that have a value, a bit each
  uint32_t has_dimension = 0;  // sizes that are a dimension of an argument, a bit each
  std::array<const Shape*, kMost> shapes{};  // of each line's tensor; nullptr: its first shape

  Checked(const Operator& op, const IValue* stack) : op(op), text(op.family->text), stack(stack) {
    tensors.fill(&kNone);
    gradients.fill(&kNone);

    for (const int i : op.number_lines) read_number(text.lines[i], op.argument[i]);
    for (const int i : op.tensor_lines) check_argument(i, stack[op.argument[i]]);
    for (const int i : op.choice_lines) check_choice(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.list_lines) check_list(text.lines[i], stack[op.argument[i]]);

    // A dimension that is missing in all arguments has size 1. `gaps &= gaps - 1` clears a bit.
    for (uint32_t gaps = text.gaps & ~has_value; gaps; gaps &= gaps - 1)
      sizes[__builtin_ctz(gaps)] = 1;
    has_value |= text.gaps;
    for (const int i : op.tensor_lines)
      if (tensors[i]->defined() && text.lines[i].shapes.size() > 1) check_gaps(i);
    for (const int i : op.shaped_lines) check_argument(i, stack[op.argument[i]]);
    for (const int i : op.gradient_lines) {
      gradients[i] = &tensor_or_none(stack[op.gradient[i]]);
      if (gradients[i]->defined())
        check_tensor(text.lines[i], "grad_" + text.lines[i].name, *gradients[i]);
    }

    for (const int i : op.entry_lines)
      if (!tensors[i]->defined()) check_absent_entries(text.lines[i]);
    if (op.is_backward) check_terms();
    for (const int i : op.limit_lines)
      if (tensors[i]->defined())
        for (const contract::Limit& limit : text.lines[i].limits) check_limit(limit, i);
    for (const int i : op.exclusion_lines)
      for (const contract::Exclusion& exclusion : text.lines[i].exclusions)
        if (is_met(exclusion.when)) check_exclusion(exclusion, i);
  }

  // Return whether this call meets a condition of the contract.
  bool is_met(const contract::Condition& when) const {
    bool is_in = when.in.empty();
    for (const std::string& name : when.in) {
      const int argument = text.line(name);
      is_in |= name == op.schema->name || (argument >= 0 && tensors[argument]->defined());
    }
    if (!is_in) return false;
    if (when.argument.empty()) return true;
    const int position = op.argument[text.line(when.argument)];
    return position >= 0 && stack[position].toStringRef() == when.choice;
  }

  static std::string condition_text(const contract::Condition& when) {
    return when.argument.empty() ? "" : " where `" + when.argument + "` is " + quoted(when.choice);
  }

  // Throw "op: expected `name` what, got ...".
  template <class Got>
  [[noreturn]] void refuse(const std::string& name, const std::string& what, const Got& got) const {
    TORCH_CHECK(false, op.name, ": expected `", name, "` ", what, ", got ", got);
  }

  // Return the value of a sum of products of sizes.
  Int value(const Sum& sum) const {
    Int total = 0;
    for (const contract::Product& product : sum) {
      Int term = product.factor;
      for (const int size : product.sizes) term = term * sizes[size];
      total = total + term;
    }
    return total;
  }

  void read_number(const Line& line, int position) {
    sizes[line.size] = position < 0 ? Int(line.absent) : integer(stack[position], Int());
    has_value |= 1u << line.size;
    if (position < 0 || !line.has_bounds) return;
    const Int& size = sizes[line.size];
    if (!holds(below(Int(line.least - 1), size)))
      refuse(line.name, c10::str(">= ", line.least), size);
    // This check passes if the size is a symbol. It needs no guard: no tensor could be that large.
    if (value_or_zero(size) > line.most) refuse(line.name, "of at most " + line.most_text, size);
  }

  void check_argument(int i, const IValue& value) {
    const Line& line = text.lines[i];
    tensors[i] = &tensor_or_none(value);
    const bool is_none = !tensors[i]->defined();
    if (!line.only.argument.empty()) {
      const bool is_required = is_met(line.only);
      if (is_none && is_required) refuse(line.name, "a tensor" + condition_text(line.only), "none");
      if (!is_none && !is_required)
        refuse(line.name,
               "none where `" + line.only.argument + "` is not " + quoted(line.only.choice),
               "a tensor");
    }
    if (is_none) {
      if (!op.optional[i]) refuse(line.name, "of shape " + line.shape_text, "none");
      return;
    }
    check_tensor(line, line.name, *tensors[i]);
    if (!first_tensor->defined()) {
      first_tensor = tensors[i];
      first_line = &line;
    }
  }

  void check_choice(const Line& line, const IValue& value) const {
    const std::string& got = value.toStringRef();
    if (std::find(line.choices.begin(), line.choices.end(), got) != line.choices.end()) return;
    std::vector<std::string> choices;
    for (const std::string& choice : line.choices) choices.push_back(quoted(choice));
    refuse(line.name, joined_by_or(choices), quoted(got));
  }

  void check_exclusion(const contract::Exclusion& exclusion, int i) const {
    const Line& line = text.lines[i];
    std::vector<std::string> others;
    if (!exclusion.choices.empty()) {
      const std::string& got = stack[op.argument[i]].toStringRef();
      if (!contains(exclusion.choices, got)) return;
      for (const std::string& choice : line.choices)
        if (!contains(exclusion.choices, choice)) others.push_back(quoted(choice));
      refuse(line.name, joined_by_or(others) + condition_text(exclusion.when), quoted(got));
    }
    if (!tensors[i]->defined()) return;
    const at::ScalarType got = tensors[i]->scalar_type();
    bool is_excluded = false;
    for (const Type type : exclusion.types) is_excluded |= got == scalar_type(type);
    if (!is_excluded) return;
    for (const std::string& name : contract::split_list(line.type_text))
      if (!contains(exclusion.types, contract::type_named(name))) others.push_back(name);
    refuse(line.name, joined_by_or(others) + condition_text(exclusion.when), got);
  }

  // Check a list. A list of sizes gives them their values. Another list has one value, or as many
  // as the size C of `one or C values`.
  void check_list(const Line& line, const IValue& value) {
    if (line.count_or_one >= 0) {
      const Int count = value.isNone() ? 1 : int64_t(value.toDoubleVector().size());
      if (!holds(either(below(count, Int(2)), equal(count, sizes[line.count_or_one]))))
        refuse(line.name,
               c10::str("of one value or ", text.sizes[line.count_or_one], " = ",
                        sizes[line.count_or_one]),
               c10::str(count, " values"));
      return;
    }
    const auto list = integers(value, Int());
    const bool is_empty = list.empty() && !line.if_empty.empty();
    auto ok = equal(Int(list.size()), Int(is_empty ? 0 : line.items.size()));
    for (size_t k = 0; k < list.size(); ++k) ok = both(ok, below(Int(-1), list[k]));
    if (!holds(ok)) refuse(line.name, line.items_text, at::ArrayRef<Int>(list));
    for (size_t k = 0; k < line.items.size(); ++k) {
      sizes[line.items[k]] = is_empty ? sizes[line.if_empty[k]] : list[k];
      has_value |= 1u << line.items[k];
    }
  }

  void check_tensor(const Line& line, const std::string& name, const Tensor& x) {
    const Tensor& like = line.like < 0 ? kNone : *tensors[line.like];
    if (like.defined()) {
      if (x.scalar_type() != like.scalar_type())
        refuse(
            name,
            c10::str("of dtype ", like.scalar_type(), " like `", text.lines[line.like].name, "`"),
            x.scalar_type());
    } else if (line.like < 0) {
      bool ok = false;
      for (const Type type : line.types) ok |= x.scalar_type() == scalar_type(type);
      if (!ok) refuse(name, line.type_text, x.scalar_type());
    }
    const Tensor& same_device = like.defined() ? like : *first_tensor;
    if (same_device.defined() && x.device() != same_device.device())
      refuse(name,
             c10::str("on ", same_device.device(), " like `",
                      like.defined() ? text.lines[line.like].name : first_line->name, "`"),
             x.device());
    check_shape(line, name, x);
  }

  void check_shape(const Line& line, const std::string& name, const Tensor& x) {
    const uint32_t had_value = has_value;
    const auto shape = sizes_in(x, Int());
    const size_t rank = shape.size();
    const size_t i = &line - text.lines.data();
    const bool is_argument = op.argument[i] >= 0 && line.shape_of < 0;
    if (line.shape_of >= 0 && tensors[line.shape_of]->defined())
      return check_same_shape(line, name, x);
    // The arguments determine which of a result's shapes its gradient must have.
    const bool is_determined = !is_argument && line.shapes.size() > 1;
    const Shape* const required = is_determined ? &shape_of(line) : nullptr;
    int shapes_of_rank = 0;
    for (const Shape& each : line.shapes)
      if (each.size() == rank) ++shapes_of_rank;
    // If several shapes have the tensor's rank, select one by its dimensions that are numbers.
    const auto fits = [&](const Shape& want, bool may_guard) {
      if (want.size() != rank || (required && required != &want)) return false;
      bool ok = true;
      for (size_t d = 0; d < rank && ok && shapes_of_rank > 1; ++d)
        if (want[d].size() == 1 && want[d][0].sizes.empty())
          ok = is_known_true(equal(shape[d], Int(want[d][0].factor)), may_guard);
      return ok;
    };
    const Shape* chosen = nullptr;
    // A guard is added only if no shape fits without one.
    for (const bool may_guard : {false, true})
      for (const Shape& each : line.shapes)
        if (!chosen && fits(each, may_guard)) chosen = &each;
    shapes[i] = chosen;
    if (chosen && matches(line, *chosen, shape)) {
      if (is_argument) has_dimension |= line.shape_sizes[chosen - line.shapes.data()];
      return;
    }
    if (line.shape_of >= 0) {
      const auto wanted = values(shape_of(line));
      refuse(name, c10::str("of the result's shape ", at::ArrayRef<Int>(wanted)), shape);
    }
    refuse(name, "of shape " + line.shape_text + sizes_text(line, had_value), shape);
  }

  // Refuse an argument that lacks a dimension of other arguments, unless the dimension may be 1.
  void check_gaps(int i) {
    const Line& line = text.lines[i];
    const uint32_t lacks =
        line.lacks[shapes[i] - line.shapes.data()] & has_dimension & ~line.or_one;
    if (lacks)
      refuse(line.name,
             "with the dimension " + text.sizes[__builtin_ctz(lacks)] + " that others have",
             sizes_in(*tensors[i], Int()));
  }

  // Return the first shape of a result whose sizes are all dimensions of arguments. Sizes that
  // every shape has do not count.
  const Shape& shape_of(const Line& line) const {
    for (size_t k = 0; k < line.shapes.size(); ++k)
      if (!(line.shape_sizes[k] & line.some_sizes & ~has_dimension)) return line.shapes[k];
    return line.shapes.back();
  }

  c10::SmallVector<Int, 5> values(const Shape& shape) const {
    c10::SmallVector<Int, 5> values;
    for (const Sum& dim : shape) values.push_back(value(dim));
    return values;
  }

  void check_same_shape(const Line& line, const std::string& name, const Tensor& x) {
    const Tensor& other = *tensors[line.shape_of];
    const auto shape = sizes_in(x, Int()), wanted = sizes_in(other, Int());
    shapes[&line - text.lines.data()] = shapes[line.shape_of];
    auto ok = equal(Int(shape.size()), Int(wanted.size()));
    for (size_t d = 0; d < std::min(shape.size(), wanted.size()); ++d)
      ok = both(ok, equal(shape[d], wanted[d]));
    if (!holds(ok))
      refuse(name, c10::str("of the shape of `", text.lines[line.shape_of].name, "`, ", wanted),
             shape);
  }

  // Return the values of a shape's sizes for an error message. `had_value` are the sizes that
  // earlier arguments determine. If these are all sizes of the only shape, the text is like
  // " = [23, 3]", otherwise like ", [N] = [23]".
  std::string sizes_text(const Line& line, uint32_t had_value) const {
    std::vector<std::string> names, numbers, dimensions;
    for (const int size : line.names)
      if (had_value >> size & 1) {
        names.push_back(text.sizes[size]);
        numbers.push_back(c10::str(sizes[size]));
      }
    if (line.shapes.size() == 1 && line.made_by.empty() && names.size() == line.names.size()) {
      for (const Sum& dim : line.shapes[0]) dimensions.push_back(c10::str(value(dim)));
      return " = [" + c10::Join(", ", dimensions) + "]";
    }
    if (names.empty()) return "";
    return ", [" + c10::Join(", ", names) + "] = [" + c10::Join(", ", numbers) + "]";
  }

  // Return the size to which a dimension such as N or N + 1 gives its value, or -1. It is a size
  // without a value.
  int size_to_set(const Sum& sum) const {
    for (const contract::Product& product : sum)
      if (product.factor == 1 && product.sizes.size() == 1 && !(has_value >> product.sizes[0] & 1))
        return product.sizes[0];
    return -1;
  }

  // Return whether a shape is the wanted one. Set the sizes that have no value yet.
  template <class Sizes>
  bool matches(const Line& line, const Shape& want, const Sizes& shape) {
    auto ok = equal(Int(0), Int(0));
    for (size_t d = 0; d < want.size(); ++d) {
      if (const int size = contract::bare(want[d]); size >= 0 && line.or_one >> size & 1) {
        ok = both(ok, matches_or_one(size, shape[d]));
        continue;
      }
      const int size = size_to_set(want[d]);
      if (size >= 0) {
        // With 0 for the size, value() is the rest of the sum.
        sizes[size] = 0;
        sizes[size] = shape[d] - value(want[d]);
        has_value |= 1u << size;
        if (want[d].size() > 1) ok = both(ok, below(Int(-1), sizes[size]));
      } else {
        ok = both(ok, equal(shape[d], value(want[d])));
      }
    }
    if (line.whole >= 0 && !(has_value >> line.whole & 1)) {
      sizes[line.whole] = value(line.parts);
      has_value |= 1u << line.whole;
    }
    return holds(ok);
  }

  // Return whether a dimension `N or 1` has the size N or 1. A dimension of 1 serves all N.
  bool matches_or_one(int size, const Int& got) {
    if (value_or_zero(got) == 1) return true;
    if (!(has_value >> size & 1)) {
      sizes[size] = got;
      has_value |= 1u << size;
      return true;
    }
    const auto is_one = equal(sizes[size], Int(1));
    if (!holds(either(either(is_one, equal(got, Int(1))), equal(got, sizes[size])))) return false;
    // N was set from a symbol. If that is 1, this dimension is N.
    if (is_known_true(is_one, /*may_guard=*/true)) sizes[size] = got;
    return true;
  }

  void check_limit(const contract::Limit& limit, int i) const {
    const Tensor& x = *tensors[i];
    if (limit.on_cuda && !x.is_cuda()) return;
    if (!is_met(limit.when)) return;
    const Int sum = value(limit.sum);
    if (holds(below(sum, Int(limit.below)))) return;
    const bool is_dimension = contract::bare(limit.sum) >= 0;
    refuse(text.lines[i].name,
           "of less than " + limit.number + ' ' + limit.unit + condition_text(limit.when) +
               (limit.on_cuda ? " on CUDA" : ""),
           is_dimension ? c10::str(sizes_in(x, Int())) : c10::str(sum));
  }

  // Check an optional index tensor that is absent. Its entries are then all 0, the first row. So
  // there must be a row, unless there are no entries.
  void check_absent_entries(const Line& line) const {
    const int rows = contract::bare(line.entries.below);
    // value_or_zero() is 0 for a symbol without a value, too. With the 1 added, 0 rows give 1.
    if (rows < 0 || value_or_zero(sizes[rows] + 1) != 1) return;
    Int count = 1;
    for (const Sum& dim : line.shapes[0]) count = count * value(dim);
    if (!holds(equal(count, Int(0))))
      refuse(text.sizes[rows], ">= 1 where `" + line.name + "` is None", sizes[rows]);
  }

  // Return whether a result is computed. A gradient is computed if output_mask selects it, another
  // result if all of its factors are given.
  bool is_wanted(size_t result) const {
    if (op.is_backward) return op.mask < 0 || stack[op.mask].toBoolList()[result];
    for (const int line : op.needs[result])
      if (!tensors[line]->defined()) return false;
    return true;
  }

  // Refuse a factor of the line `linear` that is absent but needed: for a result that has an
  // upstream gradient, or for the factor's own gradient.
  void check_terms() const {
    const Family& family = *op.family;
    for (size_t i = 0; i < family.input_lines.size(); ++i) {
      const int line = family.input_lines[i];
      if (tensors[line]->defined()) continue;
      bool is_needed = is_wanted(i);
      for (size_t t = 0; t < family.term_lines.size(); ++t) {
        const bool has_gradient = gradients[text.line(text.terms[t].result)]->defined();
        is_needed |= has_gradient && contains(family.term_lines[t], line);
      }
      const std::string& name = text.lines[line].name;
      if (is_needed) refuse(name, "where it or a result of it has a gradient", "none");
    }
  }

  // Allocate the results. Those that are not wanted stay undefined.
  Results results() const {
    Results allocated;
    for (size_t i = 0; i < op.result_lines.size(); ++i) {
      if (!is_wanted(i)) continue;
      const Line& line = text.lines[op.result_lines[i]];
      const Tensor& input = *tensors[op.result_lines[i]];
      if (op.is_backward) {
        allocated[i] = make(sizes_in(input, Int()), input.options());
        continue;
      }
      const auto shape = values(shape_of(line));
      int64_t bytes = 8;  // of a number of the widest dtype
      bool fits = true;
      for (const Int& size : shape) {
        if (!holds(below(Int(-1), size)))
          refuse(first_line->name, "large enough for a result " + line.shape_text,
                 sizes_in(*first_tensor, Int()));
        // A size of 0 counts as 1: the strides of an empty result are products of the other sizes.
        fits &= !__builtin_mul_overflow(bytes, std::max<int64_t>(value_or_zero(size), 1), &bytes);
      }
      if (!fits || bytes >= kMostBytes) throw std::bad_alloc();
      allocated[i] = make(at::ArrayRef<Int>(shape), options_of(line));
    }
    return allocated;
  }

  at::TensorOptions options_of(const Line& line) const {
    const Tensor& like = line.like < 0 ? kNone : *tensors[line.like];
    if (like.defined()) return like.options();
    at::TensorOptions options = first_tensor->options();
    return line.types.empty() ? options : options.dtype(scalar_type(line.types[0]));
  }

  // Return the empty tensor that stands for an unwanted result.
  Tensor nothing() const {
    const auto& inputs = op.family->input_lines;
    return at::empty({0}, inputs.empty() ? first_tensor->options() : tensors[inputs[0]]->options());
  }
};

}  // namespace
}  // namespace calcops
