// Writes the contracts of a library as JSON, so that a program can draw calls of its operators.
// This file is a part of runtime.cpp.
#include <charconv>
#include <set>

#include "operators.h"

namespace calcops {
namespace {

std::string object(std::initializer_list<std::pair<const char*, std::string>> fields) {
  std::string text;
  for (const auto& [name, value] : fields)
    text += (text.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + value;
  return text + '}';
}

std::string json(bool value) { return value ? "true" : "false"; }
std::string json(int value) { return std::to_string(value); }
std::string json(int64_t value) { return std::to_string(value); }

// Python's reader, which is not strict, takes control characters as they are.
std::string json(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) text += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  return text + '"';
}

std::string json(Type type) { return json(contract::name_of(type)); }

std::string json(contract::Compare compare) {
  static constexpr const char* kSigns[] = {"<", "<=", ">", ">="};  // in the order of Compare
  return json(std::string(kSigns[int(compare)]));
}

// Return a list, whose items may be lists.
template <class Items>
std::string json(const Items& items);

// Return [factor, size, ...].
std::string json(const contract::Product& product) {
  std::vector<int64_t> numbers{product.factor};
  numbers.insert(numbers.end(), product.sizes.begin(), product.sizes.end());
  return json(numbers);
}

std::string json(const contract::Bound& bound) {
  char real[32];
  const std::string digits(real, std::to_chars(real, std::end(real), bound.real).ptr);
  return '[' + json(bound.compare) + ", " + (bound.whole ? json(bound.integer) : digits) + ']';
}

std::string json(const contract::Limit& limit) {
  return object({{"sum", json(limit.sum)},
                 {"compare", json(limit.compare)},
                 {"bound", json(limit.bound)},
                 {"divisor", json(limit.divisor)},
                 {"text", json(limit.text)},
                 {"on_cuda", json(limit.on_cuda)}});
}

// The dtypes are those of the line that it is like.
std::string json(const contract::Text& text, int number) {
  if (number < 0) return "null";
  const Line& line = text.lines[number];
  const Line& owner = line.group < 0 ? line : text.lines[line.group];
  return object({{"shapes", json(line.shapes)},
                 {"has_leading", json(line.has_leading)},
                 {"whole", json(line.whole)},
                 {"parts", json(line.parts)},
                 {"types", json(owner.types)},
                 {"group", json(owner.name)},
                 {"is_widened", json(owner.read_as != Type::kNone)},
                 {"is_constant", json(line.is_constant)},
                 {"may_be_none", json(line.entries.may_be_none)},
                 {"below", json(line.entries.below)},
                 {"positions", json(line.entries.positions)},
                 {"limits", json(line.limits)},
                 {"size", json(line.size)},
                 {"bounds", json(line.bounds)},
                 {"choices", json(line.choices)}});
}

std::string json(const Operator& op) {
  std::string arguments, results;
  for (size_t i = 0; i < op.count(); ++i)
    arguments += (i ? ", " : "") + json(op.parsed.arguments()[i].name()) + ": " +
                 json(op.text(), op.lines[i]);
  for (const int line : op.result_lines)
    if (line >= 0) results += (results.empty() ? "" : ", ") + json(op.text(), line);
  std::set<std::string> devices;
  for (const BoundKernel& kernel : op.kernel_owner().kernels)
    devices.insert(kernel.is_cuda ? "cuda" : "cpu");
  const Derivative* derivative = op.derivative;
  return object({{"name", json(op.name)},
                 {"arguments", '{' + arguments + '}'},
                 {"results", '[' + results + ']'},
                 {"leading", json(op.text().leading)},
                 {"is_composition", json(op.is_composition)},
                 {"has_check", json(op.check != nullptr)},
                 {"has_vjp", json(derivative && derivative->vjp)},
                 {"has_jvp", json(derivative && derivative->jvp)},
                 {"devices", json(devices)}});
}

std::string json(const Family& family) { return json(family.operators); }

template <class Items>
std::string json(const Items& items) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + json(item);
  return '[' + text + ']';
}

}  // namespace
}  // namespace calcops

// Return the operators of each contract as JSON. `python -m calcops_jit test` reads them.
extern "C" __attribute__((visibility("default"), used)) const char* calcops_jit_contracts() {
  static auto* text = new std::string;
  *text = calcops::json(calcops::families());
  return text->c_str();
}
