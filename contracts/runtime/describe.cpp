// Writes the contracts of a library as JSON, so that a program can draw calls of its operators.
// This file is a part of runtime.cpp.
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

// Python's reader, which is not strict, takes control characters as they are.
std::string json(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) text += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  return text + '"';
}

std::string json(Type type) { return json(contract::name_of(type)); }

// Return a list, whose items may be lists.
template <class Items>
std::string json(const Items& items);

std::string json(const contract::Bound& bound) {
  static constexpr const char* kSigns[] = {"<", "<=", ">", ">="};  // in the order of Compare
  return json(std::vector<std::string>{kSigns[int(bound.compare)], bound.text});
}

std::string json(const contract::Limit& limit) {
  return '[' + json(limit.text) + ", " + json(limit.on_cuda) + ']';
}

// Sums are as written, but for that of `with`. The dtypes are those of the line that it is like.
std::string json(const contract::Text& text, int number) {
  if (number < 0) return "null";
  const Line& line = text.lines[number];
  const Line& owner = line.group < 0 ? line : text.lines[line.group];
  const auto name_of = [&](int size) { return size < 0 ? "" : text.sizes[size]; };
  std::string parts = "0";
  for (const contract::Product& product : line.parts) {
    parts += " + " + std::to_string(product.factor);
    for (const int size : product.sizes) parts += '*' + text.sizes[size];
  }
  return object({{"shape_text", json(line.shape_text)},
                 {"whole", json(name_of(line.whole))},
                 {"parts", json(parts)},
                 {"types", json(owner.types)},
                 {"group", json(owner.name)},
                 {"is_widened", json(owner.read_as != Type::kNone)},
                 {"is_constant", json(line.is_constant)},
                 {"may_be_none", json(line.entries.may_be_none)},
                 {"below", json(line.entries.bound)},
                 {"positions", json(line.entries.positions)},
                 {"limits", json(line.limits)},
                 {"size", json(name_of(line.size))},
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
