// The derivatives of warp_perspective and of the operators behind it.
//
// The result is linear in the image. Where warp moves along a tangent, the source of each pixel
// moves, and the result changes along this motion. Four operators give all derivatives to any
// order:
//
// - _warp_perspective_motion(warp; left, right) is the motion a = (x', y', W'/W) of the sources
//   where m moves along m'(left, right), which is linear in `left` and in `right`. The tangent t of
//   warp gives a = motion(warp; warp, t). If warp also moves along s, then a changes by
//
//     motion(warp; s, t) - (x_s w_t + x_t w_s, y_s w_t + y_t w_s, w_s w_t)
//
//   with (x_s, y_s, w_s) = motion(warp; warp, s), and (x_t, y_t, w_t) = a.
// - _warp_perspective_motion_backward is the gradient for `right`, and so also that for `left`.
// - _warp_perspective_slope is the derivative of the result along a motion. It differentiates the
//   result once for x and for y, after `order_x` and `order_y` times.
// - _warp_perspective_backward has the gradients of the result, or of its derivative of an order.
#pragma once

#include <calcops/operator.h>

#include <vector>

#include "warp_perspective/warp_perspective.h"

namespace calcops::ops::warp_perspective {

constexpr char kOp[] = "calcops::warp_perspective";

// Return the sizes of a tensor's first dimensions, up to its last `count`.
inline std::vector<Value> leading_sizes(const Value& x, int count) {
  std::vector<Value> sizes;
  for (int d = 0; d < x.dim() - count; ++d) sizes.push_back(x.size(d));
  return sizes;
}

inline Value product_of(const std::vector<Value>& sizes) {
  Value product = 1;
  for (const Value& size : sizes) product = product * size;
  return product;
}

// The dimensions of one call's image and warp. Those before C and before the matrix count results.
// An image or a matrix without them, or with a single one of size 1, serves all results.
struct Dimensions {
  std::vector<Value> leading;  // of the result
  Value N, C = 1, H, W;        // N is the number of results: the product of `leading`
  bool has_C;

  Dimensions(const Value& image, const Value& warp) {
    if (image.dim() < 2) refuse(kOp, "image", "of shape [..., C, H, W] or [H, W]", image.shape());
    has_C = image.dim() > 2;
    H = image.size(-2);
    W = image.size(-1);
    if (has_C) C = image.size(-3);
    const std::vector<Value> of_image = leading_sizes(image, 3), of_warp = leading_sizes(warp, 2);
    const bool is_matrix =
        warp.dim() >= 2 && warp.size(-2).expect_equal(3) && warp.size(-1).expect_equal(3);
    const bool warp_serves_all = of_warp.empty() || is_known_one(of_warp);
    // A guard is needed only if neither size is known.
    const bool image_serves_all =
        of_image.empty() || is_known_one(of_image) || (!warp_serves_all && is_one(of_image));
    leading = image_serves_all && !of_warp.empty() ? of_warp : of_image;
    N = product_of(leading);
    if (is_matrix &&
        (image_serves_all || warp_serves_all || is_one(of_warp) || are_equal(of_image, of_warp)))
      return;
    const char* const what = "of shape [..., 3, 3]";
    if (image_serves_all) refuse(kOp, "warp", what, warp.shape());
    refuse(kOp, "warp", "of shape [..., 3, 3] or [3, 3], [...] =",
           Value::list_of(of_image.data(), int(of_image.size())), warp.shape());
  }

  // Return the shape of a result.
  Value shape(const Value& height, const Value& width) const {
    std::vector<Value> sizes = leading;
    if (has_C) sizes.push_back(C);
    sizes.push_back(height);
    sizes.push_back(width);
    return Value::list_of(sizes.data(), int(sizes.size()));
  }

 private:
  static bool is_known_one(const std::vector<Value>& sizes) {
    return sizes.size() == 1 && sizes[0].is_known(1);
  }
  static bool is_one(const std::vector<Value>& sizes) {
    return sizes.size() == 1 && sizes[0].equals(1);
  }
  static bool are_equal(const std::vector<Value>& a, const std::vector<Value>& b) {
    bool is_same = a.size() == b.size();
    for (size_t d = 0; d < a.size() && is_same; ++d) is_same = a[d].expect_equal(b[d]);
    return is_same;
  }
};

namespace warp_derivatives {

inline constexpr auto call = [](const char* op, const auto&... values) {
  return Value::call(op, values...);
};

inline Value to_float64(const Value& x) {
  return call("aten::to.dtype", x, Value::dtype_of(Type::kFloat64));
}

inline Value to_dtype_of(const Value& x, const Value& other) {
  return call("aten::to.dtype", x, other.dtype());
}

inline Value sum(const Value& x, int64_t dimension) {
  return call("aten::sum.dim_IntList", x, Value::list(dimension), /*keepdim=*/true);
}

inline Value minus(const Value& x) { return call("aten::neg", x); }

// Return zeros of a shape that take the memory of one number.
inline Value zeros(const Value& like, const Value& shape) {
  return call("aten::expand", call("aten::new_zeros", like, Value::list(1)), shape);
}

inline void add(Value& sum, const Value& term) { sum = sum.is_none() ? term : sum + term; }

// ---- motions [N, 3, h, w] -----------------------------------------------------------------------

inline Value plane_part(const Value& motion) { return call("aten::narrow", motion, 1, 0, 2); }
inline Value spread(const Value& motion) { return call("aten::narrow", motion, 1, 2, 1); }
inline Value joined(const Value& first, const Value& second) {
  return call("aten::cat", Value::list(first, second), 1);
}

// Return what the motion a loses where warp moves and thereby gives the motion b (above).
inline Value product(const Value& a, const Value& b) {
  return joined(plane_part(a) * spread(b) + plane_part(b) * spread(a), spread(a) * spread(b));
}

// Return the gradient of sum(grad * product(a, b)) for b.
inline Value product_gradient(const Value& grad, const Value& a) {
  return joined(plane_part(grad) * spread(a), sum(grad * a, 1));
}

// The map from the pixels of a result to their sources, by matrices [N, 3, 3] of float64. `options`
// are the last arguments of both operators, from image_height on.
struct Map {
  static constexpr int kOptions = 7;
  Value matrices, options[kOptions];

  Map(const Value& matrices, const Value* from) : matrices(matrices) {
    for (Value& option : options) option = *from++;
  }

  Value call_with(const char* op, const Value& x, const Value& left) const {
    const Value* o = options;
    return call(op, x, matrices, left, o[0], o[1], o[2], o[3], o[4], o[5], o[6]);
  }
  Value motion(const Value& left, const Value& right) const {
    return call_with("_warp_perspective_motion", right, left);
  }
  // Return the gradient of sum(grad * motion(left, right)) for `right`. For `left`, exchange them.
  Value gradient(const Value& grad, const Value& left) const {
    return call_with("_warp_perspective_motion_backward", grad, left);
  }

  // Return whether motion() depends on `left`.
  bool has_left() const { return options[kOptions - 1].item() == 0; }

  // Set the gradients of sum(grad * motion(left, right)) for `matrices` and `left`.
  void differentiate(const Value& grad, const Value& left, const Value& right, Value& of_matrices,
                     Value& of_left) const {
    if (of_matrices.is_wanted())
      of_matrices = minus(gradient(product_gradient(grad, motion(left, right)), matrices));
    if (of_left.is_wanted() && has_left()) of_left = gradient(grad, right);
  }
};

// _warp_perspective_motion(right, matrices, left, image_height, ..., inverse_map)

inline void motion_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Map map(arguments[1], arguments + 3);
  const Value &right = arguments[0], &left = arguments[2], &grad = upstream[0];
  if (gradients[0].is_wanted()) gradients[0] = map.gradient(grad, left);
  map.differentiate(grad, left, right, gradients[1], gradients[2]);
}

inline void motion_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Map map(arguments[1], arguments + 3);
  const Value &right = arguments[0], &left = arguments[2];
  if (!tangents[0].is_none()) results[0] = map.motion(left, tangents[0]);
  if (!tangents[1].is_none())
    add(results[0], minus(product(map.motion(left, right), map.motion(map.matrices, tangents[1]))));
  if (!tangents[2].is_none() && map.has_left()) add(results[0], map.motion(tangents[2], right));
}

// _warp_perspective_motion_backward(grad_motion, matrices, left, image_height, ..., inverse_map)

inline void motion_backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Map map(arguments[1], arguments + 3);
  const Value &grad = arguments[0], &left = arguments[2], &right = upstream[0];
  if (gradients[0].is_wanted()) gradients[0] = map.motion(left, right);
  map.differentiate(grad, left, right, gradients[1], gradients[2]);
}

inline void motion_backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Map map(arguments[1], arguments + 3);
  const Value &grad = arguments[0], &left = arguments[2];
  if (!tangents[0].is_none()) results[0] = map.gradient(tangents[0], left);
  if (!tangents[1].is_none()) {
    const Value moved = map.motion(map.matrices, tangents[1]);
    add(results[0], minus(map.gradient(product_gradient(grad, moved), left)));
  }
  if (!tangents[2].is_none() && map.has_left()) add(results[0], map.gradient(grad, tangents[2]));
}

// ---- results and their slopes -------------------------------------------------------------------

// The arguments of one call of warp_perspective, of its slope or of its gradients.
struct Warping {
  Value image, warp, interpolation, border_mode, border_value, inverse_map;
  Value order[2] = {0, 0};  // for x and for y

  // `arguments` begin with `image`. There are `skipped` arguments between warp and interpolation.
  Warping(const Value* arguments, int skipped, bool has_order)
      : image(arguments[0]),
        warp(arguments[1]),
        interpolation(arguments[2 + skipped]),
        border_mode(arguments[3 + skipped]),
        border_value(arguments[4 + skipped]),
        inverse_map(arguments[5 + skipped]) {
    for (int axis = 0; axis < 2 && has_order; ++axis) order[axis] = arguments[6 + skipped + axis];
  }

  // Return the call with another image and a border of 0.
  Warping of(const Value& other_image) const {
    Warping other = *this;
    other.image = other_image;
    other.border_value = nullptr;
    return other;
  }

  // Return the call with an image of float64, differentiated once more for x (axis 0) or for y.
  Warping derivative(int axis, int times = 1) const {
    Warping other = *this;
    other.image = to_float64(image);
    other.order[axis] = order[axis] + times;
    return other;
  }

  // Return a result as [N, C, h, w] in float64, and such numbers as a result.
  Value items(const Value& result) const {
    const Dimensions dims(image, warp);
    const Value shape = Value::list(dims.N, dims.C, result.size(-2), result.size(-1));
    return call("aten::reshape", to_float64(result), shape);
  }
  Value result(const Value& items) const {
    const Value shape = Dimensions(image, warp).shape(items.size(-2), items.size(-1));
    return to_dtype_of(call("aten::reshape", items, shape), image);
  }

  // Return matrices as [M, 3, 3] in float64.
  static Value matrices(const Value& warp) {
    const Value count = product_of(leading_sizes(warp, 2));
    return call("aten::reshape", to_float64(warp), Value::list(count, 3, 3));
  }

  Map map(const Value& height, const Value& width) const {
    const Value options[] = {image.size(-2), image.size(-1), height,     width,
                             interpolation,  border_mode,    inverse_map};
    return {matrices(warp), options};
  }

  // Return the derivative of the result along a motion.
  Value slope(const Value& motion) const {
    return call("_warp_perspective_slope", image, warp, motion, interpolation, border_mode,
                border_value, inverse_map, order[0], order[1]);
  }

  // Return the derivative of the result for x (axis 0) or for y.
  Value slope(int axis, const Value& height, const Value& width) const {
    const Value rows =
        call("aten::eye", 3, Value::dtype_of(Type::kFloat64), /*layout=*/nullptr, image.device());
    const Value row = call("aten::narrow", rows, 0, axis, 1);
    return slope(call("aten::expand", call("aten::reshape", row, Value::list(1, 3, 1, 1)),
                      Value::list(1, 3, height, width)));
  }

  // Return the derivative of the result along a tangent of warp.
  Value slope_along(const Value& tangent, const Value& height, const Value& width) const {
    const Map map = this->map(height, width);
    return slope(map.motion(map.matrices, matrices(tangent)));
  }

  // Return the result without the constant that border_value adds, or its derivative of the call's
  // order. `destination` has the result's shape. Its values are used only for a transparent border.
  Value linear_part(const Value& destination) const {
    const Value height = destination.size(-2), width = destination.size(-1);
    for (int axis = 0; axis < 2; ++axis)
      if (!order[axis].equals(0))
        return to_dtype_of(of(image).derivative(axis, -1).slope(axis, height, width), image);
    const bool is_kept = border_mode.is("transparent");
    return call("warp_perspective", image, warp, Value::list(height, width), interpolation,
                border_mode, nullptr, inverse_map, is_kept ? destination : Value());
  }

  // Return [grad_image, grad_warp].
  Value gradients(const Value& grad, bool of_image, bool of_warp) const {
    return call("_warp_perspective_backward", grad, image, warp, interpolation, border_mode,
                border_value, inverse_map, order[0], order[1], Value::list(of_image, of_warp));
  }

  Value warp_gradient(const Value& grad) const { return gradients(grad, false, true)[1]; }

  // Return whether the result's derivative for warp is 0.
  bool is_flat() const { return interpolation.is("nearest"); }
};

inline Value along(const Value& motion, int axis) {
  return call("aten::narrow", motion, 1, axis, 1);
}

// Add the gradients of sum(grad * slope(motion)) to those that are wanted: of image, of warp while
// the motion is constant, and of the motion.
inline void add_slope_gradients(const Warping& warping, const Value& motion, const Value& grad,
                                Value& of_image, Value& of_warp, Value& of_motion) {
  const bool wants_image = of_image.is_wanted(), wants_warp = of_warp.is_wanted();
  const Value g = warping.items(grad);
  Value to_image, slopes[2];
  for (int axis = 0; axis < 2; ++axis) {
    const Warping derivative = warping.derivative(axis);
    if (wants_image || wants_warp) {
      const Value moved = derivative.result(g * along(motion, axis));
      const Value both = derivative.gradients(moved, wants_image, wants_warp);
      if (wants_image) add(to_image, both[0]);
      if (wants_warp) add(of_warp, both[1]);
    }
    if (of_motion.is_wanted())
      slopes[axis] =
          warping.items(warping.derivative(axis, 0).slope(axis, motion.size(2), motion.size(3)));
  }
  if (wants_image) add(of_image, to_dtype_of(to_image, warping.image));
  if (!of_motion.is_wanted()) return;
  Value of_axes[2];
  for (int axis = 0; axis < 2; ++axis) {
    // The gradient of a pixel without a source may be NaN. Where it is finite, it is needed for the
    // derivatives of the slope, also if that is 0.
    const Value has_slope = call("aten::ne.Scalar", slopes[axis], 0);
    const Value is_used = call("aten::logical_or", has_slope, call("aten::isfinite", g));
    const Value used = call("aten::where.ScalarOther", is_used, g, 0.0);
    of_axes[axis] = sum(used * slopes[axis], 1);
    if (motion.size(0).equals(1)) of_axes[axis] = sum(of_axes[axis], 0);
  }
  const Value of_spread = zeros(of_axes[0], of_axes[0].shape());
  add(of_motion, joined(joined(of_axes[0], of_axes[1]), of_spread));
}

// Add the gradients of sum(grad * slope_along(tangent)) to the wanted ones of image and warp.
inline void add_gradients(const Warping& warping, const Value& tangent, const Value& grad,
                          Value& of_image, Value& of_warp) {
  if (warping.is_flat() || (!of_image.is_wanted() && !of_warp.is_wanted())) return;
  const Map map = warping.map(grad.size(-2), grad.size(-1));
  const Value left = map.matrices, right = Warping::matrices(tangent);
  Value of_motion = of_warp.is_wanted() ? Value() : Value(false);
  add_slope_gradients(warping, map.motion(left, right), grad, of_image, of_warp, of_motion);
  if (!of_warp.is_wanted()) return;
  Value of_matrices[2];
  map.differentiate(of_motion, left, right, of_matrices[0], of_matrices[1]);
  if (map.has_left()) add(of_matrices[0], of_matrices[1]);
  const Value shaped = call("aten::reshape", of_matrices[0], warping.warp.shape());
  add(of_warp, to_dtype_of(shaped, warping.warp));
}

// _warp_perspective_slope(image, warp, motion, interpolation, ..., order_x, order_y)

inline void slope_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  add_slope_gradients(Warping(arguments, 1, true), arguments[2], upstream[0], gradients[0],
                      gradients[1], gradients[2]);
}

inline void slope_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments, 1, true);
  const Value &motion = arguments[2], height = motion.size(2), width = motion.size(3);
  if (!tangents[0].is_none()) results[0] = warping.of(tangents[0]).slope(motion);
  if (!tangents[2].is_none()) add(results[0], warping.slope(tangents[2]));
  for (int axis = 0; axis < 2 && !tangents[1].is_none(); ++axis) {
    const Value moved = warping.derivative(axis).slope_along(tangents[1], height, width);
    add(results[0], warping.result(warping.items(moved) * along(motion, axis)));
  }
}

// warp_perspective(image, warp, dsize, interpolation, ..., destination)

constexpr int kDestination = 7;

inline void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Warping warping(arguments, 1, false);
  const Value& image = arguments[0];
  const bool of_image = gradients[0].is_wanted(), of_warp = gradients[1].is_wanted();
  if (of_image || of_warp) {
    const Value of_both = warping.gradients(upstream[0], of_image, of_warp);
    if (of_image) gradients[0] = of_both[0];
    if (of_warp) gradients[1] = of_both[1];
  }
  if (gradients[kDestination].is_wanted())
    gradients[kDestination] = warping.of(zeros(image, image.shape())).linear_part(upstream[0]);
}

inline void jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments, 1, false);
  const Value &image = tangents[0], &warp = tangents[1], &destination = tangents[kDestination];
  const Value like = arguments[0];
  const bool has_size = arguments[2].length() == 2;
  const Value height = has_size ? arguments[2][0] : like.size(-2);
  const Value width = has_size ? arguments[2][1] : like.size(-1);
  if (!warp.is_none() && !warping.is_flat()) results[0] = warping.slope_along(warp, height, width);
  if (image.is_none() && destination.is_none()) return;
  // Without a transparent border there is no destination. Then only height and width are used.
  const Value& kept = arguments[kDestination];
  const Value zero = zeros(like, kept.is_none() ? Value::list(height, width) : kept.shape());
  const Warping moved = warping.of(image.is_none() ? zeros(like, like.shape()) : image);
  add(results[0], moved.linear_part(destination.is_none() ? zero : destination));
}

// _warp_perspective_backward(grad, image, warp, interpolation, ..., output_mask)

constexpr int kMask = 9;

inline void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &mask = arguments[kMask];
  const Warping warping(arguments + 1, 0, true);
  const bool of_grad = gradients[0].is_wanted();
  if (mask[0].item() && !upstream[0].is_none()) {
    const Warping moved = warping.of(upstream[0]);
    if (of_grad) add(gradients[0], moved.linear_part(zeros(grad, grad.shape())));
    if (gradients[2].is_wanted()) add(gradients[2], moved.warp_gradient(grad));
  }
  if (!mask[1].item() || upstream[1].is_none() || warping.is_flat()) return;
  if (of_grad) add(gradients[0], warping.slope_along(upstream[1], grad.size(-2), grad.size(-1)));
  add_gradients(warping, upstream[1], grad, gradients[1], gradients[2]);
}

inline void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value &grad = arguments[0], &mask = arguments[kMask];
  const Warping warping(arguments + 1, 0, true);
  const bool of_image = mask[0].item(), of_warp = mask[1].item();
  if (!tangents[0].is_none()) {
    const Value of_both = warping.gradients(tangents[0], of_image, of_warp);
    if (of_image) results[0] = of_both[0];
    if (of_warp) results[1] = of_both[1];
  }
  if (!tangents[1].is_none() && of_warp)
    add(results[1], warping.of(tangents[1]).warp_gradient(grad));
  // False marks a gradient that is not wanted, as in Value::is_wanted().
  if (!of_image) results[0] = false;
  if (!of_warp) results[1] = false;
  if (!tangents[2].is_none()) add_gradients(warping, tangents[2], grad, results[0], results[1]);
}

}  // namespace warp_derivatives

const Derivative kDerivativesOfWarp[] = {
    {"warp_perspective", warp_derivatives::vjp, warp_derivatives::jvp, "destination"}};

const Derivative kDerivativesOfDerivatives[] = {
    {"_warp_perspective_backward", warp_derivatives::backward_vjp, warp_derivatives::backward_jvp},
    {"_warp_perspective_slope", warp_derivatives::slope_vjp, warp_derivatives::slope_jvp},
    {"_warp_perspective_motion", warp_derivatives::motion_vjp, warp_derivatives::motion_jvp},
    {"_warp_perspective_motion_backward", warp_derivatives::motion_backward_vjp,
     warp_derivatives::motion_backward_jvp},
};

}  // namespace calcops::ops::warp_perspective
