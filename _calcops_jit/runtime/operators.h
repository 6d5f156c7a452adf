// The operators of the contracts that are loaded, and the value in a calcops::Value.
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

}  // namespace
}  // namespace calcops
