// Registers a library's operators. This file is a part of runtime.cpp. The blocks of TORCH_LIBRARY
// in the library (_calcops_jit/shadow/torch/library.h) are run once. Each def and impl is a step.
// commit() registers all steps or none.
//
// In a C++ host, the library's initialisers call commit(). The loader (registration.py) compares
// the steps first. It "holds" the library: while opening it, it registers an operator
// calcops_jit::holds with an overload that encodes the library's path.
//
// A registration remains until the process ends, or until a newer library no longer has it. The
// newest kernel of an operator is called. TorchBind classes are no steps: libtorch registers a
// class while its block runs and refuses that of a newer library.
#include <dlfcn.h>
#include <torch/library.h>

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The linker's symbol at the beginning of this library.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];

namespace calcops_jit __attribute__((visibility("hidden"))) {

  using Handles = std::list<std::pair<std::string, c10::RegistrationHandleRAII>>;

  c10::Dispatcher& dispatcher() { return c10::Dispatcher::singleton(); }

  // A def or a kernel of an operator.
  struct Step {
    c10::OperatorName op;
    std::optional<c10::DispatchKey> key;  // of a kernel
    std::string name;                     // "operator" of a def, "operator key" of a kernel
    std::string line;  // for the loader: "def", name, schema, tags or "impl", name, C++ signature
    // Registers the step. The handles end the registration. Their name is "" for a def.
    std::function<void(Handles&)> apply;

    // Return where the name was registered in the dispatcher; "" if it was not.
    std::string place() const {
      const auto live = dispatcher().findOp(op);
      if (!live || !(key ? live->hasKernelForDispatchKey(*key) : live->hasSchema())) return "";
      if (!key) return live->debug();
      // The dump has a line for each kernel: "KEY: registered at FILE:LINE :: ...".
      const std::string state = live->dumpState();
      const auto at = state.find("registered at ", state.find(std::string("\n") + toString(*key)));
      return at == std::string::npos ? "a kernel" : state.substr(at, state.find(" ::", at) - at);
    }
  };

  // Return the message of the exception that is handled.
  std::string message() {
    try {
      throw;
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  // Each library has its own of these. They are never destroyed: kernels are called until the
  // process ends.
  struct Registry {
    std::vector<Block> blocks;
    std::vector<Step> steps;
    Handles live;
    const bool held = is_held();  // the loader calls commit()
    bool committed = !held;
    std::string answer;

    static Registry& here() {
      static auto* registry = new Registry;
      return *registry;
    }

    static bool is_held() {
      Dl_info self;
      if (!dladdr(__ehdr_start, &self) || !self.dli_fname) return false;
      std::string path;  // in hexadecimal digits, since an overload cannot contain slashes
      for (const char* c = self.dli_fname; *c; ++c)
        for (int digit : {(*c >> 4) & 15, *c & 15}) path += "0123456789abcdef"[digit];
      return dispatcher().findSchema({"calcops_jit::holds", "p" + path}).has_value();
    }

    // Run the blocks that have not run yet. A block that throws stays, and throws again next time.
    void collect() {
      for (; !blocks.empty(); blocks.erase(blocks.begin())) {
        const Block block = blocks.front();
        const auto kind = block.kind == torch::Library::DEF ? torch::Library::FRAGMENT : block.kind;
        torch::Library library(kind, block.ns, block.key, block.file, block.line);
        block.body(library);
      }
    }

    void add(Step step) {
      steps.push_back(std::move(step));
      if (committed && blocks.empty()) commit(steps.size() - 1);  // not from a block
    }

    // Register the steps from `first` on, all or none.
    void commit(size_t first = 0) {
      Handles done;  // undone if one throws
      for (size_t i = first; i < steps.size(); ++i) steps[i].apply(done);
      live.splice(live.end(), done);
      committed = true;
    }

    // Return the answer that `function` sets; if it throws, "error\t" and the message.
    template <class Function>
    const char* attempt(Function function) {
      answer.clear();
      try {
        function();
      } catch (const std::exception&) {
        answer = "error\t" + message();
      }
      return answer.c_str();
    }
  };

  // Return whether the loader opened this library.
  bool was_held() { return Registry::here().held; }

  Initializer::Initializer(const Block& block) {
    Registry& registry = Registry::here();
    registry.blocks.push_back(block);
    if (registry.held) return;
    const size_t first = registry.steps.size();
    registry.collect();
    registry.commit(first);
  }

  // Hides PyTorch's warning that a kernel is overridden, which is expected after a reload.
  struct OverrideFilter final : c10::WarningHandler {
    c10::WarningHandler* other = c10::WarningUtils::get_warning_handler();
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("verriding a previously registered kernel") == std::string::npos)
        other->process(warning);
    }
  };

}  // namespace calcops_jit

// These functions of torch/library.h replace libtorch's definitions within this library: hidden.map
// hides them from others. The blocks call them, and so do helpers that take a torch::Library&. As
// members they can read the private parts of a CppFunction.
namespace torch {

Library& Library::_def(c10::FunctionSchema&& schema, c10::OperatorName* out_name,
                       const std::vector<at::Tag>& tags, _RegisterOrVerify) & {
  schema.setNamespaceIfNotSet(ns_->c_str());
  TORCH_CHECK(*schema.getNamespace() == *ns_, "def(\"", schema.operator_name(),
              "\") in a block of namespace ", *ns_, " at ", file_, ":", line_);
  const c10::OperatorName op = schema.operator_name();
  if (out_name) *out_name = op;
  std::string line = c10::str("def\t", op, '\t', schema, '\t');
  for (const at::Tag tag : tags) line += std::to_string(static_cast<int>(tag)) + ' ';
  calcops_jit::Registry::here().add(
      {op,
       {},
       c10::toString(op),
       line,
       [op, schema, tags, module = python_module_,
        where = c10::str("registered at ", file_, ":", line_)](calcops_jit::Handles& done) {
         const auto live = calcops_jit::dispatcher().findSchema(op);
         if (!live || live->schema() != schema)
           done.emplace_back("", calcops_jit::dispatcher().registerDef(schema, where, tags));
         // PyTorch's error for an operator without a Meta kernel names the Python module.
         if (module && !calcops_jit::dispatcher().getPyStub(op))
           done.emplace_back("", calcops_jit::dispatcher().registerPythonModule(op, module->first,
                                                                                module->second));
       }});
  return *this;
}

Library& Library::_impl(const char* name, CppFunction&& f, _RegisterOrVerify) & {
  const c10::OperatorName op = _resolve(name);
  const auto key = f.dispatch_key_ ? f.dispatch_key_ : dispatch_key_;
  const auto runtime_key = key.value_or(c10::DispatchKey::CompositeImplicitAutograd);
  const std::string step = c10::toString(op) + ' ' + c10::toString(runtime_key);
  const std::string line =
      c10::str("impl\t", step, '\t', f.func_.isValidSymUnboxed() ? "SymInt " : "",
               f.cpp_signature_ ? f.cpp_signature_->name() : "");
  const std::string where =
      f.debug_.empty() ? c10::str("registered at ", file_, ":", line_) : f.debug_;
  calcops_jit::Registry::here().add(
      {op, runtime_key, step, line,
       [step, op, key, kernel = f.func_, signature = f.cpp_signature_, where,
        inferred = std::shared_ptr<c10::FunctionSchema>(std::move(f.schema_))](
           calcops_jit::Handles& done) {
         auto copy = inferred ? std::make_unique<c10::FunctionSchema>(*inferred) : nullptr;
         done.emplace_back(step, calcops_jit::dispatcher().registerImpl(op, key, kernel, signature,
                                                                        std::move(copy), where));
       }});
  return *this;
}

Library& Library::_def(std::variant<c10::OperatorName, c10::FunctionSchema>&& name_or_schema,
                       CppFunction&& f, const std::vector<at::Tag>& tags) & {
  if (auto* op = std::get_if<c10::OperatorName>(&name_or_schema)) {
    TORCH_CHECK(f.schema_, "def(\"", *op, "\"): a schema is needed, none can be inferred at ",
                file_, ":", line_);
    c10::FunctionSchema inferred = f.schema_->cloneWithName(op->name, op->overload_name);
    inferred.setAliasAnalysis(c10::AliasAnalysisKind::CONSERVATIVE);
    name_or_schema = std::move(inferred);
  }
  c10::OperatorName op("", "");
  _def(std::move(std::get<c10::FunctionSchema>(name_or_schema)), &op, tags);
  return _impl(c10::toString(op).c_str(), std::move(f));
}

Library& Library::_fallback(CppFunction&&) & {
  TORCH_CHECK(false, "calcops_jit registers no fallbacks, at ", file_, ":", line_);
}

}  // namespace torch

// The loader calls these functions. The first two return "error\t..." if something throws.
#define CALCOPS_EXPORT extern "C" __attribute__((visibility("default"), used))
// Return the steps of the blocks, a line for each.
CALCOPS_EXPORT const char* calcops_jit_steps() {
  auto& registry = calcops_jit::Registry::here();
  return registry.attempt([&] {
    registry.collect();
    for (const auto& step : registry.steps) registry.answer += step.line + '\n';
  });
}
// Register all steps and return "". If a name is registered already and is not in `mine`, register
// nothing and return "taken\n" and lines "name\twhere". If `mine` is "" and the library is
// registered already, do nothing.
CALCOPS_EXPORT const char* calcops_jit_commit(const char* mine) {
  auto& registry = calcops_jit::Registry::here();
  calcops_jit::OverrideFilter override_filter;
  c10::WarningUtils::WarningHandlerGuard guard(&override_filter);
  return registry.attempt([&] {
    registry.collect();
    if (registry.committed && !*mine) return;
    const std::string own_names = c10::str('\n', mine, '\n');
    std::string taken;
    for (const auto& step : registry.steps) {
      if (own_names.find('\n' + step.name + '\n') != std::string::npos) continue;
      if (const auto where = step.place(); !where.empty()) taken += step.name + '\t' + where + '\n';
    }
    if (taken.empty()) return registry.commit();
    registry.answer = "taken\n" + taken;
  });
}
// End this library's registrations of a name that a newer library no longer has.
CALCOPS_EXPORT void calcops_jit_retire(const char* name) {
  calcops_jit::Registry::here().live.remove_if(
      [&](const auto& step) { return step.first == name; });
}
