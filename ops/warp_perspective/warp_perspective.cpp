// warp_perspective: its contracts, and the conversion of a call's views to the kernels' structs.
#include "warp_perspective/warp_perspective.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

#include <algorithm>
#include <string>
#include <vector>

#include "float16.h"
#include "warp_perspective/warp_perspective_derivatives.h"

template <>
struct calcops::TypeOf<calcops::Float16> {
  static constexpr Type value = Type::kFloat16;
};
template <>
struct calcops::TypeOf<calcops::BFloat16> {
  static constexpr Type value = Type::kBFloat16;
};

namespace calcops::ops::warp_perspective {
namespace {

// ---- checks and shapes --------------------------------------------------------------------------
//
// The arguments may lack dimensions, and one image or one matrix may serve all of the other. A
// contract cannot say that, so these functions check it.

// Raise an error unless there is one border value for all channels, or one for each.
void check_border(const Value& values, const Value& C) {
  if (values.is_none() || values.length() < 2 || C.expect_equal(values.length())) return;
  const std::string got = std::to_string(values.length()) + " values";
  refuse(kOp, "border_value", "of one value or C =", C, got.c_str());
}

void check_size(const char* name, const Value& size) {
  if (size.length() != 2 || !size[0].expect_at_least(0) || !size[1].expect_at_least(0))
    refuse(kOp, name, "(height, width), both >= 0", size);
}

void check_has_slopes(const Value& interpolation) {
  if (interpolation.is("nearest"))
    refuse(kOp, "interpolation", "\"linear\" or \"cubic\" for a slope", interpolation);
}

// Raise an error unless x has a shape. `what` says where it comes from.
void check_shape(const char* name, const Value& x, const char* what, const Value& shape) {
  bool is_same = x.dim() == shape.length();
  for (int d = 0; d < x.dim() && is_same; ++d) is_same = x.size(d).expect_equal(shape[d]);
  if (!is_same) refuse(kOp, name, what, shape, x.shape());
}

// (image, warp, dsize, interpolation, border_mode, border_value, inverse_map, destination)
void check(Value* arguments, Value* result_shapes) {
  const Dimensions dims(arguments[0], arguments[1]);
  const Value& dsize = arguments[2];
  const bool is_empty = dsize.length() == 0;
  if (!is_empty) check_size("dsize", dsize);
  const Value shape = is_empty ? dims.shape(dims.H, dims.W) : dims.shape(dsize[0], dsize[1]);
  check_border(arguments[5], dims.C);
  const Value& destination = arguments[7];
  const bool is_transparent = arguments[4].is("transparent");
  if (is_transparent && destination.is_none())
    refuse(kOp, "destination", "a tensor where `border_mode` is \"transparent\"", "none");
  if (!is_transparent && !destination.is_none())
    refuse(kOp, "destination", "none where `border_mode` is not \"transparent\"", "a tensor");
  if (is_transparent) check_shape("destination", destination, "of the result's shape", shape);
  result_shapes[0] = shape;
}

// (grad_result, image, warp, interpolation, border_mode, border_value, inverse_map, order_x,
// order_y, output_mask)
void check_backward(Value* arguments, Value*) {
  const Dimensions dims(arguments[1], arguments[2]);
  const Value& grad = arguments[0];
  check_border(arguments[5], dims.C);
  if (grad.dim() < 2) refuse(kOp, "grad_result", "of two dimensions or more", grad.shape());
  check_shape("grad_result", grad, "of shape", dims.shape(grad.size(-2), grad.size(-1)));
  if (!arguments[7].equals(0) || !arguments[8].equals(0)) check_has_slopes(arguments[3]);
}

// (image, warp, motion, interpolation, border_mode, border_value, inverse_map, order_x, order_y)
void check_slope(Value* arguments, Value* result_shapes) {
  const Dimensions dims(arguments[0], arguments[1]);
  const Value& motion = arguments[2];
  check_border(arguments[5], dims.C);
  check_has_slopes(arguments[3]);
  if (!motion.size(0).is_known(1) && !motion.size(0).expect_equal(dims.N))
    refuse(kOp, "motion", "of shape [1 or N, 3, height, width], [N] =", Value::list(dims.N),
           motion.shape());
  result_shapes[0] = dims.shape(motion.size(2), motion.size(3));
}

const Check kChecks[] = {{"warp_perspective", check}};
const Check kChecksOfDerivatives[] = {{"_warp_perspective_backward", check_backward},
                                      {"_warp_perspective_slope", check_slope}};

// ---- the contracts ------------------------------------------------------------------------------

const Contract kContract(R"(
warp_perspective(Tensor image, Tensor warp, SymInt[2] dsize=[], str interpolation="linear",
                 str border_mode="constant", float[1]? border_value=None, bool inverse_map=False,
                 Tensor? destination=None) -> Tensor result
  Perspective transformation of an image by a 3 x 3 matrix, as cv2.warpPerspective.

  Images and matrices may have leading dimensions `...`, such as [N] or [videos, frames], which must
  agree and are those of the result. If image or warp has none, or a single one of size 1, it serves
  all items of the other.

  The source of a result's pixel is the position in the image to which the matrix maps it. There is
  none if that position isn't finite or its homogeneous coordinate is 0. No pixel has a source if
  warp is zero or not finite, if the image has no pixels, or if warp must be inverted but is
  singular, or so nearly singular that rounding decides. A pixel without a source gets border_value,
  or the value in destination, and its gradients are exactly 0.

  Sources are computed in float64. Coordinates up to 10^4 are right to 1e-8 pixels, unless warp is
  nearly singular. Larger ones are less accurate near the horizon, where the error grows with their
  square. At the computed source, integers are the exact value rounded half to even. For images in
  [0, 1], float32 differs from the exact value by at most 2.4e-7, or 1e-6 if cubic.

  A pixel's taps are the image pixels that are weighted and summed for it. Taps of weight zero
  aren't used, so an identity map keeps NaN and infinity in their pixels.

  Differentiable to any order in a floating image, in warp and in destination, in reverse and
  forward mode. "nearest" is piecewise constant, so its gradient for warp is 0. "linear" has a kink
  at each pixel centre; the derivative there is the one towards larger x and y. With "transparent",
  it is the one towards smaller x in the last column, and smaller y in the last row.

  Deterministic on the CPU and on CUDA. On CUDA, the gradient for a channel of the image is summed
  in integers, in units of the channel's largest upstream gradient. This takes 16.25 bytes for each
  number of the image, as much as four float32 images. Second and higher derivatives also call
  PyTorch's operators. Autocast changes nothing.

image          any shape; uint8, uint16, int16, float16, bfloat16, float32 or float64. Of shape
               [..., C, H, W] or [H, W], with any strides.
warp           any shape; float32 or float64 read as float64. Of shape [..., 3, 3]. It maps
               (x, y, 1) of the source to the destination. Scaling the matrix changes nothing but
               rounding.
dsize          Size of the result as (height, width), both at least 0, or empty for (H, W). cv2's
               dsize is (width, height).
interpolation  "linear", "cubic" or "nearest". The kernel of "cubic" is Keys's with a = -0.75.
               "nearest" rounds the position half to even.
border_mode    "constant", "replicate", "reflect", "wrap", "reflect_101" or "transparent". Pixels
               around an image a b c d: "constant" v v|a b c d|v v, "replicate" a a|a b c d|d d,
               "reflect" b a|a b c d|d c, "wrap" c d|a b c d|a b, "reflect_101" c b|a b c d|c b,
               "transparent": a pixel whose source is outside keeps its value in `destination`.
               Outside means below 0 or above W - 1 or H - 1, after rounding for "nearest". cv2 also
               writes some pixels whose source is less than two pixels outside. Where taps of
               "cubic" are outside, "reflect_101" supplies them, as in OpenCV 4.
border_value   The v of border_mode: one float for all channels, or a list with one for each. None
               or [] is 0. It is converted to image's dtype.
inverse_map    True if warp maps the destination to the source (cv2.WARP_INVERSE_MAP).
destination    any shape; like image. Of the result's shape; required if border_mode is
               "transparent". It is copied, not written to.
result         any shape; like image. Of shape [..., C, height, width], or [..., height, width] if
               image is [H, W].
)",
                         kDerivativesOfWarp, kChecks);

// The derivatives have a contract of their own, because they take no images of integers.
const Contract kDerivativesContract(R"(
_warp_perspective_backward(Tensor grad_result, Tensor image, Tensor warp, str interpolation,
                           str border_mode, float[1]? border_value, bool inverse_map,
                           int order_x, int order_y,
                           bool[2] output_mask) -> (Tensor image, Tensor warp)
  Gradients for image and warp, from that for the result or for its slope. A gradient that is not
  wanted has no elements.

_warp_perspective_slope(Tensor image, Tensor warp, Tensor motion, str interpolation,
                        str border_mode, float[1]? border_value, bool inverse_map, int order_x,
                        int order_y) -> Tensor slope
  Derivative of the result along a motion of the sources. A pixel without a source is 0.

_warp_perspective_motion(Tensor right, Tensor matrices, Tensor left, SymInt image_height,
                         SymInt image_width, SymInt height, SymInt width, str interpolation,
                         str border_mode, bool inverse_map) -> Tensor motion
  Motion of the sources where warp moves along `right`, if `left` is warp (warp_perspective.h).

_warp_perspective_motion_backward(Tensor grad_motion, Tensor matrices, Tensor left,
                                  SymInt image_height, SymInt image_width, SymInt height,
                                  SymInt width, str interpolation, str border_mode,
                                  bool inverse_map) -> Tensor grad_right
  Gradient for `right` from that for the motion.

grad_result    any shape; like image. The gradient of the result, or of its slope.
image          any shape; float16, bfloat16, float32 or float64.
warp           any shape; float32 or float64 read as float64.
interpolation  "linear", "cubic" or "nearest".
border_mode    "constant", "replicate", "reflect", "wrap", "reflect_101" or "transparent".
border_value   As for calcops::warp_perspective.
inverse_map    As for calcops::warp_perspective.
order_x        0 to 1000. How often the result is differentiated for x.
order_y        0 to 1000. How often it is differentiated for y.
motion         [M, 3, height, width]; float64.
slope          any shape; like image.
matrices       [M, 3, 3]; float64. As warp.
left           [M, 3, 3]; float64.
right          [M, 3, 3]; float64.
image_height   0 to 2^40.
image_width    0 to 2^40.
height         0 to 2^40. Of the result.
width          0 to 2^40. Of the result.
grad_motion    [M, 3, height, width]; float64.
grad_right     [M, 3, 3]; float64.
)",
                                    kDerivativesOfDerivatives, kChecksOfDerivatives);

// ---- from views to the structs of warp_perspective.h --------------------------------------------

template <class Pixel>
using Image = Strided<const Pixel, 4>;
using Matrices = View<const double, 3>;
using Floats = List<double>;

// The inputs of a kernel, and the border value of each channel, to which they point. `values` has
// one value for all channels or one for each. Without values it is 0.
template <class Pixel>
struct Inputs {
  std::vector<double> border_value;
  WarpInputs<Pixel> in;

  Inputs(Image<Pixel> image, Matrices warp, Interpolation interpolation, Border border_mode,
         Floats values, bool inverse_map, const int64_t* out_shape, int64_t order_x = 0,
         int64_t order_y = 0)
      : border_value(image.shape[1], values.size == 1 ? values.data[0] : 0) {
    if (values.size > 1) std::copy_n(values.data, values.size, border_value.begin());
    const auto [image_batch, channels, height, width] = image.shape;
    const int64_t batch = image_batch == 1 ? warp.shape[0] : image_batch;
    in.sizes = {batch,       image_batch,  warp.shape[0], channels,    height,
                width,       out_shape[2], out_shape[3],  border_mode, interpolation,
                inverse_map, int(order_x), int(order_y)};
    in.image = image.data;
    std::copy_n(image.stride, 4, in.image_stride);
    in.warp = warp.data;
    in.border_value = border_value.data();
  }
};

// A motion needs no pixels of the image. It has three channels.
Image<double> image_without_pixels(int64_t height, int64_t width) {
  return {nullptr, {1, 3, height, width}, {}};
}

// A kernel for CUDA has a workspace and a stream as its last arguments, one for the CPU has none.
template <class Pixel, class... Device>
auto forward(Image<Pixel> image, Matrices warp, List<int64_t>, Interpolation interpolation,
             Border border_mode, Floats border_value, bool inverse_map,
             View<const Pixel, 4> destination, View<Pixel, 4> out, Device... device) {
  const Inputs<Pixel> inputs(image, warp, interpolation, border_mode, border_value, inverse_map,
                             out.shape);
  return warp_perspective(inputs.in, destination.data, out.data, device...);
}

template <class Real, class... Device>
auto backward(View<const Real, 4> grad, Image<Real> image, Matrices warp,
              Interpolation interpolation, Border border_mode, Floats border_value,
              bool inverse_map, int64_t order_x, int64_t order_y, View<Real, 4> grad_image,
              View<double, 3> grad_warp, Device... device) {
  const Inputs<Real> inputs(image, warp, interpolation, border_mode, border_value, inverse_map,
                            grad.shape, order_x, order_y);
  const WarpGradients<Real> to{grad.data, grad_image.data, grad_warp.data};
  return warp_perspective_backward(inputs.in, to, device...);
}

template <class Real, class... Device>
auto slope(Image<Real> image, Matrices warp, Motions motion, Interpolation interpolation,
           Border border_mode, Floats border_value, bool inverse_map, int64_t order_x,
           int64_t order_y, View<Real, 4> out, Device... device) {
  const Inputs<Real> inputs(image, warp, interpolation, border_mode, border_value, inverse_map,
                            out.shape, order_x, order_y);
  if (motion.shape[0] == 1) motion.stride[0] = 0;
  return warp_perspective_slope(inputs.in, motion, out.data, device...);
}

template <class... Device>
auto motion(Matrices right, Matrices warp, Matrices left, int64_t image_height, int64_t image_width,
            int64_t, int64_t, Interpolation interpolation, Border border_mode, bool inverse_map,
            View<double, 4> out, Device... device) {
  const Inputs<double> inputs(image_without_pixels(image_height, image_width), warp, interpolation,
                              border_mode, {}, inverse_map, out.shape);
  return warp_perspective_motion(inputs.in, left.data, right.data, out.data, device...);
}

template <class... Device>
auto motion_backward(View<const double, 4> grad_motion, Matrices warp, Matrices left,
                     int64_t image_height, int64_t image_width, int64_t, int64_t,
                     Interpolation interpolation, Border border_mode, bool inverse_map,
                     View<double, 3> grad_right, Device... device) {
  const Inputs<double> inputs(image_without_pixels(image_height, image_width), warp, interpolation,
                              border_mode, {}, inverse_map, grad_motion.shape);
  return warp_perspective_motion_backward(inputs.in, grad_motion.data, left.data, grad_right.data,
                                          device...);
}

// Registers the kernels for one device.
template <class... Device>
struct Kernels {
  Kernel results{"warp_perspective",           forward<uint8_t, Device...>,
                 forward<uint16_t, Device...>, forward<int16_t, Device...>,
                 forward<Float16, Device...>,  forward<BFloat16, Device...>,
                 forward<float, Device...>,    forward<double, Device...>};
  Kernel gradients{"_warp_perspective_backward", backward<float, Device...>,
                   backward<double, Device...>};
  Kernel slopes{"_warp_perspective_slope", slope<float, Device...>, slope<double, Device...>};
  Kernel motions{"_warp_perspective_motion", motion<Device...>};
  Kernel motion_gradients{"_warp_perspective_motion_backward", motion_backward<Device...>};
};

const Kernels<> kCpu;
#ifndef CALCOPS_NO_CUDA
const Kernels<Workspace&, cudaStream_t> kCuda;
#endif

}  // namespace
}  // namespace calcops::ops::warp_perspective
