// Registers a library's operators. The blocks of TORCH_LIBRARY in it
// (_calcops_jit/shadow/torch/library.h) are run once. Each def, impl and fallback in them becomes
// one or more steps. commit() registers all steps or none.
//
// In a C++ host that links or dlopens the library, its initialisers call commit(). calcops_jit's
// loader (live/registration.py) compares the steps first and then calls it. The initialisers must
// then not call commit(): the library is "held". While the loader opens the library, the dispatcher
// has an operator calcops_jit::holds with an overload that encodes the library's path. The
// initialisers look it up.
//
// A registration remains until the process ends, or until a newer library no longer has it. The
// newest kernel of an operator is called.
//
// TorchBind classes are not steps. libtorch registers a class while its block runs, and refuses
// the class of a newer library.
#include <dlfcn.h>
#include <torch/library.h>

#include <list>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// The linker's symbols at the beginning and the end of this library.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

namespace calcops_jit __attribute__((visibility("hidden"))) {

  // A def has a schema, a kernel has an operator but no schema, and a fallback has neither.
  struct Step {
    std::optional<c10::OperatorName> op;
    std::optional<c10::DispatchKey> key;
    std::optional<c10::FunctionSchema> schema;
    std::vector<at::Tag> tags;
    std::optional<std::pair<const char*, const char*>> python_module;
    c10::KernelFunction kernel;
    std::optional<c10::impl::CppSignature> signature;
    std::optional<c10::FunctionSchema> inferred;
    std::string where;

    c10::DispatchKey runtime_key() const {
      return key.value_or(c10::DispatchKey::CompositeImplicitAutograd);
    }

    // "operator" of a def, "operator key" of a kernel, " key" of a fallback.
    std::string name() const {
      const std::string operation = op ? c10::toString(*op) : "";
      return schema ? operation : operation + ' ' + c10::toString(runtime_key());
    }

    // Return a line for the loader: "def", name, schema and tags, or "impl", name and C++
    // signature.
    std::string describe() const {
      std::ostringstream line;
      if (schema) {
        line << "def\t" << name() << '\t' << *schema << '\t';
        for (at::Tag tag : tags) line << static_cast<int>(tag) << ' ';
      } else {
        line << "impl\t" << name() << '\t' << (kernel.isValidSymUnboxed() ? "SymInt " : "")
             << (signature ? signature->name() : "");
      }
      return line.str();
    }

    // Return where the step's name was registered in the dispatcher; "" if it was not.
    std::string registered() const {
      auto& dispatcher = c10::Dispatcher::singleton();
      if (!op) return dispatcher.hasBackendFallbackForDispatchKey(*key) ? "a fallback" : "";
      const auto live = schema ? dispatcher.findSchema(*op) : dispatcher.findOp(*op);
      if (!live) return "";
      if (schema) return live->debug();
      if (!live->hasKernelForDispatchKey(runtime_key())) return "";
      // The dump has a line for each kernel: "KEY: registered at FILE:LINE :: ...".
      const std::string state = live->dumpState();
      const auto line = state.find(std::string("\n") + c10::toString(runtime_key()));
      const auto at = state.find("registered at ", line);
      return line == at ? "a kernel" : state.substr(at, state.find(" ::", at) - at);
    }
  };

  // Each library has its own of these. They are never destroyed: kernels are called until the
  // process ends.
  struct Registry {
    std::vector<Block> blocks;
    std::vector<Step> steps;
    std::list<std::pair<std::string, c10::RegistrationHandleRAII>> live;  // (name, "" for a def)
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
      return c10::Dispatcher::singleton()
          .findSchema({"calcops_jit::holds", "p" + path})
          .has_value();
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
      if (committed) commit(steps.size() - 1);  // from a torch::Library outside a block
    }

    // Return "name\twhere\n" of each step whose name is registered already, except for the names in
    // the lines of `mine`.
    std::string taken(const std::string& mine) const {
      std::set<std::string> own_names;
      std::istringstream lines(mine);
      for (std::string name; std::getline(lines, name);) own_names.insert(name);
      std::string taken_names;
      for (const Step& step : steps) {
        if (own_names.count(step.name())) continue;
        const std::string where = step.registered();
        if (!where.empty()) taken_names += step.name() + '\t' + where + '\n';
      }
      return taken_names;
    }

    // Register the steps from `first` on, all or none.
    void commit(size_t first = 0) {
      auto& dispatcher = c10::Dispatcher::singleton();
      std::list<std::pair<std::string, c10::RegistrationHandleRAII>> done;  // undone if one throws
      for (size_t i = first; i < steps.size(); ++i) {
        const Step& step = steps[i];
        if (step.schema) {
          const auto op = dispatcher.findSchema(*step.op);
          if (op && op->schema() == *step.schema) continue;
          if (step.python_module)
            done.emplace_back("",
                              dispatcher.registerPythonModule(*step.op, step.python_module->first,
                                                              step.python_module->second));
          done.emplace_back("", dispatcher.registerDef(*step.schema, step.where, step.tags));
        } else if (step.op) {
          auto inferred =
              step.inferred ? std::make_unique<c10::FunctionSchema>(*step.inferred) : nullptr;
          done.emplace_back(step.name(),
                            dispatcher.registerImpl(*step.op, step.key, step.kernel, step.signature,
                                                    std::move(inferred), step.where));
        } else {
          done.emplace_back(step.name(),
                            dispatcher.registerFallback(*step.key, step.kernel, step.where));
        }
      }
      live.splice(live.end(), done);
      committed = true;
    }

    // Return the answer that `function` sets; if it throws, "error\t" and the message.
    template <class Function>
    const char* attempt(Function function) {
      answer.clear();
      try {
        function();
      } catch (const c10::Error& error) {
        answer = c10::str("error\t", error.what_without_backtrace());
      } catch (const std::exception& error) {
        answer = c10::str("error\t", error.what());
      }
      return answer.c_str();
    }
  };

  Initializer::Initializer(const Block& block) {
    Registry& registry = Registry::here();
    registry.blocks.push_back(block);
    if (registry.held) return;
    const size_t first = registry.steps.size();
    registry.committed = false;  // until all steps of the block are collected
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
  TORCH_CHECK(kind_ != IMPL, "def(\"", schema.operator_name(),
              "\") in a TORCH_LIBRARY_IMPL block at ", file_, ":", line_);
  schema.setNamespaceIfNotSet(ns_->c_str());
  TORCH_CHECK(*schema.getNamespace() == *ns_, "def(\"", schema.operator_name(),
              "\") in a block of namespace ", *ns_, " at ", file_, ":", line_);
  calcops_jit::Step step;
  step.op = schema.operator_name();
  if (out_name) *out_name = *step.op;
  step.schema = std::move(schema);
  step.tags = tags;
  step.python_module = python_module_;
  step.where = c10::str("registered at ", file_, ":", line_);
  calcops_jit::Registry::here().add(std::move(step));
  return *this;
}

Library& Library::_impl(const char* name, CppFunction&& f, _RegisterOrVerify) & {
  calcops_jit::Step step;
  step.op = _resolve(name);
  step.key = f.dispatch_key_ ? f.dispatch_key_ : dispatch_key_;
  TORCH_CHECK(!dispatch_key_ || *step.key == *dispatch_key_, "impl(\"", name, "\") for ", *step.key,
              " in a block for ", *dispatch_key_, " at ", file_, ":", line_);
  step.kernel = std::move(f.func_);
  step.signature = std::move(f.cpp_signature_);
  if (f.schema_) step.inferred = std::move(*f.schema_);
  step.where =
      f.debug_.empty() ? c10::str("registered at ", file_, ":", line_) : std::move(f.debug_);
  calcops_jit::Registry::here().add(std::move(step));
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

Library& Library::_fallback(CppFunction&& f) & {
  const auto key = f.dispatch_key_ ? f.dispatch_key_ : dispatch_key_;
  TORCH_CHECK(key && !ns_, "fallback() belongs into TORCH_LIBRARY_IMPL(_, <key>, m), not to ",
              file_, ":", line_);
  for (c10::DispatchKey each : c10::getRuntimeDispatchKeySet(*key)) {
    calcops_jit::Step step;
    step.key = each;
    step.kernel = f.func_;
    step.where = c10::str("registered at ", file_, ":", line_);
    calcops_jit::Registry::here().add(std::move(step));
  }
  return *this;
}

}  // namespace torch

// The loader calls these functions. The first two return "error\t..." if something throws.
#define CALCOPS_EXPORT extern "C" __attribute__((visibility("default"), used))
// Return the steps of the blocks, a line for each.
CALCOPS_EXPORT const char* calcops_jit_steps() {
  auto& registry = calcops_jit::Registry::here();
  return registry.attempt([&] {
    registry.collect();
    std::string lines;
    for (const auto& step : registry.steps) lines += step.describe() + '\n';
    registry.answer = std::move(lines);
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
    if (const auto taken = registry.taken(mine); !taken.empty()) {
      registry.answer = "taken\n" + taken;
      return;
    }
    registry.commit();
  });
}
// End this library's registrations of a name that a newer library no longer has.
CALCOPS_EXPORT void calcops_jit_retire(const char* name) {
  calcops_jit::Registry::here().live.remove_if(
      [&](const auto& step) { return step.first == name; });
}
#undef CALCOPS_EXPORT
