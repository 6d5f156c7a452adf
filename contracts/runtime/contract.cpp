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

// Raise an error that names the contract, unless the function succeeds.
template <class Function>
void at_contract(const Family& family, const Function& function) {
  std::string what;
  try {
    return function();
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  TORCH_CHECK(false, family.file, ":", family.line, ": contract, ", what);
}

// Derivatives by the formulas of a source, which are functions of Values.
class Formulas final : public Derivatives {
 public:
  Formulas(const Operator& op, const Derivative& formula) : op_(op), formula_(formula) {}

  // Refuse a derivative of a result of an integer dtype, which is rounded.
  void check(const Call& call, size_t argument) const override {
    for (const int result : op_.result_lines)
      for (const int line : op_.tensors) {
        const Tensor& x = tensor_or_none(call.arguments[op_.argument[line]]);
        const auto& lines = op_.family->text.lines;
        if (lines[line].group != lines[result].group || !x.defined()) continue;
        TORCH_CHECK(c10::isFloatingType(x.scalar_type()), op_.name, ": expected `",
                    lines[line].name, "` of a floating dtype where `",
                    op_.schema.arguments[argument].name, "` has a derivative, got ",
                    x.scalar_type());
      }
  }

  bool covers(const std::string& argument) const override {
    const int line = op_.family->text.line(argument);
    return line < 0 || !op_.family->text.lines[line].is_constant;
  }

  bool depends_on(size_t argument) const override {
    return !formula_.unused || op_.schema.arguments[argument].name != formula_.unused;
  }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    std::vector<Value> gradients(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      if (!wanted[i]) gradients[i] = false;
    std::vector<IValue> given(upstream.begin(), upstream.end());
    if (formula_.absent == Derivative::kZeros)
      if (std::any_of(upstream.begin(), upstream.end(),
                      [](const Tensor& x) { return !x.defined(); })) {
        const Checked<SymInt> checked(op_, call.arguments.data());
        for (size_t i = 0; i < given.size(); ++i)
          if (!upstream[i].defined())
            given[i] = at::zeros_symint(checked.result_shape(i), checked.options_of(i));
      }
    formula_.vjp(values_of(call.arguments.data()), values_of(given.data()), gradients.data());
    return tensors_of(gradients);
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(formula_.jvp, op_.name,
                                ": its derivative has no formula for forward mode");
    std::vector<IValue> given(tangents.begin(), tangents.end());
    for (size_t i = 0; i < given.size(); ++i) {
      const Tensor& x = tensor_or_none(call.arguments[i]);
      if (formula_.absent == Derivative::kZeros && !tangents[i].defined() && x.defined())
        if (x.is_floating_point()) given[i] = at::zeros_like(x);
    }
    std::vector<Value> results(op_.schema.results.size());
    formula_.jvp(values_of(call.arguments.data()), values_of(given.data()), results.data());
    return tensors_of(results);
  }

 private:
  tensor_list tensors_of(const std::vector<Value>& values) const {
    tensor_list tensors;
    for (const Value& value : values) {
      const IValue& given = ivalue_of(value);
      TORCH_CHECK(given.isTensor() || given.isNone() || given.isBool(), op_.name,
                  ": expected tensors from the formula of its derivative, got a ", given.tagKind());
      tensors.push_back(tensor_or_none(given));
    }
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
    vmap([this](const Call& call, const SymInt& items) { return vmap_items(*op, call, items); },
         handle, stack);
  }
  const Operator* op;
};

// Return the part with an operator's name, or nullptr. Add the name to `used`.
template <class Part>
const Part* part_of(const Items<Part>& parts, const std::string& name, const char* what) {
  const Part* found = nullptr;
  for (const Part& part : parts) {
    if (name != part.op) continue;
    TORCH_CHECK(!found, "two ", what, "s of ", name);
    found = &part;
  }
  return found;
}

// Read a contract and make its operators.
void read_family(Family& family, const ContractEntry& entry) {
  std::vector<std::string> composed;
  for (const Composition& composition : entry.compositions) composed.push_back(composition.op);
  auto proved = contract::Prover(contract::Reader(entry.text).read(), composed).proved();
  family.text = std::move(proved.text);
  family.linear = std::move(proved.linear);
  for (contract::Signature& signature : proved.operators) {
    const std::string name = signature.schema.name;
    const bool is_qualified = name.find("::") != std::string::npos;
    c10::FunctionSchema parsed = torch::schema(signature.schema.text.c_str());
    Operator& op = family.operators.emplace_back(
        Operator{std::move(signature), &family,
                 is_qualified ? name : family.name_space + "::" + name, std::move(parsed)});
    op.count = int(op.parsed.arguments().size());
    TORCH_CHECK(op.schema.arguments.size() == size_t(op.count), "cannot read ", op.parsed);
    for (const Family& other : families())
      for (const Operator& known : other.operators)
        TORCH_CHECK(&known == &op || known.name != op.name, "line ", op.schema.number, ": ",
                    op.name, " has another contract at ", other.file, ":", other.line);
    if (const auto* part = part_of(entry.compositions, name, "composition"))
      op.composition = part->function;
    if (const auto* part = part_of(entry.checks, name, "check")) op.check = part->function;
    if (const auto* part = part_of(entry.derivatives, name, "derivative")) {
      op.formulas = std::make_unique<Formulas>(op, *part);
      TORCH_CHECK(!part->unused || op.parsed.argumentIndexWithName(part->unused), "line ",
                  op.schema.number, ": a derivative of ", name, " names `", part->unused,
                  "`, which is no argument");
    }
    for (const int result : op.result_lines)
      TORCH_CHECK(
          op.check || op.composition || op.has(result) || !family.text.lines[result].any_shape,
          "line ", op.schema.number, ": a Check of ", name, " must set the shape of `",
          family.text.lines[result].name, "`");
  }
  // A part that names no operator would never be called.
  const auto check = [&](const char* name, const char* what) {
    for (const Operator& op : family.operators)
      if (op.schema.name == name) return;
    TORCH_CHECK(false, "a ", what, " of ", name, ", which no schema names");
  };
  for (const Composition& part : entry.compositions) check(part.op, "composition");
  for (const Check& part : entry.checks) check(part.op, "check");
  for (const Derivative& part : entry.derivatives) check(part.op, "derivative");

  if (!family.text.linear_number) return;
  std::vector<Multilinear::Term> terms;
  std::vector<std::string> inputs;
  const auto& lines = family.text.lines;
  const contract::Linear& linear = family.linear;
  for (size_t t = 0; t < linear.results.size(); ++t) {
    terms.push_back({"grad_" + lines[linear.results[t]].name});
    for (const int factor : linear.terms[t]) terms.back().push_back(lines[factor].name);
  }
  for (const int input : linear.inputs) inputs.push_back(lines[input].name);
  family.derivatives = std::make_unique<Multilinear>(
      family.operators[linear.forward].name, family.operators[linear.backward].name, terms, inputs);
}

void take_kernels(Family& family) {
  for (Operator& op : family.operators) {
    const auto waiting = kernels_waiting().find(op.name);
    if (waiting == kernels_waiting().end()) continue;
    at_contract(family, [&] {
      TORCH_CHECK(!op.is_composition, "line ", op.schema.number, ": ", op.schema.name,
                  " is a composition and has a kernel");
      for (const KernelEntry& kernel : waiting->second) {
        BoundKernel bound{kernel, contract::bind(family.text, op, kernel)};
        for (const BoundKernel& other : op.kernels)
          TORCH_CHECK(other.binding.types != bound.binding.types ||
                          other.binding.is_cuda != bound.binding.is_cuda,
                      "line ", op.schema.number, ": two kernels of ", op.schema.name,
                      " take the same types");
        op.kernels.push_back(std::move(bound));
      }
    });
    kernels_waiting().erase(waiting);
  }
  // An operator without kernels uses those of another one.
  for (Operator& op : family.operators) {
    if (!op.kernels.empty()) op.owner = &op;
    if (op.owner || op.is_composition) continue;
    for (const Operator& other : family.operators)
      if (!other.kernels.empty() && contract::may_use_kernels_of(op, other)) op.owner = &other;
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
  const Derivatives* derivatives = op.formulas    ? op.formulas.get()
                                   : op.is_linear ? family.derivatives.get()
                                                  : nullptr;
  impl(c10::DispatchKey::Autograd,
       derivatives ? CppFunction::makeFromBoxedFunctor(std::make_unique<Differentiate>(derivatives))
                   : torch::autograd::autogradNotImplementedFallback());
  impl(c10::DispatchKey::FuncTorchBatched,
       CppFunction::makeFromBoxedFunctor(std::make_unique<Vmap>(&op)));
}

// Raise an error if a kernel is missing. Called when a library is loaded and all its kernels are
// registered.
void check_all_kernels() {
  for (const auto& [op, kernels] : kernels_waiting())
    TORCH_CHECK(false, "a kernel of ", op, ", which no contract names");
  for (const Family& family : families())
    at_contract(family, [&] {
      for (const Operator& op : family.operators) {
        if (op.is_composition) continue;
        std::vector<const contract::Signature*> owners;
        for (const Operator& other : family.operators)
          if (!other.kernels.empty()) owners.push_back(&other);
        contract::check_owner(family.text, op, owners);
        std::vector<const contract::Binding*> bindings;
        for (const BoundKernel& kernel : op.kernels) bindings.push_back(&kernel.binding);
        if (!bindings.empty()) contract::check_types(family.text, op, bindings);
      }
    });
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
    at_contract(family, [&] { read_family(family, entry); });
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
  std::string text = op.schema.summary + '\n';
  const auto add = [&](const char* title, const std::vector<int>& lines) {
    text += title;
    for (const int line : lines)
      if (line >= 0) text += '\n' + op.family->text.lines[line].text;
    text += '\n';
  };
  add("", op.lines);
  if (!op.result_lines.empty()) add("\nReturns", op.result_lines);
  return op.schema.details.empty() ? text : text + '\n' + op.schema.details + '\n';
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
