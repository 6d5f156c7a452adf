// Between checked tensors and a kernel that knows no torch: number types, pointers, and for CUDA
// the device, the stream and the workspace.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
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
