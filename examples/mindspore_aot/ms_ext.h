// Makes tensors of the arguments that MindSpore passes to an operator of type "aot", and checks
// them. MindSpore catches a std::exception and shows its text. Any other exception would end the
// process.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

inline at::ScalarType torch_dtype(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> dtypes = {
      {"bool", at::kBool},
      {"int8", at::kChar},
      {"int16", at::kShort},
      {"int32", at::kInt},
      {"int64", at::kLong},
      {"int", at::kInt},
      {"uint8", at::kByte},
      {"uint16", at::kUInt16},
      {"uint32", at::kUInt32},
      {"uint64", at::kUInt64},
      {"uint", at::kUInt32},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},
      {"float32", at::kFloat},
      {"float", at::kFloat},
      {"float64", at::kDouble},
      {"complex64", at::kComplexFloat},
      {"complex128", at::kComplexDouble},
      {"float8e4m3fn", at::kFloat8_e4m3fn},
      {"float8e5m2", at::kFloat8_e5m2}};
  const auto found = dtypes.find(name);
  TORCH_CHECK(found != dtypes.end(), "expected a dtype that PyTorch has, got ", name);
  return found->second;
}

// Return the inputs and outputs in MindSpore's order. They use MindSpore's memory, which is always
// contiguous. The pointer to a shape without dimensions is null. A tensor without elements may have
// no memory.
inline std::vector<at::Tensor> get_torch_tensors(int nparam, void** params, int* ndims,
                                                 int64_t** shapes, const char** dtypes,
                                                 c10::Device device) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < nparam; ++i) {
    const std::vector<int64_t> shape(shapes[i], shapes[i] + ndims[i]);
    int64_t count = 1;
    for (int64_t size : shape) {
      TORCH_CHECK(size >= 0, "expected known sizes for argument ", i, ", got ",
                  at::IntArrayRef(shape));
      count *= size;
    }
    TORCH_CHECK(params[i] || count == 0, "expected memory for argument ", i, " of shape ",
                at::IntArrayRef(shape), ", got none");
    const auto options = at::TensorOptions(device).dtype(torch_dtype(dtypes[i]));
    // Without target_device(), PyTorch would ask CUDA to which device the memory belongs. A tensor
    // without elements may have no memory.
    tensors.push_back(
        at::for_blob(params[i], shape).options(options).target_device(device).make_tensor());
  }
  return tensors;
}

// Check an output, whose sizes and dtype are those that the functions given to ops.Custom return.
// If they are wrong, ATen would resize the tensor, so that MindSpore does not see the result, or
// broadcast the result.
inline void expect_like(const char* name, const at::Tensor& tensor, const at::Tensor& right) {
  TORCH_CHECK(tensor.sizes() == right.sizes() && tensor.scalar_type() == right.scalar_type(),
              "expected `", name, "` of ", right.scalar_type(), ' ', right.sizes(), ", got ",
              tensor.scalar_type(), ' ', tensor.sizes());
}

// Call a function. The text of PyTorch's errors ends with the C++ stack, which is left out here.
template <class Function>
int aot_operator(const char* name, const Function& function) {
  try {
    function();
    return 0;
  } catch (const c10::Error& error) {
    throw std::runtime_error(std::string(name) + ": " + error.what_without_backtrace());
  }
}
