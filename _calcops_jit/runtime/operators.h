// The operators of the loaded contracts, and access to the value in a calcops::Value.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
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
using contract::kMost;
using contract::Line;
using contract::Shape;
using contract::Sum;

// The bytes of a process's address space on x86-64. A result has fewer.
constexpr int64_t kMostBytes = int64_t(1) << 47;
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

// A Value is one pointer, to an IValue. Its header does not know that type, so this unit reads the
// pointer from the Value's memory.
struct Hidden {
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

// Where a kernel's parameter comes from.
struct Source {
  enum { kArgument, kResult, kWorkspace, kStream } from;
  // kArgument: the argument's line in the contract. The upstream gradient of a result has the
  // negative number -2 - line, where `line` is the result's line.
  // kResult: the position among the results.
  int index;
};

struct BoundKernel {
  KernelEntry entry;
  std::vector<Source> sources;
  bool is_cuda;
};

// All operators of one contract.
struct Family {
  contract::Text text;
  std::string name_space, file;
  int line = 0;                        // of the contract in the file
  const char* without_cuda = nullptr;  // why the build has no CUDA
  std::deque<Operator> operators;
  // The members below follow from the line `linear`.
  std::unique_ptr<Multilinear> derivatives;
  std::string forward, backward;             // names of the two operators
  std::vector<int> input_lines;              // of all factors, in order
  std::vector<std::vector<int>> term_lines;  // of each term's factors

  [[noreturn]] void fail(int number, const std::string& what) const {
    TORCH_CHECK(false, file, ":", line, ": contract, ", contract::Mistake(number, what).what());
  }
};

struct Operator {
  Family* family;
  const contract::Schema* schema;
  std::string name;  // qualified
  c10::FunctionSchema parsed;
  // These have one entry for each line of the contract.
  std::array<int, kMost> argument{};   // the argument's position in the schema, or -1
  std::array<int, kMost> gradient{};   // the position of its grad_ argument, or -1
  std::array<bool, kMost> optional{};  // whether the argument is optional
  // For each argument: its line. output_mask has -1. The upstream gradient of a result has
  // -2 - line, where `line` is the result's line.
  std::vector<int> lines{};
  // The lines, grouped by what a call checks of them. The tensors of shaped_lines have
  // `the shape of` another one.
  std::vector<int> number_lines{}, tensor_lines{}, choice_lines{}, list_lines{}, gradient_lines{},
      shaped_lines{}, limit_lines{}, entry_lines{}, exclusion_lines{};
  std::vector<std::vector<int>> needs{};  // of each result: the lines of its factors
  // For each result: its line. The gradient of a factor has the factor's line.
  std::vector<int> result_lines{};
  int count = 0;  // of arguments
  int mask = -1;  // the position of output_mask, or -1
  bool is_backward = false;
  Value (*composition)(const Value*) = nullptr;
  std::unique_ptr<Derivatives> formulas{};
  std::vector<BoundKernel> kernels{};
};

// Return the contract's line of a kernel's parameter.
int line_of(const Operator& op, const Source& source) {
  if (source.from == Source::kResult) return op.result_lines[source.index];
  return source.index < 0 ? -2 - source.index : source.index;
}

std::deque<Family>& families() {
  static auto* all = new std::deque<Family>;
  return *all;
}

// Kernels whose contract is not registered yet, by the operator's qualified name.
std::map<std::string, std::vector<KernelEntry>>& kernels_waiting() {
  static auto* waiting = new std::map<std::string, std::vector<KernelEntry>>;
  return *waiting;
}

}  // namespace
}  // namespace calcops
