// The operators of the loaded contracts, and access to the value in a calcops::Value.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <deque>

#include "contract_proofs.h"

namespace calcops {
namespace {

using at::Tensor;
using c10::IValue;
using c10::SymInt;
using contract::kMost;
using contract::Line;
using contract::Shape;
using contract::Sum;

// The bytes of a process's address space on x86-64. A result has fewer.
constexpr int64_t kMostBytes = int64_t(1) << 47;
using Results = c10::SmallVector<IValue, 4>;

at::ScalarType scalar_type(Type type) { return at::ScalarType(type); }

// Return the name of a tensor's dtype in Python, such as float64.
std::string dtype_name(const Tensor& x) {
  return std::string(c10::getDtypeNames(x.scalar_type()).first);
}

static_assert(at::ScalarType(Type::kBFloat16) == at::kBFloat16);
static_assert(at::ScalarType(Type::kUInt16) == at::kUInt16);

// A Value is an IValue. Its header does not know that type.
static_assert(sizeof(Value) == sizeof(IValue) && alignof(Value) == alignof(IValue));
const IValue& ivalue_of(const Value& value) { return reinterpret_cast<const IValue&>(value); }
const Value* values_of(const IValue* ivalues) { return reinterpret_cast<const Value*>(ivalues); }
Value value_of(IValue ivalue) {
  Value value;
  reinterpret_cast<IValue&>(value) = std::move(ivalue);
  return value;
}

const Tensor kNone;

const Tensor& tensor_or_none(const IValue& value) {
  return value.isTensor() ? value.toTensor() : kNone;
}

// An undefined tensor stands for an absent argument or for a derivative that is zero.
using tensor_list = std::vector<Tensor>;

// One call of an operator.
struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;  // as many as the schema has

  // Run the call through the dispatcher. So the results are differentiable, and a graph from before
  // a live reload calls the new kernel.
  tensor_list run() const {
    torch::jit::Stack stack = arguments;
    op.callBoxed(&stack);
    tensor_list results;
    for (const IValue& result : stack) results.push_back(tensor_or_none(result));
    return results;
  }
};

// The arrays of a source's functions have this many elements behind their end, so that an index
// that is a few too large is an error. Those that a function reads are capsules, which no operator
// takes.
constexpr size_t kSpare = 8;

std::vector<IValue> with_spare(c10::ArrayRef<IValue> given) {
  std::vector<IValue> values = given.vec();
  values.resize(given.size() + kSpare, IValue::make_capsule({}));
  return values;
}

using contract::BoundKernel;

struct Family;

// Run a source's functions. What they throw becomes an error that the autograd engine can pass on:
// any other exception would end the process.
template <class Function>
auto with_errors(const std::string& op, const Function& function) {
  try {
    return function();
  } catch (const std::exception&) {
    throw;
  } catch (const char* text) {
    TORCH_CHECK(false, op, ": ", text);
  } catch (...) {
    TORCH_CHECK(false, op, ": its source threw what is no std::exception");
  }
}

struct Operator : contract::Signature {
  Family* family;
  std::string name;  // qualified
  // The parts of its source. nullptr: it has none.
  const Composition* composition = nullptr;
  const Derivative* derivative = nullptr;
  const Check* check = nullptr;
  std::vector<BoundKernel> kernels{};

  size_t count() const { return kinds.size(); }  // of arguments
  const contract::Text& text() const;            // of its contract
  const Operator& kernel_owner() const;          // itself, or the operator whose kernels it uses

  // Return whether a call computes a result: output_mask may leave it out.
  bool is_wanted(const IValue* arguments, size_t result) const {
    return mask < 0 || arguments[mask].toBoolList()[result];
  }
};

// All operators of one contract.
struct Family {
  ContractEntry entry;
  contract::Text text{};
  std::deque<Operator> operators{};
};

const contract::Text& Operator::text() const { return family->text; }
const Operator& Operator::kernel_owner() const { return family->operators[owner]; }

std::deque<Family>& families() {
  static auto* all = new std::deque<Family>;
  return *all;
}

// Whether a CUDA graph is captured on a stream; nullptr without CUDA.
bool (*is_capturing)(void* stream) = nullptr;

// Kernels whose contract is not registered yet, by the operator's qualified name.
std::map<std::string, std::vector<KernelEntry>>& kernels_waiting() {
  static auto* waiting = new std::map<std::string, std::vector<KernelEntry>>;
  return *waiting;
}

}  // namespace
}  // namespace calcops
