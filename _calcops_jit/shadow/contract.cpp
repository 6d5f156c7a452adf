// Makes PyTorch's operators of contracts: checks, results, devices, derivatives and vmap of a call,
// all from the text. It is included by runtime.cpp, whose object serves every library of the cache.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "autograd.h"
#include "calcops/contract_text.h"
#include "calcops/operator.h"

namespace calcops {
namespace {

using at::Tensor;
using c10::IValue;
using c10::SymInt;
using contract::Line;
using contract::Shape;
using contract::Sum;

constexpr size_t kMost = 24;                      // lines, sizes and parameters of one contract
constexpr int64_t kMostBytes = int64_t(1) << 47;  // that an address space can hold
using Results = std::array<Tensor, 6>;

at::ScalarType scalar_type(Type type) {
  switch (type) {
    case Type::kBool:
      return at::kBool;
    case Type::kUInt8:
      return at::kByte;
    case Type::kUInt16:
      return at::kUInt16;
    case Type::kInt8:
      return at::kChar;
    case Type::kInt16:
      return at::kShort;
    case Type::kInt32:
      return at::kInt;
    case Type::kInt64:
      return at::kLong;
    case Type::kFloat16:
      return at::kHalf;
    case Type::kBFloat16:
      return at::kBFloat16;
    case Type::kFloat32:
      return at::kFloat;
    case Type::kFloat64:
      return at::kDouble;
    default:
      return at::ScalarType::Undefined;
  }
}

// ---- values -------------------------------------------------------------------------------------

struct Hidden {  // gives this unit the IValue in a Value
  static void*& of(Value& value) { return *reinterpret_cast<void**>(&value); }
  static void* of(const Value& value) { return *reinterpret_cast<void* const*>(&value); }
};
static_assert(sizeof(Value) == sizeof(void*));

const IValue& ivalue_of(const Value& value) { return *static_cast<IValue*>(Hidden::of(value)); }

Value value_of(IValue ivalue) {
  Value value;
  *static_cast<IValue*>(Hidden::of(value)) = std::move(ivalue);
  return value;
}

// ---- an operator of a contract ------------------------------------------------------------------

struct Operator;

// Where a kernel's parameter comes from: an argument, by its line, or a result.
struct Source {
  enum { kArgument, kResult, kWorkspace, kStream } from;
  int index;
};

struct BoundKernel {
  KernelEntry entry;
  std::vector<Source> sources;
  bool is_cuda;
};

// All operators of one text.
struct Family {
  contract::Text text;
  std::string name_space, file;
  int line = 0;
  const char* without_cuda = nullptr;
  std::deque<Operator> operators;
  std::unique_ptr<Multilinear> derivatives;
  std::string forward, backward;  // of the derivatives
  std::vector<int> input_lines;   // their factors, in order
  std::vector<std::vector<int>> term_lines;
  std::vector<std::string> names;  // that C strings point into

  [[noreturn]] void fail(int number, const std::string& what) const {
    TORCH_CHECK(false, file, ":", line, ": contract, ", contract::Mistake(number, what).what());
  }
};

struct Operator {
  Family* family;
  const contract::Schema* schema;
  std::string name;  // qualified
  c10::FunctionSchema parsed;
  std::array<int, kMost> argument{};   // of each line: its position in the schema, or -1
  std::array<int, kMost> gradient{};   // of each line: the position of its grad_ argument, or -1
  std::array<bool, kMost> optional{};  // of each line
  std::vector<int> lines{};            // of each argument; -1: output_mask, -2 - line: a gradient
  // What a call has to look at.
  std::vector<int> number_lines{}, tensor_lines{}, choice_lines{}, list_lines{}, gradient_lines{},
      shaped_lines{}, limit_lines{}, entry_lines{}, exclusion_lines{};
  std::vector<std::vector<int>>
      needs{};                      // of each result: the lines without which it is not wanted
  std::vector<int> result_lines{};  // of each result; backward: the factor
  int count = 0, mask = -1;
  bool is_backward = false;
  Value (*composition)(const Value*) = nullptr;
  std::unique_ptr<Derivatives> formulas{};
  std::vector<BoundKernel> kernels{};
};

std::deque<Family>& families() {
  static auto* all = new std::deque<Family>;
  return *all;
}

// Kernels by the operator's qualified name. They are known before or after their contract.
std::map<std::string, std::vector<KernelEntry>>& kernels_waiting() {
  static auto* waiting = new std::map<std::string, std::vector<KernelEntry>>;
  return *waiting;
}

// ---- a call against the text --------------------------------------------------------------------

// Without symbols a call is checked in int64_t, else in SymInt.
bool holds(bool ok) { return ok; }
bool holds(const c10::SymBool& ok) { return ok.expect_true(__FILE__, __LINE__); }
// Without a guard, which an unbacked symbol could not have, if that will do.
bool decided(bool ok, bool /*guard*/) { return ok; }
bool decided(const c10::SymBool& ok, bool guard) {
  return guard ? ok.guard_bool(__FILE__, __LINE__) : ok.maybe_as_bool().value_or(false);
}
bool equal(int64_t a, int64_t b) { return a == b; }
c10::SymBool equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b); }
bool both(bool a, bool b) { return a && b; }
c10::SymBool both(const c10::SymBool& a, const c10::SymBool& b) { return a.sym_and(b); }
bool below(int64_t a, int64_t b) { return a < b; }
c10::SymBool below(const SymInt& a, const SymInt& b) { return a.sym_lt(b); }
int64_t known(int64_t a) { return a; }
int64_t known(const SymInt& a) { return a.maybe_as_int().value_or(0); }
auto sizes_in(const Tensor& x, int64_t) { return x.sizes(); }
auto sizes_in(const Tensor& x, const SymInt&) { return x.sym_sizes(); }
int64_t integer(const IValue& x, int64_t) { return x.toInt(); }
SymInt integer(const IValue& x, const SymInt&) { return x.toSymInt(); }
std::vector<int64_t> integers(const IValue& x, int64_t) { return x.toIntVector(); }
std::vector<SymInt> integers(const IValue& x, const SymInt&) { return x.toSymIntVector(); }
bool either(bool a, bool b) { return a || b; }
c10::SymBool either(const c10::SymBool& a, const c10::SymBool& b) { return a.sym_or(b); }
Tensor make(at::ArrayRef<int64_t> shape, const at::TensorOptions& options) {
  return at::empty(shape, options);
}
Tensor make(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint(shape, options);
}

// a, b or c
std::string listed(const std::vector<std::string>& items) {
  std::string list;
  for (size_t i = 0; i < items.size(); ++i)
    list += (i == 0 ? "" : i + 1 == items.size() ? " or " : ", ") + items[i];
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

// One call, checked. Int is int64_t, or SymInt where sizes may be symbols.
template <class Int>
struct Checked {
  const Operator& op;
  const contract::Text& text;
  const IValue* stack;
  std::array<const Tensor*, kMost> tensors;    // by line
  std::array<const Tensor*, kMost> gradients;  // by the line of the result
  std::array<Int, kMost> sizes;
  const Line* first_line = nullptr;
  const Tensor* first = &kNone;
  uint32_t bound = 0;                        // the sizes that are known, a bit each
  uint32_t given = 0;                        // those for which an argument has a dimension
  std::array<const Shape*, kMost> shapes{};  // that the tensors have; none: the first

  Checked(const Operator& op, const IValue* stack) : op(op), text(op.family->text), stack(stack) {
    tensors.fill(&kNone);
    gradients.fill(&kNone);
    for (const int i : op.number_lines) bind_number(text.lines[i], op.argument[i]);
    for (const int i : op.tensor_lines) check_argument(i, stack[op.argument[i]]);
    for (const int i : op.choice_lines) check_choice(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.list_lines) check_list(text.lines[i], stack[op.argument[i]]);
    for (uint32_t gaps = text.gaps & ~bound; gaps; gaps &= gaps - 1) sizes[__builtin_ctz(gaps)] = 1;
    bound |= text.gaps;
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

  bool is_met(const contract::Condition& when) const {
    bool is_here = when.in.empty();
    for (const std::string& name : when.in) {
      const int argument = text.line(name);
      is_here |= name == op.schema->name || (argument >= 0 && tensors[argument]->defined());
    }
    if (!is_here) return false;
    if (when.argument.empty()) return true;
    const int position = op.argument[text.line(when.argument)];
    return position >= 0 && stack[position].toStringRef() == when.choice;
  }

  static std::string said(const contract::Condition& when) {
    return when.argument.empty() ? "" : " where `" + when.argument + "` is " + quoted(when.choice);
  }

  template <class Got>
  [[noreturn]] void refuse(const std::string& name, const std::string& what, const Got& got) const {
    TORCH_CHECK(false, op.name, ": expected `", name, "` ", what, ", got ", got);
  }

  Int value(const Sum& sum) const {
    Int total = 0;
    for (const contract::Product& product : sum) {
      Int each = product.factor;
      for (const int size : product.sizes) each = each * sizes[size];
      total = total + each;
    }
    return total;
  }

  void bind_number(const Line& line, int position) {
    sizes[line.size] = position < 0 ? Int(line.absent) : integer(stack[position], Int());
    bound |= 1u << line.size;
    if (position < 0 || !line.has_bounds) return;
    const Int& size = sizes[line.size];
    if (!holds(below(Int(line.least - 1), size)))
      refuse(line.name, c10::str(">= ", line.least), size);
    // A symbol gets no guard for what cannot be.
    if (known(size) > line.most) refuse(line.name, "of at most " + line.most_text, size);
  }

  void check_argument(int i, const IValue& value) {
    const Line& line = text.lines[i];
    tensors[i] = &tensor_or_none(value);
    const bool is_none = !tensors[i]->defined();
    if (!line.only.argument.empty() && is_none == is_met(line.only))
      refuse(line.name,
             is_none ? "a tensor" + said(line.only)
                     : "none where `" + line.only.argument + "` is not " + quoted(line.only.choice),
             is_none ? "none" : "a tensor");
    if (is_none) {
      if (!op.optional[i]) refuse(line.name, "of shape " + line.shape_text, "none");
      return;
    }
    check_tensor(line, line.name, *tensors[i]);
    if (!first->defined()) {
      first = tensors[i];
      first_line = &line;
    }
  }

  void check_choice(const Line& line, const IValue& value) const {
    const std::string& got = value.toStringRef();
    if (std::find(line.choices.begin(), line.choices.end(), got) != line.choices.end()) return;
    std::vector<std::string> choices;
    for (const std::string& choice : line.choices) choices.push_back(quoted(choice));
    refuse(line.name, listed(choices), quoted(got));
  }

  void check_exclusion(const contract::Exclusion& exclusion, int i) const {
    const Line& line = text.lines[i];
    std::vector<std::string> others;
    if (!exclusion.choices.empty()) {
      const std::string& got = stack[op.argument[i]].toStringRef();
      if (!contains(exclusion.choices, got)) return;
      for (const std::string& choice : line.choices)
        if (!contains(exclusion.choices, choice)) others.push_back(quoted(choice));
      refuse(line.name, listed(others) + said(exclusion.when), quoted(got));
    }
    if (!tensors[i]->defined()) return;
    const at::ScalarType got = tensors[i]->scalar_type();
    bool is_excluded = false;
    for (const Type type : exclusion.types) is_excluded |= got == scalar_type(type);
    if (!is_excluded) return;
    for (const std::string& name : contract::listed(line.type_text))
      if (!contains(exclusion.types, contract::type_named(name))) others.push_back(name);
    refuse(line.name, listed(others) + said(exclusion.when), got);
  }

  // Values of a list: sizes, or one for each of a size.
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
    auto ok = equal(Int(is_empty ? line.items.size() : list.size()), Int(line.items.size()));
    for (size_t k = 0; k < list.size(); ++k) ok = both(ok, below(Int(-1), list[k]));
    if (!holds(ok)) refuse(line.name, line.items_text, at::ArrayRef<Int>(list));
    for (size_t k = 0; k < line.items.size(); ++k) {
      sizes[line.items[k]] = is_empty ? sizes[line.if_empty[k]] : list[k];
      bound |= 1u << line.items[k];
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
    const Tensor& beside = like.defined() ? like : *first;
    if (beside.defined() && x.device() != beside.device())
      refuse(name,
             c10::str("on ", beside.device(), " like `",
                      like.defined() ? text.lines[line.like].name : first_line->name, "`"),
             x.device());
    check_shape(line, name, x);
  }

  void check_shape(const Line& line, const std::string& name, const Tensor& x) {
    const uint32_t before = bound;
    const auto shape = sizes_in(x, Int());
    const size_t rank = shape.size();
    const size_t i = &line - text.lines.data();
    const bool is_argument = op.argument[i] >= 0 && line.shape_of < 0;
    if (line.shape_of >= 0 && tensors[line.shape_of]->defined())
      return check_same_shape(line, name, x);
    // A result has as many dimensions as the arguments give it.
    const Shape* const only = is_argument || line.shapes.size() == 1 ? nullptr : &shape_of(line);
    int of_this_rank = 0;
    for (const Shape& each : line.shapes) of_this_rank += each.size() == rank;
    // Of several shapes of one rank, the dimensions that are numbers choose.
    const auto fits = [&](const Shape& want, bool guard) {
      if (want.size() != rank || (only && only != &want)) return false;
      bool ok = true;
      for (size_t d = 0; d < rank && ok && of_this_rank > 1; ++d)
        if (want[d].size() == 1 && want[d][0].sizes.empty())
          ok = decided(equal(shape[d], Int(want[d][0].factor)), guard);
      return ok;
    };
    const Shape* chosen = nullptr;
    for (const bool guard : {false, true})
      for (const Shape& each : line.shapes)
        if (!chosen && fits(each, guard)) chosen = &each;
    shapes[i] = chosen;
    if (chosen && matches(line, *chosen, shape)) {
      if (is_argument) given |= line.shape_sizes[chosen - line.shapes.data()];
      return;
    }
    if (line.shape_of >= 0) {
      const auto wanted = values(shape_of(line));
      refuse(name, c10::str("of the result's shape ", at::ArrayRef<Int>(wanted)), shape);
    }
    refuse(name, "of shape " + line.shape_text + known_sizes(line, before), shape);
  }

  // A dimension that an argument has and another lacks is an error, unless the latter may be 1.
  void check_gaps(int i) {
    const Line& line = text.lines[i];
    const uint32_t lacks = line.lacks[shapes[i] - line.shapes.data()] & given & ~line.or_one;
    if (lacks)
      refuse(line.name,
             "with the dimension " + text.sizes[__builtin_ctz(lacks)] + " that others have",
             sizes_in(*tensors[i], Int()));
  }

  // Of the shapes of a result, the first one that has no size without an argument's dimension.
  const Shape& shape_of(const Line& line) const {
    for (size_t k = 0; k < line.shapes.size(); ++k)
      if (!(line.shape_sizes[k] & line.some_sizes & ~given)) return line.shapes[k];
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

  // What the sizes in a shape are, as far as earlier arguments say: " = [23, 3]" of a single shape.
  std::string known_sizes(const Line& line, uint32_t before) const {
    std::vector<std::string> names, numbers, dimensions;
    for (const int size : line.names)
      if (before >> size & 1) {
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

  // The size without a value that a dimension such as N or N + 1 gives one; -1: there is none.
  int unknown(const Sum& sum) const {
    for (const contract::Product& product : sum)
      if (product.factor == 1 && product.sizes.size() == 1 && !(bound >> product.sizes[0] & 1))
        return product.sizes[0];
    return -1;
  }

  // Whether a shape is the wanted one. Sizes without a value get theirs.
  template <class Sizes>
  bool matches(const Line& line, const Shape& want, const Sizes& shape) {
    auto ok = equal(Int(0), Int(0));
    for (size_t d = 0; d < want.size(); ++d) {
      if (const int size = contract::bare(want[d]); size >= 0 && line.or_one >> size & 1) {
        ok = both(ok, matches_or_one(size, shape[d]));
        continue;
      }
      const int size = unknown(want[d]);
      if (size >= 0) {
        sizes[size] = 0;
        sizes[size] = shape[d] - value(want[d]);
        bound |= 1u << size;
        if (want[d].size() > 1) ok = both(ok, below(Int(-1), sizes[size]));
      } else {
        ok = both(ok, equal(shape[d], value(want[d])));
      }
    }
    if (line.whole >= 0 && !(bound >> line.whole & 1)) {
      sizes[line.whole] = value(line.parts);
      bound |= 1u << line.whole;
    }
    return holds(ok);
  }

  // A dimension N or 1: what is 1 serves all.
  bool matches_or_one(int size, const Int& got) {
    if (known(got) == 1) return true;
    if (!(bound >> size & 1)) {
      sizes[size] = got;
      bound |= 1u << size;
      return true;
    }
    const auto is_one = equal(sizes[size], Int(1));
    if (!holds(either(either(is_one, equal(got, Int(1))), equal(got, sizes[size])))) return false;
    // A symbol that was taken for N may turn out to be 1.
    if (decided(is_one, /*guard=*/true)) sizes[size] = got;
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
           "of less than " + limit.number + ' ' + limit.unit + said(limit.when) +
               (limit.on_cuda ? " on CUDA" : ""),
           is_dimension ? c10::str(sizes_in(x, Int())) : c10::str(sum));
  }

  // Without an index of rows, all of its entries are 0, the first row.
  void check_absent_entries(const Line& line) const {
    const int bound = contract::bare(line.entries.below);
    if (bound < 0 || known(sizes[bound] + 1) != 1) return;
    Int count = 1;
    for (const Sum& dim : line.shapes[0]) count = count * value(dim);
    if (!holds(equal(count, Int(0))))
      refuse(text.sizes[bound], ">= 1 where `" + line.name + "` is None", sizes[bound]);
  }

  bool is_wanted(size_t result) const {
    if (op.is_backward) return op.mask < 0 || stack[op.mask].toBoolList()[result];
    for (const int line : op.needs[result])
      if (!tensors[line]->defined()) return false;
    return true;
  }

  // A term whose result has a gradient needs all of its factors, and so does a wanted gradient.
  void check_terms() const {
    const Family& family = *op.family;
    for (size_t i = 0; i < family.input_lines.size(); ++i) {
      const int line = family.input_lines[i];
      if (tensors[line]->defined()) continue;
      bool needed = is_wanted(i);
      for (size_t t = 0; t < family.term_lines.size(); ++t) {
        const auto& factors = family.term_lines[t];
        needed |= gradients[text.line(text.terms[t].result)]->defined() &&
                  std::count(factors.begin(), factors.end(), line);
      }
      const std::string& name = text.lines[line].name;
      if (needed) refuse(name, "where it or a result of it has a gradient", "none");
    }
  }

  // The results, those that are not wanted undefined.
  Results results() const {
    Results made;
    for (size_t i = 0; i < op.result_lines.size(); ++i) {
      if (!is_wanted(i)) continue;
      const Line& line = text.lines[op.result_lines[i]];
      const Tensor& input = *tensors[op.result_lines[i]];
      if (op.is_backward) {
        made[i] = make(sizes_in(input, Int()), input.options());
        continue;
      }
      const auto shape = values(shape_of(line));
      int64_t bytes = 8;
      bool fits = true;
      for (const Int& size : shape) {
        if (!holds(below(Int(-1), size)))
          refuse(first_line->name, "large enough for a result " + line.shape_text,
                 sizes_in(*first, Int()));
        // The strides of an empty result have the other sizes.
        fits &= !__builtin_mul_overflow(bytes, std::max<int64_t>(known(size), 1), &bytes);
      }
      if (!fits || bytes >= kMostBytes) throw std::bad_alloc();
      made[i] = make(at::ArrayRef<Int>(shape), options_of(line));
    }
    return made;
  }

  at::TensorOptions options_of(const Line& line) const {
    const Tensor& like = line.like < 0 ? kNone : *tensors[line.like];
    if (like.defined()) return like.options();
    at::TensorOptions options = first->options();
    return line.types.empty() ? options : options.dtype(scalar_type(line.types[0]));
  }

  // What stands for a result that is not wanted.
  Tensor nothing() const {
    const auto& inputs = op.family->input_lines;
    return at::empty({0}, inputs.empty() ? first->options() : tensors[inputs[0]]->options());
  }
};

// ---- entries ------------------------------------------------------------------------------------

// Where the positions of a line's entries begin to repeat: edges [2, E] have one position an edge.
int64_t positions_of(const Checked<int64_t>& call, int i) {
  const Line& line = call.text.lines[i];
  const Shape& shape = line.shapes[0];
  int64_t count = 1;
  for (size_t d = shape.size() - line.entries.positions.size(); d < shape.size(); ++d)
    count *= call.value(shape[d]);
  return count;
}

Tensor is_wrong(const Tensor& names, const Line& line, int64_t bound) {
  return names.lt(line.entries.may_be_none ? -1 : 0).logical_or(names.ge(bound));
}

[[noreturn]] void refuse_entry(const Checked<int64_t>& call, int i, int64_t position) {
  const Line& line = call.text.lines[i];
  const auto& positions = line.entries.positions;
  const int64_t count = positions_of(call, i);
  const Tensor& names = *call.tensors[i];
  const Tensor rows =
      names.defined() ? names.reshape({-1, count}) : at::zeros({1, count}, at::kLong);
  std::string got, where;
  for (int64_t row = 0; row < rows.size(0); ++row)
    got += (row == 0 ? "" : ", ") + std::to_string(rows[row][position].item<int64_t>());
  if (rows.size(0) > 1) got = '(' + got + ')';
  const Shape& shape = line.shapes[0];
  for (size_t p = positions.size(); p-- > 0;) {
    const int64_t size = call.value(shape[shape.size() - positions.size() + p]);
    where = c10::str(positions[p], ' ', p > 0 ? position % size : position,
                     where.empty() ? "" : ", ", where);
    position /= std::max<int64_t>(size, 1);
  }
  const std::string& bound = line.entries.text.substr(line.entries.text.rfind("< ") + 2);
  const std::string value = std::to_string(call.value(line.entries.below));
  call.refuse(line.name, "entries " + line.entries.text + (bound == value ? "" : " = " + value),
              got + (where.empty() ? "" : " at ") + where);
}

// A kernel's position counts those of all lines with entries, one line after the other.
[[noreturn]] void refuse_position(const Checked<int64_t>& call, int64_t position) {
  for (size_t i = 0; i < call.text.lines.size(); ++i) {
    if (!call.text.lines[i].has_entries || call.op.argument[i] < 0) continue;
    const int64_t count = positions_of(call, int(i));
    if (position < count) refuse_entry(call, int(i), position);
    position -= count;
  }
  TORCH_CHECK(false, call.op.name, ": the kernel found a wrong entry at ", position,
              ", where its contract has none");
}

// Looks at every entry; on CUDA it waits for the answer.
void check_entries(const Checked<int64_t>& call) {
  for (size_t i = 0; i < call.text.lines.size(); ++i) {
    const Line& line = call.text.lines[i];
    const Tensor& names = *call.tensors[i];
    if (!line.has_entries || !names.defined() || names.numel() == 0) continue;
    const Tensor wrong = is_wrong(names, line, call.value(line.entries.below));
    const Tensor found = wrong.reshape({-1, positions_of(call, int(i))}).any(0).nonzero();
    if (found.numel() > 0) refuse_entry(call, int(i), found[0].item<int64_t>());
  }
}

bool wants_checks() {
  const char* wanted = std::getenv("CALCOPS_CHECK");
  return wanted && std::strcmp(wanted, "1") == 0;
}

// What an argument is made of, made anew.
Tensor made_for(const Checked<int64_t>& call, const Line& line) {
  const std::string op = call.op.family->name_space + "::" + line.made_by;
  torch::jit::Stack stack;
  for (const std::string& name : line.made_of)
    stack.push_back(call.stack[call.op.argument[call.text.line(name)]]);
  c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "").callBoxed(&stack);
  return stack[0].toTensor();
}

void check_made(const Checked<int64_t>& call) {
  for (size_t i = 0; i < call.text.lines.size(); ++i) {
    const Line& line = call.text.lines[i];
    if (line.made_by.empty() || !call.tensors[i]->defined()) continue;
    std::string of;
    for (size_t k = 0; k < line.made_of.size(); ++k)
      of += (k == 0 ? "" : k + 1 == line.made_of.size() ? " and " : ", ") + line.made_of[k];
    TORCH_CHECK(at::equal(*call.tensors[i], made_for(call, line)), call.op.name, ": expected `",
                line.name, "` of this ", of, ", got that of others");
  }
}

// ---- kernels ------------------------------------------------------------------------------------

// What the slots of one call point into.
struct Storage {
  std::array<Slot, kMost> slots;
  std::list<Tensor> owned;
  std::array<std::array<int64_t, 6>, kMost> shape, stride;
  std::list<std::vector<int64_t>> integers;
  std::list<std::vector<double>> numbers;
  std::list<std::pair<Tensor, Tensor>> narrowed;  // results, and what a kernel writes for them
};

bool is_narrow(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Whether a kernel takes a tensor; one of float32 takes float16 and bfloat16, widened.
bool fits(const Tensor& x, Type type, const Line& line, bool widened) {
  if (line.read_as != Type::kNone) return line.read_as == type;
  return !x.defined() || x.scalar_type() == scalar_type(type) ||
         (widened && type == Type::kFloat32 && is_narrow(x.scalar_type()));
}

const BoundKernel* kernel_for(const Checked<int64_t>& call, const Results& results,
                              const Operator& with, bool on_cuda) {
  const auto takes_all = [&](const BoundKernel& kernel, bool widened) {
    for (size_t p = 0; p < kernel.sources.size(); ++p) {
      const Parameter& parameter = kernel.entry.parameters[p];
      if (parameter.kind != Parameter::kTensor) continue;
      const auto [from, index] = kernel.sources[p];
      const bool is_result = from == Source::kResult;
      const int line = is_result ? with.result_lines[index] : index < 0 ? -2 - index : index;
      const Tensor& x = is_result   ? results[index]
                        : index < 0 ? *call.gradients[line]
                                    : *call.tensors[line];
      if (!fits(x, parameter.type, call.text.lines[line], widened)) return false;
    }
    return true;
  };
  for (const bool widened : {false, true})
    for (const BoundKernel& kernel : with.kernels)
      if (kernel.is_cuda == on_cuda && takes_all(kernel, widened)) return &kernel;
  return nullptr;
}

// The tensor that a kernel gets for an argument: of the number type and the strides that it takes.
const Tensor& as_taken(const Line& line, const Tensor& x, const Parameter& parameter,
                       std::list<Tensor>& made) {
  const Tensor* found = &x;
  if (x.scalar_type() != scalar_type(parameter.type))
    found = &made.emplace_back(x.to(scalar_type(parameter.type)));
  if (found->is_contiguous()) return *found;
  if (parameter.is_strided && (!line.in_columns || found->mT().is_contiguous())) return *found;
  return made.emplace_back(found->contiguous());
}

// Sizes and strides of a tensor in the first shape of its line, which a kernel sees.
void lay_out(const Checked<int64_t>& call, const Line& line, const Shape* given, const Tensor& x,
             int p, Storage& storage) {
  Slot& slot = storage.slots[p];
  const Shape& seen = line.shapes[0];
  if (!given || given == &seen) {
    slot.shape = x.sizes().data();
    slot.stride = x.strides().data();
    return;
  }
  auto &shape = storage.shape[p], &stride = storage.stride[p];
  const std::vector<int> from = contract::dimensions_of(seen, *given);
  int64_t count = 1;
  for (size_t d = seen.size(); d-- > 0;) {
    if (from.empty()) {  // the same elements in other dimensions: x is contiguous
      shape[d] = call.value(seen[d]);
      stride[d] = count;
      count *= shape[d];
    } else {
      shape[d] = from[d] < 0 ? 1 : x.size(from[d]);
      stride[d] = from[d] < 0 ? 0 : x.stride(from[d]);
    }
  }
  slot.shape = shape.data();
  slot.stride = stride.data();
}

void set_number(const Line& line, Parameter::Kind kind, const IValue& value, Slot& slot,
                Storage& storage) {
  const auto set_list = [&](const auto& list) {
    slot.data = const_cast<void*>(static_cast<const void*>(list.data()));
    slot.integer = int64_t(list.size());
  };
  switch (kind) {
    case Parameter::kInt:
      slot.integer = value.toInt();
      break;
    case Parameter::kFloat:
      slot.real = value.toDouble();
      break;
    case Parameter::kBool:
      slot.integer = value.toBool();
      break;
    case Parameter::kString:
      slot.data = const_cast<char*>(value.toStringRef().c_str());
      break;
    case Parameter::kChoice: {
      const auto& choices = line.choices;
      slot.integer =
          std::find(choices.begin(), choices.end(), value.toStringRef()) - choices.begin();
      break;
    }
    case Parameter::kInts:
      set_list(storage.integers.emplace_back(value.toIntVector()));
      break;
    default:
      set_list(storage.numbers.emplace_back(value.isNone() ? std::vector<double>()
                                                           : value.toDoubleVector()));
  }
}

// What a kernel's parameters are in a call.
void fill_slots(const Checked<int64_t>& call, const BoundKernel& kernel, const Results& results,
                void* stream, Storage& storage) {
  static char empty[64];
  const auto set_tensor = [&](int p, const Line& line, const Shape* given, const Tensor& x,
                              void* data) {
    storage.slots[p].data = data ? data : empty;  // a tensor without elements is there, too
    lay_out(call, line, given, x, p, storage);
  };
  for (size_t p = 0; p < kernel.sources.size(); ++p) {
    const Parameter& parameter = kernel.entry.parameters[p];
    const Source source = kernel.sources[p];
    Slot& slot = storage.slots[p] = {};
    if (source.from == Source::kWorkspace) continue;
    if (source.from == Source::kStream) {
      slot.data = stream;
    } else if (source.from == Source::kResult) {
      if (!results[source.index].defined()) continue;
      const int index = call.op.result_lines[source.index];
      const Line& line = call.text.lines[index];
      const Tensor* x = &results[source.index];
      if (x->scalar_type() != scalar_type(parameter.type)) {
        const Tensor wide = at::empty_like(*x, x->options().dtype(scalar_type(parameter.type)));
        x = &storage.narrowed.emplace_back(*x, wide).second;
      }
      const Shape* given = call.op.is_backward ? call.shapes[index] : &call.shape_of(line);
      set_tensor(int(p), line, given, *x, x->mutable_data_ptr());
    } else if (parameter.kind == Parameter::kTensor) {
      const bool is_gradient = source.index < 0;
      const int index = is_gradient ? -2 - source.index : source.index;
      const Tensor& x = is_gradient ? *call.gradients[index] : *call.tensors[index];
      if (!x.defined()) continue;
      const Line& line = call.text.lines[index];
      const Shape* given = is_gradient ? &call.shape_of(line) : call.shapes[index];
      Parameter taken_as = parameter;
      if (given && given != &line.shapes[0])
        taken_as.is_strided &= !contract::dimensions_of(line.shapes[0], *given).empty();
      const Tensor& taken = as_taken(line, x, taken_as, storage.owned);
      set_tensor(int(p), line, given, taken, const_cast<void*>(taken.const_data_ptr()));
    } else {
      const Line& line = call.text.lines[source.index];
      const int position = call.op.argument[source.index];
      if (position < 0)
        slot.integer = line.absent;
      else
        set_number(line, parameter.kind, call.stack[position], slot, storage);
    }
  }
}

void run_slots(const Checked<int64_t>& call, const BoundKernel& kernel, const Storage& storage) {
  const Outcome outcome = kernel.entry.run(kernel.entry.function, storage.slots.data());
  TORCH_CHECK(!outcome.error, call.op.name, ": CUDA error: ", outcome.error);
  if (outcome.wrong >= 0) refuse_position(call, outcome.wrong);
}

void narrow_results(const Storage& storage) {
  for (const auto& [result, written] : storage.narrowed) result.copy_(written);
}

void run_on_cpu(const Checked<int64_t>& call, const BoundKernel& kernel, const Results& results) {
  if (!kernel.entry.checks_entries) check_entries(call);
  if (wants_checks()) check_made(call);
  Storage storage;
  fill_slots(call, kernel, results, nullptr, storage);
  run_slots(call, kernel, storage);
  narrow_results(storage);
}

// The device's current cudaStream_t, from PyTorch's C interface: this unit includes no CUDA, and
// c10::Stream::native_handle() is younger than PyTorch 2.10.
void* current_stream(c10::Device device) {
  using Function = int32_t (*)(int32_t device_index, void** stream);
  static const Function get = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Function>(found);
  }();
  void* stream = nullptr;
  TORCH_CHECK(get && get(device.index(), &stream) == 0, "calcops: no current CUDA stream");
  return stream;
}

void run_on_cuda(const Checked<int64_t>& call, const BoundKernel& kernel, const Results& results) {
  const c10::DeviceGuard guard(call.first->device());
  void* stream = current_stream(call.first->device());
  // A graph that is being captured cannot wait for the answer.
  if (wants_checks() && !(kernel.entry.is_capturing && kernel.entry.is_capturing(stream))) {
    check_entries(call);
    check_made(call);
  }
  Storage storage;
  fill_slots(call, kernel, results, stream, storage);
  Workspace workspace{nullptr, 0};
  bool needs_workspace = false;
  for (size_t p = 0; p < kernel.sources.size(); ++p)
    if (kernel.sources[p].from == Source::kWorkspace) {
      storage.slots[p].data = &workspace;
      needs_workspace = true;
    }
  Tensor memory;
  if (needs_workspace) {
    run_slots(call, kernel, storage);
    memory =
        at::empty({std::max<int64_t>(workspace.bytes, 1)}, call.first->options().dtype(at::kByte));
    workspace.data = memory.mutable_data_ptr();
  }
  run_slots(call, kernel, storage);
  narrow_results(storage);
}

void push_results(const Operator& op, Results& results, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.count);
  for (size_t i = 0; i < op.result_lines.size(); ++i) stack->push_back(std::move(results[i]));
}

// An operator without kernels uses those of the one in its contract that takes all it takes.
const Operator& with_kernels(const Operator& op) {
  if (!op.kernels.empty()) return op;
  for (const Operator& other : op.family->operators)
    if (!other.kernels.empty() && other.is_backward == op.is_backward &&
        other.result_lines.size() >= op.result_lines.size() &&
        std::equal(op.result_lines.begin(), op.result_lines.end(), other.result_lines.begin()))
      return other;
  return op;
}

// An error that names what asks for so much, where the CPU has too little memory: the largest
// number among the arguments. Otherwise the exception that is being handled.
[[noreturn]] void refuse_memory(const Operator& op, const IValue* stack) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
  } catch (const c10::Error& error) {
    if (!std::strstr(error.what_without_backtrace(), "can't allocate memory")) throw;
  }
  const Line* largest = nullptr;
  int64_t most = -1;
  const auto look = [&](const Line& line, const SymInt& number) {
    const int64_t size = known(number);
    if (size <= most) return;
    most = size;
    largest = &line;
  };
  const auto& lines = op.family->text.lines;
  for (const int i : op.number_lines)
    if (op.argument[i] >= 0) look(lines[i], stack[op.argument[i]].toSymInt());
  for (const int i : op.list_lines)
    if (!lines[i].items.empty())
      for (const SymInt& size : stack[op.argument[i]].toSymIntVector()) look(lines[i], size);
  TORCH_CHECK(largest, op.name, ": expected arguments for which memory suffices");
  TORCH_CHECK(false, op.name, ": expected `", largest->name, "` for which memory suffices, got ",
              stack[op.argument[largest - lines.data()]]);
}

template <bool on_cuda>
void run_here(const Operator& op, torch::jit::Stack* stack) {
  Results results;
  const IValue* const first = stack->data() + stack->size() - op.count;
  try {
    Checked<int64_t> call(op, first);
    std::list<Tensor> made;
    for (size_t i = 0; on_cuda && i < call.text.lines.size(); ++i)
      if (call.text.lines[i].made_on_cuda && op.argument[i] >= 0 && !call.tensors[i]->defined()) {
        call.tensors[i] = &made.emplace_back(made_for(call, call.text.lines[i]));
      }
    results = call.results();
    if (const BoundKernel* kernel = kernel_for(call, results, with_kernels(op), on_cuda)) {
      on_cuda ? run_on_cuda(call, *kernel, results) : run_on_cpu(call, *kernel, results);
    } else {
      TORCH_CHECK(!on_cuda || !op.family->without_cuda, op.name, ": built without CUDA because ",
                  op.family->without_cuda);
      TORCH_CHECK(false, op.name, ": no kernel for ", on_cuda ? "CUDA" : "the CPU",
                  " and these dtypes is registered");
    }
    for (size_t i = 0; i < op.result_lines.size(); ++i)
      if (!results[i].defined()) results[i] = call.nothing();
  } catch (...) {
    refuse_memory(op, first);
  }
  push_results(op, results, stack);
}

void run_on_meta(const Operator& op, torch::jit::Stack* stack) {
  Results results;
  const IValue* const first = stack->data() + stack->size() - op.count;
  try {
    const Checked<SymInt> call(op, first);
    results = call.results();
    for (size_t i = 0; i < op.result_lines.size(); ++i)
      if (!results[i].defined()) results[i] = call.nothing();
  } catch (...) {
    refuse_memory(op, first);
  }
  push_results(op, results, stack);
}

// A composition's arguments are checked as a kernel's.
void run_composition(const Operator& op, torch::jit::Stack* stack) {
  const IValue* const first = stack->data() + stack->size() - op.count;
  Value result;
  try {
    const Checked<SymInt> call(op, first);
    std::vector<Value> arguments;
    for (int i = 0; i < op.count; ++i) arguments.push_back(value_of(first[i]));
    result = op.composition(arguments.data());
  } catch (...) {
    refuse_memory(op, first);
  }
  torch::jit::drop(*stack, op.count);
  stack->push_back(ivalue_of(result));
}

// ---- vmap ---------------------------------------------------------------------------------------

// The dimension of a shape that vmap joins; -1: none.
int joined_dimension(const contract::Text& text, const Shape& shape) {
  for (size_t d = 0; d < shape.size(); ++d)
    if (contains(text.joined, contract::bare(shape[d]))) return int(d);
  return -1;
}

// Names [items, ...] below `count` as names of the joined rows. What is wrong stays wrong.
Tensor shifted(const Tensor& names, const SymInt& items, const SymInt& count) {
  const Tensor wide = names.to(at::kLong);
  Tensor step = at::arange(items, wide.options()).mul(c10::Scalar(count));
  while (step.dim() < wide.dim()) step = step.unsqueeze(-1);
  const Tensor outside = at::where(wide.eq(-1), -1, c10::Scalar(count * items));
  return at::where(wide.ge(0).logical_and(wide.lt(count)), wide.add(step), outside);
}

// One call for each item.
tensor_list vmap_one_by_one(Call call, const SymInt& items) {
  const int64_t count = items.guard_int(__FILE__, __LINE__);
  TORCH_CHECK(count > 0, call.op.schema().name(), ": expected vmap over a dimension with items");
  std::vector<tensor_list> found;
  for (int64_t item = 0; item < count; ++item) {
    Call one = call;
    for (IValue& argument : one.arguments)
      if (argument.isTensor()) argument = argument.toTensor().select(0, item);
    const tensor_list results = one.run();
    found.resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) found[i].push_back(results[i]);
  }
  tensor_list results;
  for (const tensor_list& items_ : found) results.push_back(at::stack(items_));
  return results;
}

// A call under vmap: all tensors are [items, ...].
struct Mapped {
  const Operator& op;
  const contract::Text& text;
  Call call;
  SymInt items;
  std::array<const Shape*, kMost> shapes{};  // of one item's tensors, by line
  std::vector<SymInt> counts;                // the sizes of one item that are joined
  uint32_t given = 0;                        // those for which a tensor has a dimension
  bool fits = true;                          // each tensor has one of its shapes

  Mapped(const Operator& op, Call given_call, const SymInt& items)
      : op(op),
        text(op.family->text),
        call(std::move(given_call)),
        items(items),
        counts(text.sizes.size(), 0) {
    // Of one item: afterwards nothing tells, where there are no items.
    for (size_t i = 0; i < text.lines.size(); ++i)
      if (const Line& line = text.lines[i]; line.size >= 0 && !line.is_tensor())
        counts[line.size] =
            op.argument[i] < 0 ? SymInt(line.absent) : call.arguments[op.argument[i]].toSymInt();
    for (uint32_t gaps = text.gaps; gaps; gaps &= gaps - 1) counts[__builtin_ctz(gaps)] = 1;
    for (const bool of_others : {false, true})
      for (size_t i = 0; i < text.lines.size(); ++i)
        if (const Line& line = text.lines[i]; line.is_tensor())
          for (const int position : {op.argument[i], op.gradient[i]})
            if (position >= 0 && call.arguments[position].isTensor())
              if (of_others == (position == op.gradient[i] || line.shape_of >= 0))
                look_at(int(i), position, of_others);
  }

  void look_at(int i, int position, bool of_others) {
    const Line& line = text.lines[i];
    const Tensor& x = call.arguments[position].toTensor();
    const Shape* shape = nullptr;
    if (of_others && line.shapes.size() > 1) {
      const int other = line.shape_of;
      shape = other >= 0 && op.argument[other] >= 0 ? shapes[other] : &result_shape(line);
    } else {
      for (const Shape& each : line.shapes)
        if (!shape && int64_t(each.size()) == x.dim() - 1) shape = &each;
    }
    fits &= shape && int64_t(shape->size()) == x.dim() - 1;
    if (!fits) return;
    shapes[i] = shape;
    if (!of_others) given |= line.shape_sizes[shape - line.shapes.data()];
    const int d = joined_dimension(text, *shape);
    if (d < 0) return;
    const int size = contract::bare((*shape)[d]);
    const SymInt count = x.sym_size(d + 1);
    if (!(line.or_one >> size & 1)) {
      counts[size] = count;
    } else if (count.maybe_as_int() != 1) {
      const auto before = counts[size].maybe_as_int();
      fits &= before == 1 || !before || !count.maybe_as_int() || before == count.maybe_as_int();
      counts[size] = count;
    }
  }

  const Shape& result_shape(const Line& line) const {
    for (size_t k = 0; k < line.shapes.size(); ++k)
      if (!(line.shape_sizes[k] & line.some_sizes & ~given)) return line.shapes[k];
    return line.shapes.back();
  }

  // [items, ...] with a dimension of 1 for each one of the line's first shape that is not there.
  static Tensor with_all_dimensions(Tensor x, const Shape& shape, const Line& line) {
    const std::vector<int> from = contract::dimensions_of(line.shapes[0], shape);
    for (size_t d = 0; d < from.size(); ++d)
      if (from[d] < 0) x = x.unsqueeze(int64_t(d) + 1);
    return x;
  }

  Tensor join(const Tensor& x, int i) const {
    const Line& line = text.lines[i];
    Tensor names = with_all_dimensions(x, *shapes[i], line);
    const Shape& shape = names.dim() == x.dim() ? *shapes[i] : line.shapes[0];
    const int d = joined_dimension(text, shape);
    if (line.has_entries)
      if (const int size = contract::bare(line.entries.below); contains(text.joined, size))
        names = shifted(x, items, counts[size]);
    if (const int size = contract::bare(shape[d]); line.or_one >> size & 1) {
      c10::SymDimVector all(names.sym_sizes());
      all[d + 1] = counts[size];
      names = names.expand_symint(all);
    }
    return names.movedim(0, d).flatten(d, d + 1);
  }

  // The items of a result.
  Tensor separate(const Tensor& result, size_t i) const {
    const int index = op.result_lines[i];
    const Line& line = text.lines[index];
    const Shape *given_shape = op.is_backward ? shapes[index] : &result_shape(line),
                *shape = nullptr;
    for (const Shape& each : line.shapes)
      if (!shape && int64_t(each.size()) == result.dim()) shape = &each;
    if (!shape)  // nobody wants it
      return result.unflatten_symint(0, {items, 0});
    const int d = joined_dimension(text, *shape), size = contract::bare((*shape)[d]);
    Tensor each = result.unflatten_symint(d, {items, counts[size]}).movedim(d, 0);
    const std::vector<int> from =
        given_shape ? contract::dimensions_of(line.shapes[0], *given_shape) : std::vector<int>();
    // An input that served all has the sum of their gradients.
    if (op.is_backward && line.or_one >> size & 1) {
      const Tensor& input = call.arguments[op.argument[index]].toTensor();
      const int at = joined_dimension(text, *given_shape);
      const SymInt count = at < 0 ? SymInt(1) : input.sym_size(at + 1);
      if (count.sym_ne(counts[size]).guard_bool(__FILE__, __LINE__))
        each = each.sum(d + 1, /*keepdim=*/true);
    }
    for (size_t k = from.size(); k-- > 0;)
      if (from[k] < 0) each = each.squeeze(int64_t(k) + 1);
    return each;
  }
};

// One call for all items: what is joined lies side by side, as do the rows that entries name.
tensor_list vmap_joined(const Operator& op, const Call& given, const SymInt& items) {
  const Mapped mapped(op, given, items);
  if (!mapped.fits) return vmap_one_by_one(given, items);  // which says what is wrong
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
      argument = IValue();  // one for all items is made where it is needed
    } else if (argument.isTensor()) {
      argument = mapped.join(argument.toTensor(), int(i));
    } else if (line.is_tensor() && line.has_entries &&
               contains(text.joined, contract::bare(line.entries.below))) {
      // All entries are 0 where there are none, and differ from now on.
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

// ---- registration -------------------------------------------------------------------------------

struct Run final : c10::OperatorKernel {
  using Function = void (*)(const Operator&, torch::jit::Stack*);
  Run(const Operator* op, Function function) : op(op), function(function) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    function(*op, stack);
  }
  const Operator* op;
  Function function;
};

// Derivatives by the formulas of a source, which knows Values.
class Formulas final : public Derivatives {
 public:
  Formulas(const Operator& op, const Derivative& formula) : op_(op), formula_(formula) {}

  // What is not differentiable is refused: a gradient would be dropped without a word.
  void check(const Call& call, const std::vector<bool>& differentiated) const override {
    const auto& lines = op_.family->text.lines;
    const auto first = std::find(differentiated.begin(), differentiated.end(), true);
    const auto refuse = [&](const Line& line, const std::string& what, const auto& got) {
      const size_t argument = first - differentiated.begin();
      TORCH_CHECK(false, op_.name, ": expected `", line.name, "` ", what, " where `",
                  call.op.schema().arguments()[argument].name(), "` has a derivative, got ", got);
    };
    for (const int i : op_.choice_lines) {
      const std::string& got = call.arguments[op_.argument[i]].toStringRef();
      std::vector<std::string> others;
      for (const std::string& choice : lines[i].choices)
        if (!contains(lines[i].without_derivative, choice)) others.push_back(quoted(choice));
      if (contains(lines[i].without_derivative, got)) refuse(lines[i], listed(others), quoted(got));
    }
    for (const int result : op_.result_lines) {
      const int like = lines[result].like;
      if (like < 0 || op_.argument[like] < 0) continue;
      const at::ScalarType type = tensor_or_none(call.arguments[op_.argument[like]]).scalar_type();
      if (!c10::isFloatingType(type)) refuse(lines[like], "of a floating dtype", type);
    }
  }

  bool depends_on(size_t argument) const override {
    return !formula_.unused || op_.parsed.arguments()[argument].name() != formula_.unused;
  }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    std::vector<Value> gradients(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      if (!wanted[i]) gradients[i] = false;
    formula_.vjp(values_of(call.arguments).data(), values_of(upstream).data(), gradients.data());
    return tensors_of(gradients);
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(formula_.jvp, op_.name,
                                ": its derivative has no formula for forward mode");
    std::vector<Value> results(call.op.schema().returns().size());
    formula_.jvp(values_of(call.arguments).data(), values_of(tangents).data(), results.data());
    return tensors_of(results);
  }

 private:
  template <class Item>
  static std::vector<Value> values_of(const std::vector<Item>& items) {
    std::vector<Value> values;
    for (const Item& item : items) values.push_back(value_of(IValue(item)));
    return values;
  }

  static tensor_list tensors_of(const std::vector<Value>& values) {
    tensor_list tensors;
    for (const Value& value : values) tensors.push_back(tensor_or_none(ivalue_of(value)));
    return tensors;
  }

  const Operator& op_;
  const Derivative& formula_;
};

struct Differentiate final : c10::OperatorKernel {
  explicit Differentiate(const Derivatives* derivatives) : derivatives(derivatives) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    differentiate(*derivatives, op, keys, stack);
  }
  const Derivatives* derivatives;
};

struct Vmap final : c10::OperatorKernel {
  explicit Vmap(const Operator* op) : op(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet,
                  torch::jit::Stack* stack) {
    vmap(
        [this](Call call, const SymInt& items) {
          return op->family->text.joined.empty() ? vmap_one_by_one(std::move(call), items)
                                                 : vmap_joined(*op, call, items);
        },
        handle, stack);
  }
  const Operator* op;
};

void read_operator(Family& family, const contract::Schema& schema, const ContractEntry& entry) {
  const contract::Text& text = family.text;
  Operator& op = family.operators.emplace_back(
      Operator{&family, &schema, "", torch::schema(schema.text.c_str())});
  const std::string& name = op.parsed.name();
  op.name = name.find("::") == std::string::npos ? family.name_space + "::" + name : name;
  op.is_backward = name.size() > 9 && name.compare(name.size() - 9, 9, "_backward") == 0;
  op.count = int(op.parsed.arguments().size());
  for (int i = 0; i < entry.composition_count; ++i)
    if (name == entry.compositions[i].op) op.composition = entry.compositions[i].function;
  for (int i = 0; i < entry.derivative_count; ++i)
    if (name == entry.derivatives[i].op)
      op.formulas = std::make_unique<Formulas>(op, entry.derivatives[i]);
  op.argument.fill(-1);
  op.gradient.fill(-1);
  for (int i = 0; i < op.count; ++i) {
    const c10::Argument& argument = op.parsed.arguments()[i];
    const std::string& called = argument.name();
    if (argument.alias_info())
      family.fail(schema.number, name + " would change `" + called + "`; return a result instead");
    if (called == "output_mask") {
      op.mask = i;
      op.lines.push_back(-1);
      continue;
    }
    int line = text.line(called);
    if (line < 0 && op.is_backward && contract::begins(called, "grad_"))
      if (line = text.line(called.substr(5)); line >= 0) {
        op.gradient[line] = i;
        op.lines.push_back(-2 - line);
        continue;
      }
    const std::string type = argument.type()->annotation_str();
    const bool is_tensor = type.find("Tensor") != std::string::npos;
    if (line < 0)
      family.fail(schema.number, name + " has `" + called + "`, which no line describes");
    if (is_tensor && !text.lines[line].is_tensor() && !op.composition)
      family.fail(text.lines[line].number, "`" + called + "`: expected its shape, such as [N, 3]");
    op.argument[line] = i;
    op.optional[line] = argument.type()->kind() == c10::TypeKind::OptionalType;
    op.lines.push_back(line);
  }
}

// Results are the lines that are nobody's arguments, in order, unless the schema names them.
void read_results(Family& family) {
  const contract::Text& text = family.text;
  std::vector<int> results;
  for (size_t i = 0; i < text.lines.size(); ++i) {
    bool is_result = text.lines[i].is_tensor();
    for (const Operator& op : family.operators) is_result &= op.argument[i] < 0;
    if (is_result) results.push_back(int(i));
  }
  for (Operator& op : family.operators) {
    const auto& returns = op.parsed.returns();
    if (returns.size() > Results().size())
      family.fail(op.schema->number, "more than " + std::to_string(Results().size()) + " results");
    for (size_t i = 0; i < returns.size(); ++i) {
      int line = text.line(returns[i].name());
      if (line < 0 && op.composition) break;
      if (line < 0) {
        const auto& lines = op.is_backward ? family.input_lines : results;
        if (i >= lines.size())
          family.fail(op.schema->number, "no line describes result " + std::to_string(i + 1) +
                                             " of " + op.parsed.name());
        line = lines[i];
      }
      op.result_lines.push_back(line);
    }
  }
}

// The lines that a call has to look at.
void read_order(Operator& op) {
  const contract::Text& text = op.family->text;
  for (size_t i = 0; i < text.lines.size(); ++i) {
    const Line& line = text.lines[i];
    const bool is_argument = op.argument[i] >= 0;
    if (line.size >= 0 && !line.is_tensor()) op.number_lines.push_back(int(i));
    if (is_argument && line.is_tensor())
      (line.shape_of < 0 ? op.tensor_lines : op.shaped_lines).push_back(int(i));
    if (is_argument && !line.choices.empty()) op.choice_lines.push_back(int(i));
    if (is_argument && (!line.items.empty() || line.count_or_one >= 0))
      op.list_lines.push_back(int(i));
    if (is_argument && !line.exclusions.empty()) op.exclusion_lines.push_back(int(i));
    if (op.gradient[i] >= 0) op.gradient_lines.push_back(int(i));
    if (is_argument && !line.limits.empty()) op.limit_lines.push_back(int(i));
    if (is_argument && line.has_entries) op.entry_lines.push_back(int(i));
  }
  for (const int result : op.result_lines) {
    op.needs.emplace_back();
    for (size_t t = 0; t < text.terms.size(); ++t)
      if (text.terms[t].result == text.lines[result].name)
        op.needs.back() = op.family->term_lines[t];
  }
}

// Every size of a result must be known from the arguments.
void check_sizes(const Family& family, const Operator& op) {
  const contract::Text& text = family.text;
  std::vector<bool> is_known(text.sizes.size());
  for (size_t i = 0; i < text.lines.size(); ++i) {
    const Line& line = text.lines[i];
    if (line.size >= 0) is_known[line.size] = true;
    if (op.argument[i] >= 0)
      for (const int size : line.items) is_known[size] = true;
    if (op.argument[i] < 0 || !line.is_tensor()) continue;
    for (const Sum& dim : line.shapes[0])
      for (const contract::Product& product : dim)
        if (product.factor == 1 && product.sizes.size() == 1) is_known[product.sizes[0]] = true;
    if (line.whole >= 0) is_known[line.whole] = true;
  }
  for (const int result : op.result_lines)
    for (const int size : text.lines[result].names)
      if (!is_known[size] && !op.is_backward)
        family.fail(text.lines[result].number,
                    "no argument of " + op.parsed.name() + " has the size " + text.sizes[size] +
                        " of the result `" + text.lines[result].name + "`");
}

const char* kept(Family& family, std::string text) {
  family.names.push_back(std::move(text));
  return family.names.back().c_str();
}

// A composition or a derivative of no operator would never be called.
void check_names_of(const Family& family, const ContractEntry& entry) {
  const auto check = [&](const char* name, const char* what) {
    for (const Operator& op : family.operators)
      if (op.parsed.name() == name) return;
    family.fail(1, c10::str("a ", what, " of ", name, ", which no schema names"));
  };
  for (int i = 0; i < entry.composition_count; ++i) check(entry.compositions[i].op, "composition");
  for (int i = 0; i < entry.derivative_count; ++i) check(entry.derivatives[i].op, "derivative");
}

void read_derivatives(Family& family) {
  contract::Text& text = family.text;
  if (text.terms.empty()) return;
  for (const Operator& op : family.operators)
    if (op.is_backward) family.backward = op.name;
  if (family.backward.empty())
    family.fail(
        1, "`linear` needs the operator that gives the gradients, its name ending in _backward");
  family.forward = family.backward.substr(0, family.backward.size() - 9);
  const auto has = [&](const std::string& name) {
    for (const Operator& op : family.operators)
      if (op.name == name) return true;
    return false;
  };
  if (!has(family.forward)) {  // _x_backward of x
    const size_t at = family.forward.rfind("::_");
    if (at != std::string::npos) family.forward.erase(at + 2, 1);
  }
  if (!has(family.forward))
    family.fail(1, "no operator " + family.forward + " beside " + family.backward);
  std::vector<Multilinear::Term> terms;
  for (const contract::Term& term : text.terms) {
    terms.push_back({"grad_" + term.result});
    family.term_lines.emplace_back();
    for (const std::string& factor : term.factors) {
      const int line = text.line(factor);
      terms.back().push_back(factor);
      family.term_lines.back().push_back(line);
      if (!contains(family.input_lines, line)) family.input_lines.push_back(line);
    }
  }
  family.derivatives = std::make_unique<Multilinear>(kept(family, family.forward),
                                                     kept(family, family.backward), terms);
}

// Where no line says what vmap joins, it is the first size of all tensors, if they share one that
// has no other part in the contract.
void read_vmap(Family& family) {
  contract::Text& text = family.text;
  if (!text.says_vmap) {
    int common = -2;
    const auto agree = [&](int size) { common = common == -2 || common == size ? size : -1; };
    for (const Line& line : text.lines) {
      for (const Shape& shape : line.shapes) {
        agree(shape.empty() ? -1 : contract::bare(shape[0]));
        for (size_t d = 1; d < shape.size(); ++d)
          for (const contract::Product& product : shape[d])
            if (contains(product.sizes, common)) common = -1;
      }
      if (line.size >= 0 && line.size == common) common = -1;
      for (const contract::Product& product : line.entries.below)
        if (contains(product.sizes, common)) common = -1;
    }
    if (common >= 0) text.joined = {common};
    return;
  }
  for (const Line& line : text.lines)
    for (const Shape& shape : line.shapes)
      if (joined_dimension(text, shape) < 0 && line.made_by.empty() &&
          (joined_dimension(text, line.shapes[0]) < 0 ||
           contract::dimensions_of(line.shapes[0], shape).empty()))
        family.fail(line.number, "`" + line.name + "` has no dimension that vmap joins");
}

// Matches a kernel's parameters with the arguments and results of its operator.
BoundKernel bind(const Operator& op, const KernelEntry& kernel) {
  const Family& family = *op.family;
  BoundKernel bound{kernel, {}, false};
  std::vector<Source> expected;
  for (size_t i = 0; i < op.lines.size(); ++i)
    if (op.lines[i] != -1) expected.push_back({Source::kArgument, op.lines[i]});
  for (size_t i = 0; i < op.result_lines.size(); ++i) expected.push_back({Source::kResult, int(i)});
  size_t next = 0;
  for (int p = 0; p < kernel.count; ++p) {
    const Parameter& parameter = kernel.parameters[p];
    if (parameter.kind == Parameter::kWorkspace || parameter.kind == Parameter::kStream) {
      bound.is_cuda |= parameter.kind == Parameter::kStream;
      bound.sources.push_back(
          {parameter.kind == Parameter::kStream ? Source::kStream : Source::kWorkspace, 0});
      continue;
    }
    const auto fail = [&](const std::string& what) {
      family.fail(op.schema->number, "parameter " + std::to_string(p + 1) + " of a kernel of " +
                                         op.parsed.name() + ": " + what);
    };
    if (next == expected.size()) fail("there are no more arguments and results");
    const Source source = expected[next++];
    const bool is_result = source.from == Source::kResult;
    const int index = is_result          ? op.result_lines[source.index]
                      : source.index < 0 ? -2 - source.index
                                         : source.index;
    const Line& line = family.text.lines[index];
    const bool is_tensor = parameter.kind == Parameter::kTensor;
    if (is_tensor != line.is_tensor())
      fail(std::string("expected ") + (line.is_tensor() ? "a View" : "a number or string") +
           " for `" + line.name + "`");
    if (is_tensor && parameter.rank != int(line.shapes[0].size()))
      fail("expected " + std::to_string(line.shapes[0].size()) + " dimensions for `" + line.name +
           "`, got " + std::to_string(parameter.rank));
    if (is_tensor && parameter.is_written != is_result)
      fail(is_result
               ? "expected a View of numbers that are not const for the result `" + line.name + "`"
               : "expected a View of const numbers for the argument `" + line.name + "`");
    if (parameter.kind == Parameter::kChoice && line.choices.empty())
      fail("expected the choices of `" + line.name + "`, such as \"a\" or \"b\"");
    bound.sources.push_back(source);
  }
  if (next != expected.size())
    family.fail(op.schema->number, "a kernel of " + op.parsed.name() + " has " +
                                       std::to_string(next) + " parameters for " +
                                       std::to_string(expected.size()) + " arguments and results");
  return bound;
}

void take_kernels(Family& family) {
  for (Operator& op : family.operators) {
    const auto waiting = kernels_waiting().find(op.name);
    if (waiting == kernels_waiting().end()) continue;
    for (const KernelEntry& kernel : waiting->second) op.kernels.push_back(bind(op, kernel));
    kernels_waiting().erase(waiting);
  }
}

void define(torch::Library& m, Operator& op) {
  using torch::CppFunction;
  const Family& family = *op.family;
  const std::string name = op.name.substr(op.name.find("::") + 2);
  m.def(c10::FunctionSchema(op.parsed));
  const auto impl = [&](c10::DispatchKey key, CppFunction&& function) {
    m.impl(name.c_str(), torch::dispatch(key, std::move(function)));
  };
  const auto running = [&](Run::Function function) {
    return CppFunction::makeFromBoxedFunctor(std::make_unique<Run>(&op, function));
  };
  if (op.composition) {
    // vmap does not look for compositions, so it stands under that key too.
    impl(c10::DispatchKey::CompositeImplicitAutograd, running(&run_composition));
    impl(c10::DispatchKey::FuncTorchBatched, running(&run_composition));
    return;
  }
  impl(c10::DispatchKey::CPU, running(&run_here<false>));
  impl(c10::DispatchKey::CUDA, running(&run_here<true>));
  impl(c10::DispatchKey::Meta, running(&run_on_meta));
  const Derivatives* derivatives = op.formulas ? op.formulas.get() : family.derivatives.get();
  impl(c10::DispatchKey::Autograd,
       derivatives ? CppFunction::makeFromBoxedFunctor(std::make_unique<Differentiate>(derivatives))
                   : torch::autograd::autogradNotImplementedFallback());
  impl(c10::DispatchKey::FuncTorchBatched,
       CppFunction::makeFromBoxedFunctor(std::make_unique<Vmap>(&op)));
}

// Whether an operator has a kernel for some number types, a type for each line that names its own.
bool has_kernel(const Operator& op, const std::map<int, Type>& types) {
  const auto& lines = op.family->text.lines;
  for (const BoundKernel& kernel : op.kernels) {
    bool fits = !kernel.is_cuda;
    for (size_t p = 0; p < kernel.sources.size() && fits; ++p) {
      const Parameter& parameter = kernel.entry.parameters[p];
      const Source source = kernel.sources[p];
      if (parameter.kind != Parameter::kTensor) continue;
      int line = source.from == Source::kResult ? op.result_lines[source.index]
                 : source.index < 0             ? -2 - source.index
                                                : source.index;
      while (lines[line].like >= 0) line = lines[line].like;
      const Type read_as = lines[line].read_as, type = types.at(line);
      const bool is_widened =
          parameter.type == Type::kFloat32 && (type == Type::kFloat16 || type == Type::kBFloat16);
      fits = parameter.type == (read_as == Type::kNone ? type : read_as) ||
             (read_as == Type::kNone && is_widened);
    }
    if (fits) return true;
  }
  return false;
}

// Every combination of number types that the contract allows has a kernel on the CPU.
void check_kernels(const Operator& op, std::map<int, Type> types = {}, size_t from = 0) {
  const Family& family = *op.family;
  const auto& lines = family.text.lines;
  for (size_t i = from; i < lines.size(); ++i) {
    if (lines[i].types.empty()) continue;
    for (const Type type : lines[i].types) {
      bool is_excluded = false;
      for (const contract::Exclusion& exclusion : lines[i].exclusions)
        if (contains(exclusion.when.in, op.schema->name))
          for (const Type other : exclusion.types) is_excluded |= type == other;
      if (is_excluded) continue;
      types[int(i)] = type;
      check_kernels(op, types, i + 1);
    }
    return;
  }
  if (has_kernel(op, types)) return;
  std::string which;
  for (const auto& [line, type] : types)
    if (lines[line].types.size() > 1)
      which += (which.empty() ? " for " : ", ") + lines[line].name + ' ' +
               c10::toString(scalar_type(type));
  family.fail(op.schema->number, "no kernel of " + op.parsed.name() + which);
}

// A loaded library has all its kernels; only then what is missing is known.
void check_all_kernels() {
  for (const auto& [op, kernels] : kernels_waiting())
    TORCH_CHECK(false, "a kernel of ", op, ", which no contract names");
  for (const Family& family : families())
    for (const Operator& op : family.operators) {
      if (op.composition) continue;
      if (with_kernels(op).kernels.empty())
        family.fail(op.schema->number, "no kernel of " + op.parsed.name());
      if (!op.kernels.empty()) check_kernels(op);
    }
}

std::deque<ContractEntry>& contracts_waiting() {
  static auto* waiting = new std::deque<ContractEntry>;
  return *waiting;
}

void define_waiting(torch::Library&) {
  if (contracts_waiting().empty()) return;

  while (!contracts_waiting().empty()) {
    const ContractEntry entry = contracts_waiting().front();
    contracts_waiting().pop_front();
    Family& family = families().emplace_back();
    family.name_space = entry.name_space;
    family.file = entry.file;
    family.line = entry.line;
    family.without_cuda = entry.without_cuda;
    try {
      family.text = contract::Reader(entry.text).read();
    } catch (const contract::Mistake& mistake) {
      TORCH_CHECK(false, entry.file, ":", entry.line, ": contract, ", mistake.what());
    }
    if (family.text.lines.size() > kMost || family.text.sizes.size() > kMost)
      family.fail(1, "more than " + std::to_string(kMost) + " lines or sizes");
    for (const contract::Schema& schema : family.text.schemas) read_operator(family, schema, entry);
    check_names_of(family, entry);
    read_derivatives(family);
    read_results(family);
    read_vmap(family);
    for (Operator& op : family.operators) {
      read_order(op);
      check_sizes(family, op);
    }
    take_kernels(family);
    for (Operator& op : family.operators) {
      torch::Library library(torch::Library::FRAGMENT, op.name.substr(0, op.name.find("::")),
                             std::nullopt, family.file.c_str(), uint32_t(family.line));
      define(library, op);
    }
  }
  if (calcops_jit::Registry::here().held) check_all_kernels();
}

// What help() shows below the schema.
std::string documentation(const Operator& op) {
  std::string text = op.schema->summary + '\n';
  const auto add = [&](const char* title, const std::vector<int>& lines) {
    text += title;
    for (const int line : lines)
      if (line >= 0) text += '\n' + op.family->text.lines[line].text;
    text += '\n';
  };
  add("", op.lines);
  if (!op.result_lines.empty()) add("\nReturns", op.result_lines);
  return op.schema->details.empty() ? text : text + '\n' + op.schema->details + '\n';
}

}  // namespace

Value::Value(decltype(nullptr)) : value_(new IValue()) {}
Value::Value(int64_t number) : value_(new IValue(number)) {}
Value::Value(double number) : value_(new IValue(number)) {}
Value::Value(bool flag) : value_(new IValue(flag)) {}
Value::Value(const char* text) : value_(new IValue(std::string(text))) {}
Value::Value(const Value& other) : value_(new IValue(ivalue_of(other))) {}
Value::~Value() { delete static_cast<IValue*>(value_); }

Value& Value::operator=(const Value& other) {
  *static_cast<IValue*>(value_) = ivalue_of(other);
  return *this;
}

bool Value::is_none() const {
  const IValue& value = ivalue_of(*this);
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

bool Value::is_tensor() const { return ivalue_of(*this).isTensor(); }

bool Value::is_wanted() const { return !ivalue_of(*this).isBool(); }

bool Value::is_readable() const {
  const Tensor& x = ivalue_of(*this).toTensor();
  return !x.is_meta() && !x.key_set().has_any(c10::DispatchKeySet(
                             {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                              c10::DispatchKey::Functionalize}));
}

int64_t Value::item() const {
  const IValue& value = ivalue_of(*this);
  if (value.isBool()) return value.toBool();
  return value.isTensor() ? value.toTensor().item().toLong() : value.toInt();
}

int Value::dim() const { return int(ivalue_of(*this).toTensor().dim()); }

bool Value::equals(int64_t number) const {
  return ivalue_of(*this).toSymInt().sym_eq(number).guard_bool(__FILE__, __LINE__);
}

bool Value::is(const char* text) const { return ivalue_of(*this).toStringRef() == text; }

Value Value::shape() const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_sizes().vec()));
}

Value Value::size(int dimension) const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_size(dimension)));
}

Value Value::dtype() const { return value_of(IValue(ivalue_of(*this).toTensor().scalar_type())); }

Value Value::dtype_name() const {
  return value_of(IValue(c10::toString(ivalue_of(*this).toTensor().scalar_type())));
}

Value Value::dtype_of(Type type) { return value_of(IValue(scalar_type(type))); }

bool Value::is_integral() const {
  return at::isIntegralType(ivalue_of(*this).toTensor().scalar_type(), /*includeBool=*/false);
}

Value Value::device() const { return value_of(IValue(ivalue_of(*this).toTensor().device())); }

Value Value::operator[](int i) const {
  const IValue& value = ivalue_of(*this);
  if (value.isTuple()) return value_of(value.toTupleRef().elements()[i]);
  if (value.isBoolList()) return bool(value.toBoolList()[i]);
  if (value.isDoubleList()) return value.toDoubleVector()[i];
  return value_of(IValue(value.toSymIntVector()[i]));
}

int Value::length() const { return int(ivalue_of(*this).toListRef().size()); }

Value Value::call_in(const char* name_space, const char* op, const Value* values, int count) {
  std::string name = op;
  if (name.find("::") == std::string::npos) name = std::string(name_space) + "::" + name;
  const size_t dot = name.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
  const auto& arguments = handle.schema().arguments();
  torch::jit::Stack stack;
  for (int i = 0; i < count; ++i) stack.push_back(ivalue_of(values[i]));
  for (size_t i = count; i < arguments.size(); ++i)
    stack.push_back(arguments[i].default_value().value_or(IValue()));
  handle.callBoxed(&stack);
  if (stack.size() == 1) return value_of(std::move(stack[0]));
  return value_of(c10::ivalue::Tuple::create(std::move(stack)));
}

Value Value::list_of(const Value* values, int count) {
  if (count > 0 && ivalue_of(values[0]).isTensor()) {
    c10::List<Tensor> list;
    for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toTensor());
    return value_of(IValue(std::move(list)));
  }
  if (count > 0 && ivalue_of(values[0]).isBool()) {
    c10::List<bool> list;
    for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toBool());
    return value_of(IValue(std::move(list)));
  }
  std::vector<SymInt> list;
  for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toSymInt());
  return value_of(IValue(std::move(list)));
}

void refuse(const char* op, const char* argument, const char* what, const Value& got) {
  const IValue& value = ivalue_of(got);
  TORCH_CHECK(false, op, ": expected `", argument, "` ", what, ", got ",
              value.isString() ? value.toStringRef() : c10::str(value));
}

Value operator+(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::add.Tensor" : "aten::add.Scalar", a, b);
  if (y.isTensor()) return b + a;
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() + y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() + y.toSymInt()));
}

Value operator*(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::mul.Tensor" : "aten::mul.Scalar", a, b);
  if (y.isTensor()) return b * a;
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() * y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() * y.toSymInt()));
}

Value operator-(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::sub.Tensor" : "aten::sub.Scalar", a, b);
  if (y.isTensor()) return Value::call("aten::rsub.Scalar", b, a);
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() - y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() - y.toSymInt()));
}

Value operator/(const Value& a, const Value& b) {
  const IValue& y = ivalue_of(b);
  return Value::call(y.isTensor() ? "aten::div.Tensor" : "aten::div.Scalar", a, b);
}

void add_contract(const ContractEntry& contract) {
  contracts_waiting().push_back(contract);
  calcops_jit::Initializer({torch::Library::FRAGMENT, &define_waiting, contract.name_space,
                            std::nullopt, contract.file, uint32_t(contract.line)});
}

void add_kernel(const KernelEntry& kernel) {
  const std::string op = kernel.op;
  const bool is_qualified = op.find("::") != std::string::npos;
  kernels_waiting()[is_qualified ? op : std::string(kernel.name_space) + "::" + op].push_back(
      kernel);
  for (Family& family : families()) take_kernels(family);
}

}  // namespace calcops

// What the loader asks: the name and the documentation of every operator with a contract.
extern "C" __attribute__((visibility("default"), used)) const char* calcops_jit_documentation() {
  static auto* text = new std::string;
  text->clear();
  for (const calcops::Family& family : calcops::families())
    for (const calcops::Operator& op : family.operators)
      *text += op.name + '\n' + calcops::documentation(op) + '\x1e';
  return text->c_str();
}
