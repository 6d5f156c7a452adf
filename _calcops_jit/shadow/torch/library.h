// Lies before PyTorch's torch/library.h in what calcops_jit builds, so that a library can be
// exchanged for a newer one in a running process. A source registers as ever; here its
// TORCH_LIBRARY blocks are kept, and each def and impl in them becomes a step: a process that loads
// the library as calcops_jit does (loading.py) looks at the steps first and then takes all of them
// or none. For everybody else, a C++ host or a plain dlopen, they are taken at once.
//
// A def that is live already, word for word, is no step: a namespace may be loaded again. What was
// registered stays so until the process ends or a newer library no longer has it; the newest kernel
// of an operator is the one called.
#pragma once
#include <dlfcn.h>
#include_next <torch/library.h>

#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace calcops_jit __attribute__((visibility("hidden"))) {

  struct Block {
    torch::Library::Kind kind;
    void (*body)(torch::Library&);
    const char* ns;
    std::optional<c10::DispatchKey> key;
    const char* file;
    uint32_t line;
  };

  // A def has a schema; what has none and no operator either is a fallback for its key.
  struct Step {
    std::optional<c10::OperatorName> op;
    std::optional<c10::DispatchKey> key;
    std::optional<c10::FunctionSchema> schema;
    std::vector<at::Tag> tags;
    std::optional<std::pair<const char*, const char*>> python_module;
    c10::KernelFunction kernel;
    std::optional<c10::impl::CppSignature> signature;
    std::unique_ptr<c10::FunctionSchema> inferred;
    std::string where;

    // A line for the loader: "def", schema, tags or "impl", operator, key, C++ signature.
    std::string describe() const {
      std::ostringstream line;
      if (schema) {
        line << "def\t" << *schema << '\t';
        for (at::Tag tag : tags) line << static_cast<int>(tag) << ' ';
      } else {
        line << (op ? "impl\t" : "fallback\t");
        if (op) line << *op;
        line << '\t' << (key ? c10::toString(*key) : "CompositeImplicitAutograd") << '\t'
             << (kernel.isValidSymUnboxed() ? "SymInt " : "")
             << (signature ? signature->name() : "");
      }
      return line.str();
    }
  };

  // Each library has its own of these. They are never destroyed: kernels are called until the
  // process ends.
  struct Registry {
    std::vector<Block> blocks;
    std::vector<Step> steps;
    std::list<std::pair<std::string, c10::RegistrationHandleRAII>> live;  // impl, "operator key"
    std::string answer;
    bool collecting = false;

    static Registry& here() {
      static auto* registry = new Registry;
      return *registry;
    }

    // The loader's way to load is through a descriptor.
    static bool held() {
      Dl_info self;
      return dladdr(reinterpret_cast<void*>(&Registry::here), &self) && self.dli_fname &&
             std::strncmp(self.dli_fname, "/proc/self/fd/", 14) == 0;
    }

    void collect(const Block& block) {
      const auto kind = block.kind == torch::Library::DEF ? torch::Library::FRAGMENT : block.kind;
      torch::Library library(kind, block.ns, block.key, block.file, block.line);
      collecting = true;
      struct Reset {
        bool& flag;
        ~Reset() { flag = false; }
      } reset{collecting};
      block.body(library);
    }

    void collect() {
      steps.clear();
      for (const Block& block : blocks) collect(block);
    }

    void add(Step step) {
      steps.push_back(std::move(step));
      if (!collecting) commit();
    }

    void commit() {
      auto& dispatcher = c10::Dispatcher::singleton();
      std::list<std::pair<std::string, c10::RegistrationHandleRAII>> done;  // undone if one throws
      for (Step& step : std::exchange(steps, {})) {
        if (step.schema) {
          const auto op = dispatcher.findSchema(*step.op);
          if (op && op->schema() == *step.schema) continue;
          if (step.python_module)
            done.emplace_back("",
                              dispatcher.registerPythonModule(*step.op, step.python_module->first,
                                                              step.python_module->second));
          done.emplace_back("",
                            dispatcher.registerDef(std::move(*step.schema), step.where, step.tags));
        } else if (step.op) {
          const char* key = step.key ? c10::toString(*step.key) : "CompositeImplicitAutograd";
          done.emplace_back(c10::str(*step.op, ' ', key),
                            dispatcher.registerImpl(*step.op, step.key, std::move(step.kernel),
                                                    std::move(step.signature),
                                                    std::move(step.inferred), step.where));
        } else {
          done.emplace_back(
              "", dispatcher.registerFallback(*step.key, std::move(step.kernel), step.where));
        }
      }
      live.splice(live.end(), done);
    }

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

  struct Initializer {
    explicit Initializer(const Block& block) {
      Registry& registry = Registry::here();
      registry.blocks.push_back(block);
      if (Registry::held()) return;
      registry.collect(block);
      registry.commit();
    }
  };

  // PyTorch says once per process that a kernel is overridden. Here that is what was asked for.
  struct Unsurprised final : c10::WarningHandler {
    c10::WarningHandler* other = c10::WarningUtils::get_warning_handler();
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("verriding a previously registered kernel") == std::string::npos)
        other->process(warning);
    }
  };

}  // namespace calcops_jit

// What torch/library.h declares and libtorch defines for itself. The blocks' code calls these, its
// own helpers that take a torch::Library& too, and being members they may see what a CppFunction
// holds. hidden.map keeps them inside the library.
namespace torch {

inline Library& Library::_def(c10::FunctionSchema&& schema, c10::OperatorName* out_name,
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

inline Library& Library::_impl(const char* name, CppFunction&& f, _RegisterOrVerify) & {
  calcops_jit::Step step;
  step.op = _resolve(name);
  step.key = f.dispatch_key_ ? f.dispatch_key_ : dispatch_key_;
  TORCH_CHECK(!dispatch_key_ || *step.key == *dispatch_key_, "impl(\"", name, "\") for ", *step.key,
              " in a block for ", *dispatch_key_, " at ", file_, ":", line_);
  step.kernel = std::move(f.func_);
  step.signature = std::move(f.cpp_signature_);
  step.inferred = std::move(f.schema_);
  step.where =
      f.debug_.empty() ? c10::str("registered at ", file_, ":", line_) : std::move(f.debug_);
  calcops_jit::Registry::here().add(std::move(step));
  return *this;
}

inline Library& Library::_def(std::variant<c10::OperatorName, c10::FunctionSchema>&& name_or_schema,
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

inline Library& Library::_fallback(CppFunction&& f) & {
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

// What the loader calls. Blocks are run once for a look and the taking after it, and again when an
// older generation is taken once more.
#define CALCOPS_EXPORT extern "C" __attribute__((visibility("default"), used)) inline
// The steps, one a line; "error\t..." if a block throws.
CALCOPS_EXPORT const char* calcops_jit_steps() {
  auto& registry = calcops_jit::Registry::here();
  return registry.attempt([&] {
    std::string lines;
    registry.collect();
    for (const auto& step : registry.steps) lines += step.describe() + '\n';
    registry.answer = std::move(lines);
  });
}
// All of them or, with "error\t...", none.
CALCOPS_EXPORT const char* calcops_jit_commit() {
  auto& registry = calcops_jit::Registry::here();
  calcops_jit::Unsurprised unsurprised;
  c10::WarningUtils::WarningHandlerGuard guard(&unsurprised);
  return registry.attempt([&] {
    if (registry.steps.empty()) registry.collect();
    registry.commit();
  });
}
// Ends what this library has registered for `op key`: a newer one has nothing there.
CALCOPS_EXPORT void calcops_jit_retire(const char* op_and_key) {
  calcops_jit::Registry::here().live.remove_if(
      [&](const auto& impl) { return impl.first == op_and_key; });
}
#undef CALCOPS_EXPORT

#undef TORCH_LIBRARY
#undef TORCH_LIBRARY_FRAGMENT
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY(ns, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), DEF, ns, std::nullopt, m)
#define TORCH_LIBRARY_FRAGMENT(ns, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), FRAGMENT, ns, std::nullopt, m)
#define TORCH_LIBRARY_IMPL(ns, k, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), IMPL, ns, c10::DispatchKey::k, m)
#define CALCOPS_JIT_BLOCK(name, kind, ns, key, m)                                 \
  static void name(torch::Library&);                                              \
  static const ::calcops_jit::Initializer C10_CONCATENATE(name, _initializer)(    \
      {torch::Library::kind, &name, C10_STRINGIZE(ns), key, __FILE__, __LINE__}); \
  void name(torch::Library& m)
