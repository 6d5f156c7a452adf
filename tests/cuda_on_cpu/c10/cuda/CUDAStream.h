#pragma once
#include "cuda_runtime_api.h"

namespace c10::cuda {
inline cudaStream_t getCurrentCUDAStream() { return cuda_on_cpu::current_stream(); }
}  // namespace c10::cuda
