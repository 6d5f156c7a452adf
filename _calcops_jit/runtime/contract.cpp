// Registers the operators of contracts with PyTorch. A call's checks, results, devices, derivatives
// and vmap all follow from the contract's text. This file is a part of runtime.cpp.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autograd.h"
#include "kernels.h"
#include "operators.h"
#include "vmap.h"

namespace calcops {
namespace {

// A kernel of the dispatcher that runs `function` for an operator.
struct Run final : c10::OperatorKernel {
  using Function = void (*)(const Operator&, torch::jit::Stack*);
  Run(const Operator* op, Function function) : op(op), function(function) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    function(*op, stack);
  }
  const Operator* op;
  Function function;
};

// Derivatives by the formulas of a source, which are functions of Values.
class Formulas final : public Derivatives {
 public:
  Formulas(const Operator& op, const Derivative& formula) : op_(op), formula_(formula) {}

  // Refuse a call that has no derivative. PyTorch would silently drop its gradient.
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
      if (!contains(lines[i].without_derivative, got)) continue;
      std::vector<std::string> others;
      for (const std::string& choice : lines[i].choices)
        if (!contains(lines[i].without_derivative, choice)) others.push_back(quoted(choice));
      refuse(lines[i], joined_by_or(others), quoted(got));
    }
    // A result of an integer dtype is rounded, so it has no derivative.
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

// Add the operator of a schema to its family, and find the line of each argument.
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
    const std::string& argument_name = argument.name();
    if (argument.alias_info())
      family.fail(schema.number,
                  name + " would change `" + argument_name + "`; return a result instead");
    if (argument_name == "output_mask") {
      op.mask = i;
      op.lines.push_back(-1);
      continue;
    }

    int line = text.line(argument_name);
    if (line < 0 && op.is_backward && contract::begins(argument_name, "grad_")) {
      line = text.line(argument_name.substr(5));
      if (line >= 0) {
        op.gradient[line] = i;
        op.lines.push_back(-2 - line);
        continue;
      }
    }

    const std::string type = argument.type()->annotation_str();
    const bool is_tensor = type.find("Tensor") != std::string::npos;
    if (line < 0)
      family.fail(schema.number, name + " has `" + argument_name + "`, which no line describes");
    if (is_tensor && !text.lines[line].is_tensor() && !op.composition)
      family.fail(text.lines[line].number,
                  "`" + argument_name + "`: expected its shape, such as [N, 3]");
    op.argument[line] = i;
    op.optional[line] = argument.type()->kind() == c10::TypeKind::OptionalType;
    op.lines.push_back(line);
  }
}

// Find the line of each result. It is the line that the schema names. The unnamed results of a
// backward operator have the lines of the factors, in order. Those of other operators have the
// lines of tensors that no operator has as an argument, in order.
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
      if (line < 0 && op.composition) break;  // it makes its results itself
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

// Sort the lines by what a call checks of them.
void sort_lines(Operator& op) {
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

// Raise an error if a result has a size that no argument determines.
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

// Raise an error if a composition or a derivative names no operator: it would never be called.
void check_names_of(const Family& family, const ContractEntry& entry) {
  const auto check = [&](const char* name, const char* what) {
    for (const Operator& op : family.operators)
      if (op.parsed.name() == name) return;
    family.fail(1, c10::str("a ", what, " of ", name, ", which no schema names"));
  };
  for (int i = 0; i < entry.composition_count; ++i) check(entry.compositions[i].op, "composition");
  for (int i = 0; i < entry.derivative_count; ++i) check(entry.derivatives[i].op, "derivative");
}

// Make the derivatives of the line `linear`.
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
  if (!has(family.forward)) {  // the forward operator of _x_backward may be x
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
  family.derivatives =
      std::make_unique<Multilinear>(family.forward.c_str(), family.backward.c_str(), terms);
}

bool is_result(const Family& family, size_t line) {
  for (const Operator& op : family.operators)
    if (contains(op.result_lines, int(line))) return true;
  return false;
}

// Check the sizes along which vmap joins its items. Without a line `vmap`, these are the first size
// of all tensors, if it is the same in all and the contract uses it nowhere else.
void read_vmap(Family& family) {
  contract::Text& text = family.text;
  if (!text.says_vmap) {
    constexpr int kUnset = -2;
    int common = kUnset;  // the size that all tensors share; -1: none
    const auto agree = [&](int size) {
      if (common == kUnset) common = size;
      if (common != size) common = -1;
    };
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
  for (size_t i = 0; i < text.lines.size(); ++i) {
    const Line& line = text.lines[i];
    const auto is_joined = [&](const Shape& shape) { return joined_dimension(text, shape) >= 0; };
    // An argument whose shapes lack the joined dimension serves all items. A result must have it.
    if (std::none_of(line.shapes.begin(), line.shapes.end(), is_joined) && !is_result(family, i))
      continue;
    // Another shape may lack the dimension only if the first shape shows where it is missing.
    for (const Shape& shape : line.shapes)
      if (!is_joined(shape) && line.made_by.empty() &&
          (joined_dimension(text, line.shapes[0]) < 0 ||
           contract::dimensions_of(line.shapes[0], shape).empty()))
        family.fail(line.number, "`" + line.name + "` has no dimension that vmap joins");
  }
}

// Match a kernel's parameters with the arguments and results of its operator.
BoundKernel bind(const Operator& op, const KernelEntry& kernel) {
  const Family& family = *op.family;
  if (size_t(kernel.count) > contract::kMost)
    family.fail(op.schema->number, "a kernel of " + op.parsed.name() + " has " +
                                       std::to_string(kernel.count) + " parameters, more than " +
                                       std::to_string(contract::kMost));
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
    const Line& line = family.text.lines[line_of(op, source)];
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
    // vmap does not find CompositeImplicitAutograd, so the composition is registered for vmap too.
    impl(c10::DispatchKey::CompositeImplicitAutograd, running(&run_composition));
    impl(c10::DispatchKey::FuncTorchBatched, running(&run_composition));
    return;
  }
  impl(c10::DispatchKey::CPU, running(&run_on_device<false>));
  impl(c10::DispatchKey::CUDA, running(&run_on_device<true>));
  impl(c10::DispatchKey::Meta, running(&run_on_meta));
  const Derivatives* derivatives = op.formulas ? op.formulas.get() : family.derivatives.get();
  impl(c10::DispatchKey::Autograd,
       derivatives ? CppFunction::makeFromBoxedFunctor(std::make_unique<Differentiate>(derivatives))
                   : torch::autograd::autogradNotImplementedFallback());
  impl(c10::DispatchKey::FuncTorchBatched,
       CppFunction::makeFromBoxedFunctor(std::make_unique<Vmap>(&op)));
}

// Return whether an operator has a CPU kernel for number types. `types` has one for each line that
// names dtypes.
bool has_kernel(const Operator& op, const std::map<int, Type>& types) {
  const auto& lines = op.family->text.lines;
  for (const BoundKernel& kernel : op.kernels) {
    bool fits = !kernel.is_cuda;
    for (size_t p = 0; p < kernel.sources.size() && fits; ++p) {
      const Parameter& parameter = kernel.entry.parameters[p];
      const Source source = kernel.sources[p];
      if (parameter.kind != Parameter::kTensor) continue;
      int line = line_of(op, source);
      while (lines[line].like >= 0) line = lines[line].like;
      const Type type = types.at(line);
      const Type read_as = lines[line].read_as;
      const bool is_widened =
          parameter.type == Type::kFloat32 && (type == Type::kFloat16 || type == Type::kBFloat16);
      if (read_as != Type::kNone)
        fits = parameter.type == read_as;
      else
        fits = parameter.type == type || is_widened;
    }
    if (fits) return true;
  }
  return false;
}

// Raise an error if a combination of number types that the contract allows has no CPU kernel.
// `types` are those of the lines before `from`; the function calls itself for each type of the next
// line.
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

// Raise an error if a kernel is missing. Called when a library is loaded and all its kernels are
// registered.
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

// Register the operators of all contracts that wait.
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

    for (const contract::Schema& schema : family.text.schemas) read_operator(family, schema, entry);
    check_names_of(family, entry);
    read_derivatives(family);
    read_results(family);
    read_vmap(family);
    for (Operator& op : family.operators) {
      sort_lines(op);
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

// Return the text that help() shows below the schema.
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

// Return the name and the documentation of every operator with a contract. The loader calls it.
extern "C" __attribute__((visibility("default"), used)) const char* calcops_jit_documentation() {
  static auto* text = new std::string;
  text->clear();
  for (const calcops::Family& family : calcops::families())
    for (const calcops::Operator& op : family.operators)
      *text += op.name + '\n' + calcops::documentation(op) + '\x1e';
  return text->c_str();
}
