// Found before PyTorch's torch/library.h when calcops_jit compiles a source. The source's blocks of
// TORCH_LIBRARY are passed to contracts/runtime/registry.cpp, which is linked into the library. So
// a library can be exchanged for a newer one in a running process.
//
// A guard instead of #pragma once: a precompiled header may have another checkout's copy of this
// file.
#ifndef CALCOPS_JIT_TORCH_LIBRARY_H
#define CALCOPS_JIT_TORCH_LIBRARY_H
#include_next <torch/library.h>

#include <optional>

namespace calcops_jit __attribute__((visibility("hidden"))) {
  // A block of TORCH_LIBRARY, TORCH_LIBRARY_FRAGMENT or TORCH_LIBRARY_IMPL.
  struct Block {
    torch::Library::Kind kind;
    void (*body)(torch::Library&);
    const char* ns;
    std::optional<c10::DispatchKey> key;
    const char* file;
    uint32_t line;
  };

  template <size_t N>
  struct Text {
    char data[N];
  };

  // Returns the name of a file without its folder. So the folder is not in the library, and a copy
  // of the sources in another folder needs no build of its own.
  template <size_t N>
  constexpr Text<N> base_name(const char (&path)[N]) {
    Text<N> name{};
    size_t length = 0;
    for (size_t i = 0; i < N; ++i) {
      if (path[i] == '/') {
        while (length > 0) name.data[--length] = 0;
      } else {
        name.data[length++] = path[i];
      }
    }
    return name;
  }

  // Adds a block to the library's registry when the library is loaded.
  struct Initializer {
    explicit Initializer(const Block& block);
  };
}  // namespace calcops_jit

#undef TORCH_LIBRARY
#undef TORCH_LIBRARY_FRAGMENT
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY(ns, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), DEF, ns, std::nullopt, m)
#define TORCH_LIBRARY_FRAGMENT(ns, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), FRAGMENT, ns, std::nullopt, m)
#define TORCH_LIBRARY_IMPL(ns, k, m) \
  CALCOPS_JIT_BLOCK(C10_CONCATENATE(calcops_jit_block_, C10_UID), IMPL, ns, c10::DispatchKey::k, m)
#define CALCOPS_JIT_BLOCK(name, kind, ns, key, m)                                          \
  static void name(torch::Library&);                                                       \
  static constexpr auto C10_CONCATENATE(name, _file) = ::calcops_jit::base_name(__FILE__); \
  static const ::calcops_jit::Initializer C10_CONCATENATE(                                 \
      name, _initializer)({torch::Library::kind, &name, C10_STRINGIZE(ns), key,            \
                           C10_CONCATENATE(name, _file).data, __LINE__});                  \
  void name(torch::Library& m)
#endif
