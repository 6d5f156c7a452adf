#pragma once
#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess, "the CUDA runtime refused: " #call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)
