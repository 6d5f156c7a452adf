// Between checked tensors and a kernel that knows no torch: number types, pointers, and for CUDA
// the device, the stream and the workspace.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#ifndef CALCOPS_NO_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace calcops {

// function(Real(), Index()) with the types that `real` (float32 or float64) and `index` (int32 or
// int64) hold.
template <class Function>
void with_types(const at::Tensor& real, const at::Tensor& index, Function function) {
  const auto with_index = [&](auto number) {
    index.scalar_type() == at::kInt ? function(number, int32_t()) : function(number, int64_t());
  };
  real.scalar_type() == at::kFloat ? with_index(float()) : with_index(double());
}

// Whether `count` fits into the number type of `index`.
inline bool holds(const at::Tensor& index, const c10::SymInt& count) {
  return index.scalar_type() == at::kLong || count.maybe_as_int().value_or(0) < int64_t(1) << 31;
}

inline at::Tensor contiguous(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->contiguous() : at::Tensor();
}

// A contiguous tensor's elements, nullptr of an undefined one. Reading leaves a copy-on-write
// tensor shared.
template <class Number>
const Number* read(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<Number>() : nullptr;
}

template <class Number>
Number* write(const at::Tensor& tensor, bool wanted) {
  return wanted ? tensor.mutable_data_ptr<Number>() : nullptr;
}

// Whether CALCOPS_CHECK=1 asks for a look at what the tensor holds. A CUDA graph that is being
// captured cannot wait for the answer.
inline bool contents_are_checked(const at::Tensor& tensor) {
  const char* wanted = std::getenv("CALCOPS_CHECK");
  if (!wanted || std::strcmp(wanted, "1") != 0) return false;
#ifndef CALCOPS_NO_CUDA
  if (tensor.is_cuda())
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
#endif
  return tensor.is_cpu();
}

// Within a handler: an error that names `arg` where the CPU had too little memory, otherwise the
// same exception again.
[[noreturn]] inline void rethrow(const char* op, const char* arg, const c10::SymInt& got) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
  } catch (const c10::Error& error) {
    if (!std::strstr(error.what_without_backtrace(), "can't allocate memory")) throw;
  }
  TORCH_CHECK(false, op, ": expected `", arg, "` for which memory suffices, got ", got);
}

#ifndef CALCOPS_NO_CUDA
// launcher(workspace, stream) on the device of `like`, in its current stream and in `bytes` of
// device memory.
template <class Launcher>
void launch(const at::Tensor& like, int64_t bytes, Launcher launcher) {
  const c10::DeviceGuard guard(like.device());
  const at::Tensor workspace = at::empty({bytes}, like.options().dtype(at::kByte));
  C10_CUDA_CHECK(launcher(workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
}
#endif

}  // namespace calcops
