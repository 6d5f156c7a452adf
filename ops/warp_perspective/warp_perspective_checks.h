// The checks of warp_perspective and of the operators behind it, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "calcops/expect.h"
#include "warp_perspective/warp_perspective.h"

namespace calcops {

using at::Tensor;
using c10::SymInt;

constexpr const char* kWarp = "calcops::warp_perspective";
constexpr const char* kBackward = "calcops::_warp_perspective_backward";
constexpr const char* kTangent = "calcops::_warp_perspective_tangent";
constexpr const char* kCells = "calcops::_warp_perspective_cells";

inline Border border_of(const char* op, std::string_view border_mode) {
  if (border_mode == "constant") return Border::kConstant;
  if (border_mode == "replicate") return Border::kReplicate;
  if (border_mode == "reflect") return Border::kReflect;
  if (border_mode == "wrap") return Border::kWrap;
  if (border_mode == "reflect_101") return Border::kReflect101;
  if (border_mode == "transparent") return Border::kTransparent;
  expect(op, "border_mode", false, c10::str('"', border_mode, '"'),
         "\"constant\", \"replicate\", \"reflect\", \"wrap\", \"reflect_101\" or \"transparent\"");
  return {};
}

inline Interpolation interpolation_of(const char* op, std::string_view interpolation) {
  if (interpolation == "nearest") return Interpolation::kNearest;
  if (interpolation == "linear") return Interpolation::kLinear;
  if (interpolation == "cubic") return Interpolation::kCubic;
  expect(op, "interpolation", false, c10::str('"', interpolation, '"'),
         "\"linear\", \"cubic\" or \"nearest\"");
  return {};
}

inline void check_dsize(const char* op, c10::SymIntArrayRef dsize) {
  expect(op, "dsize",
         dsize.size() == 2 ? dsize[0].sym_ge(0).sym_and(dsize[1].sym_ge(0)) : c10::SymBool(false),
         dsize, "(height, width), both >= 0");
}

inline bool is_opencv4(const char* op, std::string_view arithmetic) {
  expect(op, "arithmetic", arithmetic == "exact" || arithmetic == "opencv4",
         c10::str('"', arithmetic, '"'), "\"exact\" or \"opencv4\"");
  return arithmetic == "opencv4";
}

// [N, C, H, W] and [N, 3, 3], N and C being 1 where they are absent.
inline Tensor image_batch(const Tensor& image) {
  return image.dim() == 2   ? image.unsqueeze(0).unsqueeze(0)
         : image.dim() == 3 ? image.unsqueeze(0)
                            : image;
}

inline Tensor warp_batch(const Tensor& warp) { return warp.dim() == 2 ? warp.unsqueeze(0) : warp; }

// The gradient of an input from those of the N items, which one input may serve together.
inline Tensor for_input(const Tensor& items, const SymInt& batch, const Tensor& input) {
  const bool one_each = items.sym_size(0).sym_eq(batch).guard_bool(__FILE__, __LINE__);
  return (one_each ? items : items.sum(0))
      .reshape_symint(input.sym_sizes())
      .to(input.scalar_type());
}

struct Shape {
  SymInt batch, image_batch, warp_batch, channels, height, width;
  bool has_batch, has_channels;

  c10::SymDimVector out(const SymInt& height, const SymInt& width) const {
    c10::SymDimVector sizes;
    if (has_batch) sizes.push_back(batch);
    if (has_channels) sizes.push_back(channels);
    sizes.push_back(height);
    sizes.push_back(width);
    return sizes;
  }
};

inline void check_matrix(const char* op, const Tensor& warp) {
  expect_dtype({op, "warp", warp}, {at::kFloat, at::kDouble}, "of dtype float32 or float64");
  expect(op, "warp",
         warp.dim() == 2 || warp.dim() == 3
             ? warp.sym_size(-2).sym_eq(3).sym_and(warp.sym_size(-1).sym_eq(3))
             : c10::SymBool(false),
         warp.sym_sizes(), "of shape [3, 3] or [N, 3, 3]");
}

inline Shape check_inputs(const char* op, const Tensor& image, const Tensor& warp) {
  expect_dtype(
      {op, "image", image},
      {at::kByte, at::kUInt16, at::kShort, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble},
      "of dtype uint8, uint16, int16, float16, bfloat16, float32 or float64");
  expect(op, "image", image.dim() >= 2 && image.dim() <= 4, image.sym_sizes(),
         "of shape [H, W], [C, H, W] or [N, C, H, W]");
  check_matrix(op, warp);
  expect_device({op, "warp", warp}, {op, "image", image});

  Shape shape;
  shape.has_batch = image.dim() == 4 || warp.dim() == 3;
  shape.has_channels = image.dim() >= 3;
  shape.image_batch = image.dim() == 4 ? image.sym_size(0) : SymInt(1);
  shape.warp_batch = warp.dim() == 3 ? warp.sym_size(0) : SymInt(1);
  shape.channels = shape.has_channels ? image.sym_size(-3) : SymInt(1);
  shape.height = image.sym_size(-2);
  shape.width = image.sym_size(-1);
  // A batch whose size is not known cannot be asked whether it is 1; with one matrix it need not
  // be.
  const c10::SymBool one_image = shape.image_batch.sym_eq(1);
  if (shape.warp_batch.maybe_as_int() == 1) {
    shape.batch = shape.image_batch;
    return shape;
  }
  expect(op, "warp",
         one_image.sym_or(shape.warp_batch.sym_eq(1))
             .sym_or(shape.warp_batch.sym_eq(shape.image_batch)),
         warp.sym_sizes(), "with N = 1 or that of `image`, ", shape.image_batch);
  shape.batch = one_image.guard_bool(__FILE__, __LINE__) ? shape.warp_batch : shape.image_batch;
  return shape;
}

// The height and width of the result: the image's where `dsize` is empty. A result of which nobody
// has the memory is refused here, as long as its size is known.
inline std::array<SymInt, 2> size_of_result(const char* op, c10::SymIntArrayRef dsize,
                                            const Shape& shape) {
  if (dsize.empty()) return {shape.height, shape.width};
  check_dsize(op, dsize);
  int64_t bytes = 8;
  bool fits = true;
  for (const SymInt& size : {shape.batch, shape.channels, dsize[0], dsize[1]})
    fits &= !__builtin_mul_overflow(bytes, std::max<int64_t>(size.maybe_as_int().value_or(1), 1),
                                    &bytes);  // strides of an empty result have the others' sizes
  expect(op, "dsize", fits && bytes < int64_t(1) << 47, dsize, "for which memory suffices");
  return {dsize[0], dsize[1]};
}

// What OpenCV 4 takes.
inline void check_opencv4(const char* op, const Tensor& image, const Shape& shape,
                          std::string_view interpolation) {
  constexpr const char* kWhere = " where `arithmetic` is \"opencv4\"";
  const at::ScalarType type = image.scalar_type();
  expect(op, "image", type != at::kHalf && type != at::kBFloat16, type,
         "of dtype uint8, uint16, int16, float32 or float64", kWhere);
  expect(op, "image", shape.height.sym_lt(INT16_MAX).sym_and(shape.width.sym_lt(INT16_MAX)),
         image.sym_sizes(), "of height and width below ", INT16_MAX, kWhere);
  expect(op, "interpolation", interpolation != "cubic", "\"cubic\"", "\"linear\" or \"nearest\"",
         kWhere);
}

// What a transparent border keeps; there is one with that border, and with no other.
inline void check_destination(const char* op, const Tensor& destination, const Tensor& image,
                              const Shape& shape, c10::SymIntArrayRef dsize, Border border) {
  const bool transparent = border == Border::kTransparent;
  expect(op, "destination", destination.defined() == transparent, transparent ? "none" : "a tensor",
         transparent ? "a tensor" : "none", " with this `border_mode`");
  if (!transparent) return;
  expect_dtype_and_device({op, "destination", destination}, {op, "image", image});
  const c10::SymDimVector sizes = shape.out(dsize[0], dsize[1]);
  expect(op, "destination", same_shape(destination.sym_sizes(), sizes), destination.sym_sizes(),
         "of the result's shape ", c10::SymIntArrayRef(sizes));
}

}  // namespace calcops
