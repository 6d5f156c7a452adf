// Checks one call of an operator against its contract, collects the sizes and allocates the
// results.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>

#include "operators.h"

namespace calcops {
namespace {

// Sizes are SymInts. Under torch.compile and torch.export they may be symbols.

// Return a size, or 0 if it is a symbol without a value.
int64_t value_or_zero(const SymInt& a) {
  return a.is_heap_allocated() ? a.maybe_as_int().value_or(0) : a.as_int_unchecked();
}

// Set x and y to the values of two sizes, and return true, unless one is a symbol. Integers below
// -2^62 are on the heap, like symbols.
bool have_values(const SymInt& a, const SymInt& b, int64_t& x, int64_t& y) {
  if (contract::are_integers(a, b)) {
    x = a.as_int_unchecked();
    y = b.as_int_unchecked();
    return true;
  }
  const auto first = a.maybe_as_int(), second = b.maybe_as_int();
  x = first.value_or(0);
  y = second.value_or(0);
  return first && second;
}

// Sums and products that do not fit into 64 bits are sizes for which no memory suffices.
SymInt sum_of(const SymInt& a, const SymInt& b) {
  int64_t x, y;
  if (!have_values(a, b, x, y)) return a + b;
  if (__builtin_add_overflow(x, y, &x)) throw std::bad_alloc();
  return x;
}
SymInt product_of(const SymInt& a, const SymInt& b) {
  int64_t x, y;
  if (!have_values(a, b, x, y)) return a * b;
  if (__builtin_mul_overflow(x, y, &x)) throw std::bad_alloc();
  return x;
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

std::string quoted(const std::string& text) { return '"' + text + '"'; }

// Return the digits that distinguish a number from all others, as Python does.
std::string digits_of(double number) {
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.begin(), digits.end(), number);
  return {digits.begin(), end.ptr};
}
const SymInt& digits_of(const SymInt& number) { return number; }

// One call. The constructor checks it.
struct Checked {
  const Operator& op;
  const contract::Text& text;
  IValue* stack;                             // the arguments
  std::array<const Tensor*, kMost> tensors;  // the arguments by their line in the contract
  std::array<int, kMost> first_of;           // the line of the first tensor of each group of dtypes
  int first = -1;                            // the line of the first tensor that is given
  std::array<SymInt, kMost> sizes;           // the values of the contract's sizes
  c10::SymDimVector leading;                 // the dimensions of `...`
  uint32_t has_value = 0;                    // sizes that have a value, a bit each
  std::array<const Shape*, kMost> shapes{};  // of each line's tensor; nullptr: its first shape
  // That the operator's Check sets.
  c10::SmallVector<Value, 4> result_shapes;

  Checked(const Operator& op, IValue* stack) : op(op), text(op.text()), stack(stack) {
    tensors.fill(&kNone);
    first_of.fill(-1);
    for (const int i : op.numbers) check_number(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.tensors) check_argument(i);
    for (const int i : op.strings) check_choice(text.lines[i], stack[op.argument[i]]);
    for (const int i : op.tensors)
      for (const contract::Limit& limit : text.lines[i].limits) check_limit(limit, i);
    if (op.check) run_check();
  }

  // Throw "op: expected `name` what, got ...".
  template <class Got>
  [[noreturn]] void refuse(const std::string& name, const std::string& what, const Got& got) const {
    TORCH_CHECK(false, op.name, ": expected `", name, "` ", what, ", got ", got);
  }

  // Return the value of a sum of products of sizes.
  SymInt value(const Sum& sum) const {
    if (const int size = contract::bare(sum); size >= 0) return sizes[size];
    if (sum.size() == 1 && sum[0].sizes.empty()) return sum[0].factor;
    SymInt total = 0;
    for (const contract::Product& product : sum) {
      SymInt term = product.factor;
      for (const int size : product.sizes) term = product_of(term, sizes[size]);
      total = sum_of(total, term);
    }
    return total;
  }

  void set_size(int size, SymInt value) {
    sizes[size] = std::move(value);
    has_value |= 1u << size;
  }

  // ---- numbers and strings ----------------------------------------------------------------------

  void check_number(const Line& line, const IValue& value) {
    if (value.isNone()) return;
    if (value.isDouble()) {
      for (const contract::Bound& bound : line.bounds)
        check_bound(line, bound, value.toDouble(), bound.real);
      return;
    }
    const SymInt number = value.toSymInt();
    for (const contract::Bound& bound : line.bounds) {
      // No tensor is as large as an upper bound of a symbol, which needs no guard.
      const bool is_upper =
          bound.compare == contract::Compare::kLess || bound.compare == contract::Compare::kAtMost;
      if (is_upper && value_or_zero(number) == 0 && bound.integer > 0) continue;
      check_bound(line, bound, number, SymInt(bound.integer));
    }
    if (line.size < 0) return;
    if (!contract::is_at_most(0, number)) refuse(line.name, ">= 0", number);
    set_size(line.size, number);
  }

  template <class Number>
  void check_bound(const Line& line, const contract::Bound& bound, const Number& got,
                   const Number& limit) const {
    if (contract::meets(bound.compare, got, limit)) return;
    static constexpr const char* kSigns[] = {"< ", "of at most ", "> ", ">= "};
    refuse(line.name, kSigns[int(bound.compare)] + bound.text, digits_of(got));
  }

  void check_choice(const Line& line, const IValue& value) const {
    const std::string& got = value.toStringRef();
    const size_t count = line.choices.size();
    if (count == 0) return;  // compositions may take any string
    std::string choices;     // "a", "b" or "c"
    for (size_t i = 0; i < count; ++i) {
      if (got == line.choices[i]) return;
      choices += (i == 0 ? "" : i + 1 < count ? ", " : " or ") + quoted(line.choices[i]);
    }
    refuse(line.name, choices, quoted(got));
  }

  // ---- tensors ----------------------------------------------------------------------------------

  void check_argument(int i) {
    const Line& line = text.lines[i];
    const Tensor& x = tensor_or_none(stack[op.argument[i]]);
    tensors[i] = &x;
    if (x.defined()) {
      check_dtype(i, x);
      if (!line.any_shape) check_shape(i, x);
    } else if (!op.may_be_absent(i)) {
      refuse(line.name, (line.any_shape ? "" : "of shape ") + line.shape_text, "none");
    }
  }

  // Check dtype and device.
  void check_dtype(int i, const Tensor& x) {
    const Line& line = text.lines[i];
    int& like = first_of[line.group];
    if (like >= 0) {
      const auto type = tensors[like]->scalar_type();
      if (x.scalar_type() != type)
        refuse(line.name,
               c10::str("of dtype ", dtype_name(*tensors[like]), " like `", text.lines[like].name,
                        "`"),
               dtype_name(x));
    } else {
      const contract::Line& root = text.lines[line.group];
      bool is_allowed = false;
      for (const Type type : root.types) is_allowed |= x.scalar_type() == scalar_type(type);
      if (!is_allowed) refuse(line.name, root.type_text, dtype_name(x));
    }
    const int other = like >= 0 ? like : first;
    if (other >= 0 && x.device() != tensors[other]->device())
      refuse(line.name,
             c10::str("on ", tensors[other]->device(), " like `", text.lines[other].name, "`"),
             x.device());
    if (like < 0) like = i;
    if (first < 0) first = i;
  }

  void check_shape(int i, const Tensor& x) {
    const Line& line = text.lines[i];
    const uint32_t had_value = has_value;
    const auto shape = x.sym_sizes();
    for (const Shape& each : line.shapes)
      if (!shapes[i] && fits(line, each, shape)) shapes[i] = &each;
    if (!shapes[i] || !matches(line, *shapes[i], shape))
      refuse(line.name, "of shape " + line.shape_text + sizes_text(line, had_value), shape);
    if (shapes[i] == &line.shapes[0]) return;
    SymInt count = 1;  // of numbers in the first shape, which the kernel receives
    for (const Sum& dim : line.shapes[0]) count = product_of(count, value(dim));
    TORCH_CHECK(contract::is_equal(x.sym_numel(), count), op.name, ": the shapes ", line.shape_text,
                " of `", line.name, "` differ in their number of elements");
  }

  // Return whether a shape has the tensor's rank. Of several shapes of a rank, one is selected by
  // its dimensions that are numbers. A comparison with a symbol becomes a guard of the graph.
  bool fits(const Line& line, const Shape& want, c10::SymIntArrayRef shape) const {
    if (line.has_leading) return shape.size() + 1 >= want.size();
    if (want.size() != shape.size()) return false;
    if (line.shapes.size() == 1) return true;
    for (size_t d = 0; d < shape.size(); ++d)
      if (want[d].size() == 1 && want[d][0].sizes.empty())
        if (!shape[d].sym_eq(want[d][0].factor).guard_bool(__FILE__, __LINE__)) return false;
    return true;
  }

  // Return whether a shape is the wanted one. Set the sizes that have no value yet.
  bool matches(const Line& line, const Shape& want, c10::SymIntArrayRef shape) {
    if (line.has_leading) {
      const size_t count = shape.size() + 1 - want.size();
      if (!matches_leading(shape.slice(0, count))) return false;
      shape = shape.slice(count);
    }
    for (size_t d = line.has_leading; d < want.size(); ++d) {
      const SymInt& got = shape[d - line.has_leading];
      const uint32_t unknown = contract::sizes_of(want[d]) & ~has_value;
      if (!unknown) {
        if (!contract::is_equal(got, value(want[d]))) return false;
        continue;
      }
      const int size = __builtin_ctz(unknown);
      set_size(size, got);
      if (want[d].size() == 1) continue;
      // The dimension is a size plus known ones. With 0 for the size, value() is their sum.
      sizes[size] = 0;
      sizes[size] = sum_of(got, product_of(-1, value(want[d])));
      if (!contract::is_at_most(0, sizes[size])) return false;
    }
    if (line.whole < 0 || contract::sizes_of(line.parts) & ~has_value) return true;
    const SymInt parts = value(line.parts);
    if (has_value >> line.whole & 1) return contract::is_equal(sizes[line.whole], parts);
    set_size(line.whole, parts);
    return true;
  }

  // Return whether the dimensions of `...` are the wanted ones. Set them if they have no value yet.
  bool matches_leading(c10::SymIntArrayRef shape) {
    if (has_value >> text.leading & 1) {
      if (shape.size() != leading.size()) return false;
      for (size_t d = 0; d < shape.size(); ++d)
        if (!contract::is_equal(shape[d], leading[d])) return false;
      return true;
    }
    leading.assign(shape.begin(), shape.end());
    SymInt product = 1;
    for (const SymInt& size : shape) product = product_of(product, size);
    set_size(text.leading, product);
    return true;
  }

  // Add a dimension's size to a shape, or all dimensions of `...`.
  void append(const Sum& dim, c10::SymDimVector& shape) const {
    if (text.leading >= 0 && contract::bare(dim) == text.leading)
      shape.append(leading.begin(), leading.end());
    else
      shape.push_back(value(dim));
  }

  // Return the values of a shape's sizes for an error message. `had_value` are the sizes that
  // earlier arguments determine. If these are all sizes of the only shape, the text is like
  // " = [23, 3]", otherwise like ", [N] = [23]".
  std::string sizes_text(const Line& line, uint32_t had_value) const {
    std::vector<std::string> names;
    c10::SymDimVector numbers, dimensions;
    uint32_t named = 0;
    for (const Shape& shape : line.shapes)
      for (const Sum& dim : shape)
        for (const contract::Product& product : dim)
          for (const int size : product.sizes) {
            if (!(named >> size & 1) && had_value >> size & 1) {
              names.push_back(text.sizes[size]);
              append({contract::Product{1, {size}}}, numbers);
            }
            named |= 1u << size;
          }
    if (line.shapes.size() == 1 && !(named & ~had_value)) {
      for (const Sum& dim : line.shapes[0]) append(dim, dimensions);
      return c10::str(" = ", c10::SymIntArrayRef(dimensions));
    }
    if (names.empty()) return "";
    return c10::str(", [", c10::Join(", ", names), "] = ", c10::SymIntArrayRef(numbers));
  }

  void check_limit(const contract::Limit& limit, int i) const {
    const Tensor& x = *tensors[i];
    if (!x.defined() || (limit.on_cuda && !x.is_cuda())) return;
    const SymInt got = value(limit.sum), bound = value(limit.bound);
    if (limit.divisor > 0 ? contract::is_equal(got % limit.divisor, bound)
                          : contract::meets(limit.compare, got, bound))
      return;
    const Line& line = text.lines[i];
    uint32_t shown = 0;  // the sizes that the tensor's shape shows
    for (const Shape& shape : line.shapes) shown |= contract::sizes_of(shape);
    const uint32_t left = contract::sizes_of(limit.sum);
    const bool is_shown = !(left & ~shown) && (!left || contract::bare(limit.sum) >= 0);
    const bool is_other = contract::sizes_of(limit.bound) & ~shown;
    refuse(line.name,
           c10::str("with ", limit.text, is_other ? c10::str(" = ", bound) : "",
                    limit.on_cuda ? " on CUDA" : ""),
           is_shown ? c10::str(x.sym_sizes()) : c10::str(got));
  }

  // ---- the operator's Check ---------------------------------------------------------------------

  void run_check() {
    const size_t results = op.result_lines.size();
    result_shapes.resize(results + kSpare);
    std::vector<IValue> arguments = with_spare(c10::ArrayRef<IValue>(stack, op.count()));
    op.check->function(reinterpret_cast<Value*>(arguments.data()), result_shapes.data());
    for (size_t i = results; i < result_shapes.size(); ++i)
      TORCH_CHECK(ivalue_of(result_shapes[i]).isNone(), op.name, ": expected its Check to set ",
                  results, " shapes, got index ", i);
    result_shapes.resize(results);
    for (const int i : op.tensors) {
      if (tensors[i]->defined()) continue;
      stack[op.argument[i]] = arguments[size_t(op.argument[i])];
      check_argument(i);  // that the Check may have given
      for (const contract::Limit& limit : text.lines[i].limits) check_limit(limit, i);
    }
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

  // ---- results ----------------------------------------------------------------------------------

  Results results() const {
    Results allocated;
    for (size_t i = 0; i < op.result_lines.size(); ++i) {
      const auto shape = result_shape(i);
      const auto options = options_of(i);
      // On the CPU, the dispatcher would take as long as the allocation.
      allocated.push_back(options.device().is_cpu()
                              ? at::cpu::empty(C10_AS_INTARRAYREF_SLOW(shape), options)
                              : at::empty_symint(shape, options));
    }
    return allocated;
  }

  // Return the shape of a result. One that is also an argument has the shape of that. One that is
  // not wanted has no elements.
  c10::SymDimVector result_shape(size_t i) const {
    c10::SymDimVector shape;
    const int index = op.result_lines[i];
    const Line& line = text.lines[index];
    if (!op.is_wanted(stack, i)) {
      shape.push_back(0);
    } else if (op.has(index)) {
      if (!tensors[index]->defined()) refuse(line.name, "where its gradient is wanted", "none");
      for (const SymInt& size : tensors[index]->sym_sizes()) shape.push_back(size);
    } else if (line.any_shape) {
      for (const SymInt& size : ivalue_of(result_shapes[i]).toSymIntVector()) shape.push_back(size);
    } else {
      for (const Sum& dim : line.shapes[0]) append(dim, shape);
    }
    int64_t bytes = 8;  // of a number of the widest dtype
    for (const SymInt& size : shape) {
      if (!contract::is_at_most(0, size)) refuse_result(line);
      // A size of 0 counts as 1: the strides of an empty result are products of the other sizes.
      const int64_t count = std::max<int64_t>(value_or_zero(size), 1);
      if (__builtin_mul_overflow(bytes, count, &bytes) || bytes >= kMostBytes)
        throw std::bad_alloc();
    }
    return shape;
  }

  // Raise the error for a result with a negative size. It names the argument that has the size from
  // which others are subtracted. Of a symbol this is not known, so it names the first tensor.
  [[noreturn]] void refuse_result(const Line& line) const {
    uint32_t minuends = 0, all = 0;
    for (const Sum& dim : line.any_shape ? Shape() : line.shapes[0]) {
      if (value_or_zero(value(dim)) >= 0) continue;
      all |= contract::sizes_of(dim);
      for (const contract::Product& product : dim)
        if (product.factor > 0) minuends |= contract::sizes_of(Sum{product});
    }
    const uint32_t blamed = minuends ? minuends : all;
    const std::string what =
        (minuends || !all ? "large" : "small") + (" enough for a result " + line.shape_text);
    for (const int i : op.numbers)
      if (const int size = text.lines[i].size; size >= 0 && blamed >> size & 1)
        refuse(text.lines[i].name, what, sizes[size]);
    for (const int i : op.tensors)
      for (const Shape& shape : text.lines[i].shapes)
        if (tensors[i]->defined() && contract::sizes_of(shape) & blamed)
          refuse(text.lines[i].name, what, tensors[i]->sym_sizes());
    refuse(text.lines[first].name, what, tensors[first]->sym_sizes());
  }

  // If no tensor of its group is given, a result has the first dtype in the contract.
  at::TensorOptions options_of(size_t i) const {
    const int index = op.result_lines[i], group = text.lines[index].group;
    if (op.has(index) && tensors[index]->defined()) return tensors[index]->options();
    if (first_of[group] >= 0) return tensors[first_of[group]]->options();
    return tensors[first]->options().dtype(scalar_type(text.lines[group].types[0]));
  }
};

}  // namespace
}  // namespace calcops
