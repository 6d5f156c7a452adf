// Registers the operators of contracts with PyTorch. A call's checks, results, devices, derivatives
// and vmap all follow from the contract's text. This file is a part of runtime.cpp.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cctype>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>

#include "autograd.h"
#include "kernels.h"
#include "operators.h"
#include "vmap.h"

namespace calcops {
namespace {

// A kernel of the dispatcher.
struct Boxed final : c10::OperatorKernel {
  using Function = void (*)(const Operator&, const c10::OperatorHandle&, c10::DispatchKeySet,
                            torch::jit::Stack*);
  Boxed(const Operator& op, Function function) : op(op), function(function) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    with_errors(op.name, [&] { function(op, handle, keys, stack); });
  }
  const Operator& op;
  const Function function;
};

// Return the place of a contract's line in its source. The text is looked up there, because
// compilers disagree on the line of a call of several lines. A text of joined strings is not found.
std::string place_of(const ContractEntry& entry, int number) {
  std::ifstream file(entry.file);
  const std::string source{std::istreambuf_iterator<char>(file), {}};
  const size_t begin = source.find(entry.text);
  if (begin == std::string::npos)
    return c10::str(entry.file, ":", entry.line, ", line ", number, " of the text");
  const auto lines = std::count(source.begin(), source.begin() + ptrdiff_t(begin), '\n');
  return c10::str(entry.file, ":", lines + number);
}

// Raise an error that names the contract's line, unless the function succeeds.
template <class Function>
void at_contract(const Family& family, const Function& function) {
  int number = 1;
  std::string message;
  try {
    return function();
  } catch (const contract::Mistake& mistake) {
    number = mistake.number;
    message = mistake.what();
  } catch (const std::exception&) {
    message = calcops_jit::message();
  }
  TORCH_CHECK(false, place_of(family.entry, number), ": contract: ", message);
}

// Raise an error in the line of an operator's schema, unless the condition holds.
template <class... Words>
void check_operator(bool condition, const contract::Signature& op, const Words&... words) {
  if (!condition) throw contract::Mistake(op.schema.number, c10::str(words...));
}

// Return an operator's name with its namespace.
std::string qualified(const std::string& name, const std::string& name_space) {
  return name.find("::") == std::string::npos ? name_space + "::" + name : name;
}

// Give each part of a source, such as a Check, to its operator.
template <class Part>
void take_parts(Family& family, const Items<Part>& parts, const char* what,
                const Part* Operator::* place) {
  for (const Part& part : parts) {
    const auto op = std::find_if(family.operators.begin(), family.operators.end(),
                                 [&](const Operator& op) { return op.schema.name == part.op; });
    TORCH_CHECK(op != family.operators.end(), "a ", what, " of ", part.op,
                ", which no schema names");
    TORCH_CHECK(!std::exchange(*op.*place, &part), "two ", what, "s of ", part.op);
  }
}

// Read a contract and make its operators.
void read_family(Family& family) {
  const ContractEntry& entry = family.entry;
  std::vector<std::string> composed;
  for (const Composition& composition : entry.compositions) composed.push_back(composition.op);
  family.text = contract::Reader(entry.text).read();
  for (contract::Signature& signature : contract::Prover(family.text, composed).operators) {
    const std::string name = qualified(signature.schema.name, entry.name_space);
    const std::string name_space = name.substr(0, name.find("::"));
    const bool is_identifier = std::all_of(name_space.begin(), name_space.end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
    });
    check_operator(is_identifier, signature, "expected a namespace of letters, digits and _, got `",
                   name_space, "`; rename the library, or write `mine::", signature.schema.name,
                   "` in the contract and in its kernels");
    for (const Family& other : families())
      for (const Operator& known : other.operators)
        if (known.name == name)
          check_operator(false, signature, name, " has another contract at ",
                         place_of(other.entry, known.schema.number));
    family.operators.push_back(Operator{std::move(signature), &family, name});
  }
  take_parts(family, entry.compositions, "composition", &Operator::composition);
  take_parts(family, entry.checks, "check", &Operator::check);
  take_parts(family, entry.derivatives, "derivative", &Operator::derivative);
  for (const Operator& op : family.operators) {
    const char* unused = op.derivative ? op.derivative->unused : nullptr;
    TORCH_CHECK(!unused || op.parsed.argumentIndexWithName(unused), "a derivative of ",
                op.schema.name, " names `", unused, "`, which is no argument");
    if (op.check || op.composition) continue;
    check_operator(!op.kernel_owner().check, op, op.schema.name, " uses the kernels of ",
                   op.kernel_owner().schema.name, ", so it needs a Check like that one's");
    for (const int i : op.tensors)
      check_operator(!family.text.lines[i].any_shape, op, "a Check of ", op.schema.name,
                     " must examine the shape of `", family.text.lines[i].name, "`");
    for (const int i : op.result_lines)
      check_operator(!family.text.lines[i].any_shape, op, "a Check of ", op.schema.name,
                     " must set the shape of `", family.text.lines[i].name, "`");
  }
}

void take_kernels(Family& family) {
  for (Operator& op : family.operators) {
    const auto waiting = kernels_waiting().find(op.name);
    if (waiting == kernels_waiting().end()) continue;
    at_contract(family, [&] {
      check_operator(!op.is_composition, op, op.schema.name, " is a composition and has a kernel");
      for (const KernelEntry& entry : waiting->second) {
        const BoundKernel kernel = contract::bind(family.text, op, entry);
        for (const BoundKernel& other : op.kernels)
          check_operator(other.types != kernel.types || other.is_cuda != kernel.is_cuda, op,
                         "two kernels of ", op.schema.name, " take the same types");
        op.kernels.push_back(kernel);
      }
    });
    kernels_waiting().erase(waiting);
  }
}

void define(torch::Library& m, const Operator& op) {
  using c10::DispatchKey;
  const std::string name = op.name.substr(op.name.find("::") + 2);
  m.def(c10::FunctionSchema(op.parsed));
  const auto impl = [&](DispatchKey key, torch::CppFunction function) {
    m.impl(name.c_str(), torch::dispatch(key, std::move(function)));
  };
  const auto boxed = [&](Boxed::Function function) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(op, function));
  };
  if (op.composition) {
    // vmap does not find CompositeImplicitAutograd, so the composition is registered for vmap too.
    impl(DispatchKey::CompositeImplicitAutograd, boxed(&run_composition));
    impl(DispatchKey::FuncTorchBatched, boxed(&run_composition));
    return;
  }
  impl(DispatchKey::CPU, boxed(&run_on_device<false>));
  impl(DispatchKey::CUDA, boxed(&run_on_device<true>));
  impl(DispatchKey::Meta, boxed(&run_on_meta));
  impl(DispatchKey::FuncTorchBatched, boxed(&vmap));
  impl(DispatchKey::Autograd,
       op.derivative ? boxed(&differentiate) : torch::autograd::autogradNotImplementedFallback());
}

// Raise an error if no kernel on a device takes some of the dtypes of the contract.
void check_dtypes(const Operator& op, bool on_cuda) {
  std::vector<int> groups;
  for (const auto& [group, type] : op.kernels[0].types)
    if (op.text().lines[group].read_as == Type::kNone) groups.push_back(group);
  std::map<int, Type> given;  // of a group
  const auto type_of = [&](int group) {
    return given.count(group) ? scalar_type(given[group]) : at::ScalarType::Undefined;
  };
  const std::function<void(size_t)> check_from = [&](size_t g) {
    if (g == groups.size()) {
      std::string types;
      for (const auto& [group, type] : given)
        types += (types.empty() ? "" : " and ") + contract::name_of(type) + " `" +
                 op.text().lines[group].name + '`';
      check_operator(kernel_for(op, on_cuda, type_of), op, "no kernel of ", op.schema.name, " on ",
                     on_cuda ? "CUDA" : "the CPU", " takes ", types);
      return;
    }
    // Without a kernel of their own, float16 and bfloat16 are checked once, with float32. All
    // combinations of a dozen tensors would be half a million.
    std::set<Type> checked;
    for (const Type type : op.text().lines[groups[g]].types) {
      const bool has_own =
          std::any_of(op.kernels.begin(), op.kernels.end(), [&](const BoundKernel& kernel) {
            return kernel.is_cuda == on_cuda && kernel.types.at(groups[g]) == type;
          });
      const bool is_widened = is_narrow(scalar_type(type)) && !has_own;
      if (!checked.insert(is_widened ? Type::kFloat32 : type).second) continue;
      given[groups[g]] = type;
      check_from(g + 1);
    }
  };
  check_from(0);
}

// Raise an error if a kernel of an operator is missing.
void check_kernels(const Operator& op) {
  const Operator& owner = op.kernel_owner();
  const bool has_other = &owner != &op;
  check_operator(!has_other || op.kernels.empty(), op, op.schema.name,
                 " has kernels, and the line `kernels` gives it those of ", owner.schema.name);
  check_operator(!owner.kernels.empty(), owner, "no kernel of ", owner.schema.name,
                 "; add: const calcops::Kernel cpu(\"", owner.schema.name, "\", function)");
  for (const bool on_cuda : {false, true})
    if (std::any_of(op.kernels.begin(), op.kernels.end(),
                    [&](const BoundKernel& kernel) { return kernel.is_cuda == on_cuda; }))
      check_dtypes(op, on_cuda);
}

// Raise an error if a kernel has no contract.
void check_kernels_waiting() {
  for (const auto& [op, kernels] : kernels_waiting())
    TORCH_CHECK(false, kernels[0].file, ":", kernels[0].line, ": a kernel of ", op,
                ", which no contract names");
}

// Raise an error if a kernel is missing. Called when a library is loaded and all its kernels are
// registered.
void check_all_kernels() {
  check_kernels_waiting();
  for (const Family& family : families())
    at_contract(family, [&] {
      for (const Operator& op : family.operators)
        if (!op.is_composition) check_kernels(op);
    });
}

std::deque<ContractEntry>& contracts_waiting() {
  static auto* waiting = new std::deque<ContractEntry>;
  return *waiting;
}

// Register the operators of the first contract that waits. If that throws, the contract waits on.
void define_next(torch::Library&) {
  Family& family = families().emplace_back(Family{contracts_waiting().front()});
  at_contract(family, [&] { read_family(family); });
  take_kernels(family);
  for (const Operator& op : family.operators) {
    torch::Library library(torch::Library::FRAGMENT, op.name.substr(0, op.name.find("::")),
                           std::nullopt, family.entry.file, uint32_t(family.entry.line));
    define(library, op);
  }
  const bool is_last = contracts_waiting().size() == 1;
  if (is_last && calcops_jit::was_held()) check_all_kernels();
  contracts_waiting().pop_front();
}

// Return the text that help() shows below the schema.
std::string documentation(const Operator& op) {
  std::string text = op.schema.summary + '\n';
  const auto add = [&](const char* title, const std::vector<int>& lines) {
    text += title;
    for (const int line : lines)
      if (line >= 0) text += '\n' + op.text().lines[line].text;
    text += '\n';
  };
  add("", op.lines);
  if (!op.result_lines.empty()) add("\nReturns", op.result_lines);
  return op.schema.details.empty() ? text : text + '\n' + op.schema.details + '\n';
}

}  // namespace

void add_contract(const ContractEntry& contract) {
  contracts_waiting().push_back(contract);
  calcops_jit::Initializer({torch::Library::FRAGMENT, &define_next, contract.name_space,
                            std::nullopt, contract.file, uint32_t(contract.line)});
}

void add_kernel(const KernelEntry& kernel) {
  if (kernel.is_capturing) is_capturing = kernel.is_capturing;
  // A library without contracts has no block that checks its kernels. While contracts wait, the
  // block of the last one will.
  static const calcops_jit::Initializer check(
      {torch::Library::FRAGMENT,
       [](torch::Library&) {
         if (calcops_jit::was_held() && contracts_waiting().empty()) check_kernels_waiting();
       },
       kernel.name_space, std::nullopt, kernel.file, uint32_t(kernel.line)});
  kernels_waiting()[qualified(kernel.op, kernel.name_space)].push_back(kernel);
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
