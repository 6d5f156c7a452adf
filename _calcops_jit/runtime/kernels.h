// A checked call on the CPU, on CUDA or on Meta: its kernel, what the kernel's parameters are, and
// the errors that a kernel or the lack of memory brings.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <list>

#include "checked.h"

namespace calcops {
namespace {

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

}  // namespace
}  // namespace calcops
