// The one wording of errors: "calcops::op: expected `arg` <what>, got <what>".
// Texts are put together only when a check fails, so that a passing check costs a comparison.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <initializer_list>

namespace calcops {

// An argument on its way through the checks: which operator, which name, which tensor.
struct Arg {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

template <class Got, class... What>
void expect(const char* op, const char* arg, const c10::SymBool& ok, const Got& got,
            const What&... what) {
  // expect_true: under torch.compile and export the condition becomes a guard.
  TORCH_CHECK(ok.expect_true(__FILE__, __LINE__), op, ": expected `", arg, "` ", c10::str(what...),
              ", got ", got);
}

inline void expect_dtype(const Arg& arg, std::initializer_list<at::ScalarType> allowed,
                         const char* what) {
  expect(arg.op, arg.name, arg.tensor.defined(), "none", what);
  bool ok = false;
  for (at::ScalarType type : allowed) ok |= arg.tensor.scalar_type() == type;
  expect(arg.op, arg.name, ok, arg.tensor.scalar_type(), what);
}

inline void expect_device(const Arg& arg, const Arg& like) {
  expect(arg.op, arg.name, arg.tensor.device() == like.tensor.device(), arg.tensor.device(), "on ",
         like.tensor.device(), " like `", like.name, "`");
}

inline void expect_dtype_and_device(const Arg& arg, const Arg& like) {
  expect(arg.op, arg.name, arg.tensor.defined(), "none", "of dtype ", like.tensor.scalar_type(),
         " like `", like.name, "`");
  expect(arg.op, arg.name, arg.tensor.scalar_type() == like.tensor.scalar_type(),
         arg.tensor.scalar_type(), "of dtype ", like.tensor.scalar_type(), " like `", like.name,
         "`");
  expect_device(arg, like);
}

inline c10::SymBool same_shape(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) return false;
  c10::SymBool same = true;
  for (size_t i = 0; i < a.size(); ++i) same = same.sym_and(a[i].sym_eq(b[i]));
  return same;
}

#ifdef CALCOPS_NO_CUDA
// What the CUDA key of every operator holds in a build without CUDA; the macro says why and what
// fixes it.
inline void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": built without CUDA because ", CALCOPS_NO_CUDA);
}
#endif

}  // namespace calcops
