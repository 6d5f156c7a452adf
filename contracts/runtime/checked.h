// Checks one call of an operator against its contract, collects the sizes and allocates the
// results.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "operators.h"

namespace calcops {
namespace {

// Sizes are int64_t. Under torch.compile and torch.export they are SymInt, which may be symbols.
// The functions below exist for both, so that a check is written once.

// Return whether a condition holds. A condition of symbols becomes an assertion of the graph.
bool holds(bool ok) { return ok; }
bool holds(const c10::SymBool& ok) { return ok.expect_true(__FILE__, __LINE__); }
// Return a condition. One of symbols becomes a guard of the graph; with unbacked symbols it is an
// error.
bool guarded(bool ok) { return ok; }
bool guarded(const c10::SymBool& ok) { return ok.guard_bool(__FILE__, __LINE__); }
bool equal(int64_t a, int64_t b) { return a == b; }
c10::SymBool equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b); }
bool both(bool a, bool b) { return a && b; }
c10::SymBool both(const c10::SymBool& a, const c10::SymBool& b) { return a.sym_and(b); }
bool below(int64_t a, int64_t b) { return a < b; }
bool below(double a, double b) { return a < b; }
c10::SymBool below(const SymInt& a, const SymInt& b) { return a.sym_lt(b); }
bool at_most(int64_t a, int64_t b) { return a <= b; }
bool at_most(double a, double b) { return a <= b; }
c10::SymBool at_most(const SymInt& a, const SymInt& b) { return a.sym_le(b); }
// Return a size, or 0 if it is a symbol without a value.
int64_t value_or_zero(int64_t a) { return a; }
int64_t value_or_zero(const SymInt& a) { return a.maybe_as_int().value_or(0); }
// Sums and products that do not fit into 64 bits are sizes for which no memory suffices.
int64_t sum_of(int64_t a, int64_t b) {
  if (__builtin_add_overflow(a, b, &a)) throw std::bad_alloc();
  return a;
}
int64_t product_of(int64_t a, int64_t b) {
  if (__builtin_mul_overflow(a, b, &a)) throw std::bad_alloc();
  return a;
}
SymInt sum_of(const SymInt& a, const SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? SymInt(sum_of(*x, *y)) : a + b;
}
SymInt product_of(const SymInt& a, const SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? SymInt(product_of(*x, *y)) : a * b;
}
// The second argument of these selects the type of the result.
auto sizes_in(const Tensor& x, int64_t) { return x.sizes(); }
auto sizes_in(const Tensor& x, const SymInt&) { return x.sym_sizes(); }
int64_t integer(const IValue& x, int64_t) { return x.toInt(); }
SymInt integer(const IValue& x, const SymInt&) { return x.toSymInt(); }
std::vector<int64_t> integers(const IValue& x, int64_t) { return x.toIntVector(); }
std::vector<SymInt> integers(const IValue& x, const SymInt&) { return x.toSymIntVector(); }
Tensor make(at::ArrayRef<int64_t> shape, const at::TensorOptions& options) {
  // On the CPU, the dispatcher would take as long as the allocation.
  return options.device().is_cpu() ? at::cpu::empty(shape, options) : at::empty(shape, options);
}
Tensor make(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint(shape, options);
}

// Return the device's current cudaStream_t. It comes from PyTorch's C interface, because this unit
// includes no CUDA headers, and PyTorch 2.10 lacks c10::Stream::native_handle().
void* current_stream(c10::Device device) {
  using Function = int32_t (*)(int32_t device_index, void** stream);
  static const Function get = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Function>(symbol);
  }();
  void* stream = nullptr;
  TORCH_CHECK(get && get(device.index(), &stream) == 0, "calcops: no current CUDA stream");
  return stream;
}

// Return whether CALCOPS_CHECK=1. While a CUDA graph is captured, the host cannot wait for the GPU.
bool wants_checks(const Tensor& x) {
  const char* wanted = std::getenv("CALCOPS_CHECK");
  if (!wanted || std::strcmp(wanted, "1") != 0) return false;
  return !(x.is_cuda() && is_capturing && is_capturing(current_stream(x.device())));
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

// One call. The constructor checks it. Int is int64_t, or SymInt if sizes may be symbols.
template <class Int>
struct Checked {
  const Operator& op;
  const contract::Text& text;
  IValue* stack;                              // the arguments
  std::array<const Tensor*, kMost> tensors;   // the arguments by their line in the contract
  std::array<const Tensor*, kMost> of_group;  // the first tensor of each group of dtypes
  std::array<const Line*, kMost> group_line;  // and its line
  std::array<Int, kMost> sizes;               // the values of the contract's sizes
  const Line* first_line = nullptr;           // of the first tensor that is given
  const Tensor* first_tensor = &kNone;
  uint32_t has_value = 0;                    // sizes that have a value, a bit each
  std::array<const Shape*, kMost> shapes{};  // of each line's tensor; nullptr: its first shape
  // That the operator's Check sets.
  c10::SmallVector<Value, contract::kMostResults> result_shapes;

  Checked(const Operator& op, IValue* stack) : op(op), text(op.family->text), stack(stack) {
    for (size_t i = 0; i < text.lines.size(); ++i) tensors[i] = of_group[i] = &kNone;

    for (const int i : op.numbers) check_number(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.tensors) check_argument(i, stack[op.argument[i]]);
    for (const int i : op.strings) check_choice(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.tensors)
      for (const contract::Limit& limit : text.lines[i].limits) check_limit(limit, i);
    if (!op.check) return;
    result_shapes.resize(op.result_lines.size());
    op.check(reinterpret_cast<Value*>(stack), result_shapes.data());
    for (const int i : op.tensors)  // that the Check gave
      if (!tensors[i]->defined()) check_argument(i, stack[op.argument[i]]);
    for (size_t i = 0; i < result_shapes.size(); ++i) {
      const Line& line = text.lines[op.result_lines[i]];
      const IValue& shape = ivalue_of(result_shapes[i]);
      const bool is_set = shape.isIntList() || shape.isSymIntList();
      const bool is_open = line.any_shape && !op.has(op.result_lines[i]);
      TORCH_CHECK(is_open ? is_set : shape.isNone(), op.name, ": its Check must ",
                  is_open ? "set" : "not set", " the shape of `", line.name,
                  "`, a list of sizes, got a ", shape.tagKind());
    }
  }

  // Throw "op: expected `name` what, got ...".
  template <class Got>
  [[noreturn]] void refuse(const std::string& name, const std::string& what, const Got& got) const {
    TORCH_CHECK(false, op.name, ": expected `", name, "` ", what, ", got ", got);
  }

  // Return the value of a sum of products of sizes.
  Int value(const Sum& sum) const {
    if (const int size = contract::bare(sum); size >= 0) return sizes[size];
    Int total = 0;
    for (const contract::Product& product : sum) {
      Int term = product.factor;
      for (const int size : product.sizes) term = product_of(term, sizes[size]);
      total = sum_of(total, term);
    }
    return total;
  }

  void set_size(int size, Int value) {
    sizes[size] = std::move(value);
    has_value |= 1u << size;
  }

  // ---- numbers, strings and lists ---------------------------------------------------------------

  void check_number(const Line& line, const IValue& value) {
    if (op.at_line(int(&line - text.lines.data())).kind == contract::Kind::kFloat) {
      for (const contract::Bound& bound : line.bounds)
        check_bound(line, bound, value.toDouble(), bound.real);
      return;
    }
    const Int number = integer(value, Int());
    for (const contract::Bound& bound : line.bounds) {
      // No tensor is as large as an upper bound of a symbol, which needs no guard.
      const bool is_upper =
          bound.compare == contract::Compare::kLess || bound.compare == contract::Compare::kAtMost;
      if (is_upper && value_or_zero(number) == 0 && bound.integer > 0) continue;
      check_bound(line, bound, number, Int(bound.integer));
    }
    if (line.size >= 0) set_size(line.size, number);
  }

  template <class Number>
  static bool meets(contract::Compare compare, const Number& a, const Number& b) {
    switch (compare) {
      case contract::Compare::kLess:
        return holds(below(a, b));
      case contract::Compare::kAtMost:
        return holds(at_most(a, b));
      case contract::Compare::kMore:
        return holds(below(b, a));
      default:
        return holds(at_most(b, a));
    }
  }

  template <class Number>
  void check_bound(const Line& line, const contract::Bound& bound, const Number& got,
                   const Number& limit) const {
    if (meets(bound.compare, got, limit)) return;
    static constexpr const char* kSigns[] = {"< ", "of at most ", "> ", ">= "};
    refuse(line.name, kSigns[int(bound.compare)] + bound.text, got);
  }

  void check_choice(const Line& line, const IValue& value) const {
    const std::string& got = value.toStringRef();
    if (contains(line.choices, got)) return;
    std::vector<std::string> choices;
    for (const std::string& choice : line.choices) choices.push_back(quoted(choice));
    refuse(line.name, joined_by_or(choices), quoted(got));
  }

  // ---- tensors ----------------------------------------------------------------------------------

  void check_argument(int i, const IValue& value) {
    const Line& line = text.lines[i];
    tensors[i] = &tensor_or_none(value);
    if (tensors[i]->defined())
      check_tensor(line, *tensors[i]);
    else if (!op.at_line(i).optional)
      refuse(line.name, "of shape " + line.shape_text, "none");
  }

  void check_tensor(const Line& line, const Tensor& x) {
    if (!line.is_tensor()) return;  // the optional tensor of a composition, which checks it
    const Tensor*& like = of_group[line.group];
    const contract::Line& root = text.lines[line.group];
    if (like->defined()) {
      if (x.scalar_type() != like->scalar_type())
        refuse(line.name,
               c10::str("of dtype ", like->scalar_type(), " like `", group_line[line.group]->name,
                        "`"),
               x.scalar_type());
    } else {
      bool ok = false;
      for (const Type type : root.types) ok |= x.scalar_type() == scalar_type(type);
      if (!ok) refuse(line.name, root.type_text, x.scalar_type());
    }
    const Tensor& same_device = like->defined() ? *like : *first_tensor;
    if (same_device.defined() && x.device() != same_device.device())
      refuse(line.name,
             c10::str("on ", same_device.device(), " like `",
                      (like->defined() ? group_line[line.group] : first_line)->name, "`"),
             x.device());
    if (!like->defined()) {
      like = &x;
      group_line[line.group] = &line;
    }
    if (!first_tensor->defined()) {
      first_tensor = &x;
      first_line = &line;
    }
    if (!line.any_shape) check_shape(line, x);
  }

  void check_shape(const Line& line, const Tensor& x) {
    const uint32_t had_value = has_value;
    const auto shape = sizes_in(x, Int());
    const Shape* chosen = nullptr;
    for (const Shape& each : line.shapes)
      if (!chosen && fits(line, each, shape)) chosen = &each;
    shapes[&line - text.lines.data()] = chosen;
    if (!chosen || !matches(line, *chosen, shape))
      refuse(line.name, "of shape " + line.shape_text + sizes_text(line, had_value), shape);
  }

  // Return whether a shape has the tensor's rank. Of several shapes of a rank, one is selected by
  // its dimensions that are numbers.
  template <class Sizes>
  bool fits(const Line& line, const Shape& want, const Sizes& shape) const {
    if (want.size() != shape.size()) return false;
    if (line.shapes.size() == 1) return true;
    for (size_t d = 0; d < shape.size(); ++d)
      if (want[d].size() == 1 && want[d][0].sizes.empty())
        if (!guarded(equal(shape[d], Int(want[d][0].factor)))) return false;
    return true;
  }

  // Return whether a shape is the wanted one. Set the sizes that have no value yet.
  template <class Sizes>
  bool matches(const Line& line, const Shape& want, const Sizes& shape) {
    auto ok = equal(Int(0), Int(0));
    for (size_t d = 0; d < want.size(); ++d) {
      if (const uint32_t unknown = contract::sizes_of(want[d]) & ~has_value; !unknown) {
        ok = both(ok, equal(shape[d], value(want[d])));
      } else {
        // The dimension is a size plus known ones. With 0 for the size, value() is their sum.
        const int size = __builtin_ctz(unknown);
        sizes[size] = 0;
        set_size(size, sum_of(Int(shape[d]), product_of(Int(-1), value(want[d]))));
        if (want[d].size() > 1) ok = both(ok, at_most(Int(0), sizes[size]));
      }
    }
    if (line.whole >= 0 && !(contract::sizes_of(line.parts) & ~has_value)) {
      const Int parts = value(line.parts);
      if (has_value >> line.whole & 1)
        ok = both(ok, equal(sizes[line.whole], parts));
      else
        set_size(line.whole, parts);
    }
    return holds(ok);
  }

  // Return the values of a shape's sizes for an error message. `had_value` are the sizes that
  // earlier arguments determine. If these are all sizes of the only shape, the text is like
  // " = [23, 3]", otherwise like ", [N] = [23]".
  std::string sizes_text(const Line& line, uint32_t had_value) const {
    std::vector<std::string> names, numbers, dimensions;
    uint32_t named = 0;
    for (const Shape& shape : line.shapes)
      for (const Sum& dim : shape)
        for (const contract::Product& product : dim)
          for (const int size : product.sizes) {
            if (!(named >> size & 1) && had_value >> size & 1) {
              names.push_back(text.sizes[size]);
              numbers.push_back(c10::str(sizes[size]));
            }
            named |= 1u << size;
          }
    if (line.shapes.size() == 1 && !(named & ~had_value)) {
      for (const Sum& dim : line.shapes[0]) dimensions.push_back(c10::str(value(dim)));
      return " = [" + c10::Join(", ", dimensions) + "]";
    }
    if (names.empty()) return "";
    return ", [" + c10::Join(", ", names) + "] = [" + c10::Join(", ", numbers) + "]";
  }

  void check_limit(const contract::Limit& limit, int i) const {
    if (meets_limit(limit, i)) return;
    const bool is_dimension = contract::bare(limit.sum) >= 0;
    refuse(text.lines[i].name, "with " + limit.text,
           is_dimension ? c10::str(sizes_in(*tensors[i], Int())) : c10::str(value(limit.sum)));
  }

  bool meets_limit(const contract::Limit& limit, int i) const {
    const Tensor& x = *tensors[i];
    if (!x.defined() || (limit.on_cuda && !x.is_cuda())) return true;
    return meets(limit.bound.compare, value(limit.sum), Int(limit.bound.integer));
  }

  // ---- results ----------------------------------------------------------------------------------

  // Allocate the results. Those that are not wanted stay undefined.
  Results results() const {
    Results allocated;
    for (size_t i = 0; i < op.result_lines.size(); ++i)
      if (op.is_wanted(stack, i))
        allocated[i] = make(at::ArrayRef<Int>(result_shape(i)), options_of(i));
    return allocated;
  }

  // Return the shape of a result. One that is also an argument has the shape of that.
  c10::SmallVector<Int, 5> result_shape(size_t i) const {
    c10::SmallVector<Int, 5> shape;
    const int index = op.result_lines[i];
    const Line& line = text.lines[index];
    if (op.has(index)) {
      if (!tensors[index]->defined()) refuse(line.name, "where its gradient is wanted", "none");
      for (const Int& size : sizes_in(*tensors[index], Int())) shape.push_back(size);
      return shape;
    }
    if (line.any_shape)
      for (const Int& size : integers(ivalue_of(result_shapes[i]), Int())) shape.push_back(size);
    else
      for (const Sum& dim : line.shapes[0]) shape.push_back(value(dim));
    int64_t bytes = 8;  // of a number of the widest dtype
    for (const Int& size : shape) {
      if (!holds(at_most(Int(0), size)))
        refuse(first_line->name, "large enough for a result " + line.shape_text,
               sizes_in(*first_tensor, Int()));
      // A size of 0 counts as 1: the strides of an empty result are products of the other sizes.
      bytes = product_of(bytes, std::max<int64_t>(value_or_zero(size), 1));
    }
    if (bytes >= kMostBytes) throw std::bad_alloc();
    return shape;
  }

  at::TensorOptions options_of(size_t i) const {
    const int index = op.result_lines[i];
    if (op.has(index) && tensors[index]->defined()) return tensors[index]->options();
    const int group = text.lines[index].group;
    if (of_group[group]->defined()) return of_group[group]->options();
    return first_tensor->options().dtype(scalar_type(text.lines[group].types[0]));
  }

  // Return the empty tensor that stands for an unwanted result.
  Tensor nothing(size_t i) const { return at::empty({0}, options_of(i)); }
};

}  // namespace
}  // namespace calcops
