// warp_perspective(image, warp) by OpenCV, and add(x, y), in the namespaces my_ops and myops.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <opencv2/imgproc.hpp>

namespace {

constexpr const char* kOp = "my_ops::warp_perspective";

void check(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, kOp, ": expected `", name,
              "` of dtype Float, got ", tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == 2, kOp, ": expected `", name, "` of two dimensions, got ",
              tensor.sizes());
}

// The bytes of a contiguous tensor as OpenCV sees them; nothing is copied. All that a cv::Mat is
// told of them is rows, columns and type. A transposed tensor has the same pointer, a sliced one
// gaps and a double one other bytes: without the checks and the contiguous() below each would give
// numbers, but wrong ones.
cv::Mat matrix(const at::Tensor& tensor) {
  return cv::Mat(static_cast<int>(tensor.size(0)), static_cast<int>(tensor.size(1)), CV_32FC1,
                 const_cast<float*>(tensor.const_data_ptr<float>()));
}

// dsize is (height, width), unlike cv::Size.
at::Tensor warp_perspective(const at::Tensor& image, const at::Tensor& warp,
                            at::IntArrayRef dsize) {
  check("image", image);
  check("warp", warp);
  TORCH_CHECK(image.numel() > 0, kOp, ": expected `image` with pixels, got ", image.sizes());
  TORCH_CHECK(warp.size(0) == 3 && warp.size(1) == 3, kOp,
              ": expected `warp` of shape [3, 3], got ", warp.sizes());
  TORCH_CHECK(dsize[0] > 0 && dsize[1] > 0, kOp, ": expected `dsize` of positive numbers, got ",
              dsize);
  at::Tensor output = at::empty(dsize, image.options());
  cv::Mat output_mat = matrix(output);
  // Lives until OpenCV is done: a cv::Mat does not own the tensor's memory.
  const at::Tensor pixels = image.contiguous(), numbers = warp.contiguous();
  cv::warpPerspective(matrix(pixels), output_mat, matrix(numbers), output_mat.size());
  return output;
}

at::Tensor warp_perspective_meta(const at::Tensor& image, const at::Tensor&,
                                 at::IntArrayRef dsize) {
  return at::empty(dsize, image.options());
}

at::Tensor add(const at::Tensor& x, const at::Tensor& y) { return at::add(x, y); }

void define(torch::Library& m) {
  m.def("warp_perspective(Tensor image, Tensor warp, int[2] dsize=[8, 8]) -> Tensor");
  m.impl("warp_perspective", c10::DispatchKey::CPU, TORCH_FN(warp_perspective));
  m.impl("warp_perspective", c10::DispatchKey::Meta, TORCH_FN(warp_perspective_meta));
  m.def("add(Tensor x, Tensor y) -> Tensor", TORCH_FN(add));
}

}  // namespace

// Fragments: TORCH_LIBRARY may stand once in a process for each namespace, and my_ops is a name
// that others use too.
TORCH_LIBRARY_FRAGMENT(my_ops, m) { define(m); }
TORCH_LIBRARY_FRAGMENT(myops, m) { define(m); }
