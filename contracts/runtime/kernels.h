// Runs a checked call on the CPU, on CUDA or on Meta: selects the kernel, fills its parameters, and
// raises the errors of wrong entries and of too little memory.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <cstdio>
#include <cstring>
#include <list>

#include "checked.h"

namespace calcops {
namespace {

// ---- entries ------------------------------------------------------------------------------------

// Return the sizes of the dimensions that positions count: those named by `at`, or all. If these
// are only the last ones, several entries share a position: the entries [2, E] of edges have E
// positions.
std::vector<int64_t> positions_of(const Checked& call, int i) {
  const Line& line = call.text.lines[i];
  if (line.any_shape) return call.tensors[i]->sizes().vec();
  const Shape& dimensions = line.shapes[0];
  const size_t named = line.entries.positions.size();
  c10::SymDimVector shape;
  for (size_t d = named > 0 ? dimensions.size() - named : 0; d < dimensions.size(); ++d)
    call.append(dimensions[d], shape);
  return C10_AS_INTARRAYREF_SLOW(shape).vec();
}

// Raise the error for the entries at a position. It quotes them, the names of the dimensions and
// the bound with its value.
[[noreturn]] void refuse_entry(const Checked& call, int i, int64_t position) {
  constexpr int64_t kMostQuoted = 8;
  const Line& line = call.text.lines[i];
  const auto shape = positions_of(call, i);
  const Tensor& entries = *call.tensors[i];
  const int64_t count = c10::multiply_integers(shape);
  const Tensor rows = entries.reshape({-1, count});
  std::string got, where;
  for (int64_t row = 0; row < std::min(rows.size(0), kMostQuoted); ++row)
    got += (row == 0 ? "" : ", ") + std::to_string(rows[row][position].item<int64_t>());
  if (rows.size(0) > kMostQuoted) got += ", ...";
  if (rows.size(0) > 1) got = '(' + got + ')';

  // From the last dimension to the first, whose index is what the others leave of the position.
  for (size_t d = shape.size(); d-- > 0;) {
    const int64_t index = d > 0 ? position % shape[d] : position;
    const auto& names = line.entries.positions;  // of the last dimensions
    const size_t unnamed = shape.size() - std::min(shape.size(), names.size());
    const std::string name =
        d < unnamed ? c10::str("dimension ", d) : names[names.size() - shape.size() + d];
    where = c10::str(name, ' ', index, where.empty() ? "" : ", ", where);
    position /= std::max<int64_t>(shape[d], 1);
  }

  const std::string& bound = line.entries.bound;
  const std::string value = c10::str(call.value(line.entries.below));
  call.refuse(line.name, "entries " + line.entries.text + (bound == value ? "" : " = " + value),
              got + (where.empty() ? "" : " at ") + where);
}

// Return for each position of line i whether an entry is wrong.
Tensor wrong_positions(const Checked& call, int i) {
  const contract::Entries& wanted = call.text.lines[i].entries;
  // In a small dtype, the bound could wrap.
  const Tensor entries = call.tensors[i]->to(at::kLong);
  const Tensor wrong = entries.lt(wanted.may_be_none ? -1 : 0)
                           .logical_or(entries.ge(call.value(wanted.below).expect_int()));
  return wrong.reshape({-1, c10::multiply_integers(positions_of(call, i))}).any(0);
}

// Raise an error if an entry is wrong. On CUDA this waits for the GPU.
void check_entries(const Checked& call) {
  for (const int i : call.op.tensors) {
    const Line& line = call.text.lines[i];
    if (!line.has_entries() || !call.tensors[i]->defined() || call.tensors[i]->numel() == 0)
      continue;
    const Tensor positions = wrong_positions(call, i).nonzero();
    if (positions.numel() > 0) refuse_entry(call, i, positions[0].item<int64_t>());
  }
}

// Raise the error for a position that a kernel returned. Kernels count through the positions of all
// lines with entries, one line after the other.
[[noreturn]] void refuse_position(const Checked& call, const int64_t returned) {
  int64_t position = returned;
  for (size_t i = 0; i < call.text.lines.size(); ++i) {
    if (!call.text.lines[i].has_entries() || !call.tensors[i]->defined()) continue;
    const int64_t count = c10::multiply_integers(positions_of(call, int(i)));
    if (position < count && wrong_positions(call, int(i))[position].item<bool>())
      refuse_entry(call, int(i), position);
    position -= count;
    if (position < 0) break;
  }
  TORCH_CHECK(false, call.op.name,
              ": expected its kernel to return the position of a wrong entry, ",
              "or -1 if all are right, got ", returned);
}

// ---- kernels ------------------------------------------------------------------------------------

// The slots of one call (one for each parameter of its kernel), and the memory to which they point.
struct Storage {
  std::array<Slot, kMost + 1> slots{};
  std::list<Tensor> owned;
  std::array<std::array<int64_t, contract::kMostDimensions>, kMost> shape, stride;
  std::list<std::vector<int64_t>> integers;
  std::list<std::vector<double>> numbers;
  // Results of float16 or bfloat16, and the float32 tensors that the kernel writes for them.
  std::list<std::pair<Tensor, Tensor>> narrowed;
};

bool is_narrow(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Return the kernel for number types, or nullptr. A kernel for exactly these types is preferred to
// one of float32 that takes float16 and bfloat16. type_of(group) is Undefined if no tensor of a
// group is given. Then it is the first dtype in the contract, which a result of the group has.
template <class TypeOf>
const BoundKernel* kernel_for(const Operator& op, bool on_cuda, const TypeOf& type_of) {
  const auto takes_all = [&](const BoundKernel& kernel, bool widened) {
    for (const auto& [group, type] : kernel.types) {
      const Line& line = op.text().lines[group];
      if (line.read_as != Type::kNone) continue;
      at::ScalarType given = type_of(group);
      if (given == at::ScalarType::Undefined) given = scalar_type(line.types[0]);
      const bool is_widened = widened && type == Type::kFloat32 && is_narrow(given);
      if (given != scalar_type(type) && !is_widened) return false;
    }
    return true;
  };
  for (const bool widened : {false, true})
    for (const BoundKernel& kernel : op.kernel_owner().kernels)
      if (kernel.is_cuda == on_cuda && takes_all(kernel, widened)) return &kernel;
  return nullptr;
}

// Return an argument with the number type and the layout that a kernel's parameter takes. A copy is
// kept in `made`.
const Tensor& as_taken(const Tensor& x, Type type, Layout layout, std::list<Tensor>& made) {
  const Tensor* converted = &x;
  if (x.scalar_type() != scalar_type(type)) converted = &made.emplace_back(x.to(scalar_type(type)));
  if (layout == Layout::kStrided || converted->is_contiguous()) return *converted;
  if (layout == Layout::kTransposed && converted->dim() > 1 && converted->mT().is_contiguous())
    return *converted;
  return made.emplace_back(converted->contiguous());
}

// Return a tensor of `any shape` with its first dimensions joined if it has more than `rank`. This
// is a view if the strides allow it, as those of a result do.
const Tensor& flattened(const Tensor& x, const Line& line, int rank, std::list<Tensor>& made) {
  const bool has_more = line.any_shape && x.dim() > rank;
  return has_more ? made.emplace_back(x.flatten(0, x.dim() - rank)) : x;
}

// Return whether a kernel sees the tensor of line i, which is contiguous, in another shape: in the
// first one of its line, or with the dimensions of `...` as one.
bool has_other_shape(const Checked& call, int i) {
  const Line& line = call.text.lines[i];
  return line.has_leading || (call.shapes[i] && call.shapes[i] != &line.shapes[0]);
}

// Set the sizes and strides of slot p for the tensor x of line i. A tensor of `any shape` and of
// fewer dimensions than the kernel's View has leading ones of size 1.
void lay_out(const Checked& call, int i, const Tensor& x, int rank, int p, Storage& storage) {
  const Line& line = call.text.lines[i];
  Slot& slot = storage.slots[p];
  slot.shape = x.sizes().data();
  slot.stride = x.strides().data();
  const bool is_other = has_other_shape(call, i);
  if (!is_other && (!line.any_shape || x.dim() == rank)) return;
  auto &shape = storage.shape[p], &stride = storage.stride[p];
  int64_t count = 1;
  for (int d = rank; d-- > 0;) {
    const int64_t own = d - (rank - x.dim());
    shape[d] = is_other ? call.value(line.shapes[0][d]).expect_int() : own < 0 ? 1 : x.size(own);
    stride[d] = is_other || own < 0 ? count : x.stride(own);
    count *= shape[d];
  }
  slot.shape = shape.data();
  slot.stride = stride.data();
}

// Set the slot of an argument that is no tensor.
void set_value(const Line& line, Parameter::Kind kind, const IValue& value, Slot& slot,
               Storage& storage) {
  const auto set_list = [&](const auto& list) {
    slot.data = const_cast<void*>(static_cast<const void*>(list.data()));
    slot.integer = int64_t(list.size());
  };
  if (value.isNone()) return;  // an absent list or number
  if (kind == Parameter::kOptionalInt || kind == Parameter::kOptionalFloat) slot.data = &slot;
  if (kind == Parameter::kFloat || kind == Parameter::kOptionalFloat)
    slot.real = value.toDouble();
  else if (kind == Parameter::kInts)
    set_list(storage.integers.emplace_back(value.toIntVector()));
  else if (kind == Parameter::kFloats)
    set_list(storage.numbers.emplace_back(value.toDoubleVector()));
  else if (kind == Parameter::kChoice)
    slot.integer = std::find(line.choices.begin(), line.choices.end(), value.toStringRef()) -
                   line.choices.begin();
  else
    slot.integer = kind == Parameter::kBool ? value.toBool() : value.toInt();
}

// Fill a slot for each of the kernel's parameters. An operator that uses the kernels of another one
// may have fewer arguments and results.
void fill_slots(const Checked& call, const BoundKernel& kernel, const Results& results,
                Storage& storage) {
  static char empty[64];
  const Operator& owner = call.op.kernel_owner();
  size_t p = 0;
  const auto set_tensor = [&](int i, const Tensor& x, void* data) {
    storage.slots[p].data = data ? data : empty;  // not nullptr, which would be an absent tensor
    lay_out(call, i, x, kernel.parameters[p].rank, int(p), storage);
  };
  for (const int i : owner.lines) {
    if (i < 0) continue;  // output_mask
    const Line& line = call.text.lines[i];
    const Parameter& parameter = kernel.parameters[p];
    if (parameter.kind != Parameter::kTensor) {
      const IValue& value =
          call.op.has(i) ? call.stack[call.op.argument[i]] : *owner.at_line(i).default_value();
      set_value(line, parameter.kind, value, storage.slots[p], storage);
    } else if (const Tensor& x = *call.tensors[i]; x.defined()) {
      const Layout layout = has_other_shape(call, i) ? Layout::kContiguous : parameter.layout;
      const Tensor& taken = flattened(as_taken(x, parameter.type, layout, storage.owned), line,
                                      parameter.rank, storage.owned);
      set_tensor(i, taken, const_cast<void*>(taken.const_data_ptr()));
    }
    ++p;
  }
  for (size_t r = 0; r < owner.result_lines.size(); ++r, ++p) {
    if (r >= results.size() || !call.op.is_wanted(call.stack, r)) continue;
    const Tensor* x = &results[r].toTensor();
    const at::ScalarType type = scalar_type(kernel.parameters[p].type);
    if (x->scalar_type() != type) {
      const Tensor wide = at::empty_like(*x, x->options().dtype(type));
      x = &storage.narrowed.emplace_back(*x, wide).second;
    }
    const int i = owner.result_lines[r], rank = kernel.parameters[p].rank;
    const Tensor& seen = flattened(*x, call.text.lines[i], rank, storage.owned);
    set_tensor(i, seen, seen.mutable_data_ptr());
  }
}

// A call whose kernel's indices are checked.
struct Watched : WrongIndex {
  const Checked& call;
  const Storage& storage;

  Watched(const Checked& call, const Storage& storage) : call(call), storage(storage) {
    print = [](const WrongIndex& wrong) {
      std::fprintf(stderr, "%s\n", static_cast<const Watched&>(wrong).text().c_str());
    };
  }

  // Return the error for the index.
  std::string text() const {
    const Operator& owner = call.op.kernel_owner();
    std::vector<int> lines;  // of the kernel's parameters
    for (const int i : owner.lines)
      if (i >= 0) lines.push_back(i);
    const bool is_result = parameter >= int(lines.size());
    lines.insert(lines.end(), owner.result_lines.begin(), owner.result_lines.end());
    const std::string& name = call.text.lines[lines[parameter]].name;
    const auto got = c10::Join(", ", c10::IntArrayRef(index, rank));
    const bool is_absent = !storage.slots[parameter].data;
    const std::string bounds = is_data ? c10::str(" of ", shape[0], " numbers")
                                       : c10::str(" of shape ", c10::IntArrayRef(shape, rank));
    return c10::str(call.op.name, ": expected the kernel to ",
                    is_absent ? "test the absent " : "stay within the ",
                    is_result ? "result `" : "argument `", name, '`', is_absent ? "" : bounds,
                    ", got ", name, is_data ? ".data[" : "(", got, is_data ? "]" : ")");
  }
};

// Let each element that a kernel does not write show: a NaN, or a large negative integer.
void spoil_results(const BoundKernel& kernel, const Storage& storage) {
  for (int p = 0; p < kernel.count; ++p) {
    const Parameter& parameter = kernel.parameters[p];
    const Slot& slot = storage.slots[p];
    if (!parameter.is_written || !slot.data) continue;
    const auto type = scalar_type(parameter.type);
    const int64_t count = c10::multiply_integers(slot.shape, slot.shape + parameter.rank);
    const int byte = c10::isFloatingType(type) ? 0xff : type == at::kBool ? 1 : 0x80;
    std::memset(slot.data, byte, size_t(count) * c10::elementSize(type));
  }
}

void run_slots(const Checked& call, const BoundKernel& kernel, Storage& storage) {
  Watched watched(call, storage);
  storage.slots[kernel.count].data = static_cast<WrongIndex*>(&watched);
  if (kernel.checks_indices && !kernel.is_cuda) spoil_results(kernel, storage);
  Outcome outcome;
  try {
    outcome = kernel.run(kernel.function, storage.slots.data());
  } catch (...) {  // perhaps because of the number that a wrong index has read
    if (!watched.is_set) throw;
  }
  TORCH_CHECK(!watched.is_set, watched.text());
  TORCH_CHECK(!outcome.error, call.op.name, ": CUDA error: ", outcome.error);
  if (outcome.wrong >= 0) refuse_position(call, outcome.wrong);
}

// Run a kernel. It writes the results.
void run_kernel(const Checked& call, const BoundKernel& kernel, const Results& results) {
  const Tensor& x = *call.tensors[call.first];
  const c10::OptionalDeviceGuard guard(kernel.is_cuda ? std::optional(x.device()) : std::nullopt);
  if (kernel.is_cuda ? wants_checks(x) : !kernel.checks_entries) check_entries(call);
  Storage storage;
  fill_slots(call, kernel, results, storage);
  Slot* last = &storage.slots[kernel.count - 1];
  if (kernel.is_cuda) (last--)->data = current_stream(x.device());
  Workspace workspace{nullptr, 0};
  Tensor memory;
  if (kernel.has_workspace) {
    last->data = &workspace;
    run_slots(call, kernel, storage);  // sets workspace.bytes
    memory = at::empty({std::max<int64_t>(workspace.bytes, 1)}, x.options().dtype(at::kByte));
    workspace.data = memory.mutable_data_ptr();
  }
  run_slots(call, kernel, storage);
  for (const auto& [result, written] : storage.narrowed) result.copy_(written);
}

// ---- calls --------------------------------------------------------------------------------------

// Throw the current exception again. If memory on the CPU did not suffice, throw another error: it
// names the argument with the largest number.
[[noreturn]] void refuse_memory(const Operator& op, const IValue* stack) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
  } catch (const c10::Error& error) {
    if (!std::strstr(error.what_without_backtrace(), "can't allocate memory")) throw;
  }
  const IValue* largest = nullptr;
  int64_t most = -1;
  for (size_t i = 0; i < op.count(); ++i) {
    std::vector<SymInt> numbers;
    if (op.kinds[i] == contract::Kind::kInt) numbers = {stack[i].toSymInt()};
    if (op.kinds[i] == contract::Kind::kInts && stack[i].isList())
      numbers = stack[i].toSymIntVector();
    for (const SymInt& number : numbers)
      if (value_or_zero(number) > most) {
        most = value_or_zero(number);
        largest = &stack[i];
      }
  }
  TORCH_CHECK(largest, op.name, ": expected arguments for which memory suffices");
  TORCH_CHECK(false, op.name, ": expected `", op.parsed.arguments()[largest - stack].name(),
              "` for which memory suffices, got ", *largest);
}

// Check a call and replace its arguments on the stack by the results, which compute() returns.
template <class Compute>
void run_checked(const Operator& op, torch::jit::Stack* stack, const Compute& compute) {
  IValue* const arguments = stack->data() + stack->size() - op.count();
  Results results;
  try {
    results = compute(Checked(op, arguments));
  } catch (...) {
    refuse_memory(op, arguments);
  }
  torch::jit::drop(*stack, op.count());
  for (IValue& result : results) stack->push_back(std::move(result));
}

// The kernel of the dispatch key CPU or CUDA, for all operators.
template <bool on_cuda>
void run_on_device(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet,
                   torch::jit::Stack* stack) {
  run_checked(op, stack, [&](const Checked& call) {
    const Results results = call.results();
    const BoundKernel* kernel = kernel_for(op, on_cuda, [&](int group) {
      const int first = call.first_of[group];
      return first < 0 ? at::ScalarType::Undefined : call.tensors[first]->scalar_type();
    });
    TORCH_CHECK(kernel || !on_cuda || !op.family->entry.without_cuda, op.name,
                ": built without CUDA because ", op.family->entry.without_cuda);
    TORCH_CHECK(kernel, op.name, ": no kernel for ", on_cuda ? "CUDA" : "the CPU",
                " and these dtypes is registered");
    run_kernel(call, *kernel, results);
    return results;
  });
}

// The kernel of the dispatch key Meta: allocates the results.
void run_on_meta(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet,
                 torch::jit::Stack* stack) {
  run_checked(op, stack, [](const Checked& call) { return call.results(); });
}

// The kernel of a composition, for all devices.
void run_composition(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet,
                     torch::jit::Stack* stack) {
  run_checked(op, stack, [&](const Checked& call) {
    const auto arguments = with_spare(c10::ArrayRef<IValue>(call.stack, op.count()));
    const Value value = op.composition->function(values_of(arguments.data()));
    const IValue& result = ivalue_of(value);
    Results results{result};
    if (result.isTuple()) {
      const auto& elements = result.toTupleRef().elements();
      results.assign(elements.begin(), elements.end());
    }
    const auto& wanted = op.parsed.returns();
    bool is_ok = results.size() == wanted.size();
    for (size_t i = 0; i < wanted.size() && is_ok; ++i)
      is_ok = results[i].isTensor() ? wanted[i].type()->kind() == c10::TypeKind::TensorType
                                    : results[i].type()->isSubtypeOf(*wanted[i].type());
    TORCH_CHECK(is_ok, op.name, ": its composition must return the results of its schema, got a ",
                result.tagKind());
    return results;
  });
}

}  // namespace
}  // namespace calcops
